"""What an optimizer keeps for each parameter, and why: `describe`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from . import backends, sharding, state
from .optim.base import BlockwiseOptimizer

MAX_LINES = 60
"""Lines of the printed table; `Description.rows` has them all."""

_MAX_NAME = 64
_MAX_GROUPS = 8
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


@dataclass(frozen=True)
class Row:
    """One parameter that has state, or will get it at the first step.

    ``shape`` is the global shape. Bytes include the scales and the 4-byte step count; ``total_state_bytes``
    is summed over the ranks of the parameter's mesh, replicas counted (a plain tensor: over all ranks).
    """

    name: str
    group: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    placement: str
    bits: int
    reason: str
    backend: str
    residency: str
    allocated: bool
    trainable: bool
    state_bytes: int
    total_state_bytes: int
    float32_bytes: int
    total_float32_bytes: int


@dataclass(frozen=True)
class Description:
    """The result of `describe`; ``str()`` is a table, ``to_dict()`` plain JSON data.

    Bytes before the first step are those that it will allocate. ``frozen`` counts the parameters without
    state (requires_grad=False), which have no row; ``settings`` are each
    group's hyperparameters; ``notes`` say what is not as one would wish. ``residency`` is a paged
    optimizer's policy, None for any other; ``staging_bytes`` are on the device beside the state, while
    there is state in host memory; ``offloaded`` is true from `offload` to `reload`.
    """

    optimizer: str
    algorithm: str
    groups: int
    settings: list[dict[str, Any]]
    rows: list[Row]
    frozen: int
    notes: list[str]
    residency: str | int | None = None
    staging_bytes: int = 0
    offloaded: bool = False

    @property
    def host_bytes(self) -> int:
        """Bytes of state in page-locked host memory on this rank."""
        return sum(row.state_bytes for row in self.rows if row.residency == "host")

    @property
    def state_bytes(self) -> int:
        """Bytes of state on this rank."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def total_state_bytes(self) -> int:
        """Bytes of state over all ranks."""
        return sum(row.total_state_bytes for row in self.rows)

    @property
    def float32_bytes(self) -> int:
        """Bytes that float32 states of the same algorithm would take on this rank."""
        return sum(row.float32_bytes for row in self.rows)

    @property
    def total_float32_bytes(self) -> int:
        """Bytes that float32 states of the same algorithm would take over all ranks."""
        return sum(row.total_float32_bytes for row in self.rows)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Number of parameters with 32-bit state, by reason; element counts are left out of the reasons."""
        counts: dict[str, int] = {}
        for row in self.rows:
            if row.bits == 32:
                reason = re.sub(r"^\d+ (?=elements )", "", row.reason)
                counts[reason] = counts.get(reason, 0) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers."""
        return {
            "optimizer": self.optimizer,
            "algorithm": self.algorithm,
            "groups": self.groups,
            "settings": [dict(group) for group in self.settings],
            "frozen": self.frozen,
            "residency": self.residency,
            "host_bytes": self.host_bytes,
            "staging_bytes": self.staging_bytes,
            "offloaded": self.offloaded,
            "notes": list(self.notes),
            "state_bytes": self.state_bytes,
            "total_state_bytes": self.total_state_bytes,
            "float32_bytes": self.float32_bytes,
            "total_float32_bytes": self.total_float32_bytes,
            "fallbacks": self.fallbacks,
            "rows": [{**asdict(row), "shape": list(row.shape)} for row in self.rows],
        }

    def __str__(self) -> str:
        elements = sum(prod(row.shape) for row in self.rows)
        title = (
            f"{self.optimizer}: {counted(len(self.rows), 'parameter')} with state ({elements:,} elements), "
            f"{self.frozen:,} frozen without, in {counted(self.groups, 'group')}"
        )
        table = _table(self.rows) if self.rows else []
        notes = [f"note: {note}" for note in self.notes]
        totals = [self._totals(), *self._residency_lines(), self._fallback_line()]
        return "\n".join([title, *table, *totals, *self._group_lines(), *notes])

    def _residency_lines(self) -> Iterator[str]:
        if self.residency is not None:
            policy = self.residency if isinstance(self.residency, str) else _size(self.residency)
            offloaded = ", offloaded" if self.offloaded else ""
            yield (
                f"residency ({policy}{offloaded}): {_size(self.host_bytes)} in page-locked host memory, "
                f"{_size(self.state_bytes - self.host_bytes)} with the parameters, "
                f"{_size(self.staging_bytes)} of staging buffers"
            )

    def _group_lines(self) -> Iterator[str]:
        for index, settings in enumerate(self.settings[:_MAX_GROUPS]):
            values = ", ".join(f"{key} {value}" for key, value in settings.items())
            yield f"group {index} ({self.algorithm}): {values}"
        if len(self.settings) > _MAX_GROUPS:
            yield f"and {len(self.settings) - _MAX_GROUPS:,} groups more"

    def _totals(self) -> str:
        if not self.rows:
            return "state: none"
        saved = 1 - self.state_bytes / self.float32_bytes if self.float32_bytes else 0.0
        when = "" if all(row.allocated for row in self.rows) else " (once every parameter was stepped)"
        return (
            f"state{when}: {_size(self.state_bytes)} on this rank, {_size(self.total_state_bytes)} on all "
            f"ranks; in float32 {_size(self.float32_bytes)} and {_size(self.total_float32_bytes)}: "
            f"{saved:.1%} saved"
        )

    def _fallback_line(self) -> str:
        fallbacks = self.fallbacks
        reasons = "; ".join(f"{count:,} x {reason}" for reason, count in fallbacks.items())
        return f"32-bit state: {sum(fallbacks.values()):,} of {counted(len(self.rows), 'parameter')}" + (
            f" ({reasons})" if reasons else ""
        )


