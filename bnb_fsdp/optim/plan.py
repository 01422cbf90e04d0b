"""What the first step finds out about parameters and state, kept for the following steps.

A plan holds tensors, not guesses: each step it checks that parameter, state and their storage are the ones it was
made for and reports otherwise, so that loading, moving or replacing state never leaves a stale pointer.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from .. import backends, sharding, state
from ..backends import BucketKey, Slot
from ..backends.base import PointerBucket
from ..backends.gather import STATE, Gatherer, Planned
from ..checkpoint.state_dict import drop_orphans
from ..groups import parameter_name
from ..residency.chunks import HostBucket
from ..rules import Hyper
from .trust import Scales, Trust

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer


class _Bucket:
    """Slots of one key and the parameters they belong to, their prepared bucket, and this step's gradients."""

    def __init__(self, key: BucketKey) -> None:
        self.key = key
        self.slots: list[Slot] = []
        self.parameters: list[Tensor] = []
        self.positions: list[tuple[int, int]] = []  # group and place in it, of the parameters
        self.gradients: list[Tensor | None] = []
        self.prepared: backends.Bucket


class _Item:
    """One parameter: where it lives, what it was when planned, and its place in a bucket."""

    __slots__ = (
        "bucket", "device", "dtype", "identities", "index", "keys", "layout", "name", "parameter", "pointers",
        "probes", "shard", "state", "tensors",
    )  # fmt: skip

    def __init__(
        self, parameter: Tensor, name: str, shard: Tensor, values: dict[str, Any], keys: Sequence[str]
    ) -> None:
        self.parameter = parameter
        self.name = name
        self.shard = shard
        self.layout = (self.shard.shape, self.shard.stride())
        self.dtype = self.shard.dtype
        self.device = self.shard.device
        self.state = values
        self.keys = keys
        self.tensors: tuple[Tensor, ...] = tuple(values[key] for key in keys)
        self.identities = list(map(id, self.tensors))
        self.probes = [tensor.data_ptr for tensor in self.tensors]
        self.pointers = [self.shard.data_ptr(), *(probe() for probe in self.probes)]
        self.bucket: _Bucket
        self.index: int

    def is_current(self, values: Any) -> bool:
        """Whether parameter and state are the same tensors on the same storage: a native table holds pointers."""
        shard = sharding.local(self.parameter)
        return (
            values is self.state
            and list(map(id, map(values.get, self.keys))) == self.identities
            and [shard.data_ptr(), *[probe() for probe in self.probes]] == self.pointers
            and (shard.shape, shard.stride()) == self.layout
            and shard.dtype is self.dtype
        )


class Cohort:
    """Parameters of one group that have taken the same number of steps: a schedule gives them the same values."""

    def __init__(self, group: int) -> None:
        self.group = group
        self._counts: list[ctypes.c_float] = []

    def add(self, step: Tensor) -> None:
        """A parameter's step count, in host memory that the caller keeps alive."""
        self._counts.append(ctypes.c_float.from_address(step.data_ptr()))

    def next_step(self) -> int:
        """Number of the coming step."""
        return int(self._counts[0].value) + 1

    def agrees(self) -> bool:
        """Whether all counts are still the same."""
        return len({count.value for count in self._counts}) == 1


