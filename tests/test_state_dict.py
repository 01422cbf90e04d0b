"""State dicts of plain parameters: what is in them, what loading does and does not do, and when state is made."""

from __future__ import annotations

import copy
import itertools
import math
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_helpers import assert_like, assert_same, normal, parameter, snapshot, train
from state_dict_helpers import (
    DTYPES,
    STATES,
    every_class,
    make,
    of_all_kinds,
    through_a_file,
    twin,
)
from torch import Tensor, nn

from bnb_fsdp import AdamW, AdamW8bit
from bnb_fsdp.checkpoint import state_dict as checkpoint


@every_class
def test_state_of_every_layout_goes_through_a_file_and_on(name: str, bits: int) -> None:
    parameters = of_all_kinds()
    first = make(name, bits, parameters)
    train(first, 2)
    second = make(name, bits, twin(parameters), lr=0.5)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert_like(first, second)
    count = sum(-(-p.numel() // 256) for p in parameters) * STATES.get(name, 1) if bits == 8 else 0
    assert second.load_report == (len(parameters), count, 0)
    train(first, 2, first=2)
    train(second, 2, first=2)
    assert_like(first, second)


@every_class
def test_what_is_in_a_state_dict(name: str, bits: int) -> None:
    """Codes and scales of single elements, looked up in the live state by their place in memory."""
    rng = random.Random(0)
    parameters = of_all_kinds()
    optimizer = make(name, bits, parameters)
    train(optimizer, 2)
    saved = optimizer.state_dict()
    assert list(saved["state"]) == list(range(len(parameters)))
    for number, p in enumerate(parameters):
        entry, live = saved["state"][number], optimizer.state[p]
        states = [f"state{i + 1}" for i in range(STATES.get(name, 1))]
        assert set(entry) == {"step", *states} | (
            {s.replace("state", "absmax") for s in states} if bits == 8 else set()
        )
        assert entry["step"].dtype == torch.float32 and entry["step"] == 2
        for key in states:
            [(label, codes)] = entry[key].items()
            assert label.endswith("_8bit_256" if bits == 8 else "_32bit")
            assert label.startswith({"AdamW": "adam", "SGD": "momentum"}.get(name, name.lower()))
            assert codes.data_ptr() == live[key].data_ptr() and codes.stride() == p.stride()
            if bits == 32:
                continue
            scales = dict(entry[key.replace("state", "absmax")])
            absmax = live[key.replace("state", "absmax")]
            phases = [scales.pop(label) for label in list(scales) if label.startswith("phase")]
            assert bool(phases) == (key == "state1" and "phase" in str(entry["absmax1"].keys()))
            [(label, table)] = scales.items()
            assert table.dtype == torch.float32
            for _ in range(20 if p.numel() else 0):
                index = [rng.randrange(size) for size in p.shape]
                flat = sum(i * stride for i, stride in zip(index, p.stride()))
                if label.startswith("grid"):
                    fastest = p.stride().index(1)
                    index[fastest] //= 256
                    assert table[tuple(index)] == absmax[flat // 256]
                    continue
                width = p.numel() // len(table)
                row, start = flat // width, flat // width * width
                assert table[row, flat // 256 - start // 256] == absmax[flat // 256]
                for phase in phases:
                    assert phase.dtype == torch.uint8 and phase[row, 0] == start % 256


def logical(optimizer: Any) -> list[Tensor]:
    """Values of state1 by index, whatever the memory order."""
    [(p, live)] = optimizer.state.items()
    if live["state1"].dtype != torch.uint8:
        return [live["state1"].contiguous()]
    place = torch.empty(p.shape, dtype=torch.long).as_strided(p.shape, p.stride())
    place.as_strided((p.numel(),), (1,)).copy_(torch.arange(p.numel()))
    return [live["state1"].contiguous(), live["absmax1"][place // 256]]


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("first", "second"),
    list(
        itertools.permutations(
            [
                lambda t: t.contiguous(),
                lambda t: t.contiguous(memory_format=torch.channels_last),
                lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
            ],
            2,
        )
    ),
    ids=lambda value: f"order {value(torch.empty(2, 3, 4, 5)).stride()}",
)
@pytest.mark.parametrize("shape", [(256, 256, 2, 2), (6, 9, 3, 3), (256, 256, 1, 1), (1, 300, 2, 2)], ids=str)
def test_state_of_another_memory_order_is_refused_or_right(
    shape: tuple[int, ...], first: Any, second: Any, bits: int
) -> None:
    source, target = (make("AdamW", bits, [nn.Parameter(order(normal(*shape)))]) for order in (first, second))
    train(source)
    train(target, first=7)
    before = snapshot(target)
    try:
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    except ValueError as error:
        assert bits == 8 and "absmax1" in str(error)
        assert_same(snapshot(target), before)
    else:
        assert_same(logical(target), logical(source))
    train(target)


def test_dtypes_and_bits_are_kept_whatever_the_parameter() -> None:
    for dtype in DTYPES:
        source = AdamW8bit([parameter(5000, dtype=dtype)])
        train(source, 1)
        [live] = source.state.values()
        live["absmax1"].fill_(1.23456789)
        live["step"].fill_(70001.0)
        target = AdamW8bit([parameter(5000, dtype=dtype)])
        target.load_state_dict(source.state_dict())
        [loaded] = target.state.values()
        assert {key: value.dtype for key, value in loaded.items()} == {
            "step": torch.float32, "state1": torch.uint8, "absmax1": torch.float32, "state2": torch.uint8,
            "absmax2": torch.float32,
        }  # fmt: skip
        assert (loaded["absmax1"] == torch.tensor(1.23456789)).all() and loaded["step"] == 70001


@pytest.mark.parametrize("bits", [8, 32])
def test_loaded_state_is_no_memory_of_the_source(bits: int) -> None:
    parameters = of_all_kinds()
    source = make("AdamW", bits, parameters)
    train(source)
    target = make("AdamW", bits, twin(parameters))
    target.load_state_dict(source.state_dict())
    memory = {t.data_ptr() for s in source.state.values() for t in s.values() if t.numel()}
    assert not memory & {t.data_ptr() for s in target.state.values() for t in s.values() if t.numel()}
    before = snapshot(source)
    train(target, first=5)
    assert_same(snapshot(source), before)


@every_class
def test_an_optimizer_loads_its_own_state_dict(name: str, bits: int) -> None:
    parameters = of_all_kinds()
    optimizer, other = (make(name, bits, twin(parameters)) for _ in range(2))
    for each in (optimizer, other):
        train(each)
    for _ in range(3):
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.load_report.requantized == 0
    assert_like(optimizer, other)
    train(optimizer, first=3)
    train(other, first=3)
    assert_like(optimizer, other)


@pytest.mark.parametrize(
    "planned",
    [
        False,
        pytest.param(
            True,
        ),
    ],
    ids=["never stepped", "stepped"],
)
def test_old_state_is_freed_one_parameter_at_a_time(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = (AdamW8bit([parameter(5000) for _ in range(4)]) for _ in range(2))
    train(source)
    assert target.state  # makes it
    if planned:
        train(target)
    old = [[weakref.ref(value) for value in values.values()] for values in target.state.values()]
    alive, entry = [], checkpoint._entry

    def counted(*args: Any) -> Any:
        alive.append(sum(any(ref() is not None for ref in refs) for refs in old))
        return entry(*args)

    monkeypatch.setattr(checkpoint, "_entry", counted)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert alive == [4, 3, 2, 1]


# Hooks


def test_the_order_of_hooks() -> None:
    source, target = AdamW8bit([parameter(5000)]), AdamW8bit([parameter(5000)])
    train(source)
    events: list[Any] = []
    for number in (1, 2):
        source.register_state_dict_pre_hook(lambda _, n=number: events.append(("save", n)))
        source.register_state_dict_post_hook(
            lambda _, saved, n=number: events.append(("saved", n, len(saved))) or {**saved, n: n}
        )
        target.register_load_state_dict_pre_hook(
            lambda optimizer, given, n=number: (
                events.append(("load", n, len(given), len(optimizer.state))) or {**given, n * 10: n}
            )
        )
        target.register_load_state_dict_post_hook(
            lambda optimizer, n=number: events.append(
                ("loaded", n, optimizer.param_groups[0]["lr"], len(optimizer.state))
            )
        )
    saved = source.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    keys = set(saved)
    target.load_state_dict(saved)
    assert set(saved) == keys == {"state", "param_groups", 1, 2}
    assert events == [
        ("save", 1), ("save", 2), ("saved", 1, 2), ("saved", 2, 3),
        ("load", 1, 4, 0), ("load", 2, 5, 0), ("loaded", 1, 0.5, 1), ("loaded", 2, 0.5, 1),
    ]  # fmt: skip


def test_a_pre_hook_may_change_what_is_loaded_in_place_and_not_the_callers_dict() -> None:
    source, target = AdamW8bit([parameter(5000)]), AdamW8bit([parameter(5000)])
    train(source)
    target.register_load_state_dict_pre_hook(lambda _, given: given.__setitem__("state", {}))
    saved = source.state_dict()
    target.load_state_dict(saved)
    assert len(target.state) == 0 and len(saved["state"]) == 1


# Groups


def test_betas_keep_the_kind_they_have_here() -> None:
    for live, given, expected in [((0.1, 0.2), [0.3, 0.4], (0.3, 0.4)), ([0.1, 0.2], [0.3, 0.4], [0.3, 0.4])]:
        target = AdamW8bit([parameter(9)], betas=live)
        saved = AdamW8bit([parameter(9)], betas=given).state_dict()
        target.load_state_dict(saved)
        assert target.param_groups[0]["betas"] == expected and type(live) is type(
            target.param_groups[0]["betas"]
        )
        assert target.param_groups[0]["betas"] is not given


def test_a_tensor_learning_rate_is_saved_and_loaded_as_a_copy() -> None:
    source = AdamW8bit([parameter(5000)], lr=torch.tensor(0.25))
    target = AdamW8bit([parameter(5000)], lr=torch.tensor(0.5))
    train(source)
    target.load_state_dict(through_a_file(source.state_dict()))
    target.load_state_dict(source.state_dict())
    source.param_groups[0]["lr"].fill_(7.0)
    assert isinstance(target.param_groups[0]["lr"], Tensor) and target.param_groups[0]["lr"] == 0.25


def test_several_groups_and_names() -> None:
    def optimizer(rate: float) -> Any:
        groups = [
            {"params": [("a", parameter(5000)), ("b", parameter(30))], "lr": rate},
            {"params": [("c", parameter(20, 300))], "weight_decay": rate},
        ]
        return AdamW(groups, optim_bits=8, overrides={"c": {"optim_bits": 32}})

    source, target = optimizer(0.1), optimizer(0.2)
    train(source)
    target.load_state_dict(through_a_file(source.state_dict()))
    assert [group["param_names"] for group in target.param_groups] == [["a", "b"], ["c"]]
    assert [(group["lr"], group["weight_decay"]) for group in target.param_groups] == [
        (0.1, 0.01),
        (1e-3, 0.1),
    ]
    assert [s["state1"].dtype for s in target.state.values()] == [torch.uint8, torch.float32, torch.float32]
    assert [p for group in target.param_groups for p in group["params"]] == list(target.state)


BAD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a step of NaN": lambda saved: saved["state"][1].update(step=math.nan),
    "an infinite step": lambda saved: saved["state"][1].update(step=torch.tensor(math.inf)),
    "two steps": lambda saved: saved["state"][1].update(step=torch.ones(2)),
    "a bad last parameter": lambda saved: saved["state"][1]["absmax2"].update(rows=torch.zeros(1)),
    "a bad learning rate": lambda saved: saved["param_groups"][0].update(lr=math.nan),
    "bad betas": lambda saved: saved["param_groups"][0].update(betas=(1.0, 2.0)),
    "overrides for others": lambda saved: saved["param_groups"][0].update(overrides=[{}]),
    "no state": lambda saved: saved.pop("state"),
    "no groups": lambda saved: saved.pop("param_groups"),
    "state of another kind": lambda saved: saved["state"].update({1: 5}),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("stepped", [True, False], ids=["stepped", "fresh"])
def test_an_error_leaves_everything_as_it_was(case: str, stepped: bool) -> None:
    source, target = (AdamW8bit([parameter(5000), parameter(4500)], lr=rate) for rate in (0.1, 0.2))
    train(source)
    if stepped:
        target.load_state_dict(source.state_dict())
        train(target, first=9)
    saved = copy.deepcopy(source.state_dict())
    BAD[case](saved)
    before, report = snapshot(target), target.load_report
    groups, tensors = (
        [id(g) for g in target.param_groups],
        [id(t) for s in target.state.values() for t in s.values()],
    )
    kept = copy.deepcopy(target)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        target.load_state_dict(saved)
    assert_same(snapshot(target), before)
    assert groups == [id(g) for g in target.param_groups] and target.load_report is report
    assert tensors == [id(t) for s in target.state.values() for t in s.values()]
    train(target)
    train(kept)
    assert_like(target, kept)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_torch_loses_the_values_of_a_group_without_parameters(place: int) -> None:
    """Unless it is the last one; where it has none, they stay as they are."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build(rate: float) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(90, 70), nn.Linear(70, 90))
        groups: list[dict[str, Any]] = [{"params": layer.parameters(), "lr": rate} for layer in model]
        groups.insert(place, {"params": [], "lr": 7 * rate})
        return model, AdamW8bit(groups)

    (model, optimizer), (fresh_model, fresh) = build(0.1), build(0.2)
    train(optimizer)
    set_optimizer_state_dict(fresh_model, fresh, get_optimizer_state_dict(model, optimizer))
    for p, q in zip(model.parameters(), fresh_model.parameters()):
        assert_same(dict(fresh.state[q]), dict(optimizer.state[p]))
    rates = [0.1, 0.1]
    rates.insert(place, 7 * (0.1 if place == 2 else 0.2))
    assert [group["lr"] for group in fresh.param_groups] == rates
    assert [set(group) for group in fresh.param_groups] == [set(group) for group in optimizer.param_groups]


def test_a_name_of_no_parameter_is_refused() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Sequential(nn.Linear(90, 70))
    optimizer = AdamW8bit(model.parameters())
    train(optimizer)
    saved: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    before = snapshot(optimizer)
    saved["state"]["0.wieght"] = saved["state"].pop("0.weight")
    with pytest.raises(ValueError, match=r"unknown parameter '0\.wieght'"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), before)


def test_numbers_of_numpy_are_saved_as_plain_ones(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    optimizer = AdamW8bit([parameter(5000)], betas=(np.float64(0.5), np.float32(0.25)))
    optimizer.param_groups[0]["lr"] = np.float64(0.125)
    torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
    [group] = torch.load(tmp_path / "saved.pt", weights_only=True)["param_groups"]
    assert (group["lr"], group["betas"]) == (0.125, (0.5, 0.25))
    assert {type(value) for value in (group["lr"], *group["betas"])} == {float}


def test_a_step_with_gradients_counts_at_a_learning_rate_of_zero() -> None:
    """torchtitan asks for state by ``step(closure=None)`` at a rate of 0, with gradients of zeros."""
    for value, steps in ((0.0, 0), (1.0, 1), (math.nan, 1)):
        p = parameter(5000)
        optimizer = AdamW8bit([p], lr=0.0)
        p.grad = torch.zeros_like(p)
        p.grad[7] = value
        optimizer.step(closure=None)
        assert optimizer.state[p]["step"] == steps


@pytest.mark.parametrize("overrides", [None, {"1.weight": {"optim_bits": 32}}], ids=["none", "one"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_gathered_state_dicts_keep_the_groups(flat: bool, overrides: Any) -> None:
    """Gathering a full state dict, torch drops empty lists and dicts within groups."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(90, 70), nn.Linear(70, 90))
        return model, AdamW8bit(model.named_parameters(), overrides=overrides)

    options = StateDictOptions(full_state_dict=not flat, flatten_optimizer_state_dict=flat)
    (model, optimizer), (fresh_model, fresh) = build(), build()
    train(optimizer)
    saved = through_a_file(dict(get_optimizer_state_dict(model, optimizer, options=options)))
    set_optimizer_state_dict(fresh_model, fresh, saved, options=options)
    names = [name for name, _ in model.named_parameters()]
    bits = [8 if fresh.state[p]["state1"].dtype == torch.uint8 else 32 for p in fresh_model.parameters()]
    assert bits == [8, 32, 32 if overrides else 8, 32], names
    assert fresh.param_groups[0]["overrides"] == optimizer.param_groups[0]["overrides"]
    with torch.no_grad():
        for p, q in zip(model.parameters(), fresh_model.parameters()):
            q.copy_(p)
    train(optimizer, first=3)
    train(fresh, first=3)
    assert_like(optimizer, fresh)
