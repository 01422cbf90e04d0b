"""State dicts: what `BlockwiseOptimizer.state_dict` returns and `load_state_dict` takes.

The state of a parameter, 8-bit::

    {"step": float32 scalar,
     "state1": {"adam_8bit_256": codes, uint8, of the parameter's shape and placements},
     "absmax1": {"grid" or "rows": scales, float32, "phase": uint8, where rows can start within a block},
     "state2": ..., "absmax2": {"grid" or "rows": ...}}

and 32-bit: ``{"step": ..., "state1": {"adam_32bit": float32}, "state2": ...}``. For DTensor parameters all but ``step``
are DTensors on the parameter's mesh, so that torch.distributed.checkpoint saves, gathers and reshards them; codes
and float32 states share the optimizer's memory. See `layout` for the scales. Names tell algorithm, bits and block size,
since torch.distributed.checkpoint compares neither dtypes nor meaning before it writes into an optimizer's memory.

A rank that is not on a parameter's mesh has the same keys with empty local tensors, ``step`` among them: it does not
know the count, and of DTensors torch.distributed.checkpoint saves and loads nothing there.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import sharding, state
from ..codebook import BLOCK_SIZE, flat
from ..groups import parameter_name
from ..rules import Rule
from . import blocks, foreign
from .layout import Layout, layout_of

if TYPE_CHECKING:
    from ..optim.base import BlockwiseOptimizer

logger = logging.getLogger("bnb_fsdp")

VERSION = 1
"""Version of this format; older ones are read, newer ones refused."""


_quiet = 0


@contextmanager
def without_warning() -> Iterator[None]:
    """Within, `load` leaves it to the caller to tell how many blocks were requantised."""
    global _quiet
    _quiet += 1
    try:
        yield
    finally:
        _quiet -= 1


class LoadReport(NamedTuple):
    """What `load_state_dict` did on this rank: ``requantized`` of ``blocks`` blocks could not be taken bit for bit."""

    parameters: int
    blocks: int
    requantized: int


def format_of(rule: Rule) -> str:
    """The ``format`` of a parameter group: version, algorithm and block size."""
    return f"bnb_fsdp {VERSION} {rule.name} {BLOCK_SIZE}"


def codes_name(rule: Rule) -> str:
    """Key of 8-bit codes."""
    return f"{rule.name}_8bit_{BLOCK_SIZE}"


def float_name(rule: Rule) -> str:
    """Key of a float32 state."""
    return f"{rule.name}_32bit"


class Expected(NamedTuple):
    """A tensor of a state dict: dtype and global shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def expected(
    rule: Rule, bits: int, shape: tuple[int, ...], layout: Layout | None
) -> dict[str, dict[str, Expected]]:
    """The tensors of a parameter's state besides ``step``, by live key and name."""
    if bits == 32:
        return {key: {float_name(rule): Expected(torch.float32, shape)} for key in rule.states}
    assert layout is not None
    result = {key: {codes_name(rule): Expected(torch.uint8, shape)} for key in rule.states}
    for key in rule.states:
        result[state.absmax_key(key)] = {layout.name: Expected(torch.float32, layout.scales_shape)}
    if layout.has_phase:
        result[state.absmax_key(rule.states[0])][layout.phase_name] = Expected(
            torch.uint8, layout.phase_shape
        )
    return result


# Saving


