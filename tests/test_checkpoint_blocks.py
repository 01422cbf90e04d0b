"""Scales by row, and blocks whose grid moves: against loops over rows, blocks and elements in numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bnb_fsdp.checkpoint import blocks

functional = pytest.importorskip("bitsandbytes.functional")

WIDTHS = (1, 2, 3, 7, 16, 90, 128, 255, 256, 257, 300, 512, 576, 896, 1600)
MAPS = {signed: functional.create_dynamic_map(signed).to(torch.float32).numpy() for signed in (True, False)}
FLT_MAX = float(np.finfo(np.float32).max)
TINY = 1.5e-45  # one unit of the smallest subnormals, and a bit

every_width = pytest.mark.parametrize("width", WIDTHS)
both_maps = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def row_count(width: int) -> int:
    return max(9, min(700, 6000 // width))


def random_parts(rng: np.random.Generator, rows: int, ranks: int) -> list[int]:
    """Sizes, some zero, of ``ranks`` runs of rows that make up ``rows``."""
    edges = [0, *sorted(rng.integers(0, rows + 1, ranks - 1)), rows]
    return [int(stop - start) for start, stop in itertools.pairwise(edges)]


class Saved:
    """Rows as ranks that held ``parts`` rows each saved them, and each element's place in its block and scale."""

    def __init__(self, parts: list[int], width: int, signed: bool, rng: np.random.Generator) -> None:
        self.parts, self.width, self.signed = parts, width, signed
        total = sum(parts) * width
        self.codes = rng.integers(0, 256, total).astype(np.uint8)
        self.place = np.concatenate([np.arange(rows * width) % 256 for rows in parts])
        self.block = np.empty(total, dtype=np.int64)  # number of each element's block, counted over all ranks
        start = count = 0
        for rows in parts:
            here = rows * width
            self.block[start : start + here] = count + np.arange(here) // 256
            start, count = start + here, count + math.ceil(here / 256)
        self.absmax = (10.0 ** rng.uniform(-9, 3, count)).astype(np.float32)
        for number in range(count):  # the quantiser gives one element of a block a code that means its scale
            inside = np.flatnonzero(self.block == number)
            self.codes[rng.choice(inside)] = rng.choice([0, 255]) if signed else 255

    def scales(self) -> np.ndarray:
        return self.absmax[self.block]

    def values(self) -> np.ndarray:
        with np.errstate(all="ignore"):  # some tests have scales of Inf and NaN
            return MAPS[self.signed][self.codes] * self.scales()

    def by_row(self, count: int | None = None) -> torch.Tensor:
        count = blocks.columns(self.width) if count is None else count
        result = np.zeros((sum(self.parts), count), dtype=np.float32)
        for row in range(len(result)):
            mine = self.block[row * self.width : (row + 1) * self.width]
            for column, number in enumerate(range(mine[0], mine[-1] + 1)):
                result[row, column] = self.absmax[number]
        return torch.from_numpy(result)

    def phase(self) -> torch.Tensor | None:
        first = self.place[:: self.width].astype(np.uint8)
        return torch.from_numpy(first)[:, None] if self.width % 256 else None


def loaded(saved: Saved, parts: list[int]) -> Iterator[tuple[slice, np.ndarray, np.ndarray, int]]:
    """(its elements, codes, scales, requantised blocks) of each rank, when ranks hold ``parts`` rows each."""
    by_row, phase, start = saved.by_row(), saved.phase(), 0
    for rows in parts:
        mine = slice(start * saved.width, (start + rows) * saved.width)
        codes = torch.from_numpy(saved.codes[mine].copy())
        mine_phase = None if phase is None else phase[start : start + rows]
        absmax, moved = blocks.gather(
            codes, by_row[start : start + rows], mine_phase, saved.width, saved.signed
        )
        yield mine, codes.numpy(), absmax.numpy(), moved
        start += rows


