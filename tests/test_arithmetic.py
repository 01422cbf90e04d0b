"""Single-rounding float32 arithmetic against libm and exact rationals."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from bnb_fsdp import arithmetic as f32

MIN_NORMAL = 2.0**-126
FLT_MAX = float(np.finfo(np.float32).max)

INTERESTING = (
    0.0, -0.0, 1.0, -1.0, 1 + 2.0**-23, 1 - 2.0**-24, 1 + 2.0**-12, -(1 + 2.0**-12), 3.0, 1 / 3, 2.0**-12,
    2.0**-24, -(2.0**-24), 2.0**-25, 2.0**-48, 2.0**-80, -(2.0**-80), 2.0**-63, 2.0**-64, MIN_NORMAL,
    -MIN_NORMAL, MIN_NORMAL * (1 + 2.0**-23), MIN_NORMAL / 2, 2.0**-149, 1e-38, 2.0**63, 2.0**64, -(2.0**64),
    2.0**127, FLT_MAX, -FLT_MAX, 2.0**103, math.inf, -math.inf, math.nan,
)  # fmt: skip


def single(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values, dtype=np.float64).astype(np.float32))


def bits(tensor: torch.Tensor) -> list[int]:
    """Bit patterns, all NaN alike."""
    return torch.where(tensor.isnan(), math.nan, tensor).contiguous().view(torch.int32).tolist()


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < MIN_NORMAL else x


def triples() -> list[tuple[float, float, float]]:
    rng = np.random.default_rng(0)
    cases = [
        tuple(float(x) for x in case) for case in itertools.product(single(INTERESTING).tolist(), repeat=3)
    ]
    # Cancellation: c close to -a*b, down to the last bits of the product.
    a, b = rng.standard_normal((2, 4000)).astype(np.float32)
    product = (a.astype(np.float64) * b.astype(np.float64)).astype(np.float32)
    cases += zip(a.tolist(), b.tolist(), (-product).tolist())
    cases += zip(a.tolist(), b.tolist(), np.nextafter(-product, np.float32(0)).tolist())
    # Ties: the product ends exactly half way between two floats and a far smaller addend decides.
    odd = (1 + 2.0**-12 * rng.integers(1, 2**12, 2000)).astype(np.float32)
    for addend in (0.0, 2.0**-60, -(2.0**-60), 2.0**-100):
        cases += [(x, 1 + 2.0**-12, addend) for x in odd.tolist()]
    # All exponents, so that sums overflow, underflow and align in every way.
    wide = (rng.standard_normal((3, 8000)) * 2.0 ** rng.integers(-80, 80, (3, 8000))).astype(np.float32)
    return cases + list(zip(*wide.tolist()))


def exact(a: float, b: float, c: float) -> float:
    """a*b+c of finite floats: rounded once to 24 bits with an unbounded exponent, then flushed."""
    total = Fraction(flushed(a)) * Fraction(flushed(b)) + Fraction(flushed(c))
    if total == 0:
        return flushed(a) * flushed(b) + flushed(c)  # IEEE's sign of zero
    unit = Fraction(2) ** (_exponent(total) - 23)
    rounded = round(total / unit) * unit  # Fraction rounds halves to even
    if abs(rounded) > Fraction(FLT_MAX):
        return math.copysign(math.inf, total)
    return flushed(float(rounded)) if abs(rounded) >= Fraction(MIN_NORMAL) else math.copysign(0.0, total)


def _exponent(x: Fraction) -> int:
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= abs(x) else exponent - 1


@pytest.fixture(scope="module")
def libm_fma() -> object:
    path = ctypes.util.find_library("m")
    if path is None:
        pytest.skip("no libm found")
    function = ctypes.CDLL(path).fmaf
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * 3
    return function


def test_fma_is_libms_fmaf_wherever_nothing_is_subnormal(libm_fma: object) -> None:
    cases = [case for case in triples() if all(x == flushed(x) or math.isnan(x) for x in case)]
    wanted = single([libm_fma(*case) for case in cases])  # type: ignore[operator]
    found = f32.fma(*(single(column) for column in zip(*cases)))
    keep = wanted.isnan() | (wanted == 0) | (wanted.abs() > MIN_NORMAL)
    assert keep.sum() > 50_000
    assert bits(found[keep]) == bits(wanted[keep])


def test_fma_is_the_exact_result_rounded_once_and_flushed() -> None:
    cases = [case for case in triples() if all(map(math.isfinite, case))]
    found = f32.fma(*(single(column) for column in zip(*cases)))
    wanted = single([exact(*case) for case in cases])
    assert bits(found) == bits(wanted)


@pytest.mark.parametrize("addend", [2.0**-80, -(2.0**-80)], ids=["above the tie", "below the tie"])
def test_fma_differs_from_rounding_twice_where_it_must(addend: float) -> None:
    a = single([1 + 2.0**-12])
    twice = (a.double() * a.double() + addend).float()
    once = f32.fma(a, a, addend)
    assert once.item() == (1 + 2.0**-11 + 2.0**-23 if addend > 0 else 1 + 2.0**-11)
    assert (twice != once).item() is (addend > 0)


def test_fma_takes_numbers_in_every_place() -> None:
    a, b, c = single([0.1]), single([0.7]), single([-0.07])
    wanted = f32.fma(a, b, c)
    assert f32.fma(a, b.item(), c.item()) == wanted
    assert f32.fma(a.item(), b, c.item()) == wanted
    assert f32.fma(a.item(), b.item(), c) == wanted


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (lambda a, b: f32.mul(a, b), lambda a, b: a * b),
        (lambda a, b: f32.add(a, b), lambda a, b: a + b),
        (lambda a, b: f32.sub(a, b), lambda a, b: a - b),
        (lambda a, b: f32.rcp(a), lambda a, b: np.float32(1) / a),
        (lambda a, b: f32.sqrt(a), lambda a, b: np.sqrt(a)),
    ],
    ids=["mul", "add", "sub", "rcp", "sqrt"],
)
def test_an_operation_is_ieee_with_inputs_and_outputs_flushed(function, reference) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(2)
    a, b = (rng.uniform(-2, 2, (2, 20_000)) * 2.0 ** rng.integers(-149, 126, (2, 20_000))).astype(np.float32)
    pairs = list(itertools.product(single(INTERESTING).tolist(), repeat=2))
    a = np.concatenate([a, np.array([x for x, _ in pairs], np.float32)])
    b = np.concatenate([b, np.array([y for _, y in pairs], np.float32)])
    with np.errstate(all="ignore"):
        wanted = reference(
            *(np.where(np.abs(x) < MIN_NORMAL, np.copysign(np.float32(0), x), x) for x in (a, b))
        )
    small = np.abs(wanted) < MIN_NORMAL
    wanted = torch.from_numpy(np.where(small, np.copysign(np.float32(0), wanted), wanted))
    keep = torch.from_numpy(
        np.abs(wanted.numpy()) != MIN_NORMAL
    )  # numpy rounds to it with a subnormal's precision
    found = function(torch.from_numpy(a), torch.from_numpy(b))
    assert bits(found[keep]) == bits(wanted[keep])


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0.1, float(np.float32(0.1))), (1e-40, 0.0), (-1e-40, 0.0), (1e39, math.inf), (-1e39, -math.inf),
        (math.inf, math.inf), (MIN_NORMAL, MIN_NORMAL), (MIN_NORMAL * (1 - 2.0**-24), 0.0),
    ],
    ids=["rounds", "flushes", "flushes -", "overflows", "overflows -", "inf", "keeps normal", "subnormal"],
)  # fmt: skip
def test_scalar_rounds_to_float32(value: float, wanted: float) -> None:
    assert f32.scalar(value) == wanted


def test_flush_keeps_the_sign_of_zero_and_everything_else() -> None:
    x = single([1e-40, -1e-40, MIN_NORMAL, 1.0, math.inf, math.nan])
    assert bits(f32.flush(x)) == bits(single([0.0, -0.0, MIN_NORMAL, 1.0, math.inf, math.nan]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_round_to_rounds_half_to_even(dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps
    x = torch.tensor([1.0, 1 + unit, 1 + 2 * unit]) + (0 if dtype == torch.float32 else unit / 2)
    wanted = x if dtype == torch.float32 else torch.tensor([1.0, 1 + 2 * unit, 1 + 2 * unit])
    assert f32.round_to(x, dtype).tolist() == wanted.tolist()
