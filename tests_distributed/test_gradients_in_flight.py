"""Gradients whose collective is still in flight when step() is called.

One rank joins the collective half a second after the other has begun its step: an optimizer that does not wait takes
the other's own part for the sum, and the two have opposite signs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import bnb_fsdp
from bnb_fsdp.backends.gather import Gatherer

SIZES = {8: 8192, 32: 300}
LR = 0.1
# Of each step: the rank that joins late. At the first a plan is made; from the second on the native look comes first,
# which takes the third's gradients, with nothing in flight, and has to decline the others.
LATE = (1, 0, None, 1, 0)


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@contextmanager
def recorded(looks: list[int | None]) -> Iterator[None]:
    """Adds what native looks return meanwhile: a number of gradients, or None where they leave it to Python."""
    original = Gatherer.gather

    def gather(gatherer: Gatherer, *args: Any) -> int | None:
        looks.append(original(gatherer, *args))
        return looks[-1]

    Gatherer.gather = gather  # type: ignore[method-assign]
    try:
        yield
    finally:
        Gatherer.gather = original  # type: ignore[method-assign]


def steps(flags: str) -> dict[str, Any]:
    """Plain and replicated parameters, whose gradients add up to -2 everywhere, beside twins that are given -2."""
    device, rank = ranks.device(), dist.get_rank()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    store = dist.FileStore(flags, dist.get_world_size())
    plain = [nn.Parameter(torch.zeros(size, device=device)) for size in SIZES.values()]
    sharded = [nn.Parameter(DTensor.from_local(torch.zeros_like(p), mesh, [Replicate()])) for p in plain]
    twins = [nn.Parameter(torch.zeros_like(p)) for p in plain]
    optimizer = bnb_fsdp.AdamW8bit([*plain, *sharded], lr=LR, weight_decay=0.0)
    twin_optimizer = bnb_fsdp.AdamW8bit(twins, lr=LR, weight_decay=0.0)
    problems: list[str] = []
    looks: list[int | None] = []
    for step, late in enumerate(LATE):
        dist.barrier()
        if late == rank:
            store.wait([f"step {step}"])
            time.sleep(0.5)
        mine = -3.0 if late == rank or (late is None and rank == 0) else 1.0
        for p, q in zip(plain, sharded):
            p.grad = funcol.all_reduce(torch.full_like(p, mine), "sum", mesh)
            partial = DTensor.from_local(torch.full_like(p, mine), mesh, [Partial()])
            q.grad = partial.redistribute(mesh, [Replicate()], async_op=True)
            if late is None:
                p.grad, q.grad = p.grad.wait(), partial.redistribute(mesh, [Replicate()])
            elif not all(isinstance(local(x.grad), AsyncCollectiveTensor) for x in (p, q)):
                problems.append(f"step {step}: nothing is in flight")
        if late is not None and late != rank:
            store.set(f"step {step}", "begins")
        with recorded(looks):
            optimizer.step()
        for twin in twins:
            twin.grad = torch.full_like(twin, -2.0)
        twin_optimizer.step()
        for kind, parameters in (("plain", plain), ("sharded", sharded)):
            for p, twin, bits in zip(parameters, twins, SIZES):
                label = f"step {step}, {kind}, {bits} bits"
                # A constant gradient moves every element by the learning rate, but for the rounding of 8-bit state.
                if not torch.allclose(local(p), torch.full_like(twin, LR * (step + 1)), rtol=0.01):
                    problems.append(f"{label}: {float(local(p)[0])}, not {LR * (step + 1)}")
                state, expected = optimizer.state[p], twin_optimizer.state[twin]
                pairs = [(local(p), twin), *((state[key], expected[key]) for key in expected)]
                if set(state) != set(expected) or not all(torch.equal(a, b) for a, b in pairs):
                    problems.append(f"{label}: differs from that of a gradient that is there")
    return {"problems": problems, "looks": looks}


def test_gradients_in_flight_are_waited_for(tmp_path: Path) -> None:
    native = hasattr(Tensor, "__dlpack_c_exchange_api__")  # without it there is no native look
    for result in ranks.run(2, steps, str(tmp_path / "flags")):
        assert result["problems"] == []
        assert result["looks"] == ([None, 4, None, None] if native else [])
