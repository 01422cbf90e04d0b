"""`save_checkpoint` and `load_checkpoint`: complete or refused, at any number of ranks, cut along any dimensions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint_faults
import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoint_faults import Model, contents, optimizer_for, same, train
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import bnb_fsdp

FAULTS = {fault[0]: fault for fault in checkpoint_faults.faults()}
CUT = {"a": (64, 512), "b": (36, 300), "c": (12, 20, 92), "d": (8, 1792), "e": (512, 12), "f": (5,)}
HALF_GAPS = (0.00704, 0.00353)  # of the signed and the unsigned map, in parts of a block's scale


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_by_name_and_nothing_changes(name: str, tmp_path: Path) -> None:
    assert checkpoint_faults.try_fault(FAULTS[name], tmp_path) == "refused"


def test_killed_at_any_moment_the_last_complete_checkpoint_loads(tmp_path: Path) -> None:
    script = Path(checkpoint_faults.__file__)
    out = tmp_path / "counts.json"
    run = subprocess.run(
        [sys.executable, script, "--only-kills", "--kills", "12", "--json", out],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    drill = json.loads(out.read_text())["drill"]
    assert drill["kills"] == 12 and drill["of one rank"] == 4
    assert drill["resumed"] == 11 and drill["lost"] == drill["hung"] == 0
    assert drill["left a partial save"] > 0  # else no kill came while a checkpoint was written


def parameters_of(model: nn.Module) -> list[DTensor]:
    return [p for p in model.parameters() if isinstance(p, DTensor)]


def sharded(dim: int, shapes: dict[str, tuple[int, ...]] = CUT) -> nn.Module:
    model = Model(shapes).to(ranks.device())
    fully_shard(model, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))
    return model


def values_of(optimizer: Any, parameter: DTensor) -> list[tuple[Tensor, Tensor]]:
    """(values, each element's scale) of the two states, in full, dequantised by hand."""
    from bitsandbytes.functional import create_dynamic_map

    result = []
    held = optimizer.state[parameter]
    for index, signed in enumerate((True, False), 1):
        codes = held[f"state{index}"].cpu()
        if codes.dtype == torch.float32:
            parts = [codes, torch.zeros_like(codes)]
        else:
            scales = held[f"absmax{index}"].cpu().repeat_interleave(256)[: codes.numel()].view(codes.shape)
            parts = [create_dynamic_map(signed)[codes.long()] * scales, scales]
        mesh, placements = parameter.device_mesh, parameter.placements
        result.append(
            tuple(
                DTensor.from_local(
                    part.to(ranks.device()),
                    mesh,
                    placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                .full_tensor()
                .cpu()
                for part in parts
            )
        )
    return result


def save_cuts(folder: str) -> dict[str, Any]:
    """Save a model cut along each dimension; the values of its state."""
    found = {}
    for dim in range(3):
        model = sharded(dim)
        optimizer = optimizer_for(model)
        for step in range(3):
            train(model, optimizer, step)
        bnb_fsdp.save_checkpoint(
            f"{folder}/cut{dim}", model, optimizer, extra={"dim": dim, "rank": dist.get_rank()}
        )
        found[f"cut{dim}"] = [
            (p.full_tensor().detach().cpu(), values_of(optimizer, p)) for p in parameters_of(model)
        ]
    return found


def load_cuts(folder: str) -> dict[tuple[str, int], Any]:
    """Load each of them into a model cut along each dimension."""
    found = {}
    for name in ("cut0", "cut1", "cut2"):
        for dim in range(3):
            model = sharded(dim)
            optimizer = optimizer_for(model)
            train(model, optimizer, 50)  # state to overwrite
            extra = bnb_fsdp.load_checkpoint(f"{folder}/{name}", model, optimizer)
            parameters = parameters_of(model)
            steps = [float(optimizer.state[p]["step"]) for p in parameters]
            values = [(p.full_tensor().detach().cpu(), values_of(optimizer, p)) for p in parameters]
            train(model, optimizer, 51)
            report = optimizer.load_report
            found[name, dim] = (values, steps, report.blocks, report.requantized, extra)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_cuts_along_other_dimensions_load(tmp_path: Path, world: int) -> None:
    saved = ranks.run(2, save_cuts, str(tmp_path))[0]
    results = ranks.run(world, load_cuts, str(tmp_path))
    for rank, result in enumerate(results):
        for (name, dim), (values, steps, blocks, requantized, extra) in result.items():
            assert steps == [3.0] * len(CUT)
            assert extra == {"dim": int(name[-1]), "rank": rank if world == 2 else 0}
            for key, (parameter, states), (was, olds) in zip(CUT, values, saved[name]):
                assert torch.equal(parameter, was)
                for (value, scale), (old, _), half_gap in zip(states, olds, HALF_GAPS):
                    assert float((value - old).abs().sub(half_gap * scale).max()) <= 0, (name, dim, key)
                    aligned = key == "f" or (key == "a" and (world == 2 or dim == 0))  # 512 / 4 is no block
                    exact = aligned or (world == 2 and dim == int(name[-1]))
                    assert not exact or torch.equal(value, old), (name, dim, key)
            assert blocks >= requantized >= 0
            if dim != int(name[-1]):
                assert requantized > 0
            elif world == 2:
                assert requantized == 0


def one_rank_fails(folder: str) -> list[str]:
    """Errors of ranks when one cannot write, and when one finds a damaged file."""
    model = sharded(0)
    optimizer = optimizer_for(model)
    train(model, optimizer, 0)
    errors = []
    extra = {"bad": object()} if dist.get_rank() == 1 else {}
    for name, values in (("bad", extra), ("good", {})):
        try:
            bnb_fsdp.save_checkpoint(f"{folder}/{name}", model, optimizer, extra=values)
        except bnb_fsdp.CheckpointError as error:
            errors.append(str(error))
    dist.barrier()
    if dist.get_rank() == 1:
        path = Path(folder) / "good" / "__1_0.distcp"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    before = contents(model, optimizer)
    try:
        bnb_fsdp.load_checkpoint(f"{folder}/good", model, optimizer)
    except bnb_fsdp.CheckpointError as error:
        errors.append(str(error))
    errors.append(str(same(before, contents(model, optimizer))))
    return errors


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    results = ranks.run(2, one_rank_fails, str(tmp_path))
    assert results[0] == results[1]
    unreadable, damaged, unchanged = results[0]
    assert "on rank 1 of 2" in unreadable and "weights_only=True" in unreadable
    assert "__1_0.distcp was changed" in damaged
    assert unchanged == "True"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


# One process


def trained(steps: int = 2) -> tuple[nn.Module, Any]:
    model = Model()
    optimizer = optimizer_for(model)
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def test_without_torch_distributed_it_continues_bit_for_bit(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, optimizer = trained()
    extra = {"epoch": 3, "rng": torch.arange(4), "name": "x", "list": [1, 2.5]}
    path = bnb_fsdp.save_checkpoint(tmp_path / "new" / "folder" / "one", model, optimizer, extra=extra)
    assert path == tmp_path / "new" / "folder" / "one"
    fresh = Model()
    fresh_optimizer = optimizer_for(fresh)
    loaded = bnb_fsdp.load_checkpoint(path, fresh, fresh_optimizer)
    assert torch.equal(loaded.pop("rng"), extra.pop("rng")) and loaded == extra
    for step in range(2, 5):
        train(model, optimizer, step)
        train(fresh, fresh_optimizer, step)
    assert same(contents(model, optimizer), contents(fresh, fresh_optimizer))
    assert [str(w.message) for w in recwarn if "torch.distributed" in str(w.message)] == []


def test_the_newest_k_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    model, optimizer = trained()
    foreign = tmp_path / "notes"
    foreign.mkdir()
    for number in (9, 10, 8, 11):  # order of saving, not of names
        (tmp_path / f".step-{number}.partial-dead").mkdir()
        bnb_fsdp.save_checkpoint(
            tmp_path / f"step-{number}", model, optimizer, extra={"number": number}, keep=2
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-11", "step-8"]
    assert bnb_fsdp.load_checkpoint(tmp_path, model, optimizer) == {"number": 11}
    (tmp_path / "step-11" / "bnb_fsdp.json").write_text("{")
    assert bnb_fsdp.load_checkpoint(tmp_path, model, optimizer) == {"number": 8}


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(bnb_fsdp.CheckpointError, match="one exists; a checkpoint is never written over"):
        bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [item.name for item in tmp_path.iterdir()] == ["one"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    model, optimizer = trained()
    before = contents(model, optimizer)
    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(bnb_fsdp.CheckpointError, match=r"saving .*one failed on rank 0: .*No space left"):
        bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    assert list(tmp_path.iterdir()) == []
    assert same(before, contents(model, optimizer))


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnb_fsdp.checkpoint import directory

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    model, optimizer = trained()
    monkeypatch.setattr(directory, "_publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    def lora() -> tuple[nn.Module, Any]:
        model = Model()
        model.get_parameter("large").requires_grad_(False)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = bnb_fsdp.AdamW8bit([{"params": trainable}, {"params": []}], lr=0.01)
        return model, optimizer

    def step(model: nn.Module, optimizer: Any, seed: int) -> None:
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    model, optimizer = lora()
    step(model, optimizer, 0)
    path = bnb_fsdp.save_checkpoint(tmp_path / "adapter", model, optimizer, frozen=False)
    whole = bnb_fsdp.save_checkpoint(tmp_path / "whole", model, optimizer)
    size = {p.name: sum(file.stat().st_size for file in p.iterdir()) for p in (path, whole)}
    assert size["adapter"] + 64 * 512 * 4 < size["whole"]
    for source in (path, whole):
        fresh, fresh_optimizer = lora()
        with torch.no_grad():
            fresh.get_parameter("large").zero_()
        bnb_fsdp.load_checkpoint(source, fresh, fresh_optimizer)
        assert bool(fresh.get_parameter("large").any()) == (source == whole)
        trained_part = {k: v for k, v in contents(model, optimizer).items() if k != "large"}
        assert same(trained_part, {k: v for k, v in contents(fresh, fresh_optimizer).items() if k != "large"})


def test_never_stepped_is_saved_as_never_stepped(tmp_path: Path) -> None:
    model, optimizer = trained(steps=0)
    bnb_fsdp.save_checkpoint(tmp_path / "zero", model, optimizer)
    untouched, untouched_optimizer = trained(steps=0)
    fresh, fresh_optimizer = trained(steps=2)
    bnb_fsdp.load_checkpoint(tmp_path / "zero", fresh, fresh_optimizer)
    for m, o in ((model, optimizer), (untouched, untouched_optimizer), (fresh, fresh_optimizer)):
        train(m, o, 5)
    assert same(contents(model, optimizer), contents(untouched, untouched_optimizer))
    assert same(contents(model, optimizer), contents(fresh, fresh_optimizer))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep=0 must be None or an integer >= 1"),
        ({"keep": 1.5}, "keep=1.5 must be"),
        ({"extra": [1]}, "extra must be a dict, got list"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    model, optimizer = trained()
    with pytest.raises(ValueError, match=message):
        bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(ValueError, match="optimizer is a AdamW, expected an optimizer of bnb_fsdp"):
        bnb_fsdp.save_checkpoint(tmp_path / "one", model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]


def test_unverified_still_compares_sizes(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(bnb_fsdp.CheckpointError, match=r"__0_0.distcp has \d+ bytes instead of"):
        bnb_fsdp.load_checkpoint(path, model, optimizer, verify=False)


def test_progress_of_a_long_save_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import time

    from bnb_fsdp.checkpoint import directory

    finish = directory._finish

    def slow(*args: Any) -> Any:
        time.sleep(1.3)
        return finish(*args)

    model, optimizer = trained()
    monkeypatch.setattr(directory, "_finish", slow)
    bnb_fsdp.save_checkpoint(tmp_path / "quiet", model, optimizer)
    assert capsys.readouterr().err == ""  # no terminal, not asked for
    bnb_fsdp.save_checkpoint(tmp_path / "shown", model, optimizer, progress=True)
    text = capsys.readouterr().err
    assert "saving shown: " in text and "% of 0.00 GB after 1 s" in text


@pytest.mark.parametrize(("saved_as", "loaded_as"), [("plain", "channels_last"), ("channels_last", "plain")])
def test_another_order_of_dimensions_in_memory_loads(tmp_path: Path, saved_as: str, loaded_as: str) -> None:
    def convolutions(kind: str) -> tuple[nn.Module, Any]:
        order = torch.channels_last if kind == "channels_last" else torch.contiguous_format
        model = Model({"a": (8, 70, 3, 3), "b": (5, 256, 3, 2), "c": (4, 3, 2, 256)}).to(memory_format=order)
        return model, bnb_fsdp.AdamW8bit(model.named_parameters(), lr=0.01)

    def values(optimizer: Any, parameter: Tensor) -> list[tuple[Tensor, Tensor]]:
        from bitsandbytes.functional import create_dynamic_map

        found = []
        for index, signed in enumerate((True, False), 1):
            codes = optimizer.state[parameter][f"state{index}"]
            scales = torch.empty_like(codes, dtype=torch.float32)
            by_block = optimizer.state[parameter][f"absmax{index}"].repeat_interleave(256)
            torch.as_strided(scales, (codes.numel(),), (1,)).copy_(by_block[: codes.numel()])
            found.append((create_dynamic_map(signed)[codes.long()] * scales, scales))
        return found

    model, optimizer = convolutions(saved_as)
    for step in range(3):
        train(model, optimizer, step)
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    fresh, fresh_optimizer = convolutions(loaded_as)
    bnb_fsdp.load_checkpoint(path, fresh, fresh_optimizer)
    for p, q in zip(model.parameters(), fresh.parameters()):
        assert torch.equal(p, q) and p.stride() != q.stride()
        for (old, _), (new, scale), half_gap in zip(
            values(optimizer, p), values(fresh_optimizer, q), HALF_GAPS
        ):
            assert float((new - old).abs().sub(half_gap * scale).max()) <= 0 and bool(new.any())
    report = fresh_optimizer.load_report
    assert report.requantized == report.blocks > 0
    train(fresh, fresh_optimizer, 3)
