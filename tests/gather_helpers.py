"""What the tests of the native look share: optimizers with every kind of parameter, twins, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizer_helpers import assert_like, assert_same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import bnb_fsdp
from bnb_fsdp.backends.gather import Gatherer

Optimizer = Any

needs_exchange = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack C exchange interface"
)


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain() -> list[nn.Parameter]:
    return [nn.Parameter(tensor(16, 16)), nn.Parameter(tensor(300, seed=1)), nn.Parameter(tensor(2, 0))]


def optimizer_of(parameters: list[Any], kind: type = bnb_fsdp.AdamW8bit, **kwargs: Any) -> Optimizer:
    """Two groups, the second with a frozen and a bfloat16 parameter."""
    others = [nn.Parameter(tensor(5, 5), requires_grad=False), nn.Parameter(tensor(9, 9, seed=3).bfloat16())]
    return kind([{"params": parameters}, {"params": others, "lr": 0.1}], min_8bit_size=0, **kwargs)


def gradient_like(p: Tensor, seed: int) -> Tensor:
    """As FSDP2 makes it: with the spec of its parameter."""
    if isinstance(p, DTensor):
        return DTensor(gradient_like(p._local_tensor, seed), p._spec, requires_grad=False)
    return torch.empty_like(p).detach().copy_(tensor(*p.shape, seed=seed + 100))


def give_gradients(optimizer: Optimizer, seed: int) -> None:
    for group in optimizer.param_groups:
        for index, p in enumerate(group["params"]):
            if p.requires_grad:
                p.grad = gradient_like(p, seed + index)


@contextmanager
def python_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gatherer, "make", lambda *_: None)
        yield


def step(optimizer: Optimizer) -> str:
    """The error, if any."""
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(optimizer: Optimizer, steps: int = 2, first: int = 0) -> None:
    for index in range(first, first + steps):
        give_gradients(optimizer, index)
        optimizer.step()


def twins(make: Callable[[], Optimizer]) -> tuple[Optimizer, Optimizer]:
    """Two trained optimizers, the second of which has no native look; each with new gradients."""
    fast, slow = make(), make()
    train(fast)
    with python_only():
        train(slow)
    assert fast._plan._gatherer is not None and slow._plan._gatherer is None
    for optimizer in (fast, slow):
        give_gradients(optimizer, 50)
    return fast, slow


def look(optimizer: Optimizer) -> int | None:
    gatherer = optimizer._plan._gatherer
    found: int | None = gatherer.gather(optimizer.param_groups, optimizer.state)
    gatherer.release()
    return found


def check_both_go_the_same_way(
    make: Callable[[], Optimizer], change: Callable[[Optimizer], Any], difference: int
) -> None:
    """Change two twins; the native look must see ``difference``, and both must step or fail alike, twice."""
    fast, slow = twins(make)
    kept = [change(optimizer) for optimizer in (fast, slow)]
    gatherer = fast._plan._gatherer
    found = look(fast)
    assert gatherer.difference == difference and (found is None) == bool(difference)
    error = step(fast)
    with python_only():
        assert step(slow) == error
    if not error:
        assert_like(fast, slow)
        train(fast, first=60)
        with python_only():
            train(slow, first=60)
    assert_like(fast, slow)
    assert_same(kept[0], kept[1])


def first(optimizer: Optimizer) -> Any:
    return optimizer.param_groups[0]["params"][0]


def state(optimizer: Optimizer) -> dict[str, Any]:
    result: dict[str, Any] = optimizer.state[first(optimizer)]
    return result


def set_data(
    get: Callable[[Optimizer], Tensor], value: Callable[[Tensor], Tensor]
) -> Callable[[Optimizer], Tensor]:
    """Another storage; the old is kept, so that a write to it shows."""

    def change(optimizer: Optimizer) -> Tensor:
        old = get(optimizer).data
        get(optimizer).data = value(old)
        return old

    return change


def set_gradient(value: Callable[[Tensor], Tensor | None]) -> Callable[[Optimizer], None]:
    def change(optimizer: Optimizer) -> None:
        first(optimizer).grad = value(first(optimizer).grad)

    return change


def negated(gradient: Tensor) -> Tensor:
    """The same values, lazily negated: of twice the strides, as the public ways make it."""
    return torch.complex(torch.zeros_like(gradient), -gradient).conj().imag


def freed(gradient: Tensor) -> Tensor:
    gradient.untyped_storage().resize_(0)
    return gradient
