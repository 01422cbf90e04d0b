"""Blocks of a shard from scales in any layout: for cuts that changed, which rows alone cannot express."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import state
from ..codebook import BLOCK_SIZE
from . import blocks
from .layout import Layout

_CHUNK_BLOCKS = 1 << 12


def scales_at(
    layout: Layout, coordinates: Sequence[Tensor], scales: Tensor, phase: Tensor | None, first_row: int
) -> Tensor:
    """Scale (float32) of the elements at global ``coordinates`` (int64, one tensor a dimension).

    ``scales`` and ``phase`` hold the rows of ``layout`` from ``first_row`` on (for a grid: slices of the outermost
    dimension), and all of every other dimension.
    """
    if layout.grid:
        last = layout.order[-1]
        index = [value // BLOCK_SIZE if dim == last else value for dim, value in enumerate(coordinates)]
        index[layout.outer] = index[layout.outer] - first_row
        return scales[tuple(index)]
    row = (coordinates[layout.outer] if layout.shape else torch.zeros((), dtype=torch.int64)) - first_row
    piece: Tensor | int = 0
    parts = dict(layout.cuts)
    if len(parts) < len(layout.cuts):
        raise ValueError(
            f"{layout.name}: a dimension that was cut twice into uneven parts cannot be taken apart."
        )
    chunk = {dim: -(-layout.shape[dim] // count) for dim, count in layout.cuts}
    for dim, count in layout.cuts:
        piece = piece * count + coordinates[dim] // chunk[dim]
    place: Tensor | int = 0
    for dim in layout.order[1:]:
        if dim in chunk:
            at = coordinates[dim] % chunk[dim]
            # The last of uneven parts is narrower, and so are its rows.
            size: Tensor | int = (layout.shape[dim] - coordinates[dim] // chunk[dim] * chunk[dim]).clamp_max(
                chunk[dim]
            )
        else:
            at, size = coordinates[dim], layout.shape[dim]
        place = place * size + at
    if phase is not None:
        place = place + phase[row, piece].long()
    return scales[row, piece * layout.count + place // BLOCK_SIZE]


def regrid(
    codes: Tensor,
    shape: Sequence[int],
    offset: Sequence[int],
    order: Sequence[int],
    stored: Layout,
    scales: Tensor,
    phase: Tensor | None,
    first_row: int,
    signed: bool,
) -> Tensor:
    """Requantise all blocks of a shard in place; returns their scales (float32, ``(ceil(n / 256),)``).

    ``codes`` (uint8, ``(n,)``) are the box of ``shape`` at ``offset``, in memory ``order``; ``stored`` and what follows
    say what they mean: see `scales_at`. Temporary memory does not grow with the shard.
    """
    absmax = torch.zeros(state.blocks(codes.numel()), dtype=torch.float32, device=codes.device)
    for start in range(0, len(absmax), _CHUNK_BLOCKS):
        some = torch.arange(start, min(len(absmax), start + _CHUNK_BLOCKS), device=codes.device)
        flat = some[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=codes.device)
        inside = flat < codes.numel()
        at = flat.clamp_max(codes.numel() - 1)
        coordinates: list[Tensor] = [at] * len(shape)
        stride = math.prod(shape)
        for dim in order:
            stride //= max(shape[dim], 1)
            coordinates[dim] = at // stride % shape[dim] + offset[dim]
        old_scales = scales_at(stored, coordinates, scales, phase, first_row)
        new, absmax[some] = blocks.requantize(codes[at], old_scales, inside, signed)
        codes[flat[inside]] = new[inside]
    return absmax
