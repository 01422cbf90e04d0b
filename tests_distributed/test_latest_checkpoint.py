"""`latest_checkpoint`; how `load_checkpoint` says that there is none yet, or one of another optimizer."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoint_faults import Model, contents, optimizer_for, same, train, trained
from torch import nn

import bnb_fsdp
from bnb_fsdp import cli

DOCS = Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md"


def save(path: Path) -> Path:
    return bnb_fsdp.save_checkpoint(path, *trained(1))


def leftover(folder: Path) -> None:
    (folder / ".step-1.partial-dead").mkdir(parents=True)
    (folder / ".step-1.partial-dead" / "__0_0.distcp").write_bytes(b"x")


def by_others(folder: Path) -> None:
    """A checkpoint of torch.distributed.checkpoint alone, which is none of ours."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"a": torch.ones(3)}, checkpoint_id=folder / "theirs")


NOTHING: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: None, "no such checkpoint directory"),
    "a dangling link": (lambda folder: folder.symlink_to("nowhere"), "no such checkpoint directory"),
    "empty": (lambda folder: folder.mkdir(), "has no files"),
    "an interrupted save": (leftover, "only what interrupted saves left: .step-1.partial-dead"),
    "notes": (lambda folder: (folder / "notes").mkdir(parents=True), "holds no checkpoint of bnb_fsdp.save_"),
    "others'": (by_others, "holds no checkpoint of bnb_fsdp.save_checkpoint"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_where_there_is_nothing_yet(tmp_path: Path, name: str) -> None:
    make, reason = NOTHING[name]
    folder = tmp_path / "saves"
    make(folder)
    assert bnb_fsdp.latest_checkpoint(folder) is None
    model, optimizer = trained(1)
    before = contents(model, optimizer)
    with pytest.raises(bnb_fsdp.NoCheckpointError) as caught:
        bnb_fsdp.load_checkpoint(folder, model, optimizer)
    assert isinstance(caught.value, bnb_fsdp.CheckpointError)
    assert reason in str(caught.value) and "There is no checkpoint to load yet" in str(caught.value)
    assert "damaged" not in str(caught.value)
    assert same(before, contents(model, optimizer))


def test_the_newest_is_the_one_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (9, 10, 8):  # neither the first nor the last by name, or by number
        save(tmp_path / f"step-{number}")
    leftover(tmp_path)
    by_others(tmp_path)
    shutil.copytree(tmp_path / "step-8", tmp_path / ".step-11.partial-beef")
    (tmp_path / "link").symlink_to("step-9")
    assert bnb_fsdp.latest_checkpoint(tmp_path) == tmp_path / "step-8"
    assert bnb_fsdp.latest_checkpoint(tmp_path / "step-10") == tmp_path / "step-10"
    monkeypatch.chdir(tmp_path.parent)
    assert bnb_fsdp.latest_checkpoint(tmp_path.name) == tmp_path / "step-8"
    shutil.rmtree(tmp_path / "step-8")
    assert bnb_fsdp.latest_checkpoint(str(tmp_path)) == tmp_path / "step-10"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a cut manifest": (lambda path: cut(path / "bnb_fsdp.json"), "is damaged"),
    "no manifest": (lambda path: (path / "bnb_fsdp.json").unlink(), "has no bnb_fsdp.json"),
    "a missing file": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a cut file": (lambda path: cut(path / "__0_0.distcp"), r"__0_0.distcp has \d+ bytes instead of"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_newest_one_is_an_error_that_names_the_one_before_it(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGE[name]
    for number in (1, 2, 3):
        save(tmp_path / f"step-{number}")
    damage(tmp_path / "step-2")
    assert bnb_fsdp.latest_checkpoint(tmp_path) == tmp_path / "step-3"  # the damaged one is older
    damage(tmp_path / "step-3")
    model, optimizer = trained(1)
    for call in (
        lambda: bnb_fsdp.latest_checkpoint(tmp_path),
        lambda: bnb_fsdp.load_checkpoint(tmp_path, model, optimizer),
    ):
        with pytest.raises(bnb_fsdp.CheckpointError) as caught:
            call()
        assert not isinstance(caught.value, bnb_fsdp.NoCheckpointError)
        text = str(caught.value)
        assert re.search(rf"the newest checkpoint of {tmp_path} cannot be loaded: .*step-3.*{reason}", text)
        assert f"load {tmp_path / 'step-1'} by its own path, or remove {tmp_path / 'step-3'}" in text
    shutil.rmtree(tmp_path / "step-3")
    with pytest.raises(bnb_fsdp.CheckpointError, match=rf"cannot be loaded: .*step-2.*{reason}"):
        bnb_fsdp.latest_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(
        bnb_fsdp.CheckpointError, match=rf"no complete checkpoint: .*step-2.*{reason}"
    ) as only:
        bnb_fsdp.latest_checkpoint(tmp_path)
    assert not isinstance(only.value, bnb_fsdp.NoCheckpointError)


def test_what_is_no_folder_of_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        bnb_fsdp.CheckpointError, match="file is a file; give a checkpoint directory, or a folder"
    ):
        bnb_fsdp.latest_checkpoint(tmp_path / "file")
    for lost in ("bnb_fsdp.json", "extra_0.pt"):  # a copy that is less and less complete
        path = tmp_path / "one" if (tmp_path / "one").exists() else save(tmp_path / "one")
        (path / lost).unlink()
        with pytest.raises(bnb_fsdp.CheckpointError, match=r"one has no bnb_fsdp.json: .*partial copy"):
            bnb_fsdp.latest_checkpoint(path)


def test_a_folder_that_cannot_be_read_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(
        bnb_fsdp.CheckpointError, match=r"cannot be searched for checkpoints: .*Permission denied"
    ):
        bnb_fsdp.latest_checkpoint(tmp_path)


