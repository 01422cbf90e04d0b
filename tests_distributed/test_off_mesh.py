"""A parameter on a mesh of some ranks beside one on the mesh of all, as experts and pipeline stages are placed.

Ranks outside a parameter's mesh know it, with an empty local tensor of one dimension, and hold nothing of it. The
oracle is the same optimizer on plain tensors: local shards where the rule works element by element, bit for bit; whole
ones for LAMB and LARS, and for them, bit for bit, a run of the smaller mesh's ranks alone. Each kind is one run of
`everything`, whose parts the tests judge.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bnb_fsdp

KINDS: dict[str, dict[str, Any]] = {
    "AdamW8bit": dict(lr=1e-2, weight_decay=0.1),
    "AdamW32bit": dict(lr=1e-2, weight_decay=0.1),
    "LAMB8bit": dict(lr=1e-2, weight_decay=0.1, max_unorm=0.5),
    "LARS32bit": dict(lr=0.1, momentum=0.9, weight_decay=0.1, max_unorm=0.01, trust_ratio="published"),
}
BY_NORMS = [kind for kind in KINDS if kind.startswith("LA")]
WORLD = 3
SOME = [0, 2]
"""The ranks of the smaller mesh: not the first ones, so that ranks and places on the mesh differ."""

# On some ranks: rows of whole blocks, rows that are not (their scales have phases), columns, copies, one number.
# On all: rows.
SHAPES: dict[str, tuple[tuple[int, ...], Any, bool]] = {
    "grid": ((20, 512), Shard(0), True),
    "rows": ((37, 300), Shard(0), True),
    "columns": ((40, 600), Shard(1), True),
    "copies": ((20, 256), Replicate(), True),
    "small": ((7,), Shard(0), True),
    "all": ((35, 300), Shard(0), False),
}
ALIGNED = ("grid", "copies", "small")
"""Of these the blocks are those of the whole tensor."""
STEPS = 3


def full(name: str, step: int) -> Tensor:
    """A parameter (step -1) or its gradient."""
    seed = 1000 * list(SHAPES).index(name) + step + 1
    return torch.randn(SHAPES[name][0], generator=torch.Generator().manual_seed(seed)).to(ranks.device())


def build(kind: str, some: list[int] | None, step: int = -1) -> tuple[nn.Module, Any]:
    """Model and optimizer, the smaller mesh of these ranks; None: all is plain."""
    model = nn.Module()
    if some is not None:
        device = ranks.device().type
        meshes = {
            True: DeviceMesh(device, some),
            False: DeviceMesh(device, list(range(dist.get_world_size()))),
        }
    for name, (_, placement, is_on_some) in SHAPES.items():
        value = full(name, step)
        if some is not None:
            value = distribute_tensor(value, meshes[is_on_some], [placement], src_data_rank=None)
        model.register_parameter(name, nn.Parameter(value))
    return model, getattr(bnb_fsdp, kind)(model.named_parameters(), **KINDS[kind])


def is_here(p: Tensor) -> bool:
    return not isinstance(p, DTensor) or p.device_mesh.get_coordinate() is not None


def train(model: nn.Module, optimizer: Any, steps: range, only: set[str] = frozenset(SHAPES)) -> None:
    """Ranks outside a mesh have no gradient there, or at odd steps what autograd leaves: empty, with any placements."""
    for step in steps:
        for name, p in model.named_parameters():
            p.grad = None
            if not is_here(p) and step % 2:
                (p * p).sum().backward()
            elif is_here(p) and name in only:
                gradient = full(name, step)
                if isinstance(p, DTensor):
                    gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
                p.grad = gradient
        optimizer.step()


def shard(value: Tensor) -> Tensor:
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def held(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """What this rank holds of parameters and state."""
    return {
        name: {
            "parameter": shard(p).clone().cpu(),
            **{key: value.clone().cpu() for key, value in optimizer.state[p].items()},
        }
        for name, p in model.named_parameters()
        if is_here(p)
    }


def differing(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> list[str]:
    found = [name for name in a.keys() | b.keys() if (name in a) is not (name in b)]
    for name in a.keys() & b.keys():
        keys = a[name].keys() | b[name].keys()
        for key in sorted(keys):
            x, y = a[name].get(key), b[name].get(key)
            if x is None or y is None or x.dtype != y.dtype or not torch.equal(x, y):
                found.append(f"{name}: {key}")
    return found


def against_local_tensors(kind: str, model: nn.Module, optimizer: Any) -> list[str]:
    """What differs from the optimizer on plain tensors, of which each is this rank's part."""
    ours, twin, parts, overrides = held(model, optimizer), nn.Module(), {}, {}
    for name, p in model.named_parameters():
        if not is_here(p):
            continue
        first, *parts[name] = (
            shard(
                distribute_tensor(full(name, step), p.device_mesh, p.placements, src_data_rank=None)
            ).clone()
            for step in range(-1, STEPS)
        )
        twin.register_parameter(name, nn.Parameter(first))
        if "8bit" in kind:  # decided by the number of elements of the whole tensor
            bits = 8 if ours[name]["state1"].dtype == torch.uint8 else 32
            overrides[name] = {"optim_bits": bits, "min_8bit_size": 0}
    twin_optimizer = getattr(bnb_fsdp, kind)(twin.named_parameters(), **KINDS[kind], overrides=overrides)
    for step in range(STEPS):
        for name, p in twin.named_parameters():
            p.grad = parts[name][step]
        twin_optimizer.step()
    return differing(ours, held(twin, twin_optimizer))


