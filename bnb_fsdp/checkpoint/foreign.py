"""State dicts of bitsandbytes, torch.optim and lion-pytorch, as `BlockwiseOptimizer.load_state_dict` takes them.

`translated` recognises such a dict and turns its parameter groups into this package's; what belongs to a parameter
becomes an `Entry`, which is checked (`checked`) before anything changes and converted (`converted`) afterwards,
parameter by parameter.

bitsandbytes' codes and scales are taken bit for bit where its blocks, 256 consecutive elements of the whole contiguous
tensor, are blocks here too. Other blocks are dequantised and requantised, and counted as such. Its code maps
(``qmap1``, ``qmap2``) may differ from ours by a few units in the last place, since `torch.linspace` does from platform
to platform: codes then stay as they are, because a code means a place in the map; other maps are refused. Blocks of
zeros have code 0 on the CPU, 255 (first moments) or 0 on CUDA: they are taken as they are.

float states are quantised where the parameter has 8-bit state; 8-bit states are dequantised where it has 32-bit state.
torch.optim.SGD and lion-pytorch count no steps: their states get ``step`` 1, since SGD's first step takes the gradient
without looking at the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import codebook, sharding, state
from ..codebook import BLOCK_SIZE
from ..rules import Rule
from .foreign_groups import from_bitsandbytes, from_torch
from .foreign_values import Checked, Piece, converted
from .packages import BITSANDBYTES, TORCH, WRAPPED, kind_of

if TYPE_CHECKING:
    from ..optim.base import BlockwiseOptimizer

_OLD_BLOCK_SIZE = 2048  # bitsandbytes before 0.44
__all__ = ["Checked", "Entry", "checked", "converted", "own_kind", "translated"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MARKS = {
    "adam": {"amsgrad"},
    "momentum": {"dampening", "nesterov"},
    "rmsprop": {"alpha", "centered"},
    "adagrad": {"lr_decay", "initial_accumulator_value"},
}
"""Group keys by which torch.optim's classes are told apart, also if they never stepped."""
_NOT_TORCH = {"amsgrad", "maximize", "foreach", "nesterov", "centered", "lr_decay"}
_LOADABLE = (
    "Adam, AdamW, SGD, RMSprop and Adagrad of torch.optim, Lion of lion-pytorch, and bitsandbytes' optimizers"
)


class Entry(NamedTuple):
    """What another package keeps of one parameter. ``package``: "torch" or "bitsandbytes"; ``has_norm``: whether the
    parameter's group limits updates (``max_unorm``), for which bitsandbytes keeps ``unorm_vec``."""

    package: str
    kind: str
    has_norm: bool
    values: dict[str, Any]


# Recognition


