"""Takes a live optimizer of bitsandbytes over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import optim, state
from ..checkpoint import foreign, foreign_groups
from ..groups import check_minimum, parameter_name
from ..optim.base import BlockwiseOptimizer

KNOWN_VERSIONS = "0.50."
"""Versions of bitsandbytes whose optimizers' attributes were read begin so."""

_BASES = {
    "adam": "Adam",
    "lamb": "LAMB",
    "ademamix": "AdEMAMix",
    "momentum": "SGD",
    "lars": "LARS",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "lion": "Lion",
}
_ARGUMENTS = ("optim_bits", "min_8bit_size", "max_unorm", "skip_zeros")
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "alpha", "t_alpha", "t_beta3")


@torch.no_grad()
def from_bitsandbytes(optimizer: Any, *, backend: str | None = None) -> BlockwiseOptimizer:
    """This package's optimizer of the same name, with the parameters, groups and state of a bitsandbytes optimizer.

    ``bitsandbytes.optim.AdamW8bit`` becomes `bnb_fsdp.AdamW8bit`, and so on, stepped or not. Parameter objects,
    ``param_names`` and hyperparameters are the same, other keys of groups (``initial_lr``) too. Each parameter has the
    bits that its state has; where there is none yet, those that bitsandbytes would choose at its first step, with the
    overrides of its GlobalOptimManager (``override_config``, ``register_parameters``) and the 32-bit state that its
    ``StableEmbedding`` and ``Embedding`` register. They become overrides of the new optimizer's groups, by position.

    State is shared, not copied, where it fits as it is: contiguous, on the parameter's device, not paged. So the old
    optimizer must not be stepped any more. Hooks stay with it, and learning rate schedulers have to be built anew.

    Args:
        optimizer: an instance of a class of `bitsandbytes.optim`, of version 0.50.
        backend: as of all optimizers of this package.

    Raises:
        RuntimeError: bitsandbytes is missing or of another version.
        TypeError: ``optimizer`` is not bitsandbytes'.
        ValueError: a setting that this package does not have (``skip_zeros``, ``max_unorm`` but for LAMB and LARS,
            percentile clipping, an override of a single parameter's learning rate or the like), or state that does not
            fit its parameter. Nothing was changed then.
    """
    base = _checked_import()
    if not isinstance(optimizer, base):
        raise TypeError(
            f"from_bitsandbytes takes an optimizer of bitsandbytes.optim, got {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}."
        )
    kind = str(optimizer.optimizer_name)
    name, arguments = _class(optimizer, kind)
    configs = _configs(optimizer)
    for (index, position), config in configs.items():
        _check_config(optimizer, kind, index, position, config)
    groups = [_group(optimizer, name, kind, index) for index in range(len(optimizer.param_groups))]
    if kind in ("momentum", "lars"):  # they have no default
        arguments |= {key: groups[0][key] for key in ("lr", "momentum")}
    result: BlockwiseOptimizer = getattr(optim, name)(groups, backend=backend, **arguments)
    _set_overrides(result, optimizer, configs)
    _take_state(result, optimizer, kind)
    return result


def _checked_import() -> Any:
    """bitsandbytes' base class; RuntimeError if the package is missing or of an unknown version."""
    try:
        import bitsandbytes
        from bitsandbytes.optim.optimizer import Optimizer8bit
    except ImportError as error:
        raise RuntimeError(f"from_bitsandbytes() needs bitsandbytes {KNOWN_VERSIONS}x: {error}.") from error
    if not bitsandbytes.__version__.startswith(KNOWN_VERSIONS):
        raise RuntimeError(
            f"from_bitsandbytes() knows the optimizers of bitsandbytes {KNOWN_VERSIONS}x, but "
            f"{bitsandbytes.__version__} is installed. Install a known version, or save its state_dict() and load that "
            "into an optimizer of bnb_fsdp."
        )
    return Optimizer8bit


def _class(optimizer: Any, kind: str) -> tuple[str, dict[str, Any]]:
    """Our class and its arguments, without those that groups have."""
    if kind not in _BASES:
        raise ValueError(
            f"{type(optimizer).__name__} runs bitsandbytes' {kind!r}, which this version does not have; choose from "
            f"{', '.join(_BASES)}."
        )
    bits = optimizer.args.optim_bits
    if bits not in state.OPTIM_BITS:
        raise ValueError(f"{type(optimizer).__name__} has optim_bits={bits!r}, expected 8 or 32.")
    clipping = getattr(optimizer.args, "percentile_clipping", 100)
    if clipping != 100:
        raise ValueError(
            f"{type(optimizer).__name__} has percentile_clipping={clipping!r}, which bitsandbytes dropped in 0.50 and "
            "this package does not have; set it to 100, and clip gradients before step()."
        )
    arguments: dict[str, Any] = {"min_8bit_size": optimizer.args.min_8bit_size}
    if kind in ("lamb", "lars"):
        arguments["max_unorm"] = optimizer.args.max_unorm
    classes = (each for each in type(optimizer).__mro__ if each.__module__.startswith("bitsandbytes.optim."))
    name = next(classes).__name__
    family = name.removesuffix("8bit").removesuffix("32bit")
    if name == f"{family}{bits}bit" and hasattr(optim, name):
        return name, arguments
    arguments["optim_bits"] = bits
    # The class of a name without bits, or one whose bits were changed since, or a base class.
    return (family if hasattr(optim, family) else _BASES[kind]), arguments