def distance_from_whole_tensors(kind: str, model: nn.Module) -> float:
    twin, twin_optimizer = build(kind, None)
    train(twin, twin_optimizer, range(STEPS))
    apart = 0.0
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        if is_here(p) and ("32bit" in kind or name in ALIGNED):
            part = distribute_tensor(q.detach(), p.device_mesh, p.placements, src_data_rank=None)
            apart = max([apart, *(shard(p) - shard(part)).abs().flatten().tolist()])
    return apart


# --- checkpoints

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(how: str, path: Path, model: nn.Module, optimizer: Any) -> None:
    if how == "directory":
        bnb_fsdp.save_checkpoint(path, model, optimizer)
        return
    own, others = get_state_dict(model, optimizer, options=FLAT if how == "flat" else None)
    dcp.save({"model": own, "optimizer": others}, checkpoint_id=path)


def load(how: str, path: Path, model: nn.Module, optimizer: Any) -> None:
    if how == "directory":
        bnb_fsdp.load_checkpoint(path, model, optimizer)
        return
    options = FLAT if how == "flat" else None
    own, others = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": own, "optimizer": others}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=others, options=options)


HOW = ("dcp", "flat", "directory")


def everything(kind: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, optimizer = build(kind, SOME)
    before = bnb_fsdp.describe(optimizer)
    train(model, optimizer, range(STEPS))
    after = bnb_fsdp.describe(optimizer)
    found["held"] = held(model, optimizer)
    found["described"] = [
        [(row.name, row.bits, row.state_bytes, row.total_state_bytes) for row in one.rows]
        for one in (before, after)
    ]
    found["text"] = str(after)
    if kind in BY_NORMS:
        found["distance"] = distance_from_whole_tensors(kind, model)
    else:
        found["local"] = against_local_tensors(kind, model, optimizer)
    state = optimizer.state_dict()["state"]
    found["keys"] = {
        number: {key: sorted(value) if isinstance(value, dict) else None for key, value in entry.items()}
        for number, entry in state.items()
    }
    outside = [(n, p) for n, (_, p) in enumerate(model.named_parameters()) if not is_here(p)]
    found["plain outside"] = [
        number
        for number, _ in outside
        for value in state[number].values()
        for one in (value.values() if isinstance(value, dict) else [value])
        if not isinstance(one, DTensor) or one.to_local().numel()
    ]
    for how in HOW:
        save(how, Path(folder) / how, model, optimizer)
    ways = {how: lambda m, o, how=how: load(how, Path(folder) / how, m, o) for how in HOW}
    ways["itself"] = lambda m, o: (
        m.load_state_dict(model.state_dict()),
        o.load_state_dict(optimizer.state_dict()),
    )
    gathered = [get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))]
    dist.broadcast_object_list(gathered)  # the first rank is on both meshes
    ways["whole"] = lambda m, o: (m.load_state_dict(model.state_dict()), o.load_state_dict(gathered[0]))
    for how, way in ways.items():
        other, fresh = build(kind, SOME, 99)
        train(other, fresh, range(7, 8))  # what is loaded replaces state
        way(other, fresh)
        found[f"loaded {how}"] = differing(held(model, optimizer), held(other, fresh))
        found[f"report {how}"] = fresh.load_report
    train(model, optimizer, range(STEPS, STEPS + 2))
    train(other, fresh, range(STEPS, STEPS + 2))
    found["continued"] = differing(held(model, optimizer), held(other, fresh))
    return found


def of_some_alone(kind: str, folder: str) -> dict[str, Any]:
    """The mesh of some ranks is all there is; and what the others of it saved."""
    model, optimizer = build(kind, [0, 1])
    names = {name for name, (*_, is_on_some) in SHAPES.items() if is_on_some}
    train(model, optimizer, range(STEPS), names)
    found: dict[str, Any] = {"held": {k: v for k, v in held(model, optimizer).items() if k in names}}
    for how in HOW:
        other, fresh = build(kind, [0, 1], 99)
        load(how, Path(folder) / how, other, fresh)
        found[f"loaded {how}"] = held(other, fresh)
    return found


