"""The native CPU backend: one call a bucket."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
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
    than this rank's share of the cores.

    The share: the cores this process may run on, and no more than ``1 / $LOCAL_WORLD_SIZE`` of those that its launcher
    may (of the machine's, if this process may run where the launcher may not, or the system does not tell). So ranks
    that a launcher binds to cores of their own use these, others divide what they share, such as the cpuset of a
    container or of a Slurm job. Without ``$LOCAL_WORLD_SIZE``, which torchrun and accelerate set, nothing tells how
    many ranks there are, and each has torch's number.

    ``$BNB_FSDP_NUM_THREADS`` is taken as it is, however many cores there are. Raises ValueError if it is not a positive
    integer.
    """
    given = os.environ.get(THREADS_VARIABLE)
    if given:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"{THREADS_VARIABLE}={given!r} must be a positive integer.")
        return int(given)
    has_affinity = hasattr(os, "sched_getaffinity")
    own = os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1))
    share = len(own)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1:
        share = min(share, (_launchers_cores(own) if has_affinity else share) // int(ranks))
    return max(1, min(torch.get_num_threads(), share))


def _launchers_cores(own: set[int]) -> int:
    """Number of the cores that were there to divide, given those this process may run on."""
    try:
        cores = os.sched_getaffinity(_launcher(os.getppid()))
    except OSError:  # it has ended, or is hidden
        cores = set()
    # A process that runs elsewhere than its launcher did not get its cores from it.
    return len(cores) if cores >= own else max(len(own), os.cpu_count() or 1)


@functools.lru_cache(maxsize=1)
def _launcher(process: int) -> int:
    """The process that started the ranks: ``process``, this one's parent, or an ancestor of it if that is a shell or a
    ``numactl`` around one rank alone, which has LOCAL_RANK in its environment as the rank has."""
    try:
        while process > 0:
            folder = Path(f"/proc/{process}")
            environment = (folder / "environ").read_bytes().split(b"\0")
            if not any(entry.startswith(b"LOCAL_RANK=") for entry in environment):
                break
            # Behind the name, which may hold anything: the state, then the parent.
            process = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        pass  # not to be read: taken for it
    return process


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
