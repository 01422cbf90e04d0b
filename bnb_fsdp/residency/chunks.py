"""State in host memory, cut into chunks that pass through staging buffers of the device one after the other."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends.base import Bucket, BucketKey, ByPointers, Slot, device_rate
from ..codebook import BLOCK_SIZE
from ..rules import Hyper
from .memory import aligned
from .policy import RAMP, room

TILE = 4096
"""Elements: a tensor is cut at multiples of it, as the kernels are, so that no block is cut and alignment is kept."""

SPLIT_BYTES = 1 << 20
"""What is copied in the time that it takes to cut a tensor: its parts need a copy for each of their states and scales,
where a whole tensor and its neighbours need one."""


class Copy(NamedTuple):
    """Bytes that go from ``host`` to ``device`` before the update and back after it; both are addresses."""

    host: int
    device: int
    size: int


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


def _pieces(slots: Sequence[Slot], chunk_bytes: int) -> Iterator[list[_Piece]]:
    """The pieces of each chunk of up to ``chunk_bytes``; see `bnb_fsdp.residency.policy.room`."""
    tile = max((_element_bytes(slot, TILE) for slot in slots), default=0)
    if tile > chunk_bytes >> RAMP:
        raise ValueError(
            f"staging buffers of {chunk_bytes} bytes are too small: {TILE} elements take {tile}."
        )
    remaining = sum(_element_bytes(slot, slot.parameter.numel()) for slot in slots)
    number = 0
    chunk: list[_Piece] = []
    left = space = room(number, remaining, chunk_bytes)
    for index, slot in enumerate(slots):
        total, start = slot.parameter.numel(), 0
        while True:
            count = total - start
            size = _element_bytes(slot, count)
            if size > left and space - left + size > min(space + SPLIT_BYTES, chunk_bytes):
                if 2 * left < space and size <= chunk_bytes:  # rather a smaller chunk than a tensor in two
                    yield chunk
                    chunk, number = [], number + 1
                    left = space = room(number, remaining, chunk_bytes)
                    continue
                count = _fitting(slot, left) if size > space // 4 else 0
                if count < TILE or (chunk and _element_bytes(slot, count) < space // 8):
                    yield chunk
                    chunk, number = [], number + 1
                    left = space = room(number, remaining, chunk_bytes)
                    continue
                size = _element_bytes(slot, count)
            chunk.append(_Piece(index, start, count))
            left -= size
            remaining -= size
            start += count
            if start >= total:
                break
    if chunk:
        yield chunk


def _fitting(slot: Slot, room: int) -> int:
    """The most elements, a multiple of `TILE`, whose states fit into ``room`` bytes."""
    tiles = room // max(1, sum(TILE * state.element_size() for state in slot.states))
    while tiles > 0 and _element_bytes(slot, tiles * TILE) > room:
        tiles -= 1
    return tiles * TILE


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
    ) -> None:
        self._key = key
        self._slots = tuple(slots)
        self._pipeline = pipeline
        self._used = sorted({slot.group for slot in slots})
        pieces: list[_Piece] = []
        chunks: list[Chunk] = []
        parts = list(_pieces(slots, pipeline.chunk_bytes))
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
        self._pieces = pieces
        self._pointers = array.array("Q", bytes(8 * len(pieces)))
        self._run = pipeline.prepare(key, make, chunks)
        self.chunks = len(chunks)
        """How many chunks a step with all gradients moves."""

    def _stage(self, chunk: Chunk, piece: _Piece, step: Tensor) -> None:
        slot = self._slots[piece.slot]
        buffer = self._pipeline.buffers[chunk.buffer]
        offset = 0
        if chunk.copies:
            last = chunk.copies[-1]
            offset = aligned(last.device + last.size - buffer.data_ptr())
        staged: list[Tensor] = []
        whole = piece.numel == slot.parameter.numel()
        for values, start, count in self._ranges(slot, piece):
            host = _flat(values, start, count)
            size = count * host.element_size()
            device = buffer[offset : offset + size].view(host.dtype)
            # Bytes behind a part of a tensor are another piece's, those behind the whole of one are padding.
            padded = whole or (piece.start == 0 and not staged)
            staged.append(device)
            _append(chunk.copies, Copy(host.data_ptr(), device.data_ptr(), size), padded)
            offset += aligned(size)
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
                "capture. Set optimizer.residency = 'device', or use the class without Paged."
            )

    def run_pointers(self, pointers: int, hypers: Sequence[Hyper], scales: Tensor | None = None) -> None:
        assert scales is None  # no Paged class scales its updates
        if not self._split:
            self._run(pointers, hypers)
            return
        given = (ctypes.c_uint64 * len(self._slots)).from_address(pointers)
        size = self._key.gradient_dtype.itemsize
        for index, piece in enumerate(self._pieces):
            first = given[piece.slot]
            self._pointers[index] = first + size * piece.start if first > 1 else first
        stepped = [(index, places) for index, places in self._split if given[index]]
        for index, places in stepped:
            for place in places:
                self._counts[place] = self._steps[index][0]
        self._run(self._pointers.buffer_info()[0], hypers)
        for index, _ in stepped:
            self._steps[index][0] += 1.0

    def norms_pointers(self, pointers: int, hypers: Sequence[Hyper]) -> Tensor:
        raise RuntimeError(f"{self._key.rule}: no Paged class needs norms.")


def _append(copies: list[Copy], new: Copy, padded: bool) -> None:
    """Append ``new``, or make the last copy longer if ``new`` goes on where it ends: behind the padding, if there is
    nothing but ``padded`` between them."""
    if copies:
        last = copies[-1]
        distance = new.host - last.host
        end = aligned(last.size) if padded else last.size
        if distance == new.device - last.device == end:
            copies[-1] = Copy(last.host, last.device, distance + new.size)
            return
    copies.append(new)
