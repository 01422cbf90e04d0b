"""How much state stays on the device, and how large the chunks are that the rest is moved in."""

from __future__ import annotations

from typing import Any, Protocol

POLICIES = ("auto", "device", "host")

Policy = str | int
"""One of `POLICIES`, or the bytes of device memory that state may take."""

BUFFERS = 3
"""Staging buffers: one comes in, one is updated, one goes out. Four were not faster (docs/paged.md)."""

CHUNK_SIZES = tuple(1 << shift for shift in range(20, 26))
"""Bytes, 1 to 32 MiB."""

HOST_SECONDS = 25e-6
"""What queueing a chunk costs the host on an H200's: its copies, events and launch (docs/paged.md)."""

RAMP = 3
"""The first chunk is this many halvings smaller than a buffer, and so, about, is the last."""

RESERVE_SHARE = 0.05
RESERVE_BYTES = 1 << 30


class Speed(Protocol):
    """Measured: see `bnb_fsdp.backends.cuda_pipeline.Bandwidth`."""

    @property
    def one_way(self) -> float: ...
    @property
    def two_way(self) -> float: ...
    @property
    def chunk_seconds(self) -> float: ...


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


def room(number: int, left: int, chunk: int) -> int:
    """Bytes for the chunk of this number (from 0) when ``left`` bytes remain, of a buffer of ``chunk``.

    The first chunk comes in, and the last goes out, with nothing beside it: so chunks start small and double, and near
    the end each takes half of what remains.
    """
    smallest = chunk >> RAMP
    return max(smallest, min(chunk, chunk >> max(0, RAMP - number), left // 2))


def predicted(size: int, chunk: int, speed: Speed) -> float:
    """Seconds to move ``size`` bytes in and out by chunks of up to ``chunk``: both directions are busy all the time but
    for the first and the last, or else the host is.
    """
    count = size / chunk + 2 * RAMP  # chunks, about
    moving = 2 * size / speed.two_way + count * speed.chunk_seconds
    return 2 * (chunk >> RAMP) / speed.one_way + max(moving, count * HOST_SECONDS)


def chunk_size(size: int, speed: Speed, limit: int | None = None) -> int:
    """The chunk size that moves ``size`` bytes fastest, with staging buffers of at most ``limit`` bytes together."""
    sizes = [c for c in CHUNK_SIZES if limit is None or BUFFERS * c <= limit] or list(CHUNK_SIZES[:1])
    return min(sizes, key=lambda chunk: (predicted(size, chunk, speed), chunk))
