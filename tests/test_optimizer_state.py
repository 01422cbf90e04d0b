"""State and parameters moved between steps; copies, pickles and state dicts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optimizer_helpers import (
    N,
    assert_like,
    assert_same,
    every_class,
    parameter,
    snapshot,
    train,
)
from torch import Tensor, nn

from bnb_fsdp import Adam8bit, AdamW8bit, AdamW32bit, Lion, Lion8bit

# Each returns the old storage, zeroed: while the test keeps it alive, a stale pointer shows in the result
# and not as a crash.


def replace_state(optimizer: Any) -> list[Tensor]:
    old = []
    for state in optimizer.state.values():
        for key, value in list(state.items()):
            state[key] = value.clone()
            old.append(value.zero_())
    return old


def replace_state_data(optimizer: Any) -> list[Tensor]:
    old = []
    for state in optimizer.state.values():
        for value in state.values():
            old.append(value.data)
            value.data = value.data.clone()
            old[-1].zero_()
    return old


def replace_state_dicts(optimizer: Any) -> list[Tensor]:
    old = []
    for p, state in list(optimizer.state.items()):
        optimizer.state[p] = {key: value.clone() for key, value in state.items()}
        old += [value.zero_() for value in state.values()]
    return old


def repoint_parameters(optimizer: Any) -> list[Tensor]:
    old = []
    for p in optimizer.param_groups[0]["params"]:
        old.append(p.data)
        p.data = p.data.clone()
        old[-1].zero_()
    return old


def flatten_parameters(optimizer: Any) -> list[Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    old = [p.data for p in parameters]
    for p, part in zip(parameters, torch.cat([x.flatten() for x in old]).split([x.numel() for x in old])):
        p.data = part.view_as(p)
    return [value.zero_() for value in old]


@every_class
@pytest.mark.parametrize(
    "move",
    [replace_state, replace_state_data, replace_state_dicts, repoint_parameters, flatten_parameters],
    ids=lambda move: move.__name__.replace("_", " "),
)
def test_storage_moved_between_steps_is_followed(kind: Any, move: Callable[[Any], list[Tensor]]) -> None:
    moved, left = (kind([parameter(70, 80), parameter(N, seed=1)]) for _ in range(2))
    train(moved)
    train(left)
    old = move(moved)
    train(moved, first=3)
    train(left, first=3)
    assert_like(moved, left)
    assert not any(value.any() for value in old)


def test_a_parameter_repointed_to_other_strides_of_the_same_memory_is_not_updated_by_the_old_ones() -> None:
    p = parameter(80, 80)
    optimizer = AdamW32bit([p], lr=0.1, weight_decay=0.0)
    train(optimizer, steps=1)
    p.data = p.data.t()
    p.grad = torch.zeros(80, 80)
    p.grad[0, 1] = 1e6
    old = p.detach().clone()
    with pytest.raises(ValueError, match="stride"):
        optimizer.step()
    assert torch.equal(p, old)


def test_state_cleared_by_hand_starts_afresh() -> None:
    first = AdamW8bit([parameter(N)])
    train(first)
    second = AdamW8bit([nn.Parameter(first.param_groups[0]["params"][0].detach().clone())])
    first.state.clear()
    train(first)
    train(second)
    assert_like(first, second)


def deep_copied(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer)


def pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


def loaded(optimizer: Any) -> Any:
    fresh = type(optimizer)([nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
    fresh.load_state_dict(optimizer.state_dict())
    return fresh


@pytest.fixture
def saved(tmp_path: Any) -> Iterator[Callable[[Any], Any]]:
    def through_a_file(optimizer: Any) -> Any:
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        fresh = type(optimizer)(
            [nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
        )
        fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        return fresh

    yield through_a_file


@every_class
@pytest.mark.parametrize("how", ["deep copied", "pickled", "loaded", "saved"])
def test_a_copy_continues_bit_for_bit_and_apart_from_the_original(
    kind: Any, how: str, saved: Callable[[Any], Any]
) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    make = {"deep copied": deep_copied, "pickled": pickled, "loaded": loaded, "saved": saved}[how]
    original = kind(
        [parameter(n, dtype=dtype) for dtype in dtypes for n in (N, 50)], lr=1e-2, weight_decay=0.1
    )
    train(original)
    other = make(original)
    assert_like(original, other)
    before = snapshot(other)
    train(original, first=3)
    assert_same(snapshot(other), before)
    train(other, first=3)
    assert_like(original, other)


def test_an_optimizer_that_never_stepped_is_copied_and_loaded() -> None:
    for make in (deep_copied, pickled, loaded):
        train(make(AdamW8bit([parameter(N)])))


def test_loading_takes_the_hyperparameters_along() -> None:
    source = AdamW8bit([parameter(N)], lr=0.3, betas=(0.5, 0.6), weight_decay=0.2)
    target = AdamW8bit([parameter(N)])
    target.load_state_dict(source.state_dict())
    assert [target.param_groups[0][key] for key in ("lr", "betas", "weight_decay")] == [0.3, (0.5, 0.6), 0.2]


def test_loading_runs_the_hooks() -> None:
    source, target = AdamW8bit([parameter(N)]), AdamW8bit([parameter(N)])
    train(source)
    seen = []
    target.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state)))
    target.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    source.register_state_dict_post_hook(lambda _, state: state | {"mine": 1})
    target.load_state_dict(source.state_dict())
    assert seen == [["mine", "param_groups", "state"], "after"]


def test_a_state_dict_from_before_a_scheduler_was_attached_loads() -> None:
    source, target = AdamW8bit([parameter(N)]), AdamW8bit([parameter(N)])
    train(source)
    torch.optim.lr_scheduler.LambdaLR(target, lambda step: 1.0)  # adds initial_lr to the groups
    target.load_state_dict(source.state_dict())
    train(target)


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(state_dict: dict[str, Any]) -> None:
        for key in path[:-1]:
            state_dict = state_dict[key]
        del state_dict[path[-1]]

    return change


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(state_dict: dict[str, Any]) -> None:
        for key in path[:-1]:
            state_dict = state_dict[key]
        state_dict[path[-1]] = value

    return change


UNFIT: dict[str, tuple[Callable[[dict[str, Any]], None], tuple[str, ...]]] = {
    "another shape": (
        put(torch.zeros(9, dtype=torch.uint8), "state", 1, "state2", "adam_8bit_256"),
        ("'b'", "state2", "(9,)"),
    ),
    "another dtype": (
        put(torch.zeros(N), "state", 1, "state2", "adam_8bit_256"),
        ("'b'", "state2", "torch.float32", "uint8"),
    ),
    "too few scales": (
        put(torch.zeros(3, 1), "state", 1, "absmax1", "rows"),
        ("'b'", "absmax1", "(3, 1)", f"({N}, 1)"),
    ),
    "scales of another kind": (put([0.0] * 18, "state", 1, "absmax1", "rows"), ("'b'", "absmax1", "list")),
    "scales for other cuts": (
        put({"rows_dim1x2": torch.zeros(N, 1)}, "state", 1, "absmax2"),
        ("'b'", "absmax2", "rows_dim1x2", "load_checkpoint", "convert"),
    ),
    "a missing phase": (drop("state", 1, "absmax1", "phase"), ("'b'", "absmax1", "phase")),
    "codes of another algorithm": (
        put({"lion_8bit_256": torch.zeros(N, dtype=torch.uint8)}, "state", 1, "state1"),
        ("'b'", "lion_8bit_256", "adam_8bit_256"),
    ),
    "other bits": (
        put({"adam_32bit": torch.zeros(N)}, "state", 1, "state1"),
        ("'b'", "adam_32bit", "adam_8bit_256", "other bits"),
    ),
    "a plain tensor as codes": (
        put(torch.zeros(N, dtype=torch.uint8), "state", 1, "state1"),
        ("'b'", "Tensor"),
    ),
    "a step that is no count": (put(-1, "state", 1, "step"), ("'b'", "step", "-1")),
    "half a step": (put(torch.tensor(1.5), "state", 1, "step"), ("'b'", "step", "1.5")),
    "a missing scale": (drop("state", 1, "absmax2"), ("'b'", "absmax2")),
    "a missing step": (drop("state", 1, "step"), ("'b'", "step")),
    "an unknown parameter": (put({"step": 1}, "state", 7), ("7",)),
    "a group too few": (put([], "param_groups"), ("[]", "[2]")),
    "a group too small": (put([0], "param_groups", 0, "params"), ("[1]", "[2]")),
    "a missing hyperparameter": (drop("param_groups", 0, "betas"), ("betas", "AdamW8bit")),
    "a bad hyperparameter": (put(-1.0, "param_groups", 0, "lr"), ("lr=-1.0",)),
    "another format": (put(99, "param_groups", 0, "format"), ("99", "bnb_fsdp 1 adam 256")),
    "no format": (drop("param_groups", 0, "format"), ("None", "bnb_fsdp 1 adam 256")),
    "a newer format": (
        put("bnb_fsdp 2 adam 256", "param_groups", 0, "format"),
        ("newer bnb_fsdp", "format 2", "up to 1"),
    ),
    "an older format": (put("bnb_fsdp 0 adam 256", "param_groups", 0, "format"), ("format 0",)),
    "blocks of another size": (
        put("bnb_fsdp 1 adam 2048", "param_groups", 0, "format"),
        ("blocks of 2048", "256"),
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_changes(case: str) -> None:
    change, fragments = UNFIT[case]
    source, target = (AdamW8bit([("a", parameter(N)), ("b", parameter(N, seed=1))]) for _ in range(2))
    train(source, first=10)
    train(target)
    state_dict = copy.deepcopy(source.state_dict())
    change(state_dict)
    before = snapshot(target)
    with pytest.raises(ValueError) as caught:
        target.load_state_dict(state_dict)
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    assert_same(snapshot(target), before)
    train(target, first=3)


def test_the_state_of_another_algorithm_is_refused() -> None:
    source, target = Lion8bit([parameter(N)]), Adam8bit([parameter(N)])
    train(source)
    with pytest.raises(ValueError, match=r"'lion'; Adam8bit is 'adam'"):
        target.load_state_dict(source.state_dict())
    assert len(target.state) == 0


def test_loaded_state_is_a_copy() -> None:
    source = Lion([parameter(N)])
    train(source)
    state_dict = source.state_dict()
    target = loaded(source)
    before = copy.deepcopy(state_dict)
    train(target)
    torch.testing.assert_close(state_dict["state"], before["state"], rtol=0, atol=0)
    assert state_dict["param_groups"] == before["param_groups"]