def state_dict(optimizer: BlockwiseOptimizer) -> dict[str, Any]:
    """See `BlockwiseOptimizer.state_dict`."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    if optimizer._residency is not None:
        optimizer._residency.wait()
    if any(sharding.is_sharded(parameter) for _, parameter, _ in named(optimizer)):
        materialize(optimizer)
    numbers: dict[Tensor, int] = {}
    packed_groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(parameter, len(numbers))
        packed = {key: _plain(value) for key, value in group.items() if key != "params"}
        packed["params"] = [numbers[parameter] for parameter in group["params"]]
        # As text: gathering a full state dict, torch drops empty lists and dicts.
        packed["overrides"] = json.dumps(group["overrides"])
        packed_groups.append(packed)
    drop_orphans(optimizer)
    packed_state: dict[Any, Any] = {}
    for name, parameter, _ in named(optimizer):
        values = optimizer.state.get(parameter)
        if values:
            packed_state[numbers[parameter]] = exported(optimizer, parameter, name, values)
    packed_state.update((key, value) for key, value in optimizer.state.items() if not isinstance(key, Tensor))
    result: dict[str, Any] = {"state": packed_state, "param_groups": packed_groups}
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = post_hook(optimizer, result)
        if changed is not None:
            result = changed
    return result


def named(optimizer: BlockwiseOptimizer) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
    """(name for messages, parameter, (group, position)) of every parameter."""
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield parameter_name(optimizer.param_groups, index, position), parameter, (index, position)


def _plain(value: Any) -> Any:
    """NumPy's numbers, which torch.load does not read without executing code, as Python's."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def materialize(optimizer: BlockwiseOptimizer, frozen: Sequence[Tensor] = ()) -> None:
    """Zero state, with ``step`` 0, for every parameter that will need one and has none; none for meta tensors.

    Also for those of ``frozen``, though they will not need it as long as they are frozen.
    """
    also = set(frozen)
    unplaced = False
    for name, parameter, (index, position) in named(optimizer):
        values = optimizer.state.get(parameter)
        if values or (state.is_frozen(parameter, values) and parameter not in also):
            continue
        shard = sharding.local(parameter).detach()
        if shard.device.type == "meta":
            continue
        sharding.check(parameter, name)
        if optimizer._residency is not None:
            unplaced = True
            continue
        group = optimizer.param_groups[index]
        bits = state.decide(parameter, group, position).bits
        optimizer.state[parameter] = state.allocate(shard, bits, optimizer.rule, group["capturable"])
    if unplaced and optimizer._residency is not None:
        optimizer._drop_plan()  # of state that is now being moved
        optimizer.state.update(optimizer._residency.place(optimizer, also=also))


def drop_orphans(optimizer: BlockwiseOptimizer) -> None:
    """Forget state of parameters that are no longer in param_groups if it was never stepped; RuntimeError otherwise."""
    known = {parameter for _, parameter, _ in named(optimizer)}
    orphans = [key for key in optimizer.state if isinstance(key, Tensor) and key not in known]
    stepped = [key for key in orphans if optimizer.state[key] and float(optimizer.state[key]["step"]) != 0]
    if stepped:
        raise RuntimeError(
            f"{len(stepped)} of {len(optimizer.state)} entries of optimizer.state belong to parameters that are no "
            "longer in param_groups. Wrappers such as accelerate.prepare() exchange parameters, which must "
            "happen before the first step(): prepare first, or clear optimizer.state to start afresh."
        )
    for key in orphans:
        del optimizer.state[key]


def layout_for(parameter: Tensor, name: str) -> Layout:
    """Layout of the 8-bit state of ``parameter``. Raises ValueError where its shards are no boxes in memory order."""
    order = sharding.memory_order(parameter)
    try:
        sharding.local_box(parameter)
        if sharding.is_on_mesh(parameter):
            _check_order(parameter, order)
    except ValueError as error:
        raise ValueError(f"{name}: its 8-bit state cannot be saved: {error}") from None
    layout = layout_of(parameter.shape, order, sharding.cuts(parameter))
    if len({dim for dim, _ in layout.cuts}) < len(layout.cuts) and sharding.is_strided(parameter):
        raise ValueError(
            f"{name}: its 8-bit state cannot be saved: {sharding.describe(parameter)} cuts a dimension into uneven "
            "parts, twice and out of order. Use sizes that the meshes divide, or overrides={...: {'optim_bits': 32}}."
        )
    return layout


def _check_order(parameter: Tensor, order: Sequence[int]) -> None:
    """Raise ValueError if the local shard's dimensions are not in this ``order`` in memory, the global tensor's."""
    shard = sharding.local(parameter)
    wanted = [0] * shard.dim()
    stride = 1
    for dim in reversed(order):
        wanted[dim] = stride
        stride *= max(shard.shape[dim], 1)
    if not sharding.same_order(shard, shard.shape, tuple(wanted)) and shard.numel():
        raise ValueError(
            f"the local shard has strides {shard.stride()}, which is not the memory order of the global tensor "
            f"(strides {parameter.stride()}); make the parameter contiguous before it is sharded."
        )


