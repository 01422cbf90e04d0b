"""The Triton backend: one launch a bucket, on the current stream of the tensors' device.

For NVIDIA, AMD and Intel GPUs, and in Triton's interpreter (``TRITON_INTERPRET=1`` before triton is imported) for
tensors on the CPU. triton is imported when a backend is made, not with this module.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import arithmetic as f32
from .. import codebook
from ..rules import Hyper, Rule
from .base import BucketKey, ByPointers, Slot, device_rate

_DIRECT_SLOTS = 2
"""Buckets of so few tensors are launched tensor by tensor, with all they need in arguments."""

_ROW_NUMBERS = 16  # triton_kernels.NUMBERS
_LOW, _HIGH, _BUCKETS = (127 - 23) << 23, 127 << 23, (23 << 7) + 1

_WIDTHS = {8: codebook.BLOCK_SIZE, 32: 1024}
"""Elements a program steps at once."""


class Shape(NamedTuple):
    """How a launch is cut: warps a program, and how many chunks of `_WIDTHS` elements it takes at most."""

    warps: int
    chunks: int


SHAPES = {8: Shape(2, 16), 32: Shape(8, 4)}
"""By bits; `benchmarks/triton_steps.py --sweep` tries others."""

_PROGRAMS = 8192
"""A program takes more than one chunk only if so many programs are left: enough to fill a large GPU several times."""


@cache
def kernels() -> ModuleType:
    """The module of kernels, which imports triton. Raises RuntimeError if that is not possible."""
    try:
        return importlib.import_module(".triton_kernels", __package__)
    except ImportError as error:
        raise RuntimeError(
            f"Triton cannot be imported ({error}); install it with pip install triton (Linux)."
        ) from error


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on the CPU."""
    return bool(kernels().INTERPRETED.value)


@cache
def encoding_table(signed: bool, negative: bool) -> Tensor:
    """int32 of ``(2945,)``: ``(entry + bits(|x|)) >> 16`` counts codes for |x| in the entry's bucket.

    A bucket is 2**16 neighbouring float32, bucket 0 begins at 2**-23 and the last holds 1.0 alone; magnitudes outside
    are clamped. What is counted is the code (unsigned) or the codes away from zero: 127 + count for x >= 0,
    126 - count for x < 0. The threshold rule of `bnb_fsdp.codebook` is honoured exactly, as a bucket has one
    threshold at most.
    """
    sign = -1.0 if negative else 1.0

    def counts(bits: Tensor) -> Tensor:
        x = bits.to(torch.int32).view(torch.float32) * sign
        code = codebook.encode(x, x, signed).to(torch.int64)
        return code if not signed else (126 - code if negative else code - 127)

    low = torch.arange(_BUCKETS, dtype=torch.int64) * 65536 + _LOW
    entries = counts(low) * 65536 - low
    values = codebook.values(signed, torch.device("cpu"))
    bounds = (values[:-1] + values[1:]) / 2
    magnitudes = bounds[bounds * sign > 0].abs().view(torch.int32).to(torch.int64)
    # A tie belongs to either side of its threshold.
    changes = torch.tensor(sorted({*magnitudes.tolist(), *(magnitudes + 1).tolist()}))
    changes = changes[(changes > _LOW) & (changes <= _HIGH) & (changes % 65536 != 0)]
    changes = changes[counts(changes) != counts(changes - 1)]
    bucket = (changes >> 16) - (_LOW >> 16)
    if len(set(bucket.tolist())) != bucket.numel():
        raise AssertionError("a bucket of the encoding table has two thresholds")
    entries[bucket] += 65536 - (changes - low[bucket])
    return entries.to(torch.int32)


@cache
def maps(device: torch.device) -> Tensor:
    """int32: both maps' values as bits, then the encoding tables; the order is that of `triton_kernels`."""
    values = [torch.tensor(codebook.dynamic_map(signed)).view(torch.int32) for signed in (True, False)]
    tables = [encoding_table(*kind) for kind in ((True, False), (True, True), (False, False))]
    return torch.cat([*values, *tables]).to(device)


