"""Interchange with bitsandbytes and torch.optim where parameters are DTensors: every rank takes and gives its part."""

from __future__ import annotations

import copy
import functools
from typing import Any

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bnb_fsdp

SHAPES = {"whole": (24, 512), "cut": (24, 300), "uneven": (17, 256), "few": (1, 5000), "small": (40,)}
"""Rows of whole blocks, rows that are none, uneven shards, an empty shard, 32-bit state."""
EXACT = ("whole", "uneven", "small")
WRAPPED = "__bnb_optimizer_quant_state__"
HALF_A_GAP = 0.0071


PLACEMENTS: dict[str, tuple[tuple[int, ...] | None, list[Any]]] = {
    "Shard(1)": (None, [Shard(1)]),
    "Replicate": (None, [Replicate()]),
    "mixed": (None, [Replicate()]),
    "copies of shards": ((2, 2), [Replicate(), Shard(0)]),
    "both dimensions": ((2, 2), [Shard(0), Shard(1)]),
}


def full(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 10 + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            setattr(self, name, nn.Parameter(full(name, 0)))


def sharded() -> Model:
    model = Model().to(ranks.device())
    fully_shard(model)
    return model


def placed(placement: str) -> list[tuple[str, nn.Parameter]]:
    """Parameters of other placements; what cannot be cut evenly is replicated."""
    shape, where = PLACEMENTS[placement]
    mesh = init_device_mesh(ranks.device().type, shape or (dist.get_world_size(),))
    result = []
    for name, sizes in SHAPES.items():
        even = all(
            isinstance(p, Replicate) or (len(sizes) == 2 and sizes[p.dim] % size == 0)
            for p, size in zip(where, mesh.shape)
        )
        placements = where if even else [Replicate()] * len(where)
        value = full(name, 0).to(ranks.device())
        plain = placement == "mixed" and name in ("whole", "cut")
        result.append((name, nn.Parameter(value if plain else distribute_tensor(value, mesh, placements))))
    return result


def train(optimizer: Any, steps: int, first: int = 0) -> None:
    names = list(SHAPES)
    for step in range(first, first + steps):
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            g = full(names[number], 50 + step).to(p.device)
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g
        optimizer.step()


def bitsandbytes_run() -> Any:
    """The same on every rank: bitsandbytes on the CPU, in one process."""
    optimizer = bnb.optim.AdamW8bit(Model().parameters(), lr=1e-2)
    train(optimizer, 3)
    return optimizer


def torch_run(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(optimizer, 3)
    return optimizer


def whole(p: Tensor, value: Tensor) -> Tensor:
    """The whole tensor of this rank's ``value``, on the CPU."""
    if not isinstance(p, DTensor):
        return value.cpu()
    shaped = DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return shaped.full_tensor().cpu()


def live_values(optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """float32 values of every state by name, dequantised from the local shards."""
    result = {}
    for number, p in enumerate(optimizer.param_groups[0]["params"]):
        state, name = optimizer.state[p], list(SHAPES)[number]
        result[name] = {"step": state["step"].clone()}
        for key in ("state1", "state2"):
            value = state[key]
            if value.dtype == torch.uint8:
                table = F.create_dynamic_map(key == "state1").to(value.device)
                scale = state[key.replace("state", "absmax")].repeat_interleave(256)[: value.numel()]
                value = table[value.long()] * scale.view(value.shape)
            result[name][key] = whole(p, value)
    return result


def given_values(source: Any) -> dict[str, dict[str, Tensor]]:
    result = {}
    for number, p in enumerate(source.param_groups[0]["params"]):
        state, name = source.state[p], list(SHAPES)[number]
        result[name] = {}
        for key, other in (("state1", "exp_avg"), ("state2", "exp_avg_sq")):
            if other in state:
                value = state[other]
                result[name][key] = value.full_tensor().cpu() if isinstance(value, DTensor) else value
            elif state[key].dtype != torch.uint8:
                result[name][key] = state[key]
            else:
                scale = state[key.replace("state", "absmax")].repeat_interleave(256)[: p.numel()]
                table = F.create_dynamic_map(key == "state1")
                result[name][key] = table[state[key].long()] * scale.view(p.shape)
    return result


def differences(optimizer: Any, wanted: dict[str, dict[str, Tensor]], exact: Any) -> list[str]:
    """Where live values are not those wanted, or farther off than one quantisation."""
    problems = []
    for name, states in live_values(optimizer).items():
        if states["step"] != 3:
            problems.append(f"{name}: step {states['step']}")
        for key, value in wanted[name].items():
            if name in exact and not torch.equal(states[key], value):
                problems.append(f"{name}: {key} is not equal")
            if (states[key] - value).abs().max() > HALF_A_GAP * value.abs().max() * 1.02:
                problems.append(f"{name}: {key} is off by {(states[key] - value).abs().max()}")
    return problems


def unchanged(optimizer: Any, edit: Any, text: str) -> list[str]:
    """Load an edited dict: what is wrong with the refusal."""
    state_dict = copy.deepcopy(bitsandbytes_run().state_dict())
    edit(state_dict)
    live = [{key: value.clone() for key, value in s.items()} for s in optimizer.state.values()]
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    try:
        optimizer.load_state_dict(state_dict)
    except ValueError as error:
        problems = [] if text in str(error) else [f"{text!r} not in {error}"]
    else:
        problems = [f"{text}: not refused"]
    for old, new in zip(live, optimizer.state.values()):
        if any(not torch.equal(old[key], new[key]) for key in old):
            problems.append(f"{text}: state changed")
    if group != {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}:
        problems.append(f"{text}: group changed")
    return problems


def bitsandbytes_into_shards(placement: str) -> dict[str, Any]:
    params = sharded().named_parameters() if placement == "Shard(0)" else placed(placement)
    optimizer = bnb_fsdp.AdamW8bit(params)
    source = bitsandbytes_run()
    optimizer.load_state_dict(source.state_dict())
    exact: Any = tuple(SHAPES) if placement in ("Replicate", "mixed") else EXACT
    if placement == "Shard(1)":
        exact = ("whole", "small")  # whose halves are whole blocks
    problems = differences(optimizer, given_values(source), exact)
    for p, old in zip(optimizer.param_groups[0]["params"], source.param_groups[0]["params"]):
        mine, given = optimizer.state[p], source.state[old]
        if mine["state1"].dtype != given["state1"].dtype:
            problems.append(f"bits of {tuple(p.shape)}")
    report = optimizer.load_report
    if optimizer.param_groups[0]["lr"] != 1e-2:
        problems.append("lr")
    problems += unchanged(optimizer, lambda d: d["state"][0][WRAPPED].pop("state2"), "has keys")
    problems += unchanged(
        optimizer,
        lambda d: d["state"][1][WRAPPED].update(state1=torch.zeros(300, 24, dtype=torch.uint8)),
        "(300, 24)",
    )
    problems += unchanged(
        optimizer,
        lambda d: d["state"][2][WRAPPED].update(absmax1=torch.ones(3), absmax2=torch.ones(3)),
        "before 0.44",
    )
    # Back to bitsandbytes: a full dict on the first rank, and the same values
    exported = bnb_fsdp.export_state_dict(optimizer, "bitsandbytes")
    if (exported == {}) is not (dist.get_rank() != 0):
        problems.append(f"export on rank {dist.get_rank()} has keys {list(exported)}")
    values = live_values(optimizer)
    if exported:
        again = bnb.optim.AdamW8bit(Model().parameters(), lr=0.5)
        again.load_state_dict(exported)
        for name, states in given_values(again).items():
            for key, value in states.items():
                off = (value - values[name][key]).abs().max()
                if off > (0 if name in exact else HALF_A_GAP * value.abs().max() * 1.02):
                    problems.append(f"exported {name}: {key} is off by {off}")
        if placement not in ("Shard(1)", "both dimensions"):
            for name, p, q in zip(SHAPES, source.param_groups[0]["params"], again.param_groups[0]["params"]):
                for key, value in source.state[p].items():
                    if name in exact and not torch.equal(
                        torch.as_tensor(value), torch.as_tensor(again.state[q][key])
                    ):
                        problems.append(f"exported {name}: {key} is not what came in")
        train(again, 1)
    floats = bnb_fsdp.export_state_dict(optimizer, "torch")
    if (floats == {}) is not (dist.get_rank() != 0):
        problems.append("torch export on other ranks")
    if floats:
        target = torch.optim.AdamW(Model().parameters())
        target.load_state_dict(floats)
        for name, states in given_values(target).items():
            for key, value in states.items():
                if not torch.equal(value, values[name][key]):
                    problems.append(f"exported to torch {name}: {key}")
    train(optimizer, 1)
    return {"problems": problems, "report": tuple(report)}


def torch_into_shards() -> list[str]:
    """Whole dicts keyed by number and by name, and a dict of DTensors, into 8-bit and 32-bit state."""
    problems = []
    plain = Model()
    source = torch_run(plain)
    by_name = get_optimizer_state_dict(plain, source, options=StateDictOptions(full_state_dict=True))
    other = sharded()
    of_shards = torch_run(other)
    wanted = given_values(source)
    for kind, given in (
        ("by number", source.state_dict()),
        ("by name", by_name),
        ("shards", of_shards.state_dict()),
    ):
        for bits, name in ((8, "AdamW8bit"), (32, "AdamW32bit")):
            model = sharded()
            if kind == "shards":
                model = other  # state of the same mesh
            optimizer = getattr(bnb_fsdp, name)(model.named_parameters())
            optimizer.load_state_dict(copy.copy(given))
            exact = tuple(SHAPES) if bits == 32 else ("small",)
            found = differences(optimizer, given_values(of_shards) if kind == "shards" else wanted, exact)
            problems += [f"{kind}, {bits}: {problem}" for problem in found]
            report = optimizer.load_report
            if report.requantized != report.blocks or (report.blocks > 0) is not (bits == 8):
                problems.append(f"{kind}, {bits}: {report}")
    model = sharded()
    optimizer = bnb_fsdp.AdamW8bit(model.named_parameters())
    set_optimizer_state_dict(model, optimizer, copy.copy(by_name))  # which splits it by name
    problems += [f"torch's API: {problem}" for problem in differences(optimizer, wanted, ("small",))]
    return problems


def a_plain_model_refuses_shards() -> str:
    of_shards = torch_run(sharded())
    optimizer = bnb_fsdp.AdamW8bit(Model().to(ranks.device()).parameters())
    try:
        optimizer.load_state_dict(of_shards.state_dict())
    except ValueError as error:
        return str(error)
    return "not refused"


def from_live_on_shards() -> list[str]:
    """A bitsandbytes optimizer of DTensors, which cannot step, becomes one that can."""
    model = sharded()
    optimizer = bnb_fsdp.from_bitsandbytes(bnb.optim.AdamW8bit(model.named_parameters(), lr=1e-2))
    twin = bnb_fsdp.AdamW8bit(sharded().named_parameters(), lr=1e-2)
    for each in (optimizer, twin):
        train(each, 2)
    return [
        name
        for (name, p), q in zip(model.named_parameters(), twin.param_groups[0]["params"])
        if not torch.equal(p.full_tensor(), q.full_tensor())
        or not torch.equal(optimizer.state[p]["state1"], twin.state[q]["state1"])
    ]


@functools.cache
def results_of(placement: str) -> Any:
    shape, _ = PLACEMENTS.get(placement, (None, []))
    return ranks.run(4 if shape else 2, bitsandbytes_into_shards, placement)


@pytest.mark.parametrize("placement", ["Shard(0)", *PLACEMENTS])
def test_a_bitsandbytes_dict_is_taken_and_given_by_parts(placement: str) -> None:
    results = results_of(placement)
    assert [result["problems"] for result in results] == [[]] * len(results)
    reports = [result["report"] for result in results]
    assert all(parameters == len(SHAPES) and blocks > 0 for parameters, blocks, _ in reports)
    assert (sum(report[2] for report in reports) > 0) is (placement not in ("Replicate", "mixed"))


def test_the_blocks_that_move_and_no_others_are_requantised() -> None:
    """Two ranks, rows of 300: the second's first row begins at element 3600, within a block of the whole tensor."""
    first, second = (result["report"] for result in results_of("Shard(0)"))
    # 24 x 512, 24 x 300, 17 x 256 (9 rows and 8) and 1 x 5000 (the first rank's); two states each
    assert first[1] == 2 * (24 + 15 + 9 + 20) and first[2] == 0
    assert (
        second[1] == 2 * (24 + 15 + 8 + 0) and second[2] == 2 * 14
    )  # the 15th, 3584 to 3600 of it, lies in one block


def test_torch_dicts_are_taken_by_parts() -> None:
    assert ranks.run(2, torch_into_shards) == [[], []]


def test_a_plain_parameter_refuses_state_that_is_sharded() -> None:
    for text in ranks.run(2, a_plain_model_refuses_shards):
        assert "full_state_dict=True" in text and "DTensor" in text


def test_a_live_optimizer_of_sharded_parameters_is_taken_over() -> None:
    assert ranks.run(2, from_live_on_shards) == [[], []]
