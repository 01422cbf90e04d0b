"""What the tests of interchange with other packages share: optimizers of both sides, hyperparameters, states."""

from __future__ import annotations

import itertools
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from optimizer_helpers import assert_same, normal, train
from torch import Tensor, nn

import bnb_fsdp
from bnb_fsdp import rules
from bnb_fsdp.rules import Hyper

SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.3},
    "Lion": {"betas": (0.8, 0.95), "weight_decay": 0.1},
    "SGD": {"momentum": 0.8, "weight_decay": 0.1},
    "RMSprop": {"alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1},
    "Adagrad": {"eps": 1e-6, "weight_decay": 0.1},
    "AdEMAMix": {"betas": (0.8, 0.95, 0.99), "alpha": 3.0, "weight_decay": 0.1},
    "LAMB": {"weight_decay": 0.1, "max_unorm": 1.0},
    "LARS": {"momentum": 0.8, "weight_decay": 0.1, "max_unorm": 0.05},
}
RULES = {
    "Adam": rules.ADAM, "AdamW": rules.ADAM, "Lion": rules.LION, "SGD": rules.MOMENTUM, "RMSprop": rules.RMSPROP,
    "Adagrad": rules.ADAGRAD, "AdEMAMix": rules.ADEMAMIX, "LAMB": rules.ADAM, "LARS": rules.MOMENTUM,
}  # fmt: skip
# bitsandbytes' AdEMAMix32bit cannot step (its issue 2075); AdEMAMix with optim_bits=32 can.
CASES = list(itertools.product(SETTINGS, (8, 32)))
every_class = pytest.mark.parametrize(("name", "bits"), CASES, ids=lambda value: str(value))
DTYPES = (torch.float32, torch.bfloat16)


def theirs(name: str, bits: int, params: Any, **kwargs: Any) -> Any:
    settings = {"lr": 1e-2, **SETTINGS[name], **kwargs}
    if name in ("AdEMAMix", "LAMB") and bits == 32:
        return getattr(bnb.optim, name)(params, optim_bits=32, **settings)
    return getattr(bnb.optim, f"{name}{bits}bit")(params, **settings)


def ours(name: str, bits: int, params: Any, **kwargs: Any) -> Any:
    """With other hyperparameters, so that a test sees them come over."""
    start: dict[str, Any] = {"lr": 0.7, **({"momentum": 0.3} if name in ("SGD", "LARS") else {})}
    if name in ("LAMB", "LARS"):
        start["max_unorm"] = SETTINGS[name]["max_unorm"]
    return getattr(bnb_fsdp, f"{name}{bits}bit")(params, **start, **kwargs)


def parameters(seed: int = 0) -> list[nn.Parameter]:
    """Above and below min_8bit_size, with full and partial last blocks."""
    shapes = ((20, 300), (4096 + 300,), (10,), (16, 512))
    return [nn.Parameter(normal(*shape, seed=seed).to(dtype)) for dtype in DTYPES for shape in shapes]


def twin(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def trained(name: str, bits: int, steps: int = 3, **kwargs: Any) -> Any:
    optimizer = theirs(name, bits, parameters(), **kwargs)
    train(optimizer, steps)
    return optimizer


def params_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def raw(name: str, values: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """States and scales (those of 32-bit state are empty) of a bitsandbytes state, in our order."""
    states, scales = [values["state1"]], [values.get("absmax1")]
    if name == "AdEMAMix":
        states = list(values["state1"])
        scales = list(values["absmax1"]) if "absmax1" in values else [None, None]
    if "state2" in values:
        states.insert(1, values["state2"])
        scales.insert(1, values.get("absmax2"))
    return tuple(states), tuple(scale for scale in scales if scale is not None)


def hyper(name: str, **changes: Any) -> Hyper:
    given: dict[str, Any] = {"lr": 1e-2, **SETTINGS[name]}
    betas = given.get("betas", (given.get("momentum", given.get("alpha", 0.9)), 0.999))
    if name == "Adagrad":
        betas = (0.0, 0.0)
    return Hyper(
        lr=given["lr"],
        beta1=betas[0],
        beta2=betas[1],
        beta3=betas[2] if len(betas) > 2 else 0.0,
        alpha=given.get("alpha", 0.0) if name == "AdEMAMix" else 0.0,
        eps=given.get("eps", 1e-8),
        weight_decay=given["weight_decay"],
        **changes,
    )


def assert_is_what_bitsandbytes_has(name: str, optimizer: Any, source: Any) -> None:
    rule = RULES[name]
    for mine, p in zip(params_of(optimizer), params_of(source)):
        values, given = optimizer.state[mine], source.state[p]
        states, scales = raw(name, given)
        assert values["step"] == given["step"]
        assert_same([values[key] for key in rule.states], list(states))
        absmax = [values[key.replace("state", "absmax")] for key in rule.states if scales]
        assert_same(absmax, list(scales))
