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
    skip_zeros: bool = False
    update_scale: float = 1.0  # LAMB and LARS: a factor of the update, weight decay apart
    rate: Tensor | None = None  # the learning rate in device memory, in place of lr: see `read_rate`
    published: bool = False  # LAMB and LARS: the papers' formulas, where the scale is a factor of lr


def read_rate(hyper: Hyper) -> Hyper:
    """``hyper`` with its learning rate as a number; waits for the device if it is in device memory."""
    return hyper if hyper.rate is None else hyper._replace(lr=float(hyper.rate), rate=None)


Update = Callable[[Hyper, int, torch.dtype, Tensor, Tensor, States], tuple[Tensor, States]]
"""(hyper, step >= 1, parameter dtype, gradient, parameter, states) -> (parameter, states)."""


def _as_it_is(h: Hyper, dtype: torch.dtype, g: Tensor, p: Tensor) -> Tensor:
    return g


@dataclass(frozen=True)
class Rule:
    """One algorithm: its name, the codebook of each state, its two updates, and what belongs to them.

    ``skips_zeros`` are the bits for which ``Hyper.skip_zeros`` acts. ``gradient32`` gives the gradient that
    ``update32`` takes, and that is compared with zero. ``direction`` is for LAMB and LARS: see `direction32`.
    """

    name: str
    signed: tuple[bool, ...]
    update8: Update
    update32: Update
    skips_zeros: tuple[int, ...] = (8, 32)
    gradient32: Callable[[Hyper, torch.dtype, Tensor, Tensor], Tensor] = _as_it_is
    direction: Callable[[Hyper, int, Tensor, Tensor, States], Tensor] | None = None
    state_names: tuple[str, ...] = ("state1", "state2", "state3")

    @property
    def states(self) -> tuple[str, ...]:
        """Keys of the states in ``optimizer.state[p]``."""
        return self.state_names[: len(self.signed)]


def _decay(h: Hyper, scale: float = 1.0) -> float:
    """``1 - scale * lr * weight_decay`` with one rounding more than a scale takes; 1 without decay."""
    lr, weight_decay = f32.scalar(f32.scalar(h.lr) * f32.scalar(scale)), f32.scalar(h.weight_decay)
    return f32.scalar(1.0 - lr * weight_decay) if weight_decay > 0 else 1.0


def _rest(beta: float) -> float:
    """``1 - beta``."""
    return f32.scalar(1.0 - f32.scalar(beta))


def _correction(beta: float, step: int) -> float:
    """``1 - beta**step``, in double from the float32 beta, rounded once."""
    return f32.scalar(1.0 - f32.scalar(beta) ** step)


def _rcp(x: float) -> float:
    return f32.scalar(1.0 / x) if x != 0 else float("inf")


def _first_moment8(g: Tensor, s: Tensor, beta: float) -> Tensor:
    return f32.fma(g, _rest(beta), f32.mul(s, f32.scalar(beta)))


def _first_moment32(g: Tensor, s: Tensor, beta: float) -> Tensor:
    return f32.fma(s, f32.scalar(beta), f32.mul(g, _rest(beta)))


def _second_moment8(dtype: torch.dtype, g: Tensor, s: Tensor, beta: float) -> Tensor:
    """Adam's and AdEMAMix's: the association depends on the parameter's dtype."""
    if dtype == torch.float32:
        return f32.fma(g, f32.mul(g, _rest(beta)), f32.mul(s, f32.scalar(beta)))
    return f32.fma(s, f32.scalar(beta), f32.mul(f32.mul(g, _rest(beta)), g))


def _where_finite(
    g: Tensor, p: Tensor, s: States, updated: Callable[[States], Tensor]
) -> tuple[Tensor, States]:
    """A non-finite gradient element resets its states and leaves its parameter alone."""
    finite = torch.isfinite(g)
    s = tuple(torch.where(finite, x, torch.zeros_like(x)) for x in s)
    return torch.where(finite, updated(s), p), s


# --- Adam, AdamW, LAMB


