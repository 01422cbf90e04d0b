"""Page-locked memory of paged optimizers: how much, for how long, and what happens when it is refused."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from optimizer_helpers import assert_same, normal
from paged_helpers import Device, simulated_device  # noqa: F401
from test_paged import MIB, Pair, every_kind
from torch import Tensor, nn

import bnb_fsdp
from bnb_fsdp.backends import base
from bnb_fsdp.residency import HostMemoryError, residency
from bnb_fsdp.residency.memory import ALIGNMENT, ARENA_BYTES, Arena, Locker, aligned, arenas

LOCKER = Locker(lambda address, size: None, lambda address: None)


def needed(optimizer: Any) -> int:
    """Bytes of state in host memory, each tensor at a multiple of the alignment; counted from the live state."""
    rows = bnb_fsdp.describe(optimizer).rows
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total = 0
    for row, p in zip(rows, parameters, strict=True):
        if row.residency == "host":
            total += sum(aligned(v.nbytes) for k, v in optimizer.state[p].items() if k != "step")
    return total


@pytest.mark.parametrize("bits", (8, 32))
@pytest.mark.parametrize("name", ("AdamW", "Lion", "AdEMAMix"))
def test_locked_is_what_is_needed_and_no_more(name: str, bits: int, device: Device) -> None:
    pair = Pair(name, bits, every_kind(), "host").steps(3)
    held = device.locked_bytes
    assert held == needed(pair.paged) == device.most_locked > 0
    state = sum(row.state_bytes for row in bnb_fsdp.describe(pair.paged).rows)
    assert held <= state + len(every_kind()) * 6 * ALIGNMENT
    pair.paged.residency = "host"  # again: nothing moves
    pair.paged.offload()
    pair.steps(2, 3)
    pair.paged.reload()
    assert device.locked_bytes == device.most_locked == held
    for optimizer in pair.optimizers:
        optimizer.add_param_group({"params": [nn.Parameter(normal(1000, 1000))]})
    pair.steps(1, 5)
    assert device.locked_bytes == device.most_locked == needed(pair.paged) > held
    pair.paged.residency = "device"
    assert device.locked_bytes == 0
    pair.compare()


def test_a_partial_move_locks_only_what_is_on_the_host(device: Device) -> None:
    pair = Pair("AdamW", 32, [normal(1000, 1000) for _ in range(4)], 20 * MIB).steps(2)
    assert 0 < device.locked_bytes == needed(pair.paged) <= 4 * 8_000_512
    assert {True, False} == set(pair.on_host())


def test_memory_is_released_when_the_optimizer_dies(device: Device) -> None:
    pair = Pair("AdamW", 8, every_kind(), "host").steps(2)
    alive = weakref.ref(pair.paged)
    assert device.locked_bytes > 0
    del pair.paged
    assert alive() is None and device.locked_bytes == 0, "only the garbage collector could free it"


def test_memory_is_released_by_the_garbage_collector_too(device: Device) -> None:
    pair = Pair("AdamW", 8, every_kind(), "host").steps(2)
    pair.paged.cycle = pair.paged
    del pair.paged
    gc.collect()
    assert device.locked_bytes == 0


def test_state_that_outlives_the_optimizer_still_reads_right(device: Device) -> None:
    pair = Pair("AdamW", 8, every_kind(), "host").steps(3)
    parameters = [own for own, _ in pair.parameters()]
    kept = [dict.get(pair.paged.state, p)["state1"] for p in parameters]  # without a wait
    assert device.pipelines[0].pending
    expected = [pair.plain.state[other]["state1"].clone() for _, other in pair.parameters()]
    saved = copy.copy(pair.paged.state_dict())
    assert_same(kept, expected)
    pair.steps(1, 3)
    expected = [pair.plain.state[other]["state1"].clone() for _, other in pair.parameters()]
    del pair.paged
    gc.collect()
    rubbish = [torch.full((1 << 20,), 255, dtype=torch.uint8) for _ in range(16)]
    assert device.locked_bytes == 0
    assert_same(kept, expected)
    for index, value in enumerate(expected):
        [codes] = saved["state"][index]["state1"].values()
        assert_same(codes, value)
    kept[0].fill_(3)  # still memory of its own
    del rubbish


@pytest.mark.parametrize("before", ("first step", "setter", "offload", "auto"))
def test_refused_memory_leaves_the_optimizer_as_it_was(before: str, device: Device) -> None:
    """Refused once half of it is locked: what was moved by then is valid where it is."""
    start = [normal(3000, 1000) for _ in range(9)] + every_kind()  # 24 MB each: several arenas
    pair = Pair("AdamW", 32, start, {"first step": "host", "auto": "auto"}.get(before, "device"))
    device.refuse_from = 100 * MIB
    if before in ("setter", "offload"):
        pair.steps(2)
    pair.gradients(2)
    values = [own.detach().clone() for own, _ in pair.parameters()]
    with pytest.raises(HostMemoryError) as error:
        if before == "setter":
            pair.paged.residency = "host"
        elif before == "offload":
            pair.paged.offload()
        else:
            pair.paged.step()
    assert isinstance(error.value, RuntimeError)
    text = str(error.value)
    del error  # its traceback holds what was being placed
    gc.collect()
    assert (
        "could not be page-locked: out of memory (simulated)" in text and "bytes of optimizer state" in text
    )
    total = sum(aligned(4 * t.numel()) * 2 for t in start)
    assert f"of {total:,} bytes" in text
    for value, (own, _) in zip(values, pair.parameters()):
        assert torch.equal(value, own)
    if before in ("first step", "auto"):
        assert not any(dict.get(pair.paged.state, own) for own, _ in pair.parameters())
        assert device.locked_bytes == 0
        if before == "first step":
            with pytest.raises(HostMemoryError):  # the same again, nothing lost and nothing left behind
                pair.paged.step()
            assert device.locked_bytes == 0
            pair.paged.residency = "device"  # "auto" finds by itself that the device has room
    else:
        assert pair.paged.residency == "device"
        pair.compare()
    pair.step()
    assert not any(pair.on_host()) and device.locked_bytes == 0
    pair.steps(2, 3)
    pair.compare()
    device.refuse_from = None
    pair.paged.residency = "host"
    pair.steps(2, 5).compare()
    assert all(hosted for hosted, p in zip(pair.on_host(), start) if p.numel())


def test_refused_memory_while_loading_keeps_what_was_loaded(device: Device) -> None:
    pair = Pair("AdamW", 8, every_kind(), "host").steps(2)
    saved = copy.deepcopy(pair.plain.state_dict())
    fresh = Pair("AdamW", 8, [own for own, _ in pair.parameters()], "host")
    device.refuse_from = device.locked_bytes
    with pytest.raises(HostMemoryError, match="could not be page-locked"):
        fresh.paged.load_state_dict(copy.deepcopy(saved))
    fresh.plain.load_state_dict(copy.deepcopy(saved))
    fresh.paged.residency = "device"
    fresh.compare()
    fresh.steps(2, 2).compare()


def test_auto_that_cannot_give_back_says_so_and_goes_on(device: Device) -> None:
    pair = Pair("AdamW", 8, [normal(1024, 1024) for _ in range(4)], "auto").steps(2)
    assert not any(pair.on_host())
    device.free, device.refuse_from = 0, 0
    pair.gradients(2)
    with pytest.warns(
        UserWarning, match=r"cannot leave it: .* could not be page-locked.* It stays there"
    ) as said:
        pair.step()
    assert len(said) == 1
    pair.steps(3, 3).compare()  # said once
    assert not any(pair.on_host()) and device.locked_bytes == 0
    device.refuse_from = None
    pair.paged.residency = "auto"  # asks afresh
    pair.steps(3, 6).compare()
    assert all(pair.on_host())


def test_refused_memory_does_not_change_what_auto_had_decided(device: Device) -> None:
    """Refused when the user asked for the host: "auto" goes on as it was."""
    device.free = (1 << 30) + 40 * MIB
    pair = Pair("AdamW", 32, [normal(1024, 1024) for _ in range(6)], "auto").steps(2)
    before = pair.on_host()
    assert 0 < sum(before) < 6
    device.refuse_from = device.locked_bytes
    device.free = 8 << 30  # whoever decided afresh would take it
    for _ in range(2):
        for ask in (pair.paged.offload, lambda: setattr(pair.paged, "residency", "host")):
            with pytest.raises(HostMemoryError):
                ask()
            assert pair.paged.residency == "auto"
            pair.steps(2, 2).compare()
            assert pair.on_host() == before


def test_state_made_for_a_checkpoint_that_is_refused_leaves_no_memory_locked(device: Device) -> None:
    pair = Pair("AdamW", 32, [normal(3000, 1000) for _ in range(6)], "host")
    device.refuse_from = 100 * MIB
    for _ in range(2):
        with pytest.raises(HostMemoryError):
            bool(pair.paged.state)  # as torch.distributed.checkpoint asks
        gc.collect()
        assert device.locked_bytes == 0
    device.refuse_from = None
    assert pair.paged.state and pair.plain.state
    pair.steps(2).compare()


class FullDevice:
    """The device's memory runs out at one of the allocations that move state there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        real = torch.empty_like

        def empty_like(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is not None and self.left is not None:
                if self.left == 0:
                    raise torch.OutOfMemoryError("out of memory (simulated)")
                self.left -= 1
            return real(*args, **kwargs)

        monkeypatch.setattr(torch, "empty_like", empty_like)


@pytest.mark.parametrize("bits", (8, 32))
@pytest.mark.parametrize("how", ("reload", "setter", "budget"))
def test_a_full_device_leaves_the_optimizer_as_it_was(
    how: str, bits: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullDevice(monkeypatch)
    start = [normal(300, 700), normal(5000), normal(64, 512)]
    for count in itertools.count():
        pair = Pair("AdamW", bits, start, "device" if how == "reload" else "host").steps(2)
        if how == "reload":
            pair.paged.offload()
        policy = pair.paged.residency
        full.left = count

        def move(pair: Pair = pair) -> None:
            if how == "reload":
                pair.paged.reload()
            else:
                pair.paged.residency = "device" if how == "setter" else 1 << 40

        try:
            move()
        except torch.OutOfMemoryError:
            pass
        else:
            break
        finally:
            full.left = None
        assert pair.paged.residency == policy
        moved = count // (2 if bits == 32 else 4)  # tensors of a parameter
        assert pair.on_host() == [False] * moved + [True] * (3 - moved)
        inside = [
            any(a <= pair.paged.state[own][key].data_ptr() < a + s for a, s in device.locked.items())
            for own, _ in pair.parameters() for key in ("state1", "state2")
        ]  # fmt: skip
        assert inside == [flag for flag in pair.on_host() for _ in range(2)], "a parameter in both places"
        pair.compare()
        if count % 2:
            pair.steps(1, 2).compare()
            assert all(pair.on_host())
        move()
        assert not any(pair.on_host()) and device.locked_bytes == 0
        pair.steps(1, 3).compare()
    assert count == 3 * (2 if bits == 32 else 4) and not any(pair.on_host())


def test_auto_keeps_on_the_host_what_the_device_has_no_room_for(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullDevice(monkeypatch)
    pair = Pair("AdamW", 8, [normal(1024, 1024) for _ in range(40)], "auto").steps(1)
    full.left = 101
    pair.steps(1, 1)
    hosted = sum(pair.on_host())
    assert 15 <= hosted < 40  # 25 fitted, less what staging buffers take
    pair.steps(2, 2).compare()
    assert sum(pair.on_host()) == hosted


def test_staging_buffers_that_cannot_be_had_are_asked_for_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair("AdamW", 8, [normal(1024, 512), normal(300)], "host").steps(1)
    pair.paged.residency = "device"
    pair.paged.residency = "host"
    [pipeline] = device.pipelines
    real = pipeline.resize

    def resize(chunk_bytes: int) -> None:
        if chunk_bytes:
            raise torch.OutOfMemoryError("out of memory (simulated)")
        real(0)

    monkeypatch.setattr(pipeline, "resize", resize)
    pair.gradients(1)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            pair.paged.step()
    monkeypatch.setattr(pipeline, "resize", real)
    pair.step()
    pair.steps(1, 2).compare()


def test_a_first_step_that_is_refused_leaves_no_memory_locked(device: Device) -> None:
    pair = Pair("AdamW", 8, [normal(1024, 512), normal(300)], "host")
    for _ in range(2):
        pair.gradients(0)
        own = pair.parameters()[1][0]
        own.grad = own.grad.to_sparse()
        with pytest.raises(ValueError, match="sparse"):
            pair.paged.step()
        del own
        gc.collect()
        assert device.locked_bytes == 0 and not any(map(len, dict.values(pair.paged.state)))
    pair.steps(2).compare()
    assert device.locked_bytes == needed(pair.paged) == device.most_locked


def test_speed_is_taken_for_granted_where_it_cannot_be_measured(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory for measuring is more than small state needs."""

    def refuse(_: torch.device) -> Any:
        Arena(residency.MEASURED_BYTES, Locker(device.lock, device.unlock))

    device.refuse_from = residency.MEASURED_BYTES - 1
    monkeypatch.setattr(residency, "_measured", refuse)
    pair = Pair("AdamW", 8, every_kind(), "host").steps(2)
    pair.compare()
    assert any(pair.on_host())


def test_the_end_of_the_process_waits_for_no_device() -> None:
    """It may wait for a rank that is gone."""
    program = """
from bnb_fsdp.residency.memory import Arena, Locker
arena = Arena(4096, Locker(lambda address, size: print("locked"), lambda address: print("waited")))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout.split()) == (0, ["locked"]), ran.stderr


def test_arenas_are_bounded(device: Device) -> None:
    sizes = [
        20_000_000,
        5,
        30_000_000,
        100,
        10_000,
        700,
        *[2_000_000] * 9,
    ]  # 8-bit: 160 MB apiece is too much
    pair = Pair("Lion", 32, [torch.zeros(n) for n in sizes], "host")
    pair.gradients(0)
    pair.paged.step()
    locked = sorted(device.locked.values())
    large = [4 * n for n in sizes if 4 * n > ARENA_BYTES]
    assert [size for size in locked if size > ARENA_BYTES] == sorted(aligned(size) for size in large)
    assert sum(locked) == sum(aligned(4 * n) for n in sizes)
    assert len(locked) <= 3 + 2 * -(-sum(4 * n for n in sizes if 4 * n <= ARENA_BYTES) // ARENA_BYTES)


def test_arenas_hand_out_every_thing_once() -> None:
    for wanted in (
        [],
        [1],
        [ARENA_BYTES],
        [ARENA_BYTES + 1],
        [ARENA_BYTES // 2] * 5,
        [3, ARENA_BYTES * 2, 3, 3],
    ):
        given = list(arenas(wanted, LOCKER))
        assert sum(count for _, count in given) == len(wanted)
        assert sum(arena.left for arena, _ in given) == sum(wanted)
        for arena, count in given:
            assert arena.left <= ARENA_BYTES or count == 1


def test_an_arena_cuts_tensors_like_others() -> None:
    likes = [t.detach() for t in every_kind() if t.numel()]
    arena = Arena(sum(aligned(t.nbytes) for t in likes), LOCKER)
    parts = [arena.cut(t) for t in likes]
    assert arena.left == 0
    begin = arena.memory.data_ptr()
    at = begin
    for part, like in zip(parts, likes):
        assert (part.shape, part.stride(), part.dtype) == (like.shape, like.stride(), like.dtype)
        assert part.data_ptr() == at and at % ALIGNMENT == 0 and not part.any()
        assert part.untyped_storage().nbytes() == like.nbytes
        at += aligned(like.nbytes)
        part.copy_(like)
    assert at == begin + arena.memory.numel()
    for part, like in zip(parts, likes):
        assert torch.equal(part, like)
    with pytest.raises(ValueError):
        arena.cut(torch.zeros(1))  # full


def test_nothing_in_one_arena_goes_on_in_another() -> None:
    """A copy that did would cross two ranges that were page-locked apart."""
    for size in (256, 4096, 65536, 1 << 20):
        some = [Arena(size, LOCKER) for _ in range(40)]
        starts = {arena.memory.data_ptr() for arena in some}
        assert not starts & {arena.memory.data_ptr() + aligned(size) for arena in some}, size


@pytest.mark.parametrize("size", (1 << 60, 1 << 62, 1 << 70))
def test_memory_that_the_system_refuses(size: int) -> None:
    with pytest.raises(HostMemoryError, match=f"{size:,} bytes of host memory were refused"):
        Arena(size, LOCKER)
    with pytest.raises(
        HostMemoryError, match=rf"refused.*\({size:,} of {size + 8:,} bytes of optimizer state"
    ):
        list(arenas([8, size], LOCKER))


def test_a_fork_does_not_unlock() -> None:
    unlocked: list[int] = []
    arena = Arena(4096, Locker(lambda address, size: None, unlocked.append))
    address = arena.memory.data_ptr()
    base.in_process(os.getpid() + 1, unlocked.append, address)
    assert unlocked == []
    part = arena.cut(torch.zeros(7))
    del arena
    assert unlocked == [address]
    assert part.fill_(2).sum() == 14


def test_a_refused_lock_frees_the_pages() -> None:
    def refuse(address: int, size: int) -> None:
        raise RuntimeError("no")

    unlocked: list[int] = []
    with pytest.raises(HostMemoryError, match="4,096 bytes of host memory could not be page-locked: no"):
        Arena(4096, Locker(refuse, unlocked.append))
    gc.collect()
    assert unlocked == []


def test_state_given_by_others_is_moved_into_locked_memory(device: Device) -> None:
    pair = Pair("AdamW", 8, [normal(64, 512), normal(5000)], "host").steps(2)
    for optimizer, (index, side) in zip(pair.optimizers, ((0, 0), (0, 1))):
        p = pair.parameters()[index][side]
        optimizer.state[p]["state1"] = optimizer.state[p]["state1"].clone()
    pair.steps(1, 2).compare()

    def inside(value: Tensor) -> bool:
        return any(start <= value.data_ptr() < start + size for start, size in device.locked.items())

    for p, _ in pair.parameters():
        assert all(inside(v) for k, v in pair.paged.state[p].items() if k != "step")
    # The piece that both shared has one tenant left.
    assert needed(pair.paged) < device.locked_bytes <= 2 * needed(pair.paged)


def test_removed_and_replaced_parameters_let_their_memory_go(device: Device) -> None:
    pair = Pair("AdamW", 8, [normal(64, 512), normal(64, 1024)], "host").steps(2)
    for optimizer in pair.optimizers:
        gone = optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[0]["overrides"] = []
        del optimizer.state[gone]
    pair.steps(1, 2)
    # One piece held both; its last tenant keeps it.
    assert needed(pair.paged) <= device.locked_bytes <= 3 * needed(pair.paged) + ALIGNMENT
    pair.compare()
    pair.paged.state.clear()
    pair.plain.state.clear()
    pair.steps(1, 3)
    assert device.locked_bytes == needed(pair.paged)
    pair.compare()
