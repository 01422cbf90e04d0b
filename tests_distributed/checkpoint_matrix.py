"""Saves optimizer state through every checkpoint API on some meshes and loads it on others, against an oracle.

The oracle knows nothing of the package's checkpoints: each rank that saves records its live codes, scales and counts,
and where in the global tensor its elements lie (`torch.chunk`). From that follows what a rank that loads must hold:
a block of 256 whose elements lay at the same places of one block is taken bit for bit, any other one within half the
widest distance between two codes. Optimizers that load are new and full of rubbish; then both train on, bit-equal
wherever a block of the loaded state is a block of the saved one.

As a script it runs the whole matrix: ``python checkpoint_matrix.py [--json FILE]``; status 1 if a case fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bnb_fsdp

BLOCK = 256
BEFORE, AFTER = 4, 3
"""Steps until the checkpoint, and from there."""

HALF_GAP = {True: 0.00704, False: 0.00353}
"""Half the widest distance between neighbours of the signed and unsigned map, rounded up."""

MESHES = {"plain": 1, "1": 1, "2": 2, "3": 3, "4": 4, "hsdp": 4, "tp": 4, "shard1": 4}
"""Ranks of each mesh: unsharded, FSDP2 over 1 to 4, HSDP 2x2, FSDP 2 x TP 2, and FSDP2 along dimension 1.

`test_checkpoints` has one more, "replicas": HSDP 4x1."""

# Models: parameters, and which part of each a rank holds


class Leaf(nn.Module):
    """One parameter."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


ZOO: dict[str, tuple[int, ...]] = {
    "wide": (64, 512),  # rows of a multiple of 256
    "long": (7, 1024),
    "r300": (37, 300),  # rows that are none, and ranks with fewer rows than others
    "r576": (13, 576),
    "r896": (9, 896),
    "r1600": (11, 1600),
    "few": (3, 1700),  # ranks without a row
    "one": (1, 5000),
    "flat": (5000,),
    "flat_even": (4096,),
    "cube": (10, 7, 90),
    "experts": (4, 8, 256),
    "lora": (640, 16),
    "tiny": (5,),  # 32-bit state
    "single": (1,),
    "frozen": (16, 320),
    "tied": (20, 300),
    "sometimes": (17, 300),  # has a gradient in even steps only
    "never": (16, 320),  # never has one
}


def zoo() -> nn.Module:
    """Every shape, a frozen parameter, a tied one, and ones that lack gradients."""
    model = nn.Module()
    for name, shape in ZOO.items():
        model.add_module(name, Leaf(shape))
    model.add_module("head", Leaf((1,)))
    model.head.weight = model.tied.weight
    model.frozen.weight.requires_grad_(False)
    return model


def lora() -> nn.Module:
    """A frozen base that the optimizer does not know, and adapters; the second parameter group stays empty."""
    model = nn.Module()
    for name, shape in {"base": (64, 300), "a": (16, 300), "b": (640, 16), "scale": (3,)}.items():
        model.add_module(name, Leaf(shape))
    model.base.weight.requires_grad_(False)
    return model


def rows() -> nn.Module:
    """A few shapes whose blocks move with the number of ranks."""
    model = nn.Module()
    for name in ("r300", "r896", "r1600", "flat", "cube"):
        model.add_module(name, Leaf(ZOO[name]))
    return model


def grid(odd: int = 37) -> nn.Module:
    """Parameters whose scales are the same for every way to cut them, and one cut along dimension 0 alone."""
    model = nn.Module()
    model.column = nn.Linear(512, 96)
    model.row = nn.Linear(1024, 40)
    model.column_odd = nn.Linear(300, odd)
    model.experts = Leaf((4, 8, 256))
    return model


def cut_rows() -> nn.Module:
    """Two more, whose rows some meshes cut at places that are no multiple of 256."""
    model = grid(odd=36)  # torch 2.13 cannot distribute a whole tensor into uneven parts of parts
    model.row_odd = nn.Linear(600, 40)
    model.slab = Leaf((5, 12, 90))
    return model


MODELS = {model.__name__: model for model in (zoo, lora, rows, grid, cut_rows)}
ALONG_ROWS = ("row.weight", "row_odd.weight", "experts.weight", "slab.weight")
PLAN = {
    "column": ColwiseParallel(),
    "column_odd": ColwiseParallel(),
    "row": RowwiseParallel(),
    "row_odd": RowwiseParallel(),
}


