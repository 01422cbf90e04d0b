"""What FSDP2 users combine: offloading with replicas, mixed optimizers, meshes by parameter, gradients of other dtypes.

Beside what test_fsdp2_features.py has one by one. A parameter's step is compared, bit for bit and with complete state,
with what the rules make of its plain local tensor; on a GPU, with that tensor in an optimizer of its own (see
test_local_shards.py). LAMB, whose norms are of whole tensors, is compared with a plain optimizer on those. Each world
is one run of `everything`, which the test below judges case by case; a case returns what was wrong, or why torch lacks
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_fsdp2_features import Block, Whole, batch, blocks, local, loss_of, shard, train
from test_local_shards import Weighted, different, expected_step, fresh_state, plain_step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bnb_fsdp

STEPS = 4
Problems = list[str]


def on_gpus() -> bool:
    return bool(ranks.device().type == "cuda")


def offload() -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=on_gpus())


def bits_of(kind: str, p: Tensor) -> int:
    """By the global size, if no override says otherwise."""
    return 8 if p.numel() >= 4096 and kind.endswith("8bit") else 32


class Alone:
    """An optimizer beside what the rules make of each parameter's local tensor, given its bits and all its settings."""

    def __init__(
        self, optimizer: Any, kind: str, parameters: Iterable[tuple[nn.Parameter, int, dict[str, Any]]]
    ) -> None:
        self.optimizer = optimizer
        self.kind = kind
        self.rows = list(parameters)
        self.held = [
            {"parameter": on_host(p), **fresh_state(kind, local(p), bits)} for p, bits, _ in self.rows
        ]
        self.start = [held["parameter"] for held in self.held]
        self.moved: set[int] = set()
        self.steps = 0
        self.problems: Problems = []

    def step(self) -> None:
        """Step both, and note what differs."""
        gradients = [None if p.grad is None else on_host(p.grad) for p, *_ in self.rows]
        self.optimizer.step()
        self.steps += 1
        for index, ((p, _, settings), gradient) in enumerate(zip(self.rows, gradients)):
            old = dict(self.held[index])
            if gradient is not None:
                oracle = plain_step if local(p).device.type == "cuda" else expected_step
                self.held[index] = oracle(self.kind, settings, old.pop("parameter"), gradient, old)
            expected, found = self.held[index], {"parameter": p, **self.optimizer.state[p]}
            label = f"step {self.steps}, parameter {index} of {tuple(p.shape)}"
            if set(found) != set(expected):
                self.problems.append(f"{label}: {sorted(found)}, expected {sorted(expected)}")
            for key in set(found) & set(expected):
                wrong = different(on_host(found[key]), expected[key])
                if wrong or (key != "parameter" and isinstance(found[key], DTensor)):
                    self.problems.append(f"{label}: {key} differs ({wrong} bytes)")
            if local(p).numel() and not torch.equal(on_host(p), self.start[index]):
                self.moved.add(index)
        self.optimizer.zero_grad()

    def report(self, losses: list[float] | None = None, still: Tensor | None = None) -> Problems:
        """Problems, among them a run that proved nothing or did not train. ``still`` is the one parameter to stay."""
        found = list(self.problems)
        for index, (p, *_) in enumerate(self.rows):
            if local(p).numel() and (index in self.moved) == (p is still):
                found.append(f"parameter {index} {'moved' if p is still else 'never moved'}")
        if self.steps < 2:
            found.append(f"{self.steps} steps")
        if losses is not None and not losses[-1] < losses[0]:
            found.append(f"the loss did not fall: {losses}")
        return found


def on_host(tensor: Tensor) -> Tensor:
    """A copy of the local tensor."""
    return local(tensor).to("cpu", copy=True)


SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW8bit": dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    "AdamW32bit": dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    "Lion8bit": dict(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
    "LAMB8bit": dict(lr=1e-2, weight_decay=0.1, max_unorm=0.5),
    "LAMB32bit": dict(lr=1e-2, weight_decay=0.1, max_unorm=0.5),
}


def square() -> DeviceMesh:
    return init_device_mesh(ranks.device().type, (2, 2), mesh_dim_names=("replicate", "shard"))


# Padding

# Shards of 17 and 16 rows on two ranks, of 9, 9, 9 and 6 on four; of one row; of one and none.
PADDED = ((33, 700), (33,), (5, 3), (1, 5000))
SENTINEL = 1234.5  # no NaN: calculating with one gives the same bits again