def asked_by_ranks(folder: str) -> list[Any]:
    saves = Path(folder) / "saves"
    found: list[Any] = [bnb_fsdp.latest_checkpoint(saves)]
    model, optimizer = trained(1)
    try:
        bnb_fsdp.load_checkpoint(saves, model, optimizer)
    except bnb_fsdp.NoCheckpointError as error:
        found.append(str(error))
    for number in (2, 1):
        bnb_fsdp.save_checkpoint(saves / f"step-{number}", model, optimizer)
    if dist.get_rank() == 1:  # alone: nothing is communicated
        found.append(bnb_fsdp.latest_checkpoint(saves))
    dist.barrier()
    if dist.get_rank() == 0:
        found.append(bnb_fsdp.latest_checkpoint(saves))
    return found


def test_every_rank_gets_the_same_answer_without_the_others(tmp_path: Path) -> None:
    first, second = ranks.run(2, asked_by_ranks, str(tmp_path))
    assert first == second
    assert first[0] is None and "no such checkpoint directory" in first[1]
    assert first[2] == tmp_path / "saves" / "step-1"


def test_the_idiom_of_the_documentation_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as it is printed: interrupted after the second save, then once more; the same as a run in one go."""
    [code] = re.findall(r"```python\n(.*?latest_checkpoint.*?)```", DOCS.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)

    class Interrupt(Exception):
        pass

    def run(stop: int | None) -> tuple[nn.Module, Any, list[int]]:
        model, optimizer = trained(steps=0)
        done = []

        def train_step(step: int) -> None:
            if step == stop:
                raise Interrupt
            train(model, optimizer, step)
            done.append(step)

        names = {"bnb_fsdp": bnb_fsdp, "model": model, "optimizer": optimizer, "train_step": train_step}
        try:
            exec(code, {**names, "steps": 300})
        except Interrupt:
            pass
        return model, optimizer, done

    model, optimizer, done = run(stop=250)
    assert done == list(range(250))
    model, optimizer, done = run(stop=None)
    assert done == list(range(200, 300))
    shutil.rmtree(tmp_path / "checkpoints")
    whole, whole_optimizer, done = run(stop=None)
    assert done == list(range(300))
    assert same(contents(model, optimizer), contents(whole, whole_optimizer))


# Optimizers


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer by class, with the real one inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def accelerated(optimizer: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


@pytest.mark.parametrize("wrap", [Wrapper, lambda inner: Wrapper(Wrapper(inner)), accelerated])
def test_a_wrapped_optimizer_is_unwrapped(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    model, optimizer = trained(2)
    wrapped = wrap(optimizer)
    assert wrapped is not optimizer
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, wrapped)
    fresh, fresh_optimizer = trained(0)
    bnb_fsdp.load_checkpoint(path, fresh, wrap(fresh_optimizer))
    assert same(contents(model, optimizer), contents(fresh, fresh_optimizer))
    assert fresh_optimizer.load_report.requantized == 0


def test_a_wrapper_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = Model()
    wrapped = Wrapper(torch.optim.AdamW(model.parameters()))
    for call in (bnb_fsdp.save_checkpoint, bnb_fsdp.load_checkpoint):
        with pytest.raises(
            ValueError, match="optimizer is a Wrapper, expected an optimizer of bnb_fsdp, or a wrapper"
        ):
            call(tmp_path / "one", model, wrapped)


def dequantized(optimizer: Any, parameter: nn.Parameter) -> list[torch.Tensor]:
    from bitsandbytes.functional import create_dynamic_map

    held, result = optimizer.state[parameter], []
    for index in (1, 2):
        if f"state{index}" not in held:
            continue
        values = held[f"state{index}"]
        if values.dtype == torch.uint8:
            scales = held[f"absmax{index}"].repeat_interleave(256)[: values.numel()].view(values.shape)
            values = create_dynamic_map(index == 1)[values.long()] * scales
        result.append(values.clone())
    return result


@pytest.mark.parametrize(
    ("saved_as", "to"), [("AdamW8bit", "torch"), ("Lion8bit", "torch"), ("LAMB8bit", "bitsandbytes")]
)
def test_state_of_other_bits_is_refused_with_a_way_to_go_on(tmp_path: Path, saved_as: str, to: str) -> None:
    """The way is gone, as the text has it: every value arrives in the 32-bit optimizer."""
    model = Model()
    optimizer = optimizer_for(model, saved_as)
    for step in range(3):
        train(model, optimizer, step)
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    fresh = Model()
    wanted = optimizer_for(fresh, saved_as.replace("8bit", "32bit"))
    with pytest.raises(bnb_fsdp.CheckpointError) as caught:
        bnb_fsdp.load_checkpoint(path, fresh, wanted)
    text = str(caught.value)
    assert "large was saved with bits of state 8, here it has 32, as 1 more. Load it with" in text
    assert f"{saved_as}, with the same optim_bits, min_8bit_size and overrides" in text
    command = re.search(r"'python -m bnb_fsdp (checkpoint convert [^']*)'", text)
    assert command and command[1] == f"checkpoint convert {path} OUT.pt --to {to}"
    out = tmp_path / "OUT.pt"
    assert cli.main(command[1].replace("OUT.pt", str(out)).split()) == 0
    loading = optimizer_for(fresh, saved_as)
    bnb_fsdp.load_checkpoint(path, fresh, loading)
    wanted.load_state_dict(torch.load(out))
    for parameter, old in zip(fresh.parameters(), model.parameters()):
        assert torch.equal(parameter, old)
        assert wanted.state[parameter]["state1"].dtype == torch.float32
        for value, known in zip(dequantized(wanted, parameter), dequantized(optimizer, old), strict=True):
            assert torch.equal(value, known)
