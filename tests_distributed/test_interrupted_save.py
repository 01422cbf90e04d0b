"""Ctrl-C while a checkpoint is written or read: KeyboardInterrupt comes out, whatever torch made of it; nothing stays.

As a script it is a training loop that waits within torch.save: ``python test_interrupted_save.py FUNCTION FOLDER``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoint_faults import Model, contents, optimizer_for, same, train
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.utils import _ReaderView
from torch.distributed.fsdp import fully_shard

import bnb_fsdp
from bnb_fsdp import cli


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Shells start what runs in the background with SIGINT ignored, and Python leaves that as it is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted:
    """A file that torch.save writes into; ``action`` comes within the first record, at the third of its writes."""

    def __init__(self, file: Any, action: Callable[[], Any]) -> None:
        self.file, self.action, self.writes = file, action, 0

    def write(self, data: Any) -> Any:
        self.writes += 1
        if self.writes == 3:
            self.action()
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def within_torch_save(caller: str, action: Callable[[], Any]) -> None:
    """Do ``action`` once, while torch.save writes into its file, below a function that is called ``caller``."""
    original = torch.serialization._open_zipfile_writer

    def opened(file: Any) -> Any:
        frame, callers = sys._getframe(), []
        while frame.f_back is not None:
            frame = frame.f_back
            callers.append(frame.f_code.co_name)
        if caller not in callers:
            return original(file)
        torch.serialization._open_zipfile_writer = original
        return original(Interrupted(file, action))

    torch.serialization._open_zipfile_writer = opened


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)  # another thread may take the signal; Python raises in this one all the same


def wait_for_a_signal() -> None:
    print("writing", flush=True)
    time.sleep(100)


def training(caller: str, folder: str) -> None:
    """A loop that outlives a checkpoint that could not be saved."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    model = Model()
    optimizer = optimizer_for(model)
    train(model, optimizer, 0)
    within_torch_save(caller, wait_for_a_signal)
    for step in range(3):
        try:
            bnb_fsdp.save_checkpoint(f"{folder}/step-{step}", model, optimizer, extra={"step": step})
        except bnb_fsdp.CheckpointError as error:
            print("not saved, training goes on:", error, flush=True)
    print("trained to the end", flush=True)


@pytest.mark.parametrize(
    ("caller", "sent", "status"),
    [
        ("write_data", signal.SIGINT, -signal.SIGINT),
        ("_finish", signal.SIGINT, -signal.SIGINT),
        ("plainly_loaded", signal.SIGINT, -signal.SIGINT),
        ("write_data", signal.SIGTERM, 3),
    ],
    ids=["tensors", "extra", "trial of values", "sys.exit in a handler"],
)
def test_a_signal_within_torch_save_ends_the_loop(
    tmp_path: Path, caller: str, sent: signal.Signals, status: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, caller, str(tmp_path / "saves")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first == "writing\n", first + process.stdout.read()
        process.send_signal(sent)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert "training goes on" not in output and "trained to the end" not in output
    # Python ends by the signal, but with torch 2.11 with status 1 where torch._dynamo was imported, whatever was run.
    assert process.returncode == status or (process.returncode, sent) == (1, signal.SIGINT), output
    assert (output.rstrip().rpartition("\n")[2] == "KeyboardInterrupt") == (sent == signal.SIGINT)
    saves = tmp_path / "saves"
    assert not saves.exists() or list(saves.iterdir()) == []
    assert bnb_fsdp.latest_checkpoint(saves) is None


def interrupted_ranks(folder: str) -> list[tuple[str, str]]:
    """What comes out of saving, and of loading at the end, on this rank when some ranks are interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = Model()
    fully_shard(model)
    optimizer = optimizer_for(model)
    train(model, optimizer, 0)
    path = bnb_fsdp.save_checkpoint(f"{folder}/good", model, optimizer)
    rank = dist.get_rank()
    found = []
    for who, caller in (
        ((0,), "write_data"),
        ((1,), "write_data"),
        ((0, 1), "write_data"),
        ((1,), "_finish"),
    ):
        original = torch.serialization._open_zipfile_writer
        if rank in who:
            within_torch_save(caller, press_ctrl_c)
        found.append(outcome(lambda: bnb_fsdp.save_checkpoint(f"{folder}/new", model, optimizer)))
        assert torch.serialization._open_zipfile_writer is original  # Ctrl-C was pressed
    if rank == 1:
        press_while_tensors_are_read()
    found.append(outcome(lambda: bnb_fsdp.load_checkpoint(path, model, optimizer)))
    bnb_fsdp.load_checkpoint(path, model, optimizer)  # the ranks are still in step
    return found


def press_while_tensors_are_read() -> None:
    """Press Ctrl-C once, while torch.load is within a file: at its third read."""
    original = _ReaderView.readinto
    reads = []

    def interrupted(*args: Any) -> Any:
        reads.append(args)
        if len(reads) == 3:
            _ReaderView.readinto = original
            press_ctrl_c()
        return original(*args)

    _ReaderView.readinto = interrupted


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_ctrl_c_on_some_of_two_ranks(tmp_path: Path) -> None:
    by_rank = ranks.run(2, interrupted_ranks, str(tmp_path))
    wanted = [(0,), (1,), (0, 1), (1,), (1,)]
    for case, who in enumerate(wanted):
        for rank in range(2):
            kind, text = by_rank[rank][case]
            if rank in who:
                assert (kind, text) == ("KeyboardInterrupt", ""), (case, rank)
            else:
                assert kind == "CheckpointError" and f"on rank {who[0]}" in text, (case, rank)
                assert "KeyboardInterrupt" in text, (case, rank)
    assert [item.name for item in tmp_path.iterdir()] == ["good"]


def trained() -> tuple[Model, Any]:
    model = Model()
    optimizer = optimizer_for(model)
    train(model, optimizer, 0)
    return model, optimizer


def test_ctrl_c_while_tensors_are_read(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer)
    before = contents(model, optimizer)
    original = _ReaderView.readinto
    press_while_tensors_are_read()
    with pytest.raises(KeyboardInterrupt):
        bnb_fsdp.load_checkpoint(path, model, optimizer)
    assert _ReaderView.readinto is original
    bnb_fsdp.load_checkpoint(path, model, optimizer)
    assert same(before, contents(model, optimizer))


@pytest.mark.parametrize("extra", [None, {"bad": object()}], ids=["full disk", "unreadable extra"])
def test_who_saves_upon_ctrl_c_is_told_why_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: Any
) -> None:
    """The Ctrl-C that is being handled is an older one: what fails now is not interrupted."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    model, optimizer = trained()
    if extra is None:
        monkeypatch.setattr(FileSystemWriter, "write_data", full)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        kind, text = outcome(
            lambda: bnb_fsdp.save_checkpoint(tmp_path / "one", model, optimizer, extra=extra)
        )
    assert kind == "CheckpointError"
    assert ("No space left" if extra is None else "extra cannot be read back") in text
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_within_a_conversion_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bnb_fsdp.save_checkpoint(tmp_path / "one", *trained())
    original = torch.serialization._open_zipfile_writer
    within_torch_save("_to_file", press_ctrl_c)
    assert cli.main(["checkpoint", "convert", str(path), str(tmp_path / "OUT.pt"), "--to", "torch"]) == 130
    assert torch.serialization._open_zipfile_writer is original
    assert "interrupted." in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["one"]


if __name__ == "__main__":
    training(*sys.argv[1:])
