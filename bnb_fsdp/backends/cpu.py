"""The native CPU backend: one call a bucket."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..rules import Hyper, Rule, read_rate
from . import forked, native
from .base import BucketKey, ByPointers, Slot

THREADS_VARIABLE = "BNB_FSDP_NUM_THREADS"
ISA_VARIABLE = "BNB_FSDP_CPU_ISA"

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def thread_budget() -> int:
    """Threads one step may use: ``$BNB_FSDP_NUM_THREADS`` if set, else torch's number of threads, and no more
    than this rank's share of the cores it may run on (``$LOCAL_WORLD_SIZE`` ranks share them).

    Raises ValueError if the variable is not a positive integer.
    """
    given = os.environ.get(THREADS_VARIABLE)
    if given:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"{THREADS_VARIABLE}={given!r} must be a positive integer.")
        return int(given)
    share = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    # A launcher that binds ranks to cores has divided them already. (Counting all cores reads a file: 6 microseconds.)
    if ranks.isdecimal() and int(ranks) > 1 and share == (os.cpu_count() or 1):
        share //= int(ranks)
    return max(1, min(torch.get_num_threads(), share))


def _library() -> native.NativeLibrary:
    """The CPU library, with the instruction set of ``$BNB_FSDP_CPU_ISA`` if that is set."""
    library = native.load("cpu")
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted:
        try:
            library.checked("bnb_fsdp_cpu_set_isa", ctypes.c_char_p)(wanted.encode())
        except RuntimeError as error:
            raise ValueError(f"{ISA_VARIABLE}={wanted!r}: {error}") from error
    return library


def instruction_set() -> str:
    """Name of the instruction set in use."""
    return str(_library().function("bnb_fsdp_cpu_isa", ctypes.c_char_p)().decode())


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets this processor can run, best first."""
    names = _library().function("bnb_fsdp_cpu_isas", ctypes.c_char_p)()
    return tuple(str(names.decode()).split(","))


class CpuBucket(ByPointers):
    """See `bnb_fsdp.backends.base.Bucket`."""

    def __init__(self, library: native.NativeLibrary, key: BucketKey, slots: Sequence[Slot]) -> None:
        self._key = key
        self._slots = tuple(slots)  # keeps every tensor of the table alive
        self._entries = (native.TensorEntry * len(slots))(*map(_entry, slots))
        self._used = frozenset(slot.group for slot in slots)
        self._library = library
        arguments = (
            ctypes.c_char_p,
            *[ctypes.c_int] * 3,
            *[ctypes.c_void_p] * 2,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            *[ctypes.c_int] * 2,
        )
        self._step = library.function("bnb_fsdp_cpu_step", ctypes.c_int, *arguments)
        self._norms = library.function("bnb_fsdp_cpu_norms", ctypes.c_int, *arguments)

    def _scales(self, hypers: Sequence[Hyper]) -> Tensor | None:
        """Each tensor's update scale, None where all are 1."""
        if all(hyper.update_scale == 1.0 for hyper in hypers):
            return None
        return torch.tensor([hypers[slot.group].update_scale for slot in self._slots])

    def run_pointers(self, pointers: int, hypers: Sequence[Hyper], scales: Tensor | None = None) -> None:
        scales = self._scales(hypers) if scales is None else scales
        self._call(self._step, "step", pointers, hypers, None if scales is None else scales.data_ptr())

    def norms_pointers(self, pointers: int, hypers: Sequence[Hyper]) -> Tensor:
        sums = torch.empty(len(self._slots), 2)
        self._call(self._norms, "norms", pointers, hypers, sums.data_ptr())
        return sums

    def _call(
        self, function: Any, what: str, pointers: int, hypers: Sequence[Hyper], numbers: int | None
    ) -> None:
        table = (native.Hyper * len(hypers))()
        for group in self._used:
            table[group] = native.hyper(read_rate(hypers[group]))
        key = self._key
        threads = thread_budget()
        status = function(
            key.rule.encode(),
            key.bits,
            _DTYPES[key.parameter_dtype],
            _DTYPES[key.gradient_dtype],
            self._entries,
            pointers,
            len(self._entries),
            table,
            len(hypers),
            numbers,
            threads,
            int(threads <= torch.get_num_threads() and not forked()),
        )
        if status != 0:
            shapes = [tuple(slot.parameter.shape) for slot in self._slots[:3]]
            raise RuntimeError(
                f"{key.rule} {what} ({key.bits}-bit, {key.parameter_dtype} parameters, {key.gradient_dtype} "
                f"gradients, {key.device}, {len(self._slots)} tensors such as {shapes}): {self._library.last_error()}"
            )


def _entry(slot: Slot) -> native.TensorEntry:
    entry = native.TensorEntry(
        parameter=slot.parameter.data_ptr(),
        step=slot.step.data_ptr(),
        numel=slot.parameter.numel(),
        group=slot.group,
    )
    for index, state in enumerate(slot.states):
        entry.state[index] = state.data_ptr()
    for index, absmax in enumerate(slot.absmax):
        entry.absmax[index] = absmax.data_ptr()
    return entry


class CpuBackend:
    """See `bnb_fsdp.backends.base.Backend`. Raises LibraryError if the library cannot be loaded."""

    name = "cpu"

    def __init__(self) -> None:
        self._library = _library()
        thread_budget()  # a bad setting shows before anything is stepped

    def bucket(self, key: BucketKey, rule: Rule, slots: Sequence[Slot]) -> CpuBucket:
        return CpuBucket(self._library, key, slots)