def _adam_parameter(h: Hyper, step: int, dtype: torch.dtype, p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    correction2 = f32.scalar(_correction(h.beta2, step) ** 0.5)
    step_size = f32.scalar(f32.scalar(correction2 * f32.scalar(h.lr)) * -_rcp(_correction(h.beta1, step)))
    step_size = f32.scalar(step_size * f32.scalar(h.update_scale))
    decay = _decay(h)
    if (
        h.published
    ):  # the scale is one of the decay, too; by the division it does not matter that decay comes last
        decay = _decay(h, h.update_scale)
        step_size = f32.scalar(step_size * _rcp(decay))
    denominator = f32.fma(correction2, f32.scalar(h.eps), f32.sqrt(v))
    p = f32.round_to(f32.fma(step_size, f32.mul(m, f32.rcp(denominator)), p), dtype)
    return f32.round_to(f32.mul(p, decay), dtype)


def _adam8(h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States) -> tuple[Tensor, States]:
    s = (_first_moment8(g, s[0], h.beta1), _second_moment8(dtype, g, s[1], h.beta2))
    return _where_finite(g, p, s, lambda s: _adam_parameter(h, step, dtype, p, *s))


def _adam32(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    m = _first_moment32(g, s[0], h.beta1)
    v = f32.fma(s[1], f32.scalar(h.beta2), f32.mul(f32.mul(g, g), _rest(h.beta2)))
    return _adam_parameter(h, step, dtype, p, m, v), (m, v)


def _adam_direction(h: Hyper, step: int, g: Tensor, p: Tensor, s: States) -> Tensor:
    m = f32.mul(s[0], _rcp(_correction(h.beta1, step)))
    v = f32.mul(s[1], _rcp(_correction(h.beta2, step)))
    u = f32.mul(m, f32.rcp(f32.add(f32.sqrt(v), f32.scalar(h.eps))))
    return f32.fma(p, f32.scalar(h.weight_decay), u) if h.published and h.weight_decay > 0 else u


# --- AdEMAMix: fast average, second moment, slow average; beta3 and alpha come scheduled


def _ademamix_parameter(
    h: Hyper, step: int, dtype: torch.dtype, p: Tensor, m1: Tensor, nu: Tensor, m2: Tensor
) -> Tensor:
    inverse1 = _rcp(_correction(h.beta1, step))
    inverse2 = _rcp(f32.scalar(_correction(h.beta2, step) ** 0.5))
    denominator = f32.fma(f32.sqrt(nu), inverse2, f32.scalar(h.eps))
    numerator = f32.fma(m2, f32.scalar(h.alpha), f32.mul(m1, inverse1))
    p = f32.round_to(f32.fma(-f32.mul(numerator, f32.rcp(denominator)), f32.scalar(h.lr), p), dtype)
    return f32.round_to(f32.mul(p, _decay(h)), dtype)


def _ademamix8(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    s = (
        _first_moment8(g, s[0], h.beta1),
        _second_moment8(dtype, g, s[1], h.beta2),
        _first_moment8(g, s[2], h.beta3),
    )
    return _where_finite(g, p, s, lambda s: _ademamix_parameter(h, step, dtype, p, *s))


def _ademamix32(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    nu = f32.fma(s[1], f32.scalar(h.beta2), f32.mul(f32.mul(g, _rest(h.beta2)), g))
    s = (_first_moment32(g, s[0], h.beta1), nu, _first_moment32(g, s[2], h.beta3))
    return _ademamix_parameter(h, step, dtype, p, *s), s


# --- Lion


def _sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; 0 for NaN."""
    return (x > 0).float() - (x < 0).float()


def _lion8(h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States) -> tuple[Tensor, States]:
    lr = float(torch.tensor(f32.scalar(h.lr)).to(dtype))  # the kernel keeps lr in the parameter's dtype
    change = f32.mul(_sign(_first_moment8(g, s[0], h.beta1)), lr)
    p = f32.round_to(f32.mul(p, _decay(h)), dtype)
    return f32.round_to(f32.sub(p, change), dtype), (_first_moment8(g, s[0], h.beta2),)


def _lion32(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    change = f32.mul(_sign(_first_moment32(g, s[0], h.beta1)), f32.scalar(h.lr))
    if dtype == torch.float32 and not h.skip_zeros:
        p = f32.fma(
            p, _decay(h), -change
        )  # upstream's code for skip_zeros rounds twice, as for 16-bit dtypes
    else:
        p = f32.round_to(f32.mul(p, _decay(h)), dtype)
        p = f32.round_to(f32.sub(p, change), dtype)
    return p, (_first_moment32(g, s[0], h.beta2),)


# --- Rules whose weight decay is added to the gradient


def _decayed8(h: Hyper, g: Tensor, p: Tensor) -> Tensor:
    weight_decay = f32.scalar(h.weight_decay)
    return f32.fma(p, weight_decay, g) if weight_decay > 0 else f32.flush(g)


def _decayed32(h: Hyper, dtype: torch.dtype, g: Tensor, p: Tensor) -> Tensor:
    """Kept in the parameter's dtype; in float32 upstream fuses every fourth element's sum otherwise.

    See docs/upstream-arithmetic.md, momentum with 32-bit states.
    """
    weight_decay = f32.scalar(h.weight_decay)
    if weight_decay <= 0:
        return f32.flush(g)
    fused = f32.round_to(f32.fma(p, weight_decay, g), dtype)
    if dtype != torch.float32:
        return fused
    fourth = (torch.arange(g.numel(), device=g.device) % 4 == 0).view(g.shape)
    return torch.where(fourth, fused, f32.add(g, f32.mul(p, weight_decay)))


def _momentum(h: Hyper, step: int, g: Tensor, s: Tensor) -> Tensor:
    """The first step takes the gradient as it is, without looking at the state."""
    return g if step == 1 else f32.fma(s, f32.scalar(h.beta1), g)


def _momentum8(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    scaled_lr = f32.scalar(f32.scalar(h.lr) * f32.scalar(h.update_scale))
    if h.published:
        m = _momentum(h, step, f32.mul(_decayed8(h, g, p), scaled_lr), s[0])
        return f32.round_to(f32.sub(p, m), dtype), (m,)
    m = _momentum(h, step, _decayed8(h, g, p), s[0])
    return f32.round_to(f32.fma(-m, scaled_lr, p), dtype), (m,)


def _momentum32(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    if h.published:  # LARS: what enters the momentum has its local learning rate in it
        scaled_lr = f32.scalar(f32.scalar(h.lr) * f32.scalar(h.update_scale))
        m = _momentum(h, step, f32.mul(g, scaled_lr), s[0])
        return f32.round_to(f32.sub(p, m), dtype), (m,)
    m = _momentum(h, step, f32.flush(g), s[0])
    change = f32.mul(m, f32.scalar(h.lr))
    return f32.round_to(f32.fma(change, -f32.scalar(h.update_scale), p), dtype), (m,)


def _momentum_direction(h: Hyper, step: int, g: Tensor, p: Tensor, s: States) -> Tensor:
    return f32.flush(g) if h.published else s[0]


def _quotient(h: Hyper, g: Tensor, v: Tensor) -> Tensor:
    return f32.mul(g, f32.rcp(f32.add(f32.sqrt(v), f32.scalar(h.eps))))


def _rmsprop8(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    decayed = _decayed8(h, g, p)
    v = f32.fma(f32.mul(decayed, decayed), _rest(h.beta1), f32.mul(s[0], f32.scalar(h.beta1)))
    # Upstream divides the gradient without its decay.
    return f32.round_to(f32.fma(-_quotient(h, g, v), f32.scalar(h.lr), p), dtype), (v,)


def _rmsprop32(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    v = f32.fma(s[0], f32.scalar(h.beta1), f32.mul(f32.mul(g, _rest(h.beta1)), g))
    return f32.round_to(f32.sub(p, f32.mul(_quotient(h, g, v), f32.scalar(h.lr))), dtype), (v,)


def _adagrad8(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    decayed = _decayed8(h, g, p)
    v = f32.fma(decayed, decayed, s[0])
    # Upstream divides the gradient without its decay.
    return f32.round_to(f32.fma(-_quotient(h, g, v), f32.scalar(h.lr), p), dtype), (v,)


def _adagrad32(
    h: Hyper, step: int, dtype: torch.dtype, g: Tensor, p: Tensor, s: States
) -> tuple[Tensor, States]:
    v = f32.fma(g, g, s[0])
    return f32.round_to(f32.fma(-_quotient(h, g, v), f32.scalar(h.lr), p), dtype), (v,)


ADAM = Rule("adam", (True, False), _adam8, _adam32, skips_zeros=(32,), direction=_adam_direction)
ADEMAMIX = Rule("ademamix", (True, False, True), _ademamix8, _ademamix32, skips_zeros=())
LION = Rule("lion", (True,), _lion8, _lion32)
MOMENTUM = Rule(
    "momentum", (True,), _momentum8, _momentum32, gradient32=_decayed32, direction=_momentum_direction
)
# Their second moment is never negative; upstream keeps it in the signed map all the same.
RMSPROP = Rule("rmsprop", (True,), _rmsprop8, _rmsprop32, gradient32=_decayed32)
ADAGRAD = Rule("adagrad", (True,), _adagrad8, _adagrad32, gradient32=_decayed32)

RULES = {rule.name: rule for rule in (ADAM, ADEMAMIX, LION, MOMENTUM, RMSPROP, ADAGRAD)}


def _keep_zeros(
    rule: Rule, h: Hyper, bits: int, g: Tensor, old: tuple[Tensor, ...], new: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """With ``skip_zeros``, parameter and states of elements whose gradient is zero are the old ones."""
    if not h.skip_zeros or bits not in rule.skips_zeros:
        return new
    zero = f32.flush(g) == 0
    return tuple(torch.where(zero, before, after) for before, after in zip(old, new))


def step32(rule: Rule, h: Hyper, step: int, g: Tensor, p: Tensor, states: States) -> tuple[Tensor, States]:
    """One step with float32 states. All tensors have one shape; returns the new parameter and states.

    A part of a tensor may be stepped alone if it begins at a multiple of four elements.
    """
    old = (p.float(), *states)
    g = rule.gradient32(h, p.dtype, g.float(), old[0])
    wide, updated = rule.update32(h, step, p.dtype, g, old[0], states)
    wide, *kept = _keep_zeros(rule, h, 32, g, old, (wide, *updated))
    return wide.to(p.dtype), tuple(kept)


def _rows(x: Tensor, fill: int) -> Tensor:
    """``x`` as rows of one block each, ``fill`` behind its end."""
    padding = -x.numel() % codebook.BLOCK_SIZE
    return torch.nn.functional.pad(x, (0, padding), value=fill).view(-1, codebook.BLOCK_SIZE)


def _values(rule: Rule, codes: States, absmax: States) -> States:
    """Dequantised states, in rows. The lanes that fill the last block have upstream's codes."""
    return tuple(
        codebook.dequantize(_rows(code, 128 if signed else 0), scale, signed)
        for code, scale, signed in zip(codes, absmax, rule.signed)
    )


def step8(
    rule: Rule, h: Hyper, step: int, g: Tensor, p: Tensor, codes: States, absmax: States
) -> tuple[Tensor, States, States]:
    """One step with 8-bit states of a flat tensor of n elements.

    ``codes`` are uint8 of n elements, ``absmax`` float32 of ceil(n / 256). Returns the new parameter,
    codes and scales. The lanes that fill the last block behave as upstream's: gradient and parameter
    zero, code 128 (signed) or 0, and they take part in the block's maximum.
    """
    n = p.numel()
    gradient, old = _rows(g.float(), 0), (_rows(p.float(), 0), *_values(rule, codes, absmax))
    wide, values = rule.update8(h, step, p.dtype, gradient, old[0], old[1:])
    wide, *kept = _keep_zeros(rule, h, 8, gradient, old, (wide, *values))
    quantized = [codebook.quantize(value, signed) for value, signed in zip(kept, rule.signed)]
    return (
        wide.flatten()[:n].to(p.dtype),
        tuple(code.flatten()[:n] for code, _ in quantized),
        tuple(scale for _, scale in quantized),
    )


def direction32(rule: Rule, h: Hyper, step: int, g: Tensor, p: Tensor, states: States) -> Tensor:
    """The u whose squares sum to the squared norm that LAMB (adam) and LARS (momentum) scale by.

    ``states`` are those before the step. As upstream it is the update without weight decay; ``Hyper.published``: LAMB's
    update with it, LARS' gradient. float32 of g's shape.
    """
    assert rule.direction is not None, rule.name
    plain, g, p = h._replace(weight_decay=0.0, published=False), g.float(), p.float()
    _, updated = rule.update32(plain, step, torch.float32, g, torch.zeros_like(g), states)
    return rule.direction(h, step, g, p, updated)


def direction8(
    rule: Rule, h: Hyper, step: int, g: Tensor, p: Tensor, codes: States, absmax: States
) -> Tensor:
    """`direction32` with 8-bit states, of a flat tensor."""
    assert rule.direction is not None, rule.name
    plain, gradient = h._replace(weight_decay=0.0, published=False), _rows(g.float(), 0)
    values = _values(rule, codes, absmax)
    _, updated = rule.update8(plain, step, p.dtype, gradient, torch.zeros_like(gradient), values)
    return rule.direction(h, step, gradient, _rows(p.float(), 0), updated).flatten()[: g.numel()]
