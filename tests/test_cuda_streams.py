"""Gate A on a CUDA device: order on streams, graphs, launches and synchronisations of a step, lifetime, errors."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bnb_fsdp
from bnb_fsdp.backends import BucketKey, Slot, cuda
from bnb_fsdp.rules import Hyper

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]

KINDS: dict[str, Callable[..., Any]] = {
    "AdamW8bit": bnb_fsdp.AdamW8bit,
    "AdamW32bit": bnb_fsdp.AdamW32bit,
    "Lion8bit": bnb_fsdp.Lion8bit,
}
SHAPES = ((128, 256), (4096,), (300, 77), (5,))
CYCLES = 200_000_000  # about a tenth of a second


def make(kind: str, seed: int = 0, **kwargs: Any) -> tuple[list[torch.nn.Parameter], Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda", generator=generator)) for shape in SHAPES]
    return params, KINDS[kind](params, lr=1e-2, **kwargs)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(100 + step)
    return [torch.randn(shape, device="cuda", generator=generator) for shape in SHAPES]


def everything(params: list[torch.nn.Parameter], optimizer: Any) -> list[Tensor]:
    states = [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p])]
    return [t.detach().clone() for t in (*params, *states)]


def serial(kind: str, steps: int, consumer: bool = False) -> list[Tensor]:
    params, optimizer = make(kind)
    for step in range(steps):
        for p, g in zip(params, gradients(step)):
            p.grad = g
        optimizer.step()
        torch.cuda.synchronize()
    return everything(params, optimizer) + ([p.detach().clone() for p in params] if consumer else [])


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def gated(kind: str, steps: int) -> list[Tensor]:
    """A delayed producer of gradients, the step and a consumer on one side stream, without a wait in between."""
    params, optimizer = make(kind)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()  # allocates and uploads; undone below
    with torch.no_grad():
        for p, fresh in zip(params, make(kind)[0]):
            p.copy_(fresh)
            for key, value in optimizer.state[p].items():
                value.zero_() if key != "step" else value.fill_(0)
    ready = [gradients(step) for step in range(steps)]
    stream = torch.cuda.Stream()
    consumed = [torch.empty_like(p) for p in params]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for step in range(steps):
            for p in params:
                p.grad.fill_(float("nan"))  # what a kernel in the wrong place would see
            torch.cuda._sleep(CYCLES)
            for p, g in zip(params, ready[step]):
                p.grad.copy_(g)
            optimizer.step()
            for target, p in zip(consumed, params):
                target.copy_(p.detach())
    done = torch.cuda.Event()
    done.record(stream)
    done.synchronize()
    return everything(params, optimizer) + consumed


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_made_late_on_a_side_stream_are_waited_for(kind: str) -> None:
    assert equal(gated(kind, 3), serial(kind, 3, consumer=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_on_another_stream_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: every launch on a stream of its own."""
    wrong = torch.cuda.Stream()
    monkeypatch.setattr(cuda, "raw_stream", lambda index: wrong.cuda_stream)
    assert not equal(gated(kind, 3), serial(kind, 3, consumer=True))
    torch.cuda.synchronize()


def test_two_streams_do_not_wait_for_each_other() -> None:
    pairs = [make("AdamW8bit", seed) for seed in (1, 2)]
    for params, optimizer in pairs:
        for p, g in zip(params, gradients(0)):
            p.grad = g
        optimizer.step()
    streams = [torch.cuda.Stream() for _ in pairs]
    events = [torch.cuda.Event() for _ in pairs]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(20 * CYCLES)  # two seconds
        pairs[0][1].step()
        events[0].record()
    with torch.cuda.stream(streams[1]):
        pairs[1][1].step()
        events[1].record()
    events[1].synchronize()
    assert not events[0].query(), "the second stream's step waited for the first stream"
    torch.cuda.synchronize()
    for seed, (params, optimizer) in zip((1, 2), pairs):
        reference, other = make("AdamW8bit", seed)
        for p, g in zip(reference, gradients(0)):
            p.grad = g
        other.step()
        other.step()
        assert equal(everything(params, optimizer), everything(reference, other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_replays(kind: str) -> None:
    steps = 6
    params, optimizer = make(kind, capturable=True)
    rate = torch.tensor(1e-2, device="cuda")
    for group in optimizer.param_groups:
        group["lr"] = rate
    for p, g in zip(params, gradients(0)):
        p.grad = g.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, steps):
        for p, g in zip(params, gradients(step)):
            p.grad.copy_(g)
        rate.fill_(1e-2 / (step + 1))
        graph.replay()
    eager_params, eager = make(kind)
    for step in range(steps):
        for p, g in zip(eager_params, gradients(step)):
            p.grad = g
        eager.param_groups[0]["lr"] = float(torch.tensor(1e-2 / (step + 1)))
        eager.step()
    assert equal(everything(params, optimizer), everything(eager_params, eager))
    assert all(float(optimizer.state[p]["step"]) == steps for p in params)


def test_a_capture_without_capturable_is_refused_and_changes_nothing() -> None:
    params, optimizer = make("AdamW8bit")
    for p, g in zip(params, gradients(0)):
        p.grad = g
    optimizer.step()
    before = everything(params, optimizer)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="capturable=True"):
            optimizer.step()
        graph.capture_end()
    torch.cuda.synchronize()
    assert equal(before, everything(params, optimizer))


