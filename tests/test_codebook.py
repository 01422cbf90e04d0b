"""The dynamic maps and block quantisation against bitsandbytes, brute force and the kernel's own search."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from bnb_fsdp import codebook

FLT_MAX = float(np.finfo(np.float32).max)
MIN_NORMAL = float(np.finfo(np.float32).tiny)

both_maps = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def table(signed: bool) -> np.ndarray:
    return np.array(codebook.dynamic_map(signed), dtype=np.float32)


def thresholds(signed: bool) -> np.ndarray:
    values = table(signed)
    return (values[:-1] + values[1:]) * np.float32(0.5)


def probes(signed: bool) -> np.ndarray:
    """Every code and midpoint with neighbours up to 2 ulp away, random and special values."""
    rng = np.random.default_rng(0)
    edges = np.concatenate([table(signed), thresholds(signed)])
    near = [edges]
    for direction in (np.float32(-np.inf), np.float32(np.inf)):
        first = np.nextafter(edges, direction)
        near += [first, np.nextafter(first, direction)]
    random = rng.uniform(-1.2, 1.2, 20_000).astype(np.float32)
    tiny = (rng.standard_normal(5_000) * 10.0 ** rng.uniform(-8, 0, 5_000)).astype(np.float32)
    special = np.array(
        [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, np.inf, -np.inf, FLT_MAX, -FLT_MAX, 1e-45], np.float32
    )
    return np.concatenate([*near, random, tiny, special])


def search(x: np.ndarray, signed: bool) -> np.ndarray:
    """``quantize_2D`` of bitsandbytes' kernels, statement by statement: quadrants first, then bisection."""
    code = table(signed)
    quadrants = np.array([code[63], code[127], code[191]], np.float32)
    pivot = np.full(x.shape, 127)
    lower_pivot, upper_pivot = np.zeros_like(pivot), np.full_like(pivot, 255)
    lower = np.full(x.shape, -1.0 if signed else 0.0, np.float32)
    upper = np.ones(x.shape, np.float32)
    val = np.full(x.shape, quadrants[1])
    local_pivot = np.ones_like(pivot)
    for i in (64, 32, 16, 8, 4, 2, 1):
        right = x > val
        lower, lower_pivot = np.where(right, val, lower), np.where(right, pivot, lower_pivot)
        upper, upper_pivot = np.where(right, upper, val), np.where(right, upper_pivot, pivot)
        pivot = np.where(right, pivot + i, pivot - i)
        if i == 64:
            local_pivot = np.where(right, local_pivot + 1, local_pivot - 1)
            val = quadrants[local_pivot]
        else:
            val = code[pivot]
    half = np.float32(0.5)
    above = np.where(x > (upper + val) * half, upper_pivot, pivot)
    below = np.where(x < (lower + val) * half, lower_pivot, pivot)
    return np.where(x > val, above, below)


def codes_of(x: np.ndarray, signed: bool) -> np.ndarray:
    return codebook.nearest_code(torch.from_numpy(x), signed).numpy().astype(np.int64)


@both_maps
def test_map_is_bit_equal_to_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed).to(torch.float32).numpy()
    assert table(signed).tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("signed", "digest"),
    [(True, "e732639a65f497b4"), (False, "305f002cc11278fb")],
    ids=["signed", "unsigned"],
)
def test_map_has_the_recorded_digest(signed: bool, digest: str) -> None:
    assert hashlib.sha256(table(signed).tobytes()).hexdigest()[:16] == digest


@both_maps
def test_map_is_256_distinct_ascending_values(signed: bool) -> None:
    values = table(signed)
    assert values.shape == (256,)
    assert (np.diff(values) > 0).all()
    assert values[127 if signed else 0] == 0
    assert values[255] == 1
    assert (-1.0 in values) is False


@both_maps
def test_nearest_code_is_the_kernels_binary_search(signed: bool) -> None:
    x = probes(signed)
    np.testing.assert_array_equal(codes_of(x, signed), search(x, signed))


@both_maps
def test_nearest_code_is_nearest_in_exact_arithmetic(signed: bool) -> None:
    x = probes(signed)
    # A float32 next to a rounded midpoint lies on the same side of the exact one; midpoints: next test.
    x = x[(np.abs(x) < 100) & ~np.isin(x, thresholds(signed))]  # float64 still sees differences there
    distance = np.abs(x.astype(np.float64)[:, None] - table(signed).astype(np.float64)[None, :])
    np.testing.assert_array_equal(codes_of(x, signed), distance.argmin(axis=1))


@both_maps
def test_a_midpoint_goes_to_the_even_code(signed: bool) -> None:
    lower = np.arange(255)
    np.testing.assert_array_equal(
        codes_of(thresholds(signed), signed), np.where(lower % 2 == 0, lower, lower + 1)
    )


@both_maps
def test_every_map_value_has_its_own_code(signed: bool) -> None:
    np.testing.assert_array_equal(codes_of(table(signed), signed), np.arange(256))


