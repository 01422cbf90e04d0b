"""`save_checkpoint` and `load_checkpoint`: complete or refused, at any number of ranks, cut along any dimensions."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_faults
import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoint_faults import Model, contents, optimizer_for, same, train, trained
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import bnb_fsdp
from bnb_fsdp import cli

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


def save_and_load_after_evaluating(folder: str) -> list[bool]:
    """A forward pass without a backward pass leaves fully_shard's root with its gathered parameters."""
    found = []
    for reshard_after_forward in (None, False):  # None: all but the root
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(ranks.device())
        for module in (model[0], model):
            fully_shard(module, reshard_after_forward=reshard_after_forward)
        optimizer = bnb_fsdp.AdamW8bit(model.named_parameters())
        data = torch.ones(2, 64, device=ranks.device())
        model(data).sum().backward()
        optimizer.step()
        with torch.no_grad():
            before = model(data)
        assert not all(isinstance(p, DTensor) for p in model.parameters())
        path = bnb_fsdp.save_checkpoint(f"{folder}/{reshard_after_forward}", model, optimizer)
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.zero_()
            model(data)
        bnb_fsdp.load_checkpoint(path, model, optimizer)
        with torch.no_grad():
            found.append(torch.equal(model(data), before))
    return found


def test_saving_and_loading_after_an_evaluation(tmp_path: Path) -> None:
    assert ranks.run(2, save_and_load_after_evaluating, str(tmp_path)) == [[True, True]] * 2


# One process


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


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], seal: bool = True) -> None:
    """Change a manifest, and its checksum if ``seal``."""
    values = json.loads((path / "bnb_fsdp.json").read_text())
    change(values)
    if seal:
        del values["sha256"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        values["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "bnb_fsdp.json").write_text(json.dumps(values))


def reseal(path: Path, name: str) -> None:
    """Give a changed file its checksum in the manifest."""
    data = (path / name).read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(path, lambda values: values["files"].update({name: entry}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "bnb_fsdp.json").write_text("{"), "is damaged"),
        (lambda path: rewrite(path, lambda m: m.update(sequence=0), seal=False), "its own checksum differs"),
        (lambda path: rewrite(path, lambda m: m.update(version=9)), "Install a newer"),
        (lambda path: (path / "bnb_fsdp.json").unlink(), "has no bnb_fsdp.json"),
    ],
    ids=["a cut manifest", "another sequence", "a newer format", "no manifest"],
)
def test_a_damaged_newest_checkpoint_is_not_passed_over(
    tmp_path: Path, damage: Callable[[Path], Any], reason: str
) -> None:
    model, optimizer = trained()
    for number in (1, 2):
        bnb_fsdp.save_checkpoint(tmp_path / f"step-{number}", model, optimizer, extra={"number": number})
    damage(tmp_path / "step-2")
    with pytest.raises(bnb_fsdp.CheckpointError) as caught:
        bnb_fsdp.load_checkpoint(tmp_path, model, optimizer)
    assert reason in str(caught.value) and f"load {tmp_path / 'step-1'} by its own path" in str(caught.value)
    assert bnb_fsdp.load_checkpoint(tmp_path / "step-1", model, optimizer) == {"number": 1}
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-3", model, optimizer, extra={"number": 3}, keep=2)
    assert json.loads((path / "bnb_fsdp.json").read_text())["sequence"] >= 2
    assert bnb_fsdp.load_checkpoint(tmp_path, model, optimizer) == {"number": 3}  # the damaged one is older
    assert (tmp_path / "step-2").is_dir()


def test_only_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-1", model, optimizer)
    rewrite(path, lambda m: m.update(version=9))
    with pytest.raises(bnb_fsdp.CheckpointError, match=r"no complete checkpoint: .*step-1 has format 9"):
        bnb_fsdp.load_checkpoint(tmp_path, model, optimizer)
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-2", model, optimizer)
    assert json.loads((path / "bnb_fsdp.json").read_text())["sequence"] == 2


