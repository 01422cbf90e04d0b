"""Where the state of each parameter of one optimizer lives, and how it gets there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, sharding, state
from ..backends.base import Backend, Bucket, BucketKey, Slot
from ..callers import warn_caller
from ..groups import parameter_name
from ..rules import Rule
from . import policy as policies
from .auto import Watch, gives_back
from .chunks import HostBucket
from .memory import Arena, HostMemoryError, Locker, aligned, arenas

if TYPE_CHECKING:
    from ..backends.cuda_pipeline import Bandwidth, CudaPipeline
    from ..optim.base import BlockwiseOptimizer

CPU = torch.device("cpu")
PAGEABLE = "cuda"
"""The type of device, and the name of the backend, that state can be streamed to."""

MEASURED_BYTES = 32 << 20
ASK_SECONDS = 0.02
"""How often "auto" asks for free memory at most: it takes 15 us, as much as a step of small state may take."""

_said: set[str] = set()


class _Entry(NamedTuple):
    """A parameter that has state or is about to get it."""

    parameter: Tensor
    shard: Tensor
    bits: int
    values: dict[str, Any] | None
    capturable: bool
    size: int
    device_size: int
    """Bytes on the device, were it there."""


class Residency:
    """The home of each parameter's state, by a policy that may be changed at any time between steps.

    ``policy``: "device", "host", bytes of device memory, or "auto" (host until the first full iteration has shown how
    much memory it leaves). ``reserve``: bytes that "auto" leaves free.
    """

    def __init__(self, owner: str, policy: policies.Policy, reserve: int | None) -> None:
        self._owner = owner
        self.policy = policies.check_policy(owner, policy)
        self.reserve = policies.check_reserve(owner, reserve)
        self.offloaded = False
        self._arenas: dict[Tensor, Arena] = {}
        self._pipelines: dict[torch.device, CudaPipeline] = {}
        self._budgets: dict[torch.device, int] = {}
        self._steps = 0
        self._watches: dict[torch.device, Watch] = {}
        self._shrunk = False
        self._stuck = False
        """Whether state that "auto" wanted to move to host memory could not be."""
        self._on_device: set[Tensor] = set()
        self._overheads: dict[torch.device, int] = {}
        """Bytes of staging buffers and tables."""
        self._smallest: dict[torch.device, int] = {}
        """Bytes that the smallest state in host memory would take on the device."""
        self._asked = 0.0
        self._devices: set[torch.device] = set()
        self._unusable: set[torch.device] = set()
        self._chunk_sizes: dict[torch.device, int] = {}
        self._placed = self._wanted()

    def __getstate__(self) -> dict[str, Any]:
        given = {"owner": self._owner, "policy": self.policy, "reserve": self.reserve}
        return {"given": given, "offloaded": self.offloaded}

    def __setstate__(self, values: dict[str, Any]) -> None:
        Residency.__init__(self, **values["given"])
        self.offloaded = values["offloaded"]
        self._placed = self._wanted()

    def set_policy(self, policy: policies.Policy) -> None:
        """Take another policy; `place` then moves what has to move. ValueError if there is no such policy."""
        self.policy = policies.check_policy(self._owner, policy)
        self.offloaded = self._stuck = False
        self._budgets, self._watches = {}, {}
        self._steps = 0

    def set_offloaded(self, offloaded: bool, optimizer: BlockwiseOptimizer) -> None:
        """Whether all state has to be in host memory, whatever the policy; `place` then moves what has to move."""
        self.offloaded, self._stuck = offloaded, False
        if offloaded or not self._budgets:
            return
        # Others may hold what was free when "auto" decided.
        torch.cuda.empty_cache()
        for device, budget in self._budgets.items():
            free, total = _free_memory(device)
            held = self._held(optimizer, device)
            self._budgets[device] = max(
                0, min(budget, held + free - policies.reserve_of(self.reserve, total))
            )

    def _wanted(self) -> tuple[policies.Policy, bool, dict[torch.device, int], int]:
        """What `place` goes by."""
        return self.policy, self.offloaded, dict(self._budgets), self._steps

    # Waiting

    def wait(self) -> None:
        """Until state in host memory is that of the last step. Blocks."""
        for pipeline in self._pipelines.values():
            pipeline.wait()

    # Homes

    def device_for(self, parameter: Tensor, shard: Tensor) -> torch.device:
        """Where state of ``parameter`` that is being loaded belongs."""
        if not self._can_page(shard):
            return shard.device
        if self.offloaded or parameter in self._arenas:
            return CPU
        return shard.device if self.policy == "device" or parameter in self._on_device else CPU

    def is_on_host(self, parameter: Tensor) -> bool:
        """Whether `place` put the state of ``parameter`` into host memory."""
        return parameter in self._arenas

    def _can_page(self, shard: Tensor) -> bool:
        return shard.device.type == PAGEABLE and shard.numel() > 0 and shard.device not in self._unusable

    def place(
        self, optimizer: BlockwiseOptimizer, fresh: bool = True, also: Collection[Tensor] = ()
    ) -> dict[Tensor, dict[str, Tensor]]:
        """Bring all state where it belongs; returns the zero state that parameters without one get if ``fresh``, those
        of ``also`` even if they are frozen.

        Raises HostMemoryError if host memory is refused, torch.OutOfMemoryError if the device's is, ValueError for step
        counts that are not on the host, RuntimeError in a CUDA graph's capture. What had been moved by then stays where
        it is, valid, and the policy is again the one that `place` last followed. "auto" goes on without what it cannot
        have once it has decided, and says so if it could not leave the device.
        """
        while True:
            try:
                return self._place(optimizer, fresh, also)
            except BaseException as error:
                self.forget(optimizer.state)
                if not self._settles(error, optimizer):
                    self.policy, self.offloaded, budgets, steps = self._placed
                    self._budgets, self._steps = dict(budgets), max(self._steps, steps)
                    raise

    def _settles(self, error: BaseException, optimizer: BlockwiseOptimizer) -> bool:
        """Whether "auto", which has decided already, wants less now that ``error`` has come of what it wanted."""
        shrunk, self._shrunk = self._shrunk, False
        if self.policy != "auto" or self.offloaded:
            return False
        if isinstance(error, HostMemoryError) and shrunk:
            self._budgets, self._stuck = dict(self._placed[2]), True
            warn_caller(
                f"{self._owner}: less of the device's memory is free than residency='auto' has to leave free "
                f"(residency_reserve), but state cannot leave it: {error} It stays there.",
                UserWarning,
            )
            return True
        if isinstance(error, torch.OutOfMemoryError):
            held = {device: self._held(optimizer, device) for device in self._budgets}
            less = any(held[device] < budget for device, budget in self._budgets.items())
            self._budgets = {device: min(held[device], budget) for device, budget in self._budgets.items()}
            return less
        return False

    def _place(
        self, optimizer: BlockwiseOptimizer, fresh: bool, also: Collection[Tensor]
    ) -> dict[Tensor, dict[str, Tensor]]:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                f"{self._owner}: state cannot be placed while a CUDA graph is captured, and what is in host memory "
                "cannot be part of one. Use the class without Paged."
            )
        self._find_devices(optimizer)
        entries = list(self._entries(optimizer, fresh, also))
        in_host = self._choose(entries, len(optimizer.param_groups))
        self.wait()
        made: dict[Tensor, dict[str, Tensor]] = {}
        rule = optimizer.rule
        left = {e.shard.device for e in entries if e.parameter in in_host and _is_on_device(e)}
        moving = any(entry.values and not self._stays(entry, in_host) for entry in entries)
        if moving:
            self._synchronize()  # the last update may have been queued on any stream
        self._to_host([entry for entry in entries if entry.parameter in in_host], rule, made)
        for entry in entries:
            if entry.parameter in in_host:
                continue
            if entry.values is None:
                made[entry.parameter] = state.allocate(entry.shard, entry.bits, rule, entry.capturable)
            elif not self._stays(entry, in_host):
                _move(entry.values, state.keys(rule, entry.bits), entry.shard.device)
            self._arenas.pop(entry.parameter, None)
            self._on_device.add(entry.parameter)
        known = {entry.parameter for entry in entries}
        self._arenas = {p: arena for p, arena in self._arenas.items() if p in in_host and p in known}
        self._on_device = known - in_host
        for device, pipeline in self._pipelines.items():
            # Staging buffers of another size are let go; those of this size are for the next step to make.
            needed = any(entry.shard.device == device and entry.parameter in in_host for entry in entries)
            if not needed or pipeline.chunk_bytes != self._chunk_sizes[device]:
                pipeline.resize(0)
        if moving:
            self._synchronize()  # and the next may be on any other
        if left:
            torch.cuda.empty_cache()  # else what was given back would stay with torch's allocator
        self._placed, self._shrunk = self._wanted(), False
        return made

    def forget(self, live: Mapping[Tensor, Any]) -> None:
        """Let go of host memory for parameters that have no state in ``live``, ``optimizer.state``."""
        self._arenas = {p: arena for p, arena in self._arenas.items() if dict.get(live, p)}  # type: ignore[call-overload]
        self._on_device = {p for p in self._on_device if dict.get(live, p)}  # type: ignore[call-overload]

    def _entries(
        self, optimizer: BlockwiseOptimizer, fresh: bool, also: Collection[Tensor]
    ) -> Iterator[_Entry]:
        rule = optimizer.rule
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                values = dict.get(optimizer.state, parameter)
                if not values and not fresh:
                    continue
                if state.is_frozen(parameter, values) and parameter not in also:
                    continue
                name = parameter_name(optimizer.param_groups, index, position)
                sharding.check(parameter, name)
                if group["capturable"]:
                    raise ValueError(
                        f"{name}: capturable=True in a group of {self._owner}, whose state a CUDA graph cannot stream; "
                        "use the class without Paged."
                    )
                shard = sharding.local(parameter).detach()
                if shard.device.type == "meta":
                    continue
                if values:
                    state.check_shapes(name, shard, values, rule, hosted=True)
                    bits = state.bits_of(values)
                else:
                    bits = state.decide(parameter, group, position).bits
                tensors = state.sizes(shard.numel(), bits)
                size, taken = sum(tensors), sum(map(policies.device_bytes, tensors))
                states = len(rule.states)
                yield _Entry(
                    parameter, shard, bits, values or None, group["capturable"], states * size, states * taken
                )

    def _find_devices(self, optimizer: BlockwiseOptimizer) -> None:
        """Find the parameters' devices; say, once, on which of them state stays as in the unpaged class."""
        self._devices = {
            sharding.local(p).device for group in optimizer.param_groups for p in group["params"]
        }
        self._unusable = set()
        for device in self._devices:
            reason = None
            if device.type == "cpu" != PAGEABLE:
                reason = "parameters on the CPU have their state there, in ordinary memory"
            elif device.type != "meta" and _backend(device, optimizer._backend) != PAGEABLE:
                reason = f"state of parameters on {device.type} devices is streamed by the native CUDA kernels alone"
            if reason is None:
                continue
            self._unusable.add(device)
            if f"{self._owner} {device.type}" not in _said:
                _said.add(f"{self._owner} {device.type}")
                warn_caller(f"{self._owner}: {reason}; it works as the unpaged class.", UserWarning)

    def _choose(self, entries: Sequence[_Entry], groups: int) -> set[Tensor]:
        """The parameters whose state shall be in host memory; finds each device's chunk size too."""
        result: set[Tensor] = set()
        if self.policy == "device" and not self.offloaded:
            return result
        for device in dict.fromkeys(entry.shard.device for entry in entries):
            own = [entry for entry in entries if entry.shard.device == device and self._can_page(entry.shard)]
            self._chunk_sizes[device] = self._chunk_bytes(device, sum(entry.size for entry in own))
            left = self._budget(device, own, groups)
            self._smallest.pop(device, None)
            for entry in own:
                if left is None or entry.device_size <= left:
                    left = None if left is None else left - entry.device_size
                else:
                    result.add(entry.parameter)
                    self._smallest[device] = min(
                        self._smallest.get(device, entry.device_size), entry.device_size
                    )
        return result

    def _budget(self, device: torch.device, entries: Sequence[_Entry], groups: int) -> int | None:
        """Bytes of state that stay on the device, None for all."""
        if self.offloaded or self.policy == "host":
            return 0
        total = sum(entry.device_size for entry in entries)
        chunk = self._chunk_sizes[device]
        tables = policies.table_bytes([entry.shard.numel() for entry in entries], total, chunk, groups)
        budget = self._budgets.get(device, 0) if self.policy == "auto" else self.policy
        assert isinstance(budget, int)
        if total + tables <= budget:
            return None
        self._overheads[device] = policies.BUFFERS * chunk + tables
        return max(0, budget - self._overheads[device])

    def _to_host(self, entries: Sequence[_Entry], rule: Rule, made: dict[Tensor, dict[str, Tensor]]) -> None:
        new = [entry for entry in entries if not self._is_at_home(entry)]
        for device in dict.fromkeys(entry.shard.device for entry in new):
            # Those that one launch updates lie side by side, so that one copy takes many.
            own = [entry for entry in new if entry.shard.device == device]
            own.sort(key=lambda entry: (entry.bits, str(entry.shard.dtype)))
            templates = [_template(entry, rule) for entry in own]
            sizes = [sum(aligned(t.numel() * t.element_size()) for t in some.values()) for some in templates]
            first = 0
            for arena, count in arenas(sizes, _locker(device)):
                for entry, some in zip(own[first : first + count], templates[first : first + count]):
                    values = {key: arena.cut(tensor) for key, tensor in some.items()}
                    if entry.values is None:
                        step = torch.zeros((), dtype=torch.float32)
                        made[entry.parameter] = {"step": step, **values}
                    else:
                        for key, value in values.items():
                            value.copy_(entry.values[key])
                        entry.values.update(values)
                    self._arenas[entry.parameter] = arena
                    self._on_device.discard(entry.parameter)
                first += count

    def _stays(self, entry: _Entry, in_host: Collection[Tensor]) -> bool:
        if entry.parameter in in_host:
            return self._is_at_home(entry)
        return entry.parameter not in self._arenas and _is_on_device(entry)

    def _synchronize(self) -> None:
        for device in self._devices - self._unusable:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in the page-locked memory of this optimizer's state."""
        return any(_lies_in(tensor, arena) for arena in self._arenas.values())

    def _is_at_home(self, entry: _Entry) -> bool:
        arena = self._arenas.get(entry.parameter)
        if arena is None or entry.values is None:
            return False
        return all(
            _lies_in(value, arena)
            for key, value in entry.values.items()
            if key != "step" and isinstance(value, Tensor) and value.numel()
        )

    # Buckets

    def bucket(self, key: BucketKey, rule: Rule, slots: Sequence[Slot], backend: Backend) -> Bucket:
        """A bucket of slots whose states are in host memory."""
        make: Callable[[Sequence[Slot]], Bucket] = partial(backend.bucket, key, rule)
        pipeline = self._pipeline(key.device)
        pipeline.resize(self._chunk_sizes[key.device])
        return HostBucket(key, slots, make, pipeline, _speed(key.device))

    def _pipeline(self, device: torch.device) -> CudaPipeline:
        if device not in self._pipelines:
            self._pipelines[device] = _new_pipeline(device)
        return self._pipelines[device]

    def _chunk_bytes(self, device: torch.device, size: int) -> int:
        """The chunk size for a device with ``size`` bytes of state: staging buffers take at most half of that, and of a
        budget."""
        limit = size // 2
        if isinstance(self.policy, int):
            limit = min(limit, self.policy // 2)
        elif self.policy == "auto" and device in self._budgets:
            reserve = policies.reserve_of(self.reserve, _free_memory(device)[1])
            limit = min(limit, max(self._budgets[device] // 2, reserve // 8))
        return policies.chunk_size(size, _speed(device), limit) if size else policies.CHUNK_SIZES[0]

    # "auto"

    def is_due(self, optimizer: BlockwiseOptimizer) -> bool:
        """Whether "auto" now wants other homes: asked before each step.

        The first iteration shows what it needs beside the state, as the allocator keeps what was used at the peak.
        """
        if self.policy != "auto" or self.offloaded:
            return False
        self._steps += 1
        if self._steps == 1:
            return False
        now = time.monotonic()
        if self._budgets and now < self._asked + ASK_SECONDS:
            return False
        self._asked = now
        due = False
        for device in self._devices - self._unusable:
            free, total = _free_memory(device)
            reserve = policies.reserve_of(self.reserve, total)
            if device not in self._budgets:
                self._budgets[device] = max(0, free - reserve)
                due = True
            else:
                due |= self._looks_different(optimizer, device, free, reserve)
        return due

    def _looks_different(
        self, optimizer: BlockwiseOptimizer, device: torch.device, free: int, reserve: int
    ) -> bool:
        """Whether "auto" takes another budget of a device, now that ``free`` bytes are free."""
        watch, budget = self._watches.setdefault(device, Watch()), self._budgets[device]
        if free < reserve:
            if budget == 0 or self._stuck:
                return False
            if watch.is_short():
                torch.cuda.empty_cache()
                free, _ = _free_memory(device)
                if free >= reserve:
                    return False
            watch.gave_back()
            self._budgets[device] = gives_back(budget, self._held(optimizer, device), free, reserve)
            self._shrunk = True
            return True
        more = watch.can_take(free, reserve)
        if device not in self._smallest or more < self._smallest[device]:  # all is there, or no room for any
            return False
        self._budgets[device] = self._held(optimizer, device) + self._overheads[device] + more
        return True

    def _held(self, optimizer: BlockwiseOptimizer, device: torch.device) -> int:
        """Bytes that state takes on the device."""
        size = 0
        for p in self._on_device:
            for v in (dict.get(optimizer.state, p) or {}).values():
                if isinstance(v, Tensor) and v.device == device:
                    size += policies.device_bytes(v.nbytes)
        return size

    def release_staging(self) -> None:
        """Give the staging buffers back until the next step."""
        for pipeline in self._pipelines.values():
            pipeline.resize(0)
        torch.cuda.empty_cache()

    def staging_bytes(self) -> dict[torch.device, int]:
        """Bytes of staging buffers by device."""
        return {
            device: sum(b.nbytes for b in p.buffers) for device, p in self._pipelines.items() if p.buffers
        }


def _template(entry: _Entry, rule: Rule) -> dict[str, Tensor]:
    """Tensors with the shapes, strides and dtypes of a parameter's state, without memory."""
    shard = entry.shard
    dtype = torch.uint8 if entry.bits == 8 else torch.float32
    like = torch.empty_strided(shard.shape, shard.stride(), dtype=dtype, device="meta")
    result = dict.fromkeys(rule.states, like)
    if entry.bits == 8:
        scales = torch.empty(state.blocks(shard.numel()), dtype=torch.float32, device="meta")
        result.update(dict.fromkeys(map(state.absmax_key, rule.states), scales))
    return result


def _lies_in(tensor: Tensor, arena: Arena) -> bool:
    begin = arena.memory.data_ptr()
    return begin <= tensor.data_ptr() < begin + arena.memory.numel()


def _is_on_device(entry: _Entry) -> bool:
    return entry.values is not None and any(
        isinstance(value, Tensor) and value.device == entry.shard.device
        for key, value in entry.values.items()
        if key != "step"
    )


def _move(values: dict[str, Any], keys: Iterable[str], device: torch.device) -> None:
    """All of them, or none if memory runs out."""
    moved = {
        key: torch.empty_like(values[key], device=device).copy_(values[key]) for key in keys if key != "step"
    }
    values.update(moved)


def _backend(device: torch.device, requested: str) -> str:
    return backends.select(device, requested).name


def _free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes free on the device, and its size."""
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def _locker(device: torch.device) -> Locker:
    from ..backends import cuda_pipeline

    return Locker(partial(cuda_pipeline.lock, device), partial(cuda_pipeline.unlock, device))


def _new_pipeline(device: torch.device) -> Any:
    from ..backends.cuda_pipeline import CudaPipeline

    return CudaPipeline(device, policies.BUFFERS)


@cache
def _measured(device: torch.device) -> Bandwidth:
    arena = Arena(MEASURED_BYTES, _locker(device))
    return _new_pipeline(device).measure(arena.memory)  # type: ignore[no-any-return]


def _speed(device: torch.device) -> policies.Speed:
    """Measured once a process and device, with 32 MiB of host memory and of the device's; without those, taken for
    granted."""
    try:
        return _measured(device)
    except (HostMemoryError, torch.OutOfMemoryError):
        return policies.GRANTED
