"""describe: bits, reasons and bytes of every parameter, before and after the first step, for all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import bnb_fsdp
from bnb_fsdp import AdamW, AdamW8bit, AdamW32bit, Lion8bit, backends, describe, sharding
from bnb_fsdp.report import MAX_LINES

CPU = torch.device("cpu")


@pytest.fixture
def world(request: Any) -> Iterator[int]:
    """A group of ``request.param`` ranks of which only this one, rank 1, exists: no call can communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def parameter(*shape: int, **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, **kwargs))


def train(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                p.grad = torch.ones_like(p)
    optimizer.step()


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())


def named(count: int = 3) -> Iterator[tuple[str, nn.Parameter]]:
    for layer in range(count):
        yield f"model.layers.{layer}.proj.weight", parameter(64, 70, dtype=torch.bfloat16)
        yield f"model.layers.{layer}.norm.weight", parameter(64, dtype=torch.bfloat16)
    yield "embed.weight", parameter(100, 64)


def test_a_row_says_what_a_parameter_has_and_why() -> None:
    description = describe(AdamW8bit(named(), overrides={"embed.*": {"optim_bits": 32}}))
    rows = {row.name: row for row in description.rows}
    assert len(rows) == len(description.rows) == 7
    row = rows["model.layers.1.proj.weight"]
    assert (row.shape, row.dtype, row.device, row.placement) == ((64, 70), "bfloat16", "cpu", "plain tensor")
    assert (row.bits, row.reason, row.residency, row.trainable) == (8, "optim_bits=8", "device", True)
    assert rows["model.layers.1.norm.weight"].reason == "64 elements < min_8bit_size=4096"
    assert rows["model.layers.1.norm.weight"].bits == 32
    assert (rows["embed.weight"].bits, rows["embed.weight"].reason) == (32, "override=32")


@pytest.mark.parametrize("kind", [AdamW8bit, AdamW32bit, Lion8bit], ids=lambda kind: kind.__name__)
def test_bytes_before_the_first_step_are_those_it_allocates(kind: Any) -> None:
    optimizer = kind(named())
    before = describe(optimizer)
    assert len(optimizer.state) == 0
    assert not any(row.allocated for row in before.rows)
    train(optimizer)
    after = describe(optimizer)
    assert all(row.allocated for row in after.rows)
    assert before.state_bytes == after.state_bytes == held_bytes(optimizer)
    assert before.total_state_bytes == after.total_state_bytes == held_bytes(optimizer)
    assert before.float32_bytes == after.float32_bytes


def test_float32_bytes_are_those_of_the_32_bit_class() -> None:
    reference = AdamW32bit(named())
    train(reference)
    description = describe(AdamW8bit(named()))
    assert description.float32_bytes == description.total_float32_bytes == held_bytes(reference)
    assert describe(reference).state_bytes == describe(reference).float32_bytes


def test_describing_changes_nothing() -> None:
    optimizer = AdamW8bit(named())
    train(optimizer)
    before = [(p.detach().clone(), dict(state)) for p, state in optimizer.state.items()]
    str(describe(optimizer))
    for (old, old_state), (p, state) in zip(before, optimizer.state.items()):
        assert torch.equal(p, old)
        assert all(state[key] is value for key, value in old_state.items())
    assert len(before) == len(optimizer.state)


def test_frozen_parameters_are_counted_and_have_a_row_only_with_state() -> None:
    p, q, r = (parameter(5000) for _ in range(3))
    r.requires_grad_(False)
    optimizer = AdamW8bit([p, q, r])
    train(optimizer)
    q.requires_grad_(False)
    description = describe(optimizer)
    assert description.frozen == 1
    assert [row.trainable for row in description.rows] == [True, False]
    assert description.state_bytes == held_bytes(optimizer)
    assert "1 frozen without" in str(description)
    assert "optim_bits=8; frozen" in str(description)


def test_parameters_without_names_go_by_their_place() -> None:
    optimizer = AdamW(
        [{"params": [parameter(5), parameter(6)]}, {"params": [parameter(5000)], "optim_bits": 8}]
    )
    names = [(row.name, row.group) for row in describe(optimizer).rows]
    assert names == [("group 0, parameter 0", 0), ("group 0, parameter 1", 0), ("group 1, parameter 0", 1)]


@pytest.mark.parametrize(
    "groups", [[{"params": []}], [{"params": []}, {"params": [parameter(5000)]}]], ids=len
)
def test_empty_groups_are_described(groups: list[dict[str, Any]]) -> None:
    description = describe(AdamW8bit(groups))
    assert description.groups == len(groups)
    assert len(description.rows) == len(groups) - 1
    assert str(description).startswith("AdamW8bit: ")


