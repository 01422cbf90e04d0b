"""Page-locked host memory in bounded pieces, given back when nothing holds it any more."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import release_with

ALIGNMENT = 256
"""Bytes: every tensor in host memory and in a staging buffer starts at a multiple of it."""

ARENA_BYTES = 64 << 20
"""Small tensors share page-locked pieces of up to this size; a larger one has a piece of its own."""


class HostMemoryError(RuntimeError):
    """Host memory could not be had, or not be page-locked."""


class Locker(NamedTuple):
    """How a range of memory (address, bytes) is page-locked for a device and made ordinary again."""

    lock: Callable[[int, int], None]
    unlock: Callable[[int], None]


def aligned(size: int) -> int:
    """``size`` rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Zeroed page-locked memory of ``size`` bytes, ``memory`` (uint8), as long as this object lives.

    The pages are shared with forked processes: copied on write, a child's copy would double them. Tensors cut from
    ``memory`` stay valid after the arena is gone, in ordinary memory.

    Raises HostMemoryError with the size if the memory is refused.
    """

    def __init__(self, size: int, locker: Locker) -> None:
        try:
            # A page that nothing uses lies behind, as no copy may go on from one arena to another.
            pages = mmap.mmap(-1, size + mmap.PAGESIZE)
        except (OSError, OverflowError, MemoryError) as error:
            raise HostMemoryError(f"{size:,} bytes of host memory were refused: {error}") from error
        self._pages = pages
        self.memory = torch.frombuffer(pages, dtype=torch.uint8, count=size)
        address = self.memory.data_ptr()
        try:
            locker.lock(address, size)
        except RuntimeError as error:
            raise HostMemoryError(
                f"{size:,} bytes of host memory could not be page-locked: {error}"
            ) from error
        release_with(self, locker.unlock, address)
        self._end = 0

    @property
    def left(self) -> int:
        """Bytes not handed out yet."""
        return len(self.memory) - self._end

    def cut(self, like: Tensor) -> Tensor:
        """A zeroed tensor with the shape, strides and dtype of the dense tensor ``like``, which has elements.

        Its storage is its own part of the pages: pickled or saved it takes no more than its own bytes. ValueError if no
        room is left for it.
        """
        if like.nbytes > self.left:
            raise ValueError(f"{like.nbytes:,} bytes in an arena with {self.left:,} left.")
        part = torch.frombuffer(self._pages, dtype=like.dtype, count=like.numel(), offset=self._end)
        self._end += aligned(part.nbytes)
        return part.as_strided(like.shape, like.stride())


def arenas(wanted: Sequence[int], locker: Locker) -> Iterable[tuple[Arena, int]]:
    """Arenas for things of ``wanted`` bytes in their order: (arena, how many of the things it is for), one at a time.

    Raises HostMemoryError, with what is still needed, when one is refused.
    """
    first = 0
    while first < len(wanted):
        count, size = 1, wanted[first]
        while first + count < len(wanted) and size + wanted[first + count] <= ARENA_BYTES:
            size += wanted[first + count]
            count += 1
        try:
            arena = Arena(size, locker)
        except HostMemoryError as error:
            left = sum(wanted[first:])
            raise HostMemoryError(
                f"{error} ({left:,} of {sum(wanted):,} bytes of optimizer state were still to be placed)."
            ) from error
        yield arena, count
        first += count