def profiled(run: Callable[[], Any]) -> list[Any]:
    """Host events within the step, and everything on the device; the profiler synchronises on its own around it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
    torch.cuda.synchronize()
    events = list(profile.events())
    on_device = torch.autograd.DeviceType.CUDA
    step = next(
        e for e in events if e.name.startswith("Optimizer.step#") and e.device_type != on_device
    ).time_range
    return [
        e for e in events
        if e.device_type == on_device or (step.start <= e.time_range.start and e.time_range.end <= step.end)
    ]  # fmt: skip


def test_a_step_launches_one_kernel_a_bucket_and_waits_for_nothing() -> None:
    params = [
        torch.nn.Parameter(torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)) for _ in range(300)
    ]
    params += [torch.nn.Parameter(torch.randn(64, device="cuda")) for _ in range(40)]
    optimizer = bnb_fsdp.AdamW8bit(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    events = profiled(optimizer.step)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated, (
        "a step allocated device memory"
    )
    names = [event.name for event in events]
    assert not [n for n in names if "Synchronize" in n or "Memcpy" in n or "Memset" in n or "cudaMalloc" in n]
    kernels = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    ours = [n for n in kernels if "bnb_fsdp" in n]
    assert len(ours) == 2, kernels  # 8-bit bfloat16 and 32-bit float32
    assert [n for n in kernels if "bnb_fsdp" not in n and "Optimizer.step" not in n] == []


def test_bitsandbytes_synchronises_for_every_parameter() -> None:
    """The count above can fail: what it counts is there in upstream's step."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    params = [torch.nn.Parameter(torch.randn(64, 128, device="cuda")) for _ in range(5)]
    optimizer = bitsandbytes.optim.AdamW8bit(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    names = [event.name for event in profiled(optimizer.step)]
    assert len([n for n in names if "Synchronize" in n]) >= 5


def test_more_tensors_than_fit_the_launch_parameters() -> None:
    count = 3500
    params = [torch.nn.Parameter(torch.randn(512, device="cuda")) for _ in range(count)]
    start = [p.detach().clone() for p in params]
    groups = [{"params": params[i::40], "lr": 1e-3 * (i + 1)} for i in range(40)]
    optimizer = bnb_fsdp.AdamW8bit(groups, min_8bit_size=0)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = None if i % 7 == step else torch.full_like(p, 0.1 + i % 13)
        optimizer.step()
    for i in (0, 1, 6, 39, 40, 1535, 1536, 1537, 3071, 3072, count - 1):
        alone = torch.nn.Parameter(start[i])
        single = bnb_fsdp.AdamW8bit([alone], lr=1e-3 * (i % 40 + 1), min_8bit_size=0)
        for step in range(3):
            alone.grad = None if i % 7 == step else torch.full_like(alone, 0.1 + i % 13)
            single.step()
        assert torch.equal(alone, params[i]), i
        for key, value in single.state[alone].items():
            assert torch.equal(value, optimizer.state[params[i]][key]), (i, key)


def test_a_learning_rate_on_the_device_is_not_read_on_the_host() -> None:
    params, optimizer = make("AdamW8bit")
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2, device="cuda")
    for p, g in zip(params, gradients(0)):
        p.grad = g
    optimizer.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference, other = make("AdamW8bit")
    for p, g in zip(reference, gradients(0)):
        p.grad = g
    other.param_groups[0]["lr"] = float(torch.tensor(1e-2))
    other.step()
    other.step()
    assert equal(everything(params, optimizer), everything(reference, other))


