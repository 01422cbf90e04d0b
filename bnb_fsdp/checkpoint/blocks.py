"""Scales of blocks, given by row, and what becomes of blocks whose grid moves.

A local shard is ``rows`` slices of ``width`` consecutive elements; blocks of 256 run through it without regard to
rows. So that rows can go to other ranks, each carries the scales of all blocks it touches and its ``phase``: the place
of its first element within a block. A rank that receives rows with the phases its own grid has takes codes and scales
as they are; other blocks are dequantised in float32 and requantised.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import codebook
from ..codebook import BLOCK_SIZE
from ..state import blocks

_CHUNK_ROWS = 1 << 20
_CHUNK_BLOCKS = 1 << 12


def columns(width: int) -> int:
    """Most blocks that a row of ``width`` elements can touch, whichever row of a shard it is."""
    if width == 0:
        return 0
    step = math.gcd(width, BLOCK_SIZE)  # phases are multiples of it
    return -(-(BLOCK_SIZE - step + width) // BLOCK_SIZE)


def has_phase(width: int) -> bool:
    """Whether rows of ``width`` elements can start within a block."""
    return width % BLOCK_SIZE != 0


def phases(rows: int, width: int, device: torch.device) -> Tensor:
    """Phase (uint8, ``(rows,)``) of each row of a shard."""
    return (torch.arange(rows, device=device) * width % BLOCK_SIZE).to(torch.uint8)


def _touched(phase: Tensor, width: int, count: int) -> Tensor:
    """bool ``(rows, count)``: which of ``count`` scales a row that starts at ``phase`` (int64) has."""
    last = (phase + (width + BLOCK_SIZE - 1)) // BLOCK_SIZE
    return torch.arange(count, device=phase.device) < last[:, None]


def spread(absmax: Tensor, rows: int, width: int, count: int) -> Tensor:
    """Scales (float32, ``(rows, count)``) by row, from those of the shard's blocks; zero beyond what a row touches.

    A view where every row starts a block.
    """
    if not has_phase(width) and count == width // BLOCK_SIZE:
        return absmax.view(rows, count)
    result = absmax.new_zeros(rows, count)
    for start in range(0, rows if absmax.numel() else 0, _CHUNK_ROWS):
        first = torch.arange(start, min(rows, start + _CHUNK_ROWS), device=absmax.device) * width
        index = first[:, None] // BLOCK_SIZE + torch.arange(count, device=absmax.device)
        values = absmax[index.clamp_max(absmax.numel() - 1)]
        mine = _touched(first % BLOCK_SIZE, width, count)
        result[start : start + len(first)] = torch.where(mine, values, 0)
    return result


def scales_of(flat: Tensor, by_row: Tensor, phase: Tensor | None, width: int, pieces: int = 1) -> Tensor:
    """Scale (float32) of each element of a shard, given its ``flat`` index (int64).

    ``by_row``: ``(rows, pieces * K)``, ``phase``: ``(rows, pieces)`` or None if all are zero. ``pieces`` are the equal
    parts, each with blocks of its own, that a row was cut into when it was saved.
    """
    row, column = flat // width, flat % width
    part = -(-width // pieces)
    piece, place = column // part, column % part
    if phase is not None:
        place = place + phase[row, piece].long()
    return by_row[row, piece * (by_row.shape[1] // pieces) + place // BLOCK_SIZE]


def gather(
    codes: Tensor,
    by_row: Tensor,
    phase: Tensor | None,
    width: int,
    signed: bool,
    pieces: int = 1,
) -> tuple[Tensor, int]:
    """Scales of a shard's own blocks (float32, ``(ceil(n / 256),)``), and how many had to be requantised.

    ``codes`` (uint8, ``(n,)``, rows of ``width`` elements) are changed in place where the grid of ``by_row`` and
    ``phase`` (see `scales_of`) is not the shard's own; all else is kept bit for bit.
    """
    count = blocks(codes.numel())
    if count == 0:
        return by_row.new_zeros(0), 0
    rows = codes.numel() // width
    if pieces == 1 and phase is None and by_row.shape[1] * BLOCK_SIZE == width:
        return by_row.reshape(-1).clone(), 0
    if pieces == 1:
        absmax, moved = _kept(by_row, phase, rows, width, count)
    else:
        absmax, moved = by_row.new_zeros(count), torch.ones(count, dtype=torch.bool, device=codes.device)
    numbers = moved.nonzero()[:, 0]
    for some in torch.split(numbers, _CHUNK_BLOCKS):
        flat = some[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=codes.device)
        inside = flat < codes.numel()
        at = flat.clamp_max(codes.numel() - 1)
        old = codes[at]
        new, absmax[some] = requantize(old, scales_of(at, by_row, phase, width, pieces), inside, signed)
        codes[flat[inside]] = new[inside]
    return absmax, len(numbers)


def _kept(by_row: Tensor, phase: Tensor | None, rows: int, width: int, count: int) -> tuple[Tensor, Tensor]:
    """Scales of the shard's blocks whose rows all have the shard's own phases, and which blocks (bool) are others."""
    absmax = by_row.new_zeros(count)
    moved = torch.zeros(count, dtype=torch.bool, device=by_row.device)
    same = by_row.new_zeros(count, dtype=torch.int32)  # bits, so that a NaN equals itself
    for compare in (False, True):  # all scales are in place before any is compared
        for start in range(0, rows, _CHUNK_ROWS):
            stop = min(rows, start + _CHUNK_ROWS)
            first = torch.arange(start, stop, device=by_row.device) * width
            own = first % BLOCK_SIZE
            given = torch.zeros_like(own) if phase is None else phase[start:stop, 0].long()
            index = first[:, None] // BLOCK_SIZE + torch.arange(by_row.shape[1], device=by_row.device)
            stays = (own == given)[:, None] & _touched(own, width, by_row.shape[1])
            bits = by_row[start:stop].contiguous().view(torch.int32)
            if not compare:
                same[index[stays]] = bits[stays]
                continue
            at = index[stays]
            moved[at[same[at] != bits[stays]]] = True
            leaves = (own != given)[:, None] & _touched(own, width, columns(width))
            index = first[:, None] // BLOCK_SIZE + torch.arange(leaves.shape[1], device=by_row.device)
            moved[index[leaves]] = True
    absmax.copy_(same.view(torch.float32))
    return absmax, moved


def requantize(codes: Tensor, scales: Tensor, inside: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales (float32, ``(blocks,)``) of blocks of 256 ``codes`` whose elements have a scale each.

    The new scale is the least at which every value lies within the codebook: not the largest magnitude, since the
    signed map ends at -0.993, and a block led by a negative value would lose 0.7 % a time. ``inside`` (bool) are the
    elements that exist. A block that had one scale and its leading code keeps both, bit for bit.
    """
    table = codebook.values(signed, codes.device)
    values = (
        torch.where(inside, table[codes.long()] * scales, 0.0) + 0.0
    )  # no negative zero, whose code is not 0
    # By a tensor: torch's CUDA kernels multiply by the inverse of a number, and checkpoints would depend on the device.
    bound = torch.where(values < 0, values / table[:1], values) if signed else values
    leads = (codes == 255) | (codes == 0) if signed else codes == 255
    # The leading code's value is its scale times the end of the map: the division would round.
    bound = torch.where(leads & inside & (values != 0), scales, bound)
    absmax = torch.where(bound.isnan(), 0.0, bound).amax(dim=1)
    # Divided, not multiplied by the inverse, which overflows for scales below 2.9e-39.
    return codebook.encode(values, values / absmax[:, None], signed), absmax