def on_one_rank(kind: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """Loaded into plain tensors."""
    other, fresh = build(kind, None, 99)
    load("directory", Path(folder) / "directory", other, fresh)
    return held(other, fresh)


class Run(NamedTuple):
    """What the ranks of 3, of the smaller mesh alone and of one process found."""

    all: list[dict[str, Any]]
    some: list[dict[str, Any]]
    one: dict[str, dict[str, Tensor]]


@cache
def run(kind: str) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        first = ranks.run(WORLD, everything, kind, folder, timeout=250)
        second = ranks.run(len(SOME), of_some_alone, kind, folder, timeout=250)
        return Run(first, second, ranks.run(1, on_one_rank, kind, folder, timeout=250)[0])


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_steps_are_those_of_plain_tensors(kind: str) -> None:
    for rank, found in enumerate(run(kind).all):
        assert set(found["held"]) == (set(SHAPES) if rank in SOME else {"all"})
        for values in found["held"].values():
            assert values["step"] == STEPS and values["state1"].any()
        if kind in BY_NORMS:
            assert found["distance"] <= 1e-6
        else:
            assert found["local"] == []


@every_kind
def test_the_mesh_steps_as_if_no_other_rank_were_there(kind: str) -> None:
    found = run(kind)
    for rank, alone in zip(SOME, found.some):
        ours = {name: values for name, values in found.all[rank]["held"].items() if name != "all"}
        assert differing(ours, alone["held"]) == []


@every_kind
def test_every_rank_has_the_keys_and_those_outside_hold_nothing(kind: str) -> None:
    found = run(kind).all
    assert all(one["keys"] == found[0]["keys"] for one in found)
    assert len(found[0]["keys"]) == len(SHAPES)
    assert [one["plain outside"] for one in found] == [[]] * WORLD


@every_kind
@pytest.mark.parametrize("how", [*HOW, "itself", "whole"])
def test_what_was_saved_is_loaded(kind: str, how: str) -> None:
    for rank, found in enumerate(run(kind).all):
        assert found[f"loaded {how}"] == []
        parameters, _, requantized = found[f"report {how}"]
        assert (parameters, requantized) == (len(SHAPES) if rank in SOME else 1, 0)


@every_kind
def test_training_goes_on_from_what_was_loaded(kind: str) -> None:
    assert [found["continued"] for found in run(kind).all] == [[]] * WORLD


@every_kind
@pytest.mark.parametrize("how", HOW)
def test_what_was_saved_is_loaded_where_all_ranks_are_on_the_mesh(kind: str, how: str) -> None:
    """The parameter on all ranks is cut otherwise there, which other tests judge: its values and count are enough."""
    found = run(kind)
    for rank, alone in zip(SOME, found.some):
        ours = {name: values for name, values in found.all[rank]["held"].items() if name != "all"}
        theirs = dict(alone[f"loaded {how}"])
        assert theirs.pop("all")["step"] == STEPS
        assert differing(ours, theirs) == []
    saved, loaded = (
        torch.cat([one[key]["all"]["parameter"] for one in several])
        for key, several in (("held", found.all), (f"loaded {how}", found.some))
    )
    assert torch.equal(saved, loaded)


@every_kind
def test_what_was_saved_is_loaded_into_plain_tensors(kind: str) -> None:
    found = run(kind)
    for name, (_, placement, is_on_some) in SHAPES.items():
        parts = [found.all[rank]["held"][name] for rank in (SOME if is_on_some else range(WORLD))]
        keys = ["parameter"]
        if name in ALIGNED or found.one[name]["state1"].dtype == torch.float32:
            keys += [key for key in found.one[name] if key != "step"]
        for key in keys:
            if isinstance(placement, Replicate):
                whole = parts[0][key]
            else:
                whole = torch.cat(
                    [part[key] for part in parts], dim=placement.dim if parts[0][key].dim() > 1 else 0
                )
            assert torch.equal(whole, found.one[name][key]), (name, key)
        assert found.one[name]["step"] == STEPS


@every_kind
def test_describe_counts_what_is_where(kind: str) -> None:
    found = run(kind).all
    names = list(SHAPES)
    for rank, one in enumerate(found):
        before, after = one["described"]
        assert before == after and [row[0] for row in after] == names
        for name, bits, here, total in after:
            assert (bits, total) == next(row[1::2] for row in found[0]["described"][1] if row[0] == name)
            of_mesh = SOME if SHAPES[name][2] else range(WORLD)
            rows = [next(r[2] for r in other["described"][1] if r[0] == name) for other in found]
            assert total == sum(rows[r] for r in of_mesh)
            if rank not in of_mesh:
                assert here == 4  # the count of steps
        assert all(name in one["text"] for name in names)
