"""``torch.ops.bnb_fsdp``: schemas, fakes and mutation, and the same bits as the optimizers' backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bnb_fsdp.rules import RULES, Hyper, direction8, direction32, step8, step32
from bnb_fsdp.state import blocks

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
HYPER = Hyper(1e-2, 0.9, 0.99, 0.999, 2.0, 1e-8, 0.1)
FLOATS = HYPER[:7]


def make(rule: str, bits: int, device: str, numel: int = 1000, seed: int = 0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(numel, generator=generator).to(device)
    g = torch.randn(numel, generator=generator).to(device)
    states, absmax = [], []
    for signed in RULES[rule].signed:
        if bits == 8:
            low = (
                0 if not signed else 128 if rule in ("rmsprop", "adagrad") else 90
            )  # these are never negative
            states.append(
                torch.randint(low, 160, (numel,), generator=generator, dtype=torch.uint8).to(device)
            )
            absmax.append((torch.rand(blocks(numel), generator=generator) + 0.1).to(device))
        else:
            value = torch.randn(numel, generator=generator)
            states.append(
                (value if signed and rule != "rmsprop" and rule != "adagrad" else value.abs()).to(device)
            )
    return (rule, g, p, states, absmax, 3, *FLOATS) if bits == 8 else (rule, g, p, states, 3, *FLOATS)


def operator(bits: int) -> Any:
    return torch.ops.bnb_fsdp.step_8bit if bits == 8 else torch.ops.bnb_fsdp.step_32bit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rule", RULES)
def test_opcheck(rule: str, bits: int, device: str) -> None:
    torch.library.opcheck(operator(bits).default, make(rule, bits, device))


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_rules_bit_for_bit(rule: str, bits: int) -> None:
    arguments = make(rule, bits, "cpu")
    g, p, states = (arguments[1], arguments[2].clone(), [s.clone() for s in arguments[3]])
    scale = torch.tensor([0.5]) if rule in ("adam", "momentum") else None
    hyper = HYPER._replace(update_scale=0.5 if scale is not None else 1.0)
    operator(bits)(*arguments, scale)
    if bits == 8:
        reference = make(rule, bits, "cpu")
        new, codes, scales = step8(RULES[rule], hyper, 3, g, p, tuple(states), tuple(reference[4]))
        for got, want in zip((*arguments[3], *arguments[4]), (*codes, *scales), strict=True):
            assert torch.equal(got, want)
    else:
        new, values = step32(RULES[rule], hyper, 3, g, p, tuple(states))
        for got, want in zip(arguments[3], values, strict=True):
            assert torch.equal(got, want)
    assert torch.equal(arguments[2], new)


def test_a_backward_pass_notices_the_update() -> None:
    rule, g, p, *rest = make("adam", 32, "cpu")
    p.requires_grad_()
    loss = (p * p).sum()
    with torch.no_grad():
        torch.ops.bnb_fsdp.step_32bit(rule, g, p, *rest)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: "frobnicate"}, "rule='frobnicate' is not known; choose one of adam, "),
        ({1: torch.zeros(999)}, r"g has shape \(999,\).*they must agree"),
        ({3: [torch.zeros(1000, dtype=torch.uint8)]}, "adam has 2 states, but got 1 states and 2 absmax"),
        ({3: [torch.zeros(1000)] * 2}, r"states\[0\] is torch.float32, expected torch.uint8"),
        (
            {4: [torch.zeros(3)] * 2},
            r"absmax\[0\] is torch.float32 of shape \(3,\).*expected contiguous float32 of \(4,\)",
        ),
        ({4: []}, "absmax is empty; step_32bit takes states without scales"),
        ({5: 0}, "step=0 must be at least 1"),
        ({1: torch.zeros(1000, dtype=torch.float64)}, "g: dtype torch.float64 is not supported; use one of"),
    ],
)
def test_bad_arguments_change_nothing(change: dict[int, Any], message: str) -> None:
    arguments = list(make("adam", 8, "cpu"))
    before = arguments[2].clone()
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(ValueError, match=message):
        torch.ops.bnb_fsdp.step_8bit(*arguments)
    assert torch.equal(arguments[2], before)


def test_a_parameter_with_gaps_is_refused() -> None:
    wide = torch.zeros(1000, 2)
    p, g = wide[:, 0], torch.zeros(1000, 2)[:, 0]
    states = [torch.zeros(1000, 2)[:, 0] for _ in range(2)]
    with pytest.raises(ValueError, match="gaps in its storage"):
        torch.ops.bnb_fsdp.step_32bit("adam", g, p, states, 1, *FLOATS)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("numel", [1, 1000, 4096, 2**20 + 5])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rule", ["adam", "momentum"])
def test_update_norms(rule: str, bits: int, numel: int) -> None:
    arguments = make(rule, bits, "cuda", numel)
    g, p, states = arguments[1], arguments[2], arguments[3]
    absmax = arguments[4] if bits == 8 else []
    first = torch.ops.bnb_fsdp.update_norms(rule, g, p, states, absmax, 3, *FLOATS)
    again = torch.ops.bnb_fsdp.update_norms(rule, g, p, states, absmax, 3, *FLOATS)
    assert torch.equal(first, again), "the sums are not deterministic"
    host: list[Tensor] = [s.cpu() for s in states]
    if bits == 8:
        u = direction8(RULES[rule], HYPER, 3, g.cpu(), p.cpu(), tuple(host), tuple(a.cpu() for a in absmax))
    else:
        u = direction32(RULES[rule], HYPER, 3, g.cpu(), p.cpu(), tuple(host))
    want = torch.stack([u.double().square().sum(), p.cpu().double().square().sum()])
    assert torch.allclose(first.cpu().double(), want, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"scale": torch.ones(1, dtype=torch.float64)},
            ValueError,
            "scale is torch.float64.*expected one float32",
        ),
        ({"scale": torch.ones(3)}, ValueError, r"scale is torch.float32 of shape \(3,\)"),
        (
            {"absmax": [torch.zeros(8)[::2]] * 2},
            ValueError,
            r"absmax\[0\].*strides \(2,\), expected contiguous",
        ),
        (
            {"g": torch.zeros(1000, device="meta")},
            RuntimeError,
            r"adam step: g is on meta, p \(torch.float32, shape",
        ),
    ],
)
def test_what_only_addresses_would_hide_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    _, g, p, states, absmax, *rest = make("adam", 8, "cpu")
    given = {"g": g, "absmax": absmax, "scale": None} | change
    with pytest.raises(error, match=message):
        torch.ops.bnb_fsdp.step_8bit("adam", given["g"], p, states, given["absmax"], *rest, given["scale"])


def test_all_mutated_tensors_count_their_versions() -> None:
    arguments = make("lion", 8, "cpu")
    torch.ops.bnb_fsdp.step_8bit(*arguments)
    assert [t._version for t in (arguments[2], *arguments[3], *arguments[4])] == [1, 1, 1]


def test_strides_of_dimensions_with_one_element_do_not_matter() -> None:
    """The gradient of a convolution's 1 x 1 weight in channels-last training: the same order, other strides."""
    p = torch.randn(8, 16, 1, 1)
    g = torch.randn(8 * 16).as_strided((8, 16, 1, 1), (16, 1, 16, 16))
    states = [torch.zeros_like(p) for _ in range(2)]
    torch.ops.bnb_fsdp.step_32bit("adam", g, p, states, 1, *FLOATS)
    assert torch.equal(states[0], g * torch.tensor(1 - FLOATS[1], dtype=torch.float32)) or states[0].any()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("numel", [2**20 + 5, 2**23])
@pytest.mark.parametrize("bits", [8, 32])
def test_tensors_of_more_tiles_than_multiprocessors(bits: int, numel: int) -> None:
    """They take tickets; a step in two halves, at a block's boundary, gives the same bits without."""
    whole, halves = make("adam", bits, "cuda", numel), make("adam", bits, "cuda", numel)
    operator(bits)(*whole)
    middle = 2**18
    for start in range(0, numel, middle):
        part = slice(start, min(start + middle, numel))
        scales = slice(start // 256, -(-part.stop // 256))
        _, g, p, states, *rest = halves
        arguments = ["adam", g[part], p[part], [s[part] for s in states]]
        if bits == 8:
            arguments.append([a[scales] for a in rest[0]])
        operator(bits)(*arguments, *(rest[1:] if bits == 8 else rest))
    for a, b in zip((whole[2], *whole[3]), (halves[2], *halves[3])):
        assert torch.equal(a, b)
