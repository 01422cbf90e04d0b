"""Gradients whose collective is still in flight when step() is called."""

from __future__ import annotations

import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import bnb_fsdp


def step_with_gradients_in_flight() -> list[bool]:
    device = ranks.device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    equal = []
    for sharded in (False, True):
        results = []
        for in_flight in (True, False):
            torch.manual_seed(0)
            start = torch.randn(8192, device=device)
            before = start.clone()
            mine = torch.full((8192,), float(dist.get_rank() + 1), device=device)
            if sharded:
                start = DTensor.from_local(start, mesh, [Replicate()])
                partial = DTensor.from_local(mine, mesh, [Partial()])
                gradient = partial.redistribute(mesh, [Replicate()], async_op=in_flight)
            else:
                gradient = funcol.all_reduce(mine, "sum", mesh)
                if not in_flight:
                    gradient = gradient.wait()
            parameter = nn.Parameter(start)
            parameter.grad = gradient
            optimizer = bnb_fsdp.AdamW8bit([parameter], lr=0.1)
            optimizer.step()
            local = parameter.to_local() if sharded else parameter
            results.append(local.detach().clone())
            # The summed gradient is positive everywhere: every parameter went down by lr.
            equal.append(bool(((before - local.detach()) > 0.09).all()))
        equal.append(torch.equal(*results))
    return equal


def test_gradients_in_flight_are_waited_for() -> None:
    for result in ranks.run(2, step_with_gradients_in_flight):
        assert len(result) == 6 and all(result)