class Plan:
    """Buckets for an optimizer's parameters as they are now; allocates state that does not exist yet."""

    def __init__(self, optimizer: BlockwiseOptimizer) -> None:
        self._rule = optimizer.rule
        self._groups = optimizer.param_groups
        self._state = optimizer.state
        self._items: list[list[_Item | None]] = []
        self._owners: list[Any] = []
        self.cohorts: list[Cohort] = []
        """Of scheduled groups; their hyperparameters follow those of the groups, in this order."""
        self._cohort_of: dict[tuple[int, float], int] = {}
        self._is_scheduled = [optimizer.is_scheduled(group) for group in self._groups]
        buckets: dict[tuple[BucketKey, bool], _Bucket] = {}  # by key and whether the state is in host memory
        for index, group in enumerate(self._groups):
            for position, parameter in enumerate(group["params"]):
                if not state.is_frozen(parameter, self._state.get(parameter)):
                    check_parameter(parameter, parameter_name(self._groups, index, position))
        self._residency = optimizer._residency
        fresh: dict[Tensor, dict[str, Tensor]] = {}
        if self._residency is not None:
            fresh = self._residency.place(optimizer)
        for index, group in enumerate(self._groups):
            row: list[_Item | None] = []
            for position, parameter in enumerate(group["params"]):
                row.append(self._item(index, position, parameter, group, buckets, fresh))
            self._items.append(row)
        if fresh:
            drop_orphans(optimizer)
        sharding.check_disjoint((item.name, item.shard) for row in self._items for item in row if item)
        for (key, on_host), bucket in buckets.items():
            backend = backends.select(key.device, optimizer._backend)
            if on_host and self._residency is not None:
                bucket.prepared = self._residency.bucket(key, self._rule, bucket.slots, backend)
            else:
                bucket.prepared = backend.bucket(key, self._rule, bucket.slots)
        self._buckets = list(buckets.values())
        hosted = (bucket.prepared for bucket in self._buckets if isinstance(bucket.prepared, HostBucket))
        self._begin = next((bucket.begin for bucket in hosted), None)
        self._parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self._scales: Scales | None = None
        self._fresh = fresh
        self._state.update(fresh)
        self._capturable = [group["capturable"] for group in self._groups]
        self._gatherer: Gatherer | None = None
        self._by_pointers = all(isinstance(bucket.prepared, PointerBucket) for bucket in self._buckets)
        self._found: int | None = None

    def begin(self) -> None:
        """Let state in host memory start to come in while gradients are checked; changes nothing."""
        if self._begin is not None:
            self._begin()

    def discard_fresh_state(self) -> None:
        """Take back the state this plan allocated: for a first step that was refused."""
        for parameter in self._fresh:
            del self._state[parameter]
        self._fresh = {}

    def captured(self) -> list[backends.Bucket]:
        """Buckets that a CUDA graph holds a step of: their tables must live as long as the graph may be replayed."""
        return [bucket.prepared for bucket in self._buckets if getattr(bucket.prepared, "captured", False)]

    def _item(
        self,
        index: int,
        position: int,
        parameter: Tensor,
        group: dict[str, Any],
        buckets: dict[tuple[BucketKey, bool], _Bucket],
        fresh: dict[Tensor, dict[str, Tensor]],
    ) -> _Item | None:
        name = parameter_name(self._groups, index, position)
        values = self._state.get(parameter) or fresh.get(parameter)
        if state.is_frozen(parameter, values):
            return None
        shard = sharding.local(parameter).detach()
        if not values:
            bits = state.decide(parameter, group, position).bits
            values = fresh[parameter] = state.allocate(shard, bits, self._rule, group["capturable"])
        state.check_shapes(name, shard, values, self._rule, hosted=self._residency is not None)
        step_device = state.step_device(shard, group["capturable"])
        if values["step"].device != step_device:
            values["step"] = values["step"].to(
                step_device
            )  # capturable was changed, or the state comes from elsewhere
        bits = state.bits_of(values)
        item = _Item(parameter, name, shard, values, state.keys(self._rule, bits))
        gradient = parameter.grad
        key = BucketKey(
            self._rule.name,
            bits,
            item.shard.dtype,
            item.shard.dtype if gradient is None else sharding.local(gradient).dtype,
            item.shard.device,
            steps_on_device=step_device.type != "cpu",
        )
        on_host = self._residency is not None and self._residency.is_on_host(parameter)
        item.bucket = buckets.setdefault((key, on_host), _Bucket(key))
        item.index = len(item.bucket.slots)
        states = self._rule.states
        item.bucket.slots.append(
            Slot(
                name=name,
                group=self._hyper_index(index, values["step"]),
                parameter=item.shard,
                states=tuple(values[key] for key in states),
                absmax=tuple(values[state.absmax_key(key)] for key in states) if bits == 8 else (),
                step=values["step"],
            )
        )
        item.bucket.parameters.append(parameter if sharding.is_sharded(parameter) else self._twin(shard))
        item.bucket.positions.append((index, position))
        item.bucket.gradients.append(None)
        return item

    def _hyper_index(self, group: int, step: Tensor) -> int:
        """Which of the hyperparameters given to `run` are those of a parameter."""
        if not self._is_scheduled[group]:
            return group
        key = (group, float(step))
        if key not in self._cohort_of:
            self._cohort_of[key] = len(self.cohorts)
            self.cohorts.append(Cohort(group))
        index = self._cohort_of[key]
        self.cohorts[index].add(step)
        return len(self._groups) + index

    def _twin(self, shard: Tensor) -> Tensor:
        """A plain parameter's detached twin: to count a version there, in the counter both share, costs a fraction, if
        more than the Python object owns it."""
        if shard.device.type in ("cpu", "cuda"):
            self._owners.append(to_dlpack(shard))
        return shard

    def gather(self, optimizer: BlockwiseOptimizer) -> bool:
        """Collect and check this step's gradients; False if the plan is out of date. Changes nothing.

        The optimizer is an argument: kept here, it and its parameters would be freed by the garbage collector only.
        """
        if optimizer.state is not self._state or optimizer.param_groups is not self._groups:
            return False
        if [group["capturable"] for group in self._groups] != self._capturable:
            return False
        if [optimizer.is_scheduled(group) for group in self._groups] != self._is_scheduled:
            return False
        if not all(cohort.agrees() for cohort in self.cohorts):
            return False
        if self._gatherer is not None:
            self._found = self._gatherer.gather(self._groups, self._state)
            if self._found is not None:
                return True
        try:
            current = self._gather()
        except Exception:
            self._release()
            raise
        if not current:
            self._release()
        elif self._by_pointers and (self._gatherer is None or self._gatherer.difference == STATE):
            self._gatherer = self._new_gatherer()
        return current

    def _new_gatherer(self) -> Gatherer | None:
        """The native shortcut to `_gather` for the following steps, if there is one: called after it found no fault."""
        first, slots = {}, 0
        for bucket in self._buckets:
            first[id(bucket)] = slots
            slots += len(bucket.slots)
        rows: list[list[Planned]] = []
        for group, row in zip(self._groups, self._items):
            rows.append([])
            for parameter, item in zip(group["params"], row):
                if item is None:
                    rows[-1].append(Planned(parameter, parameter, False, None))
                    continue
                planned = Planned(
                    parameter,
                    sharding.local(parameter),
                    sharding.is_sharded(parameter),
                    item.state,
                    item.keys,
                    item.bucket.key.gradient_dtype,
                    first[id(item.bucket)] + item.index,
                )
                rows[-1].append(planned)
        gatherer = Gatherer.make(sharding.ATTRIBUTES, rows, self._state)
        self._by_pointers = gatherer is not None
        return gatherer

    def _gather(self) -> bool:
        """`gather` in Python, with all reasons to refuse a gradient in words."""
        if len(self._groups) != len(self._items):
            return False
        for bucket in self._buckets:
            bucket.gradients = [None] * len(bucket.slots)
        state_of = functools.partial(dict.get, self._state)  # a paged optimizer's own would wait for copies
        for group, row in zip(self._groups, self._items):
            if len(group["params"]) != len(row):
                return False
            for parameter, item in zip(group["params"], row):
                if item is None:
                    if not state.is_frozen(parameter, None):
                        return False
                    continue
                if parameter is not item.parameter or not item.is_current(state_of(parameter)):
                    return False
                gradient = parameter.grad
                if gradient is None:
                    continue
                local = _local_gradient(item, gradient)
                bucket = item.bucket
                if local.dtype is not bucket.key.gradient_dtype:
                    return False
                bucket.gradients[item.index] = local
        return True

    def has_gradients(self) -> bool:
        """Whether `gather` found any."""
        if self._found is not None:
            return self._found > 0
        return any(gradient is not None for bucket in self._buckets for gradient in bucket.gradients)

    def run(self, hypers: Sequence[Hyper], trusts: Sequence[Trust | None]) -> None:
        """Step every bucket with the gradients `gather` collected, and let go of them.

        ``hypers``: of each group, then of each of `cohorts`. ``trusts``: of each group.
        """
        done = 0  # parameters of the buckets that were stepped
        try:
            self._check(hypers)
            scales: Sequence[Tensor | None] = [None] * len(self._buckets)
            if any(trusts):
                norms, first = [], 0
                for bucket in self._buckets:
                    if self._found is None:
                        norms.append(bucket.prepared.norms(bucket.gradients, hypers))
                    else:
                        norms.append(_by_pointer(bucket).norms_pointers(self._pointer(first), hypers))
                    first += len(bucket.slots)
                if self._scales is None:
                    self._scales = Scales(
                        [bucket.parameters for bucket in self._buckets],
                        [bucket.positions for bucket in self._buckets],
                        [[slot.group for slot in bucket.slots] for bucket in self._buckets],
                    )
                scales = self._scales(norms, trusts, self._rule.name)
            for bucket, scale in zip(self._buckets, scales):
                if self._found is None:
                    bucket.prepared.run(bucket.gradients, hypers, scale)
                else:
                    _by_pointer(bucket).run_pointers(self._pointer(done), hypers, scale)
                done += len(bucket.slots)
        finally:
            # Native code is invisible to autograd: without this, a later backward would not notice the change.
            torch.autograd.graph.increment_version(self._updated(done))
            self._release()

    def _pointer(self, slot: int) -> int:
        assert self._gatherer is not None
        return self._gatherer.pointer(slot)

    def _check(self, hypers: Sequence[Hyper]) -> None:
        """Refuse, before any bucket is stepped, what one of them could not do."""
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        for bucket in self._buckets:
            check = getattr(bucket.prepared, "check", None)
            if check is not None:
                check(hypers, capturing)
            elif capturing:
                raise RuntimeError(
                    f"step() in a CUDA graph: parameters on {bucket.key.device} are stepped by a backend that a graph "
                    "cannot capture. Only the native CUDA kernels can be; see python -m bnb_fsdp doctor."
                )

    def _updated(self, done: int) -> list[Tensor]:
        """Of the first ``done`` parameters those that had a gradient."""
        if done == len(self._parameters) == self._found:
            return self._parameters
        if self._found is not None:
            assert self._gatherer is not None
            had: Iterable[Any] = self._gatherer.has_gradient()
        else:
            had = (gradient is not None for bucket in self._buckets for gradient in bucket.gradients)
        return list(itertools.compress(self._parameters[:done], had))

    def _release(self) -> None:
        for bucket in self._buckets:
            bucket.gradients = []
        if self._found is not None and self._gatherer is not None:
            self._gatherer.release()
        self._found = None


