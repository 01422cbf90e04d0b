"""Which parameters get 8-bit state and why, and the allocation of state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import codebook
from .rules import Rule

OPTIM_BITS = (8, 32)
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OVERRIDE_KEYS = ("optim_bits", "min_8bit_size")


class Decision(NamedTuple):
    """Bits of a parameter's state, and the reason in words."""

    bits: int
    reason: str


def decide(parameter: Tensor, group: dict[str, Any], position: int) -> Decision:
    """Bits for the parameter at ``position`` of ``group``.

    Depends on the global parameter alone (its numel, not the local shard's), so that every rank and every
    world size decides alike: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2080.
    """
    overrides = group["overrides"]
    if overrides and len(overrides) != len(group["params"]):
        raise ValueError(
            f"the group has {len(group['params'])} parameters but overrides for {len(overrides)}; add parameters with "
            "add_param_group() instead of appending to a group."
        )
    override = overrides[position] if overrides else {}
    bits = override.get("optim_bits", group["optim_bits"])
    minimum = override.get("min_8bit_size", group["min_8bit_size"])
    source = "override" if "optim_bits" in override else "optim_bits"
    if bits == 32:
        return Decision(32, f"{source}=32")
    if parameter.numel() < minimum:
        return Decision(32, f"{parameter.numel()} elements < min_8bit_size={minimum}")
    return Decision(8, f"{source}=8")


def blocks(numel: int) -> int:
    """Blocks of 256 that hold ``numel`` elements."""
    return -(-numel // codebook.BLOCK_SIZE)


def absmax_key(state_key: str) -> str:
    """``state1`` -> ``absmax1``."""
    return state_key.replace("state", "absmax")


def is_frozen(parameter: Tensor, values: Mapping[str, Any] | None) -> bool:
    """Whether ``parameter``, whose state is ``values``, gets no state: frozen, and without a gradient all the same."""
    return not values and not parameter.requires_grad and parameter.grad is None


def keys(rule: Rule, bits: int) -> tuple[str, ...]:
    """All keys of ``optimizer.state[p]``."""
    scales = tuple(absmax_key(key) for key in rule.states) if bits == 8 else ()
    return ("step", *rule.states, *scales)


def step_device(shard: Tensor, capturable: bool) -> torch.device:
    """Where a parameter's step count lives: on its CUDA device if a CUDA graph shall advance it, else on the CPU."""
    return shard.device if capturable and shard.device.type == "cuda" else torch.device("cpu")


def allocate(shard: Tensor, bits: int, rule: Rule, capturable: bool = False) -> dict[str, Tensor]:
    """Zero state of one local shard: plain tensors on its device, also for an empty shard.

    8-bit: ``stateN`` uint8 of the shard's shape and strides, ``absmaxN`` float32 of ``(ceil(numel/256),)``.
    32-bit: ``stateN`` float32 of the shard's shape and strides. ``step``: float32 scalar, see `step_device`.
    """
    state = {"step": torch.zeros((), dtype=torch.float32, device=step_device(shard, capturable))}
    dtype = torch.uint8 if bits == 8 else torch.float32
    for key in rule.states:
        state[key] = torch.zeros_like(shard, dtype=dtype, requires_grad=False)
        if bits == 8:
            state[absmax_key(key)] = torch.zeros(
                blocks(shard.numel()), dtype=torch.float32, device=shard.device
            )
    return state


def bits_of(state: dict[str, Any]) -> int:
    """8 or 32, from existing state."""
    return 8 if state["state1"].dtype == torch.uint8 else 32


def sizes(numel: int, bits: int) -> tuple[int, ...]:
    """Bytes of each tensor of one state of a shard of ``numel`` elements: values and, in 8 bits, scales."""
    return (numel, 4 * blocks(numel)) if bits == 8 else (4 * numel,)


def expected_bytes(numel: int, bits: int, rule: Rule) -> int:
    """Bytes of state of a shard of ``numel`` elements, the 4-byte step included."""
    return sum(sizes(numel, bits)) * len(rule.states) + 4


def _elsewhere(name: str, key: str, value: Tensor, shard: Tensor, rule: Rule) -> str:
    return (
        f"{name}: {key} is on {value.device} but the parameter is on {shard.device} ({rule.name} step, {shard.dtype}, "
        f"shape {tuple(shard.shape)}). Move the state back to the parameter's device before step()."
    )


def is_on_host(values: Mapping[str, Any], shard: Tensor) -> bool:
    """Whether a parameter's state is in host memory, the parameter itself elsewhere."""
    return bool(values["state1"].device.type == "cpu" != shard.device.type)


def check_shapes(
    name: str, shard: Tensor, state: dict[str, Any], rule: Rule, *, hosted: bool = False
) -> None:
    """Raise if ``state`` does not fit the local shard: ValueError for shape or dtype, RuntimeError for device.

    ``hosted``: it may be in host memory instead of on the shard's device.
    """
    bits = bits_of(state)
    home = torch.device("cpu") if hosted and is_on_host(state, shard) else shard.device
    for key in rule.states:
        value = state[key]
        wanted = torch.uint8 if bits == 8 else torch.float32
        if tuple(value.shape) != tuple(shard.shape) or value.dtype != wanted:
            raise ValueError(
                f"{name}: {key} is {value.dtype} of shape {tuple(value.shape)}, but the local parameter has "
                f"shape {tuple(shard.shape)} and needs {wanted}. The state belongs to another sharding or model."
            )
        if value.device != home:
            raise RuntimeError(_elsewhere(name, key, value, shard, rule))
        if value.stride() != shard.stride() and value.numel() > 1:
            raise ValueError(
                f"{name}: {key} has strides {value.stride()}, the parameter {shard.stride()}; "
                "state must be laid out as its parameter."
            )
        if bits == 8:
            scales = state[absmax_key(key)]
            if (
                scales.shape != (blocks(shard.numel()),)
                or scales.dtype != torch.float32
                or not scales.is_contiguous()
            ):
                raise ValueError(
                    f"{name}: {absmax_key(key)} is {scales.dtype} of shape {tuple(scales.shape)}, expected "
                    f"contiguous float32 of ({blocks(shard.numel())},): one scale per 256 elements of the local shard."
                )
            if scales.device != home:
                raise RuntimeError(_elsewhere(name, absmax_key(key), scales, shard, rule))
    step = state["step"]
    if (
        not isinstance(step, Tensor)
        or step.dtype != torch.float32
        or step.device not in (torch.device("cpu"), shard.device)
        or step.numel() != 1
    ):
        kind = f"{step.dtype} on {step.device}" if isinstance(step, Tensor) else repr(step)
        raise ValueError(
            f"{name}: step must be a float32 scalar tensor on the CPU (with capturable=True on {shard.device}), "
            f"got {kind}."
        )
