"""Names of parameters and per-parameter overrides within parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from reprlib import repr as short_repr
from typing import Any

from torch import Tensor

from .state import OPTIM_BITS, OVERRIDE_KEYS

OverrideList = list[tuple[str | Tensor, dict[str, int]]]


def parameter_name(groups: list[dict[str, Any]], index: int, position: int) -> str:
    """``parameter 'model.layers.0.weight' (shape ...)``, or its place in the groups if it has no name."""
    group = groups[index]
    parameter = group["params"][position]
    names = group.get("param_names")
    label = repr(names[position]) if names else f"{position} of group {index}"
    return f"parameter {label} (shape {tuple(parameter.shape)})"


def check_minimum(where: str, minimum: object) -> None:
    """Raise ValueError unless ``minimum`` is a number of elements."""
    if not isinstance(minimum, int) or isinstance(minimum, bool) or minimum < 0:
        raise ValueError(f"{where}: min_8bit_size={minimum!r} must be an integer >= 0 (elements).")


def check_group_overrides(where: str, group: dict[str, Any]) -> None:
    """Raise ValueError unless the group's own ``overrides`` is what an optimizer of this package put there."""
    overrides = group["overrides"]
    if not isinstance(overrides, list) or (overrides and len(overrides) != len(group["params"])):
        raise ValueError(
            f"{where}: overrides belong to the optimizer's constructor (name pattern or parameter -> settings), "
            f"not to a group; got {overrides!r}."
        )


def check_overrides(overrides: Mapping[str | Tensor, Mapping[str, int]] | None) -> OverrideList:
    """Validated (pattern or parameter, settings) pairs; ValueError names the key and the choices."""
    result: OverrideList = []
    if overrides is None:
        return result
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"overrides={short_repr(overrides)} must map name patterns or parameters to their settings, such as "
            "{'*.embed_tokens.weight': {'optim_bits': 32}}."
        )
    for key, settings in overrides.items():
        if not isinstance(key, (str, Tensor)):
            raise ValueError(f"overrides: key {key!r} must be a name pattern or a parameter.")
        label = repr(key) if isinstance(key, str) else f"parameter of shape {tuple(key.shape)}"
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"overrides[{label}]={short_repr(settings)} must be a mapping such as {{'optim_bits': 32}}; "
                f"keys: {', '.join(OVERRIDE_KEYS)}."
            )
        unknown = [setting for setting in settings if setting not in OVERRIDE_KEYS]
        if unknown:
            raise ValueError(
                f"overrides[{label}]: unknown key {unknown[0]!r}; choose from {', '.join(OVERRIDE_KEYS)}. "
                "Other hyperparameters are set by parameter group."
            )
        if settings.get("optim_bits", 8) not in OPTIM_BITS:
            raise ValueError(f"overrides[{label}]: optim_bits={settings['optim_bits']!r}; choose 8 or 32.")
        check_minimum(f"overrides[{label}]", settings.get("min_8bit_size", 0))
        result.append((key, dict(settings)))
    return result


def resolve_overrides(
    group: dict[str, Any], overrides: OverrideList
) -> tuple[list[dict[str, int]], list[str | Tensor]]:
    """The settings of each parameter of ``group`` (empty list if there are none), and the keys that matched.

    Later keys win. Patterns are `fnmatch` patterns on the group's ``param_names``.
    """
    params = group["params"]
    names = group.get("param_names") or [None] * len(params)
    settings: list[dict[str, int]] = [{} for _ in params]
    matched: list[str | Tensor] = []
    for key, values in overrides:
        for position, (name, parameter) in enumerate(zip(names, params)):
            hit = name is not None and fnmatchcase(name, key) if isinstance(key, str) else parameter is key
            if hit:
                settings[position].update(values)
                matched.append(key)
    return (settings if any(settings) else []), matched
