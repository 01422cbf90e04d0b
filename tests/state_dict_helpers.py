"""What the tests of state dicts share: classes, memory layouts, a way through a file."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_helpers import normal
from torch import Tensor, nn

import bnb_fsdp

NAMES = ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "Adagrad")
STATES = {"Adam": 2, "AdamW": 2}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_class = pytest.mark.parametrize(
    ("name", "bits"), list(itertools.product(NAMES, (8, 32))), ids=lambda value: str(value)
)

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: normal(1000),
    "matrix": lambda: normal(20, 300),
    "rows of whole blocks": lambda: normal(6, 512),
    "transposed": lambda: normal(300, 20).t(),
    "transposed, whole blocks": lambda: normal(20, 512).t(),
    "channels_last": lambda: normal(5, 70, 3, 3).to(memory_format=torch.channels_last),
    "channels_last, whole blocks": lambda: normal(2, 256, 2, 3).to(memory_format=torch.channels_last),
    "permuted": lambda: normal(7, 20, 30).permute(1, 2, 0),
    "permuted, whole blocks": lambda: normal(3, 4, 256).permute(1, 2, 0),
    "scalar": lambda: normal(),
    "one element": lambda: normal(1, 1, 1),
    "no rows": lambda: normal(0, 300),
    "no columns": lambda: normal(5, 0, 3),
    "nothing": lambda: normal(0),
    "dimensions of one": lambda: normal(1, 700, 1),
    "dimensions of one, permuted": lambda: normal(90, 1, 40).permute(2, 1, 0),
}  # fmt: skip


def make(name: str, bits: int, params: Any, **kwargs: Any) -> Any:
    kwargs = {"lr": 1e-2, "min_8bit_size": 0} | ({"momentum": 0.9} if name == "SGD" else {}) | kwargs
    return getattr(bnb_fsdp, f"{name}{bits}bit")(params, **kwargs)


def of_all_kinds() -> list[nn.Parameter]:
    return [nn.Parameter(layout().to(dtype)) for dtype in DTYPES for layout in LAYOUTS.values()]


def twin(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in parameters]


def through_a_file(state_dict: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