def exported(
    optimizer: BlockwiseOptimizer, parameter: Tensor, name: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of one parameter, as in the module's docstring. Raises if it does not fit the local shard."""
    rule = optimizer.rule
    shard = sharding.local(parameter).detach()
    state.check_shapes(name, shard, dict(values), rule, hosted=optimizer._residency is not None)
    result: dict[str, Any] = {"step": values["step"]}
    if not sharding.is_on_mesh(parameter):
        whole = [None] * parameter.dim()  # the same on every rank of the mesh
        result["step"] = sharding.nothing_of(parameter, (), whole, torch.float32)
    if state.bits_of(dict(values)) == 32:
        for key in rule.states:
            result[key] = {float_name(rule): sharding.like(parameter, values[key], parameter.shape)}
        return result
    layout = layout_for(parameter, name)
    for key in rule.states:
        result[key] = {codes_name(rule): sharding.like(parameter, values[key], parameter.shape)}
    absmax = {key: values[state.absmax_key(key)] for key in rule.states}
    result.update(exported_scales(parameter, layout, shard, absmax, rule))
    return result


def exported_scales(
    parameter: Tensor, layout: Layout, shard: Tensor, absmax: Mapping[str, Tensor], rule: Rule
) -> dict[str, dict[str, Tensor]]:
    """The ``absmax`` entries of a state dict, given the scales of the shard's blocks by state."""
    result = {}
    if not sharding.is_on_mesh(parameter):
        wanted = expected(rule, 8, tuple(parameter.shape), layout)
        dims = None if layout.grid else _dims(layout, parameter)
        for key in map(state.absmax_key, rule.states):
            result[key] = {
                name: sharding.nothing_of(parameter, entry.shape, dims, entry.dtype)
                for name, entry in wanted[key].items()
            }
        return result
    for key in rule.states:
        scales = _scales(layout, shard, absmax[key])
        result[state.absmax_key(key)] = {layout.name: _placed(parameter, layout, scales, layout.scales_shape)}
    if layout.has_phase:
        rows, width = _rows(layout, shard)
        phase = blocks.phases(rows, width, absmax[rule.states[0]].device)[:, None]
        first = result[state.absmax_key(rule.states[0])]
        first[layout.phase_name] = _placed(parameter, layout, phase, layout.phase_shape)
    return result


def _rows(layout: Layout, shard: Tensor) -> tuple[int, int]:
    """Rows of a local shard and elements of each."""
    rows = shard.shape[layout.outer] if shard.dim() else 1
    return rows, shard.numel() // rows if rows else 0


def _scales(layout: Layout, shard: Tensor, absmax: Tensor) -> Tensor:
    """This rank's part of the scales; shares memory with ``absmax`` if rows start blocks."""
    if not layout.grid:
        rows, width = _rows(layout, shard)
        return blocks.spread(absmax, rows, width, layout.count)
    in_memory = [shard.shape[dim] for dim in layout.order]
    in_memory[-1] //= BLOCK_SIZE
    return absmax.view(in_memory).permute([layout.order.index(dim) for dim in range(shard.dim())])


def _placed(parameter: Tensor, layout: Layout, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``local`` as this rank's part of scales or phases."""
    return sharding.like(parameter, local, shape, None if layout.grid else _dims(layout, parameter))


def _dims(layout: Layout, parameter: Tensor) -> list[int]:
    """The dimension of scales by row that each dimension of the parameter is part of."""
    return [int(dim != layout.outer) for dim in range(parameter.dim())]


# Loading


class _Found(NamedTuple):
    """The checked state of one parameter; ``tensors`` are this rank's parts of those given, by live key and name."""

    name: str
    step: float
    bits: int
    layout: Layout | None
    tensors: dict[str, dict[str, Tensor]]


def load(optimizer: BlockwiseOptimizer, state_dict: dict[str, Any]) -> None:
    """See `BlockwiseOptimizer.load_state_dict`."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("the state dict lacks 'state' or 'param_groups': it is not an optimizer's.")
    state_dict = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = pre_hook(optimizer, state_dict)
        if result is not None:
            state_dict = result
    state_dict = foreign.translated(optimizer, state_dict) or state_dict
    groups = optimizer.param_groups
    saved_groups = [unpacked(group) for group in state_dict["param_groups"]]
    check_groups(optimizer, saved_groups)
    owners = dict(zip(chain.from_iterable(group["params"] for group in saved_groups), named(optimizer)))
    found: dict[Tensor, _Found | foreign.Checked] = {}
    others: dict[Any, Any] = {}
    has_names = any(isinstance(key, str) for key in owners)
    for key, values in state_dict["state"].items():
        if key not in owners and not isinstance(key, int) and not has_names:
            others[key] = values  # what users keep there besides, as torch.optim does
            continue
        if key not in owners:
            raise ValueError(f"the state dict has state for an unknown parameter {key!r}.")
        name, parameter, (index, position) = owners[key]
        if values and sharding.is_on_mesh(parameter):
            bits = state.decide(parameter, saved_groups[index], position).bits
            check = foreign.checked if isinstance(values, foreign.Entry) else _checked
            entry = check(optimizer, parameter, name, bits, values)
            if entry is not None:
                found[parameter] = entry
    absent = [
        name
        for name, p, _ in named(optimizer)
        if p not in found and p.requires_grad and sharding.is_on_mesh(p)
    ]
    if found and absent and not _quiet and any(map(sharding.is_sharded, found)):
        # Plain parameters without a gradient have no state; sharded ones always have.
        logger.warning(
            "the state dict has no state for %d parameters, such as %s: they start afresh.",
            len(absent),
            absent[0],
        )
    # Nothing was changed so far; from here on nothing is refused.
    for group, saved in zip(groups, saved_groups):
        saved["params"] = group["params"]
        for key in group:  # keys that others added to the live group since
            saved.setdefault(key, group[key])
        _like_the_live(saved, group)
    total = requantized = 0
    live: dict[Any, Any] = optimizer.state
    optimizer._drop_plan()  # it holds the old state
    for key in [key for key in live if key not in found]:
        del live[key]
    for parameter, entry in found.items():
        values, count, moved = _entry(optimizer, parameter, entry, live.get(parameter) or {})
        live[parameter] = values  # one at a time, so that the old state does not stay beside the new
        total, requantized = total + count, requantized + moved
    live.update(others)
    optimizer.load_report = LoadReport(len(found), total, requantized)
    optimizer.__setstate__({"state": live, "param_groups": saved_groups})
    if optimizer._residency is not None:
        optimizer._residency.place(optimizer, fresh=False)
    if requantized and not _quiet:
        logger.warning(
            "on this rank %d of %d blocks of 8-bit state had to be requantised: %s.",
            requantized,
            total,
            _why(found.values()),
        )
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _why(found: Iterable[_Found | foreign.Checked]) -> str:
    if any(isinstance(entry, foreign.Checked) and entry.has_floats for entry in found):
        return "the state dict has float state (of another package) where this optimizer has 8-bit state"
    return (
        "rows of this checkpoint lie in other blocks here (rows that are no multiple of "
        f"{BLOCK_SIZE} elements, and another number of ranks)"
    )


def unpacked(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a saved parameter group, as groups are."""
    result = copy.deepcopy(dict(group))
    if isinstance(result.get("overrides"), str):
        try:
            result["overrides"] = json.loads(result["overrides"])
        except ValueError:
            raise ValueError(
                f"overrides in the state dict are {result['overrides']!r}, no JSON list."
            ) from None
    return result


def _like_the_live(saved: dict[str, Any], group: dict[str, Any]) -> None:
    """Undo what a checkpoint API does to hyperparameters: tuples become lists, tensors move to the CPU."""
    for key, value in group.items():
        if isinstance(value, tuple) and isinstance(saved[key], list):
            saved[key] = tuple(saved[key])
        elif isinstance(value, Tensor) and isinstance(saved[key], Tensor) and key == "lr":
            saved[key] = saved[key].to(value.device)


def check_groups(optimizer: BlockwiseOptimizer, saved_groups: list[dict[str, Any]]) -> None:
    """Raise ValueError if the groups were not saved by an optimizer like this one."""
    check_sizes(optimizer, saved_groups)
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups)):
        if not group["params"] and set(saved) == {"params"}:
            # torch's set_optimizer_state_dict loses the values of groups without parameters, unless they come last.
            saved.update((key, copy.deepcopy(value)) for key, value in group.items() if key != "params")
        check_format(optimizer, f"group {index} of the state dict", saved.get("format"))
        # Only what this class defines: schedulers, for one, add keys of their own to a live group.
        saved["capturable"] = group["capturable"]  # where counts live is this run's choice
        missing = sorted(set(optimizer.defaults) & set(group) - set(saved))
        if missing:
            raise ValueError(
                f"group {index} of the state dict lacks {missing}: it was not saved by this optimizer's class "
                f"({type(optimizer).__name__})."
            )
        optimizer._check_group(_as_constructed(optimizer, saved), index)