def normal(shape: Iterable[int], seed: int) -> Tensor:
    value = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return value.to(ranks.device())


def behind(p: Tensor) -> Tensor:
    """FSDP2's padding: what follows the elements of a local shard (float32) in its storage."""
    assert local(p).storage_offset() == 0 and local(p).is_contiguous() and p.dtype == torch.float32
    everything = torch.empty(0, device=local(p).device).set_(local(p).untyped_storage())
    return everything[local(p).numel() :]


def padding(kind: str) -> Problems:
    """FSDP2 pads the shards of uneven rows to one size. No step touches what lies behind the local elements."""
    model = Weighted(list(PADDED), torch.float32).to(ranks.device())
    parameters = list(fully_shard(model).parameters())
    optimizer = getattr(bnb_fsdp, kind)(parameters, **SETTINGS[kind])
    alone = None  # LAMB's step is no matter of the shard alone
    if not kind.startswith("LAMB"):
        alone = Alone(optimizer, kind, [(p, bits_of(kind, p), SETTINGS[kind]) for p in parameters])
    for p in parameters:
        behind(p).fill_(SENTINEL)
    padded = torch.tensor([sum(behind(p).numel() for p in parameters)], device=ranks.device())
    start = [on_host(p) for p in parameters]
    problems = []
    for step in range(STEPS):
        model(step).backward()
        if alone is not None:
            alone.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        for p in parameters:
            if not bool((behind(p) == SENTINEL).all()):
                problems.append(f"step {step}, {tuple(p.shape)}: the padding was written")
    if any(torch.equal(on_host(p), s) for p, s in zip(parameters, start) if s.numel()):
        problems.append("a parameter never moved")
    dist.all_reduce(padded)
    if int(padded) == 0:
        problems.append("no rank has any padding")
    return problems + (alone.report() if alone is not None else [])


# CPUOffloadPolicy


def all_on_cpu(optimizer: Any, parameters: Iterable[nn.Parameter]) -> Problems:
    """Parameters and state in host memory, the mesh on the device of the ranks."""
    parameters = list(parameters)
    held = [v for p in parameters for v in (local(p), *optimizer.state[p].values())]
    if {tensor.device.type for tensor in held} != {"cpu"}:
        return ["parameters or state are not on the CPU"]
    meshes = {p.device_mesh.device_type for p in parameters}
    return [] if meshes == {ranks.device().type} else [f"meshes on {meshes}"]


def offloaded_replicas(kind: str) -> Problems:
    """HSDP whose parameters are in host memory: each step is the plain one, and replicas stay equal."""
    mesh, problems = square(), []
    model = shard(blocks(), mesh=mesh, offload_policy=offload())
    parameters = list(model.parameters())
    optimizer = getattr(bnb_fsdp, kind)(parameters, **SETTINGS[kind])
    alone = Alone(optimizer, kind, [(p, bits_of(kind, p), SETTINGS[kind]) for p in parameters])
    losses = []
    for step in range(8):
        losses += train(model, alone, 1)
        held = [v for p in parameters for v in (local(p), *optimizer.state[p].values())]
        mine = torch.cat([v.contiguous().flatten().view(torch.uint8) for v in held]).to(ranks.device())
        first = mine.clone()
        dist.broadcast(first, group=mesh.get_group("replicate"), group_src=0)
        if not torch.equal(mine, first):
            problems.append(f"step {step}: replicas differ")
    if {p.placements for p in parameters} != {(Replicate(), Shard(0))}:
        problems.append("this is not HSDP")
    return problems + alone.report(losses) + all_on_cpu(optimizer, parameters)