def translated(optimizer: BlockwiseOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """``state_dict`` with this package's groups and `Entry` values, or None if no other package that is known wrote it.

    Raises ValueError for another algorithm, for groups of other sizes, and for hyperparameters that this optimizer
    does not have, by name.
    """
    groups, entries = state_dict["param_groups"], state_dict["state"]
    package = _package(groups, entries)
    if package is None:
        return None
    from .state_dict import check_sizes

    check_sizes(optimizer, groups)
    result = []
    kind = ""
    has_norm: dict[Any, bool] = {}
    for index, (live, group) in enumerate(zip(optimizer.param_groups, groups)):
        where = f"group {index} of the state dict"
        if package == "torch":
            kind = _torch_kind(optimizer, where, group)
            values = from_torch(where, kind, group)
        else:
            kind = own_kind(optimizer)
            if "state2" in BITSANDBYTES[kind].states and "t_alpha" not in group and not entries:
                raise ValueError(
                    f"{where} lacks 't_alpha' and there is no state: it was saved by an optimizer of bitsandbytes with "
                    f"one state, {type(optimizer).__name__} ({kind}) has more. Build the optimizer that was saved."
                )
            values = from_bitsandbytes(f"{where} (bitsandbytes)", type(optimizer).__name__, kind, group)
        own = {key: live[key] for key in optimizer.defaults if key not in values and key in live}
        values.pop("param_names", None)
        result.append({**own, **values, "params": _ordered(live, group)})
        has_norm.update((number, live.get("max_unorm", 0) > 0) for number in group["params"])
    return {
        **state_dict,
        "param_groups": result,
        "state": {
            key: Entry(package, kind, has_norm[key], dict(values))
            if isinstance(values, Mapping) and values
            else values
            for key, values in _of_parameters(entries, has_norm)
        },
    }


def own_kind(optimizer: BlockwiseOptimizer) -> str:
    """The algorithm of ``optimizer``, a key of `packages.BITSANDBYTES`."""
    return kind_of(optimizer.rule.name, optimizer.defaults)


def _package(groups: Any, entries: Any) -> str | None:
    """Whether torch (or lion-pytorch) or bitsandbytes wrote the dict; None if neither did."""
    if not isinstance(groups, (list, tuple)) or not isinstance(entries, Mapping):
        return None
    if not groups or not all(isinstance(group, Mapping) and "params" in group for group in groups):
        return None
    keys = set().union(*groups)
    if keys & {"format", "overrides", "min_8bit_size"} or "lr" not in keys:
        return None  # this package's, or nobody's
    found = [values for values in entries.values() if isinstance(values, Mapping) and values]
    if any(WRAPPED in values or "state1" in values for values in found):
        return "bitsandbytes"
    if found or keys & _NOT_TORCH or "betas" not in keys:
        return "torch"
    return "bitsandbytes" if "eps" in keys else "torch"  # never stepped: bitsandbytes', or Lion's


def _of_parameters(entries: Mapping[Any, Any], known: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, values in entries.items():
        if key not in known and isinstance(values, Mapping) and values:
            raise ValueError(
                f"the state dict has state for an unknown parameter {key!r}: it is in none of its param_groups."
            )
        yield key, values


def _ordered(live: Mapping[str, Any], group: Mapping[str, Any]) -> list[Any]:
    """The group's parameters in the order of the live group: by name if both have the same names, else as they are."""
    params = list(group["params"])
    names = [str(name) for name in group.get("param_names") or params]
    wanted = list(live.get("param_names") or ())
    if len(names) == len(set(names)) == len(params) and sorted(names) == sorted(wanted):
        by_name = dict(zip(names, params))
        return [by_name[name] for name in wanted]
    return params


def _torch_kind(optimizer: BlockwiseOptimizer, where: str, group: Mapping[str, Any]) -> str:
    own = own_kind(optimizer)
    kinds = [kind for kind, marks in _MARKS.items() if marks <= set(group)]
    if not kinds and "betas" in group and not {"eps", "maximize"} & set(group):
        kinds = ["lion"]
    if len(kinds) != 1:
        raise ValueError(
            f"{where} has keys {sorted(set(group) - {'params'})}, which are those of no optimizer that can be loaded; "
            f"choose from {_LOADABLE}."
        )
    if kinds[0] != own:
        fits = TORCH[own].name if own in TORCH else f"bitsandbytes' {own}"
        raise ValueError(
            f"{where} was saved by another algorithm: {TORCH[kinds[0]].name}; {type(optimizer).__name__} continues "
            f"{fits}. Build the optimizer that was saved."
        )
    return kinds[0]


# Checks of one parameter


def checked(
    optimizer: BlockwiseOptimizer, parameter: Tensor, name: str, bits: int, entry: Entry
) -> Checked | None:
    """ValueError, naming the parameter, if ``entry`` is no state for it; None if there is none yet."""
    from .state_dict import checked_step

    shard = sharding.local(parameter)
    if shard.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: give it storage (to_empty) before loading state.")
    if bits == 8:
        _box(parameter, name)
    if entry.package == "torch":
        found = _torch_pieces(optimizer.rule, parameter, name, entry)
    else:
        found = _bitsandbytes_pieces(optimizer.rule, parameter, name, entry)
    if found is None:
        return None
    step, pieces = found
    for key, piece in pieces.items():
        _check_part(parameter, f"{name}: {key}", piece.value)
    return Checked(name, checked_step(name, step), bits, pieces)


def _torch_pieces(
    rule: Rule, parameter: Tensor, name: str, entry: Entry
) -> tuple[Any, dict[str, Piece]] | None:
    other = TORCH[entry.kind]
    if entry.kind == "momentum" and entry.values.get("momentum_buffer", 0) is None:
        return None  # as SGD leaves it before the first step
    _check_keys(
        name, entry.values, {"step"} if other.has_step else set(), set(other.states.values()), other.name
    )
    pieces = {}
    for key, given in other.states.items():
        value = entry.values[given]
        _check_tensor(f"{name}: {given}", value, _FLOATS, tuple(parameter.shape))
        pieces[key] = Piece(value.detach(), None)
    return entry.values.get("step", 1), pieces


def _check_keys(name: str, values: Mapping[str, Any], counts: set[str], wanted: set[str], owner: str) -> None:
    if set(values) != counts | wanted:
        raise ValueError(
            f"{name}: the state dict has keys {sorted(values)}, {owner} has {sorted(counts | wanted)}."
        )


def _check_tensor(
    where: str, value: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], more: str = ""
) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} in the state dict is {type(value).__name__}, expected a tensor.")
    if value.dtype not in dtypes or tuple(value.shape) != shape:
        raise ValueError(
            f"{where} in the state dict is {value.dtype} of shape {tuple(value.shape)}, expected "
            f"{' or '.join(map(str, dtypes))} of {shape}.{more or ' The state belongs to another model.'}"
        )


