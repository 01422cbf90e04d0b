"""What the benchmarks of paged optimizers share: the device or its stand-in, samples, copies, managed memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cuda_inventories as inventories
import torch

from bnb_fsdp.cli import installed_versions

MIB = 1 << 20
PIECE = 32 * MIB
PINNED = 512 * MIB
PAGE = 4096
CYCLES = 2_000_000  # a millisecond at least, of a clock of up to 2 GHz
PACKAGES = ("bnb_fsdp", "bitsandbytes", "transformers")


class Cuda:
    """The current GPU."""

    dry = False
    device = "cuda"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes of torch's allocator at most, since the last reset."""
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Give back what is no longer referred to."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def machine(self) -> dict[str, Any]:
        return inventories.machine()


class _HostEvent:
    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end._at - self._at) * 1e3


class Dry(Cuda):
    """The simulated device of the tests, to see a benchmark run where there is no GPU. Its figures mean nothing."""

    dry = True
    device = "cpu"

    def __init__(self) -> None:
        import pytest

        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
        from paged_helpers import simulated

        self.simulated = simulated(pytest.MonkeyPatch())

    def synchronize(self) -> None:
        pass

    def event(self) -> Any:
        return _HostEvent()

    def allocated(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int:
        return 0

    def release(self) -> None:
        gc.collect()

    def machine(self) -> dict[str, Any]:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        return {
            "date": time.strftime("%Y-%m-%d"),
            "commit": None,
            "device": "simulated on the CPU",
            **versions,
        }


def open_device(dry: bool) -> Cuda:
    """SystemExit with the remedy if there is no GPU."""
    if not dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --dry runs the benchmark's logic on a device simulated by the CPU.")
    return Dry() if dry else Cuda()


def versions() -> dict[str, str | None]:
    return installed_versions(PACKAGES)


# Times


class Sample(NamedTuple):
    """Milliseconds of one step.

    By the host's clock, ``call``: until step() returned. ``caller``: until the caller's stream was done. ``completed``:
    until everything was, state in host memory included. ``events``: of the caller's stream, between CUDA events.
    """

    call: float
    caller: float
    completed: float
    events: float


def sample(gpu: Cuda, step: Callable[[], Any], wait: Callable[[], Any] | None) -> Sample:
    """One step from an idle device. ``wait``: what a paged optimizer's host memory is waited for with."""
    gpu.synchronize()
    start, end = gpu.event(), gpu.event()
    at = [time.perf_counter()]
    start.record()
    step()
    at.append(time.perf_counter())
    end.record()
    end.synchronize()
    at.append(time.perf_counter())
    if wait is not None:
        wait()
    gpu.synchronize()
    at.append(time.perf_counter())
    call, caller, completed = ((t - at[0]) * 1e3 for t in at[1:])
    return Sample(call, caller, completed, start.elapsed_time(end))


def back_to_back(gpu: Cuda, step: Callable[[], Any], count: int) -> float:
    """Milliseconds a step of ``count`` that follow each other, all of them completed."""
    gpu.synchronize()
    before = time.perf_counter()
    for _ in range(count):
        step()
    gpu.synchronize()
    return (time.perf_counter() - before) * 1e3 / count


def behind(
    gpu: Cuda, step: Callable[[], Any], wait: Callable[[], Any], call: float, tries: int = 3
) -> float | None:
    """Milliseconds of a step from the end of work that was queued before it until host memory has the new state.

    The work lasts longer than the host needs to queue the step (``call`` milliseconds, about), as a backward pass does:
    this is what a step adds to one. As there, its first chunks have come in meanwhile, so that no bound of copies is
    its bound. None if the host was later in every one of ``tries``.
    """
    for attempt in range(tries):
        gpu.synchronize()
        start, end = gpu.event(), gpu.event()
        at = time.perf_counter()
        start.record()
        if not gpu.dry:
            torch.cuda._sleep(int(CYCLES * (call * 1.5 * (attempt + 1) + 0.3)))
        end.record()
        step()
        queued = (time.perf_counter() - at) * 1e3
        wait()
        gpu.synchronize()
        total, work = (time.perf_counter() - at) * 1e3, start.elapsed_time(end)
        if gpu.dry or queued < work:
            return total - work
    return None


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def waiter(optimizer: Any) -> Callable[[], Any] | None:
    """What waits for the optimizer's state in host memory, if it is one of ours and paged."""
    residency = getattr(optimizer, "_residency", None)
    return None if residency is None else residency.wait


# Copies between pinned host memory and the device


class Copies:
    """Bare copies of torch's pinned memory, without chunks or updates: what no paged step can be faster than."""

    def __init__(self, gpu: Cuda) -> None:
        self._gpu = gpu
        size = 4 * MIB if gpu.dry else PINNED
        self._host = [torch.ones(size, dtype=torch.uint8, pin_memory=not gpu.dry) for _ in range(2)]
        self._device = [torch.ones(size, dtype=torch.uint8, device=gpu.device) for _ in range(2)]
        self._streams = [] if gpu.dry else [torch.cuda.Stream() for _ in range(2)]
        for directions in ((0, 1), (0,), (1,)):
            self._time(min(size, 2 * PIECE), directions, queued=True)

    def two_way(self, size: int) -> dict[str, float]:
        """Milliseconds for ``size`` bytes to the device and as many back at once.

        ``ms``: by events, with all copies queued before the first may start. ``host_ms``: as the steps are timed.
        """
        return {
            "ms": self._time(size, (0, 1), queued=True),
            "host_ms": self._time(size, (0, 1), queued=False),
        }

    def one_way(self, size: int) -> dict[str, float]:
        """Milliseconds for ``size`` bytes, alone."""
        return {
            "to_device_ms": self._time(size, (0,), queued=True),
            "to_host_ms": self._time(size, (1,), queued=True),
        }

    def _time(self, size: int, directions: Sequence[int], queued: bool) -> float:
        gpu = self._gpu
        gpu.synchronize()
        start, end = gpu.event(), gpu.event()
        before = time.perf_counter()
        if queued and not gpu.dry:
            torch.cuda._sleep(1_000_000)  # cycles: half a millisecond in which the copies are queued
        start.record()
        for stream in self._streams:
            stream.wait_event(start)
        for first in range(0, size, PIECE):
            for direction in directions:
                self._copy(direction, first, min(PIECE, size - first))
        if not gpu.dry:
            for stream in self._streams:
                torch.cuda.current_stream().wait_stream(stream)
        end.record()
        gpu.synchronize()
        elapsed = (time.perf_counter() - before) * 1e3
        return start.elapsed_time(end) if queued else elapsed

    def _copy(self, direction: int, first: int, size: int) -> None:
        at = first % len(self._host[0])
        part = slice(at, at + size)
        host, device = self._host[direction][part], self._device[direction][part]
        to, source = (device, host) if direction == 0 else (host, device)
        stream = torch.cuda.stream(self._streams[direction]) if self._streams else contextlib.nullcontext()
        with stream:
            to.copy_(source, non_blocking=True)


# bitsandbytes' managed memory


def managed_tensors(optimizer: Any) -> list[torch.Tensor]:
    """States of a bitsandbytes optimizer that are in managed memory."""
    return [
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor) and getattr(value, "is_paged", False)
    ]