def _group(optimizer: Any, name: str, kind: str, index: int) -> dict[str, Any]:
    group = optimizer.param_groups[index]
    where = f"{type(optimizer).__name__}, group {index}"
    values = foreign_groups.from_bitsandbytes(where, name, kind, group, is_certain=True)
    names = values.pop("param_names", None)
    params = list(group["params"])
    return {**values, "params": list(zip(names, params)) if names else params}


def _configs(optimizer: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """What bitsandbytes' next step will use for each parameter, by group and position.

    Its first step sets the registered modules' settings in place of others of the same parameter; the process-wide
    tables are left as they are here.
    """
    modules: dict[int, Mapping[str, Any]] = {}
    if not optimizer.initialized:
        for module, attribute, config in optimizer.mng.module_weight_config_triple:
            modules[id(getattr(module, attribute, None))] = config
    result = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in modules:
                config = {**_without_overrides(optimizer, group), **modules[id(parameter)]}
            else:
                config = optimizer.get_config(index, position, group)
            result[index, position] = config
    return result


def _without_overrides(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """As bitsandbytes' ``get_config`` without its manager."""
    defaults = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
    values = {key: group.get(key, defaults.get(key)) for key in _HYPERPARAMETERS}
    return {**values, **{key: getattr(optimizer.args, key) for key in _ARGUMENTS}}


def _check_config(optimizer: Any, kind: str, index: int, position: int, config: Mapping[str, Any]) -> None:
    """ValueError for what this package cannot do, or not for a single parameter."""
    where = f"{type(optimizer).__name__}, {parameter_name(optimizer.param_groups, index, position)}"
    if config["skip_zeros"]:
        raise ValueError(f"{where}: skip_zeros={config['skip_zeros']!r} is not supported; set it to False.")
    if kind not in ("lamb", "lars") and config["max_unorm"] > 0:
        raise ValueError(
            f"{where}: max_unorm={config['max_unorm']!r} is not supported but by LAMB and LARS; set it to 0.0."
        )
    usual = _without_overrides(optimizer, optimizer.param_groups[index])
    for key in (*_HYPERPARAMETERS, "max_unorm"):
        if _plain(config[key]) != _plain(usual[key]):
            raise ValueError(
                f"{where}: GlobalOptimManager overrides {key}={config[key]!r} of one parameter; its group has "
                f"{usual[key]!r}. Give the parameter a group of its own with this {key}."
            )
    if config["optim_bits"] not in state.OPTIM_BITS:
        raise ValueError(f"{where}: optim_bits={config['optim_bits']!r}, expected 8 or 32.")
    check_minimum(where, config["min_8bit_size"])


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _set_overrides(
    result: BlockwiseOptimizer, optimizer: Any, configs: Mapping[tuple[int, int], Mapping[str, Any]]
) -> None:
    """Per-parameter settings that give each parameter the bits that it has, or would get, in bitsandbytes."""
    for index, group in enumerate(result.param_groups):
        settings: list[dict[str, int]] = []
        for position, parameter in enumerate(group["params"]):
            config = configs[index, position]
            setting = {
                key: config[key] for key in ("optim_bits", "min_8bit_size") if config[key] != group[key]
            }
            bits = _bits_of(optimizer.state.get(parameter))
            found = state.decide(parameter, {**group, "params": [parameter], "overrides": [setting]}, 0).bits
            if bits is not None and bits != found:
                setting = {"optim_bits": bits, **({"min_8bit_size": 0} if bits == 8 else {})}
            settings.append(setting)
        group["overrides"] = settings if any(settings) else []


def _bits_of(values: Any) -> int | None:
    if not values or not isinstance(values.get("state1"), Tensor):
        return None
    return 8 if values["state1"].dtype == torch.uint8 else 32


def _take_state(result: BlockwiseOptimizer, optimizer: Any, kind: str) -> None:
    found = []
    for index, group in enumerate(result.param_groups):
        for position, parameter in enumerate(group["params"]):
            values = optimizer.state.get(parameter)
            if not values:
                continue
            name = parameter_name(result.param_groups, index, position)
            has_norm = group.get("max_unorm", 0) > 0
            entry = foreign.Entry("bitsandbytes", kind, has_norm, _in_order(dict(values)))
            bits = state.decide(parameter, group, position).bits
            checked = foreign.checked(result, parameter, name, bits, entry)
            if checked is not None:
                found.append((parameter, checked))
    for parameter, checked in found:
        result.state[parameter], _, _ = foreign.converted(result.rule, parameter, checked, share=True)


def _in_order(values: dict[str, Any]) -> dict[str, Any]:
    """State that is not contiguous as bitsandbytes reads it on its device: on CUDA by place in memory."""
    for key in ("state1", "state2"):
        value = values.get(key)
        if (
            isinstance(value, Tensor)
            and not value.is_contiguous()
            and type(value) in (Tensor, torch.nn.Parameter)
        ):
            if value.is_cuda:
                strides = torch.empty(value.shape, device="meta").stride()
                values[key] = value.as_strided(value.shape, strides)
            else:
                values[key] = value.contiguous()
    return values
