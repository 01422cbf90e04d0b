"""Optimizer state through every checkpoint API, between meshes (`checkpoint_matrix`), and what saving leaves alone."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_matrix as matrix
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_matrix import KINDS, MESHES, Kind, Run
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import bnb_fsdp

Cases = dict[tuple[str, ...], Any]
TIMEOUT = 900.0


# The matrix


@pytest.fixture(scope="module")
def cases() -> Cases:
    return matrix.matrix(list(KINDS), timeout=TIMEOUT)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_taken_bit_for_bit_or_within_half_a_code_and_trains_on(cases: Cases, kind: str) -> None:
    mine = {case: found for case, found in cases.items() if case[0] == kind}
    failed = {case: problems[:3] for case, (outcome, problems) in mine.items() if outcome == "failed"}
    assert not failed, f"{len(failed)} of {len(mine)}, such as {list(failed.items())[:5]}"
    meshes = [mesh for mesh in KINDS[kind].meshes if MESHES[mesh] in matrix.worlds()]
    loads = {case[1:4] for case in mine if case[4] == "(report)"}
    assert loads == {
        (api, saved, loaded)
        for saved in meshes
        for loaded in meshes
        if matrix.expressible(KINDS[kind], saved, loaded)
        for api in matrix.apis(KINDS[kind], saved, loaded)
    }
    names = {name for name, _ in matrix.MODELS[KINDS[kind].model]().named_parameters()}
    assert {case[4] for case in mine} - {"(report)", "(refusal)"} == names


def test_saving_changes_neither_state_nor_hyperparameters(cases: Cases) -> None:
    assert [case[1] for case in cases if case[0] == "saving"] == []


def test_nothing_is_requantised_at_the_same_mesh_or_where_rows_start_blocks_or_state_has_32_bits(
    cases: Cases,
) -> None:
    moved = {case for case, (outcome, _) in cases.items() if outcome == "requantised"}
    for kind, _, saved, loaded, name in moved:
        assert saved != loaded
        assert kind != "AdamW32bit"
        assert not name.startswith(("wide", "long", "experts", "tiny", "single", "column.", "row.", "scale"))
    if len(matrix.worlds()) == 4:  # or the bound was never tried
        assert {name for *_, name in moved} >= {"r300.weight", "r1600.weight", "flat.weight", "cube.weight"}


def test_what_rows_cannot_carry_is_refused_before_anything_changes(cases: Cases) -> None:
    refused = {case[1:4] for case, (outcome, _) in cases.items() if outcome == "refused"}
    if len(matrix.worlds()) < 4:
        pytest.skip("needs 4 ranks on one kind of device")
    for pair in [("4", "tp"), ("tp", "4"), ("shard1", "hsdp"), ("shard1", "tp"), ("tp", "1")]:
        assert {api for api, *others in refused if tuple(others) == pair} == {
            "dcp",
            "flat",
            "full",
            "broadcast",
        }


def begun(kind: Kind, mesh: str, gradients: bool = False) -> Run:
    """An optimizer that never stepped; its parameters have values and, if asked for, gradients."""
    run = Run(kind, mesh)
    run.fill(lambda name: matrix.values(name, run.shapes[name], -1))
    if gradients:
        run.set_gradients(0)
    return run


# Drift

CYCLES = ("4", "hsdp", "replicas", "4", "replicas", "hsdp", "4", "hsdp", "4", "replicas", "hsdp")
"""Where the state is at first and after each of ten saves: 4, 2 and 1 shards on 4 ranks."""

DRIFTER = Kind("AdamW8bit", matrix.ADAM, model="rows")


def cycled(root: str) -> list[dict[str, Any]]:
    """The live state of this rank at each of `CYCLES`."""
    run = begun(DRIFTER, CYCLES[0])
    run.train(range(matrix.BEFORE))
    record = {"parameters": run.copies(), "after": run.copies()}
    records = [{**record, "state": run.live()}]
    for number, mesh in enumerate(CYCLES[1:]):
        path = Path(root) / str(number)
        matrix.save(run, "dcp", path / "dcp")
        run = begun(DRIFTER, mesh)
        run.poison()
        matrix.load(run, "dcp", path)
        records.append({"parameters": run.copies(), "after": run.copies(), "state": run.live()})
    return records


@pytest.fixture(scope="module")
def drift() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """By parameter and state: relative L2 distance from the start, and relative mean error, after each cycle."""
    from bitsandbytes.functional import create_dynamic_map

    with tempfile.TemporaryDirectory() as root:
        by_rank = ranks.run(4, cycled, root, timeout=TIMEOUT)
    result: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name in ("r300", "r896", "r1600", "flat", "cube"):
        for key in ("state1", "state2"):
            table = create_dynamic_map(key == "state1").double()
            found = []
            for number, mesh in enumerate(CYCLES):
                records = [rank[number] for rank in by_rank]
                saved = matrix.gathered(records, mesh, f"{name}.weight", matrix.ZOO[name])
                found.append(table[saved.values[key].long()] * saved.scales[key])
            result[name, key] = [
                (
                    float((x - found[0]).norm() / found[0].norm()),
                    float((x - found[0]).mean() / found[0].abs().mean()),
                )
                for x in found[1:]
            ]
    return result


def test_ten_saves_at_changing_numbers_of_ranks_do_not_drift(drift: dict[Any, Any]) -> None:
    for key, cycles in drift.items():
        distances = [distance for distance, _ in cycles]
        assert 0 < distances[0] < 0.01, (key, distances)  # an ordinary quantisation costs 1.2 %
        assert max(distances) < 2.5 * distances[0], (
            key,
            distances,
        )  # the first trip moves a part of the blocks
        assert max(distances) < 1.5 * distances[1], (key, distances)  # the root of ten is 3.2
        assert max(abs(mean) for _, mean in cycles) < 0.001, (key, cycles)


# Before the first step

WAYS: dict[str, Callable[[Run], Any]] = {
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(),
    "get_optimizer_state_dict": lambda run: get_optimizer_state_dict(run.model, run.optimizer),
    "flattened": lambda run: get_optimizer_state_dict(run.model, run.optimizer, options=matrix.FLAT),
    "full": lambda run: get_optimizer_state_dict(run.model, run.optimizer, options=matrix.FULL),
    "get_state_dict": lambda run: get_state_dict(run.model, run.optimizer),
    "torchtitan": lambda run: matrix.titan_flat(run.optimizer),
}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Everything in nested dicts, tuples and lists, by dotted path."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    inner = {key: leaf for name, item in items for key, leaf in leaves(item, f"{path}.{name}").items()}
    return inner if isinstance(value, (dict, list, tuple)) else {path: value}


def never_stepped(kind: str) -> dict[str, list[str]]:
    """By way and whether gradients wait: what saving before the first step did wrong."""
    problems = {}
    for gradients in (False, True):
        twin = begun(KINDS[kind], "2", gradients)
        finish(twin)
        for way, save in WAYS.items():
            run = begun(KINDS[kind], "2", gradients)
            fired: list[str] = []
            run.optimizer.register_step_pre_hook(lambda *_, fired=fired: fired.append("before"))
            run.optimizer.register_step_post_hook(lambda *_, fired=fired: fired.append("after"))
            waiting = {name: p.grad for name, p in run.parameters.items()}
            saved = leaves(save(run))
            wrong = [f"a step hook fired: {fired}"] * bool(fired)
            steps = [float(value) for path, value in saved.items() if path.endswith(".step")]
            if any(steps) or (not steps and (way != "full" or dist.get_rank() == 0)):
                wrong.append(f"steps {steps}")
            trained = sum(p.requires_grad for p in run.parameters.values())
            if len(run.live()) != trained or (steps and len(steps) != trained):
                wrong.append(f"state of {len(run.live())}, {len(steps)} saved, of {trained} parameters")
            wrong += [f"gradient of {n}" for n, p in run.parameters.items() if p.grad is not waiting[n]]
            finish(run)
            for found, expected in ((run.copies(), twin.copies()), *pairs(run.live(), twin.live())):
                wrong += [f"{n} differs" for n in expected if not matrix.same_bits(found[n], expected[n])]
            problems[f"{way}, gradients {gradients}"] = wrong
    return problems


def finish(run: Run) -> None:
    if any(p.grad is not None for p in run.parameters.values()):
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.train(range(1, 4))


def pairs(found: dict[str, Any], expected: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Entries by name; what was never stepped has no state unless it was saved."""
    return [(entry, expected[name]) for name, entry in found.items() if name in expected]


