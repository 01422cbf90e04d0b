"""Every algorithm as pure functions on float32 tensors: the oracle of all backends.

A rule states the update of one element given its gradient, parameter and states, twice: with 8-bit
states (`update8`) and with float32 states (`update32`). The two differ upstream in the association of
their fused multiply-adds and in where decay goes, and so here. The formulas are those of bitsandbytes
0.50.2's CUDA kernels with IEEE reciprocal and square root in place of the approximate ones; see
docs/parity.md. Nothing here knows of devices, shards or storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import arithmetic as f32
from . import codebook

States = tuple[Tensor, ...]


class Hyper(NamedTuple):
    """Hyperparameters of one parameter group, as plain floats; a rule reads those it has."""

    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    beta3: float = 0.0
    alpha: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0


Update = Callable[[Hyper, int, torch.dtype, Tensor, Tensor, States], tuple[Tensor, States]]
"""(hyper, step >= 1, parameter dtype, gradient, parameter, states) -> (parameter, states)."""


@dataclass(frozen=True)
class Rule:
    """One algorithm: its name, the codebook of each state, and its two updates."""

    name: str
    signed: tuple[bool, ...]
    update8: Update
    update32: Update
    state_names: tuple[str, ...] = ("state1", "state2")

    @property
    def states(self) -> tuple[str, ...]:
        """Keys of the states in ``optimizer.state[p]``."""
        return self.state_names[: len(self.signed)]


class _AdamScalars(NamedTuple):
    beta1: float
    beta2: float
    rest1: float
    rest2: float
    correction2: float
    eps: float
    step_size: float
    decay: float


def _decay(h: Hyper) -> float:
    """``1 - lr * weight_decay`` with one rounding; 1 without decay."""
    lr, weight_decay = f32.scalar(h.lr), f32.scalar(h.weight_decay)
    return f32.scalar(1.0 - lr * weight_decay) if weight_decay > 0 else 1.0


def _adam_scalars(h: Hyper, step: int) -> _AdamScalars:
    """Everything that depends on the step alone; bias corrections in double from float32 betas."""
    beta1, beta2, lr = f32.scalar(h.beta1), f32.scalar(h.beta2), f32.scalar(h.lr)
    correction1 = f32.scalar(1.0 - beta1**step)
    correction2 = f32.scalar(f32.scalar(1.0 - beta2**step) ** 0.5)
    step_size = f32.scalar(f32.scalar(correction2 * lr) * -f32.scalar(1.0 / correction1))
    return _AdamScalars(
        beta1, beta2, f32.scalar(1.0 - beta1), f32.scalar(1.0 - beta2),
        correction2, f32.scalar(h.eps), step_size, _decay(h),
    )  # fmt: skip


def _adam_parameter(k: _AdamScalars, dtype: torch.dtype, p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    denominator = f32.fma(k.correction2, k.eps, f32.sqrt(v))
    p = f32.round_to(f32.fma(k.step_size, f32.mul(m, f32.rcp(denominator)), p), dtype)
    return f32.round_to(f32.mul(p, k.decay), dtype)


def _adam8(h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States) -> tuple[Tensor, States]:
    k = _adam_scalars(h, step)
    g = f32.flush(g)
    m = f32.fma(g, k.rest1, f32.mul(s[0], k.beta1))
    if dtype == torch.float32:
        v = f32.fma(g, f32.mul(g, k.rest2), f32.mul(s[1], k.beta2))
    else:
        v = f32.fma(s[1], k.beta2, f32.mul(f32.mul(g, k.rest2), g))
    finite = torch.isfinite(g)
    zero = torch.zeros_like(m)
    m, v = torch.where(finite, m, zero), torch.where(finite, v, zero)
    return torch.where(finite, _adam_parameter(k, dtype, p, m, v), p), (m, v)


def _adam32(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    k = _adam_scalars(h, step)
    m = f32.fma(s[0], k.beta1, f32.mul(g, k.rest1))
    v = f32.fma(s[1], k.beta2, f32.mul(f32.mul(g, g), k.rest2))
    return _adam_parameter(k, dtype, p, m, v), (m, v)


def _sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; 0 for NaN."""
    return (x > 0).float() - (x < 0).float()


def _lion(
    h: Hyper, dtype: torch.dtype, g: Tensor, p: Tensor, s: Tensor, lr: float, fused_gradient: bool
) -> tuple[Tensor, States]:
    beta1, beta2 = f32.scalar(h.beta1), f32.scalar(h.beta2)

    def mix(beta: float) -> Tensor:
        rest = f32.scalar(1.0 - beta)
        if fused_gradient:
            return f32.fma(g, rest, f32.mul(s, beta))
        return f32.fma(s, beta, f32.mul(g, rest))

    p = f32.round_to(f32.mul(p, _decay(h)), dtype)
    p = f32.round_to(f32.sub(p, f32.mul(_sign(mix(beta1)), lr)), dtype)
    return p, (mix(beta2),)


def _lion8(h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States) -> tuple[Tensor, States]:
    lr = float(torch.tensor(f32.scalar(h.lr)).to(dtype))  # the kernel keeps lr in the parameter's dtype
    return _lion(h, dtype, f32.flush(g), p, s[0], lr, fused_gradient=True)


def _lion32(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    return _lion(h, dtype, g, p, s[0], f32.scalar(h.lr), fused_gradient=False)


ADAM = Rule("adam", signed=(True, False), update8=_adam8, update32=_adam32)
LION = Rule("lion", signed=(True,), update8=_lion8, update32=_lion32)

RULES = {rule.name: rule for rule in (ADAM, LION)}


def step32(rule: Rule, h: Hyper, step: int, g: Tensor, p: Tensor, states: States) -> tuple[Tensor, States]:
    """One step with float32 states. All tensors have one shape; returns the new parameter and states."""
    wide, states = rule.update32(h, step, p.dtype, g.float(), p.float(), states)
    return wide.to(p.dtype), states


def step8(
    rule: Rule, h: Hyper, step: int, g: Tensor, p: Tensor, codes: States, absmax: States
) -> tuple[Tensor, States, States]:
    """One step with 8-bit states of a flat tensor of n elements.

    ``codes`` are uint8 of n elements, ``absmax`` float32 of ceil(n / 256). Returns the new parameter,
    codes and scales. The lanes that fill the last block behave as upstream's: gradient and parameter
    zero, code 128 (signed) or 0, and they take part in the block's maximum.
    """
    n = p.numel()
    blocks = -(-n // codebook.BLOCK_SIZE)

    def rows(x: Tensor, fill: int) -> Tensor:
        padding = blocks * codebook.BLOCK_SIZE - n
        return torch.nn.functional.pad(x, (0, padding), value=fill).view(blocks, codebook.BLOCK_SIZE)

    values = tuple(
        codebook.dequantize(rows(code, 128 if signed else 0), scale, signed)
        for code, scale, signed in zip(codes, absmax, rule.signed)
    )
    wide, values = rule.update8(h, step, p.dtype, rows(g.float(), 0), rows(p.float(), 0), values)
    quantized = [codebook.quantize(value, signed) for value, signed in zip(values, rule.signed)]
    return (
        wide.flatten()[:n].to(p.dtype),
        tuple(code.flatten()[:n] for code, _ in quantized),
        tuple(scale for _, scale in quantized),
    )
