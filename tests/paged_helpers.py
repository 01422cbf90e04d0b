"""A device made of CPU memory, for what paged state does where there is no GPU.

Its pipeline is as lazy as a device's streams may be: what goes out to host memory arrives when somebody waits for it or
needs the staging buffer, not before. So whoever forgets to wait reads the state of an earlier step.
"""

from __future__ import annotations

import ctypes
import random
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
    copy_seconds: float = 2e-6


def rows(copy: Any) -> list[tuple[int, int]]:
    """Addresses on the host and the device of each row of a copy."""
    return [(copy.host + i * copy.host_pitch, copy.device + i * copy.device_pitch) for i in range(copy.rows)]


class LazyPipeline:
    """See `bnb_fsdp.residency.chunks.Pipeline`.

    Executes chunks in any order that the events of csrc/cuda/pipeline.cpp allow: copies in, updates and copies out are
    three queues; a chunk is updated after it came in and goes out after that; its buffer's former chunk goes out before
    it comes in. ``seed`` None: nothing goes out before it has to, everything comes in as late as it may.
    """

    def __init__(self, log: list[str], seed: int | None = None) -> None:
        self.chunk_bytes = 0
        self.buffers: list[Tensor] = []
        self.log = log
        self.moved = 0
        """Bytes that came in."""
        self.waits = 0
        self._next = 0
        self._out: list[tuple[int, Sequence[Any]]] = []
        self._begun: Any = None
        self.locked: dict[int, int] | None = None
        """Page-locked ranges, which everything comes from; None: not looked at."""
        self._random = None if seed is None else random.Random(seed)

    def resize(self, chunk_bytes: int) -> None:
        if chunk_bytes == self.chunk_bytes:
            return
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

        def begin(count: int) -> None:
            """At once, so that it shows if state changes afterwards."""
            assert 0 < count <= len(self.buffers) and buffers is self.buffers
            for chunk in chunks[:count]:
                while chunk.buffer in {index for index, _ in self._out}:
                    self._go_out()
                self._come_in(chunk)
            self._begun = run, count

        def run(pointers: int, hypers: Any) -> None:
            assert buffers is self.buffers
            work = []
            for chunk, bucket in zip(chunks, buckets):
                own = pointers + 8 * chunk.first
                if any((ctypes.c_uint64 * len(chunk.slots)).from_address(own)):
                    work.append((chunk, bucket, own))
            there = chunks[: self._begun[1]] if self._begun and self._begun[0] is run else []
            self._begun = None
            came = updated = 0
            while updated < len(work):
                possible = ["update"] if updated < came else []
                if came < len(work):
                    buffer = work[came][0].buffer
                    waiting = buffer in {earlier.buffer for earlier, _, _ in work[updated:came]}
                    if not waiting and buffer not in {index for index, _ in self._out}:
                        possible.append("in")
                if self._out:
                    possible.append("out")
                what = possible[0] if self._random is None else self._random.choice(possible)
                if what == "out":
                    self._go_out()
                    continue
                chunk, bucket, own = work[came if what == "in" else updated]
                if what == "in":
                    if not any(chunk is other for other in there):
                        self._come_in(chunk)
                    came += 1
                else:
                    bucket.run_pointers(own, hypers)
                    self._out.append((chunk.buffer, chunk.copies))
                    updated += 1
            while self._random is not None and self._out and self._random.random() < 0.5:
                self._go_out()

        run.begin, run.chunks = begin, chunks  # type: ignore[attr-defined]
        return run

    def _come_in(self, chunk: Any) -> None:
        for copy in chunk.copies:
            for host, device in rows(copy):
                if self.locked is not None:
                    assert any(a <= host and host + copy.size <= a + s for a, s in self.locked.items())
                ctypes.memmove(device, host, copy.size)
                self.moved += copy.size
        self.log.append(f"in {chunk.buffer}")

    def _go_out(self) -> None:
        for copy in self._out.pop(0)[1]:
            for host, device in rows(copy):
                ctypes.memmove(host, device, copy.size)

    @property
    def pending(self) -> bool:
        """Whether something has not gone out yet."""
        return bool(self._out)

    def wait(self) -> None:
        self.waits += 1
        self._begun = None
        while self._out:
            self._go_out()


class Device:
    """What the tests see of the simulated device: free memory to set, page-locked ranges, the pipeline."""

    def __init__(self) -> None:
        self.free, self.total = 8 << 30, 16 << 30
        self.locked: dict[int, int] = {}
        self.most_locked = 0
        self.seed: int | None = None
        """Of the order in which coming pipelines work."""
        self.refuse_from: int | None = None
        """Refuse to lock more once so many bytes are locked."""
        self.log: list[str] = []
        self.pipelines: list[LazyPipeline] = []

    def lock(self, address: int, size: int) -> None:
        if self.refuse_from is not None and sum(self.locked.values()) + size > self.refuse_from:
            raise RuntimeError("out of memory (simulated)")
        assert not any(a < address + size and address < a + s for a, s in self.locked.items())
        self.locked[address] = size
        self.most_locked = max(self.most_locked, self.locked_bytes)

    def unlock(self, address: int) -> None:
        """As the true one, once all copies are done."""
        for pipeline in self.pipelines:
            pipeline.wait()
        del self.locked[address]

    def new_pipeline(self, device: torch.device) -> LazyPipeline:
        self.pipelines.append(LazyPipeline(self.log, self.seed))
        self.pipelines[-1].locked = self.locked
        return self.pipelines[-1]

    @property
    def locked_bytes(self) -> int:
        return sum(self.locked.values())


def simulated(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(residency, "PAGEABLE", "cpu")
    monkeypatch.setattr(residency, "_locker", lambda _: Locker(device.lock, device.unlock))
    monkeypatch.setattr(residency, "_new_pipeline", device.new_pipeline)
    monkeypatch.setattr(residency, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(residency, "_measured", lambda _: Speed())
    monkeypatch.setattr(residency, "_free_memory", lambda _: (device.free, device.total))
    return device


@pytest.fixture(name="device")
def simulated_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield simulated(monkeypatch)