@functools.cache
def never_stepped_results() -> list[dict[str, list[str]]]:
    return ranks.run(2, never_stepped, "AdamW8bit")


@pytest.mark.parametrize("gradients", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("way", WAYS)
def test_saving_before_the_first_step_changes_nothing(way: str, gradients: bool) -> None:
    for rank, problems in enumerate(never_stepped_results()):
        wrong = problems[f"{way}, gradients {gradients}"]
        if way == "torchtitan":  # it calls step() itself, around which torch runs the hooks
            wrong = [text for text in wrong if not text.startswith("a step hook")]
        assert wrong == [], f"rank {rank}"


# Activation checkpointing


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(100, 300), nn.Linear(300, 100)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def stack(wrapped: bool) -> nn.Module:
    """Two blocks, each sharded on its own; ``wrapped`` recomputes their activations."""
    torch.manual_seed(0)
    blocks = [Residual() for _ in range(2)]
    model = nn.Sequential(*(checkpoint_wrapper(block) if wrapped else block for block in blocks)).to(
        ranks.device()
    )
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 100, generator=generator).to(ranks.device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def locals_of(model: nn.Module) -> list[Tensor]:
    return [parameter.to_local().detach().cpu().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def resumed(root: str) -> dict[str, list[str]]:
    """By how the model is wrapped when saved and loaded: what went differently."""
    problems = {}
    for saved in (True, False):
        model = stack(saved)
        optimizer = bnb_fsdp.AdamW8bit(model.named_parameters(), lr=1e-2)
        train(model, optimizer, range(3))
        path = f"{root}/{saved}"
        optim = get_optimizer_state_dict(model, optimizer)
        names = [name for name in optim["state"] if "wrapped" in name]
        dcp.save({"optim": optim}, checkpoint_id=path)
        then = locals_of(model)
        train(model, optimizer, range(3, 6))
        for loaded in (True, False):
            other = stack(loaded)
            with torch.no_grad():
                for parameter, value in zip(other.parameters(), then):
                    parameter.to_local().copy_(value)  # type: ignore[attr-defined]
            fresh = bnb_fsdp.AdamW8bit(other.named_parameters(), lr=1.0)
            template = get_optimizer_state_dict(other, fresh)
            dcp.load({"optim": template}, checkpoint_id=path)
            set_optimizer_state_dict(other, fresh, template)
            train(other, fresh, range(3, 6))
            wrong = [f"name {name}" for name in names]
            for index, (now, expected) in enumerate(zip(locals_of(other), locals_of(model))):
                if not matrix.same_bits(now, expected):
                    wrong.append(f"parameter {index} differs")
            if fresh.load_report.requantized or not fresh.load_report.blocks:
                wrong.append(str(fresh.load_report))
            problems[f"{saved}, {loaded}"] = wrong
    return problems


def test_a_model_with_activation_checkpointing_resumes_with_and_without() -> None:
    with tempfile.TemporaryDirectory() as root:
        for problems in ranks.run(2, resumed, root):
            assert len(problems) == 4
            assert all(wrong == [] for wrong in problems.values()), problems
