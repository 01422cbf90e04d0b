"""Gate B on a CUDA device: paged state against the unpaged class, order on streams, transfers that overlap, memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from optimizer_helpers import assert_same
from paged_helpers import Device
from test_cuda_streams import CYCLES, profiled
from test_paged import DTYPES, FAMILIES, LAYOUTS, MIB, Pair, Program
from torch import Tensor, nn

import bnb_fsdp
from bnb_fsdp.backends import cuda_pipeline
from bnb_fsdp.residency import HostMemoryError, policy, residency
from bnb_fsdp.residency.memory import Arena

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]


def on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_cpu, value))
    return value


class CudaPair(Pair):
    """Host state is compared with device state."""

    def same(self, first: Any, second: Any) -> None:
        assert_same(on_cpu(first), on_cpu(second))


def every_kind(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [layout().to("cuda", dtype) for layout in LAYOUTS.values()]


def large(count: int, numel: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(numel, device="cuda", generator=generator) for _ in range(count)]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in zip(first, second, strict=True))


def hosted(pair: Pair) -> list[bool]:
    """Of the parameters that have elements."""
    return [flag for flag, (own, _) in zip(pair.on_host(), pair.parameters(), strict=True) if own.numel()]


def chunks_of(optimizer: Any) -> int:
    """Chunks of a step with all gradients; the bucket of an empty parameter has none."""
    return sum(getattr(bucket.prepared, "chunks", 0) for bucket in optimizer._plan._buckets)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "CHUNK_SIZES", (MIB,))


@pytest.fixture
def warm() -> torch.device:
    """The device, its bandwidth measured: that takes memory of its own for a moment."""
    device = torch.device("cuda", torch.cuda.current_device())
    residency._speed(device)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return device


# Bit for bit


@pytest.mark.parametrize("where", ("host", "auto", 4 * MIB))
@pytest.mark.parametrize("bits", (8, 32))
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_equal_the_unpaged_class(name: str, bits: int, where: Any, small_chunks: None) -> None:
    for dtype in DTYPES:
        pair = CudaPair(name, bits, every_kind(dtype), where).steps(5)
        pair.compare()
        if where == "host":
            assert all(hosted(pair))


@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_steps_in_many_chunks(name: str, small_chunks: None) -> None:
    pair = CudaPair(name, 8, [*large(2, 1_500_001), *every_kind()], "host")
    for step in range(20):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        pair.gradients(step, {step % 16})
        pair.step()
    pair.compare()
    assert chunks_of(pair.paged) > 5


class CudaProgram(Program):
    """Half of the steps on one of two side streams."""

    new_pair = CudaPair

    def __init__(self, seed: int, device: Device) -> None:
        super().__init__(seed, device)
        self.streams = [None, None, torch.cuda.Stream(), torch.cuda.Stream()]

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        side = self.random.choice(self.streams)
        if side is None:
            yield
            return
        self.done.append("on a side stream")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES // 20)
            yield
        torch.cuda.current_stream().wait_stream(side)

    def placed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.detach().to("cuda") for t in tensors]

    def memory(self) -> None: ...


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int, small_chunks: None) -> None:
    program = CudaProgram(seed, Device())
    try:
        program.run(8)
    except Exception as error:
        raise AssertionError(f"{program.name}{program.bits}bit: {', '.join(program.done)}") from error
    assert "on a side stream" in program.done


def test_a_learning_rate_on_the_device() -> None:
    pair = CudaPair("AdamW", 8, every_kind(), "host").steps(1)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = torch.tensor(3e-3, device="cuda")
    pair.steps(3, 1).compare()
    # One that cannot be used is refused before anything is stepped.
    before = [own.detach().clone() for own, _ in pair.parameters()]
    pair.paged.param_groups[0]["lr"] = torch.tensor(3e-3, device="cuda", dtype=torch.float64)
    pair.gradients(4)
    with pytest.raises(ValueError, match=r"lr is a torch\.float64 tensor"):
        pair.paged.step()
    assert equal(before, [own for own, _ in pair.parameters()])
    pair.paged.param_groups[0]["lr"] = torch.tensor(3e-3, device="cuda")
    pair.step()
    pair.compare()


def test_two_paged_optimizers_on_two_streams(small_chunks: None) -> None:
    pairs = [CudaPair("AdamW", 8, every_kind(), "host"), CudaPair("Lion", 32, every_kind(), "host")]
    for pair in pairs:
        pair.steps(1)
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    for step in range(1, 5):
        for pair, stream in zip(pairs, streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES // 20)
                pair.steps(1, step)
    torch.cuda.synchronize()
    for pair in pairs:
        pair.compare()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_optimizer_on_two_devices(small_chunks: None) -> None:
    tensors = [t.to(f"cuda:{index % 2}") for index, t in enumerate(every_kind() + large(2, 1_000_000))]
    pair = CudaPair("AdamW", 8, tensors, "host").steps(4)
    pair.compare()
    assert all(hosted(pair)) and torch.cuda.current_device() == 0


# Order


def late(kind: tuple[str, int]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients made late on a side stream, steps and consumers there without a wait: theirs and a serial twin's."""
    pair = CudaPair(*kind, every_kind() + large(2, 1_000_000), "host").steps(1)
    own, other = (list(side) for side in zip(*pair.parameters()))
    ready = []
    for step in (1, 2, 3):
        pair.gradients(step)
        ready.append([p.grad for p in other])
    for p in own:
        p.grad = torch.zeros_like(p)
    consumed = [p.detach() + p.grad.fill_(float("nan")) for p in own]  # loads the kernels used below
    stream = torch.cuda.Stream()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        for gradients in ready:
            for p in own:
                p.grad.fill_(float("nan"))  # what a kernel in the wrong place would see
            torch.cuda._sleep(CYCLES)
            for p, gradient in zip(own, gradients):
                p.grad.copy_(gradient)
            pair.paged.step()
            for target, p in zip(consumed, own):
                target.copy_(p.detach())
        done = torch.cuda.Event()
        done.record(stream)
    assert not done.query(), "a step waited for the device"
    done.synchronize()
    results = [*consumed, *states(pair.paged, own)]
    for gradients in ready:
        for p, gradient in zip(other, gradients):
            p.grad = gradient
        pair.plain.step()
    return results, [*other, *states(pair.plain, other)]