def cuts(mesh: str, name: str, rank: int) -> list[tuple[int, int, int]]:
    """(dimension, parts, which of them) one after the other, for the part of a parameter that ``rank`` holds."""
    if mesh in ("plain", "replicas"):
        return []
    if mesh == "hsdp":
        return [(0, 2, rank % 2)]
    if mesh == "tp":
        tensor = rank % 2
        first = {"column": (0, 2, tensor), "row": (1, 2, tensor)}.get(name.split("_odd")[0].split(".")[0])
        if name.endswith("bias") and name.startswith("row"):
            first = None
        return [first] * (first is not None) + [(0, 2, rank // 2)]  # type: ignore[list-item]
    if mesh == "shard1":
        return [(int(name in ALONG_ROWS), 4, rank)]
    return [(0, int(mesh), rank)]


def held(shape: Iterable[int], parts: list[tuple[int, int, int]]) -> Tensor:
    """Flat indices (int64, of the local shape) of the global elements of a part."""
    shape = torch.Size(shape)
    index = torch.arange(shape.numel()).view(shape)
    for dim, count, which in parts:
        chunks = torch.chunk(index, count, dim)
        index = chunks[which] if which < len(chunks) else index.narrow(dim, 0, 0)
    return index


@functools.cache
def device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(ranks.device().type, shape, mesh_dim_names=names)


def distribute(model: nn.Module, mesh: str) -> None:
    """Shard ``model`` as ``mesh`` says."""
    if mesh in ("hsdp", "replicas"):
        shape = (2, 2) if mesh == "hsdp" else (4, 1)
        fully_shard(model, mesh=device_mesh(shape, ("replicate", "shard")))
    elif mesh == "tp":
        both = device_mesh((2, 2), ("data", "tensor"))
        plan = {name: style for name, style in PLAN.items() if hasattr(model, name)}
        parallelize_module(model, both["tensor"], plan)
        fully_shard(model, mesh=both["data"])
    elif mesh == "shard1":
        along = {id(p) for name, p in model.named_parameters() if name in ALONG_ROWS}
        fully_shard(model, shard_placement_fn=lambda p: Shard(1) if id(p) in along else None)
    elif mesh != "plain":
        fully_shard(model)


@functools.cache
def values(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """Initial values (step -1) or gradients (float32, global): the same whoever asks."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    result = torch.randn(shape, generator=generator)
    if step < 0:
        return result * 0.1
    return result * 10 ** (3 * torch.rand(shape, generator=generator) - 3)


# What is trained


class Kind(NamedTuple):
    """An optimizer, a model, and the APIs it goes through: between all meshes, and ``more`` from a mesh to itself."""

    optimizer: str
    arguments: dict[str, Any]
    dtype: torch.dtype = torch.float32
    model: str = "zoo"
    apis: tuple[str, ...] = ("dcp",)
    more: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ("1", "2", "3", "4")


FILES = {"broadcast": "full"}
"""APIs that load what another one saved."""

ALL = ("dcp", "state_dict", "flat", "full", "broadcast", "async", "titan")
EVERYWHERE = tuple(mesh for mesh in MESHES if mesh != "plain")
ADAM = dict(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.98))
KINDS = {
    "AdamW8bit": Kind("AdamW8bit", ADAM, apis=ALL, meshes=("plain", "1", "2", "3", "4")),
    "AdamW8bit bfloat16": Kind(
        "AdamW8bit",
        {**ADAM, "overrides": {"r896.weight": {"optim_bits": 32}}},
        torch.bfloat16,
        apis=("flat",),
        more=("dcp", "broadcast"),
    ),
    "Lion8bit": Kind("Lion8bit", dict(lr=1e-3, weight_decay=0.1), more=("state_dict", "full")),
    "SGD8bit": Kind("SGD8bit", dict(lr=1e-2, momentum=0.9), apis=("titan",), more=("dcp",)),
    "AdamW32bit": Kind("AdamW32bit", ADAM, apis=("full",), more=("dcp", "titan")),
    "LoRA": Kind("AdamW8bit", ADAM, model="lora", apis=("dcp", "full"), more=("state_dict", "broadcast")),
    "grid": Kind("AdamW8bit", ADAM, model="grid", more=("broadcast", "titan"), meshes=EVERYWHERE),
    "cut rows": Kind("AdamW8bit", ADAM, model="cut_rows", more=ALL[1:], meshes=EVERYWHERE),
}


class Run:
    """A model on a mesh and its optimizer."""

    def __init__(self, kind: Kind, mesh: str) -> None:
        self.kind = kind
        self.mesh = mesh
        self.model = MODELS[self.kind.model]().to(ranks.device(), self.kind.dtype)
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        distribute(self.model, mesh)
        self.parameters = dict(self.model.named_parameters())
        self.index = {name: held(shape, cuts(mesh, name, dist.get_rank())) for name, shape in shapes.items()}
        self.shapes = shapes
        self.optimizer = self.new_optimizer(self.kind.arguments)

    def new_optimizer(self, arguments: dict[str, Any]) -> Any:
        """Two groups with hyperparameters of their own; the second one of LoRA is empty (and torch wants no names)."""
        named = [entry for entry in self.parameters.items() if not entry[0].startswith("base")]
        half = len(named) // 2
        first: dict[str, Any] = {"params": named[:half]}
        second: dict[str, Any] = {"params": named[half:], "lr": arguments["lr"] / 2, "weight_decay": 0.0}
        if self.kind.model == "lora":
            first["params"], second["params"] = [parameter for _, parameter in named], []
        return getattr(bnb_fsdp, self.kind.optimizer)([first, second], **arguments)

    def local(self, name: str) -> Tensor:
        """The plain tensor that this rank holds."""
        parameter = self.parameters[name].detach()
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def fill(self, full: Callable[[str], Tensor]) -> None:
        """Set all parameters to global values."""
        for name, index in self.index.items():
            local = self.local(name)
            assert local.shape == index.shape, (self.mesh, name, local.shape, index.shape)
            local.copy_(full(name).flatten()[index])

    def train(self, steps: Iterable[int]) -> None:
        """Step with gradients that do not depend on the mesh."""
        for step in steps:
            self.set_gradients(step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def set_gradients(self, step: int) -> None:
        """What a backward would leave, but for rounding that depends on the number of ranks."""
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad or name == "never.weight":
                continue
            if name == "sometimes.weight" and step % 2:
                continue
            full = values(name, self.shapes[name], step).flatten()
            local = full[self.index[name]].to(self.local(name))
            if isinstance(parameter, DTensor):
                parameter.grad = DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            else:
                parameter.grad = local

    def live(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the state that exists, by name."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        return {
            names[parameter]: {key: value.detach().to("cpu", copy=True) for key, value in entry.items()}
            for parameter, entry in self.optimizer.state.items()
            if entry
        }

    def copies(self) -> dict[str, Tensor]:
        """Copies of the local parameters."""
        return {name: self.local(name).to("cpu", copy=True) for name in self.parameters}

    def poison(self) -> None:
        """A new optimizer with other hyperparameters, whose state is rubbish."""
        other = {**self.kind.arguments, "lr": 0.5}
        if "betas" in other:
            other["betas"] = (0.5, 0.5)
        self.optimizer = self.new_optimizer(other)
        assert self.optimizer.state  # torch asks so, too; it makes the state
        for entry in self.optimizer.state.values():
            for key, value in entry.items():
                if key == "step":
                    value.fill_(77)
                elif value.dtype == torch.uint8:
                    value.random_(0, 256)
                else:
                    value.uniform_(1e29, 1e30)

    def groups(self) -> list[dict[str, Any]]:
        """Hyperparameters by group, and how many parameters have them."""
        return [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups]


# The APIs

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def titan_materialize(optimizer: torch.optim.Optimizer) -> None:
    """As torchtitan makes state appear: a step of zero gradients at rate zero for what has none; all is put back."""
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lacking = [p for p in everything if p.requires_grad and not optimizer.state.get(p)]
    if not lacking:
        return
    gradients = [(parameter, parameter.grad) for parameter in everything]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in everything:
        parameter.grad = None
    for parameter in lacking:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step(closure=None)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    for parameter, gradient in gradients:
        parameter.grad = gradient


def titan_flat(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """torchtitan's form: one flat dict, ``state.NAME.KEY`` and ``param_groups.NAME.KEY``."""
    titan_materialize(optimizer)
    given = optimizer.state_dict()
    flat: dict[str, Any] = {}

    def put(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                put(f"{prefix}.{key}", inner)
        else:
            flat[prefix] = value

    for group in given["param_groups"]:
        for number, name in zip(group["params"], group["param_names"]):
            put(f"state.{name}", given["state"].get(number, {}))
            for key in sorted(group.keys() - {"params", "param_names"}):
                flat[f"param_groups.{name}.{key}"] = group[key]
    return flat


def titan_load(optimizer: torch.optim.Optimizer, flat: dict[str, Any]) -> None:
    """Back from `titan_flat`: the names of states are the live optimizer's."""
    state: dict[int, Any] = {}
    groups = []
    number = 0
    for group in optimizer.param_groups:
        numbers = []
        for name, parameter in zip(group["param_names"], group["params"]):
            entry: dict[str, Any] = {}
            for key in optimizer.state[parameter] if parameter in optimizer.state else ():
                prefix = f"state.{name}.{key}"
                if prefix in flat:
                    entry[key] = flat[prefix]
                for longer in [other for other in flat if other.startswith(prefix + ".")]:
                    *path, last = longer[len(prefix) + 1 :].split(".")
                    place = entry.setdefault(key, {})
                    for part in path:
                        place = place.setdefault(part, {})
                    place[last] = flat[longer]
            if entry:
                state[number] = entry
            numbers.append(number)
            number += 1
        first = group["param_names"][0]
        hyper = {k: flat[f"param_groups.{first}.{k}"] for k in group if k not in ("params", "param_names")}
        groups.append({"params": numbers, **hyper})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def save(run: Run, api: str, path: Path) -> Any:
    """Write a checkpoint; for async_save returns what to wait for."""
    where = str(path)
    if api == "dcp":
        dcp.save({"optim": get_optimizer_state_dict(run.model, run.optimizer)}, checkpoint_id=where)
    elif api == "state_dict":
        model, optim = get_state_dict(run.model, run.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=where)
    elif api == "flat":
        optim = get_optimizer_state_dict(run.model, run.optimizer, options=FLAT)
        dcp.save({"optim": optim}, checkpoint_id=where)
    elif api == "full":
        optim = get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
        if dist.get_rank() == 0:
            torch.save(optim, where)
        else:
            assert optim == {}
    elif api == "async":
        optim = get_optimizer_state_dict(run.model, run.optimizer)
        return dcp.async_save({"optim": optim}, checkpoint_id=where, process_group=gloo())
    elif api == "titan":
        dcp.save(titan_flat(run.optimizer), checkpoint_id=where)
    elif api == "local":
        torch.save(run.optimizer.state_dict(), where)
    return None


def load(run: Run, api: str, folder: Path) -> None:
    """Load the checkpoint that `save` wrote."""
    path = str(folder / FILES.get(api, api))
    model, optimizer = run.model, run.optimizer
    if api in ("dcp", "async", "flat"):
        options = FLAT if api == "flat" else None
        optim = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.load({"optim": optim}, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, optim, options=options)
    elif api == "state_dict":
        weights, optim = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": optim}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
    elif api == "full":
        set_optimizer_state_dict(
            model,
            optimizer,
            torch.load(path, weights_only=True),
            options=StateDictOptions(full_state_dict=True),
        )
    elif api == "broadcast":
        given = torch.load(path, weights_only=True) if dist.get_rank() == 0 else {}
        set_optimizer_state_dict(model, optimizer, given, options=BROADCAST)
    elif api == "titan":
        flat = titan_flat(optimizer)
        dcp.load(flat, checkpoint_id=path)
        titan_load(optimizer, flat)
    elif api == "torch_save":
        set_optimizer_state_dict(model, optimizer, torch.load(path, weights_only=True)["optim"])
    elif api == "local":
        optimizer.load_state_dict(torch.load(path, weights_only=True))


@functools.cache
def gloo() -> Any:
    """async_save needs a group that knows the CPU."""
    return dist.new_group(backend="gloo")


def apis(kind: Kind, saved: str, loaded: str) -> Iterator[str]:
    """What a checkpoint of ``kind`` goes through between these meshes."""
    yield from kind.apis
    if saved == loaded:
        yield from kind.more
    if loaded == "plain":
        yield "torch_save"
        if saved == "plain":
            yield "local"


def expressible(kind: Kind, saved: str, loaded: str) -> bool:
    """Whether rows can carry the state from one mesh to the other."""
    return kind.model != "cut_rows" or saved == loaded or not {saved, loaded} & {"tp", "shard1"}


# Saving


def folder_of(root: str, kind_name: str, mesh: str) -> Path:
    return Path(root) / kind_name.replace(" ", "_") / mesh


def save_all(world: int, root: str, kind_names: list[str]) -> list[str]:
    """Train and save all that this number of ranks saves; problems."""
    problems = []
    for kind_name in kind_names:
        for mesh in KINDS[kind_name].meshes:
            if MESHES[mesh] == world:
                problems += save_one(kind_name, mesh, folder_of(root, kind_name, mesh))
    return problems


def save_one(kind_name: str, mesh: str, folder: Path) -> list[str]:
    """Train, record, save through every API, train on, record."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(KINDS[kind_name], mesh)
    run.fill(lambda name: values(name, run.shapes[name], -1))
    run.train(range(BEFORE))
    record: dict[str, Any] = {"state": run.live(), "parameters": run.copies(), "groups": run.groups()}
    files = {FILES.get(api, api) for api in apis(run.kind, mesh, mesh)}
    pending = [save(run, api, folder / api) for api in (*ALL, "local") if api in files]
    problems = [
        f"{kind_name}, {mesh}, rank {dist.get_rank()}: saving changed {name} {key}"
        for name, entry in run.live().items()
        for key, value in entry.items()
        if not same_bits(value, record["state"].get(name, {}).get(key, torch.zeros_like(value)))
    ]
    if record["groups"] != run.groups():
        problems.append(f"{kind_name}, {mesh}: saving changed hyperparameters")
    run.train(range(BEFORE, BEFORE + AFTER))  # while async_save may still write
    for future in pending:
        if future is not None:
            future.result()
    record["after"] = run.copies()
    torch.save(record, folder / f"raw{dist.get_rank()}")
    if dist.get_rank() == 0 and "plain" in run.kind.meshes:
        dcp_to_torch_save(str(folder / "dcp"), str(folder / "torch_save"))
    return problems


# The oracle


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    return (
        actual.shape == expected.shape
        and actual.dtype == expected.dtype
        and not bool(different(actual, expected).any())
    )


def different(actual: Tensor, expected: Tensor) -> Tensor:
    """bool, flat: which elements differ in a bit."""
    sides = [side.detach().contiguous().flatten() for side in (actual, expected)]
    width = sides[0].element_size()
    as_bytes = [side.view(torch.uint8).view(-1, width) for side in sides]
    return (as_bytes[0] != as_bytes[1]).any(dim=1)


class Saved(NamedTuple):
    """One parameter put together from the records of all ranks that saved it; all tensors flat and global."""

    parameter: Tensor
    after: Tensor
    step: float | None  # None: it had no state
    values: dict[str, Tensor]  # codes or float32 states
    scales: dict[str, Tensor]  # that of each element's block
    block: Tensor  # number of each element's block, place in it, and how many elements it has
    place: Tensor
    length: Tensor


def gathered(records: list[dict[str, Any]], mesh: str, name: str, shape: tuple[int, ...]) -> Saved:
    """Put a parameter together; raises AssertionError if replicas differ."""
    count = torch.Size(shape).numel()
    whole: dict[str, Tensor] = {}
    step = None

    def put(key: str, index: Tensor, value: Tensor) -> None:
        fresh = key not in whole
        target = whole.setdefault(key, torch.zeros(count, dtype=value.dtype))
        seen = whole.setdefault(f"seen {key}", torch.zeros(count, dtype=torch.bool))
        if not fresh and len(index) and bool(seen[index].all()):
            assert not different(target[index], value).any(), f"{mesh}: replicas of {name} {key} differ"
        target[index], seen[index] = value.flatten(), True

    blocks = 0
    for rank, record in enumerate(records):
        index = held(shape, cuts(mesh, name, rank)).flatten()
        place = torch.arange(len(index))
        put("parameter", index, record["parameters"][name].flatten())
        put("after", index, record["after"][name].flatten())
        first = whole.get("place") is None or not bool(whole["seen place"][index].all())
        put("place", index, place % BLOCK)
        if first and len(index):
            put("block", index, place // BLOCK + blocks)
            blocks += -(-len(index) // BLOCK)
        put("length", index, (len(index) - place // BLOCK * BLOCK).clamp_max(BLOCK))
        entry = record["state"].get(name)
        if entry is None:
            continue
        assert step is None or step == float(entry["step"])
        step = float(entry["step"])
        for key in (key for key in entry if key.startswith("state")):
            put(key, index, entry[key].flatten())
            scales = entry.get(key.replace("state", "absmax"))
            if scales is not None:
                put(f"scale {key}", index, scales[place // BLOCK])
    states = [key for key in whole if key.startswith("state")]
    return Saved(
        whole["parameter"],
        whole["after"],
        step,
        {key: whole[key] for key in states},
        {key: whole[f"scale {key}"] for key in states if f"scale {key}" in whole},
        *(whole[key] for key in ("block", "place", "length")),
    )


def untouched(saved: Saved, kind: Kind) -> Saved:
    """The same with the state that a parameter has which never had a gradient: zero."""
    count = len(saved.parameter)
    eight = "8bit" in kind.optimizer and count >= 4096
    states = ("state1", "state2") if "Adam" in kind.optimizer else ("state1",)
    zeros = torch.zeros(count, dtype=torch.uint8 if eight else torch.float32)
    scales = {key: torch.zeros(count) for key in states} if eight else {}
    return saved._replace(step=0.0, values={key: zeros for key in states}, scales=scales)


class Verdict:
    """Of one parameter on one rank."""

    def __init__(self) -> None:
        self.blocks = self.moved = 0
        self.problems: list[str] = []
        self.same: Tensor | None = None  # elements that train on as they would have

    def check(self, right: Any, text: str) -> None:
        if not right:
            self.problems.append(text)


def judge(saved: Saved, index: Tensor, live: dict[str, Tensor], maps: dict[bool, Tensor]) -> Verdict:
    """Compare a rank's loaded state of one parameter with what must have become of the saved one."""
    verdict = Verdict()
    flat = index.flatten()
    verdict.same = torch.ones(len(flat), dtype=torch.bool)
    wanted = {"step", *saved.values, *(key.replace("state", "absmax") for key in saved.scales)}
    verdict.check(set(live) == wanted, f"has {sorted(live)}, expected {sorted(wanted)}")
    if verdict.problems:
        return verdict
    verdict.check(same_bits(live["step"], torch.tensor(saved.step)), f"step {live['step']} not {saved.step}")
    for number, (key, value) in enumerate(saved.values.items()):
        verdict.check(live[key].shape == index.shape and live[key].dtype == value.dtype, f"{key}: its form")
        if key not in saved.scales:
            verdict.check(same_bits(live[key].flatten(), value[flat]), f"{key}: bits")
        elif len(flat):
            absmax = live[key.replace("state", "absmax")]
            judge_blocks(verdict, saved, key, flat, live[key].flatten(), absmax, maps, signed=number == 0)
    return verdict


def judge_blocks(
    verdict: Verdict,
    saved: Saved,
    key: str,
    flat: Tensor,
    codes: Tensor,
    absmax: Tensor,
    maps: dict[bool, Tensor],
    signed: bool,
) -> None:
    """The 8-bit part of `judge`; ``flat`` are the global elements, in the order of this rank's memory."""
    count = -(-len(flat) // BLOCK)
    verdict.check(absmax.shape == (count,) and absmax.dtype == torch.float32, f"{key}: scales' form")
    if verdict.problems:
        return
    slots = torch.arange(count * BLOCK).view(count, BLOCK)
    inside = slots < len(flat)
    slots = slots.clamp_max(len(flat) - 1)
    source = flat[slots]
    scales = saved.scales[key][source]
    bits = scales.view(torch.int32)
    in_place = ((saved.place[source] == torch.arange(BLOCK)) | ~inside).all(dim=1)
    kept = in_place & ((bits == bits[:, :1]) | ~inside).all(dim=1)
    verdict.blocks += count
    verdict.moved += int((~kept).sum())

    wrong = (absmax.view(torch.int32) != bits[:, 0]) & kept
    verdict.check(not wrong.any(), f"{key}: {int(wrong.sum())} scales of blocks that stay")
    wrong = (codes[slots] != saved.values[key][source]) & inside & kept[:, None]
    verdict.check(not wrong.any(), f"{key}: {int(wrong.sum())} codes of blocks that stay")

    old = maps[signed][saved.values[key][source].long()] * scales
    new = maps[signed][codes[slots].long()] * absmax[:, None]
    allowed = (HALF_GAP[signed] + 1e-6) * absmax[:, None]
    wrong = ~((new - old).abs() <= allowed) & inside & ~kept[:, None]
    verdict.check(not wrong.any(), f"{key}: {int(wrong.sum())} values of moved blocks beyond half a gap")
    largest = torch.where(inside, scales, 0).amax(dim=1)
    wrong = ~(absmax <= largest) & ~kept
    verdict.check(not wrong.any(), f"{key}: {int(wrong.sum())} scales of moved blocks grew")

    numbers = saved.block[source]
    whole = kept & ((numbers == numbers[:, :1]) | ~inside).all(dim=1)
    whole &= saved.length[source[:, 0]] == inside.sum(dim=1)
    assert verdict.same is not None
    verdict.same &= whole[:, None].expand(-1, BLOCK).reshape(-1)[: len(flat)]


# Loading


class Case(NamedTuple):
    """A parameter, or ``(report)``, through one API between two meshes, as one rank sees it."""

    kind: str
    api: str
    saved: str
    loaded: str
    name: str


Result = tuple[tuple[str, ...], int, int, list[str]]
"""Case, blocks, moved blocks, problems."""


def load_all(world: int, root: str, kind_names: list[str], meshes: list[str]) -> list[Result]:
    """Load, on all meshes of this number of ranks, what all ``meshes`` saved."""
    maps = torch.load(Path(root) / "maps", weights_only=True)
    results: list[Result] = []
    for kind_name in kind_names:
        kind = KINDS[kind_name]
        for mesh in (mesh for mesh in kind.meshes if MESHES[mesh] == world):
            run = Run(KINDS[kind_name], mesh)
            for saved in (saved for saved in kind.meshes if saved in meshes):
                folder = folder_of(root, kind_name, saved)
                if expressible(kind, saved, mesh):
                    results += load_one(run, kind_name, saved, folder, maps)
                elif {saved, mesh} & {"1", "4", "hsdp"} or saved < mesh:
                    results += refusals(run, kind_name, saved, folder)
    return results


def load_one(run: Run, kind_name: str, mesh: str, folder: Path, maps: dict[bool, Tensor]) -> Iterator[Result]:
    """Load through every API what ``mesh`` saved, and train on."""
    records = [torch.load(folder / f"raw{rank}", weights_only=False) for rank in range(MESHES[mesh])]
    whole = {name: gathered(records, mesh, name, shape) for name, shape in run.shapes.items()}
    for api in apis(run.kind, mesh, run.mesh):
        weights = {name: saved.parameter for name, saved in whole.items()}
        if api == "state_dict":  # which brings them
            weights = {name: torch.full(shape, 7.0) for name, shape in run.shapes.items()}
        run.fill(weights.__getitem__)
        run.poison()
        try:
            load(run, api, folder)
        except (Exception, CheckpointException) as error:
            problem = f"{type(error).__name__}: {error}"
            yield (kind_name, api, mesh, run.mesh, "(report)"), 0, 0, [problem]
            continue
        total = collections.Counter[str]()
        verdicts: dict[str, Verdict] = {}
        live = run.live()
        for name, saved in whole.items():
            if saved.step is None and name == "never.weight" and api != "local":
                saved = untouched(saved, run.kind)
            verdict = Verdict()
            if saved.step is None:
                verdict.check(name not in live, "has state though it had none")
            elif name in live:
                verdict = judge(saved, run.index[name], live[name], maps)
                total.update(parameters=1, blocks=verdict.blocks, requantized=verdict.moved)
            else:
                verdict.check(False, "lost its state")
            now = run.local(name).cpu().flatten()
            verdict.check(same_bits(now, saved.parameter[run.index[name].flatten()]), "parameter after load")
            verdicts[name] = verdict
        yield (kind_name, api, mesh, run.mesh, "(report)"), 0, 0, reported(run, records[0], dict(total))
        run.train(range(BEFORE, BEFORE + AFTER))
        for name, verdict in verdicts.items():
            now, then = run.local(name).cpu().flatten(), whole[name].after[run.index[name].flatten()]
            wrong = different(now, then) if verdict.same is None else different(now, then) & verdict.same
            verdict.check(not wrong.any(), f"{int(wrong.sum())} elements trained on differently")
            verdict.check(now.isfinite().all(), "parameter not finite")
            yield (kind_name, api, mesh, run.mesh, name), verdict.blocks, verdict.moved, verdict.problems


def reported(run: Run, record: dict[str, Any], total: dict[str, int]) -> list[str]:
    """What is wrong with the report of a load and with the hyperparameters."""
    problems = []
    report = run.optimizer.load_report
    if report is None or report._asdict() != total:
        problems.append(f"report {report}, expected {total}")
    if run.groups() != record["groups"]:
        problems.append(f"groups {run.groups()}, expected {record['groups']}")
    return problems


def refusals(run: Run, kind_name: str, saved: str, folder: Path) -> Iterator[Result]:
    """What rows cannot carry is refused, loudly, and the optimizer stays as it was."""
    for api in ("dcp", "flat", "full", "broadcast"):
        run.poison()
        before, groups = run.live(), run.groups()
        error: BaseException | None = None
        try:
            load(run, api, folder)
        except (CheckpointException, ValueError) as caught:
            error = caught
        problems = []
        if api in ("dcp", "flat"):
            if not isinstance(error, CheckpointException) or "absmax1" not in str(error):
                problems.append(f"raw dcp.load: {error!r}")
        elif (
            api == "full" or dist.get_rank() == 0
        ):  # by broadcast the others learn nothing of what does not match
            if not isinstance(error, ValueError) or "bnb_fsdp checkpoint convert" not in str(error):
                problems.append(f"full dict: {error!r}")
        if api != "broadcast":  # which torch writes into live tensors before it calls load_state_dict
            after = run.live()
            if groups != run.groups() or before.keys() != after.keys():
                problems.append("the optimizer changed")
            for name, entry in before.items():
                problems += [
                    f"{name} {k} changed" for k, v in entry.items() if not same_bits(after[name][k], v)
                ]
        yield (kind_name, api, saved, run.mesh, "(refusal)"), 0, 0, problems


# The whole


def gpus() -> int:
    """How many ranks get a GPU; one alone is left, so that all worlds run on the same kind of device."""
    count = ranks.gpu_ranks()
    return count if count > 1 else 0


def worlds() -> list[int]:
    """Numbers of ranks: those that fit the GPUs, all without GPUs."""
    return [world for world in (1, 2, 3, 4) if world <= gpus() or not gpus()]


def matrix(
    kind_names: list[str], timeout: float = 900.0, log: Callable[[str], None] = lambda text: None
) -> dict[tuple[str, ...], Any]:
    """Run ``kind_names``: by case, (outcome, problems); outcomes are bit-equal, requantised, refused and failed."""
    from bitsandbytes.functional import create_dynamic_map

    counts = worlds()
    meshes = [mesh for mesh, world in MESHES.items() if world in counts]
    merged: dict[tuple[str, ...], list[Any]] = {}
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        torch.save(
            {signed: create_dynamic_map(signed).float() for signed in (True, False)}, Path(root) / "maps"
        )
        for world in counts:
            start = time.monotonic()
            for problems in ranks.run(
                world, save_all, world, root, kind_names, timeout=timeout, on_cpu=not gpus()
            ):
                for problem in problems:
                    merged[("saving", problem, "", "", "")] = [0, [problem]]
            log(f"saved on {world} ranks in {time.monotonic() - start:.0f} s")
        for world in counts:
            start = time.monotonic()
            for rank, results in enumerate(
                ranks.run(
                    world, load_all, world, root, kind_names, meshes, timeout=timeout, on_cpu=not gpus()
                )
            ):
                for case, _, moved, problems in results:
                    entry = merged.setdefault(case, [0, []])
                    entry[0] += moved
                    entry[1] += [f"rank {rank}: {problem}" for problem in problems]
            log(f"loaded on {world} ranks in {time.monotonic() - start:.0f} s")
    return {case: (outcome(case, *entry), entry[1]) for case, entry in merged.items()}


def outcome(case: tuple[str, ...], moved: int, problems: list[str]) -> str:
    if problems:
        return "failed"
    if case[-1] == "(refusal)":
        return "refused"
    return "requantised" if moved else "bit-equal"


def summary(cases: dict[tuple[str, ...], Any]) -> dict[str, int]:
    """Counts of cases."""
    counts = collections.Counter(found for found, _ in cases.values())
    return {
        "cases": len(cases),
        "loads": len({case[:4] for case in cases}),
        **{name: counts[name] for name in ("bit-equal", "requantised", "refused", "failed")},
    }


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "bitsandbytes": version("bitsandbytes"),
        "device": torch.cuda.get_device_name() if gpus() else "cpu",
        "worlds": " ".join(map(str, worlds())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write counts and versions to FILE")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), help="only these")
    arguments = parser.parse_args()
    start = time.monotonic()
    cases = matrix(arguments.kinds, log=lambda text: print(text, flush=True))
    counts = summary(cases)
    for case, (found, problems) in cases.items():
        if found == "failed":
            print("FAILED", *case, *problems[:4], sep=" | ")
    print(
        f"{time.monotonic() - start:.0f} s: " + ", ".join(f"{name} {count}" for name, count in counts.items())
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**counts, **versions()}, indent=1) + "\n")
    return int(counts["failed"] > 0 or counts["cases"] == 0)


if __name__ == "__main__":
    sys.exit(main())
