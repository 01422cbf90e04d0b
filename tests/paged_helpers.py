"""A device made of CPU memory, for what paged state does where there is no GPU.

Its pipeline is as lazy as a device's streams may be: what goes out to host memory arrives when somebody waits for it or
needs the staging buffer, not before. So whoever forgets to wait reads the state of an earlier step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bnb_fsdp.residency import policy, residency
from bnb_fsdp.residency.memory import Locker

CHUNK = 1 << 20


class Speed(NamedTuple):
    one_way: float = 55e9
    two_way: float = 100e9
    chunk_seconds: float = 5e-6


class LazyPipeline:
    """See `bnb_fsdp.residency.chunks.Pipeline`."""

    def __init__(self, log: list[str]) -> None:
        self.chunk_bytes = 0
        self.buffers: list[Tensor] = []
        self.log = log
        self.moved = 0
        """Bytes that came in."""
        self._next = 0
        self._out: dict[int, list[Any]] = {}

    def resize(self, chunk_bytes: int) -> None:
        self.wait()
        self.chunk_bytes = chunk_bytes
        self.buffers = [torch.full((chunk_bytes,), 0xA5, dtype=torch.uint8) for _ in range(policy.BUFFERS)]
        if not chunk_bytes:
            self.buffers = []

    def take_buffer(self) -> int:
        self._next = (self._next + 1) % policy.BUFFERS
        return self._next

    def prepare(self, key: Any, make: Any, chunks: Sequence[Any]) -> Any:
        buckets = [make(chunk.slots) for chunk in chunks]
        buffers = self.buffers  # alive as long as the chunks

        def run(pointers: int, hypers: Any) -> None:
            assert buffers is self.buffers
            for chunk, bucket in zip(chunks, buckets):
                own = pointers + 8 * chunk.first
                if not any((ctypes.c_uint64 * len(chunk.slots)).from_address(own)):
                    continue
                self._flush(chunk.buffer)
                for copy in chunk.copies:
                    ctypes.memmove(copy.device, copy.host, copy.size)
                    self.moved += copy.size
                self.log.append(f"in {chunk.buffer}")
                bucket.run_pointers(own, hypers)
                self._out[chunk.buffer] = chunk.copies

        return run

    def _flush(self, buffer: int) -> None:
        for copy in self._out.pop(buffer, ()):
            ctypes.memmove(copy.host, copy.device, copy.size)

    def wait(self) -> None:
        for buffer in list(self._out):
            self._flush(buffer)


class Device:
    """What the tests see of the simulated device: free memory to set, page-locked ranges, the pipeline."""

    def __init__(self) -> None:
        self.free, self.total = 8 << 30, 16 << 30
        self.locked: dict[int, int] = {}
        self.refuse_from: int | None = None
        """Refuse to lock more once so many bytes are locked."""
        self.log: list[str] = []
        self.pipelines: list[LazyPipeline] = []

    def lock(self, address: int, size: int) -> None:
        if self.refuse_from is not None and sum(self.locked.values()) + size > self.refuse_from:
            raise RuntimeError("out of memory (simulated)")
        self.locked[address] = size

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def new_pipeline(self, device: torch.device) -> LazyPipeline:
        self.pipelines.append(LazyPipeline(self.log))
        return self.pipelines[-1]

    @property
    def locked_bytes(self) -> int:
        return sum(self.locked.values())


def simulated(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(residency, "PAGEABLE", "cpu")
    monkeypatch.setattr(residency, "_locker", lambda _: Locker(device.lock, device.unlock))
    monkeypatch.setattr(residency, "_new_pipeline", device.new_pipeline)
    monkeypatch.setattr(residency, "_speed", lambda _: Speed())
    monkeypatch.setattr(residency, "_free_memory", lambda _: (device.free, device.total))
    return device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield simulated(monkeypatch)