class _Buffer:
    """Host memory that a copy to the device reads, and the event behind that copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.pinned = device.type != "cpu"
        self.tensor = torch.zeros(size, dtype=torch.int64, pin_memory=self.pinned)
        self.address = self.tensor.data_ptr()
        self.numbers = (ctypes.c_float * (2 * size)).from_address(self.address)
        self.words = (ctypes.c_int32 * (2 * size)).from_address(self.address)
        self.longs = (ctypes.c_int64 * size).from_address(self.address)
        self.event: Any = torch.get_device_module(device).Event() if self.pinned else None


class _Image:
    """What a step sends to the device in one copy, without waiting.

    int64: a gradient's address a tensor; int32: a row's number a tensor; then the rows (`_numbers`, and an address of a
    learning rate or 0 as int64). The device's part is reused in the order of the stream; on the host a buffer is
    used again once its copy is done, and another is taken until then.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.rows_at = slots + (slots + 1) // 2
        self.size = self.rows_at + slots * (_ROW_NUMBERS // 2)
        self.memory = torch.zeros(self.size, dtype=torch.int64, device=device)
        self._buffers: list[_Buffer] = []

    def buffer(self) -> _Buffer:
        for buffer in self._buffers:
            if buffer.event is None or buffer.event.query():
                return buffer
        self._buffers.append(_Buffer(self.size, self.device))
        return self._buffers[-1]

    def send(self, buffer: _Buffer, rows: int) -> None:
        used = self.rows_at + rows * (_ROW_NUMBERS // 2)
        self.memory[:used].copy_(buffer.tensor[:used], non_blocking=True)
        if buffer.event is not None:
            buffer.event.record()


class TritonBucket(ByPointers):
    """See `bnb_fsdp.backends.base.PointerBucket`.

    Many tensors: their table lies in device memory, and a step sends gradient addresses and hyperparameters with one
    copy. One or two: everything is in the launch's arguments.
    """

    def __init__(self, key: BucketKey, rule: Rule, slots: Sequence[Slot]) -> None:
        self._key, self._rule = key, rule
        self._slots = tuple(slots)  # keeps every tensor of the table alive
        self._module: Any = kernels()
        self._used = sorted({slot.group for slot in slots})
        self._groups = [slot.group for slot in slots]
        device = key.device
        self._interpreted = interpreted()
        self._streams: set[Any] = set()
        self._device_module: Any = None if self._interpreted else torch.get_device_module(device)
        width, shape = _WIDTHS[key.bits], SHAPES[key.bits]
        chunks = sum(-(-slot.parameter.numel() // width) for slot in slots)
        self._chunks = max(1, min(shape.chunks, chunks // _PROGRAMS))
        per_tile = width * self._chunks
        self._tiles = [-(-slot.parameter.numel() // per_tile) for slot in slots]
        self._steps = [] if key.steps_on_device else [_float_at(slot.step) for slot in slots]
        self._table = [self._row(slot) for slot in slots]
        self._many: _Many | None = None
        self._warps = shape.warps
        self._constants = self._meta(width)

    def _row(self, slot: Slot) -> list[int]:
        def padded(tensors: Sequence[Tensor]) -> list[int]:
            return [tensor.data_ptr() for tensor in tensors] + [0] * (3 - len(tensors))

        return [slot.parameter.data_ptr(), *padded(slot.states), *padded(slot.absmax), slot.parameter.numel()]

    def _meta(self, width: int) -> dict[str, Any]:
        key, rule, tl = self._key, self._rule, self._module.tl
        scalars, update8, update32, direction, coupled = self._module.RULES[key.rule]
        dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        widest = max(key.parameter_dtype.itemsize, key.gradient_dtype.itemsize, 4 if key.bits == 32 else 1)
        return dict(
            SCALARS=scalars, UPDATE=update8 if key.bits == 8 else update32, DIRECTION=direction,
            STATES=len(rule.signed), SIGNED=sum(1 << i for i, signed in enumerate(rule.signed) if signed),
            COUPLED=coupled, BITS=key.bits, P=dtypes[key.parameter_dtype], G=dtypes[key.gradient_dtype],
            WIDTH=width, VECTOR=16 // widest,
        )  # fmt: skip

    def check(self, hypers: Sequence[Hyper], capturing: bool) -> None:
        """RuntimeError for a capture, ValueError for an unusable learning rate."""
        for group in self._used:
            device_rate(hypers[group], self._key.device)
        if capturing:
            raise RuntimeError(
                f"step() in a CUDA graph: parameters on {self._key.device} are stepped by the Triton backend, which a "
                "graph cannot capture. Only the native CUDA kernels can be; see python -m bnb_fsdp doctor."
            )

    def run_pointers(self, pointers: int, hypers: Sequence[Hyper], scales: Tensor | None = None) -> None:
        """As `run`, with gradient addresses. ``scales``: float32 of one update scale a slot, on the device."""
        if not self._slots:
            return
        self.check(hypers, False)
        if scales is not None and (scales.dtype != torch.float32 or scales.shape != (len(self._slots),)):
            raise ValueError(
                f"scales are {scales.dtype} of shape {tuple(scales.shape)}; expected float32 of ({len(self._slots)},)."
            )
        given = (ctypes.c_uint64 * len(self._slots)).from_address(pointers)[:]
        with self._entered():
            if scales is None and len(self._slots) <= _DIRECT_SLOTS and not self._key.steps_on_device:
                self._run_direct(given, hypers)
            else:
                self._run_many(given, hypers, scales)
        for gradient, count in zip(given, self._steps):
            if gradient:
                count.value += 1.0

    def norms_pointers(self, pointers: int, hypers: Sequence[Hyper]) -> Tensor:
        """As `norms`, with gradient addresses. Raises RuntimeError for a rule without a direction."""
        if self._rule.direction is None:
            raise RuntimeError(f"{self._key.rule} has no norms; only adam (LAMB) and momentum (LARS) have.")
        self.check(hypers, False)
        sums = torch.zeros(len(self._slots), 2, device=self._key.device)
        if not self._slots:
            return sums
        many, size = self._tables(), len(self._slots)
        given = (ctypes.c_uint64 * size).from_address(pointers)[:]
        with self._entered():
            partial = torch.empty(max(1, many.tiles.numel()), 2, device=self._key.device)
            for (_, published), part in self._variants(given, hypers):
                self._prepare(many, part, hypers, store=False)
                self._launch(
                    "norms_of_tiles", many.tiles.numel(), many.table, many.tiles, many.image.memory,
                    many.corrections, partial, maps(self._key.device), size, self._chunks, SKIP=False,
                    PUBLISHED=published,
                    ON_DEVICE=self._key.steps_on_device, num_warps=self._warps, **self._constants,
                )  # fmt: skip
                self._launch("sum_tiles", size, many.table, many.image.memory, partial, sums, WIDTH=256)
        return sums

    def _variants(
        self, pointers: Sequence[int], hypers: Sequence[Hyper]
    ) -> list[tuple[tuple[bool, bool], Sequence[int]]]:
        """(skip_zeros, published) and the gradients of the tensors they hold for: each is a kernel of its own."""
        skips = self._key.bits in self._rule.skips_zeros
        kind = {group: (skips and hypers[group].skip_zeros, hypers[group].published) for group in self._used}
        kinds = set(kind.values())
        if len(kinds) == 1:
            return [(kinds.pop(), pointers)]
        return [
            (one, [g if kind[group] == one else 0 for g, group in zip(pointers, self._groups)])
            for one in sorted(kinds)
        ]

    def _run_direct(self, pointers: Sequence[int], hypers: Sequence[Hyper]) -> None:
        for (skip, published), part in self._variants(pointers, hypers):
            for gradient, row, group, tiles, count in zip(
                part, self._table, self._groups, self._tiles, self._steps
            ):
                if gradient and tiles:
                    hyper = hypers[group]
                    rate = 0 if hyper.rate is None else hyper.rate.data_ptr()
                    self._launch(
                        "step_one", tiles, gradient, *row, rate, self._chunks, maps(self._key.device),
                        *_numbers(hyper, int(count.value) + 1), SKIP=skip, PUBLISHED=published, num_warps=self._warps,
                        **self._constants,
                    )  # fmt: skip

    def _run_many(self, pointers: Sequence[int], hypers: Sequence[Hyper], scales: Tensor | None) -> None:
        many, size, on_device = self._tables(), len(self._slots), self._key.steps_on_device
        for (skip, published), part in self._variants(pointers, hypers):
            self._prepare(many, part, hypers, store=True)
            self._launch(
                "step_many", many.tiles.numel(), many.table, many.tiles, many.image.memory, many.corrections,
                many.corrections if scales is None else scales, maps(self._key.device), size, self._chunks,
                SKIP=skip, PUBLISHED=published, ON_DEVICE=on_device, SCALED=scales is not None,
                num_warps=self._warps, **self._constants,
            )  # fmt: skip

    def _tables(self) -> _Many:
        """The bucket's tables in device memory, made once."""
        if self._many is None:
            steps = [slot.step.data_ptr() if self._key.steps_on_device else 0 for slot in self._slots]
            self._many = _Many.make(self._table, self._tiles, steps, self._key.device)
        return self._many

    def _prepare(self, many: _Many, pointers: Sequence[int], hypers: Sequence[Hyper], store: bool) -> None:
        """Send what the kernels read; for step counts on the device, compute what follows from them there."""
        self._send(many, pointers, hypers)
        if self._key.steps_on_device:
            size = len(self._slots)
            self._launch(
                "advance", -(-size // 128), many.table, many.image.memory, many.corrections, size, STORE=store,
                WIDTH=128,
            )  # fmt: skip

    def _send(self, many: _Many, pointers: Sequence[int], hypers: Sequence[Hyper]) -> None:
        """Gradient addresses and, for each combination of group and step, a row of hyperparameters to the device."""
        buffer, image = many.image.buffer(), many.image
        buffer.longs[: image.slots] = list(pointers)
        rows: dict[tuple[int, float], int] = {}
        index: list[ctypes.c_int32 | int] = []
        counts = [count.value for count in self._steps] or [0.0] * image.slots
        for gradient, group, count in zip(pointers, self._groups, counts):
            combination = (group, count)
            if gradient and combination not in rows:
                rows[combination] = len(rows)
            index.append(rows.get(combination, 0))
        buffer.words[2 * image.slots : 3 * image.slots] = index
        at = 2 * image.rows_at
        for (group, count), row in rows.items():
            hyper, first = hypers[group], at + row * _ROW_NUMBERS
            buffer.numbers[first : first + 11] = list(_numbers(hyper, int(count) + 1))
            buffer.longs[first // 2 + 6] = 0 if hyper.rate is None else hyper.rate.data_ptr()
        image.send(buffer, len(rows))

    def _launch(self, name: str, programs: int, *arguments: Any, **constants: Any) -> None:
        if programs == 0:
            return
        try:
            # Only the multiplications and additions that the kernels name as fused may be.
            getattr(self._module, name)[(programs,)](*arguments, enable_fp_fusion=False, **constants)
        except Exception as error:
            key = self._key
            shapes = [tuple(slot.parameter.shape) for slot in self._slots[:3]]
            raise RuntimeError(
                f"{key.rule} step ({key.bits}-bit, {key.parameter_dtype} parameters, {key.gradient_dtype} gradients, "
                f"{key.device}, {len(self._slots)} tensors such as {shapes}): Triton kernel {name}: "
                f"{type(error).__name__}: {error}"
            ) from error

    @contextlib.contextmanager
    def _entered(self) -> Any:
        """The bucket's device as the current one, its tables known to be in use on the current stream."""
        if self._interpreted:
            import numpy

            with numpy.errstate(
                all="ignore"
            ):  # the interpreter's arithmetic is numpy's, which warns of each NaN
                yield
            return
        with self._device_module.device(self._key.device):
            stream = self._device_module.current_stream(self._key.device)
            if stream not in self._streams and self._many is not None:
                # The allocator would otherwise hand the tables' memory on while this stream still reads it.
                for tensor in self._many.tensors():
                    tensor.record_stream(stream)
                self._streams.add(stream)
            yield


class _Many(NamedTuple):
    """A bucket's tables in device memory."""

    table: Tensor
    tiles: Tensor
    corrections: Tensor
    image: _Image

    @staticmethod
    def make(rows: list[list[int]], tiles: list[int], steps: list[int], device: torch.device) -> _Many:
        first = [0]
        for count in tiles:
            first.append(first[-1] + count)
        table = [[*row, first[i], steps[i]] for i, row in enumerate(rows)]
        table.append([0] * 8 + [first[-1], 0])  # where the last tensor's tiles end
        flat = array.array("q", chain.from_iterable(table))
        numbers = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(tiles))
        return _Many(
            torch.frombuffer(flat, dtype=torch.int64).to(device, copy=True),
            numbers.to(device),
            torch.zeros(3 * len(rows), device=device),
            _Image(len(rows), device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return self.table, self.tiles, self.corrections, self.image.memory


def _float_at(step: Tensor) -> ctypes.c_float:
    return ctypes.c_float.from_address(step.data_ptr())


@lru_cache(maxsize=256)
def _corrections(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """``1 - beta**step`` as `bnb_fsdp.rules` computes it: in double from the float32 betas, rounded once."""
    first, second = f32.scalar(beta1), f32.scalar(beta2)
    return f32.scalar(1.0 - first**step), f32.scalar(1.0 - second**step)


def _numbers(hyper: Hyper, step: int) -> tuple[float, ...]:
    """The float32 values of a rule's ``h`` in `triton_kernels`."""
    lr = 0.0 if hyper.rate is not None else hyper.lr
    constants = _rounded(
        hyper.beta1, hyper.beta2, hyper.beta3, hyper.alpha, hyper.eps, hyper.weight_decay, lr, hyper.update_scale
    )  # fmt: skip
    return (*constants, *_corrections(hyper.beta1, hyper.beta2, step), float(step == 1))


@lru_cache(maxsize=256)
def _rounded(*numbers: float) -> tuple[float, ...]:
    """float32 values, subnormal numbers flushed."""
    return tuple(map(f32.scalar, numbers))


class TritonBackend:
    """See `bnb_fsdp.backends.base.Backend`.

    Raises RuntimeError if Triton is missing or cannot run kernels on ``device``.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda", "xpu"):
            raise RuntimeError(f"Triton has no kernels for {device.type} tensors.")
        if device.type == "cpu" and not interpreted():
            raise RuntimeError(
                "Triton has no compiler for CPU tensors; set TRITON_INTERPRET=1 before triton is imported to run its "
                "kernels in the interpreter (slow, for tests), or use backend='cpu' or 'torch'."
            )
        if device.type != "cpu" and interpreted():
            raise RuntimeError(
                f"TRITON_INTERPRET=1 runs Triton's kernels on the CPU, where tensors on {device} cannot be reached; "
                "unset it."
            )
        if device.type != "cpu":
            _check_target(device)

    def bucket(self, key: BucketKey, rule: Rule, slots: Sequence[Slot]) -> TritonBucket:
        return TritonBucket(key, rule, slots)


@cache
def _check_target(device: torch.device) -> None:
    """RuntimeError if this Triton was not built for the device's vendor."""
    from triton.runtime import driver

    wanted = "xpu" if device.type == "xpu" else "hip" if torch.version.hip is not None else "cuda"
    try:
        target = driver.active.get_current_target().backend
    except Exception as error:
        raise RuntimeError(f"Triton finds no driver for {device}: {error}") from error
    if target != wanted:
        raise RuntimeError(f"this Triton compiles for {target}, but {device} needs {wanted}.")
