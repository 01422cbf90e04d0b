"""State of other packages, as this package's live state: blocks that move, floats that become codes and the reverse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import arithmetic as f32
from .. import codebook, sharding, state
from ..codebook import BLOCK_SIZE
from ..rules import Rule
from . import blocks

_CHUNK = 1 << 20  # elements; a multiple of the block size


class Piece(NamedTuple):
    """One state as another package has it: ``value`` of the parameter's shape, whole or a DTensor.

    ``scales`` (float32, flat): one for 256 consecutive elements of the whole contiguous tensor, if ``value`` are codes.
    """

    value: Tensor
    scales: Tensor | None


class Checked(NamedTuple):
    """A parameter's state that fits it; ``bits`` are those that it gets."""

    name: str
    step: float
    bits: int
    pieces: dict[str, Piece]

    @property
    def has_floats(self) -> bool:
        """Whether floats will be quantised."""
        return self.bits == 8 and any(piece.scales is None for piece in self.pieces.values())


def converted(
    rule: Rule, parameter: Tensor, found: Checked, share: bool = False
) -> tuple[dict[str, Any], int, int]:
    """Live state of ``parameter``, number of 8-bit blocks, and how many were quantised anew.

    It has memory of its own; with ``share``, tensors that need no change are taken as they are.
    """
    shard = sharding.local(parameter).detach()
    values: dict[str, Any] = {"step": torch.tensor(found.step, dtype=torch.float32)}
    total = requantized = 0
    for key, signed in zip(rule.states, rule.signed):
        piece = found.pieces[key]
        part = sharding.part(parameter, piece.value)
        dtype = torch.uint8 if found.bits == 8 else torch.float32
        if share and _is_fit(part, shard, dtype):
            target = part
        else:
            target = torch.empty_like(shard, dtype=dtype, requires_grad=False)
        values[key] = target
        if found.bits == 32:
            _to_float(parameter, shard, part, piece.scales, signed, target)
            continue
        absmax, moved = _to_codes(parameter, shard, part, piece.scales, signed, target)
        if share and piece.scales is not None and _has_own_blocks(parameter):
            absmax = piece.scales if _is_fit(piece.scales, absmax, torch.float32) else absmax
        values[state.absmax_key(key)] = absmax
        total, requantized = total + len(absmax), requantized + moved
    return values, total, requantized


def _is_fit(value: Tensor, like: Tensor, dtype: torch.dtype) -> bool:
    return (
        value.data_ptr() % 16 == 0  # what an allocation has, and vectorised kernels like
        and value.dtype == dtype
        and value.device == like.device
        and value.shape == like.shape
        and value.stride() == like.stride()
    )


def _has_own_blocks(parameter: Tensor) -> bool:
    """Whether the blocks of the live state are those of the whole contiguous tensor."""
    return not sharding.is_sharded(parameter) and parameter.is_contiguous()


def _to_float(
    parameter: Tensor, shard: Tensor, part: Tensor, scales: Tensor | None, signed: bool, target: Tensor
) -> None:
    if target is not part:
        if scales is None:
            target.copy_(part)
            return
        # The parts of a chunk's codes, as floats, are exact: they are looked up where they will lie.
        target.copy_(part)
        table = codebook.values(signed, shard.device)
        flat = codebook.flat(target)
        for start, index in _source_blocks(parameter, shard):
            some = flat[start : start + len(index)]
            codes = some.long()
            some.copy_(
                f32.mul(table[codes], scales.to(shard.device)[index]) + 0.0
            )  # no -0.0, as zero blocks have


def _to_codes(
    parameter: Tensor, shard: Tensor, part: Tensor, scales: Tensor | None, signed: bool, target: Tensor
) -> tuple[Tensor, int]:
    """Write the codes of ``part`` (floats, or codes with ``scales``) to ``target``; scales, and blocks quantised."""
    flat = codebook.flat(target)
    absmax = torch.zeros(state.blocks(flat.numel()), dtype=torch.float32, device=shard.device)
    if scales is None:
        _quantize(part, shard, signed, flat, absmax)
        return absmax, len(absmax)
    if target is not part:
        target.copy_(part)
    scales = scales.to(shard.device)
    if _has_own_blocks(parameter):
        return scales.clone(), 0
    moved = 0
    for start, index in _source_blocks(parameter, shard):
        codes = flat[start : start + len(index)]
        at = start // BLOCK_SIZE
        absmax[at : at + state.blocks(len(index))], count = blocks.regridded(codes, scales[index], signed)
        moved += count
    return absmax, moved


def _quantize(part: Tensor, shard: Tensor, signed: bool, flat: Tensor, absmax: Tensor) -> None:
    """Quantise ``part`` in the memory order of ``shard``."""
    source = part.permute(sharding.memory_order(shard)).reshape(-1)  # a view unless the orders differ
    for start in range(0, flat.numel(), _CHUNK):
        some = source[start : start + _CHUNK].to(shard.device, torch.float32)
        rows = blocks.in_rows(some)
        codes, scales = codebook.quantize(rows, signed)
        flat[start : start + len(some)] = codes.reshape(-1)[: len(some)]
        absmax[start // BLOCK_SIZE : start // BLOCK_SIZE + len(scales)] = scales


def _source_blocks(parameter: Tensor, shard: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(start, block) chunk by chunk: for the elements of ``shard`` in memory order, the number (int64) of the block of
    the whole contiguous tensor that each lies in."""
    _, offset = sharding.local_box(parameter)
    strides = [math.prod(parameter.shape[dim + 1 :]) for dim in range(parameter.dim())]
    base = sum(start * stride for start, stride in zip(offset, strides))
    for start in range(0, shard.numel(), _CHUNK):
        place = torch.arange(start, min(start + _CHUNK, shard.numel()), device=shard.device)
        index = torch.full_like(place, base)
        for dim in reversed(sharding.memory_order(shard)):
            index += place % shard.shape[dim] * strides[dim]
            place = place // shard.shape[dim]
        yield start, index // BLOCK_SIZE