def _by_pointer(bucket: _Bucket) -> PointerBucket:
    return cast(PointerBucket, bucket.prepared)  # there is a gatherer only if all buckets take pointers


def check_parameter(parameter: Tensor, name: str) -> None:
    """Raise ValueError, naming the parameter, if its dtype, placement or storage is not supported."""
    if parameter.dtype not in state.PARAMETER_DTYPES:
        choices = ", ".join(str(dtype) for dtype in state.PARAMETER_DTYPES)
        raise ValueError(f"{name}: dtype {parameter.dtype} is not supported; use one of {choices}.")
    sharding.check(parameter, name)


def _local_gradient(item: _Item, gradient: Tensor) -> Tensor:
    """The local gradient in the shard's memory order; ValueError, naming the parameter, if the two do not pair up."""
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"{item.name}: the gradient is sparse ({gradient.layout}), which is not supported. Use a dense "
            "gradient, for example nn.Embedding(..., sparse=False)."
        )
    if not sharding.same_layout(gradient, item.parameter):
        raise ValueError(
            f"{item.name}: the gradient is {sharding.describe(gradient)}, the parameter "
            f"{sharding.describe(item.parameter)}. Redistribute the gradient to the parameter's placements."
        )
    local = sharding.local(gradient)
    if local.is_neg():
        local = local.resolve_neg()
    if not sharding.has_storage(local):
        raise ValueError(
            f"{item.name}: the gradient is a {type(local).__name__} without storage (freed, lazy or a wrapper); "
            "give the parameter a plain tensor as its gradient."
        )
    if local.device != item.device or local.shape != item.layout[0]:
        raise ValueError(
            f"{item.name}: the local gradient has shape {tuple(local.shape)} on {local.device}, the local "
            f"parameter {tuple(item.shard.shape)} on {item.device}; they must agree."
        )
    if local.dtype not in state.PARAMETER_DTYPES:
        choices = ", ".join(str(dtype) for dtype in state.PARAMETER_DTYPES)
        raise ValueError(f"{item.name}: gradient dtype {local.dtype} is not supported; use one of {choices}.")
    if sharding.same_order(local, *item.layout):
        return local
    return torch.empty_like(item.shard, dtype=local.dtype).copy_(local)
