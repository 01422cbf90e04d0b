"""Float32 arithmetic, one rounding an operation, subnormal numbers flushed to zero.

torch has no fused multiply-add and no portable flush-to-zero, and bitsandbytes' kernels are built with
both. These functions give the exact result of each float32 instruction (round to nearest even, inputs
and outputs flushed) by way of float64, so they are an oracle for native code, not a fast path.
Arguments are float32 tensors or Python floats that float32 represents; results are float32 tensors.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

_SMALLEST_NORMAL = 2.0**-126
# Rounded to 24 bits with an unbounded exponent, anything below this is still subnormal.
_FLUSH_BELOW = _SMALLEST_NORMAL * (1 - 2.0**-25)

Operand = Tensor | float


def scalar(x: float) -> float:
    """``x`` rounded to float32, subnormal results flushed to zero."""
    if abs(x) < _FLUSH_BELOW:
        return 0.0
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")


def flush(x: Tensor) -> Tensor:
    """``x`` with float32's subnormal numbers replaced by zero of the same sign."""
    return torch.where(x.abs() < _SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), x)


def _wide(x: Operand) -> Tensor:
    wide = x.to(torch.float64) if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
    return flush(wide)


def _narrow(x: Tensor) -> Tensor:
    zero = torch.copysign(torch.zeros_like(x), x)
    return torch.where(x.abs() < _FLUSH_BELOW, zero, x).to(torch.float32)


def mul(a: Tensor, b: Operand) -> Tensor:
    """``a * b``."""
    return _narrow(_wide(a) * _wide(b))


def add(a: Tensor, b: Operand) -> Tensor:
    """``a + b``."""
    return _narrow(_wide(a) + _wide(b))


def sub(a: Tensor, b: Operand) -> Tensor:
    """``a - b``."""
    return _narrow(_wide(a) - _wide(b))


def rcp(a: Tensor) -> Tensor:
    """``1 / a``."""
    return _narrow(1.0 / _wide(a))


def sqrt(a: Tensor) -> Tensor:
    """Square root of ``a``."""
    return _narrow(_wide(a).sqrt())


def fma(a: Operand, b: Operand, c: Operand) -> Tensor:
    """``a * b + c`` with a single rounding; at least one operand is a tensor.

    The product of two float32 numbers is exact in float64, the sum is not. It is rounded to odd
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding
    to odd", IEEE TC 2008), after which the rounding to float32 is that of the exact sum.
    """
    product, addend = _wide(a) * _wide(b), _wide(c)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.contiguous().view(torch.int64)
    inexact = torch.isfinite(total) & torch.isfinite(error) & (error != 0) & (bits % 2 == 0)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where(inexact, bits + away, bits).view(torch.float64)
    return _narrow(odd)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` (float32) rounded to ``dtype``, as float32."""
    return x.to(dtype).to(torch.float32)
