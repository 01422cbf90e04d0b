"""AdEMAMix, LAMB and LARS on a CUDA device: beside bitsandbytes' kernels where those are right, else beside the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bnb_fsdp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = (4096, 65_536, 2**20 + 256)  # multiples of 256: else bitsandbytes' AdEMAMix8bit overlaps scales
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADEMAMIX = dict(lr=1e-3, t_alpha=6, t_beta3=6, weight_decay=0.01)
CLIPPED = {
    "LAMB": dict(lr=1e-2, weight_decay=0.1, max_unorm=0.03),
    "LARS": dict(lr=1e-1, momentum=0.9, weight_decay=0.01),
}
PUBLISHED = {
    "LAMB": dict(lr=1e-2, weight_decay=0.1, trust_ratio="published"),
    "LARS": dict(lr=1e-1, momentum=0.9, weight_decay=0.01, max_unorm=0.001, trust_ratio="published"),
}


def parameters(dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    result = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in SIZES]
    return [nn.Parameter(value.to(device, dtype)) for value in result]


def run(optimizer: Any, params: list[nn.Parameter], steps: int = 8, absent: bool = False) -> None:
    for step in range(steps):
        for index, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + p.numel())
            g = torch.randn(p.numel(), generator=generator).to(p.device, p.dtype)
            p.grad = None if absent and (step + index) % 3 == 0 else g
        optimizer.step()


def both(cls: Any, reference: Any, dtype: torch.dtype, arguments: dict[str, Any], **kwargs: Any) -> Any:
    ours, theirs = parameters(dtype, "cuda"), parameters(dtype, "cuda")
    optimizer = cls(ours, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upstream = reference(theirs, **arguments)
        run(upstream, theirs, **kwargs)
    run(optimizer, ours, **kwargs)
    return ours, optimizer, theirs, upstream


@pytest.mark.parametrize("absent", [False, True], ids=["every step", "some gradients absent"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ["8bit", ""])
def test_scheduled_ademamix_equals_bitsandbytes_bit_for_bit(bits: str, dtype: str, absent: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    name = "AdEMAMix" + bits
    ours, optimizer, theirs, upstream = both(
        getattr(bnb_fsdp, name), getattr(bitsandbytes.optim, name), DTYPES[dtype], ADEMAMIX, absent=absent
    )
    for p, q in zip(ours, theirs):
        mine, yours = optimizer.state[p], upstream.state[q]
        assert torch.equal(p, q)
        assert torch.equal(mine["state1"], yours["state1"][0]) and torch.equal(
            mine["state3"], yours["state1"][1]
        )
        assert torch.equal(mine["state2"], yours["state2"])
        if bits:
            assert torch.equal(torch.stack([mine["absmax1"], mine["absmax3"]]), yours["absmax1"])
            assert torch.equal(mine["absmax2"], yours["absmax2"])
        assert float(mine["step"]) == yours["step"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_32_bit_updates_follow_bitsandbytes(name: str, dtype: str) -> None:
    """Upstream sums its norms with atomic additions in any order, so parameters agree to rounding, states exactly."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    ours, optimizer, theirs, upstream = both(
        getattr(bnb_fsdp, name + "32bit"),
        getattr(bitsandbytes.optim, name + "32bit"),
        DTYPES[dtype],
        CLIPPED[name],
        steps=4,
    )
    eps = torch.finfo(DTYPES[dtype]).eps
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=4 * eps, atol=4e-6 if dtype == "float32" else 4 * eps)
        if name == "LAMB":  # LARS' momentum has the decay of the parameter in it
            assert torch.equal(optimizer.state[p]["state1"], upstream.state[q]["state1"])


@pytest.mark.parametrize("rules", [CLIPPED, PUBLISHED], ids=["bitsandbytes", "published"])
@pytest.mark.parametrize("bits", ["8bit", "32bit"])
@pytest.mark.parametrize("name", CLIPPED)
def test_trust_ratios_are_those_of_the_cpu(name: str, bits: str, rules: dict[str, Any]) -> None:
    results = []
    for device in ("cpu", "cuda"):
        params = parameters(torch.float32, device)
        params.append(nn.Parameter(torch.zeros(5000, device=device)))  # moves all the same
        optimizer = getattr(bnb_fsdp, name + bits)(params, **rules[name])
        run(optimizer, params, steps=3)
        assert params[-1].abs().max() > 0
        results.append([p.detach().cpu() for p in params])
    start = [p.detach() for p in parameters(torch.float32, "cpu")] + [torch.zeros(5000)]
    for cpu, cuda, old in zip(*results, start):
        # 8-bit codes may differ by one where the approximate division falls on the other side of a threshold.
        tolerance = 2e-3 if bits == "8bit" else 2e-5
        assert (cpu - cuda).abs().max() <= tolerance * max(1.0, float(cpu.abs().max()))
        # 1 - beta**t is made with an approximate power there, of which 1e-4 is left over when beta is near 1.
        assert (cpu - cuda).norm() <= 0.05 * tolerance * cpu.norm() + 1e-4 * (cpu - old).norm()


def test_a_lamb_step_waits_for_nothing() -> None:
    params = parameters(torch.bfloat16, "cuda")
    optimizer = bnb_fsdp.LAMB8bit(params, lr=1e-3)
    run(optimizer, params, steps=2)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
