"""State dicts for bitsandbytes, torch.optim and lion-pytorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import codebook, sharding, state
from ..codebook import BLOCK_SIZE
from . import convert, foreign
from . import state_dict as states
from .layout import Layout
from .packages import BITSANDBYTES, FIRST_BETA, OWN_KEYS, TORCH, WRAPPED, Other

if TYPE_CHECKING:
    from ..optim.base import BlockwiseOptimizer

FORMATS = {"bitsandbytes": BITSANDBYTES, "torch": TORCH}
_CPU = torch.device("cpu")


@torch.no_grad()
def export_state_dict(optimizer: BlockwiseOptimizer, format: str = "bitsandbytes") -> dict[str, Any]:
    """A state dict that the ``load_state_dict`` of another package's optimizer takes.

    ``format="bitsandbytes"``: of its class of the same name (0.49.2 or newer). 8-bit codes and scales are the same bit
    for bit where the blocks of 256 elements lie as in the whole contiguous tensor; others are requantised. 8-bit state
    of AdEMAMix goes as float32 where the number of elements is no multiple of 256, since bitsandbytes' CUDA kernel
    mixes up its scales. ``format="torch"``: float32 state of `torch.optim.AdamW`, ``SGD``, ``RMSprop`` or ``Adagrad``,
    for Lion of ``lion_pytorch.Lion``; float32 holds every 8-bit value. There is none of AdEMAMix, LAMB and LARS.

    Tensors are copies, on the CPU. State of DTensors is gathered tensor by tensor: every rank of their mesh must call
    this; the first rank (of all meshes) gets the dict, with whole plain tensors, and the others get ``{}``.

    Raises TypeError for an optimizer of another package, ValueError for an unknown format, one that has no such
    algorithm, and 8-bit state whose shards are no boxes of the tensor.
    """
    from ..optim.base import BlockwiseOptimizer

    if not isinstance(optimizer, BlockwiseOptimizer):
        raise TypeError(f"export_state_dict takes an optimizer of bnb_fsdp, got {type(optimizer).__name__}.")
    if format not in FORMATS:
        raise ValueError(f"format={format!r}; choose from {', '.join(map(repr, FORMATS))}.")
    kind = foreign.own_kind(optimizer)
    if kind not in FORMATS[format]:
        raise ValueError(
            f"format={format!r} has no counterpart of {type(optimizer).__name__} ({kind}); it has "
            f"{', '.join(other.name for other in FORMATS[format].values())}."
        )
    if any(group.get("trust_ratio") == "published" for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} has trust_ratio='published', which {format} does not have; the exported state "
            "would continue by another formula."
        )
    other = FORMATS[format][kind]
    states.drop_orphans(optimizer)
    parameters = [parameter for _, parameter, _ in states.named(optimizer)]
    if any(map(sharding.is_sharded, parameters)):
        states.materialize(optimizer)  # every rank gathers the same tensors
    keeps = all(map(_is_first, parameters))
    numbers: dict[Tensor, int] = {}
    for parameter in parameters:
        numbers.setdefault(parameter, len(numbers))
    entries: dict[int, dict[str, Any]] = {}
    for name, parameter, _ in states.named(optimizer):
        live = optimizer.state.get(parameter)
        if live:
            stored = _gathered(optimizer, parameter, name, live, keeps)
            if keeps:
                step = float(live["step"])
                make = _torch_entry if format == "torch" else _bitsandbytes_entry
                entries[numbers[parameter]] = make(kind, other, optimizer, parameter, step, stored)
    if not keeps:
        return {}
    groups = [
        {
            **_group(kind, other, group, format == "bitsandbytes"),
            "params": [numbers[parameter] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {"state": entries, "param_groups": groups}


def _is_first(parameter: Tensor) -> bool:
    """Whether this rank is the first of the parameter's mesh, or the parameter is plain."""
    if not sharding.is_sharded(parameter):
        return True
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    place = mesh.get_coordinate()
    return place is not None and not any(place)


def _group(kind: str, other: Other, group: Mapping[str, Any], is_bitsandbytes: bool) -> dict[str, Any]:
    kept = {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params" and (key not in OWN_KEYS or key in other.keys)
    }
    if is_bitsandbytes:
        kept["lr"] = float(kept["lr"])
        if kind in FIRST_BETA:
            kept["betas"] = (float(kept.pop(FIRST_BETA[kind])), 0.0)
    return {**other.keys, **kept}


