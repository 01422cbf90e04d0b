"""What the optimizers refuse, and that nothing changed then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_helpers import (
    N,
    assert_same,
    normal,
    parameter,
    set_gradients,
    snapshot,
    train,
)
from torch import nn

import bnb_fsdp
from bnb_fsdp import AdamW, AdamW8bit, Lion8bit

SPARSE = torch.sparse_coo_tensor([[0]], [1.0], (5000,), check_invariants=True)

BAD_ARGUMENTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "negative lr": (lambda: AdamW8bit([parameter(8)], lr=-1.0), ("AdamW8bit", "group 0", "lr=-1.0", ">= 0")),
    "lr not a number": (lambda: AdamW8bit([parameter(8)], lr="1"), ("lr='1'", "number")),  # type: ignore[arg-type]
    "lr nan": (lambda: Lion8bit([parameter(8)], lr=float("nan")), ("Lion8bit", "lr=nan", "finite")),
    "lr of two elements": (lambda: AdamW8bit([parameter(8)], lr=torch.ones(2)), ("lr", "2 elements")),
    "one beta": (lambda: AdamW8bit([parameter(8)], betas=(0.9,)), ("betas=(0.9,)", "two numbers")),  # type: ignore[arg-type]
    "beta of one": (lambda: AdamW8bit([parameter(8)], betas=(0.9, 1.0)), ("betas=(0.9, 1.0)", "[0, 1)")),
    "betas in words": (lambda: AdamW8bit([parameter(8)], betas="0.9"), ("betas='0.9'",)),  # type: ignore[arg-type]
    "negative eps": (lambda: AdamW8bit([parameter(8)], eps=-1e-8), ("eps=-1e-08", ">= 0")),
    "negative decay": (lambda: Lion8bit([parameter(8)], weight_decay=-0.1), ("weight_decay=-0.1", ">= 0")),
    "four bits": (lambda: AdamW([parameter(8)], optim_bits=4), ("optim_bits=4", "8 or 32")),
    "bits of another class": (lambda: AdamW8bit([parameter(8)], optim_bits=32), ("AdamW8bit", "32", "AdamW")),
    "minimum below zero": (lambda: AdamW8bit([parameter(8)], min_8bit_size=-1), ("min_8bit_size=-1", ">= 0")),
    "fractional minimum": (
        lambda: AdamW8bit([parameter(8)], min_8bit_size=0.5),
        ("min_8bit_size=0.5", "integer"),
    ),
    "amsgrad": (lambda: AdamW8bit([parameter(8)], amsgrad=True), ("AdamW8bit", "amsgrad=True", "False")),
    "args": (lambda: Lion8bit([parameter(8)], args=object()), ("Lion8bit", "args=", "None")),
    "unknown backend": (
        lambda: AdamW8bit([parameter(8)], backend="tpu"),
        ("backend='tpu'", "auto, cpu, cuda, torch"),
    ),
    "second group": (
        lambda: AdamW8bit([{"params": [parameter(8)]}, {"params": [parameter(8)], "lr": -2}]),
        ("group 1", "lr=-2"),
    ),
    "integers": (
        lambda: AdamW8bit([torch.zeros(5000, dtype=torch.int32)]),
        ("parameter 0 of group 0", "torch.int32", "torch.bfloat16"),
    ),
    "float64": (
        lambda: AdamW8bit([("w", torch.zeros(70, 80, dtype=torch.float64))]),
        ("'w'", "(70, 80)", "torch.float64", "torch.float32"),
    ),
    "sparse": (lambda: AdamW8bit([SPARSE]), ("sparse", "strided")),
    "expanded": (
        lambda: AdamW8bit([torch.zeros(1, 5000).expand(2, 5000)]),
        ("overlapping", "(2, 5000)", "(0, 1)", "contiguous"),
    ),
    "gapped": (
        lambda: AdamW8bit([("w", torch.zeros(10000)[::2])]),
        ("'w'", "gaps", "(5000,)", "(2,)", "contiguous"),
    ),
    "nothing": (lambda: AdamW8bit([]), ("empty parameter list",)),
    "pattern that matches nothing": (
        lambda: AdamW8bit([("a.weight", parameter(8))], overrides={"b.*": {"optim_bits": 32}}),
        ("'b.*'", "none of 1", "a.weight"),
    ),
    "pattern without names": (
        lambda: AdamW8bit([parameter(8)], overrides={"b.*": {"optim_bits": 32}}),
        ("'b.*'", "named_parameters()"),
    ),
    "parameter of another model": (
        lambda: AdamW8bit([parameter(8)], overrides={parameter(9): {"optim_bits": 32}}),
        ("(9,)", "not among"),
    ),
    "override of lr": (
        lambda: AdamW8bit([("w", parameter(8))], overrides={"w": {"lr": 1}}),  # type: ignore[dict-item]
        ("overrides['w']", "'lr'", "optim_bits, min_8bit_size", "group"),
    ),
    "override of bits": (
        lambda: AdamW8bit([("w", parameter(8))], overrides={"w": {"optim_bits": 16}}),
        ("overrides['w']", "optim_bits=16", "8 or 32"),
    ),
    "override of the minimum": (
        lambda: AdamW8bit([("w", parameter(8))], overrides={"w": {"min_8bit_size": "big"}}),  # type: ignore[dict-item]
        ("overrides['w']", "min_8bit_size='big'", "integer"),
    ),
    "override without a key": (
        lambda: AdamW8bit([("w", parameter(8))], overrides={"w": 32}),  # type: ignore[dict-item]
        ("overrides['w']=32", "{'optim_bits': 32}", "optim_bits, min_8bit_size"),
    ),
    "override by a set": (
        lambda: AdamW8bit([("w", parameter(8))], overrides={"w": {"optim_bits"}}),  # type: ignore[dict-item]
        ("overrides['w']={'optim_bits'}", "mapping"),
    ),
    "override of lr and of a number": (
        lambda: AdamW8bit([("w", parameter(8))], overrides={"w": {1: 2, "lr": 1}}),  # type: ignore[dict-item]
        ("overrides['w']", "unknown key 1", "optim_bits, min_8bit_size"),
    ),
    "overrides in a list": (
        lambda: AdamW8bit([("w", parameter(8))], overrides=["w"]),  # type: ignore[arg-type]
        ("overrides=['w']", "{'*.embed_tokens.weight': {'optim_bits': 32}}"),
    ),
    "overrides in a word": (
        lambda: AdamW8bit([("w", parameter(8))], overrides="w"),  # type: ignore[arg-type]
        ("overrides='w'", "{'*.embed_tokens.weight': {'optim_bits': 32}}"),
    ),
    "an empty list of overrides": (
        lambda: AdamW8bit([("w", parameter(8))], overrides=[]),  # type: ignore[arg-type]
        ("overrides=[]", "{'*.embed_tokens.weight': {'optim_bits': 32}}"),
    ),
    "override by position": (
        lambda: AdamW8bit([parameter(8)], overrides={0: {"optim_bits": 32}}),  # type: ignore[dict-item]
        ("overrides", "0", "pattern"),
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_constructor_error_names_what_is_wrong_and_the_choices(case: str) -> None:
    call, fragments = BAD_ARGUMENTS[case]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


@pytest.mark.parametrize(
    "group",
    [
        {"params": [parameter(8)], "lr": -1},
        {"params": [torch.zeros(8, dtype=torch.int64)]},
        {"params": [parameter(8), torch.zeros(20)[::2]]},
        {"params": "again"},
        {"params": [parameter(8)], "optim_bits": 16},
    ],
    ids=["lr", "integers", "gapped", "parameter given twice", "bits"],
)
def test_a_refused_group_leaves_the_optimizer_as_it_was(group: dict[str, Any]) -> None:
    optimizer = AdamW8bit([parameter(N)])
    train(optimizer)
    if group["params"] == "again":
        group = {"params": optimizer.param_groups[0]["params"]}
    before = snapshot(optimizer)
    with pytest.raises(ValueError):
        optimizer.add_param_group(group)
    assert_same(snapshot(optimizer), before)
    assert len(optimizer.param_groups) == 1
    train(optimizer, first=3)


@pytest.mark.filterwarnings("ignore:Paged.*it works as the unpaged class:UserWarning")
def test_names_create_every_class() -> None:
    for name in bnb_fsdp.optimizer_names():
        needed = {"lr": 0.1, "momentum": 0.9} if name.startswith(("bnb_fsdp_sgd", "bnb_fsdp_lars")) else {}
        optimizer = bnb_fsdp.create_optimizer(name, [parameter(8)], **needed)
        assert name.replace("paged_", "paged") == "bnb_fsdp_" + type(optimizer).__name__.lower()
    with pytest.raises(ValueError, match=r"bnb_fsdp_adamw9bit.*bnb_fsdp_adamw8bit"):
        bnb_fsdp.create_optimizer("bnb_fsdp_adamw9bit", [parameter(8)])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("AdamW8bit", "'bnb_fsdp_adamw8bit'"),
        ("adamw8bit", "'bnb_fsdp_adamw8bit'"),
        ("bnb_fsdp_AdamW8bit", "'bnb_fsdp_adamw8bit'"),
        ("PagedAdamW8bit", "'bnb_fsdp_paged_adamw8bit'"),
        ("paged_adamw8bit", "'bnb_fsdp_paged_adamw8bit'"),
        ("bnb_fsdp_pagedlion", "'bnb_fsdp_paged_lion'"),
        ("bnb_fsdp_lio8bit", "'bnb_fsdp_lion8bit'"),
        ("adamw_bnb_8bit", "'bnb_fsdp_adamw8bit'"),
        ("quasi-newton", None),
        (None, None),
        (["bnb_fsdp_adamw"], None),
    ],
    ids=str,
)
def test_an_unknown_name_is_answered_with_what_was_meant(name: Any, meant: str | None) -> None:
    with pytest.raises(ValueError) as caught:
        bnb_fsdp.optimizer_class(name)
    start, _, choices = str(caught.value).partition("hoose one of ")
    assert start.startswith(f"unknown optimizer {name!r}; ")
    assert choices == ", ".join(bnb_fsdp.optimizer_names()) + "."
    assert start.partition("; ")[2].startswith(f"did you mean {meant}" if meant else "c")


def other_shape(p: nn.Parameter) -> None:
    p.data = torch.zeros(N + 8)


def sparse_gradient(p: nn.Parameter) -> None:
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (N,), check_invariants=True)


def to_double(p: nn.Parameter) -> None:
    p.grad = None
    p.data = p.data.double()
    p.grad = torch.zeros(N, dtype=torch.float64)


def gapped(p: nn.Parameter) -> None:
    p.data = torch.zeros(2 * N)[::2]


REFUSED: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "gradient of another shape": (other_shape, ("'bad'", f"({N},)", f"({N + 8},)")),
    "sparse gradient": (sparse_gradient, ("'bad'", "sparse")),
    "float64": (to_double, ("'bad'", "torch.float64", "torch.bfloat16")),
    "parameter with gaps": (gapped, ("'bad'", "(2,)")),
}


@pytest.mark.parametrize("trained", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stepped_is_refused_before_anything_changes(case: str, trained: bool) -> None:
    spoil, fragments = REFUSED[case]
    good, bad = parameter(N), parameter(N, seed=1)
    optimizer = AdamW8bit([("good", good), ("bad", bad)])
    if trained:
        train(optimizer)
    set_gradients(optimizer, 0)
    spoil(bad)
    old = good.detach().clone()
    held = {key: value.clone() for key, value in optimizer.state.get(good, {}).items()}
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    assert torch.equal(good, old)
    for key, value in optimizer.state.get(good, {}).items():
        assert torch.equal(value, held.get(key, torch.zeros_like(value))), key


def test_a_step_that_was_refused_succeeds_once_the_cause_is_gone() -> None:
    optimizers = [AdamW8bit([("good", parameter(N)), ("bad", parameter(N, seed=1))]) for _ in range(2)]
    for optimizer in optimizers:
        train(optimizer)
    sparse_gradient(optimizers[0].param_groups[0]["params"][1])
    with pytest.raises(ValueError, match="sparse"):
        optimizers[0].step()
    for optimizer in optimizers:
        train(optimizer, first=3)
    assert_same(snapshot(optimizers[0]), snapshot(optimizers[1]))


def test_parameters_that_share_memory_are_refused_and_neighbours_are_not() -> None:
    base = normal(3 * N)
    for overlap, length in ((0, N), (1, N)):
        p, q = nn.Parameter(base[:length]), nn.Parameter(base[length - overlap : 2 * length])
        optimizer = AdamW8bit([("p", p), ("q", q)])
        set_gradients(optimizer, 0)
        old = base.clone()
        if overlap:
            with pytest.raises(ValueError, match=r"'p'.*'q'.*overlapping"):
                optimizer.step()
            assert torch.equal(base, old)
            assert len(optimizer.state) == 0
        else:
            optimizer.step()


def test_parameters_exchanged_after_the_first_step_are_reported() -> None:
    optimizer = AdamW8bit([parameter(N)])
    train(optimizer)
    optimizer.param_groups[0]["params"] = [parameter(N, seed=1)]
    set_gradients(optimizer, 0)
    with pytest.raises(RuntimeError, match=r"no longer in param_groups.*prepare"):
        optimizer.step()
    optimizer.state.clear()
    train(optimizer, steps=1)
