"""Optimizer names and the classes behind them."""

from __future__ import annotations

from typing import Any

from . import optim
from .optim.base import BlockwiseOptimizer, Params

PREFIX = "bnb_fsdp_"

_CLASSES: dict[str, type[BlockwiseOptimizer]] = {
    PREFIX + name.lower().replace("paged", "paged_"): getattr(optim, name)
    for name in optim.__all__
    if name != "BlockwiseOptimizer"
}


def optimizer_names() -> tuple[str, ...]:
    """All names, such as ``bnb_fsdp_adamw8bit``: ``bnb_fsdp_`` and the lower-case class name, ``paged_`` apart."""
    return tuple(_CLASSES)


def optimizer_class(name: str) -> type[BlockwiseOptimizer]:
    """The class of a name; ValueError with all names if unknown."""
    try:
        return _CLASSES[name]
    except KeyError:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {', '.join(_CLASSES)}.") from None


def create_optimizer(name: str, params: Params, **kwargs: Any) -> BlockwiseOptimizer:
    """``optimizer_class(name)(params, **kwargs)``."""
    return optimizer_class(name)(params, **kwargs)
