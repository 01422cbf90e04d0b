"""The native look at parameters, state and gradients declines whatever Python would not take as it is."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gather_helpers import (
    Optimizer,
    check_both_go_the_same_way,
    first,
    freed,
    give_gradients,
    look,
    needs_exchange,
    negated,
    optimizer_of,
    plain,
    python_only,
    set_data,
    set_gradient,
    state,
    tensor,
    train,
)
from optimizer_helpers import CLASSES, assert_like, assert_same, snapshot
from torch import Tensor, nn

from bnb_fsdp.backends.gather import FROZEN, GRADIENT, GROUPS, PARAMETER, STATE, STORAGE

pytestmark = needs_exchange


def moved_to_the_end(mapping: dict[Any, Any], key: Any) -> None:
    mapping[key] = mapping.pop(key)


def another_dtype(optimizer: Optimizer) -> None:
    first(optimizer).grad_dtype = None
    first(optimizer).grad = first(optimizer).grad.bfloat16()


def frozen(optimizer: Optimizer) -> Any:
    return optimizer.param_groups[1]["params"][0]


def exchanged_groups(optimizer: Optimizer) -> None:
    a, b = optimizer.param_groups
    a["params"], b["params"] = b["params"], a["params"]


def move_state(optimizer: Optimizer, index: int = 0) -> list[Tensor]:
    values = optimizer.state[optimizer.param_groups[0]["params"][index]].values()
    old = [value.data for value in values]
    for value in values:
        value.data = value.data.clone()
    return old


DIFFERENCES: dict[str, tuple[int, Callable[[Optimizer], Any]]] = {
    "order of parameters": (GROUPS, lambda o: o.param_groups[0]["params"].reverse()),
    "one parameter less": (GROUPS, lambda o: o.param_groups[0]["params"].pop().shape),
    "one parameter more": (GROUPS, lambda o: o.param_groups[0]["params"].append(nn.Parameter(tensor(7)))),
    "one group less": (GROUPS, lambda o: o.param_groups.pop() and None),
    "parameters of groups exchanged": (GROUPS, exchanged_groups),
    "another parameter in its place": (
        GROUPS,
        lambda o: o.param_groups[0]["params"].__setitem__(0, nn.Parameter(tensor(16, 16))),
    ),
    "parameters in a tuple": (
        GROUPS,
        lambda o: o.param_groups[0].update(params=tuple(o.param_groups[0]["params"])),
    ),
    "state gone": (STATE, lambda o: o.state.clear()),
    "state of one parameter gone": (STATE, lambda o: o.state.pop(first(o))),
    "another dict": (STATE, lambda o: o.state.update({first(o): dict(state(o))})),
    "another order of state": (STATE, lambda o: moved_to_the_end(o.state, first(o))),
    "another order in state": (STATE, lambda o: moved_to_the_end(state(o), "state1")),
    "a key less": (STATE, lambda o: state(o).pop("state2")),
    "two keys exchanged": (
        STATE,
        lambda o: state(o).update(absmax1=state(o)["absmax2"], absmax2=state(o)["absmax1"]),
    ),
    **{
        f"another {key}": (STATE, lambda o, key=key: state(o).update({key: state(o)[key].clone()}))
        for key in ("step", "state1", "state2", "absmax1", "absmax2")
    },
    "other storage of state1": (STORAGE, set_data(lambda o: state(o)["state1"], torch.clone)),
    "other storage of all state": (STORAGE, lambda o: move_state(o)),
    "other storage of an empty one's state": (STORAGE, lambda o: move_state(o, index=2)),
    "other storage of the parameter": (PARAMETER, set_data(first, torch.clone)),
    "other strides of the parameter": (PARAMETER, set_data(first, torch.t)),
    "another shape of the parameter": (PARAMETER, set_data(first, torch.flatten)),
    "a part of the parameter": (PARAMETER, set_data(first, lambda t: t[:8])),
    "another dtype of the parameter": (
        PARAMETER,
        set_data(first, lambda t: t.view(torch.bfloat16)[:, :16]),
    ),
    "no longer frozen": (FROZEN, lambda o: frozen(o).requires_grad_().shape),
    "a gradient of a frozen one": (FROZEN, lambda o: setattr(frozen(o), "grad", tensor(5, 5))),
    "a lazily negated gradient": (GRADIENT, set_gradient(negated)),
    "a lazily negated gradient by data": (GRADIENT, set_data(lambda o: first(o).grad, negated)),
    "other strides of the gradient": (GRADIENT, set_gradient(lambda g: g.t().contiguous().t())),
    "an expanded gradient": (GRADIENT, set_gradient(lambda g: g[:1].expand(16, 16))),
    "a gradient with gaps": (GRADIENT, set_gradient(lambda g: torch.cat([g, g], 1)[:, ::2])),
    "a sparse gradient": (GRADIENT, set_gradient(lambda g: g.to_sparse())),
    "a freed gradient": (GRADIENT, set_gradient(freed)),
    "lazy zeros": (GRADIENT, set_gradient(lambda g: torch._efficientzerotensor(g.shape))),
    "a gradient of a subclass": (GRADIENT, set_gradient(lambda g: nn.Parameter(g, requires_grad=False))),
    "another shape of the gradient": (GRADIENT, set_data(lambda o: first(o).grad, torch.flatten)),
    "another dtype of the gradient": (GRADIENT, another_dtype),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_is_seen_and_python_judges_it(case: str) -> None:
    difference, change = DIFFERENCES[case]
    check_both_go_the_same_way(lambda: optimizer_of(plain()), change, difference)


def one_gradient_each(optimizer: Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"][1:]:
        p.grad = None


AS_PLANNED: dict[str, Callable[[Optimizer], Any]] = {
    "new gradients": lambda o: give_gradients(o, 70),
    "no gradient of one": set_gradient(lambda g: None),
    "no gradient of most": one_gradient_each,
    "no gradient at all": lambda o: o.zero_grad(),
    "a gradient with a graph": set_gradient(lambda g: g.clone().requires_grad_() * 2),
    "another learning rate": lambda o: o.param_groups[0].update(lr=0.5, weight_decay=0.1),
    "another group of the same parameters": lambda o: o.param_groups.__setitem__(0, dict(o.param_groups[0])),
    "another list of the same parameters": lambda o: o.param_groups[0].update(
        params=list(o.param_groups[0]["params"])
    ),
    "something more in a state": lambda o: state(o).update(note=torch.ones(())),
    "something more in the state": lambda o: (
        o.state.update({nn.Parameter(tensor(3)): {}}) or o.state[frozen(o)]
    ),
    "a planned parameter frozen": lambda o: first(o).requires_grad_(False).shape,
}


@pytest.mark.parametrize("case", AS_PLANNED)
def test_what_a_step_may_find_is_no_difference(case: str) -> None:
    check_both_go_the_same_way(lambda: optimizer_of(plain()), AS_PLANNED[case], 0)


def test_strides_of_a_single_element_do_not_matter() -> None:
    def change(optimizer: Optimizer) -> None:
        first(optimizer).grad = torch.ones(1, 4)[:, :1]

    check_both_go_the_same_way(lambda: optimizer_of([nn.Parameter(tensor(1, 1))]), change, 0)


def test_a_lazily_negated_gradient_of_a_single_element_is_seen() -> None:
    check_both_go_the_same_way(
        lambda: optimizer_of([nn.Parameter(tensor(1, 1))]), set_gradient(negated), GRADIENT
    )


class Memory(bytearray):
    """Of which one can see whether a tensor still uses it."""


def test_the_storage_of_all_state_is_held_until_a_step_finds_it_moved() -> None:
    optimizer = optimizer_of(plain())
    train(optimizer)
    memories = []
    for value in state(optimizer).values():
        memory = Memory(value.numpy().tobytes())
        value.data = torch.frombuffer(memory, dtype=value.dtype).view(value.shape)
        memories.append(weakref.ref(memory))
    del memory
    train(optimizer)
    assert look(optimizer) is not None
    move_state(optimizer)
    assert look(optimizer) is None
    assert all(memory() is not None for memory in memories)
    train(optimizer, steps=1)
    assert all(memory() is None for memory in memories)


def test_a_reordered_state_costs_one_step_in_python() -> None:
    optimizer = optimizer_of(plain())
    train(optimizer)
    moved_to_the_end(optimizer.state, first(optimizer))
    assert look(optimizer) is None
    train(optimizer, steps=1)
    assert look(optimizer) == 4


@pytest.mark.parametrize("kind", CLASSES.values(), ids=list(CLASSES))
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_steps_are_the_same_bit_for_bit(kind: type, backend: str) -> None:
    fast, slow = (optimizer_of(plain(), kind, backend=backend) for _ in range(2))
    train(fast, steps=5)
    with python_only():
        train(slow, steps=5)
    assert (fast._plan._gatherer is not None) == (backend == "cpu")
    assert_like(fast, slow)


def test_other_lists_of_groups_and_other_states_make_a_new_plan() -> None:
    optimizer = optimizer_of(plain())
    for change in (
        lambda: setattr(optimizer, "param_groups", list(optimizer.param_groups)),
        lambda: setattr(optimizer, "state", copy.copy(optimizer.state)),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(tensor(4))]}),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
    ):
        train(optimizer)
        plan = optimizer._plan
        train(optimizer, steps=1)
        assert optimizer._plan is plan
        change()
        train(optimizer, steps=1)
        assert optimizer._plan is not plan and look(optimizer) is not None


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_start_without_the_table(make: Callable[[Any], Any]) -> None:
    optimizer = optimizer_of(plain())
    train(optimizer)
    other = make(optimizer)
    before = snapshot(optimizer)
    train(other, first=5)
    assert look(other) is not None
    assert_same(snapshot(optimizer), before)
    train(optimizer, first=5)
    assert_like(optimizer, other)


def test_autograd_hears_of_exactly_the_updated_parameters() -> None:
    optimizer = optimizer_of(plain())
    train(optimizer)
    a, b, _ = optimizer.param_groups[0]["params"]
    b.grad = None
    assert look(optimizer) is not None
    before = [p._version for p in (a, b)]
    optimizer.step()
    assert [p._version for p in (a, b)] == [before[0] + 1, before[1]]