_NO_BLOCKS = (
    "it is of bitsandbytes' 8-bit optimizers without blocks (block_wise=False), with one scale a tensor"
)
_REFUSED = {
    "max1": _NO_BLOCKS,
    "new_max1": _NO_BLOCKS,
    "gnorm_vec": "it is of percentile clipping, which bitsandbytes dropped in 0.50; delete it from the state to go on "
    "without clipping",
}


def _bitsandbytes_pieces(
    rule: Rule, parameter: Tensor, name: str, entry: Entry
) -> tuple[Any, dict[str, Piece]]:
    values = {key: value for key, value in entry.values.items() if key != WRAPPED}
    values.update(entry.values.get(WRAPPED, {}))
    for key, reason in _REFUSED.items():
        if key in values:
            raise ValueError(f"{name}: {key} in the state dict cannot be loaded: {reason}.")
    if entry.has_norm is not ("unorm_vec" in values):
        found, needs = ("has", "none") if "unorm_vec" in values else ("lacks", "one")
        raise ValueError(
            f"{name}: the state dict {found} unorm_vec, which is of an optimizer with max_unorm > 0 (LAMB, LARS); this "
            f"one ({entry.kind}) needs {needs}. Build the optimizer that was saved."
        )
    states = tuple(BITSANDBYTES[entry.kind].states)
    is_8bit = getattr(values.get("state1"), "dtype", None) == torch.uint8
    scales = (
        [key.replace("state", prefix) for key in states for prefix in ("qmap", "absmax")] if is_8bit else []
    )
    norm = {"unorm_vec"} if entry.has_norm else set()
    _check_keys(name, values, {"step"} | norm, {*states, *scales}, BITSANDBYTES[entry.kind].name)
    pieces: dict[str, Piece] = {}
    for key in states:
        stacked = entry.kind == "ademamix" and key == "state1"
        pieces |= _bitsandbytes_state(rule, parameter, name, key, values, is_8bit, stacked)
    return values["step"], pieces


def _bitsandbytes_state(
    rule: Rule,
    parameter: Tensor,
    name: str,
    key: str,
    values: Mapping[str, Any],
    is_8bit: bool,
    stacked: bool,
) -> dict[str, Piece]:
    """``stacked``: AdEMAMix' state1, which becomes state1 and state3."""
    shape = tuple(parameter.shape)
    outer = (2,) if stacked else ()
    value = values[key]
    _check_tensor(
        f"{name}: {key}", value, (torch.uint8,) if is_8bit else (torch.float32,), (*outer, *shape),
        " bitsandbytes' AdEMAMix32bit allocates half of it (bitsandbytes issue 2075)."
        if stacked and isinstance(value, Tensor) and tuple(value.shape) == shape else "",
    )  # fmt: skip
    _check_order(f"{name}: {key}", value)
    value = value.detach()
    names = ("state1", "state3") if stacked else (key,)
    if not is_8bit:
        return {one: Piece(part, None) for one, part in zip(names, value if stacked else [value])}
    scales = _checked_scales(parameter, name, key, values, outer)
    _check_map(name, key, values, rule.signed[rule.states.index(key)])
    if not stacked:
        return {key: Piece(value, scales)}
    fast, slow = _ademamix_scales(value, scales, parameter.numel())
    return {"state1": Piece(value[0], fast), "state3": Piece(value[1], slow)}