def check_rank(saved: Saved, mine: slice, codes: np.ndarray, absmax: np.ndarray, pieces: bool = False) -> int:
    """Go through a rank's blocks; the number of those that did not lie as they do here."""
    place, scales, old = saved.place[mine], saved.scales()[mine], saved.codes[mine]
    values, table = saved.values()[mine].astype(np.float64), MAPS[saved.signed].astype(np.float64)
    assert codes.dtype == np.uint8 and absmax.dtype == np.float32
    assert absmax.shape == (math.ceil(len(codes) / 256),)
    moved = 0
    for block in range(len(absmax)):
        run = slice(block * 256, min((block + 1) * 256, len(codes)))
        stays = (place[run] == np.arange(run.stop - run.start)).all() and len(
            set(scales[run].view(np.uint32))
        ) == 1
        if stays and not pieces:
            assert (codes[run] == old[run]).all()
            assert absmax[block].tobytes() == scales[run.start].tobytes()
            continue
        moved += 1
        reach = (
            np.where(values[run] < 0, values[run] / table[0], values[run]) if saved.signed else values[run]
        )
        # Exactly a scale that it had if the element with that scale leads; the rounding of a quotient otherwise.
        leading = (old[run] == 255) | (saved.signed & (old[run] == 0))
        exact = max(scales[run][leading].tolist(), default=0.0)
        if exact >= reach[~leading].max(initial=0.0) * (1 + 1e-6) + TINY:
            assert absmax[block] == exact
        assert abs(absmax[block] - reach.max()) <= 1e-6 * reach.max() + TINY
        # No other code of the same sign is nearer (a negative zero, too, gets the negative code next to zero).
        new = table[codes[run]] * float(absmax[block])
        choices = np.abs(table[:, None] * float(absmax[block]) - values[run])
        choices[np.signbit(table)[:, None] != np.signbit(values[run])] = np.inf
        error = np.abs(new - values[run])
        slack = 2e-6 * np.abs(values[run]) + TINY
        assert (error <= choices.min(axis=0) + slack).all()
        assert (error <= np.diff(table).max() / 2 * absmax[block] + slack).all()
    return moved