def states(optimizer: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    return [optimizer.state[p][key] for p in parameters for key in sorted(optimizer.state[p])]


KINDS = (("AdamW", 8), ("AdamW", 32), ("Lion", 8), ("AdEMAMix", 8))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_made_late_on_a_side_stream_are_waited_for(
    kind: tuple[str, int], small_chunks: None
) -> None:
    assert equal(*late(kind))


def test_an_update_on_another_stream_is_seen(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: every update on a stream of its own."""
    wrong = torch.cuda.Stream()
    monkeypatch.setattr(cuda_pipeline, "raw_stream", lambda index: wrong.cuda_stream)
    result = equal(*late(KINDS[0]))
    torch.cuda.synchronize()
    assert not result


def test_steps_back_to_back_behind_a_busy_device_wait_for_nothing(small_chunks: None) -> None:
    pair = CudaPair("AdamW", 8, every_kind() + large(2, 1_000_000), "host").steps(2)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    pair.gradients(2)
    torch.cuda._sleep(10 * CYCLES)  # a second
    busy.record()
    pair.paged.step()
    pair.paged.step()
    assert not busy.query(), "step() waited for the device"
    first = pair.parameters()[0][0]
    held = pair.paged.state[first]["state1"].clone()  # whoever asks for state waits
    assert busy.query()
    pair.plain.step()
    pair.plain.step()
    assert torch.equal(held, pair.plain.state[pair.parameters()[0][1]]["state1"].cpu())
    pair.compare()


def test_a_wait_in_step_is_seen(small_chunks: None) -> None:
    """The test above can fail."""
    pair = CudaPair("AdamW", 8, every_kind(), "host").steps(2)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2 * CYCLES)
    busy.record()
    pair.paged.step()
    pair.paged._residency.wait()
    assert busy.query()


@pytest.mark.parametrize("bits", (8, 32))
def test_a_step_synchronises_and_allocates_nothing(bits: int, small_chunks: None) -> None:
    pair = CudaPair("AdamW", bits, every_kind() + large(2, 1_000_000), "host").steps(3)
    pair.gradients(3)
    pair.paged.step()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        pair.paged.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    names = [event.name for event in profiled(pair.paged.step)]
    assert [name for name in names if "Memcpy HtoD" in name] and [n for n in names if "Memcpy DtoH" in n]
    unwanted = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostRegister", "Memset", "Pageable")
    assert not [name for name in names if any(part in name for part in unwanted)]


def spans(events: Sequence[Any], text: str) -> list[tuple[float, float]]:
    on_device = torch.autograd.DeviceType.CUDA
    found = [e for e in events if e.device_type == on_device and text in e.name]
    return sorted((e.time_range.start, e.time_range.end) for e in found)


def overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Microseconds in which one of each runs."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in first for c, d in second)


@pytest.mark.parametrize("bits", (8, 32))
def test_copies_of_a_chunk_overlap_those_and_the_kernel_of_another(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "CHUNK_SIZES", (2 * MIB,))
    kind = bnb_fsdp.PagedAdamW32bit if bits == 32 else bnb_fsdp.PagedAdamW8bit
    parameters, optimizer, _ = adamw(large(2, (8 if bits == 32 else 24) << 20), kind, residency="host")
    for _ in range(2):
        optimizer.step()

    def run() -> None:
        torch.cuda._sleep(CYCLES // 2)  # so that the host is ahead of the device
        optimizer.step()

    events = profiled(run)
    coming, going = spans(events, "Memcpy HtoD"), spans(events, "Memcpy DtoH")
    kernels = spans(events, "bnb_fsdp")
    chunks = chunks_of(optimizer)
    assert chunks > 40 and len(kernels) == chunks
    assert len(coming) >= chunks and len(going) >= chunks
    assert overlap(coming, going) > 0.2 * sum(b - a for a, b in going)
    assert overlap(kernels, coming) > 0 and overlap(kernels, going) > 0
    # Each update begins after its state came in, and its state goes out after that: the counts fit in order.
    clocks = 2.0  # microseconds that the engines' times may differ by
    for index, (start, _) in enumerate(kernels):
        assert sum(end <= start + clocks for _, end in coming) > index
        assert sum(begin < start - clocks for begin, _ in going) <= len(going) - (chunks - index)
    assert all(bool(p.isfinite().all()) for p in parameters)


def test_moving_state_waits_for_an_update_on_another_stream() -> None:
    pair = CudaPair("AdamW", 8, every_kind(), "host").steps(2)
    stream = torch.cuda.Stream()
    for step, where in enumerate(("device", "host", 4 * MIB, "device"), 2):
        torch.cuda.synchronize()
        pair.gradients(step)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            pair.paged.step()
        pair.paged.residency = where  # on the default stream
        pair.plain.step()
        torch.cuda.synchronize()
        pair.compare()


def test_freed_gradients_may_be_overwritten(small_chunks: None) -> None:
    pair = CudaPair("AdamW", 8, every_kind() + large(2, 1_000_000), "host").steps(1)
    pair.gradients(1)
    pair.plain.step()
    torch.cuda._sleep(CYCLES)
    pair.paged.step()
    shapes = [own.shape for own, _ in pair.parameters()]
    for own, other in pair.parameters():
        own.grad = other.grad = None
    rubbish = [torch.full(shape, float("nan"), device="cuda") for shape in shapes * 2]
    pair.compare()
    del rubbish


# Lifetime


def test_an_optimizer_deleted_right_after_its_step(small_chunks: None) -> None:
    """What its copies and kernels still use is not handed on: state that outlives it is what the step made of it."""
    pair = CudaPair("AdamW", 32, every_kind() + large(2, 1_000_000), "host").steps(2)
    pair.gradients(2)
    pair.plain.step()
    parameters = pair.parameters()
    kept = [dict.get(pair.paged.state, own) for own, _ in parameters]  # without a wait
    gone = weakref.ref(pair.paged)
    torch.cuda.synchronize()
    torch.cuda._sleep(5 * CYCLES)
    pair.paged.step()
    del pair.paged
    gc.collect()
    assert gone() is None
    sizes = [MIB, 3 * MIB, 65_536, 262_144] * 16
    rubbish = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    rubbish += [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
    torch.cuda.synchronize()
    for values, (own, other) in zip(kept, parameters):
        assert torch.equal(own, other)
        expected = pair.plain.state[other]
        assert set(values) == set(expected)
        assert all(torch.equal(value.cpu(), expected[key].cpu()) for key, value in values.items())
    del rubbish


@pytest.mark.parametrize("where", ("host", 6 * MIB))
def test_plans_may_be_dropped_while_a_step_is_queued(where: Any, small_chunks: None) -> None:
    pair = CudaPair("AdamW", 32, every_kind() + large(2, 1_000_000), where).steps(2)
    side = torch.cuda.Stream()
    for step in range(2, 6):
        pair.gradients(step)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES // 2)
            pair.paged.step()
        pair.paged._drop_plan()
        gc.collect()
        rubbish = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in [65_536, MIB] * 20]
        torch.cuda.current_stream().wait_stream(side)
        pair.plain.step()
        del rubbish
    pair.compare()


def test_host_state_is_page_locked_until_the_optimizer_dies() -> None:
    pair = CudaPair("AdamW", 8, every_kind(), "host").steps(2)
    parameters = [own for own, _ in pair.parameters() if own.numel()]
    held = [v for p in parameters for k, v in pair.paged.state[p].items() if k != "step"]
    assert held and all(value.device.type == "cpu" and value.is_pinned() for value in held)
    values = [value.clone() for value in held]
    del pair.paged
    gc.collect()
    assert not any(value.is_pinned() for value in held)
    assert equal(values, held)
    # Locked again by the next.
    fresh = CudaPair("AdamW", 8, parameters, "host").steps(1)
    assert fresh.paged.state[fresh.parameters()[0][0]]["state1"].is_pinned()


def test_state_dicts_are_host_memory_and_load_into_both() -> None:
    pair = CudaPair("AdamW", 8, every_kind(), "host").steps(2)
    allocated = torch.cuda.memory_allocated()
    saved = pair.paged.state_dict()
    assert torch.cuda.memory_allocated() == allocated
    for index, (own, _) in enumerate(pair.parameters()):
        [codes] = (v for k, v in saved["state"][index]["state1"].items())
        assert codes.data_ptr() == pair.paged.state[own]["state1"].data_ptr()
    for where in ("host", "device", 4 * MIB):
        fresh = CudaPair("AdamW", 8, [own for own, _ in pair.parameters()], where)
        fresh.paged.load_state_dict(copy.deepcopy(pair.plain.state_dict()))
        fresh.plain.load_state_dict(copy.deepcopy(saved))
        fresh.compare()
        assert where != "host" or all(hosted(fresh))
        assert where != "device" or not any(hosted(fresh))
        fresh.steps(2, 2).compare()


# Memory of the device


def adamw(
    tensors: Sequence[Tensor], kind: Any = bnb_fsdp.PagedAdamW32bit, **kwargs: Any
) -> tuple[list[nn.Parameter], Any, int]:
    """Parameters with gradients, a paged optimizer, and the bytes that float32 state takes."""
    parameters = [nn.Parameter(t) for t in tensors]
    for p in parameters:
        p.grad = torch.full_like(p, 0.1)
    optimizer = kind(parameters, lr=1e-2, **kwargs)
    return parameters, optimizer, sum(8 * p.numel() for p in parameters)


def test_tensors_take_no_more_of_the_device_than_is_counted() -> None:
    source = random.Random(0)
    for largest in (1000, MIB // 2, 2 * MIB, 5 * MIB, 12 * MIB, 40 * MIB):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        sizes = [source.randint(1, largest) for _ in range(min(400, (1 << 30) // largest))]
        tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        taken = torch.cuda.memory_allocated() - before
        counted = sum(map(policy.device_bytes, sizes))
        # The last segments may not be full: their rest counts as theirs.
        assert sum(sizes) <= taken <= counted + MIB, (largest, taken, counted)
        assert counted <= 1.08 * sum(sizes) + 512 * len(sizes), largest
        del tensors


@pytest.mark.parametrize("where", ("host", 100 * MIB, 60 * MIB))
def test_peak_memory_is_bounded_by_the_budget(where: Any, warm: torch.device) -> None:
    _, optimizer, state = adamw(large(16, 2 << 20), residency=where)
    free = torch.cuda.mem_get_info()[0]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    description = bnb_fsdp.describe(optimizer)
    staging = description.staging_bytes
    resident = description.state_bytes - description.host_bytes
    assert 0 < staging and (resident == 0) == (where == "host")
    limit = staging if where == "host" else where
    assert staging + resident <= limit < state == 256 * MIB
    tables = 1 * MIB
    assert peak <= (limit + tables if where == "host" else limit)
    assert free - torch.cuda.mem_get_info()[0] <= limit + 64 * MIB


def test_offload_gives_memory_back_and_reload_brings_it_back(warm: torch.device) -> None:
    pair = CudaPair("AdamW", 32, large(2, 4 << 20), "device").steps(2)
    pair.gradients(2)
    state = 64 * MIB
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    pair.paged.offload()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    assert before[0] - after[0] >= 0.99 * state
    assert before[1] - after[1] >= 0.9 * state
    assert after[2] - before[2] >= 0.9 * state
    assert bnb_fsdp.describe(pair.paged).staging_bytes == 0 and all(pair.on_host())
    pair.compare()
    pair.paged.reload()
    assert torch.cuda.memory_allocated() >= after[0] + 0.99 * state and not any(pair.on_host())
    pair.step()
    pair.compare()
    pair.paged.offload()  # and a step meanwhile streams
    pair.steps(1, 3)
    assert all(pair.on_host())
    pair.paged.reload()
    pair.steps(1, 4).compare()


def test_auto_takes_the_device_and_gives_it_back(warm: torch.device) -> None:
    pair = CudaPair("AdamW", 8, [*every_kind(), *large(1, 1 << 20)], "auto").steps(1)
    assert all(hosted(pair))
    pair.steps(1, 1)
    assert not any(hosted(pair)), "the device has room for this"
    pair.steps(2, 2).compare()
    time.sleep(0.1)
    pair.paged._residency.reserve = torch.cuda.mem_get_info()[1]  # more than is free
    pair.steps(1, 4)
    assert all(hosted(pair))
    pair.steps(2, 5).compare()


@pytest.mark.parametrize("where", ("device", "auto"))
def test_a_full_device_leaves_the_optimizer_as_it_was(where: str, warm: torch.device) -> None:
    """As when another program has not let go of its memory yet."""
    pair = CudaPair("AdamW", 32, large(6, 2 << 20), where, residency_reserve=0 if where == "auto" else None)
    pair.steps(2)
    assert not any(pair.on_host())
    pair.paged.offload()
    pair.gradients(2)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 70 * MIB) / total)
    try:
        if where == "device":
            with pytest.raises(torch.OutOfMemoryError):
                pair.paged.reload()
        else:  # does with what there is
            pair.paged.reload()
        assert 0 < sum(pair.on_host()) < 6
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert pair.paged.residency == where
    pair.step()
    pair.compare()
    assert all(pair.on_host()) or where == "auto"  # offloaded still
    pair.paged.residency = "device"
    pair.steps(1, 3).compare()
    assert not any(pair.on_host())


def test_refused_host_memory_leaves_the_optimizer_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    residency._measured.cache_clear()  # what it is measured with is refused, too

    def refuse(device: torch.device, address: int, size: int) -> None:
        raise RuntimeError("refused by the test")

    pair = CudaPair("AdamW", 8, every_kind(), "device").steps(2)
    fresh = CudaPair("AdamW", 8, every_kind(), "host")
    fresh.gradients(0)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_pipeline, "lock", refuse)
        with pytest.raises(HostMemoryError, match=r"bytes of host memory could not be page-locked: refused"):
            pair.paged.offload()
        assert not any(pair.on_host())
        pair.steps(1, 2).compare()
        with pytest.raises(HostMemoryError):
            fresh.paged.step()
        fresh.paged.residency = "device"
        fresh.step()
        fresh.steps(1, 1).compare()
    pair.paged.offload()
    pair.steps(1, 3).compare()


def test_a_refusal_by_the_driver_is_an_error_and_leaves_no_trace(warm: torch.device) -> None:
    arena = Arena(MIB, residency._locker(warm))
    with pytest.raises(RuntimeError, match="page-locking 4096 bytes of host memory"):
        cuda_pipeline.lock(warm, arena.memory.data_ptr(), 4096)  # is locked already
    del arena
    with pytest.raises(RuntimeError, match="making host memory ordinary again"):
        cuda_pipeline.unlock(warm, torch.zeros(4096).data_ptr())
    assert float(torch.ones(8, device="cuda").sum()) == 8
    CudaPair("AdamW", 8, every_kind(), "host").steps(2).compare()


def test_a_capture_is_refused_and_changes_nothing() -> None:
    pair = CudaPair("AdamW", 8, every_kind(), "host").steps(3)
    pair.gradients(3)
    before = [own.detach().clone() for own, _ in pair.parameters()]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            with pytest.raises(RuntimeError, match="is in host memory, which a graph cannot capture"):
                pair.paged.step()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    assert equal(before, [own for own, _ in pair.parameters()])
    pair.step()
    pair.compare()