class Heads(nn.Module):
    """Rows of 256, so that blocks are those of whole tensors: 37 uneven ones, 16 with 4,096 elements together, one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(256, rows) for rows in (37, 16, 1))
        for head in self.heads:  # or the norm of one rank's rows would nearly be that of another's
            head.weight.data.mul_(torch.linspace(0.1, 4, len(head.weight))[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x.repeat(1, 4)) for head in self.heads], 1)


def offloaded_norms(kind: str, ratio: dict[str, Any]) -> Problems:
    """LAMB's sums are of host memory, and reduced where the mesh is."""
    model = Heads().to(ranks.device())
    for head in model.heads:
        fully_shard(head, offload_policy=offload())
    fully_shard(model, offload_policy=offload())
    parameters = list(model.parameters())
    settings = dict(lr=2e-2, weight_decay=0.1, **ratio)
    optimizer = getattr(bnb_fsdp, kind)(parameters, **settings)
    whole = Whole(optimizer, kind, parameters, **settings)
    losses = []
    for _ in range(STEPS):
        loss = (model(batch()[0]) - 1).square().mean()
        loss.backward()
        losses.append(float(loss))
        whole.step()
    found = {optimizer.state[p]["state1"].dtype for p in parameters}
    problems = [] if found == {torch.uint8, torch.float32} else [f"state is {found}"]
    return problems + whole.report(losses) + all_on_cpu(optimizer, parameters)


# What only some versions of torch have


def mesh_by_parameter(kind: str) -> Problems | str:
    """One group of fully_shard whose parameters are sharded over all ranks, over two of them, or twice over two."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            HSDPMeshInfo,
            ShardPlacementResult,
        )
    except ImportError:
        return "shard_placement_fn of this torch places every parameter on one mesh"
    line, plane = init_device_mesh(ranks.device().type, (4,)), square()
    pair = FSDPMeshInfo(mesh=plane["shard"], shard_mesh_dim=0)
    copies = HSDPMeshInfo(mesh=plane, shard_mesh_dim=1, replicate_mesh_dim=0)
    model, problems = blocks(), []
    wide = {id(block.up.weight) for block in model}
    copied = {id(p) for block in model for p in block.down.parameters()}

    def place(p: nn.Parameter) -> Any:
        if id(p) in wide:
            return ShardPlacementResult(placement=Shard(1), mesh_info=pair)
        return ShardPlacementResult(placement=Shard(0), mesh_info=copies) if id(p) in copied else None

    for block in model:
        fully_shard(block, mesh=line, shard_placement_fn=place)
    parameters = list(fully_shard(model, mesh=line).parameters())
    optimizer = getattr(bnb_fsdp, kind)(parameters, **SETTINGS[kind])
    if kind.startswith("LAMB"):
        twins: Alone | Whole = Whole(optimizer, kind, parameters, **SETTINGS[kind])
    else:
        twins = Alone(optimizer, kind, [(p, bits_of(kind, p), SETTINGS[kind]) for p in parameters])
    losses = train(model, twins)
    found = {(p.device_mesh.shape, tuple(map(str, p.placements))) for p in parameters}
    wanted = {((4,), (Shard(0),)), ((2,), (Shard(1),)), ((2, 2), (Replicate(), Shard(0)))}
    if found != {(shape, tuple(map(str, placements))) for shape, placements in wanted}:
        problems.append(f"meshes and placements {found}")
    return problems + twins.report(losses)


class Modalities(nn.Module):
    """Each rank uses one of two blocks; a third is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.spare = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.odd if dist.get_rank() % 2 else self.even)(x)
        return result


