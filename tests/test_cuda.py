"""The optimizer classes on a CUDA device: the native kernels beside bitsandbytes' classes, bit for bit, and the torch
backend beside the CPU. Kernel by kernel: test_cuda_parity.py; streams, graphs, errors: test_cuda_streams.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bnb_fsdp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLASSES = {
    "AdamW8bit": dict(lr=1e-3, weight_decay=0.01),
    "AdamW32bit": dict(lr=1e-3, weight_decay=0.01),
    "Lion8bit": dict(lr=1e-3, weight_decay=0.01),
    "Lion32bit": dict(lr=1e-3, weight_decay=0.01),
}
SIZES = (4097, 65_793, 2**20 + 13)
STEPS = 4


def gradient(size: int, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + size)
    spread = 10 ** (6 * torch.rand(size, generator=generator) - 6)
    return (torch.randn(size, generator=generator) * spread).to(dtype)


def parameters(dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device, dtype))
        for n in SIZES
    ]


def run(optimizer: Any, params: list[torch.nn.Parameter], steps: int = STEPS) -> None:
    for step in range(steps):
        for p in params:
            p.grad = gradient(p.numel(), step, p.dtype).to(p.device)
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CLASSES)
def test_torch_backend_on_the_device_equals_the_cpu_bit_for_bit(name: str, dtype: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        params = parameters(DTYPES[dtype], device)
        optimizer = getattr(bnb_fsdp, name)(
            params, backend="torch" if device == "cuda" else None, **CLASSES[name]
        )
        run(optimizer, params)
        results.append(
            {
                f"{key} of {p.numel()}": tensor.cpu()
                for p in params
                for key, tensor in (("parameter", p.detach()), *optimizer.state[p].items())
            }
        )
    assert set(results[0]) == set(results[1])
    for key, a in results[0].items():
        differing = a != results[1][key]
        assert not differing.any(), f"{key}: {a[differing][:3]} and {results[1][key][differing][:3]}"


def excess(a: Tensor, b: Tensor, lr: float) -> float:
    """Largest difference beyond two units in the last place (update and decay round once each) and 1e-4 of lr.

    bitsandbytes computes 1 - beta2**t from an approximate power: at the first step 6e-8 of 1e-3, and so the step size
    with a relative error of some 3e-5.
    """
    x, y = a.detach().double(), b.detach().double()
    eps = torch.finfo(a.dtype).eps
    return float(((x - y).abs() - 2 * eps * torch.maximum(x.abs(), y.abs()) - 1e-4 * lr).max())


def beside_bitsandbytes(
    name: str, dtype: str, steps: int, backend: str = "torch"
) -> Iterator[tuple[Tensor, Any, Tensor, Any]]:
    """(parameter, state, their parameter, their state) after the same steps with the class of either package."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    ours, theirs = parameters(DTYPES[dtype], "cuda"), parameters(DTYPES[dtype], "cuda")
    optimizer = getattr(bnb_fsdp, name)(ours, backend=backend, **CLASSES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = getattr(bitsandbytes.optim, name)(theirs, **CLASSES[name])
        run(reference, theirs, steps)
    run(optimizer, ours, steps)
    for p, q in zip(ours, theirs):
        yield p, optimizer.state[p], q, reference.state[q]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CLASSES)
def test_native_kernels_equal_bitsandbytes_bit_for_bit(name: str, dtype: str) -> None:
    for p, mine, q, other in beside_bitsandbytes(name, dtype, STEPS, "cuda"):
        assert torch.equal(p, q), f"parameter of {p.numel()}"
        for key in set(mine) - {"step"}:
            assert torch.equal(mine[key], other[key]), f"{key} of {p.numel()}"
        assert float(mine["step"]) == other["step"] == STEPS


def test_the_native_backend_is_the_default() -> None:
    params = parameters(torch.float32, "cuda")
    optimizer = bnb_fsdp.AdamW8bit(params)
    assert {row.backend for row in bnb_fsdp.describe(optimizer).rows} == {"cuda"}


def test_state_on_another_device_is_refused_before_anything_changes() -> None:
    params = parameters(torch.float32, "cuda")
    optimizer = bnb_fsdp.AdamW8bit(params)
    run(optimizer, params, 1)
    optimizer.state[params[1]]["state1"] = optimizer.state[params[1]]["state1"].cpu()
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="state1 is on cpu but the parameter is on cuda:0"):
        optimizer.step()
    assert all(torch.equal(a, p) for a, p in zip(before, params))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CLASSES)
def test_strided_tensors_and_gradients_of_another_dtype(name: str, dtype: str) -> None:
    """A channels-last parameter, a transposed one, one that starts between 16-byte boundaries, an empty one; gradients
    of all dtypes: what the CPU backend computes with exact instead of approximate divisions."""
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, generator: torch.Generator = generator, device: str = device) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, DTYPES[dtype])

        odd = torch.empty(5001, dtype=DTYPES[dtype], device=device)[1:].copy_(draw(5000))
        tensors = [
            draw(8, 16, 7, 9).to(memory_format=torch.channels_last), draw(100, 77).t(), odd, draw(0, 5), draw(3)
        ]  # fmt: skip
        params = [torch.nn.Parameter(t) for t in tensors]
        optimizer = getattr(bnb_fsdp, name)(params, **CLASSES[name])
        for gradient_dtype in DTYPES.values():
            for p in params:
                p.grad = None
                g = torch.randn(p.shape, generator=generator).to(device)
                p.grad_dtype = gradient_dtype
                p.grad = g.to(gradient_dtype)
            optimizer.step()
        for p, t in zip(params, tensors):
            assert p.data_ptr() == t.data_ptr() and p.stride() == t.stride()
        results.append([p.detach().cpu() for p in params])
    for a, b in zip(*results):
        assert a.numel() == 0 or excess(a, b, 3 * CLASSES[name]["lr"] + 1e-3 * float(a.abs().max())) <= 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CLASSES)
def test_first_step_agrees_with_bitsandbytes_kernels(name: str, dtype: str) -> None:
    """State moments hold no approximate operation, so scales and 32-bit states must be bit-equal; what passes through
    bitsandbytes' approximate reciprocal and power (codes, parameters) may differ a little: see `excess`."""
    for p, mine, q, other in beside_bitsandbytes(name, dtype, 1):
        for key in [k for k in ("absmax1", "absmax2", "state1", "state2") if k in mine]:
            if mine[key].dtype == torch.float32:
                assert torch.equal(mine[key], other[key]), f"{key} of {p.numel()}"
            else:
                differing = (mine[key] != other[key]).double().mean().item()
                assert differing < 1e-3, f"{key} of {p.numel()}: {differing:.2e} of the codes"
        assert excess(p, q, CLASSES[name]["lr"]) <= 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["AdamW32bit", "Lion32bit"])
def test_32_bit_states_stay_equal_to_bitsandbytes_over_steps(name: str, dtype: str) -> None:
    for p, mine, _, other in beside_bitsandbytes(name, dtype, STEPS):
        for key in [k for k in ("state1", "state2") if k in mine]:
            assert torch.equal(mine[key], other[key]), f"{key} of {p.numel()}"