@pytest.mark.parametrize("width", [0, *WIDTHS, 4, 64, 192, 254, 384, 1000])
def test_columns_are_the_most_blocks_that_any_row_touches(width: int) -> None:
    touched = [((row * width) % 256 + width + 255) // 256 if width else 0 for row in range(256)]
    assert blocks.columns(width) == max(touched)
    assert blocks.has_phase(width) == any(row * width % 256 for row in range(256))


@every_width
@pytest.mark.parametrize("rows", [0, 1, 2, 257])
def test_phases_are_places_of_first_elements(width: int, rows: int) -> None:
    phases = blocks.phases(rows, width, torch.device("cpu"))
    assert phases.dtype == torch.uint8 and phases.shape == (rows,)
    assert phases.tolist() == [row * width % 256 for row in range(rows)]


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@every_width
def test_scales_are_spread_to_the_rows_that_touch_them(
    width: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_CHUNK_ROWS", chunk)
    for rows in (0, 1, 2, 19):
        for more in (0, 2):
            saved = Saved([rows], width, True, np.random.default_rng(rows))
            count = blocks.columns(width) + more
            spread = blocks.spread(torch.from_numpy(saved.absmax), rows, width, count)
            assert spread.dtype == torch.float32
            assert torch.equal(spread, saved.by_row(count))


def test_scales_of_rows_that_start_blocks_are_a_view() -> None:
    absmax = torch.arange(12.0)
    assert blocks.spread(absmax, 4, 768, 3).data_ptr() == absmax.data_ptr()


@both_maps
@every_width
def test_rows_from_any_ranks_go_to_any_others(width: int, signed: bool) -> None:
    rng = np.random.default_rng(width)
    rows = row_count(width)
    numbers = []
    for old, new in ((1, 3), (3, 1), (4, 5), (5, 4), (2, 2)):
        saved = Saved(random_parts(rng, rows, old), width, signed, rng)
        for mine, codes, absmax, moved in loaded(saved, random_parts(rng, rows, new)):
            assert moved == check_rank(saved, mine, codes, absmax)
            numbers.append(moved)
    assert (sum(numbers) == 0) == (width % 256 == 0)


@both_maps
@every_width
def test_rows_that_return_to_the_same_ranks_are_the_same_bits(width: int, signed: bool) -> None:
    rng = np.random.default_rng(width)
    for ranks in (1, 2, 4):
        parts = random_parts(rng, row_count(width), ranks)
        saved = Saved(parts, width, signed, rng)
        odd = [math.nan, math.inf, -FLT_MAX, 0.0, -0.0, 1e-45, 1e-39]
        some = rng.choice(len(saved.absmax), min(len(odd), len(saved.absmax)), replace=False)
        saved.absmax[some] = odd[: len(some)]
        total = 0
        for mine, codes, absmax, moved in loaded(saved, parts):
            assert moved == 0 and (codes == saved.codes[mine]).all()
            assert absmax.tobytes() == saved.absmax[total : total + len(absmax)].tobytes()
            total += len(absmax)
        assert total == len(saved.absmax)


def test_scales_are_a_copy() -> None:
    for width in (256, 300):
        saved = Saved([8], width, True, np.random.default_rng(0))
        by_row = saved.by_row()
        absmax, _ = blocks.gather(torch.from_numpy(saved.codes), by_row, saved.phase(), width, True)
        absmax.zero_()
        assert torch.equal(by_row, saved.by_row())


@pytest.mark.parametrize("width", [1, 7, 90, 255, 300, 576])
def test_chunks_do_not_show(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(width)
    rows = row_count(width)
    saved = Saved(random_parts(rng, rows, 3), width, True, rng)
    parts = random_parts(rng, rows, 2)

    def everything() -> list[bytes]:
        results = [
            x for rank in loaded(saved, parts) for x in (rank[1].tobytes(), rank[2].tobytes(), bytes(rank[3]))
        ]
        codes = torch.from_numpy(saved.codes)
        values = blocks.dequantize(codes, saved.by_row(), saved.phase(), width, True)
        return [*results, values.numpy().tobytes()]

    whole = everything()
    for chunk in (1, 2, 5):
        monkeypatch.setattr(blocks, "_CHUNK_ROWS", chunk)
        monkeypatch.setattr(blocks, "_CHUNK_BLOCKS", chunk)
        assert everything() == whole


@both_maps
@every_width
def test_dequantised_elements_are_their_codes_times_their_scales(width: int, signed: bool) -> None:
    rng = np.random.default_rng(width)
    saved = Saved(random_parts(rng, row_count(width), 4), width, signed, rng)
    codes = torch.from_numpy(saved.codes)
    values = blocks.dequantize(codes, saved.by_row(), saved.phase(), width, signed)
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), saved.values())
    assert (codes.numpy() == saved.codes).all()


@both_maps
@pytest.mark.parametrize(
    ("width", "pieces"), [(2, 2), (90, 3), (512, 2), (600, 4), (1600, 2), (7, 3), (300, 7)]
)
def test_rows_that_were_cut_are_put_together(width: int, pieces: int, signed: bool) -> None:
    """Each piece of a row was on a rank of its own; the last is smaller where the width is no multiple."""
    rng = np.random.default_rng(width)
    rows, part = 11, -(-width // pieces)
    widths = [max(0, min(part, width - piece * part)) for piece in range(pieces)]
    count = 1 + -(-(part - 1) // 256)
    by_row, phase = torch.zeros(rows, pieces * count), torch.zeros(rows, pieces, dtype=torch.uint8)
    whole = Saved([rows], width, signed, rng)
    codes, scales = whole.codes.reshape(rows, width), np.zeros((rows, width), dtype=np.float32)
    for piece, size in enumerate(widths):
        if size:
            saved = Saved([5, rows - 5], size, signed, rng)
            at = slice(piece * part, piece * part + size)
            codes[:, at], scales[:, at] = saved.codes.reshape(rows, -1), saved.scales().reshape(rows, -1)
            by_row[:, piece * count : (piece + 1) * count] = saved.by_row(count)
            phase[:, piece] = torch.from_numpy(saved.place[::size].astype(np.uint8))
    whole.codes, whole.absmax, whole.block = codes.reshape(-1), scales.reshape(-1), np.arange(rows * width)
    flat = torch.arange(rows * width)
    found = blocks.scales_of(flat, by_row, phase, width, pieces)
    np.testing.assert_array_equal(found.numpy(), whole.scales())
    values = blocks.dequantize(torch.from_numpy(whole.codes), by_row, phase, width, signed, pieces)
    np.testing.assert_array_equal(values.numpy(), whole.values())
    new = torch.from_numpy(whole.codes.copy())
    absmax, moved = blocks.gather(new, by_row, phase, width, signed, pieces)
    assert moved == check_rank(whole, slice(None), new.numpy(), absmax.numpy(), pieces=True) == len(absmax)


def test_phases_of_rows_that_start_blocks_may_be_given() -> None:
    saved = Saved([2, 3], 512, True, np.random.default_rng(0))
    codes = torch.from_numpy(saved.codes.copy())
    absmax, moved = blocks.gather(codes, saved.by_row(4), torch.zeros(5, 1, dtype=torch.uint8), 512, True)
    assert moved == 0 and (codes.numpy() == saved.codes).all() and (absmax.numpy() == saved.absmax).all()


@pytest.mark.parametrize("special", [0.0, 1e-45, 3e-40, math.nan, math.inf, -FLT_MAX, -math.inf], ids=str)
@both_maps
@pytest.mark.parametrize("width", [1, 16, 90, 300, 1600])
def test_an_odd_scale_stays_within_blocks_that_touch_its_elements(
    width: int, signed: bool, special: float
) -> None:
    rng = np.random.default_rng(width)
    rows = row_count(width)
    saved = Saved(random_parts(rng, rows, 2), width, signed, rng)
    parts = random_parts(rng, rows, 3)
    odd = int(saved.block[len(saved.block) // 2])
    before = list(loaded(saved, parts))
    saved.absmax[odd] = special
    for (mine, codes, absmax, moved), (_, old_codes, old_absmax, old_moved) in zip(
        loaded(saved, parts), before
    ):
        assert moved == old_moved
        for block in range(len(absmax)):
            run = slice(block * 256, (block + 1) * 256)
            if odd not in saved.block[mine][run]:
                assert (codes[run] == old_codes[run]).all() and absmax[block] == old_absmax[block]
        if 0 <= special < 1:
            check_rank(saved, mine, codes, absmax)


@both_maps
def test_blocks_of_zeros_stay_zero(signed: bool) -> None:
    """The kernels give them code 255 or 0; what counts is the scale."""
    for code in (0, 127, 255):
        codes = torch.full((4 * 300,), code, dtype=torch.uint8)
        phase = torch.full((4, 1), 7, dtype=torch.uint8)
        absmax, moved = blocks.gather(codes, torch.zeros(4, 3), phase, 300, signed)
        assert moved == 5 and not absmax.any()


@pytest.mark.parametrize("scale", [1e-30, 0.3, 1.0, 1e30])
@both_maps
def test_a_block_with_one_scale_and_its_leading_code_is_the_same_bits(signed: bool, scale: float) -> None:
    """Also one led by a negative value: the signed map ends at -0.993, which costs others 0.7 % a time."""
    rng = np.random.default_rng(0)
    for leading in (0, 255) if signed else (255,):
        codes = rng.integers(1, 255, (20, 256)).astype(np.uint8)
        codes[np.arange(20), rng.integers(0, 256, 20)] = leading
        scales = np.repeat((scale * rng.uniform(1, 2, 20)).astype(np.float32), 256).reshape(20, 256)
        inside = torch.ones(20, 256, dtype=torch.bool)
        new, absmax = blocks.requantize(torch.from_numpy(codes), torch.from_numpy(scales), inside, signed)
        assert (new.numpy() == codes).all() and (absmax.numpy() == scales[:, 0]).all()


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 2e-39, 1e-37])
@both_maps
def test_scales_that_are_all_tiny(signed: bool, largest: float) -> None:
    """The inverse of a scale below 2.9e-39 is infinite."""
    rng = np.random.default_rng(0)
    saved = Saved([4, 5], 300, signed, rng)
    saved.absmax[:] = largest * rng.uniform(0.1, 1, len(saved.absmax))
    for mine, codes, absmax, moved in loaded(saved, [3, 6]):
        assert moved == check_rank(saved, mine, codes, absmax)


def test_rows_of_one_block_whose_scales_differ_are_requantised() -> None:
    """No saved rows are like this if their phases fit; whatever they are, each keeps its own scale."""
    codes = torch.full((512,), 255, dtype=torch.uint8)
    by_row, phase = torch.tensor([[1.0], [2.0], [3.0], [3.0]]), torch.tensor([[0], [128], [0], [128]])
    absmax, moved = blocks.gather(codes, by_row, phase.to(torch.uint8), 128, False)
    values = MAPS[False][codes.numpy()] * np.repeat(absmax.numpy(), 256)
    assert moved == 1 and absmax.tolist() == [2.0, 3.0]
    np.testing.assert_allclose(values, np.repeat([1.0, 2.0, 3.0, 3.0], 128), atol=0.008)


def test_elements_that_do_not_exist_have_no_say() -> None:
    codes, scales = torch.full((1, 256), 255, dtype=torch.uint8), torch.full((1, 256), 9.0)
    scales[0, :3] = 2.0
    inside = torch.arange(256)[None] < 3
    new, absmax = blocks.requantize(codes, scales, inside, True)
    assert absmax.tolist() == [2.0] and new[0, :3].tolist() == [255] * 3


class Divisors(TorchDispatchMode):
    """What every division inside divides by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name().startswith("aten::div"):
            self.found.append(args[1])
        assert "reciprocal" not in function.name(), "multiplied by the inverse on every device"
        return function(*args, **(kwargs or {}))


@both_maps
def test_requantising_divides_by_tensors_that_no_kernel_takes_for_numbers(signed: bool) -> None:
    """torch's CUDA kernels multiply by the inverse of a Python number, and of a 0-dim tensor in host memory: the codes
    would be others than on the CPU. (The end of the map for negative values, if there are any, and the scales.)"""
    codes = torch.arange(512).remainder(256).to(torch.uint8).view(2, 256)
    scales = torch.rand(2, 256, generator=torch.Generator().manual_seed(0)) + 0.5
    with Divisors() as divisors:
        blocks.requantize(codes, scales, torch.ones(2, 256, dtype=torch.bool), signed)
    assert len(divisors.found) == (2 if signed else 1)
    assert [x for x in divisors.found if not isinstance(x, torch.Tensor) or x.dim() == 0] == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both_maps
def test_requantising_gives_the_same_bits_on_a_gpu(signed: bool) -> None:
    """State in host memory is requantised there, state on the GPU there; a checkpoint loads as the same either way."""
    rng = np.random.default_rng(0)
    # Codes about zero lead no block: then the scale is a quotient.
    codes = rng.integers(40, 215, (4000, 256)).astype(np.uint8)
    codes[:1000] = rng.integers(0, 256, (1000, 256))
    scales = (10.0 ** rng.uniform(-40, 10, (4000, 1)) * rng.choice([0.5, 1, 3], (4000, 256))).astype(
        np.float32
    )
    arguments = (
        torch.from_numpy(codes),
        torch.from_numpy(scales),
        torch.from_numpy(rng.random((4000, 256)) < 0.9),
    )
    here = blocks.requantize(*arguments, signed)
    there = blocks.requantize(*(each.cuda() for each in arguments), signed)
    for name, ours, theirs in zip(("codes", "scales"), here, there):
        bits = [each.cpu().view(torch.uint8) for each in (ours, theirs)]
        assert torch.equal(*bits), f"{int((bits[0] != bits[1]).sum())} bytes of the {name} differ"


def cycled(width: int, rows: int, grids: list[list[int]], signed: bool, cycles: list[int]) -> list[float]:
    """Relative L2 distance from the start after going through ``grids`` and back to the first so many times."""
    rng = np.random.default_rng(0)
    saved = Saved(grids[0], width, signed, rng)
    shape = rng.standard_normal(rows * width) * 10.0 ** rng.normal(0, 0.5, rows * width)
    start = (shape if signed else shape**2).astype(np.float32)
    for block in range(len(saved.absmax)):  # quantise
        here = saved.block == block
        saved.absmax[block] = np.abs(start[here]).max()
        table = MAPS[signed] * saved.absmax[block]
        saved.codes[here] = np.abs(table[:, None] - start[here]).argmin(axis=0)
    first, results = saved.values().astype(np.float64), []
    for cycle in range(1, max(cycles) + 1):
        for parts in [*grids[1:], grids[0]]:
            following = Saved(parts, width, signed, rng)
            ranks = list(loaded(saved, parts))
            following.codes = np.concatenate([rank[1] for rank in ranks])
            following.absmax = np.concatenate([rank[2] for rank in ranks])
            saved = following
        if cycle in cycles:
            results.append(float(np.linalg.norm(saved.values() - first) / np.linalg.norm(first)))
    return results


GRIDS = {"two grids": [[40], [13, 27]], "three grids": [[40], [13, 27], [11, 9, 20]]}


@both_maps
@pytest.mark.parametrize("grids", GRIDS.values(), ids=list(GRIDS))
def test_going_there_and_back_does_not_drift(grids: list[list[int]], signed: bool) -> None:
    distances = cycled(300, 40, grids, signed, [1, 10, 50])
    assert 0 < distances[0] < 0.0125  # an ordinary quantisation of normal values costs 1.2 %
    assert max(distances) < 1.1 * distances[0]


@both_maps
def test_going_through_ever_new_grids_drifts_slower_than_the_root_of_their_number(signed: bool) -> None:
    rng = np.random.default_rng(1)
    grids = [[40], *(random_parts(rng, 40, 3) for _ in range(50))]
    [distance] = cycled(300, 40, grids, signed, [1])
    [once] = cycled(300, 40, grids[:2], signed, [1])
    assert distance < math.sqrt(50) * once
