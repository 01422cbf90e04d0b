"""Paged optimizers of sharded models: shards bit for bit those of the unpaged class, and checkpoints between them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_faults import Model, contents, same, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import bnb_fsdp

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from paged_helpers import simulated

# On two ranks a shard of "wide" is a little more than one chunk of 1 MiB; "tiny" leaves the second rank without one.
SHAPES = {"wide": (2048, 512), "odd": (37, 300), "rows": (64, 512), "small": (7,), "tiny": (1,)}
POLICIES: dict[Any, tuple[torch.dtype, ...]] = {
    "host": (torch.float32, torch.bfloat16), "auto": (torch.float32,), 4 << 20: (torch.float16,),
}  # fmt: skip
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def sharded(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Model(SHAPES, dtype).to(ranks.device())
    fully_shard(model)
    return model


def twins(name: str, where: Any, dtype: torch.dtype = torch.float32) -> list[tuple[nn.Module, Any]]:
    """The paged one and the unpaged one, each with a model of its own."""
    result = []
    for prefix, more in (("Paged", {"residency": where}), ("", {})):
        model = sharded(dtype)
        kind = getattr(bnb_fsdp, prefix + name)
        result.append((model, kind(model.named_parameters(), lr=1e-2, min_8bit_size=256, **more)))
    return result


def simulate() -> pytest.MonkeyPatch:
    """A device made of CPU memory, unless the ranks have true ones."""
    patch = pytest.MonkeyPatch()
    if ranks.device().type == "cpu":
        simulated(patch)
    return patch


def equal(pair: list[tuple[nn.Module, Any]]) -> bool:
    own, other = (contents(*each) for each in pair)
    return same({k: v.cpu() for k, v in own.items()}, {k: v.cpu() for k, v in other.items()})


def places(optimizer: Any) -> set[str]:
    return {row.residency for row in bnb_fsdp.describe(optimizer).rows if row.state_bytes > 100}


def stepped(name: str) -> list[str]:
    """What differs from the unpaged class."""
    patch = simulate()
    wrong = []
    for where, dtypes in POLICIES.items():
        for dtype in dtypes:
            pair = twins(name, where, dtype)
            for step in range(5):
                for model, optimizer in pair:
                    train(model, optimizer, step)
                if step == 2:
                    pair[0][1].offload()
                    pair[0][1].reload()
            if not equal(pair):
                wrong.append(f"{where} {dtype}")
            if where == "host" and places(pair[0][1]) != {"host"}:
                wrong.append(f"{where}: {places(pair[0][1])}")
    patch.undo()
    return wrong


@pytest.mark.parametrize("name", ("AdamW8bit", "AdEMAMix32bit"))
def test_shards_equal_those_of_the_unpaged_class(name: str) -> None:
    assert ranks.run(2, stepped, name) == [[], []]


def saved(root: str) -> list[Any]:
    """Both save after three steps, in every way there is; then two steps more, which shall be repeated."""
    patch = simulate()
    pair = twins("AdamW8bit", "host")
    for step in range(3):
        for model, optimizer in pair:
            train(model, optimizer, step)
    for kind, (model, optimizer) in zip(("paged", "plain"), pair):
        # Without a look at the state between the step and the save: the save has to wait.
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{root}/dcp {kind}")
        train(model, optimizer, 3)
        whole = get_optimizer_state_dict(model, optimizer, options=FULL)
        bnb_fsdp.save_checkpoint(f"{root}/own {kind}", model, optimizer)
        if dist.get_rank() == 0:
            torch.save(whole, f"{root}/full {kind}")
    dist.barrier()
    result = [equal(pair), places(pair[0][1]), {k: v.cpu() for k, v in contents(*pair[1]).items()}]
    patch.undo()
    return result


def loaded(root: str) -> list[str]:
    """Everything loaded into the other kind, on as many ranks as there are: what differs."""
    patch = simulate()
    wrong = []
    for where in ("host", "auto", 4 << 20):
        for how in ("dcp", "full", "own"):
            for sources in (("plain", "paged"), ("paged", "plain")):
                pair = twins("AdamW8bit", where)
                for source, (model, optimizer) in zip(sources, pair):
                    path = f"{root}/{how} {source}"
                    if how == "own":
                        bnb_fsdp.load_checkpoint(path, model, optimizer)
                        continue
                    if how == "dcp":
                        optim = get_optimizer_state_dict(model, optimizer)
                        dcp.load({"optim": optim}, checkpoint_id=path)
                        set_optimizer_state_dict(model, optimizer, optim)
                    else:
                        set_optimizer_state_dict(model, optimizer, torch.load(path), options=FULL)
                if not equal(pair):
                    wrong.append(f"{where} {how} {sources}: not equal")
                steps = {float(s["step"]) for s in pair[0][1].state.values()}
                if steps != {3.0 if how == "dcp" else 4.0}:
                    wrong.append(f"{where} {how}: steps {steps}")
                if where == "host" and places(pair[0][1]) != {"host"}:
                    wrong.append(f"{where} {how}: {places(pair[0][1])}")
                for step in range(4, 6):
                    for model, optimizer in pair:
                        train(model, optimizer, step)
                if not equal(pair):
                    wrong.append(f"{where} {how} {sources}: not equal after steps")
    patch.undo()
    return wrong


@pytest.mark.parametrize(("before", "after"), ((2, 1), (1, 2)))
def test_checkpoints_between_paged_and_unpaged_at_other_numbers_of_ranks(before: int, after: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        for same_bits, homes, _ in ranks.run(before, saved, root):
            assert same_bits and homes == {"host"}
        assert ranks.run(after, loaded, root) == [[]] * after
