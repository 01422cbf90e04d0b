"""Saving and loading of optimizer state held by plain tensors.

State of DTensor parameters is local to a rank. `torch.distributed.checkpoint` would save one rank's copy of
each plain tensor and hand it to every rank on load, without an error, so `state_dict` refuses to
export it until a sharded format exists.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import sharding, state
from .groups import parameter_name

if TYPE_CHECKING:
    from .optim.base import BlockwiseOptimizer


def check_saveable(optimizer: BlockwiseOptimizer) -> None:
    """Raise NotImplementedError if the optimizer holds state of DTensor parameters."""
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if sharding.is_sharded(parameter) and optimizer.state.get(parameter):
                raise NotImplementedError(
                    f"{parameter_name(optimizer.param_groups, index, position)} is a "
                    f"{sharding.describe(parameter)}: this version of bnb_fsdp cannot save the state of sharded "
                    "parameters, and torch.distributed.checkpoint would silently mix up the ranks' state. Save the "
                    "model only (Trainer: save_only_model=True, accelerate: save_model)."
                )


def load(optimizer: BlockwiseOptimizer, state_dict: dict[str, Any]) -> None:
    """`torch.optim.Optimizer.load_state_dict` that keeps every tensor's dtype and checks before it changes.

    Moves state to its parameter's device. Raises ValueError for other group sizes, missing hyperparameters,
    state of another optimizer or shape; the optimizer is then unchanged.
    """
    state_dict = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = pre_hook(optimizer, state_dict)
        if result is not None:
            state_dict = result
    groups = optimizer.param_groups
    saved_groups = deepcopy(state_dict["param_groups"])
    _check_groups(optimizer, saved_groups)
    owners = dict(
        zip(
            chain.from_iterable(group["params"] for group in saved_groups),
            (
                (parameter, parameter_name(groups, index, position))
                for index, group in enumerate(groups)
                for position, parameter in enumerate(group["params"])
            ),
        )
    )
    loaded: dict[Tensor, dict[str, Any]] = {}
    for key, values in state_dict["state"].items():
        if key not in owners:
            raise ValueError(f"the state dict has state for an unknown parameter {key!r}.")
        parameter, name = owners[key]
        if values:
            loaded[parameter] = _entry(optimizer, parameter, name, values)
    for group, saved in zip(groups, saved_groups):
        saved["params"] = group["params"]
        for key in group:  # keys that others added to the live group since
            saved.setdefault(key, group[key])
    optimizer.__setstate__({"state": defaultdict(dict, loaded), "param_groups": saved_groups})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _check_groups(optimizer: BlockwiseOptimizer, saved_groups: list[dict[str, Any]]) -> None:
    groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"the state dict has parameter groups of {saved_sizes} parameters, the optimizer of {sizes}; "
            "build the optimizer with the same groups in the same order."
        )
    for index, (group, saved) in enumerate(zip(groups, saved_groups)):
        # Only what this class defines: schedulers, for one, add keys of their own to a live group.
        saved["capturable"] = group["capturable"]  # where counts live is this run's choice
        missing = sorted(set(optimizer.defaults) & set(group) - set(saved))
        if missing:
            raise ValueError(
                f"group {index} of the state dict lacks {missing}: it was not saved by this optimizer's class "
                f"({type(optimizer).__name__})."
            )
        if saved["format"] != group["format"]:
            raise ValueError(
                f"the state dict has format {saved['format']!r}, this version of bnb_fsdp reads {group['format']}."
            )
        optimizer._check_group(saved, index)


def _entry(
    optimizer: BlockwiseOptimizer, parameter: Tensor, name: str, values: dict[str, Any]
) -> dict[str, Any]:
    """State of one parameter: copied, moved to its device, dtypes kept, checked."""
    rule = optimizer.rule
    if not isinstance(values.get("state1"), Tensor):
        raise ValueError(
            f"{name}: the state dict has keys {sorted(values)}, expected {list(rule.states)} and step."
        )
    keys = set(state.keys(rule, state.bits_of(values)))
    if set(values) != keys:
        raise ValueError(
            f"{name}: the state dict has keys {sorted(values)}, {rule.name} expects {sorted(keys)}."
        )
    for key in keys - {"step"}:
        if not isinstance(values[key], Tensor):
            raise ValueError(f"{name}: {key} in the state dict is {values[key]!r}, expected a tensor.")
    shard = sharding.local(parameter).detach()
    entry: dict[str, Any] = {}
    for key, value in values.items():
        if key == "step":
            entry[key] = torch.as_tensor(value, dtype=torch.float32).detach().cpu().clone()
        elif key in rule.states:
            laid_out = torch.empty_like(shard, dtype=value.dtype) if value.shape == shard.shape else value
            entry[key] = laid_out.copy_(value) if laid_out is not value else value
        else:
            entry[key] = value.detach().to(shard.device, copy=True)
    state.check_shapes(name, shard, entry, rule)
    return entry