def _whole(value: Tensor, keeps: bool) -> Tensor | None:
    """A copy of the whole tensor on the CPU, if this rank ``keeps`` it."""
    if sharding.is_sharded(value):
        sharded: Any = value
        device = sharded.device_mesh.device_type
        if sharded.device.type != device:  # CPUOffloadPolicy: the mesh's collectives run on its own device
            sharded = sharded.to(device)
        value = sharded.full_tensor()
    if not keeps:
        return None
    value = value.detach()
    return value.clone() if value.device == _CPU else value.cpu()


def _gathered(
    optimizer: BlockwiseOptimizer, parameter: Tensor, name: str, live: Mapping[str, Any], keeps: bool
) -> dict[str, Tensor | convert.Stored]:
    """Whole float32 tensors, or 8-bit states with ``codes`` in memory order, by state; none unless ``keeps``."""
    rule = optimizer.rule
    given = states.exported(optimizer, parameter, name, live)
    result: dict[str, Tensor | convert.Stored] = {}
    if state.bits_of(dict(live)) == 32:
        for key in rule.states:
            value = _whole(given[key][states.float_name(rule)], keeps)
            if value is not None:
                result[key] = value
        return result
    layout = states.layout_for(parameter, name)
    phase = None
    if layout.has_phase:
        phase = _whole(given[state.absmax_key(rule.states[0])][layout.phase_name], keeps)
    for key, signed in zip(rule.states, rule.signed):
        codes = _whole(given[key][states.codes_name(rule)], keeps)
        scales = _whole(given[state.absmax_key(key)][layout.name], keeps)
        if codes is not None and scales is not None:
            flat = codes.permute(layout.order).reshape(-1)
            result[key] = convert.Stored(flat, layout, scales, phase, signed)
    return result


def _floats(stored: Tensor | convert.Stored) -> Tensor:
    if isinstance(stored, Tensor):
        return stored.contiguous()
    flat = convert.values(stored)
    return convert.unordered(flat, stored.layout.shape, stored.layout.order).contiguous()


def _torch_entry(
    kind: str,
    other: Other,
    optimizer: BlockwiseOptimizer,
    parameter: Tensor,
    step: float,
    stored: Mapping[str, Tensor | convert.Stored],
) -> dict[str, Any]:
    counts = {"step": torch.tensor(step, dtype=torch.float32)} if other.has_step else {}
    return {**counts, **{name: _floats(stored[key]) for key, name in other.states.items()}}


def _bitsandbytes_entry(
    kind: str,
    other: Other,
    optimizer: BlockwiseOptimizer,
    parameter: Tensor,
    step: float,
    stored: Mapping[str, Tensor | convert.Stored],
) -> dict[str, Any]:
    wrapped: dict[str, Any] = {}
    rule = optimizer.rule
    is_stacked = kind == "ademamix"
    as_floats = is_stacked and parameter.numel() % BLOCK_SIZE != 0
    for key in other.states:
        parts = [stored[key], stored["state3"]] if is_stacked and key == "state1" else [stored[key]]
        if as_floats or isinstance(parts[0], Tensor):
            wrapped[key] = _stacked([_floats(part) for part in parts])
            continue
        pairs = [_codes(part) for part in parts if isinstance(part, convert.Stored)]
        signed = rule.signed[rule.states.index(key)]
        wrapped[key] = _stacked([codes for codes, _ in pairs])
        wrapped[key.replace("state", "qmap")] = codebook.values(signed, _CPU).clone()
        wrapped[state.absmax_key(key)] = _stacked([scales for _, scales in pairs])
    if kind in ("lamb", "lars"):
        wrapped["unorm_vec"] = torch.zeros(1)
    return {"step": int(step), WRAPPED: wrapped}


def _stacked(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts) if len(parts) > 1 else parts[0]


def _codes(stored: convert.Stored) -> tuple[Tensor, Tensor]:
    """Codes of the parameter's shape, and scales of the blocks of the whole contiguous tensor."""
    shape = stored.layout.shape
    target = Layout(shape, tuple(range(len(shape))), False, ())
    source = stored
    if stored.layout.order != target.order:  # `moved` takes codes in the order of its target
        flat = convert.unordered(stored.codes, shape, stored.layout.order).reshape(-1).clone()
        source = convert.Stored(flat, stored.layout, stored.scales, stored.phase, stored.signed)
    [absmax], _ = convert.moved(source, target)
    return source.codes.view(shape), absmax.clone()