def test_links_and_converted_copies_are_not_counted(tmp_path: Path) -> None:
    model, optimizer = trained()
    for number in (1, 2, 3):
        bnb_fsdp.save_checkpoint(
            tmp_path / f"step-{number}", model, optimizer, extra={"number": number}, keep=2
        )
        (tmp_path / "latest").unlink(missing_ok=True)
        (tmp_path / "latest").symlink_to(f"step-{number}")
        if number == 2:
            for to in ("torch", "bnb_fsdp"):
                arguments = [
                    "checkpoint",
                    "convert",
                    tmp_path / "step-2",
                    tmp_path / f"copy-{to}",
                    "--to",
                    to,
                ]
                assert cli.main(list(map(str, arguments))) == 0
            assert bnb_fsdp.load_checkpoint(tmp_path, model, optimizer) == {"number": 2}
    names = {"latest", "step-2", "step-3", "copy-torch", "copy-bnb_fsdp"}
    assert {path.name for path in tmp_path.iterdir()} == names
    bnb_fsdp.save_checkpoint(tmp_path / "step-4", model, optimizer, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-3", "step-4", "copy-torch"}
    assert bnb_fsdp.load_checkpoint(tmp_path / "latest", model, optimizer) == {"number": 3}


def test_what_others_are_writing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnb_fsdp.checkpoint import manifest

    model, optimizer = trained()
    writing, lock = manifest.staging(tmp_path / "other")
    assert lock is not None
    bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer, keep=1)
    assert writing.is_dir()
    os.close(lock)
    bnb_fsdp.save_checkpoint(tmp_path / "two", model, optimizer, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["two"]

    def unsupported(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(manifest.fcntl, "flock", unsupported)
    names = [".fresh.partial-00", ".old.partial-00", ".gone.deleted-00"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / names[1] / "file").touch()
    for path in (tmp_path / names[1] / "file", tmp_path / names[1]):
        os.utime(path, (path.stat().st_mtime - 3700,) * 2)
    bnb_fsdp.save_checkpoint(tmp_path / "three", model, optimizer, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"three", ".fresh.partial-00"}


def test_a_conversion_in_progress_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnb_fsdp.checkpoint import convert

    model, optimizer = trained()
    bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    add = convert._add_manifest

    def meanwhile(*args: Any) -> None:
        bnb_fsdp.save_checkpoint(tmp_path / "two", model, optimizer, keep=3)
        add(*args)

    monkeypatch.setattr(convert, "_add_manifest", meanwhile)
    arguments = ["checkpoint", "convert", tmp_path / "one", tmp_path / "out", "--to", "torch"]
    assert cli.main(list(map(str, arguments))) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "out"}


def refusing(method: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``method`` of paths that contain ``text`` raises, as it does for who may not: root may everything."""
    original = getattr(Path, method)

    def refuse(self: Path, *args: Any) -> Any:
        if text in str(self):
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *args)

    monkeypatch.setattr(Path, method, refuse)


def test_a_directory_one_may_not_enter_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    (tmp_path / "lost+found").mkdir()
    refusing("is_file", "lost+found/", monkeypatch)
    bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer, extra={"number": 1}, keep=1)
    assert bnb_fsdp.load_checkpoint(tmp_path, model, optimizer) == {"number": 1}


def test_what_cannot_be_removed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    bnb_fsdp.save_checkpoint(tmp_path / "step-1", model, optimizer)
    refusing("rename", "step-1", monkeypatch)
    for number in (2, 3):
        bnb_fsdp.save_checkpoint(tmp_path / f"step-{number}", model, optimizer, keep=1)
        assert "step-1: [Errno 13] Permission denied" in caplog.text
        caplog.clear()
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-3"}


GROUPS = {"first": [None, 0, 1], "middle": [0, None, 1], "last": [0, 1, None], "two": [None, 0, None, 1]}


@pytest.mark.parametrize("place", GROUPS)
def test_a_group_without_parameters_may_be_anywhere(tmp_path: Path, place: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = Model()
        parts = [[model.get_parameter("large"), model.get_parameter("small")], [model.get_parameter("odd")]]
        groups = [
            {"params": [] if part is None else parts[part], "lr": 0.01 * (index + 1)}
            for index, part in enumerate(GROUPS[place])
        ]
        return model, bnb_fsdp.AdamW8bit(groups)

    model, optimizer = build()
    train(model, optimizer, 0)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    fresh, fresh_optimizer = build()
    bnb_fsdp.load_checkpoint(tmp_path / "one", fresh, fresh_optimizer)
    assert same(contents(model, optimizer), contents(fresh, fresh_optimizer))


def test_a_failure_after_loading_began_says_so(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    last = max(metadata.storage_data.values(), key=lambda info: info.offset)
    with (path / last.relative_path).open("r+b") as file:
        file.seek(last.offset)
        file.write(bytes(60))
    with pytest.raises(bnb_fsdp.CheckpointError, match="may have been partly overwritten: load another"):
        bnb_fsdp.load_checkpoint(path, model, optimizer, verify=False)


def test_a_momentum_that_reached_zero_loads(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = Model()
        return model, bnb_fsdp.SGD8bit(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = build()
    train(model, optimizer, 0)
    optimizer.param_groups[0]["momentum"] = 0.0
    bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    fresh, fresh_optimizer = build()
    bnb_fsdp.load_checkpoint(tmp_path / "one", fresh, fresh_optimizer)
    assert fresh_optimizer.param_groups[0]["momentum"] == 0.0
    assert same(contents(model, optimizer), contents(fresh, fresh_optimizer))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", float("nan"), "lr=nan must be finite"),
        ("betas", (0.9, 1.0), r"betas=\(0.9, 1.0\)"),
        ("note", Path("x"), "'note' of a parameter group is a PosixPath, .*it refers to pathlib"),
    ],
)
def test_groups_that_could_not_be_loaded_are_refused_when_they_are_saved(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0][key] = value
    with pytest.raises(bnb_fsdp.CheckpointError, match=message):
        bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_refuses_its_state_dict_is_found_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    train(model, optimizer, 9)
    before = contents(model, optimizer)

    def refuse(*args: Any) -> None:
        raise RuntimeError("not this one")

    model.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(bnb_fsdp.CheckpointError, match=r"checking .*one failed: RuntimeError: not this one$"):
        bnb_fsdp.load_checkpoint(path, model, optimizer)
    assert same(before, contents(model, optimizer))


def test_state_of_what_is_frozen_at_the_moment_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    model.get_parameter("large").requires_grad_(False)
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    wanted = contents(model, optimizer)
    for frozen in (True, False):
        fresh, fresh_optimizer = trained(steps=0)
        fresh.get_parameter("large").requires_grad_(not frozen)
        bnb_fsdp.load_checkpoint(path, fresh, fresh_optimizer)
        assert same(wanted, contents(fresh, fresh_optimizer))
    bnb_fsdp.load_checkpoint(path, model, optimizer)  # a rollback
    assert same(wanted, contents(model, optimizer))
    # Refused for another reason, nothing of it stays.
    (path / "extra_0.pt").write_bytes(b"x")
    reseal(path, "extra_0.pt")
    fresh, fresh_optimizer = trained(steps=0)
    fresh.get_parameter("large").requires_grad_(False)
    with pytest.raises(bnb_fsdp.CheckpointError, match="extra cannot be read back"):
        bnb_fsdp.load_checkpoint(path, fresh, fresh_optimizer)
    assert fresh.get_parameter("large") not in fresh_optimizer.state


@pytest.mark.parametrize("saved_as", [float, torch.tensor])
@pytest.mark.parametrize("built_as", [float, torch.tensor])
def test_learning_rates_are_loaded_as_they_were_saved(tmp_path: Path, saved_as: Any, built_as: Any) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = saved_as(0.25)
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    rate = built_as(0.5)
    optimizer.param_groups[0]["lr"] = rate
    bnb_fsdp.load_checkpoint(path, model, optimizer)
    found = optimizer.param_groups[0]["lr"]
    assert float(found) == 0.25 and isinstance(found, Tensor) == (saved_as is torch.tensor)
    assert float(rate) == 0.5  # not written into


def test_a_scheduler_may_come_before_or_after_the_load(tmp_path: Path) -> None:
    model, optimizer = trained()
    plain = bnb_fsdp.save_checkpoint(tmp_path / "plain", model, optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    scheduled = bnb_fsdp.save_checkpoint(tmp_path / "scheduled", model, optimizer)
    bnb_fsdp.load_checkpoint(plain, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["initial_lr"] == 0.01
    fresh, fresh_optimizer = trained()
    bnb_fsdp.load_checkpoint(scheduled, fresh, fresh_optimizer)
    assert fresh_optimizer.param_groups[0]["lr"] == 0.005
    assert fresh_optimizer.param_groups[0]["initial_lr"] == 0.01


def test_a_model_that_cannot_be_saved_or_loaded_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    other = bnb_fsdp.AdamW8bit([*model.parameters(), nn.Parameter(torch.ones(300))])
    meta = Model().to("meta")
    for call in (bnb_fsdp.save_checkpoint, bnb_fsdp.load_checkpoint):
        with pytest.raises(
            ValueError, match=r"parameter 3 of group 0 \(shape \(300,\)\) of the optimizer is not in"
        ):
            call(tmp_path / "two", model, other)
        with pytest.raises(ValueError, match=r"large of the model is on the meta device.*to_empty"):
            call(tmp_path / "two", meta, bnb_fsdp.AdamW8bit(meta.parameters()))
    wrapped = nn.DataParallel(Model())
    with pytest.raises(bnb_fsdp.CheckpointError, match=r"all names differ by 'module.'.*give its .module"):
        bnb_fsdp.load_checkpoint(path, wrapped, bnb_fsdp.AdamW8bit(wrapped.parameters()))
    # Another grouping is told of as such, not by the bits that go with it.
    groups = [{"params": [model.get_parameter("odd")]}, {"params": [model.get_parameter("large")]}]
    with pytest.raises(
        bnb_fsdp.CheckpointError, match=r"parameter groups of \[3\] parameters, the optimizer of \[1, 1\]"
    ):
        bnb_fsdp.load_checkpoint(path, model, bnb_fsdp.AdamW8bit(groups))


class Dangerous:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trap),)


class WithExtraState(Model):
    value: Any = 1

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though who wrote it gave it sound checksums."""
    trap = tmp_path / "trap"
    model = WithExtraState()
    optimizer = optimizer_for(model)
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    good = pickle.dumps(metadata)
    metadata.planner_data["x"] = Dangerous(trap)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path, ".metadata")
    with pytest.raises(bnb_fsdp.CheckpointError, match=r"\.metadata is damaged: it refers to posix.mkdir"):
        bnb_fsdp.load_checkpoint(path, model, optimizer)
    (path / ".metadata").write_bytes(good)
    reseal(path, ".metadata")
    assert bnb_fsdp.load_checkpoint(path, model, optimizer) == {}
    with pytest.raises(bnb_fsdp.CheckpointError, match="_extra_state of the model is a Dangerous"):
        model.value = Dangerous(trap)
        bnb_fsdp.save_checkpoint(tmp_path / "two", model, optimizer)
    monkeypatch.setattr("bnb_fsdp.checkpoint.directory._check_loadable", lambda *args: None)
    path = bnb_fsdp.save_checkpoint(tmp_path / "two", model, optimizer)
    model.value = 1
    with pytest.raises(
        bnb_fsdp.CheckpointError, match=r"_extra_state cannot be read: it refers to posix.mkdir"
    ):
        bnb_fsdp.load_checkpoint(path, model, optimizer)
    assert not trap.exists() and model.value == 1


def differ(folder: str) -> dict[str, Any]:
    """What ranks get that do not agree."""
    rank = dist.get_rank()
    model = sharded(0)
    optimizer = optimizer_for(model)
    train(model, optimizer, 0)
    plain = Model()
    plain_optimizer = optimizer_for(plain)
    train(plain, plain_optimizer, 0)
    found: dict[str, Any] = {}

    def attempt(label: str, call: Callable[[], Any]) -> None:
        try:
            found[label] = str(call())
        except (ValueError, bnb_fsdp.CheckpointError) as error:
            found[label] = f"{type(error).__name__}: {error}"

    def save(name: str, **kwargs: Any) -> Path:
        return bnb_fsdp.save_checkpoint(f"{folder}/{name}", model, optimizer, **kwargs)

    attempt("extra", lambda: save("a", extra=[1] if rank else {}))
    attempt("keep", lambda: save("a", keep=None if rank else 3))
    attempt("frozen", lambda: save("a", frozen=rank == 0))
    attempt("optimizer", lambda: bnb_fsdp.load_checkpoint(folder, model, None if rank else optimizer))  # type: ignore[arg-type]
    alone = dist.new_group([1])
    attempt("group", lambda: save(f"g{rank}", process_group=alone) if rank == 0 else "in it")
    attempt("path", lambda: save(f"rank{rank}"))
    attempt("alike", lambda: bnb_fsdp.save_checkpoint(f"{folder}/plain", plain, plain_optimizer))
    if rank == 1:
        plain_optimizer.state[plain.get_parameter("odd")]["state1"][3, 4] += 1
    attempt("state", lambda: bnb_fsdp.save_checkpoint(f"{folder}/apart", plain, plain_optimizer))
    # Gradients of zeros on one rank alone are gradients all the same.
    tiny = sharded(0, {"f": (1, 300)})
    lazy = optimizer_for(tiny)
    lazy.param_groups[0]["lr"] = 0.0
    for parameter in parameters_of(tiny):
        parameter.grad = parameter.detach().clone()
    lazy.step(closure=None)
    found["steps"] = [float(lazy.state[p]["step"]) for p in parameters_of(tiny)]
    # A sharded parameter without state in the dict is told of.
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bnb_fsdp").addHandler(handler)
    state = optimizer.state_dict()
    del state["state"][2]
    optimizer.load_state_dict(state)
    found["absent"] = [
        text for text in records if "no state for 1 parameters" in text and "start afresh" in text
    ]
    return found


def test_ranks_that_do_not_agree_are_told_so_at_once(tmp_path: Path) -> None:
    first, second = ranks.run(2, differ, str(tmp_path), timeout=60)
    assert (
        first["extra"] == "ValueError: save_checkpoint failed on rank 1 of 2: extra must be a dict, got list."
    )
    assert first["keep"] == "ValueError: keep must be the same on every rank, got [3, None]."
    assert first["frozen"] == "ValueError: frozen must be the same on every rank, got [True, False]."
    assert "on rank 1 of 2: optimizer is a NoneType" in first["optimizer"]
    assert first["group"].startswith("ValueError: rank 0 is not in process_group")
    assert first["path"] == second["path"] == str(tmp_path / "rank0")
    assert first["alike"] == str(tmp_path / "plain")
    assert (
        "optimizer.state.odd.state1.adam_8bit_256 is a plain tensor that differs between rank 0 and"
        in first["state"]
    )
    assert first["steps"] == second["steps"] == [1.0]
    assert len(first["absent"]) == len(second["absent"]) == 1
    assert {key: value for key, value in first.items() if key != "group"} == {
        key: value for key, value in second.items() if key != "group"
    }
    assert {path.name for path in tmp_path.iterdir()} == {"rank0", "plain"}


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


def test_ctrl_c_while_tensors_are_written_is_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    model, optimizer = trained()
    monkeypatch.setattr(FileSystemWriter, "write_data", interrupted)
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
        bnb_fsdp.save_checkpoint(tmp_path / "one", model, torch.optim.AdamW(model.parameters()))


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
