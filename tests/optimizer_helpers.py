"""What the optimizer tests share: parameters, gradients, training, snapshots and their comparison."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bnb_fsdp import Adagrad8bit, AdamW8bit, AdamW32bit, Lion8bit, Lion32bit, RMSprop8bit, SGD8bit

N = 4096 + 300


class Momentum8bit(SGD8bit):
    """SGD8bit, whose learning rate and momentum have no default, with one for each."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9, **kwargs: Any) -> None:
        super().__init__(params, lr, momentum, **kwargs)


CLASSES = {
    "adam": AdamW8bit, "adam 32": AdamW32bit, "lion": Lion8bit, "lion 32": Lion32bit, "sgd": Momentum8bit,
    "rmsprop": RMSprop8bit, "adagrad": Adagrad8bit,
}  # fmt: skip
every_class = pytest.mark.parametrize("kind", CLASSES.values(), ids=list(CLASSES))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(normal(*shape, seed=seed, dtype=dtype))


def set_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A gradient for every trainable parameter, of its own memory layout and dtype."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                p.grad = torch.empty_like(p).copy_(normal(*p.shape, seed=seed + 100 + p.numel() % 97))


def train(optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_gradients(optimizer, step)
        optimizer.step()


def snapshot(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of every parameter, its state and the groups' other values."""
    result: list[Any] = []
    for group in optimizer.param_groups:
        result.append({key: value for key, value in group.items() if key != "params"})
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            result += [p.detach().clone(), {key: value.clone() for key, value in state.items()}]
    return copy.deepcopy(result)


def assert_same(first: Any, second: Any) -> None:
    """Equal in structure and value, tensors bit for bit in dtype, shape and strides."""
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True, check_stride=True)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        assert_same(list(first.values()), list(second.values()))
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for a, b in zip(first, second):
            assert_same(a, b)
    else:
        assert first == second


def assert_like(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
    assert_same(snapshot(first), snapshot(second))
