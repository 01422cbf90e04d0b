"""How much state stays on the device, and how large the chunks are that the rest is moved in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

POLICIES = ("auto", "device", "host")

Policy = str | int
"""One of `POLICIES`, or the bytes of device memory that state may take."""

BUFFERS = 3
"""Staging buffers: one comes in, one is updated, one goes out. On a quiet host four were not faster, with chunks of
the size that is taken (docs/paged.md)."""

CHUNK_SIZES = tuple(mib << 20 for mib in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
"""Bytes."""

HOST_SECONDS = 20e-6
"""What queueing a chunk costs the host on an H200's: its copies, events and launch (docs/paged.md)."""

RESERVE_SHARE = 0.05
RESERVE_BYTES = 1 << 30


class Speed(Protocol):
    """Measured: see `bnb_fsdp.backends.cuda_pipeline.Bandwidth`."""

    @property
    def two_way(self) -> float: ...
    @property
    def chunk_seconds(self) -> float: ...
    @property
    def copy_seconds(self) -> float: ...


class _Granted(NamedTuple):
    two_way: float
    chunk_seconds: float
    copy_seconds: float


GRANTED: Speed = _Granted(two_way=50e9, chunk_seconds=10e-6, copy_seconds=2e-6)
"""Where it cannot be measured: PCIe 4 with 16 lanes, a guess."""


def check_policy(owner: str, policy: Any) -> Policy:
    """``policy``; ValueError with the choices if it is none."""
    if isinstance(policy, str) and policy in POLICIES:
        return policy
    if isinstance(policy, int) and not isinstance(policy, bool) and policy >= 0:
        return policy
    choices = ", ".join(map(repr, POLICIES))
    raise ValueError(
        f"{owner}: residency={policy!r}; choose one of {choices}, or a number of bytes of device memory that the "
        "state may take, such as 2 * 1024**3."
    )


def check_reserve(owner: str, reserve: Any) -> int | None:
    """``reserve``; ValueError if it is no number of bytes."""
    if reserve is None or (isinstance(reserve, int) and not isinstance(reserve, bool) and reserve >= 0):
        return reserve
    raise ValueError(
        f"{owner}: residency_reserve={reserve!r}; give the bytes of device memory that residency='auto' leaves free, "
        "or None for the larger of 1 GiB and 5 % of the device."
    )


def reserve_of(reserve: int | None, total: int) -> int:
    """Bytes that "auto" leaves free on a device of ``total`` bytes."""
    return max(RESERVE_BYTES, int(RESERVE_SHARE * total)) if reserve is None else reserve


def device_bytes(size: int) -> int:
    """Bytes of the device that a tensor of ``size`` bytes takes at most, by the count of torch's caching allocator with
    an empty cache and its default settings.

    It rounds up to 512, cuts tensors below 10 MiB from segments of 20 and larger ones from multiples of 2, and gives
    the rest of a segment away with the last of them if it is no more than 1 MiB.
    """
    mib = 1 << 20
    rounded = -(-size // 512) * 512
    if rounded <= mib:
        return rounded
    if rounded < 10 * mib:
        return rounded + rounded // 19
    segment = -(-rounded // (2 * mib)) * 2 * mib
    return segment if segment - rounded <= mib else rounded


def table_bytes(elements: Sequence[int], size: int, chunk: int, groups: int) -> int:
    """Bytes of the kernels' tables at most, for tensors of so many ``elements`` and ``size`` bytes of state, in chunks
    that fill a quarter of ``chunk`` at least, with the hyperparameters of ``groups`` each: the layout of
    csrc/cuda/api.cpp. The maps of 8 bits come on top, once a process.
    """
    chunks = 2 + 4 * size // chunk
    parts = len(elements) + chunks
    return 128 * parts + sum(-(-n // 4096) for n in elements) * 4 + (2048 + 64 * groups) * chunks


def seconds(chunks: Iterable[tuple[int, int]], speed: Speed) -> float:
    """Seconds to move chunks, each of (bytes, copies each way), in and out one after the other.

    A chunk comes in when the one before has, its buffer is free and the host has queued it, and goes out when it is
    there and the one before has gone. So the way out is behind the way in by the largest chunk, however small the first
    and the last are, and unlike chunks keep each other waiting.
    """
    came = queued = 0.0
    gone = [0.0] * BUFFERS  # the last chunks
    for size, copies in chunks:
        moving = 2 * size / speed.two_way + speed.chunk_seconds + (copies - 1) * speed.copy_seconds
        queued += HOST_SECONDS
        came = max(came, queued, gone[0]) + moving
        gone = [*gone[1:], max(gone[-1], came) + moving]
    return gone[-1]


def predicted(size: int, chunk: int, speed: Speed) -> float:
    """Seconds to move ``size`` bytes in and out by equal chunks of up to ``chunk``, two copies each."""
    count = max(1, -(-size // chunk))
    few = min(count, 64)
    start = seconds([(size // count, 2)] * few, speed)
    return start if few == count else start * count / few


def chunk_size(size: int, speed: Speed, limit: int | None = None) -> int:
    """Bytes of each staging buffer for ``size`` bytes of state; all of them take at most ``limit`` bytes.

    One size more than moves equal chunks fastest: whole tensors do not come in that size, and what is cut in the end is
    what suits them (`bnb_fsdp.residency.chunks`).
    """
    sizes = [c for c in CHUNK_SIZES if limit is None or BUFFERS * c <= limit] or list(CHUNK_SIZES[:1])
    fastest = min(sizes, key=lambda chunk: (predicted(size, chunk, speed), chunk))
    return min((c for c in sizes if c > fastest), default=fastest)