def _check_order(where: str, value: Tensor) -> None:
    """bitsandbytes makes the parameter contiguous, but not its state (which is made like it): its CUDA kernels then
    pair them by place in memory, its CPU code by index."""
    if not value.is_contiguous():
        raise ValueError(
            f"{where} in the state dict has strides {tuple(value.stride())}, which bitsandbytes reads in another order "
            "on CUDA than on the CPU. Replace it by state.contiguous() if it was trained on a CPU, and by "
            f"state.as_strided(state.shape, {tuple(torch.empty(value.shape, device='meta').stride())}) if on CUDA."
        )


def _checked_scales(
    parameter: Tensor, name: str, key: str, values: Mapping[str, Any], outer: tuple[int, ...]
) -> Tensor:
    where = f"{name}: {state.absmax_key(key)}"
    numel = parameter.numel()
    wanted = (*outer, state.blocks(numel))
    value = values[state.absmax_key(key)]
    old = (*outer, -(-numel // _OLD_BLOCK_SIZE))
    if isinstance(value, Tensor) and tuple(value.shape) == old != wanted:
        raise ValueError(
            f"{where} in the state dict has {old[-1]} scales for {numel} elements: blocks of {_OLD_BLOCK_SIZE}, as "
            f"bitsandbytes had before 0.44. Today's have {BLOCK_SIZE}. Load 32-bit state, or start with new state."
        )
    _check_tensor(where, value, (torch.float32,), wanted)
    if sharding.is_sharded(value):
        raise ValueError(
            f"{where} in the state dict is a {sharding.describe(value)}, expected a plain tensor."
        )
    result: Tensor = value.detach()
    return result


def _check_map(name: str, key: str, values: Mapping[str, Any], signed: bool) -> None:
    given = key.replace("state", "qmap")
    value = values[given]
    _check_tensor(f"{name}: {given}", value, (torch.float32,), (256,))
    ours = codebook.values(signed, value.device)
    if not torch.allclose(value.detach(), ours, rtol=1e-6, atol=0.0):
        raise ValueError(
            f"{name}: {given} in the state dict is another code map than bitsandbytes' dynamic one "
            f"({'signed' if signed else 'unsigned'}): it differs by up to {(value - ours).abs().max().item():.3g}. "
            "Dequantise the state to float32 with it, and load that."
        )


def _ademamix_scales(codes: Tensor, scales: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Scales of the fast and the slow average.

    bitsandbytes' CUDA kernel has those of the slow one from place ``numel // 256`` on, where the fast one's last still
    is if the last block is not full; its CPU code (and this package's kernels) have them in a row of their own. In
    the former the last place of the second row is never written. They are taken where the writer's next step reads.
    """
    count = scales.shape[-1]
    flat = scales.reshape(-1)
    if numel % BLOCK_SIZE != 0:
        last = codes[1].reshape(-1)[(count - 1) * BLOCK_SIZE :]
        is_zero_block = bool(((last == 0) | (last == 127) | (last == 255)).all())
        if float(flat[-1]) == 0 and not is_zero_block:
            return flat[:count], flat[count - 1 : -1].clone()  # or the two would share a place
    return flat[:count], flat[count:]


def _box(parameter: Tensor, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        return sharding.local_box(parameter)
    except ValueError as error:
        raise ValueError(f"{name}: 8-bit state cannot be loaded into it: {error}") from None


def _check_part(parameter: Tensor, where: str, value: Tensor) -> None:
    """ValueError if this rank's part of ``value`` is not to be had."""
    if sharding.is_sharded(value) and not sharding.is_sharded(parameter):
        raise ValueError(
            f"{where} in the state dict is a {sharding.describe(value)} but the parameter is a plain tensor. Save with "
            "StateDictOptions(full_state_dict=True) to load into a model that is not sharded."
        )
    try:
        part = sharding.part(parameter, value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if part.shape != sharding.local(parameter).shape:
        raise ValueError(
            f"{where}: the local shard of {sharding.describe(parameter)} of shape "
            f"{tuple(sharding.local(parameter).shape)} is not one box of the tensor; load a checkpoint of bnb_fsdp."
        )
