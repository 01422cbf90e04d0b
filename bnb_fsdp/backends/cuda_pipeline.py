"""The native pipeline between host memory and a CUDA device, and page-locking for it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rules import Hyper
from . import native
from .base import Bucket, BucketKey, Slot, device_rate, release_with
from .cuda import CudaBucket, index_of, library, native_hyper, raw_stream

_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "register": (_INT, _POINTER, _INT64),
    "unregister": (_INT, _POINTER),
    "pipeline_create": (_INT, _INT64, _POINTER),
    "pipeline_follow": (_POINTER, _POINTER),
    "pipeline_begin": (_POINTER, _POINTER, _INT64, _POINTER, _INT64),
    "pipeline_step": (_POINTER, _POINTER, _INT64, *[_POINTER] * 4, _INT64, _POINTER),
    "pipeline_wait": (_POINTER,),
    "pipeline_measure": (_POINTER, _POINTER, _POINTER, _INT64, _POINTER),
}


class _Copy(ctypes.Structure):
    """``bnb_fsdp_cuda_copy`` of csrc/c_api.h."""

    _fields_ = [
        ("host", _POINTER),
        ("device", _POINTER),
        ("bytes", _INT64),
        ("rows", _INT64),
        ("host_pitch", _INT64),
        ("device_pitch", _INT64),
    ]


class _Chunk(ctypes.Structure):
    """``bnb_fsdp_cuda_chunk`` of csrc/c_api.h."""

    _fields_ = [
        ("bucket", _POINTER),
        ("memory", _POINTER),
        ("buffer", _INT64),
        ("first_copy", _INT64),
        ("copies", _INT64),
        ("first_gradient", _INT64),
        ("gradients", _INT64),
    ]


@cache
def _checked(name: str) -> Callable[..., None]:
    """The library's function, raising RuntimeError with its message for another status than 0."""
    return library().native.checked(f"bnb_fsdp_cuda_{name}", *_FUNCTIONS[name])


def lock(device: torch.device, address: int, size: int) -> None:
    """Page-lock host memory, so that the device copies it on its own. RuntimeError if the system refuses."""
    _checked("register")(index_of(device), address, size)


def unlock(device: torch.device, address: int) -> None:
    """Make page-locked memory ordinary again, once no copy of it is under way."""
    torch.cuda.synchronize(device)
    _checked("unregister")(index_of(device), address)


class Bandwidth(NamedTuple):
    """Measured: bytes a second to the device alone and of both directions together; seconds that any chunk takes, and
    that one more copy each way adds to it."""

    one_way: float
    two_way: float
    chunk_seconds: float
    copy_seconds: float