def test_state_of_other_bits_than_the_settings_give_is_explained() -> None:
    optimizer = AdamW8bit([parameter(5000)])
    train(optimizer)
    optimizer.param_groups[0]["optim_bits"] = 32
    (row,) = describe(optimizer).rows
    assert (row.bits, row.reason) == (8, "existing state (optim_bits=32 would give 32)")
    assert row.state_bytes == row.total_state_bytes == held_bytes(optimizer)


def test_layers_collapse_into_one_line_and_differences_keep_theirs() -> None:
    parameters = dict(named(30))
    overrides = {"model.layers.7.proj.weight": {"optim_bits": 32}}
    lines = str(describe(AdamW8bit(parameters.items(), overrides=overrides))).splitlines()
    table = {line.split()[0]: line.split()[1] for line in lines[3:-3]}
    assert table == {
        "model.layers.*.proj.weight": "29",
        "model.layers.7.proj.weight": "1",
        "model.layers.*.norm.weight": "30",
        "embed.weight": "1",
    }
    assert len(describe(AdamW8bit(parameters.items())).rows) == 61


def test_groups_tell_their_hyperparameters_and_many_are_cut() -> None:
    groups = [{"params": [parameter(8)], "lr": 0.1 * index} for index in range(1, 11)]
    description = describe(bnb_fsdp.LAMB(groups, trust_ratio="published", weight_decay=0.5))
    assert [settings["lr"] for settings in description.settings] == [group["lr"] for group in groups]
    lines = [line for line in str(description).splitlines() if line.startswith("and ") or " (adam): " in line]
    assert len(lines) == 9 and lines[-1] == "and 2 groups more"
    assert lines[0].startswith("group 0 (adam): lr 0.1, ") and "weight_decay 0.5" in lines[0]
    assert "trust_ratio published" in lines[0] and "params" not in lines[0]
    assert description.to_dict()["settings"][1]["lr"] == 0.2


def test_a_number_that_all_names_share_stays() -> None:
    optimizer = AdamW8bit([(f"stage.2.block.{i}.w", parameter(5000)) for i in range(4)])
    assert "stage.2.block.*.w " in str(describe(optimizer))


def test_columns_are_aligned() -> None:
    lines = str(describe(AdamW8bit(named()))).splitlines()
    rule = lines[2]
    starts = [i for i, c in enumerate(rule) if c == "-" and (i == 0 or rule[i - 1] == " ")]
    for line in [lines[1], *lines[3:-3]]:
        assert all(line[start - 2 : start] == "  " for start in starts[1:])


def test_a_long_table_is_cut_and_says_so() -> None:
    optimizer = AdamW8bit([(f"odd{'x' * i}", parameter(i + 1)) for i in range(MAX_LINES + 5)])
    text = str(describe(optimizer))
    assert "... and 5 more lines (5 parameters); see .rows" in text
    assert len(text.splitlines()) == MAX_LINES + 7
    assert max(map(len, text.splitlines())) < 240


def test_every_fallback_to_32_bit_is_counted_by_reason() -> None:
    description = describe(AdamW8bit(named(4), overrides={"embed.*": {"optim_bits": 32}}))
    assert description.fallbacks == {"elements < min_8bit_size=4096": 4, "override=32": 1}
    (line,) = [line for line in str(description).splitlines() if line.startswith("32-bit state")]
    assert line == "32-bit state: 5 of 9 parameters (4 x elements < min_8bit_size=4096; 1 x override=32)"


def test_totals_and_savings_are_printed() -> None:
    optimizer = AdamW8bit([parameter(1024, 1024)])
    train(optimizer)
    wanted = f"{1 - held_bytes(optimizer) / (8 * 2**20 + 4):.1%} saved"
    (line,) = [line for line in str(describe(optimizer)).splitlines() if line.startswith("state:")]
    assert line.endswith(wanted)
    assert "2.0 MiB on this rank" in line


def test_the_dictionary_is_plain_json_and_agrees_with_the_attributes() -> None:
    description = describe(AdamW8bit(named()))
    data = json.loads(json.dumps(description.to_dict()))
    assert data["rows"][0]["shape"] == [64, 70]
    assert data["total_state_bytes"] == description.total_state_bytes
    assert sum(row["state_bytes"] for row in data["rows"]) == description.state_bytes == data["state_bytes"]
    assert data["optimizer"] == "AdamW8bit"


def test_a_wrapped_optimizer_is_described_and_a_foreign_one_refused() -> None:
    class Wrapper:
        optimizer = AdamW8bit([parameter(5000)])

    assert len(describe(Wrapper()).rows) == 1  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.optim.*SGD"):
        describe(torch.optim.SGD([parameter(5)]))


@pytest.mark.parametrize("requested", ["auto", "torch"])
def test_the_backend_is_what_the_step_would_use(requested: str) -> None:
    (row,) = describe(AdamW8bit([parameter(5000)], backend=requested)).rows
    assert row.backend == backends.select(CPU, requested).name


