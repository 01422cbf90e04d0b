"""Optimizer names and the classes behind them."""

from __future__ import annotations

from difflib import get_close_matches
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
    """The class of a name; ValueError with all names, and those that look alike, if unknown."""
    if name in optimizer_names():
        return _CLASSES[name]
    similar = " or ".join(map(repr, _similar(name)))
    hint = f"did you mean {similar}? Choose" if similar else "choose"
    raise ValueError(f"unknown optimizer {name!r}; {hint} one of {', '.join(_CLASSES)}.")


def _similar(name: object) -> list[str]:
    """At most two of our names that ``name``, perhaps a class or a name of bitsandbytes, may stand for."""
    given = str(name).lower().removeprefix(PREFIX)
    short = {known.removeprefix(PREFIX): known for known in _CLASSES}
    for alike in (given, given.replace("paged", "paged_").replace("__", "_")):
        if alike in short:
            return [short[alike]]
    return [short[found] for found in get_close_matches(given, short, n=2)]


def create_optimizer(name: str, params: Params, **kwargs: Any) -> BlockwiseOptimizer:
    """``optimizer_class(name)(params, **kwargs)``."""
    return optimizer_class(name)(params, **kwargs)