class CudaPipeline:
    """See `bnb_fsdp.residency.chunks.Pipeline`. Its two streams live as long as it does."""

    def __init__(self, device: torch.device, buffers: int) -> None:
        self.device = device
        self.chunk_bytes = 0
        self.buffers: list[Tensor] = []
        self._count = buffers
        self._index = index_of(device)
        handle = ctypes.c_void_p()
        _checked("pipeline_create")(self._index, buffers, ctypes.byref(handle))
        self._handle = handle.value
        destroy = library().native.function("bnb_fsdp_cuda_pipeline_destroy", None, _POINTER)
        release_with(self, destroy, self._handle)
        self._next = 0
        self._pending = False

    def resize(self, chunk_bytes: int) -> None:
        """Staging buffers of ``chunk_bytes`` each; 0 gives them back. No prepared chunk may be in use any more."""
        if chunk_bytes == self.chunk_bytes:
            return
        self.wait()
        self.buffers, self.chunk_bytes = [], 0
        if chunk_bytes:
            buffers = [
                torch.empty(chunk_bytes, dtype=torch.uint8, device=self.device) for _ in range(self._count)
            ]
            # The allocator may hand out memory that work queued on the current stream still uses.
            self._follow()
            self.buffers, self.chunk_bytes = buffers, chunk_bytes

    def _follow(self) -> None:
        _checked("pipeline_follow")(self._handle, raw_stream(self._index))

    def take_buffer(self) -> int:
        self._next = (self._next + 1) % self._count
        return self._next

    def prepare(self, key: BucketKey, make: Callable[[Sequence[Slot]], Bucket], chunks: Sequence[Any]) -> Any:
        return _Prepared(self, key, make, chunks)

    def begin(self, prepared: _Prepared, count: int) -> None:
        """Queue the first ``count`` copies in of `step`; `wait`, or another step, undoes it."""
        self._pending = True
        _checked("pipeline_begin")(self._handle, prepared.chunks, count, prepared.copies, prepared.ticket)

    def step(self, prepared: _Prepared, pointers: int, hypers: Any, rates: Any, stream: int) -> None:
        """Queue a step of chunks; nothing is waited for."""
        self._pending = True
        _checked("pipeline_step")(
            self._handle,
            prepared.chunks,
            len(prepared.chunks),
            prepared.copies,
            pointers,
            hypers,
            rates,
            prepared.ticket,
            stream,
        )

    def wait(self) -> None:
        if self._pending:
            _checked("pipeline_wait")(self._handle)
            self._pending = False

    def measure(self, host: Tensor) -> Bandwidth:
        """Copies between ``host``, page-locked, and as much device memory. Blocks for some milliseconds."""
        other = torch.empty_like(host, device=self.device)
        self._follow()
        results = (ctypes.c_double * 4)()
        _checked("pipeline_measure")(
            self._handle, host.data_ptr(), other.data_ptr(), host.numel(), ctypes.addressof(results)
        )
        return Bandwidth(*results)


class _Prepared:
    """The tables of a bucket's chunks."""

    _tickets = itertools.count(1)

    def __init__(
        self,
        pipeline: CudaPipeline,
        key: BucketKey,
        make: Callable[[Sequence[Slot]], Bucket],
        chunks: Sequence[Any],
    ) -> None:
        self._pipeline = pipeline
        self._key = key
        self.ticket = next(self._tickets)
        self._buckets = [make(chunk.slots) for chunk in chunks]
        self._buffers = pipeline.buffers
        copies = [copy for chunk in chunks for copy in chunk.copies]
        self.copies = (_Copy * len(copies))(*copies)
        self.chunks = (_Chunk * len(chunks))()
        first = 0
        for entry, chunk, bucket in zip(self.chunks, chunks, self._buckets):
            assert isinstance(bucket, CudaBucket)
            entry.bucket, entry.memory = bucket.handle, bucket.address
            entry.buffer, entry.first_copy, entry.copies = chunk.buffer, first, len(chunk.copies)
            entry.first_gradient, entry.gradients = chunk.first, len(chunk.slots)
            first += len(chunk.copies)
        self._used = sorted({slot.group for chunk in chunks for slot in chunk.slots})
        groups = max(self._used, default=0) + 1
        self._hypers, self._rates = (native.Hyper * groups)(), (_POINTER * groups)()
        self._index = index_of(pipeline.device)
        self._streams = {raw_stream(self._index)}

    def begin(self, count: int) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._pipeline.begin(self, count)

    def __call__(self, pointers: int, hypers: Sequence[Hyper]) -> None:
        for index in self._used:
            self._hypers[index] = native_hyper(hypers[index])
            self._rates[index] = device_rate(hypers[index], self._key.device)
        stream = raw_stream(self._index)
        if stream not in self._streams:
            current = torch.cuda.current_stream(self._key.device)
            for bucket in self._buckets:
                bucket.memory.record_stream(current)  # type: ignore[attr-defined]
            for buffer in self._buffers:
                buffer.record_stream(current)
            self._streams.add(stream)
        self._pipeline.step(self, pointers, self._hypers, self._rates, stream)