def test_meta_parameters_have_no_backend_yet() -> None:
    (row,) = describe(AdamW8bit([parameter(5000, device="meta")], backend="auto")).rows
    assert (row.backend, row.device, row.residency) == ("none yet", "meta", "device")
    assert row.state_bytes == 2 * (5000 + 4 * 20) + 4


@pytest.mark.parametrize("error", [RuntimeError, ImportError, ValueError], ids=lambda error: error.__name__)
def test_a_backend_that_cannot_be_had_is_a_note_and_no_error(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(device: torch.device, requested: str) -> backends.Backend:
        raise error("no library here")

    monkeypatch.setattr(backends, "select", missing)
    description = describe(AdamW8bit([parameter(5000), parameter(5000)]))
    assert [row.backend for row in description.rows] == ["none", "none"]
    assert str(description).count("no library here") == 1


def test_a_fallback_warning_turned_into_an_error_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def falls_back(device: torch.device, requested: str) -> backends.Backend:
        calls.append(device)
        if len(calls) == 1:
            raise RuntimeWarning("slow")
        return backends.TorchBackend()

    monkeypatch.setattr(backends, "select", falls_back)
    description = describe(AdamW8bit([parameter(5000)], backend="auto"))
    assert description.rows[0].backend == "torch"
    assert "slow torch backend" in str(description)


def shard(mesh: DeviceMesh, local: torch.Tensor, shape: tuple[int, ...], placements: Any) -> nn.Parameter:
    stride = torch.empty(shape, device="meta").stride()
    return nn.Parameter(
        DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    )


def state_bytes(numel: int) -> int:
    return 2 * (numel + 4 * -(-numel // 256)) + 4


@pytest.mark.parametrize("world", [3], indirect=True)
def test_the_total_over_ranks_counts_uneven_and_empty_shards(world: int) -> None:
    mesh = DeviceMesh("cpu", list(range(world)))
    uneven = shard(mesh, torch.zeros(2, 1000), (5, 1000), [Shard(0)])  # 2, 2 and 1 rows
    empty = shard(mesh, torch.zeros(0, 5000), (1, 5000), [Shard(0)])  # 1, 0 and 0 rows
    optimizer = AdamW8bit([("uneven", uneven), ("empty", empty)])
    for _ in range(2):  # before and after the first step
        first, second = describe(optimizer).rows
        assert (first.shape, first.placement) == ((5, 1000), "[Shard(dim=0)]")
        assert (first.state_bytes, second.state_bytes) == (state_bytes(2000), state_bytes(0))
        assert first.total_state_bytes == 2 * state_bytes(2000) + state_bytes(1000)
        assert second.total_state_bytes == state_bytes(5000) + 2 * state_bytes(0)
        assert first.total_float32_bytes == 8 * 5000 + 3 * 4
        for p in (uneven, empty):
            p.grad = torch.ones_like(p)
        optimizer.step()


@pytest.mark.parametrize("world", [4], indirect=True)
def test_replicas_count_and_plain_tensors_count_on_every_rank(world: int) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    hybrid = shard(mesh, torch.zeros(2500), (5000,), [Replicate(), Shard(0)])
    half = shard(mesh["shard"], torch.zeros(2500), (5000,), [Shard(0)])
    rows = describe(AdamW8bit([hybrid, half, parameter(5000)])).rows
    assert [row.total_state_bytes for row in rows] == [
        4 * state_bytes(2500), 2 * state_bytes(2500), 4 * state_bytes(5000),
    ]  # fmt: skip
    assert [row.placement for row in rows] == [
        "[Replicate(), Shard(dim=0)]",
        "[Shard(dim=0)]",
        "plain tensor",
    ]


@pytest.mark.parametrize("world", [1000], indirect=True)
def test_the_shares_of_a_thousand_ranks_are_worked_out_once_a_shape(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand shares take some 15 ms, so a thousand parameters of ten shapes a moment."""
    asked = []
    local_shapes = sharding.local_shapes
    monkeypatch.setattr(sharding, "local_shapes", lambda p: asked.append(p) or local_shapes(p))
    mesh = DeviceMesh("cpu", list(range(world)))
    parameters = [
        (
            f"layers.{i // 10}.w{i % 10}",
            shard(mesh, torch.zeros(2, 8 + i % 10), (1999, 8 + i % 10), [Shard(0)]),
        )
        for i in range(1000)
    ]
    description = describe(AdamW8bit(parameters))
    assert len(asked) == 10
    assert description.rows[0].total_state_bytes == 999 * state_bytes(16) + state_bytes(8)
    assert len(str(description).splitlines()) == 3 + 10 + 3
