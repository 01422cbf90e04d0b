"""State that does not exist yet, or not any more: when it is made, copied, forgotten."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_helpers import assert_like, assert_same, parameter, set_gradients, train
from state_dict_helpers import every_class, make, of_all_kinds, through_a_file, twin

from bnb_fsdp import Adam8bit, AdamW8bit, Lion8bit


def test_the_state_dict_of_an_optimizer_that_never_stepped_is_empty_and_harmless() -> None:
    fresh, trained = AdamW8bit([parameter(5000)]), AdamW8bit([parameter(5000)])
    saved = fresh.state_dict()
    assert saved["state"] == {} and len(fresh.state) == 0
    train(trained)
    trained.load_state_dict(through_a_file(saved))
    assert len(trained.state) == 0
    trained.param_groups[0]["params"][0].data.copy_(fresh.param_groups[0]["params"][0])
    train(trained)
    train(fresh)
    assert_like(trained, fresh)


@every_class
def test_asking_whether_there_is_state_makes_it_without_a_step(name: str, bits: int) -> None:
    parameters = [*of_all_kinds(), parameter(5000).requires_grad_(False)]
    asked, other = (make(name, bits, twin(parameters)) for _ in range(2))
    for optimizer in (asked, other):
        optimizer.param_groups[0]["params"][-1].requires_grad_(False)
    assert len(asked.state) == 0 and bool(asked.state) and len(asked.state) == len(parameters) - 1
    for p, values in asked.state.items():
        assert not any(value.any() for value in values.values())
        assert values["state1"].stride() == p.stride()
    made = [id(values) for values in asked.state.values()]
    assert asked.state and made == [id(values) for values in asked.state.values()]
    assert [float(entry["step"]) for entry in asked.state_dict()["state"].values()] == [0.0] * len(made)
    train(asked)
    train(other)
    assert_like(asked, other)


def test_a_copy_of_the_state_alone_is_an_ordinary_dict() -> None:
    optimizer = AdamW8bit([parameter(5000)])
    for copied in (copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state))):
        assert type(copied) is defaultdict and not copied
    train(optimizer)
    for copied in (copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state))):
        assert_same([*copied.values()], [*optimizer.state.values()])
        assert not {*map(id, copied)} & {*map(id, optimizer.state)} and copied[0] == {}
    other = copy.deepcopy(optimizer)
    other.state.clear()
    assert other.state and len(optimizer.state) == 1  # the copy's own parameter's
    state = other.state
    state.clear()
    del other
    assert not state


@pytest.mark.parametrize(
    "how", [copy.copy, lambda state: state.copy(), lambda state: state | {}], ids=["copy.copy", "copy", "or"]
)
def test_a_shallow_copy_of_the_state_can_be_asked_too(how: Callable[[Any], Any]) -> None:
    optimizer = AdamW8bit([parameter(5000)])
    train(optimizer)
    assert how(optimizer.state)


@pytest.mark.parametrize(
    "kind", [dict, lambda entries: defaultdict(dict, entries)], ids=["dict", "defaultdict"]
)
def test_state_that_the_user_assigns_is_used(kind: Callable[[Any], Any]) -> None:
    optimizer, other = AdamW8bit([parameter(5000)]), AdamW8bit([parameter(5000)])
    optimizer.state = kind({})
    for each in (optimizer, other):
        train(each)
    optimizer.state = kind(
        {p: {k: v.clone() for k, v in values.items()} for p, values in optimizer.state.items()}
    )
    for each in (optimizer, other):
        train(each, first=3)
    assert_like(optimizer, other)
    optimizer.load_state_dict(through_a_file(other.state_dict()))
    optimizer.state.clear()
    assert optimizer.state
    optimizer.load_state_dict(through_a_file(other.state_dict()))
    for each in (copy.deepcopy(optimizer), optimizer, other):
        train(each, first=6)
    assert_like(optimizer, other)


def test_state_of_parameters_that_were_exchanged() -> None:
    optimizer = AdamW8bit([parameter(5000), parameter(4500)])
    assert optimizer.state
    new = [parameter(5000, seed=1), parameter(4500)]
    optimizer.param_groups[0]["params"] = new
    assert optimizer.state_dict()["state"] == {} and len(optimizer.state) == 0  # never stepped: forgotten
    train(optimizer)
    optimizer.param_groups[0]["params"] = [parameter(5000, seed=2), new[1]]
    before = dict(optimizer.state)
    with pytest.raises(
        RuntimeError, match=r"1 of 2 entries of optimizer\.state .* no longer in param_groups"
    ):
        optimizer.state_dict()
    assert dict(optimizer.state) == before
    del optimizer.state[new[0]]
    assert list(optimizer.state_dict()["state"]) == [1]


def test_entries_that_are_no_parameters_come_back() -> None:
    source, target = AdamW8bit([parameter(5000)]), AdamW8bit([parameter(5000)])
    train(source)
    source.state["mine"] = 3
    target.load_state_dict(source.state_dict())
    assert target.state["mine"] == 3


@every_class
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_a_step_that_only_asks_for_state(name: str, bits: int, rate: Any) -> None:
    optimizer, other = (make(name, bits, [parameter(500), parameter(70)], lr=rate) for _ in range(2))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    assert optimizer.step(closure=None) is None
    assert [float(values["step"]) for values in optimizer.state.values()] == [0.0, 0.0]
    assert not any(value.any() for values in optimizer.state.values() for value in values.values())
    for each in (optimizer, other):
        each.param_groups[0]["lr"] = 0.1
        train(each)
    assert_like(optimizer, other)


STEPS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a warm-up that starts at 0": (0.0, lambda optimizer: optimizer.step()),
    "the same with None": (0.0, lambda optimizer: optimizer.step(None)),
    "a tensor of 0": (torch.tensor(0.0), lambda optimizer: optimizer.step()),
    "a learning rate": (0.1, lambda optimizer: optimizer.step(closure=None)),
    "a tensor": (torch.tensor(0.1), lambda optimizer: optimizer.step(closure=None)),
    "a closure": (0.0, lambda optimizer: optimizer.step(lambda: 5)),
    "a closure by keyword": (0.0, lambda optimizer: optimizer.step(closure=lambda: 5)),
}


@pytest.mark.parametrize("case", STEPS)
def test_real_steps_count(case: str) -> None:
    rate, step = STEPS[case]
    optimizer = Adam8bit([parameter(5000)], lr=rate)
    set_gradients(optimizer, 0)
    assert step(optimizer) == (5 if "closure" in case else None)
    [values] = optimizer.state.values()
    assert values["step"] == 1 and values["state1"].any()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step(closure=None)  # there is state: this, too, is a step
    assert values["step"] == 2


def test_one_group_that_learns_makes_a_step_real() -> None:
    optimizer = Lion8bit([{"params": [parameter(5000)]}, {"params": [parameter(5000)], "lr": 0.1}], lr=0.0)
    set_gradients(optimizer, 0)
    optimizer.step(closure=None)
    assert [float(values["step"]) for values in optimizer.state.values()] == [1.0, 1.0]