def unused_parameters(kind: str) -> Problems | str:
    """set_reduce_scatter_unused_params: a rank adds zeros for what it did not use, and all ranks step everything."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return "this torch has no set_reduce_scatter_unused_params"
    torch.manual_seed(0)
    model = Modalities().to(ranks.device())
    torch.manual_seed(0)
    plain = Modalities().to(ranks.device())
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    parameters = list(model.parameters())
    optimizer = getattr(bnb_fsdp, kind)(parameters, **SETTINGS[kind])
    alone = Alone(optimizer, kind, [(p, bits_of(kind, p), SETTINGS[kind]) for p in parameters])
    problems, losses = [], []
    for step in range(STEPS):
        loss = loss_of(model, batch())
        loss.backward()
        losses.append(float(loss))
        if step == 0:
            loss_of(plain, batch()).backward()
            for index, (p, q) in enumerate(zip(parameters, plain.parameters())):
                mean = torch.zeros_like(q) if q.grad is None else q.grad
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
                assert p.grad is not None  # on any rank
                if not torch.allclose(p.grad.full_tensor(), mean, rtol=1e-3, atol=1e-6):
                    problems.append(f"the gradient of parameter {index} is not the mean over the ranks")
        alone.step()
    if {int(optimizer.state[p]["step"]) for p in parameters} != {STEPS}:
        problems.append("a parameter was left out of a step")
    # Zero gradients leave nothing but the decay, once a step.
    factor = (1 - SETTINGS[kind]["lr"] * SETTINGS[kind]["weight_decay"]) ** STEPS
    wanted = plain.spare.up.weight.detach() * factor
    if not torch.allclose(model.spare.up.weight.full_tensor(), wanted, rtol=1e-6):
        problems.append("what no rank used is not decayed alone")
    return problems + alone.report(losses, still=model.spare.norm.bias)


# Dtypes


def other_gradients(kind: str, dtype: torch.dtype, others: tuple[torch.dtype, ...]) -> Problems | str:
    """Shards of ``dtype`` whose gradients are of another, which may change between steps."""
    model = Weighted([(33, 300), (16, 256), (1, 5000), (5,)], dtype).to(ranks.device())
    parameters = list(fully_shard(model).parameters())
    if not hasattr(parameters[0], "grad_dtype"):
        return "this torch ties a gradient's dtype to its parameter's"
    settings = dict(SETTINGS[kind], lr=1e-2)  # or bfloat16 would hardly move
    optimizer = getattr(bnb_fsdp, kind)(parameters, **settings)
    alone = Alone(optimizer, kind, [(p, bits_of(kind, p), settings) for p in parameters])
    for p in parameters:
        p.grad_dtype = None
    found = set()
    for step in range(6):
        for index, p in enumerate(parameters):
            given = normal(p.shape, 10 * (step + 1) + index).to(others[step // 3])
            p.grad = distribute_tensor(given, p.device_mesh, p.placements, src_data_rank=None)
            found.add(local(p.grad).dtype)
        alone.step()
    problems = [] if found == set(others) else [f"gradients of {found}"]
    if {p.dtype for p in parameters} != {dtype}:
        problems.append("parameters changed their dtype")
    return problems + alone.report()


# One optimizer

F32, BF16 = torch.float32, torch.bfloat16
# name -> (shape, dtype, sharded, bits). Rows for all ranks, some, or one; of whole blocks or not; LoRA's of rank 8.
MIXED: dict[str, tuple[tuple[int, ...], torch.dtype, bool, int]] = {
    "embed.weight": ((101, 64), F32, True, 32),  # by override
    "attention.weight": ((70, 96), BF16, True, 8),
    "attention.lora_A": ((8, 96), F32, True, 32),
    "attention.lora_B": ((70, 8), BF16, True, 32),
    "gate.lora_A": ((1, 96), BF16, True, 32),
    "gate.lora_B": ((96, 1), F32, True, 8),  # by override
    "mlp.weight": ((24, 256), F32, True, 8),
    "router.weight": ((1, 5000), BF16, True, 8),
    "scale": ((3,), F32, True, 32),
    "plain.weight": ((65, 64), F32, False, 8),
    "plain.half": ((65, 64), BF16, False, 8),
    "plain.bias": ((65,), BF16, False, 32),
    "head.weight": ((64, 64), F32, True, 8),
    "head.bias": ((64,), F32, True, 32),
}
OVERRIDES = {"embed.*": {"optim_bits": 32}, "gate.lora_B": {"min_8bit_size": 96}}
# Names at even places, counted from 0, are of the second group.
GROUPS: tuple[dict[str, Any], ...] = (
    dict(lr=1e-2, weight_decay=0.1),
    dict(lr=2e-3, weight_decay=0.0, betas=(0.8, 0.95)),
)
ONE_ROW = ("gate.lora_A", "router.weight")


def mixed(kind: str, names: tuple[str, ...]) -> Problems:
    """DTensors of both dtypes and plain tensors, two groups, overrides, small shards, ranks without any element."""
    mesh = init_device_mesh(ranks.device().type, (dist.get_world_size(),))

    def made(name: str, step: int) -> Tensor:
        shape, dtype, sharded, _ = MIXED[name]
        value = normal(shape, 1000 * (step + 1) + list(MIXED).index(name)).to(dtype)
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) if sharded else value

    parameters = {name: nn.Parameter(made(name, -1)) for name in names}
    settings = {name: GROUPS[(index + 1) % 2] for index, name in enumerate(names)}
    groups = [
        {"params": [(name, parameters[name]) for name in names if settings[name] is group], **group}
        for group in GROUPS
    ]
    overrides = {key: value for key, value in OVERRIDES.items() if names == tuple(MIXED)}
    optimizer = getattr(bnb_fsdp, kind)(groups, overrides=overrides)
    alone = Alone(
        optimizer,
        kind,
        [(parameters[name], MIXED[name][3], {**SETTINGS[kind], **settings[name]}) for name in names],
    )
    for step in range(STEPS):
        for index, (name, p) in enumerate(parameters.items()):
            # In turn one parameter is without a gradient, as after a skipped part of the model.
            p.grad = None if 0 < step and index == step else made(name, step)
        alone.step()
    problems = alone.report()
    for name, p in parameters.items():
        eight = optimizer.state[p]["state1"].dtype is torch.uint8
        if eight != (MIXED[name][3] == 8):
            problems.append(f"{name} has {8 if eight else 32}-bit state")
    numbers = [local(p).numel() for p in parameters.values()]
    if not any(numbers) != (names == ONE_ROW and dist.get_rank() > 0):
        problems.append(f"local sizes {numbers}")
    if names != ONE_ROW and dist.get_rank() > 0 and 0 not in numbers:
        problems.append("no shard is empty")
    return problems


Case = tuple[Callable[..., Problems | str], tuple[Any, ...]]
CASES: dict[int, dict[str, Case]] = {
    2: {
        "padding on two ranks, AdamW8bit": (padding, ("AdamW8bit",)),
        "padding on two ranks, AdamW32bit": (padding, ("AdamW32bit",)),
        "padding on two ranks, Lion8bit": (padding, ("Lion8bit",)),
        "padding on two ranks, LAMB8bit": (padding, ("LAMB8bit",)),
        "CPU offload, LAMB8bit": (offloaded_norms, ("LAMB8bit", dict(max_unorm=0.5))),
        "CPU offload, LAMB8bit as published": (offloaded_norms, ("LAMB8bit", dict(trust_ratio="published"))),
        "parameters that only some ranks use": (unused_parameters, ("AdamW8bit",)),
        "bf16 parameters, fp32 gradients, AdamW8bit": (other_gradients, ("AdamW8bit", BF16, (F32, BF16))),
        "bf16 parameters, fp32 gradients, AdamW32bit": (other_gradients, ("AdamW32bit", BF16, (F32, BF16))),
        "bf16 parameters, fp32 gradients, Lion8bit": (other_gradients, ("Lion8bit", BF16, (F32, BF16))),
        "fp32 parameters, bf16 gradients, AdamW8bit": (other_gradients, ("AdamW8bit", F32, (BF16, F32))),
    },
    4: {
        "padding on four ranks, AdamW8bit": (padding, ("AdamW8bit",)),
        "padding on four ranks, AdamW32bit": (padding, ("AdamW32bit",)),
        "padding on four ranks, Lion8bit": (padding, ("Lion8bit",)),
        "padding on four ranks, LAMB8bit": (padding, ("LAMB8bit",)),
        "HSDP with CPU offload, AdamW8bit": (offloaded_replicas, ("AdamW8bit",)),
        "a mesh by parameter, AdamW8bit": (mesh_by_parameter, ("AdamW8bit",)),
        "a mesh by parameter, LAMB32bit": (mesh_by_parameter, ("LAMB32bit",)),
        "all in one optimizer, AdamW8bit": (mixed, ("AdamW8bit", tuple(MIXED))),
        "all in one optimizer, Lion8bit": (mixed, ("Lion8bit", tuple(MIXED))),
        "ranks without any element": (mixed, ("AdamW8bit", ONE_ROW)),
    },
}


def everything(world: int) -> dict[str, Problems | str]:
    return ranks.each(CASES[world])


@pytest.fixture(scope="module")
def results() -> Callable[[int], list[dict[str, Problems | str]]]:
    """What every rank found at a number of ranks, which are run when a test first asks."""
    return functools.cache(lambda world: ranks.run(world, everything, world))


@pytest.mark.parametrize(
    "world, case",
    [pytest.param(world, case, id=case) for world, cases in CASES.items() for case in cases],
)
def test_a_step_is_that_of_plain_tensors(
    results: Callable[[int], list[dict[str, Problems | str]]], world: int, case: str
) -> None:
    for rank, result in enumerate(results(world)):
        found = result[case]
        if isinstance(found, str):
            pytest.skip(found)
        assert found == [], f"rank {rank}"
