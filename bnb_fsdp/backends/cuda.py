"""The native CUDA backend: one launch a bucket, on the current stream of the tensors' device."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..rules import Hyper, Rule
from . import native
from .base import BucketKey, ByPointers, Slot, device_rate

KERNELS_VARIABLE = "BNB_FSDP_CUDA_KERNELS"

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_POINTER, _INT, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "bnb_fsdp_cuda_check": (_INT,),
    "bnb_fsdp_cuda_set_kernels": (ctypes.c_char_p,),
    "bnb_fsdp_cuda_maps": (_POINTER,),
    "bnb_fsdp_cuda_bucket_create": (
        ctypes.c_char_p, *[_INT] * 3, _POINTER, _INT64, _INT64, _INT, _POINTER, _INT, _POINTER,
    ),
    "bnb_fsdp_cuda_bucket_step": (_POINTER,) * 7,
    "bnb_fsdp_cuda_bucket_norms": (_POINTER,) * 7,
    "bnb_fsdp_cuda_step": (
        ctypes.c_char_p, *[_INT] * 3, *[_POINTER] * 3, _FLOAT, *[_POINTER] * 3, _INT, _POINTER,
    ),
    "bnb_fsdp_cuda_norms": (
        ctypes.c_char_p, *[_INT] * 3, *[_POINTER] * 3, _FLOAT, *[_POINTER] * 3, _INT, _POINTER,
    ),
}  # fmt: skip


class CudaLibrary:
    """The functions of ``libbnb_fsdp_cuda`` that return a status."""

    def __init__(self, library: native.NativeLibrary) -> None:
        self.native = library
        for name, argtypes in _FUNCTIONS.items():
            setattr(self, name.removeprefix("bnb_fsdp_cuda_"), library.function(name, _INT, *argtypes))
        self.destroy = library.function("bnb_fsdp_cuda_bucket_destroy", None, _POINTER)
        self.image = library.function("bnb_fsdp_cuda_bucket_image", _POINTER, _POINTER, _POINTER)
        self.bucket_tiles = library.function("bnb_fsdp_cuda_bucket_tiles", _INT64, _POINTER)
        self.maps_bytes = library.function("bnb_fsdp_cuda_maps_bytes", _INT64)
        self.tiles = library.function("bnb_fsdp_cuda_tiles", _INT64, _INT64)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # the functions above are instance attributes, unknown to type checkers

    def last_error(self) -> str:
        """The message of this thread's last failure."""
        return self.native.last_error()


@cache
def library() -> CudaLibrary:
    """The CUDA library, with the kernels of ``$BNB_FSDP_CUDA_KERNELS`` ("auto" or "portable") if that is set.

    Raises LibraryError if it is missing, ValueError for another name.
    """
    loaded = CudaLibrary(native.load("cuda"))
    wanted = os.environ.get(KERNELS_VARIABLE)
    if wanted and loaded.set_kernels(wanted.encode()) != 0:
        raise ValueError(f"{KERNELS_VARIABLE}={wanted!r}: {loaded.last_error()}.")
    return loaded


def check_device(device: torch.device) -> None:
    """RuntimeError, with what the library was built for, if it has no kernels for ``device``."""
    if library().check(index_of(device)) != 0:
        raise RuntimeError(f"no kernels for {device}: {library().last_error()}")


def index_of(device: torch.device) -> int:
    """The device's number, the current device's if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def maps(index: int) -> Tensor:
    """The tables of the two maps on a device (50 KiB, uint8), which all 8-bit launches there read; made once a process.

    RuntimeError while a CUDA graph is captured, which could not hold the copy.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the first 8-bit step on cuda:{index} brings tables to the device, which a CUDA graph cannot capture: "
            "take one before the capture."
        )
    host = torch.empty(library().maps_bytes(), dtype=torch.uint8)
    if library().maps(host.data_ptr()) != 0:
        raise RuntimeError(f"code tables: {library().last_error()}")
    return host.to(f"cuda:{index}")


