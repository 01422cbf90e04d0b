"""State in host memory, cut into chunks that pass through staging buffers of the device one after the other."""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends.base import Bucket, BucketKey, ByPointers, Slot, device_rate
from ..codebook import BLOCK_SIZE
from ..rules import Hyper
from .memory import aligned
from .policy import BUFFERS, Speed, seconds

TILE = 16384
"""Elements: a tensor is cut at multiples of it. No block is cut, and what is copied of a part is a multiple of 256
bytes, its scales too."""

SHARES = 16
"""Chunks are cut by so many parts of a staging buffer, from a quarter of them to all, whichever suits the tensors."""


MANY = 500
"""Chunks from which on no other size than a whole buffer is tried; ten times as many tensors."""

PITCHES = range(1 << 31)
"""Bytes between the rows of one copy that CUDA allows (cudaDeviceProp.memPitch)."""


class Copy(NamedTuple):
    """Bytes that go from ``host`` to ``device`` before the update and back after it; both are addresses.

    ``rows`` of ``size`` bytes each, which start ``host_pitch`` and ``device_pitch`` bytes apart.
    """

    host: int
    device: int
    size: int
    rows: int = 1
    host_pitch: int = 0
    device_pitch: int = 0

    @property
    def end(self) -> int:
        """The address behind its last byte on the device."""
        return self.device + (self.rows - 1) * self.device_pitch + self.size

    def extended(self, new: Copy) -> Copy | None:
        """One copy for this one and ``new``, of a row each, if ``new`` goes on where this one ends."""
        if self.rows == 1 and new.host - self.host == new.device - self.device == self.size:
            return self._replace(size=self.size + new.size)
        return None

    def with_row(self, new: Copy) -> Copy | None:
        """One copy for this one and ``new``, of one row, if that can be the next row. What lies between rows is not
        copied, but has to be page-locked as they are."""
        host = new.host - self.host - (self.rows - 1) * self.host_pitch
        device = new.device - self.device - (self.rows - 1) * self.device_pitch
        if (
            new.size != self.size
            or min(host, device) < self.size
            or host not in PITCHES
            or device not in PITCHES
        ):
            return None
        if self.rows > 1 and (host, device) != (self.host_pitch, self.device_pitch):
            return None
        return self._replace(rows=self.rows + 1, host_pitch=host, device_pitch=device)


@dataclass
class Chunk:
    """Pieces of tensors whose states share staging buffer ``buffer``, and the copies that bring them there.

    ``first`` is the number of its first piece within the bucket.
    """

    buffer: int
    first: int
    slots: list[Slot] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


class Run(Protocol):
    """Steps prepared chunks: (address of a gradient's address for each piece, hyperparameters)."""

    def begin(self, count: int) -> None:
        """Let the states of the first ``count`` chunks, up to `BUFFERS`, come in ahead of the step that follows.
        Changes nothing else."""

    def __call__(self, pointers: int, hypers: Sequence[Hyper]) -> None: ...


class Pipeline(Protocol):
    """Moves chunks to the device and back while others are updated."""

    chunk_bytes: int

    @property
    def buffers(self) -> Sequence[Tensor]:
        """uint8 of ``chunk_bytes`` each, on the device."""

    def prepare(
        self, key: BucketKey, make: Callable[[Sequence[Slot]], Bucket], chunks: Sequence[Chunk]
    ) -> Run: ...

    def wait(self) -> None:
        """Until host memory holds the states of every step so far. Blocks."""

    def take_buffer(self) -> int:
        """The buffer for the next chunk, in turn."""


class _Piece(NamedTuple):
    slot: int
    start: int
    numel: int


