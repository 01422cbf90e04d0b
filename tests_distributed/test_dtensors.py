"""DTensors of other placements than FSDP2's first-dimension shards, those that are refused, and what step() runs."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bnb_fsdp

SHAPE = (48, 512)


def full(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def distributed(seed: int, mesh: Any, placements: list[Any]) -> DTensor:
    return distribute_tensor(full(seed).to(ranks.device()), mesh, placements)


class Watch(TorchDispatchMode):
    """The operators that run, and whether any of them saw a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.saw_dtensor = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(function))
        self.saw_dtensor |= any(issubclass(kind, DTensor) for kind in types)
        return function(*args, **(kwargs or {}))


def refusals() -> dict[str, str]:
    """Error texts of what cannot work, and proof that nothing changed."""
    mesh = init_device_mesh(ranks.device().type, (dist.get_world_size(),))
    texts = {}
    partial = nn.Parameter(DTensor.from_local(full(0).to(ranks.device()), mesh, [Partial()]))
    try:
        bnb_fsdp.AdamW8bit([("decoder.weight", partial)])
    except ValueError as error:
        texts["partial"] = str(error)
    parameter = nn.Parameter(distributed(0, mesh, [Shard(0)]))
    optimizer = bnb_fsdp.AdamW8bit([("decoder.weight", parameter)])
    for name, gradient in (
        ("replicated gradient", distributed(1, mesh, [Replicate()])),
        ("partial gradient", DTensor.from_local(full(1).to(ranks.device()), mesh, [Partial()])),
    ):
        parameter.grad = gradient
        try:
            optimizer.step()
        except ValueError as error:
            texts[name] = str(error)
    before = distributed(0, mesh, [Shard(0)]).to_local()
    texts["unchanged"] = str(torch.equal(parameter.to_local(), before) and len(optimizer.state) == 0)
    return texts


def refusals_of_storage() -> dict[str, tuple[str, bool]]:
    """Shards whose elements share memory, within one parameter or between two: error texts, and whether all stayed."""
    mesh = init_device_mesh(ranks.device().type, (dist.get_world_size(),))
    rows, columns = SHAPE[0] // dist.get_world_size(), SHAPE[1]
    memory = torch.randn(2 * rows * columns, generator=torch.Generator().manual_seed(7)).to(ranks.device())

    def part(first: int, stride: tuple[int, int] = (columns, 1)) -> nn.Parameter:
        shard = memory.as_strided((rows, columns), stride, first)
        placed = DTensor.from_local(
            shard, mesh, [Shard(0)], shape=SHAPE, stride=(columns, 1), run_check=False
        )
        return nn.Parameter(placed)

    cases = {
        "all rows are one": [("decoder.weight", part(0, (0, 1)))],
        "all columns are one": [("decoder.weight", part(0, (1, 0)))],
        "rows that share elements": [("decoder.weight", part(0, (columns - 1, 1)))],
        "the same memory": [("encoder.weight", part(0)), ("decoder.weight", part(0))],
        "one element in common": [("encoder.weight", part(0)), ("decoder.weight", part(rows * columns - 1))],
        "side by side": [("encoder.weight", part(0)), ("decoder.weight", part(rows * columns))],
    }
    found = {}
    for name, named in cases.items():
        before, text, optimizer = memory.clone(), "", None
        try:
            optimizer = bnb_fsdp.AdamW8bit(named)
            for _, parameter in named:
                parameter.grad = distributed(1, mesh, [Shard(0)])
            optimizer.step()
        except ValueError as error:
            text = str(error)
        has_state = optimizer is not None and len(optimizer.state) > 0
        found[name] = (text, torch.equal(memory, before) and not has_state)
    return found


def all_refusals() -> tuple[dict[str, str], dict[str, tuple[str, bool]]]:
    return refusals(), refusals_of_storage()