def raw_stream(index: int) -> int:
    """The current stream of a device as a ``cudaStream_t``."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def native_hyper(hyper: Hyper) -> native.Hyper:
    """``hyper`` for the library; for a learning rate in device memory see `device_rate`."""
    return native.hyper(hyper)


def entry(slot: Slot) -> native.TensorEntry:
    """The slot for the library."""
    result = native.TensorEntry(
        parameter=slot.parameter.data_ptr(),
        step=slot.step.data_ptr(),
        numel=slot.parameter.numel(),
        group=slot.group,
    )
    for index, state in enumerate(slot.states):
        result.state[index] = state.data_ptr()
    for index, absmax in enumerate(slot.absmax):
        result.absmax[index] = absmax.data_ptr()
    return result


class CudaBucket(ByPointers):
    """See `bnb_fsdp.backends.base.Bucket`.

    The table in device memory is written once; a step sends gradient addresses, step counts and hyperparameters with
    the launch, so that nothing on the host has to outlive the call.
    """

    def __init__(self, key: BucketKey, slots: Sequence[Slot]) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() has to prepare its tables, which a CUDA graph cannot capture: run a step before the capture."
            )
        self._key = key
        self._slots = tuple(slots)  # keeps every tensor of the table alive
        self._library = library()
        self._index = index_of(key.device)
        self._used = sorted({slot.group for slot in slots})
        self._groups = max(self._used, default=0) + 1
        handle = ctypes.c_void_p()
        entries = (native.TensorEntry * len(slots))(*map(entry, slots))
        self._check(
            self._library.bucket_create(
                key.rule.encode(), key.bits, DTYPES[key.parameter_dtype], DTYPES[key.gradient_dtype],
                entries, len(slots), self._groups, int(key.steps_on_device),
                maps(self._index).data_ptr() if key.bits == 8 else None, self._index, ctypes.byref(handle),
            )
        )  # fmt: skip
        self._handle = handle.value
        weakref.finalize(self, self._library.destroy, self._handle)
        size = ctypes.c_int64()
        address = self._library.image(self._handle, ctypes.byref(size))
        image = torch.frombuffer((ctypes.c_uint8 * size.value).from_address(address), dtype=torch.uint8)
        self._memory = image.to(key.device)
        self._address = self._memory.data_ptr()
        self._streams = {raw_stream(self._index)}
        self._hypers = (native.Hyper * self._groups)()
        self._rates = (ctypes.c_void_p * self._groups)()
        self._known: tuple[Hyper, ...] = ()
        self.captured = False
        """Whether a CUDA graph holds a step of this bucket and so needs its table for as long as it is replayed."""

    @property
    def handle(self) -> int | None:
        """The bucket in the library."""
        return self._handle

    @property
    def memory(self) -> Tensor:
        """The table on the device."""
        return self._memory

    @property
    def address(self) -> int:
        """Where the table lies."""
        return self._address

    def check(self, hypers: Sequence[Hyper], capturing: bool) -> None:
        """RuntimeError for a capture this bucket cannot be part of, ValueError for an unusable learning rate."""
        for group in self._used:
            device_rate(hypers[group], self._key.device)
        if not capturing:
            return
        if not self._key.steps_on_device:
            raise RuntimeError(
                "step() in a CUDA graph needs its step counts on the device: construct the optimizer with "
                "capturable=True."
            )
        if self._index != torch.cuda.current_device():
            raise RuntimeError(
                f"step() in a CUDA graph of cuda:{torch.cuda.current_device()} cannot step parameters on "
                f"{self._key.device}: a graph holds one device's work. Use an optimizer for each device."
            )
        self.captured = True

    def run_pointers(self, pointers: int, hypers: Sequence[Hyper], scales: Tensor | None = None) -> None:
        if scales is None:
            scales = self._constant_scales(hypers)
        stream = self._enter(hypers)
        self._check(
            self._library.bucket_step(
                self._handle, self._address, pointers, self._hypers, self._rates,
                None if scales is None else scales.data_ptr(), stream,
            )
        )  # fmt: skip

    def norms_pointers(self, pointers: int, hypers: Sequence[Hyper]) -> Tensor:
        tiles = self._library.bucket_tiles(self._handle)
        workspace = torch.empty(max(1, tiles), 2, device=self._key.device)
        sums = torch.zeros(len(self._slots), 2, device=self._key.device)
        stream = self._enter(hypers)
        self._check(
            self._library.bucket_norms(
                self._handle, self._address, pointers, self._hypers, workspace.data_ptr(),
                sums.data_ptr(), stream,
            )
        )  # fmt: skip
        return sums

    def _enter(self, hypers: Sequence[Hyper]) -> int:
        """Hand the hyperparameters over; returns the current stream, on which the table is now in use."""
        # Tensors must not be compared: that would read them.
        if any(hyper.rate is not None for hyper in hypers) or tuple(hypers) != self._known:
            for index in self._used:
                self._hypers[index] = native_hyper(hypers[index])
                self._rates[index] = device_rate(hypers[index], self._key.device)
            self._known = () if any(hyper.rate is not None for hyper in hypers) else tuple(hypers)
        stream = raw_stream(self._index)
        if stream not in self._streams:
            # The allocator would otherwise hand the table's memory on while this stream still reads it.
            self._memory.record_stream(torch.cuda.current_stream(self._key.device))
            self._streams.add(stream)
        return stream

    def _constant_scales(self, hypers: Sequence[Hyper]) -> Tensor | None:
        if all(hyper.update_scale == 1.0 for hyper in hypers):
            return None
        return torch.tensor(
            [hypers[slot.group].update_scale for slot in self._slots], device=self._key.device
        )

    def _check(self, status: int) -> None:
        if status == 0:
            return
        key = self._key
        shapes = [tuple(slot.parameter.shape) for slot in self._slots[:3]]
        raise RuntimeError(
            f"{key.rule} step ({key.bits}-bit, {key.parameter_dtype} parameters, {key.gradient_dtype} gradients, "
            f"{key.device}, {len(self._slots)} tensors such as {shapes}): {self._library.last_error()}"
        )


class CudaBackend:
    """See `bnb_fsdp.backends.base.Backend`.

    Raises LibraryError if the library cannot be loaded, RuntimeError if it has no kernels for ``device``.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        check_device(device)

    def bucket(self, key: BucketKey, rule: Rule, slots: Sequence[Slot]) -> CudaBucket:
        return CudaBucket(key, slots)