@pytest.mark.parametrize(
    ("value", "signed_code", "unsigned_code"),
    [
        (math.nan, 0, 0), (math.inf, 255, 255), (-math.inf, 0, 0), (0.0, 127, 0), (-0.0, 127, 0),
        (7.0, 255, 255),
    ],
    ids=["nan", "inf", "-inf", "zero", "negative zero", "above one"],
)  # fmt: skip
def test_special_values_have_the_kernels_codes(value: float, signed_code: int, unsigned_code: int) -> None:
    x = np.array([value], np.float32)
    assert codes_of(x, True).item() == signed_code == search(x, True).item()
    assert codes_of(x, False).item() == unsigned_code == search(x, False).item()


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(np.float32(0), x), x).astype(np.float32)


def model_of_a_block(s: np.ndarray, signed: bool) -> tuple[np.ndarray, np.float32]:
    """The kernel's quantisation of one block, lane by lane in numpy, with an exact reciprocal."""
    absmax = np.float32(-FLT_MAX)
    for value in np.abs(s):
        absmax = absmax if np.isnan(value) else max(absmax, value)
    with np.errstate(all="ignore"):
        x = flush(flush(s) * flush(np.float32(1) / flush(absmax)))
    codes = search(x, signed)
    if signed:
        for lane, value in enumerate(s):
            negative = bool(np.signbit(value)) and not np.isnan(value)
            if bool(np.signbit(table(True)[codes[lane]])) != negative:
                codes[lane] = (codes[lane] + (1 if value > 0 else -1)) % 256
    return codes, absmax


def blocks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    normal = rng.standard_normal(256).astype(np.float32)
    made = {"normal": normal, "tiny": normal * np.float32(1e-30), "huge": normal * np.float32(1e37)}
    made["decades"] = (normal * 10.0 ** rng.uniform(-9, 0, 256)).astype(np.float32)
    made["reciprocal flushed"] = np.where(np.arange(256) == 3, np.float32(2.0**127), normal)
    made["zeros"] = np.zeros(256, np.float32)
    made["negative zeros"] = -made["zeros"]
    made["mixed zeros"] = np.where(np.arange(256) % 2, made["negative zeros"], normal)
    made["one nan"] = np.where(np.arange(256) == 7, np.float32(np.nan), normal)
    made["all nan"] = np.full(256, np.nan, np.float32)
    made["one inf"] = np.where(np.arange(256) == 7, np.float32(np.inf), normal)
    made["both infs"] = np.where(np.arange(256) == 9, np.float32(-np.inf), made["one inf"])
    return made


@both_maps
@pytest.mark.parametrize("name", list(blocks()))
def test_quantize_follows_the_kernel_lane_by_lane(name: str, signed: bool) -> None:
    block = blocks()[name] if signed else np.abs(blocks()[name])
    wanted, wanted_scale = model_of_a_block(block, signed)
    codes, scale = codebook.quantize(torch.from_numpy(block)[None], signed)
    np.testing.assert_array_equal(codes[0].numpy(), wanted)
    assert scale.numpy().tobytes() == wanted_scale.tobytes()


def test_a_negative_value_that_rounds_to_zero_keeps_its_sign_and_a_positive_one_is_lost() -> None:
    block = torch.zeros(1, 256)
    block[0, :5] = torch.tensor([1.0, -1e-9, 1e-9, -0.0, 0.0])
    codes, _ = codebook.quantize(block, signed=True)
    assert codes[0, :5].tolist() == [255, 126, 127, 126, 127]


@both_maps
def test_a_block_of_zeros_gets_the_code_of_cuda_and_stays_zero(signed: bool) -> None:
    codes, scale = codebook.quantize(torch.zeros(2, 256), signed)
    assert codes.unique().tolist() == [255 if signed else 0]
    assert scale.tolist() == [0.0, 0.0]
    assert not codebook.dequantize(codes, scale, signed).any()


@pytest.mark.parametrize(("signed", "code"), [(True, 255), (False, 0)], ids=["signed", "unsigned"])
def test_a_block_of_nan_alone_has_no_maximum(signed: bool, code: int) -> None:
    codes, scale = codebook.quantize(torch.full((1, 256), math.nan), signed)
    assert codes.unique().tolist() == [code]
    assert scale.tolist() == [-FLT_MAX]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive nan", "negative nan"])
def test_the_sign_of_nan_does_not_matter(sign: float) -> None:
    block = torch.ones(1, 256)
    block[0, 3] = math.copysign(math.nan, sign)
    codes, _ = codebook.quantize(block, signed=True)
    assert codes[0, 3] == 255


@both_maps
def test_no_blocks_are_quantized_to_no_blocks(signed: bool) -> None:
    codes, scale = codebook.quantize(torch.zeros(0, 256), signed)
    assert codes.shape == (0, 256)
    assert scale.shape == (0,)


@both_maps
def test_dequantize_is_one_rounded_product(signed: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(2, 1)
    scale = torch.tensor([3.14159, 1e-20])
    wanted = table(signed)[None] * scale.numpy()[:, None]
    np.testing.assert_array_equal(codebook.dequantize(codes, scale, signed).numpy(), wanted)
