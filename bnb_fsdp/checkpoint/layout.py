"""How a parameter's 8-bit state is laid out in a state dict: what its scales' shape and names are.

The layout follows from the global parameter and from how its dimensions are cut, never from a rank, and for
parameters that are cut along their outermost dimension alone (FSDP2's default) not from the number of ranks either.
Scales of another layout have another name, so that no loader takes them for its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..codebook import BLOCK_SIZE
from . import blocks

Cut = tuple[int, int]
"""(tensor dimension, number of parts)."""


@dataclass(frozen=True)
class Layout:
    """Names and global shapes of a parameter's scales.

    ``cuts``, in mesh order, are those of dimensions other than the outermost; the first is the outer loop of pieces.
    ``order``: dimensions from the slowest to the fastest in memory; a row is one slice of the first. ``pieces``: equal
    parts, with blocks of their own, that each row is cut into. ``grid``: one scale for each 256 elements along the
    fastest dimension, of the parameter's own shape otherwise, whatever cuts the other dimensions.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    grid: bool
    cuts: tuple[Cut, ...]

    @property
    def pieces(self) -> int:
        """Parts of each row that have blocks of their own."""
        return math.prod(parts for _, parts in self.cuts)

    @property
    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(shape, offset) of the boxes that are the pieces of all rows, in the order of their scales' columns."""
        boxes = [(self.shape, (0,) * len(self.shape))]
        for dim, parts in self.cuts:
            cut = []
            for shape, offset in boxes:
                size = -(-shape[dim] // parts)
                for part in range(parts):
                    start = min(part * size, shape[dim])
                    length = min(size, shape[dim] - start)
                    cut.append(
                        (
                            (*shape[:dim], length, *shape[dim + 1 :]),
                            (*offset[:dim], offset[dim] + start, *offset[dim + 1 :]),
                        )
                    )
            boxes = cut
        return boxes

    @property
    def widths(self) -> list[int]:
        """Elements of each piece of a row."""
        return [math.prod(shape) // max(self.rows, 1) for shape, _ in self.boxes]

    @property
    def outer(self) -> int:
        """The dimension whose slices are rows."""
        return self.order[0] if self.order else 0

    @property
    def rows(self) -> int:
        """Rows of the whole tensor."""
        return self.shape[self.outer] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements of a whole row."""
        return math.prod(size for dim, size in enumerate(self.shape) if dim != self.outer)

    @property
    def count(self) -> int:
        """Scales of one piece of a row."""
        sizes, even = list(self.shape), True
        for dim, parts in self.cuts:  # a dimension may be cut more than once
            even = even and sizes[dim] % parts == 0
            sizes[dim] = -(-sizes[dim] // parts)
        largest = math.prod(size for dim, size in enumerate(sizes) if dim != self.outer)
        # Uneven parts have rows of several lengths: enough for any phase.
        return blocks.columns(largest) if even else 1 + -(-max(largest - 1, 0) // BLOCK_SIZE)

    @property
    def has_phase(self) -> bool:
        """Whether rows come with the place of their first element within a block."""
        return not self.grid and (bool(self.cuts) or blocks.has_phase(self.width))

    @property
    def name(self) -> str:
        """Key of the scales."""
        if self.grid:
            name = "grid"
        else:
            name = "_".join(["rows", *(f"dim{dim}x{parts}" for dim, parts in self.cuts)])
        if self.order != tuple(range(len(self.order))):
            name += "_order" + "".join(f"_{dim}" for dim in self.order)
        return name

    @property
    def phase_name(self) -> str:
        """Key of the phases."""
        return self.name.replace("rows", "phase", 1)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Global shape of the scales."""
        if self.grid:
            last = self.order[-1]
            return tuple(size // BLOCK_SIZE if dim == last else size for dim, size in enumerate(self.shape))
        return (self.rows, self.pieces * self.count)

    @property
    def phase_shape(self) -> tuple[int, int]:
        """Global shape of the phases."""
        return (self.rows, self.pieces)


def layout_of(shape: Sequence[int], order: Sequence[int], cuts: Sequence[Cut]) -> Layout:
    """The layout of a tensor of this global ``shape`` and memory ``order``, cut as ``cuts`` says (in mesh order)."""
    shape, order = tuple(shape), tuple(order)
    inner = [cut for cut in cuts if order and cut[0] != order[0] and cut[1] > 1]
    last = shape[order[-1]] if len(shape) > 1 else 1
    parts = math.prod(parts for dim, parts in inner if dim == order[-1])
    if len(shape) > 1 and last % (BLOCK_SIZE * parts) == 0:
        return Layout(shape, order, True, ())
    # Even parts of one dimension are the same parts however the meshes nest; else the order of the meshes tells which
    # of a row's pieces is which.
    dims = {dim for dim, _ in inner}
    if len(dims) == 1 and shape[min(dims)] % math.prod(parts for _, parts in inner) == 0:
        inner = [(min(dims), math.prod(parts for _, parts in inner))]
    return Layout(shape, order, False, tuple(inner))


def parse(name: str, shape: Sequence[int]) -> Layout:
    """The layout whose scales are called ``name``. Raises ValueError for a name that is none."""
    shape = tuple(shape)
    head, *parts = name.split("_")
    order = tuple(range(len(shape)))
    if "order" in parts:
        at = parts.index("order")
        order = tuple(int(part) for part in parts[at + 1 :])
        parts = parts[:at]
    cuts = []
    for part in parts:
        dim, _, number = part.removeprefix("dim").partition("x")
        cuts.append((int(dim), int(number)))
    layout = Layout(shape, order, head == "grid", tuple(cuts))
    fits = sorted(order) == list(range(len(shape))) and layout.name == name
    if layout.grid:
        fits = fits and len(shape) > 1 and not cuts and shape[order[-1]] % BLOCK_SIZE == 0
    if not fits or any(dim not in order[1:] or parts < 2 for dim, parts in cuts):
        raise ValueError(f"{name!r} is no layout of scales for a tensor of shape {shape}.")
    return layout