def _as_constructed(optimizer: BlockwiseOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """``saved`` as a constructor would take it: a schedule of the momentum may reach 0, which step() takes too."""
    if isinstance(saved.get("momentum"), (int, float)) and saved["momentum"] == 0:
        return {**saved, "momentum": optimizer.defaults["momentum"]}
    return saved


def check_sizes(optimizer: BlockwiseOptimizer, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless the groups have as many parameters as the optimizer's."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"the state dict has parameter groups of {saved_sizes} parameters, the optimizer of {sizes}; "
            "build the optimizer with the same groups in the same order."
        )


def check_format(optimizer: BlockwiseOptimizer, where: str, found: Any) -> None:
    """Raise ValueError unless ``found`` is a group's ``format`` that this optimizer can read."""
    kind = type(optimizer).__name__
    own = optimizer.rule.name
    try:
        package, version, name, block = str(found).split()
        numbers = int(version), int(block)
    except ValueError:
        package, name, numbers = "", "", (0, 0)
    if package != "bnb_fsdp":
        raise ValueError(
            f"{where} has format {found!r}, expected {format_of(optimizer.rule)!r}: it was not saved by an optimizer "
            "of bnb_fsdp."
        )
    if numbers[0] > VERSION:
        raise ValueError(
            f"{where} was written by a newer bnb_fsdp: format {numbers[0]}, this version reads up to {VERSION}. "
            "Install a newer bnb_fsdp."
        )
    if numbers[0] < 1:
        raise ValueError(
            f"{where} has format {numbers[0]}, which no released bnb_fsdp wrote; formats start at 1."
        )
    if name != own:
        raise ValueError(
            f"{where} was saved by another algorithm: {name!r}; {kind} is {own!r}. Build the optimizer that was saved."
        )
    if numbers[1] != BLOCK_SIZE:
        raise ValueError(
            f"{where} has blocks of {numbers[1]} elements, this version of bnb_fsdp has {BLOCK_SIZE}."
        )


def _checked(
    optimizer: BlockwiseOptimizer, parameter: Tensor, name: str, bits: int, values: Mapping[str, Any]
) -> _Found:
    """ValueError, naming the parameter, if ``values`` are not a state of ``bits`` bits for it."""
    rule = optimizer.rule
    shard = sharding.local(parameter)
    if shard.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: give it storage (to_empty) before loading state.")
    if not isinstance(values, Mapping):
        raise ValueError(f"{name}: its state in the state dict is {type(values).__name__}, expected a dict.")
    layout = layout_for(parameter, name) if bits == 8 else None
    wanted = expected(rule, bits, tuple(parameter.shape), layout)
    given = {key: value for key, value in values.items() if not (isinstance(value, Mapping) and not value)}
    tensors: dict[str, dict[str, Tensor]] = {}
    if set(given) != {"step", *wanted}:
        raise ValueError(
            f"{name}: the state dict has keys {sorted(given)}, {rule.name} with {bits}-bit state expects "
            f"{sorted(['step', *wanted])}."
        )
    for key, names in wanted.items():
        part = given[key]
        if not isinstance(part, Mapping) or set(part) != set(names):
            raise ValueError(f"{name}: {_wrong_names(key, part, names)}")
        tensors[key] = {
            entry: _checked_tensor(
                parameter,
                layout if key.startswith("absmax") else None,
                f"{name}: {key}, {entry}",
                part[entry],
                names[entry],
            )
            for entry in names
        }
    return _Found(name, checked_step(name, given["step"]), bits, layout, tensors)


def _wrong_names(key: str, part: Any, names: Mapping[str, Expected]) -> str:
    found = sorted(part) if isinstance(part, Mapping) else type(part).__name__
    text = f"{key} in the state dict holds {found}, expected {sorted(names)}."
    orders = {name.partition("_order")[2] for name in [*names, *found]}
    if isinstance(part, Mapping) and key.startswith("absmax") and len(orders) > 1:
        return (
            f"{text} The parameter had another order of dimensions in memory when it was saved (its strides, such as "
            "channels_last): give it the same, or load it with bnb_fsdp.load_checkpoint."
        )
    if isinstance(part, Mapping) and key.startswith("absmax"):
        return (
            f"{text} The parameter was cut along other dimensions when it was saved, in a way that rows cannot "
            "express. Load it with bnb_fsdp.load_checkpoint, or convert it offline: "
            "python -m bnb_fsdp checkpoint convert DIR OUT --to bnb_fsdp."
        )
    return f"{text} It was saved with other bits, another algorithm or another block size."


def _checked_tensor(
    parameter: Tensor, layout: Layout | None, where: str, value: Any, wanted: Expected
) -> Tensor:
    """This rank's part of ``value``; ``layout`` is given for scales and phases."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} in the state dict is {type(value).__name__}, expected a tensor.")
    if value.dtype != wanted.dtype or tuple(value.shape) != wanted.shape:
        raise ValueError(
            f"{where} in the state dict is {value.dtype} of shape {tuple(value.shape)}, expected {wanted.dtype} of "
            f"{wanted.shape}. The state belongs to another model or another version."
        )
    if sharding.is_sharded(value) and not sharding.is_sharded(parameter):
        raise ValueError(
            f"{where} in the state dict is a {sharding.describe(value)} but the parameter is a plain tensor. Save with "
            "StateDictOptions(full_state_dict=True) to load into a model that is not sharded."
        )
    dims = None
    if layout is not None and not layout.grid:
        dims = _dims(layout, parameter)
    try:
        return sharding.part(parameter, value.detach(), dims)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def checked_step(name: str, value: Any) -> float:
    """The count of steps in a state dict. ValueError, naming the parameter, if it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if not 0 <= number < 2**53 or number != int(number):
        raise ValueError(f"{name}: step in the state dict is {value!r}, expected a count of steps.")
    return number


def _entry(
    optimizer: BlockwiseOptimizer, parameter: Tensor, found: _Found | foreign.Checked, live: Mapping[str, Any]
) -> tuple[dict[str, Any], int, int]:
    """Live state of one parameter, number of blocks, and how many of them were requantised."""
    rule = optimizer.rule
    shard = sharding.local(parameter).detach()
    home = shard.device
    if optimizer._residency is not None:
        home = optimizer._residency.device_for(parameter, shard)
    if isinstance(found, foreign.Checked):
        converted, count, moved = foreign.converted(rule, parameter, found)
        return {k: v if k == "step" else v.to(home) for k, v in converted.items()}, count, moved
    values: dict[str, Any] = {"step": torch.tensor(found.step, dtype=torch.float32)}
    # What is not at its home yet is copied there by `Residency.place`: another copy in host memory would be too many.
    copied_later = (
        optimizer._residency is not None
        and (optimizer._residency.is_on_host(parameter) or home != shard.device)
        and (found.layout is None or found.layout.grid)  # others are requantised in place
    )
    total = requantized = 0
    phase = None
    if found.layout is not None and found.layout.has_phase:
        first = found.tensors[state.absmax_key(rule.states[0])]
        phase = first[found.layout.phase_name].to(home)
    for key, signed in zip(rule.states, rule.signed):
        [part] = found.tensors[key].values()
        old = live.get(key)
        if old is None or not _is_same_memory(part, old, shard, home):
            old = part
            own = optimizer._residency is not None and optimizer._residency.holds(part)
            if not copied_later or own or (part.device, part.stride()) != (home, shard.stride()):
                old = torch.empty_like(shard, dtype=part.dtype, device=home, requires_grad=False).copy_(part)
        values[key] = old
        if found.layout is None:
            continue
        scales = found.tensors[state.absmax_key(key)][found.layout.name].to(home)
        if found.layout.grid:
            absmax, moved = scales.permute(found.layout.order).reshape(-1).clone(), 0
        else:
            absmax, moved = blocks.gather(flat(old), scales, phase, _rows(found.layout, shard)[1], signed)
        values[state.absmax_key(key)] = absmax
        total, requantized = total + len(absmax), requantized + moved
    return values, total, requantized


def _is_same_memory(value: Tensor, old: Tensor, shard: Tensor, home: torch.device) -> bool:
    """Whether ``value`` is the live state ``old`` itself, written into by torch.distributed.checkpoint."""
    return (
        value.numel() > 0
        and value.data_ptr() == old.data_ptr()
        and (value.dtype, value.device, value.shape) == (old.dtype, home, shard.shape)
        and sharding.same_order(value, tuple(shard.shape), shard.stride())
    )