def in_rows(flat: Tensor) -> Tensor:
    """``flat`` as rows of one block each, zeros behind its end."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)


def regridded(codes: Tensor, scales: Tensor, signed: bool) -> tuple[Tensor, int]:
    """Scales of the blocks of consecutive flat ``codes``, which have a scale each, and how many of the blocks had more
    than one: those are requantised in place. Takes some ten times the memory of ``codes``."""
    inside = in_rows(torch.ones(codes.numel(), dtype=torch.bool, device=codes.device))
    given = in_rows(scales)
    bits = given.view(torch.int32)  # so that a NaN equals itself
    mixed = ((bits != bits[:, :1]) & inside).any(1)
    absmax = given[:, 0].clone()
    if mixed.any():
        old = in_rows(codes).clone()  # without padding it is a view
        old[mixed], absmax[mixed] = requantize(old[mixed], given[mixed], inside[mixed], signed)
        codes.copy_(old.reshape(-1)[: codes.numel()])
    return absmax, int(mixed.sum())


def dequantize(
    codes: Tensor, by_row: Tensor, phase: Tensor | None, width: int, signed: bool, pieces: int = 1
) -> Tensor:
    """Values (float32, ``(n,)``) of a shard's codes, given the scales by row: see `scales_of`."""
    result = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    table = codebook.values(signed, codes.device)
    chunk = _CHUNK_BLOCKS * BLOCK_SIZE
    for start in range(0, codes.numel(), chunk):
        flat = torch.arange(start, min(codes.numel(), start + chunk), device=codes.device)
        part = codes[start : start + chunk]
        scales = scales_of(flat, by_row, phase, width, pieces)
        result[start : start + chunk] = table.index_select(0, part.int()) * scales
    return result
