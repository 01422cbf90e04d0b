"""``step(closure=None)`` at a learning rate of 0: whether it counts, every rank decides alike.

torchtitan asks for state so, with gradients of zeros. A gradient that is not zero makes the step real, on whichever
rank and in whichever parameter it is: if one rank took it for a question, its counts would lag behind, and LAMB's
all-reduce would wait for it. Each world is one run, whose parts the test judges.
"""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bnb_fsdp

KINDS = ("AdamW8bit", "LAMB8bit")
# By world: lists of ranks, each a mesh with a parameter of its own, and how it is placed there.
MESHES: dict[int, dict[str, tuple[list[list[int]], type]]] = {
    2: {"all ranks": ([[0, 1]], Shard), "copies": ([[0, 1]], Replicate)},
    3: {
        "a part and all": ([[0, 1], [0, 1, 2]], Shard),
        "all and a part": ([[0, 1, 2], [0, 1]], Shard),
        "a part and all, copies": ([[0, 1], [0, 1, 2]], Replicate),
    },
    4: {
        "a chain": ([[2, 3], [1, 2], [0, 1]], Shard),
        "a chain the other way": ([[0, 1], [1, 2], [2, 3]], Shard),
    },
}
PLACES = ("nowhere", "a plain parameter of the first rank", "a plain parameter of the last", "the first mesh")


def step(meshes: list[DeviceMesh], cut: type, kind: str, place: str) -> list[float]:
    """Counts of this rank's parameters, one on each mesh and a plain one, after a step with one number in ``place``."""
    params = []
    for mesh in meshes:
        whole = torch.ones(12, 512, device=ranks.device())
        placement = Shard(0) if cut is Shard else Replicate()
        params.append(nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None)))
    params.append(nn.Parameter(torch.ones(5000, device=ranks.device())))
    for p in params:
        p.grad = torch.zeros_like(p)
    rank = dist.get_rank()
    if place == PLACES[3] and meshes[0].get_coordinate() is not None:
        params[0].grad.to_local().view(-1)[7] = 1.0
    elif (place, rank) in ((PLACES[1], 0), (PLACES[2], dist.get_world_size() - 1)):
        params[-1].grad[7] = 1.0
    optimizer = getattr(bnb_fsdp, kind)(params, lr=0.0)
    optimizer.step(closure=None)
    return [float(optimizer.state[p]["step"]) for p in params]


def everything(world: int) -> dict[tuple[str, str, str], list[float]]:
    found = {}
    for name, (groups, cut) in MESHES[world].items():
        meshes = [DeviceMesh(ranks.device().type, group) for group in groups]
        for kind in KINDS:
            for place in PLACES:
                found[name, kind, place] = step(meshes, cut, kind, place)
    return found


@pytest.mark.parametrize("world", MESHES)
def test_ranks_agree_whether_a_step_only_asks_for_state(world: int) -> None:
    everywhere = ranks.run(world, everything, world, timeout=150)
    wrong = [
        (rank, *case, steps)
        for rank, found in enumerate(everywhere)
        for case, steps in found.items()
        if set(steps) != {0.0 if case[-1] == "nowhere" else 1.0}
    ]
    assert wrong == []
