"""The native look at shards, and what it owns: references are balanced, and nothing is kept alive."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    set_data,
    set_gradient,
    state,
    tensor,
    train,
)
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bnb_fsdp
from bnb_fsdp.backends.gather import GRADIENT, PARAMETER, STORAGE

pytestmark = needs_exchange


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def sharded(mesh: Any) -> Callable[[], Optimizer]:
    def make() -> Optimizer:
        placed = [
            distribute_tensor(tensor(*shape), mesh, [Shard(0)]) for shape in ((16, 16), (7, 40), (0, 4))
        ]
        return optimizer_of([nn.Parameter(p) for p in placed])

    return make


def local(optimizer: Optimizer) -> Tensor:
    result: Tensor = first(optimizer)._local_tensor
    return result


def set_local(optimizer: Optimizer, value: Tensor, of_gradient: bool = False) -> None:
    (first(optimizer).grad if of_gradient else first(optimizer))._local_tensor = value


def local_gradient(optimizer: Optimizer) -> Tensor:
    result: Tensor = first(optimizer).grad._local_tensor
    return result


SHARDED: dict[str, tuple[int, Callable[[Optimizer], Any]]] = {
    "nothing": (0, lambda o: None),
    "the same storage in another tensor": (0, lambda o: set_local(o, local(o).detach())),
    "a spec of its own": (
        0,
        set_gradient(lambda g: distribute_tensor(g._local_tensor, g.device_mesh, [Shard(0)])),
    ),
    "another local tensor": (PARAMETER, lambda o: set_local(o, local(o).clone())),
    "other storage": (PARAMETER, set_data(local, torch.clone)),
    "a local tensor of a subclass": (PARAMETER, lambda o: set_local(o, nn.Parameter(local(o)))),
    "other storage of state": (STORAGE, set_data(lambda o: state(o)["state1"], torch.clone)),
    "a replicated gradient": (
        GRADIENT,
        set_gradient(lambda g: distribute_tensor(g._local_tensor, g.device_mesh, [Replicate()])),
    ),
    "a gradient in flight": (
        GRADIENT,
        lambda o: set_local(o, AsyncCollectiveTensor(local_gradient(o)), of_gradient=True),
    ),
    "a negated gradient": (
        GRADIENT,
        lambda o: set_local(o, negated(local_gradient(o)), of_gradient=True),
    ),
    "another dtype of gradient": (
        GRADIENT,
        lambda o: set_local(o, local_gradient(o).bfloat16(), of_gradient=True),
    ),
    "other strides of gradient": (
        GRADIENT,
        lambda o: set_local(o, local_gradient(o).t().contiguous().t(), of_gradient=True),
    ),
    "another local shape of gradient": (
        GRADIENT,
        lambda o: set_local(o, local_gradient(o)[:3].clone(), of_gradient=True),
    ),
    "a freed gradient": (GRADIENT, lambda o: freed(local_gradient(o)) is None),
    "a gradient without its local tensor": (GRADIENT, lambda o: delattr(first(o).grad, "_local_tensor")),
    "a gradient without its spec": (GRADIENT, lambda o: delattr(first(o).grad, "_spec")),
}


@pytest.mark.parametrize("case", SHARDED)
def test_shards_are_looked_at_too(case: str, sharded: Callable[[], Optimizer]) -> None:
    difference, change = SHARDED[case]
    check_both_go_the_same_way(sharded, change, difference)


# Ownership.


def owned(optimizer: Optimizer) -> list[Any]:
    """What the native side touches."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    specs = [p._spec for p in parameters if isinstance(p, DTensor)]
    locals_ = [t._local_tensor for t in (*parameters, *gradients) if isinstance(t, DTensor)]
    dicts = [optimizer.state[p] for p in parameters if p in optimizer.state]
    groups = [optimizer.param_groups, *optimizer.param_groups, *(g["params"] for g in optimizer.param_groups)]
    return [
        *parameters,
        *states,
        *gradients,
        *specs,
        *locals_,
        *dicts,
        *groups,
        optimizer.state,
    ]


@pytest.mark.parametrize(
    "case", ["as planned", "sparse", "another dict", "another placement", "another spec"]
)
def test_references_are_balanced(case: str, sharded: Callable[[], Optimizer]) -> None:
    optimizer = sharded()
    train(optimizer)
    give_gradients(optimizer, 5)
    last = optimizer.param_groups[1]["params"][1]
    if case == "sparse":
        last.grad = last.grad.to_sparse()
    elif case == "another dict":
        optimizer.state[last] = dict(optimizer.state[last])
    elif case.startswith("another"):
        placement = Shard(0) if case == "another spec" else Replicate()
        g = first(optimizer).grad
        first(optimizer).grad = distribute_tensor(g._local_tensor, g.device_mesh, [placement])
    look(optimizer)
    objects, classes, times = owned(optimizer), [Tensor, DTensor], 2000
    gc.collect()
    before = [sys.getrefcount(thing) for thing in objects]
    before_of_classes = [sys.getrefcount(thing) for thing in classes]
    for _ in range(times):
        look(optimizer)
    gc.collect()
    assert [sys.getrefcount(thing) for thing in objects] == before
    # The rest of the process holds the classes too, and lets a few of them go when it likes. A reference
    # that every look keeps or drops makes `times` of them.
    for thing, count in zip(classes, before_of_classes, strict=True):
        assert abs(sys.getrefcount(thing) - count) < times // 10
    assert (look(optimizer) is None) == (case not in ("as planned", "another spec"))


def test_gradients_live_until_release_and_no_longer() -> None:
    optimizer = optimizer_of(plain())
    train(optimizer)
    give_gradients(optimizer, 5)
    gatherer = optimizer._plan._gatherer
    alive = weakref.ref(first(optimizer).grad)
    assert gatherer.gather(optimizer.param_groups, optimizer.state) == 4
    optimizer.zero_grad()
    assert alive() is not None
    gatherer.release()
    assert alive() is None
    give_gradients(optimizer, 6)
    alive = weakref.ref(first(optimizer).grad)
    optimizer.step()
    optimizer.zero_grad()
    assert alive() is None


def test_nothing_outlives_the_optimizer() -> None:
    parameters = plain()
    optimizer = optimizer_of(parameters)
    train(optimizer)
    alive = [weakref.ref(value) for value in (*state(optimizer).values(), optimizer._plan._gatherer)]
    parameter = weakref.ref(parameters[0])
    gc.disable()
    try:
        del optimizer
        assert not [reference for reference in alive if reference() is not None]
        del parameters
        assert parameter() is None
    finally:
        gc.enable()


def test_a_cycle_through_the_optimizer_can_be_collected() -> None:
    optimizer = optimizer_of(plain())
    train(optimizer)
    first(optimizer).optimizer = optimizer
    alive = [weakref.ref(first(optimizer)), weakref.ref(optimizer)]
    del optimizer
    gc.collect()
    assert not [reference for reference in alive if reference() is not None]


def test_parameters_can_still_be_swapped() -> None:
    p, optimizer = nn.Parameter(tensor(16)), None
    optimizer = bnb_fsdp.AdamW8bit([p], min_8bit_size=0)
    train(optimizer)
    torch.utils.swap_tensors(p, nn.Parameter(tensor(16, seed=9)))
    assert look(optimizer) is None