def test_tables_live_until_their_stream_is_done_with_them() -> None:
    """The plan is dropped, and its memory asked for again, while the step has not started yet."""
    expected = serial("AdamW8bit", 2)
    params, optimizer = make("AdamW8bit")
    for p, g in zip(params, gradients(0)):
        p.grad = g
    optimizer.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for p, g in zip(params, gradients(1)):
            p.grad.copy_(g)
        torch.cuda._sleep(5 * CYCLES)
        optimizer.step()
    optimizer._plan = None
    gc.collect()
    rubbish = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in [65_536, 262_144] * 100]
    torch.cuda.synchronize()
    del rubbish
    assert equal(everything(params, optimizer), expected)


def _bucket(numel: int = 512, **key: Any) -> Any:
    p = torch.randn(numel, device="cuda")
    states = tuple(torch.zeros(numel, dtype=torch.uint8, device="cuda") for _ in range(2))
    absmax = tuple(torch.zeros(numel // 256, device="cuda") for _ in range(2))
    slot = Slot("p", 0, p, states, absmax, torch.zeros(()))
    values = {
        "rule": "adam",
        "bits": 8,
        "parameter_dtype": p.dtype,
        "gradient_dtype": p.dtype,
        "device": p.device,
    }
    return cuda.CudaBucket(BucketKey(**(values | key)), [slot]), slot


def test_a_failed_launch_raises_and_the_process_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, slot = _bucket()
    hyper = Hyper(1e-3, 0.9, 0.999, eps=1e-8)
    before = slot.parameter.clone()
    gradient = torch.ones_like(before)
    # On a stream whose capture was invalidated, by a synchronise, every launch is an error.
    broken = torch.cuda.Stream()
    torch.cuda.synchronize()
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    stream, graph, relaxed = ctypes.c_void_p(broken.cuda_stream), ctypes.c_void_p(), 2
    assert runtime.cudaStreamBeginCapture(stream, relaxed) == 0
    assert runtime.cudaStreamSynchronize(stream) != 0
    monkeypatch.setattr(cuda, "raw_stream", lambda index: broken.cuda_stream)
    with pytest.raises(
        RuntimeError, match=r"adam step \(8-bit, torch.float32 parameters.*cuda:0.*512.*cudaError"
    ):
        bucket.run([gradient], [hyper])
    monkeypatch.undo()
    runtime.cudaStreamEndCapture(stream, ctypes.byref(graph))
    runtime.cudaGetLastError()
    assert torch.equal(slot.parameter, before) and float(slot.step) == 0
    bucket.run([gradient], [hyper])
    assert not torch.equal(slot.parameter, before) and float(slot.step) == 1


def test_an_unknown_kernel_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="no kernel for rule frobnicate"):
        _bucket(rule="frobnicate")


def test_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cuda.library()
    assert library.set_kernels(b"fastest") != 0
    assert "choose auto or portable" in library.last_error()


@pytest.fixture
def portable() -> Iterator[None]:
    cuda.library().set_kernels(b"portable")
    yield
    cuda.library().set_kernels(b"auto")


@pytest.mark.parametrize("kind", KINDS)
def test_portable_kernels_give_the_same_bits(kind: str, portable: None) -> None:
    result = serial(kind, 3)
    cuda.library().set_kernels(b"auto")
    assert equal(result, serial(kind, 3))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_optimizer_on_several_devices() -> None:
    params = [torch.nn.Parameter(torch.randn(64, 128).to(f"cuda:{i % 2}")) for i in range(6)]
    start = [p.detach().cpu() for p in params]
    optimizer = bnb_fsdp.AdamW8bit(params, lr=1e-2)
    torch.cuda.set_device(0)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 0.5 + i + step)
        optimizer.step()
        assert torch.cuda.current_device() == 0
    for i, p in enumerate(params):
        alone = torch.nn.Parameter(start[i].to("cuda:0"))
        single = bnb_fsdp.AdamW8bit([alone], lr=1e-2)
        for step in range(3):
            alone.grad = torch.full_like(alone, 0.5 + i + step)
            single.step()
        assert torch.equal(alone.cpu(), p.detach().cpu())