def _element_bytes(slot: Slot, count: int) -> int:
    """Bytes of the states and scales of ``count`` elements in a staging buffer."""
    size = sum(aligned(count * state.element_size()) for state in slot.states)
    return size + sum(aligned(4 * -(-count // BLOCK_SIZE)) for _ in slot.absmax)


class _Cut(NamedTuple):
    """Chunks of pieces; of each its bytes and how many copies they take, if neighbours lie side by side."""

    chunks: list[list[_Piece]]
    moved: list[tuple[int, int]]


def _cut(slots: Sequence[Slot], sizes: Sequence[int], limit: int) -> _Cut:
    """The pieces of each chunk of up to ``limit`` bytes: whole neighbours, or one of the equal parts of a tensor that
    is larger. A part beside other pieces would take more copies than it saves chunks. ``sizes``: bytes of the slots."""
    cut = _Cut([], [])
    filled = limit
    for index, (slot, size) in enumerate(zip(slots, sizes)):
        total = slot.parameter.numel()
        if size > limit:
            count = _part(slot, limit)
            starts = range(0, total, count)
            copies = len(slot.states) + len(slot.absmax)
            cut.chunks.extend([_Piece(index, start, min(count, total - start))] for start in starts)
            cut.moved.extend([(_element_bytes(slot, count), copies)] * (len(starts) - 1))
            cut.moved.append((_element_bytes(slot, total - starts[-1]), copies))
            filled = limit
            continue
        if filled + size > limit:
            cut.chunks.append([])
            cut.moved.append((0, 1))
            filled = 0
        cut.chunks[-1].append(_Piece(index, 0, total))
        filled += size
        cut.moved[-1] = filled, 1
    return cut


def _part(slot: Slot, limit: int) -> int:
    """Elements, a multiple of `TILE`, of each of the fewest equal parts of up to ``limit`` bytes."""
    tiles = -(-slot.parameter.numel() // TILE)
    fitting = limit // _element_bytes(slot, TILE)  # every tensor of a tile fills a multiple of the alignment
    return TILE * -(-tiles // -(-tiles // fitting))


def _pieces(slots: Sequence[Slot], chunk_bytes: int, speed: Speed) -> _Cut:
    """Chunks of up to ``chunk_bytes``: cut, of all sizes tried, by that which is fastest."""
    tile = max((_element_bytes(slot, TILE) for slot in slots), default=0)
    if tile > chunk_bytes:
        raise ValueError(
            f"staging buffers of {chunk_bytes} bytes are too small: {TILE} elements take {tile}."
        )
    sizes = [_element_bytes(slot, slot.parameter.numel()) for slot in slots]
    limits = {max(tile, chunk_bytes * share // SHARES) for share in range(SHARES // 4, SHARES + 1)}
    if sum(sizes) > MANY * chunk_bytes or len(slots) > 10 * MANY:
        limits = {chunk_bytes}  # what a chunk more or less costs does not matter there, and trying takes long
    cuts = (_cut(slots, sizes, limit) for limit in sorted(limits))
    return min(cuts, key=lambda cut: seconds(cut.moved, speed))


def _floats(tensor: Tensor) -> Any:
    """The numbers of a float32 tensor on the CPU, which has to outlive this view, without torch's ways."""
    return (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())


def _flat(tensor: Tensor, start: int, count: int) -> Tensor:
    """Elements of a dense tensor in the order in which they lie in memory."""
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + start)


class HostBucket(ByPointers):
    """A `PointerBucket` whose states are in host memory."""

    def __init__(
        self,
        key: BucketKey,
        slots: Sequence[Slot],
        make: Callable[[Sequence[Slot]], Bucket],
        pipeline: Pipeline,
        speed: Speed,
    ) -> None:
        self._key = key
        self._slots = tuple(slots)
        self._pipeline = pipeline
        self._used = sorted({slot.group for slot in slots})
        pieces: list[_Piece] = []
        chunks: list[Chunk] = []
        cut = _pieces(slots, pipeline.chunk_bytes, speed)
        parts = cut.chunks
        split = {piece.slot for part in parts for piece in part if piece.start}
        # A tensor in pieces is stepped in each; the pieces count in private, set before and read after by nobody.
        self._split: list[tuple[int, list[int]]] = [(index, []) for index in sorted(split)]
        numbers = {index: places for index, places in self._split}
        counts = torch.zeros(sum(map(len, parts)), dtype=torch.float32)
        self._counts = _floats(counts)
        self._steps = [_floats(slot.step) for slot in slots]
        for part in parts:
            chunk = Chunk(pipeline.take_buffer(), len(pieces))
            for piece in part:
                step = slots[piece.slot].step
                if piece.slot in numbers:
                    numbers[piece.slot].append(len(pieces))
                    step = counts[len(pieces)]
                self._stage(chunk, piece, step)
                pieces.append(piece)
            chunks.append(chunk)
        size = key.gradient_dtype.itemsize
        self._owners = [piece.slot for piece in pieces]
        self._first = [[piece.slot for piece in part] for part in parts[:BUFFERS]]
        self._begins = len(self._first)
        # Pieces that begin within a tensor: (number, tensor, bytes of its gradient before them).
        self._parts = [(i, p.slot, size * p.start) for i, p in enumerate(pieces) if p.start]
        self._pointers = array.array("Q", bytes(8 * len(pieces)))
        self._run = pipeline.prepare(key, make, chunks)
        self.chunks = len(chunks)
        """How many chunks a step with all gradients moves."""
        self.seconds = seconds(cut.moved, speed)
        """How long that is predicted to take."""

    def _stage(self, chunk: Chunk, piece: _Piece, step: Tensor) -> None:
        slot = self._slots[piece.slot]
        buffer = self._pipeline.buffers[chunk.buffer]
        offset = 0
        if chunk.copies:
            offset = chunk.copies[-1].end - buffer.data_ptr()
        staged: list[Tensor] = []
        for values, start, count in self._ranges(slot, piece):
            host = _flat(values, start, count)
            size = count * host.element_size()
            device = buffer[offset : offset + size].view(host.dtype)
            staged.append(device)
            # With the padding behind the end of a tensor, so that it and its neighbours are one copy.
            copy = Copy(host.data_ptr(), device.data_ptr(), aligned(size))
            joined = chunk.copies[-1].extended(copy) if chunk.copies else None
            if joined is None and len(staged) > 1:
                joined = chunk.copies[-1].with_row(copy)
            chunk.copies[-1 if joined else len(chunk.copies) :] = [joined or copy]
            offset += copy.size
        states = len(slot.states)
        chunk.slots.append(
            replace(
                slot,
                parameter=_flat(slot.parameter, piece.start, piece.numel),
                states=tuple(staged[:states]),
                absmax=tuple(staged[states:]),
                step=step,
            )
        )

    @staticmethod
    def _ranges(slot: Slot, piece: _Piece) -> Iterator[tuple[Tensor, int, int]]:
        for values in slot.states:
            yield values, piece.start, piece.numel
        for values in slot.absmax:
            yield values, piece.start // BLOCK_SIZE, -(-piece.numel // BLOCK_SIZE)

    def check(self, hypers: Sequence[Hyper], capturing: bool) -> None:
        """RuntimeError for a capture: a graph would replay copies of memory that may have been let go. ValueError for
        an unusable learning rate."""
        for group in self._used:
            device_rate(hypers[group], self._key.device)
        if capturing:
            raise RuntimeError(
                "step() in a CUDA graph: the state of some parameters is in host memory, which a graph cannot "
                "capture. Use the class without Paged."
            )

    def begin(self) -> None:
        """Let the first states come in, as far as they were stepped the last time; what comes of the step is open.

        The host may take longer to check gradients than a chunk takes to come in.
        """
        if self._begins:
            self._run.begin(self._begins)

    def run_pointers(self, pointers: int, hypers: Sequence[Hyper], scales: Tensor | None = None) -> None:
        assert scales is None  # no Paged class scales its updates
        given = (ctypes.c_uint64 * len(self._slots)).from_address(pointers)
        if self._split:
            self._run_pieces(given, hypers)
        else:
            self._run(pointers, hypers)
        used = (any(map(given.__getitem__, tensors)) for tensors in self._first)
        self._begins = sum(itertools.takewhile(bool, used))

    def _run_pieces(self, given: Any, hypers: Sequence[Hyper]) -> None:
        self._pointers[:] = array.array("Q", map(given.__getitem__, self._owners))
        for place, index, distance in self._parts:
            if given[index] > 1:
                self._pointers[place] = given[index] + distance
        stepped = [(index, places) for index, places in self._split if given[index]]
        for index, places in stepped:
            for place in places:
                self._counts[place] = self._steps[index][0]
        self._run(self._pointers.buffer_info()[0], hypers)
        for index, _ in stepped:
            self._steps[index][0] += 1.0

    def norms_pointers(self, pointers: int, hypers: Sequence[Hyper]) -> Tensor:
        raise RuntimeError(f"{self._key.rule}: no Paged class needs norms.")