def describe(optimizer: torch.optim.Optimizer) -> Description:
    """What ``optimizer`` keeps for each parameter: bits and why, backend, residency, bytes here and in total.

    Works before and after the first step, communicates with no other rank, changes nothing. Accepts a
    wrapper with an ``optimizer`` attribute (accelerate's). Raises TypeError for an optimizer of another kind.
    """
    found = _unwrap(optimizer)
    paged = found._residency
    sizes = _Sizes(found)
    names = _Backends(found._backend)
    rows: list[Row] = []
    frozen = 0
    for index, group in enumerate(found.param_groups):
        for position, parameter in enumerate(group["params"]):
            values = found.state.get(parameter)
            if state.is_frozen(parameter, values):
                frozen += 1
            else:
                on_host = paged is not None and paged.is_on_host(parameter)
                rows.append(_row(group, index, position, values or {}, sizes, names, on_host))
    notes = names.notes()
    staging = 0 if paged is None else sum(paged.staging_bytes().values())
    settings = [_settings(group) for group in found.param_groups]
    return Description(
        optimizer=type(found).__name__,
        algorithm=found.rule.name,
        groups=len(found.param_groups),
        settings=settings,
        rows=rows,
        frozen=frozen,
        notes=notes,
        residency=found.residency,
        staging_bytes=staging,
        offloaded=paged is not None and paged.offloaded,
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters as plain values; a tensor that lies on a device is not read."""
    result = {}
    for key, value in group.items():
        if key in ("params", "param_names", "overrides", "format"):
            continue
        if isinstance(value, Tensor):
            value = value.item() if value.device.type == "cpu" else f"on {value.device}"
        result[key] = value
    return result


def _unwrap(optimizer: Any) -> BlockwiseOptimizer:
    found = optimizer
    while not isinstance(found, BlockwiseOptimizer):
        found = getattr(found, "optimizer", None)
        if found is None:
            raise TypeError(
                f"describe() takes an optimizer of bnb_fsdp, but got {type(optimizer).__module__}."
                f"{type(optimizer).__qualname__}."
            )
    return found


def _row(
    group: dict[str, Any],
    index: int,
    position: int,
    values: Mapping[str, Any],
    sizes: _Sizes,
    names: _Backends,
    on_host: bool,
) -> Row:
    parameter = group["params"][position]
    shard = sharding.local(parameter)
    decision = state.decide(parameter, group, position)
    bits, reason = decision
    if values:
        bits = state.bits_of(dict(values))
        if bits != decision.bits:
            reason = f"existing state ({decision.reason} would give {decision.bits})"
    named = group.get("param_names")
    return Row(
        name=named[position] if named else f"group {index}, parameter {position}",
        group=index,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(shard.device),
        placement=sharding.describe(parameter).removeprefix("DTensor ").removeprefix("a "),
        bits=bits,
        reason=reason,
        backend=names.of(shard.device),
        residency="host" if on_host else "device",
        allocated=bool(values),
        trainable=bool(parameter.requires_grad),
        state_bytes=_held_bytes(values) if values else sizes.here(shard, bits),
        total_state_bytes=sizes.total(parameter, bits),
        float32_bytes=sizes.here(shard, 32),
        total_float32_bytes=sizes.total(parameter, 32),
    )


def _held_bytes(values: Mapping[str, Any]) -> int:
    return sum(v.numel() * v.element_size() for v in values.values() if isinstance(v, Tensor))


class _Sizes:
    """Bytes of state, here and over all ranks. Every rank's share is worked out once a kind of sharding."""

    def __init__(self, optimizer: BlockwiseOptimizer) -> None:
        self._rule = optimizer.rule
        self._shares: dict[tuple[Any, ...], list[int]] = {}
        self._world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def here(self, shard: Tensor, bits: int) -> int:
        return state.expected_bytes(shard.numel(), bits, self._rule)

    def total(self, parameter: Tensor, bits: int) -> int:
        if not sharding.is_sharded(parameter):
            return self._world * self.here(parameter, bits)
        dtensor: Any = parameter
        # repr tells placements apart that compare equal, such as Shard and _StridedShard.
        key = (tuple(dtensor.shape), dtensor.device_mesh, repr(dtensor.placements))
        if key not in self._shares:
            self._shares[key] = [prod(shape) for shape in sharding.local_shapes(parameter)]
        return sum(state.expected_bytes(numel, bits, self._rule) for numel in self._shares[key])


class _Backends:
    """Names of the backends that steps on each device would use; finding out never raises."""

    def __init__(self, requested: str) -> None:
        self._requested = requested
        self._names: dict[torch.device, str] = {}
        self._notes: list[str] = []

    def of(self, device: torch.device) -> str:
        if device.type == "meta":
            return "none yet"
        if device not in self._names:
            self._names[device] = self._select(device)
        return self._names[device]

    def _select(self, device: torch.device) -> str:
        try:
            try:
                return backends.select(device, self._requested).name
            except RuntimeWarning:
                # The caller turns warnings into errors; this one comes once, so the second call is silent.
                return backends.select(device, self._requested).name
        except (ImportError, RuntimeError, ValueError) as error:
            self._notes.append(f"backend for {device}: {error}")
            return "none"

    def notes(self) -> list[str]:
        fallen = sorted({device.type for device, name in self._names.items() if name == "torch"})
        if self._requested == "torch":
            return self._notes
        return self._notes + [
            f"{kind} tensors are updated by the slow torch backend; `python -m bnb_fsdp doctor` says why"
            for kind in fallen
        ]


def _table(rows: Iterable[Row]) -> list[str]:
    header = (
        "parameter", "count", "shape", "dtype", "device", "placement", "bits", "backend", "state", "here",
        "all ranks", "why",
    )  # fmt: skip
    cells = [header]
    collapsed = _collapse(rows)
    for name, alike in collapsed[:MAX_LINES]:
        row = alike[0]
        cells.append((
            name if len(name) <= _MAX_NAME else f"{name[:30]}...{name[-31:]}",
            f"{len(alike):,}",
            "x".join(str(size) for size in row.shape) or "scalar",
            row.dtype,
            row.device,
            row.placement,
            str(row.bits),
            row.backend,
            row.residency if row.allocated else f"{row.residency} (none yet)",
            _size(row.state_bytes * len(alike)),
            _size(row.total_state_bytes * len(alike)),
            row.reason if row.trainable else f"{row.reason}; frozen",
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    right = {1, 6, 9, 10}
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    hidden = collapsed[MAX_LINES:]
    if hidden:
        count = sum(len(alike) for _, alike in hidden)
        lines.append(
            f"... and {counted(len(hidden), 'more line')} ({counted(count, 'parameter')}); see .rows"
        )
    return lines


def _collapse(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows whose names differ in numbers only and that agree otherwise, under one name with ``*``."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        rest = {key: value for key, value in vars(row).items() if key != "name"}
        alike.setdefault((_NUMBER.sub("*", row.name), *rest.values()), []).append(row)
    return [(_common_name([row.name for row in members]), members) for members in alike.values()]


def _common_name(names: list[str]) -> str:
    """The names' common form: a number that is the same in all of them stays, another becomes ``*``."""
    numbers = [[match.group() for match in _NUMBER.finditer(name)] for name in names]
    kept = iter([found[0] if len(set(found)) == 1 else "*" for found in zip(*numbers)])
    return _NUMBER.sub(lambda _: next(kept), names[0])


def counted(number: int, noun: str) -> str:
    """``number`` things, in words."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
