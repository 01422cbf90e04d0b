"""SGD, RMSprop, Adagrad: against torch.optim over many steps, and against bitsandbytes' signatures."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

import bnb_fsdp

N = 4096 + 77
CASES: dict[str, tuple[dict[str, Any]]] = {
    "SGD": ({"lr": 0.02, "momentum": 0.9},),
    "RMSprop": ({"lr": 1e-3, "alpha": 0.95},),
    "Adagrad": ({"lr": 1e-2},),
}
NAMES = [name + bits for name in CASES for bits in ("", "8bit", "32bit")]


def gradient(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    spread = 10 ** (2 * torch.rand(N, generator=torch.Generator().manual_seed(1)) - 2)
    return (torch.randn(N, generator=generator) + 0.5) * spread


def trained(optimizer_of: Any, steps: int = 50, reload_every: int | None = None) -> torch.Tensor:
    p = torch.nn.Parameter(torch.randn(N, generator=torch.Generator().manual_seed(0)))
    optimizer = optimizer_of([p])
    for step in range(steps):
        p.grad = gradient(step)
        optimizer.step()
        if reload_every and step % reload_every == reload_every - 1:
            saved = copy.deepcopy(optimizer.state_dict())
            before = copy.deepcopy(dict(optimizer.state[p]))
            optimizer = optimizer_of([p])
            optimizer.load_state_dict(saved)
            assert set(before) == set(optimizer.state[p])
            for key, value in before.items():
                assert torch.equal(value, optimizer.state[p][key])
    return p.detach()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", CASES)
def test_32_bit_state_follows_torch(name: str, weight_decay: float) -> None:
    arguments = {**CASES[name][0], "weight_decay": weight_decay}
    ours = trained(lambda ps: getattr(bnb_fsdp, name + "32bit")(ps, **arguments), reload_every=10)
    theirs = trained(lambda ps: getattr(torch.optim, name)(ps, **arguments))
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "largest"), [("SGD", 0.02), ("RMSprop", 0.065), ("Adagrad", 0.08)])
def test_8_bit_state_stays_near_torch(name: str, largest: float) -> None:
    """Distance from torch's result, in parts of the way from the start: at most 1.5 times what was measured."""
    arguments = CASES[name][0]
    start = torch.randn(N, generator=torch.Generator().manual_seed(0))
    ours = trained(lambda ps: getattr(bnb_fsdp, name + "8bit")(ps, **arguments), reload_every=10)
    theirs = trained(lambda ps: getattr(torch.optim, name)(ps, **arguments))
    assert 0 < float((ours - theirs).norm() / (theirs - start).norm()) < largest


def test_8_bit_decay_counts_in_the_second_moment_alone() -> None:
    """bitsandbytes' kernel divides the gradient without its decay: one step from zero state, by hand."""
    for name, arguments in (("RMSprop8bit", {"alpha": 0.9}), ("Adagrad8bit", {})):
        p = torch.nn.Parameter(torch.full((4096,), 2.0))
        p.grad = torch.full((4096,), 0.5)
        getattr(bnb_fsdp, name)([p], lr=0.1, weight_decay=0.25, **arguments).step()
        share = 0.1 if name == "RMSprop8bit" else 1.0
        wanted = 2.0 - 0.1 * 0.5 / (share * (0.5 + 0.25 * 2.0) ** 2) ** 0.5
        torch.testing.assert_close(p.detach(), torch.full((4096,), wanted), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_bitsandbytes_and_more(name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    theirs = inspect.signature(getattr(bitsandbytes.optim, name)).parameters
    ours: dict[str, Any] = {}
    for base in getattr(bnb_fsdp, name).__mro__:
        if base is bnb_fsdp.optim.BlockwiseOptimizer:
            break
        for key, parameter in inspect.signature(base).parameters.items():
            ours.setdefault(key, parameter.default)
    for key, parameter in theirs.items():
        assert key in ours, key
        assert ours[key] == parameter.default or key == "optim_bits", key
    assert list(theirs)[:3] == list(inspect.signature(getattr(bnb_fsdp, name)).parameters)[:3]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "SGD",
            {"lr": 0.1},
            "momentum=0.0 must be a number in \\(0, 1\\); without momentum.*torch.optim.SGD",
        ),
        ("SGD8bit", {"lr": 0.1, "momentum": 1.0}, "group 0: momentum=1.0 must be a number in \\(0, 1\\)"),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "SGD does not support nesterov=True"),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, "SGD does not support dampening=0.5"),
        ("RMSprop", {"centered": True}, "RMSprop does not support centered=True"),
        ("RMSprop8bit", {"momentum": 0.5}, "RMSprop8bit does not support momentum=0.5"),
        ("RMSprop", {"alpha": 0.0}, "alpha=0.0 must be a number in"),
        ("Adagrad", {"lr_decay": 0.1}, "Adagrad does not support lr_decay=0.1"),
        ("Adagrad8bit", {"initial_accumulator_value": 1.0}, "does not support initial_accumulator_value=1.0"),
        ("Adagrad32bit", {"optim_bits": 8}, "Adagrad32bit has optim_bits=32, got 8; use Adagrad to choose"),
    ],
)
def test_what_upstream_ignores_or_cannot_raises(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(bnb_fsdp, name)([torch.nn.Parameter(torch.zeros(8))], **arguments)
