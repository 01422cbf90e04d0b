"""`use_native_kernels`: bitsandbytes' own optimizers on this package's kernels."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from bnb_fsdp.backends import native
from bnb_fsdp.integrations import bitsandbytes as integration

bitsandbytes = pytest.importorskip("bitsandbytes")

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# name -> (arguments, sizes); AdEMAMix8bit overlaps its scales unless the size is a multiple of 256.
SIZES = (300, 4097, 70_001)
CLASSES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "AdamW8bit": ({"lr": 1e-3}, SIZES),
    "Adam32bit": ({"lr": 1e-3, "weight_decay": 0.1}, SIZES),
    "Lion8bit": ({"lr": 1e-4, "weight_decay": 0.1}, SIZES),
    "Lion32bit": ({"lr": 1e-4}, SIZES),
    "SGD8bit": ({"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, SIZES),
    "SGD32bit": ({"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, SIZES),
    "RMSprop8bit": ({"lr": 1e-3}, SIZES),
    "RMSprop32bit": ({"lr": 1e-3}, SIZES),
    "Adagrad8bit": ({"lr": 1e-2}, SIZES),
    "Adagrad32bit": ({"lr": 1e-2}, SIZES),
    "AdEMAMix8bit": ({"lr": 1e-3, "t_alpha": 20, "t_beta3": 20}, (512, 4096, 65_792)),
    "AdEMAMix": ({"lr": 1e-3}, SIZES),
}


def steps(name: str, dtype: torch.dtype, count: int = 4, **kwargs: Any) -> tuple[list[Any], Any]:
    arguments, sizes = CLASSES.get(name, (kwargs, SIZES))
    params = []
    for size in sizes:
        generator = torch.Generator("cuda").manual_seed(size)
        params.append(torch.nn.Parameter(torch.randn(size, device="cuda", generator=generator).to(dtype)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = getattr(bitsandbytes.optim, name)(params, **arguments)
    for step in range(count):
        for p in params:
            generator = torch.Generator("cuda").manual_seed(p.numel() + step)
            p.grad = torch.randn(p.shape, device="cuda", generator=generator).to(dtype)
        optimizer.step()
    torch.cuda.synchronize()
    return params, optimizer


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_bitsandbytes_optimizers_get_the_same_bits(name: str, dtype: torch.dtype) -> None:
    if (
        dtype == torch.bfloat16
        and name[:3] in ("SGD", "RMS", "Ada")
        and "Adam" not in name
        and "AdEMA" not in name
    ):
        pytest.skip("upstream has no bfloat16 kernel for the small parameters of this class")
    params, optimizer = steps(name, dtype)
    with integration.use_native_kernels():
        ours, native_optimizer = steps(name, dtype)
    for p, q in zip(params, ours):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            other = native_optimizer.state[q][key]
            assert torch.equal(value, other) if torch.is_tensor(value) else value == other, key


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_the_trust_ratio_is_upstreams_to_rounding(name: str) -> None:
    """Upstream sums its norms with atomic additions in any order."""
    kwargs = {"lr": 1e-2, "weight_decay": 0.01} | ({"momentum": 0.9} if name == "LARS" else {})
    params, _ = steps(name, torch.float32, **kwargs)
    with integration.use_native_kernels():
        ours, _ = steps(name, torch.float32, **kwargs)
        again, _ = steps(name, torch.float32, **kwargs)
    for p, q, r in zip(params, ours, again):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)
        assert torch.equal(q, r), "not deterministic"
    start = steps(name, torch.float32, count=0, **kwargs)[0]
    assert all(not torch.equal(p, q) for p, q in zip(start, ours))


@pytest.mark.cuda
@on_cuda
def test_steps_no_longer_synchronise_and_restore_puts_everything_back() -> None:
    _, optimizer = steps("AdamW8bit", torch.float32)
    module = bitsandbytes.optim.optimizer
    upstream = module.sync_gpu

    def synchronises() -> bool:
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        done = torch.cuda.Event()
        done.record()
        optimizer.step()
        return done.query()

    assert synchronises()
    handle = integration.use_native_kernels()
    assert integration.use_native_kernels() is handle
    optimizer.step()  # the maps are looked at once
    assert not synchronises()
    handle.restore()
    handle.restore()
    assert module.sync_gpu is upstream and integration._active is None
    assert synchronises()


@pytest.mark.cuda
@on_cuda
def test_paged_state_keeps_upstreams_kernels() -> None:
    kwargs = {"lr": 1e-3}
    CLASSES["PagedAdamW8bit"] = (kwargs, (200_000,))
    try:
        params, _ = steps("PagedAdamW8bit", torch.float32)
        with integration.use_native_kernels():
            ours, _ = steps("PagedAdamW8bit", torch.float32)
    finally:
        del CLASSES["PagedAdamW8bit"]
    assert torch.equal(params[0], ours[0])


@pytest.mark.cuda
@on_cuda
def test_half_allocated_ademamix_state_is_refused() -> None:
    CLASSES["AdEMAMix32bit"] = ({"lr": 1e-3}, (5000,))
    try:
        with integration.use_native_kernels(), pytest.raises(RuntimeError, match="issues/2075"):
            steps("AdEMAMix32bit", torch.float32)
    finally:
        del CLASSES["AdEMAMix32bit"]


def test_an_unknown_version_is_refused_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = bitsandbytes.optim.optimizer.sync_gpu
    monkeypatch.setattr(bitsandbytes, "__version__", "0.51.0")
    with pytest.raises(
        RuntimeError, match=r"knows the operators of bitsandbytes 0\.50\.2, but 0\.51\.0 is installed"
    ):
        integration.use_native_kernels()
    assert bitsandbytes.optim.optimizer.sync_gpu is upstream and integration._active is None


def test_a_missing_library_is_told_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from bnb_fsdp.backends import cuda

    def missing() -> Any:
        raise native.LibraryError("the native library libbnb_fsdp_cuda.so is missing")

    upstream = bitsandbytes.optim.optimizer.sync_gpu
    monkeypatch.setattr(cuda, "library", missing)
    with pytest.raises(RuntimeError, match=r"libbnb_fsdp_cuda\.so is missing"):
        integration.use_native_kernels()
    assert bitsandbytes.optim.optimizer.sync_gpu is upstream and integration._active is None
