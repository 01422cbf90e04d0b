"""Layouts of scales: shapes, names, and that every rank finds its own scales where it left them.

What DTensor does to a tensor is computed by torch's own function of mesh, coordinate and placements, which needs no
process group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from bnb_fsdp import sharding
from bnb_fsdp.checkpoint import blocks
from bnb_fsdp.checkpoint.layout import Layout, layout_of, parse

Cuts = tuple[tuple[int, int], ...]


def box(shape: tuple[int, ...], cuts: Cuts, coordinate: tuple[int, ...]) -> tuple[slice, ...]:
    """What the rank at ``coordinate`` of a mesh that cuts like this holds of a tensor of this shape."""
    sizes, starts = _compute_local_shape_and_global_offset(
        shape, tuple(parts for _, parts in cuts), list(coordinate), [Shard(dim) for dim, _ in cuts]
    )
    return tuple(slice(start, start + size) for size, start in zip(sizes, starts))


def ranks(cuts: Cuts) -> Iterator[tuple[int, ...]]:
    yield from itertools.product(*(range(parts) for _, parts in cuts))


def elements(shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """A tensor whose elements are numbered, of this memory order."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    back = [order.index(dim) for dim in range(len(shape))]
    return numbers.permute(order).contiguous().permute(back)


def in_memory(shard: Tensor, order: tuple[int, ...]) -> list[int]:
    return shard.permute(order).reshape(-1).tolist()


def scale_dims(layout: Layout, cuts: Cuts) -> Cuts:
    """``cuts`` as they cut the scales."""
    if layout.grid:
        return cuts
    return tuple((int(dim != layout.outer), parts) for dim, parts in cuts)


