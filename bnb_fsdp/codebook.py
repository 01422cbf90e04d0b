"""The dynamic 8-bit codebooks and block-wise (de)quantisation in torch.

Both maps are bit-equal to ``bitsandbytes.functional.create_dynamic_map(signed)`` (Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861, section 2). They are
rebuilt here from IEEE float32 arithmetic alone, so that no change in ``torch.linspace`` can move a code.
"""

from __future__ import annotations

import struct
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from . import arithmetic as f32

BLOCK_SIZE = 256
"""Elements that share one scale (``absmax``)."""

_NEGATIVE_MAX = -torch.finfo(torch.float32).max


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, of which blocks are made; shares storage."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _round(x: float) -> float:
    """Round a double to the nearest float32."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def _linspace(count: int) -> list[float]:
    """``torch.linspace(0.1, 1, count)`` in float32: from both ends, one rounding a point."""
    start, end = _round(0.1), 1.0
    step = _round(_round(end - start) / (count - 1))
    return [
        _round(start + step * k) if k < count // 2 else _round(end - step * (count - 1 - k))
        for k in range(count)
    ]


@cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """The 256 float32 values of the dynamic map, ascending.

    Seven decades, 1e-6 to 1; decade ``i`` holds ``2**i`` magnitudes a sign (signed) or ``2**(i+1)``
    (unsigned), plus 0 and 1. The signed map has no -1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        points = _linspace((2**decade if signed else 2 ** (decade + 1)) + 1)
        scale = _round(10.0 ** (decade - 6))
        for low, high in pairwise(points):
            value = _round(scale * _round(_round(low + high) / 2))
            values += [value, -value] if signed else [value]
    return tuple(sorted(values))


@cache
def _bounds(signed: bool) -> tuple[float, ...]:
    """Smallest float32 that gets each code above 0: nearest value, exact ties to the even code."""
    values = torch.tensor(dynamic_map(signed), dtype=torch.float32)
    thresholds = (values[:-1] + values[1:]) * 0.5
    above = torch.nextafter(thresholds, torch.tensor(torch.inf))
    even = torch.arange(255) % 2 == 0  # t_k lies between k and k+1: an even k keeps the tie
    return tuple(torch.where(even, above, thresholds).tolist())


@cache
def _on_device(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(dynamic_map(signed), dtype=torch.float32, device=device),
        torch.tensor(_bounds(signed), dtype=torch.float32, device=device),
    )


def values(signed: bool, device: torch.device) -> Tensor:
    """The map (float32, ``(256,)``) on ``device``."""
    return _on_device(signed, device)[0]


def nearest_code(x: Tensor, signed: bool) -> Tensor:
    """Code (uint8) of the map value nearest to each ``x`` (float32); ties to the even code, NaN to 0."""
    _, bounds = _on_device(signed, x.device)
    codes = torch.bucketize(x, bounds, right=True)
    return torch.where(torch.isnan(x), 0, codes).to(torch.uint8)


def dequantize(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Values (float32) of ``codes`` (uint8, ``(blocks, 256)``) scaled by ``absmax`` (float32, ``(blocks,)``)."""
    values, _ = _on_device(signed, codes.device)
    return f32.mul(values[codes.long()], absmax[:, None])


def block_absmax(values: Tensor) -> Tensor:
    """Largest magnitude (float32, ``(blocks,)``) of each row; NaN is left out, as CUDA's ``fmaxf`` does.

    A row of NaN alone has no maximum: it yields ``-FLT_MAX``, bitsandbytes' start value.
    """
    magnitude = torch.where(torch.isnan(values), _NEGATIVE_MAX, values.abs())
    return magnitude.amax(dim=1) if values.numel() else values.new_empty(values.shape[0])


def quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (uint8, ``(blocks, 256)``) and scales (float32, ``(blocks,)``) of ``values`` (float32).

    A signed state keeps its sign: where the code's value has another sign bit than the state, the code
    moves one step towards the state's sign (modulo 256). So a tiny negative value becomes code 126, not
    127 (zero), and a block of zeros becomes code 255 with scale 0: bitsandbytes' CUDA kernels do the same.
    """
    absmax = block_absmax(values)
    return encode(values, f32.mul(values, f32.rcp(absmax)[:, None]), signed), absmax


def encode(values: Tensor, scaled: Tensor, signed: bool) -> Tensor:
    """Codes (uint8) of ``values`` (float32), which divided by their blocks' scales are ``scaled``."""
    codes = nearest_code(scaled, signed)
    if signed:
        table = _on_device(True, values.device)[0]
        # CUDA's NaN is positive; a NaN of an x86 FPU is negative: the rule is the former's.
        negative = torch.signbit(values) & ~torch.isnan(values)
        wrong = torch.signbit(table[codes.long()]) != negative
        shift = torch.where(values > 0, 1, 255).to(torch.uint8)
        codes = torch.where(wrong, codes + shift, codes)
    return codes