def touch(tensors: Sequence[torch.Tensor]) -> None:
    """Write to every page from the CPU, which brings it to host memory. Nothing may use the tensors meanwhile."""
    for tensor in tensors:
        pages = tensor.view(-1).view(torch.uint8)
        pages[::PAGE].add_(0)
        pages[-1:].add_(0)


def free_managed(gpu: Cuda, optimizer: Any) -> int:
    """Free an optimizer's managed memory, which bitsandbytes keeps for good, and so its state; returns the bytes."""
    tensors = managed_tensors(optimizer)
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    optimizer.state.clear()
    if not places:
        return 0
    import bitsandbytes.functional as functional

    gpu.synchronize()
    ours = {address for address, _ in places}
    pages = functional.GlobalPageManager.get_instance().paged_tensors
    pages[:] = [tensor for tensor in pages if tensor.data_ptr() not in ours]
    del tensors
    driver = ctypes.CDLL("libcuda.so.1")
    for address, _ in places:
        status = driver.cuMemFree_v2(ctypes.c_uint64(address))
        if status != 0:
            raise RuntimeError(f"cuMemFree of managed memory failed with status {status}.")
    return sum(size for _, size in places)


@contextlib.contextmanager
def freed(gpu: Cuda, optimizers: Sequence[Any]) -> Iterator[None]:
    """Free the managed memory of ``optimizers`` at the end, however it is reached."""
    try:
        yield
    finally:
        for optimizer in optimizers:
            free_managed(gpu, optimizer)