def touched(
    shape: tuple[int, ...], order: tuple[int, ...], cuts: Cuts
) -> dict[tuple[int, ...], list[list[int]]]:
    """By rank and row of its shard: the blocks (numbers within the shard) that the row touches, by a loop."""
    result = {}
    for rank in ranks(cuts):
        shard = torch.empty(shape, device="meta")[box(shape, cuts, rank)]
        rows = shard.shape[order[0]]
        width = shard.numel() // rows if rows else 0
        result[rank] = [sorted({(row * width + i) // 256 for i in range(width)}) for row in range(rows)]
    return result


def assert_scales_are_found_again(shape: tuple[int, ...], order: tuple[int, ...], cuts: Cuts) -> None:
    """Every rank writes its scales into tensors of the layout's shapes and has them back from there, bit for bit."""
    layout = layout_of(shape, order, cuts)
    scales = torch.full(layout.scales_shape, -1.0)
    phases = torch.full(layout.phase_shape, 7, dtype=torch.uint8)
    own: dict[tuple[int, ...], Tensor] = {}
    for number, rank in enumerate(ranks(cuts)):
        shard = elements(shape, order)[box(shape, cuts, rank)]
        count = -(-shard.numel() // 256)
        own[rank] = 1000.0 * number + 1 + torch.arange(float(count))
        place = box(layout.scales_shape, scale_dims(layout, cuts), rank)
        part = scales[place]
        if layout.grid:
            for block in range(count):  # each is a run along the last dimension
                run = in_memory(shard, order)[block * 256 : block * 256 + 256]
                first = list(torch.unravel_index(torch.tensor(run[0]), shape))
                assert len(run) == 256
                first[order[-1]] = first[order[-1]] // 256
                scales[tuple(first)] = own[rank][block]
            assert sorted(part.flatten().tolist()) == own[rank].tolist()
            continue
        rows = shard.shape[order[0]]
        width = shard.numel() // rows if rows else 0
        assert part.shape == (rows, layout.count)
        part.copy_(blocks.spread(own[rank], rows, width, layout.count))
        if layout.has_phase:
            there = phases[box(layout.phase_shape, scale_dims(layout, cuts), rank)]
            there.copy_(blocks.phases(rows, width, torch.device("cpu"))[:, None])
    assert (scales >= 0).all()
    for rank, mine in own.items():
        place = box(layout.scales_shape, scale_dims(layout, cuts), rank)
        if layout.grid:
            assert scales[place].permute(order).flatten().tolist() == mine.tolist()
            continue
        shard = torch.empty(shape)[box(shape, cuts, rank)]
        rows = shard.shape[order[0]]
        phase = phases[box(layout.phase_shape, scale_dims(layout, cuts), rank)] if layout.has_phase else None
        codes = torch.zeros(shard.numel(), dtype=torch.uint8)
        found, moved = blocks.gather(codes, scales[place], phase, shard.numel() // rows if rows else 0, True)
        assert moved == 0 and torch.equal(found, mine)


SHAPES = [
    (5000,), (1,), (0,), (300, 40), (40, 300), (7, 512), (512, 7), (1, 900), (900, 1), (0, 300), (4, 0), (4, 0, 3),
    (6, 5, 256), (3, 4, 100), (5, 7, 300), (8, 3, 3, 3), (2, 6, 4, 5),
]  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@shapes
def test_the_number_of_ranks_that_share_rows_does_not_show(shape: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(shape))):
        plain = layout_of(shape, order, ())
        for cuts in (((order[0], 3),), ((order[0], 64),), ((order[0], 2), (order[0], 3)), ((order[0], 1),)):
            assert layout_of(shape, order, cuts) == plain
        for cuts in itertools.product(range(len(shape)), repeat=2):
            meshes = [((cuts[0], 1), (cuts[1], 1), (order[0], number)) for number in (1, 8)]
            assert [layout_of(shape, order, mesh) for mesh in meshes] == [plain, plain]


@pytest.mark.parametrize(
    ("shape", "order", "cuts", "name", "scales", "phase"),
    [
        ((5000,), (0,), (), "rows", (5000, 1), True),
        ((), (), (), "rows", (1, 1), True),
        ((300, 40), (0, 1), (), "rows", (300, 2), True),
        ((7, 512), (0, 1), (), "grid", (7, 2), False),
        ((7, 512), (0, 1), ((1, 2),), "grid", (7, 2), False),
        ((7, 512), (0, 1), ((1, 4),), "rows_dim1x4", (7, 4 * 1), True),
        ((7, 512), (1, 0), (), "rows_order_1_0", (512, 2), True),
        ((512, 7), (1, 0), (), "grid_order_1_0", (2, 7), False),
        ((7, 8, 256), (0, 1, 2), ((1, 3),), "grid", (7, 8, 1), False),
        ((7, 64, 4), (0, 1, 2), (), "rows", (7, 1), False),
        ((7, 64, 4), (0, 1, 2), ((1, 2),), "rows_dim1x2", (7, 2 * 1), True),
        ((8, 64, 3, 3), (0, 2, 3, 1), (), "rows_order_0_2_3_1", (8, 576 // 256 + 1), True),
    ],
    ids=str,
)
def test_examples(shape, order, cuts, name, scales, phase) -> None:  # type: ignore[no-untyped-def]
    layout = layout_of(shape, order, cuts)
    assert (layout.name, layout.scales_shape, layout.has_phase) == (name, scales, phase)
    assert parse(name, shape) == layout
    if phase:
        assert layout.phase_name == name.replace("rows", "phase")


@shapes
def test_every_rank_finds_its_scales_again_whatever_cuts_the_rows(shape: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(shape))):
        for cuts in ((), ((order[0], 3),), ((order[0], 2), (order[0], 3)), ((order[0], 16),)):
            assert_scales_are_found_again(shape, order, cuts)


CUT_INSIDE: list[tuple[tuple[int, ...], Cuts]] = [
    ((7, 512), ((1, 2),)),
    ((7, 512), ((0, 3), (1, 4))),
    ((7, 512), ((1, 4), (0, 3))),
    ((40, 300), ((0, 2), (1, 3))),
    ((40, 301), ((1, 3),)),
    ((40, 301), ((1, 3), (0, 3))),
    ((40, 5), ((1, 8),)),
    ((6, 5, 256), ((1, 2), (0, 2))),
    ((6, 5, 256), ((0, 2), (2, 2))),
    ((6, 8, 100), ((1, 2), (1, 2))),
    ((6, 8, 90), ((1, 2), (2, 3))),
    ((6, 8, 90), ((2, 3), (1, 2))),
    ((6, 7, 90), ((2, 4), (1, 2))),
    ((3, 4, 5, 64), ((1, 2), (3, 2), (2, 5))),
]


@pytest.mark.parametrize(("shape", "cuts"), CUT_INSIDE, ids=str)
def test_every_rank_finds_its_scales_again_where_rows_are_cut(shape: tuple[int, ...], cuts: Cuts) -> None:
    for order in itertools.permutations(range(len(shape))):
        if order[0] == 0:
            assert_scales_are_found_again(shape, order, cuts)


NESTED: list[tuple[tuple[int, ...], Cuts]] = [
    ((4, 7, 1000), ((1, 2), (1, 3))),
    ((8, 6, 1000), ((1, 2), (1, 2))),
    ((8, 6, 3000), ((1, 2), (2, 3), (1, 2))),
    ((5, 1001), ((1, 2), (0, 2), (1, 2))),
]


@pytest.mark.parametrize(("shape", "cuts"), NESTED, ids=str)
def test_every_rank_finds_its_scales_again_where_rows_are_cut_unevenly_twice(
    shape: tuple[int, ...], cuts: Cuts
) -> None:
    layout = layout_of(shape, tuple(range(len(shape))), cuts)
    rows = touched(shape, layout.order, cuts)
    assert layout.count >= max(len(row) for rank in rows.values() for row in rank)
    assert_scales_are_found_again(shape, layout.order, cuts)


def meaning(
    shape: tuple[int, ...], order: tuple[int, ...], cuts: Cuts
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Elements, in memory order, whose scales lie at each piece of each row, or at each point of a grid."""
    layout = layout_of(shape, order, cuts)
    result = {}
    numbers = elements(shape, order)
    for rank in ranks(cuts):
        shard = numbers[box(shape, cuts, rank)]
        if layout.grid:
            # Where codes lie is where their scale lies: only what one scale covers can differ.
            runs = in_memory(shard, order)
            for start in range(0, len(runs), 256):
                result[("grid", runs[start])] = tuple(runs[start : start + 256])
            continue
        rows, pieces = box(layout.phase_shape, scale_dims(layout, cuts), rank)
        assert pieces.stop - pieces.start == 1
        for row, number in enumerate(range(rows.start, rows.stop)):
            result[(number, pieces.start)] = tuple(in_memory(shard.select(order[0], row), _without(order)))
    return result


def _without(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order of the remaining dimensions once the outermost is selected."""
    return tuple(dim - (dim > order[0]) for dim in order[1:])


@pytest.mark.parametrize(
    "shape", [(12, 7), (4, 1024), (6, 12, 4), (4, 6, 256), (2, 4, 6, 5), (12, 1), (3, 256, 2)], ids=str
)
def test_layouts_of_one_name_mean_the_same(shape: tuple[int, ...]) -> None:
    single = [(dim, parts) for dim in range(len(shape)) for parts in (2, 3, 4)]
    all_cuts: list[Cuts] = [(), *((cut,) for cut in single), *itertools.product(single, repeat=2)]
    all_cuts += [((1, 2), (0, 2), (1, 2)), ((1, 3), (0, 2), (1, 2)), ((1, 2), (1, 2), (1, 2))]
    known: dict[str, tuple[Cuts, Layout, dict[tuple[int, ...], tuple[int, ...]]]] = {}
    for order in itertools.permutations(range(len(shape))):
        if len(shape) == 4 and order not in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 0, 2, 1)):
            continue
        for cuts in all_cuts:
            layout = layout_of(shape, order, cuts)
            means = meaning(shape, order, cuts)
            first_cuts, first, first_means = known.setdefault(layout.name, (cuts, layout, means))
            assert layout == first and parse(layout.name, shape) == layout
            assert means == first_means, f"{layout.name} of {shape} has two meanings: {first_cuts} and {cuts}"
            assert layout.phase_name != layout.name or layout.grid
    assert len(known) > 2


@pytest.mark.parametrize(
    "name",
    [
        "", "row", "rows_", "Rows", "rows ", "phase", "grid_dim1x2", "rows_dim1", "rows_dimx2", "rows_1x2",
        "rows_dim01x2", "rows_dim1x2_", "rows_order", "rows_order_0_1", "rows_order_1", "rows_order_1_1",
        "rows_order_1_2", "rows_order_1_0_order_0_1", "rows_order_1_0_dim1x2", "order_1_0", "absmax",
        "rows_dim1x2.0",
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        parse(name, (6, 300))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("rows_dim7x2", (6, 300)),
        ("rows_dim0x2", (6, 300)),
        ("rows_dim1x0", (6, 300)),
        ("rows_dim1x-2", (6, 300)),
        ("grid", (6, 300)),
        ("grid", (512,)),
        ("grid", ()),
        ("grid_order_1_0", (6, 512)),
    ],
    ids=str,
)
def test_a_name_that_this_shape_cannot_have_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        parse(name, shape)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.empty(()), ()),
        (torch.empty(5), (0,)),
        (torch.empty(5, 6), (0, 1)),
        (torch.empty(6, 5).t(), (1, 0)),
        (torch.empty(4, 3, 5, 6).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.empty(2, 3, 4).permute(1, 2, 0), (2, 0, 1)),
        (torch.empty(5, 0).t(), (0, 1)),
        (torch.empty(1, 1).t(), (0, 1)),
        (torch.empty(8, 16, 1, 1).to(memory_format=torch.channels_last), (0, 1, 2, 3)),
        (torch.empty(8, 1, 3, 3).to(memory_format=torch.channels_last), (0, 1, 2, 3)),
    ],
    ids=lambda value: str(tuple(value.stride())) if isinstance(value, Tensor) else None,
)
def test_the_memory_order_of_a_plain_tensor(tensor: Tensor, order: tuple[int, ...]) -> None:
    assert sharding.memory_order(nn.Parameter(tensor)) == order
    assert in_memory(elements(tuple(tensor.shape), order), order) == list(
        elements(tuple(tensor.shape), order).as_strided((tensor.numel(),), (1,)).tolist()
    )


def test_dimensions_of_one_element_do_not_count() -> None:
    """Cutting the outermost real dimension cuts between rows, and strides that mean nothing change no name."""
    weight = torch.empty(8, 70, 1, 3).to(memory_format=torch.channels_last)
    assert sharding.memory_order(weight)[0] == 0
    plain = layout_of(weight.shape, sharding.memory_order(weight), ())
    assert layout_of(weight.shape, sharding.memory_order(weight), ((0, 4),)) == plain
    orders = {sharding.memory_order(torch.empty(24).as_strided((4, 1, 6), (1, x, 4))) for x in (1, 4, 24, 99)}
    assert len(orders) == 1