def placements_match_local(mesh_shape: tuple[int, ...], names: list[list[Any]]) -> list[str]:
    """Step DTensors of all the placements in one optimizer, a plain tensor among them; what differs from plain ones."""
    mesh = init_device_mesh(ranks.device().type, mesh_shape)
    parameters: list[nn.Parameter] = [nn.Parameter(distributed(i, mesh, p)) for i, p in enumerate(names)]
    parameters.append(nn.Parameter(full(99).to(ranks.device())))
    twins = [
        nn.Parameter(
            (p.to_local() if isinstance(p, DTensor) else p)
            .detach()
            .clone(memory_format=torch.preserve_format)
        )
        for p in parameters
    ]
    optimizer = bnb_fsdp.AdamW8bit(parameters, lr=1e-2)
    twin_optimizer = bnb_fsdp.AdamW8bit(twins, lr=1e-2, min_8bit_size=0)
    pointers = [(p.to_local() if isinstance(p, DTensor) else p).data_ptr() for p in parameters]
    for step in range(3):
        for index, (p, twin) in enumerate(zip(parameters, twins)):
            seed = 1000 + 10 * step + index
            g = distributed(seed, mesh, names[index]) if isinstance(p, DTensor) else full(seed).to(p.device)
            p.grad, twin.grad = g, (g.to_local() if isinstance(g, DTensor) else g).clone()
        optimizer.step()
        twin_optimizer.step()
    problems = []
    for index, (p, twin) in enumerate(zip(parameters, twins)):
        local = p.to_local() if isinstance(p, DTensor) else p
        label = f"{index}: {p.placements if isinstance(p, DTensor) else 'plain'}"
        if not torch.equal(local, twin):
            problems.append(f"{label}: parameter")
        if local.data_ptr() != pointers[index]:
            problems.append(f"{label}: storage moved")
        for key, value in optimizer.state[p].items():
            if isinstance(value, DTensor) or not torch.equal(value, twin_optimizer.state[twin][key]):
                problems.append(f"{label}: {key}")
        if isinstance(p, DTensor) and Replicate() in p.placements:
            gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, local.detach().contiguous())
            if all(isinstance(x, Replicate) for x in p.placements) and not all(
                torch.equal(local, x) for x in gathered
            ):
                problems.append(f"{label}: replicas differ")
    return problems


def operators_of_a_step() -> tuple[list[str], bool, int]:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 3)).to(ranks.device())
    fully_shard(model)
    optimizer = bnb_fsdp.AdamW8bit(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, 256, device=ranks.device())).sum().backward()
        with Watch() as watch:
            optimizer.step()
        optimizer.zero_grad()
    return watch.operators, watch.saw_dtensor, len(optimizer.state)


@pytest.fixture(scope="module")
def refused() -> list[tuple[dict[str, str], dict[str, tuple[str, bool]]]]:
    """What `all_refusals` found on each rank."""
    return ranks.run(2, all_refusals)


def test_what_cannot_work_is_refused_by_name_and_nothing_changes(refused: Any) -> None:
    for texts, _ in refused:
        assert "parameter 'decoder.weight'" in texts["partial"] and "redistribute" in texts["partial"]
        for name in ("replicated gradient", "partial gradient"):
            assert "parameter 'decoder.weight'" in texts[name] and "Redistribute the gradient" in texts[name]
        assert texts["unchanged"] == "True"


ALONE = ("all rows are one", "all columns are one", "rows that share elements")
PAIRS = ("the same memory", "one element in common")


def test_shards_that_share_memory_are_refused_by_name_and_nothing_changes(refused: Any) -> None:
    for _, found in refused:
        for name in ALONE:
            text, unchanged = found[name]
            assert "parameter 'decoder.weight'" in text and "stride" in text and unchanged, (name, text)
            assert "overlapping storage" in text
        for name in PAIRS:
            text, unchanged = found[name]
            assert "'encoder.weight'" in text and "'decoder.weight'" in text and unchanged, (name, text)
            assert "overlapping storage" in text
        assert found["side by side"] == ("", False)
        assert set(found) == {*ALONE, *PAIRS, "side by side"}


@pytest.mark.parametrize(
    "mesh_shape, placements",
    [
        pytest.param((2,), [[Shard(0)], [Shard(1)], [Replicate()]], id="one dimension"),
        pytest.param(
            (2, 2), [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]], id="two dimensions"
        ),
    ],
)
def test_other_placements_and_plain_tensors_in_one_optimizer_step_as_plain_ones(
    mesh_shape: tuple[int, ...], placements: list[list[Any]]
) -> None:
    for problems in ranks.run(torch.Size(mesh_shape).numel(), placements_match_local, mesh_shape, placements):
        assert problems == []


def test_a_step_runs_no_dtensor_operator_and_no_collective() -> None:
    for operators, saw_dtensor, states in ranks.run(2, operators_of_a_step):
        assert states == 4
        assert not saw_dtensor, operators
        assert not [name for name in operators if "c10d" in name], operators
