"""One rank fails in a step, the others must not hang: they end with an error, and the last checkpoint resumes.

Every drill trains under FSDP2 on gloo ranks that are processes of their own, as torchrun's are, and saves a checkpoint
every second step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import bnb_fsdp

TIMEOUT = 12  # seconds, of the process group
SLACK = 15  # what a busy machine may add
STEPS, FAULT = 6, 4  # the fault is in step 4, after the checkpoint of step 3
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW8bit": dict(lr=1e-2, weight_decay=0.1),
    "LAMB8bit": dict(lr=1e-2, weight_decay=0.1, max_unorm=0.5),
}


class Drill(NamedTuple):
    kind: (
        str  # LAMB's step has an all-reduce, AdamW's has none: the others wait in it, or in the next forward
    )
    world: int
    status: int | None  # of the last rank, which fails; None: it never ends
    error: str  # what it says
    waiting: str  # what the others say


SPARSE = r"ValueError: parameter 'up.weight' .*the gradient is sparse"
SHORT = r"ValueError: parameter 'up.weight' .*the local gradient has shape \(1, 64\)"
CLOSED = "RuntimeError: .*Connection (closed|reset) by peer"
EXPIRED = f"RuntimeError: .*Timed out waiting {1000 * TIMEOUT}ms"
DRILLS = {
    "sparse gradient, LAMB": Drill("LAMB8bit", 2, 1, SPARSE, CLOSED),
    "other shape, AdamW": Drill("AdamW8bit", 2, 1, SHORT, CLOSED),
    "killed before step, AdamW": Drill("AdamW8bit", 2, -signal.SIGKILL, "", CLOSED),
    "killed in all-reduce, LAMB": Drill("LAMB8bit", 3, -signal.SIGKILL, "", CLOSED),
    "stopped before step, AdamW": Drill("AdamW8bit", 2, None, "", EXPIRED),
    "stopped in all-reduce, LAMB": Drill("LAMB8bit", 2, None, "", EXPIRED),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 100), nn.Linear(100, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(x)))
        return result


def build(kind: str) -> tuple[nn.Module, Any]:
    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, getattr(bnb_fsdp, kind)(model.named_parameters(), **SETTINGS[kind])


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    (model(x) - x).square().mean().backward()


def digest(model: nn.Module, optimizer: Any) -> str:
    """Of this rank's parameters and state."""
    found = hashlib.sha256()
    for p in model.parameters():
        state = optimizer.state[p]
        for tensor in (p.to_local().detach(), *(state[key] for key in sorted(state))):
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def fail(drill: str, model: Any, folder: Path) -> None:
    """Break this rank's coming step; the time of it is in the file ``fault``."""
    name, weight = drill.split(",")[0], model.up.weight
    death = signal.SIGKILL if name.startswith("killed") else signal.SIGSTOP

    def die(*_: Any, **__: Any) -> None:
        (folder / "fault").touch()
        os.kill(os.getpid(), death)

    if name == "sparse gradient":
        weight.grad = torch.zeros(weight.shape).to_sparse()
    elif name == "other shape":
        short = torch.zeros(1, weight.shape[1])
        weight.grad = DTensor.from_local(
            short, weight.device_mesh, [Shard(0)], shape=weight.shape, stride=weight.stride()
        )
    elif name.endswith("before step"):
        die()
    else:  # in the step, when its all-reduce is due
        dist.all_reduce = die
    (folder / "fault").touch()


def rank_main(drill: str, rank: int, folder: Path) -> None:
    """One rank, from its first line to its exit status."""
    log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    kind, world, *_ = DRILLS[drill]
    (folder / f"ready{rank}").touch()
    while not all((folder / f"ready{other}").exists() for other in range(world)):
        time.sleep(0.05)  # so that slow starts do not use up the group's timeout
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT),
    )
    model, optimizer = build(kind)
    for step in range(STEPS):
        backward(model, step)
        before = digest(model, optimizer) if step else ""
        if rank == world - 1 and step == FAULT:
            fail(drill, model, folder)
        try:
            optimizer.step()
        except ValueError:
            print("unchanged" if digest(model, optimizer) == before else "changed", flush=True)
            raise
        optimizer.zero_grad()
        if step % 2:
            bnb_fsdp.save_checkpoint(
                folder / "checkpoints" / f"step-{step}", model, optimizer, extra={"step": step}
            )
    (folder / f"finished{rank}").touch()


class Outcome(NamedTuple):
    statuses: list[int | None]  # None: still there when the time was over
    outputs: list[str]
    seconds: float  # from the fault to the end of the last survivor
    folder: Path


class Running:
    """The ranks of a drill."""

    def __init__(self, drill: str, folder: Path) -> None:
        self.drill, self.folder = DRILLS[drill], folder
        self.logs = [folder / f"log{rank}" for rank in range(self.drill.world)]
        # A server that imported torch once forks them: each is a new process, but starts in no time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "bnb_fsdp"])
        self.processes = [
            context.Process(target=rank_main, args=(drill, rank, folder)) for rank in range(self.drill.world)
        ]
        for process in self.processes:
            process.start()
        self.ended = 0.0

    def is_over(self) -> bool:
        """Whether the survivors have ended, and the last rank if it should; or have had more than their time."""
        fault = self.folder / "fault"
        waited = self.processes if self.drill.status is not None else self.processes[:-1]
        if all(process.exitcode is not None for process in waited):
            self.ended = self.ended or time.time()
            return True
        return fault.exists() and time.time() > fault.stat().st_mtime + TIMEOUT + SLACK

    def stop(self) -> Outcome:
        statuses = [process.exitcode for process in self.processes]
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        fault = self.folder / "fault"
        seconds = (self.ended or time.time()) - fault.stat().st_mtime if fault.exists() else float("inf")
        return Outcome(statuses, [log.read_text() for log in self.logs], seconds, self.folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All drills at once: most of their time is waiting."""
    running: dict[str, Running] = {}
    with contextlib.ExitStack() as stack:
        for name in DRILLS:
            running[name] = Running(name, tmp_path_factory.mktemp("drill"))
            stack.callback(running[name].stop)
        deadline = time.monotonic() + 120
        while not all([drill.is_over() for drill in running.values()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {name: drill.stop() for name, drill in running.items()}


def resume(kind: str, folders: list[Path]) -> Iterator[tuple[str, str]]:
    """(step of the checkpoint, digest there, digest at the end) as JSON, for each folder: undisturbed, and resumed."""
    model, optimizer = build(kind)
    at = {}
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        at[step] = digest(model, optimizer)
    for folder in folders:
        model, optimizer = build(kind)
        step = bnb_fsdp.load_checkpoint(folder / "checkpoints", model, optimizer)["step"]
        loaded = digest(model, optimizer)
        for later in range(step + 1, STEPS):
            backward(model, later)
            optimizer.step()
            optimizer.zero_grad()
        yield (
            json.dumps([step, at[step], at[STEPS - 1]]),
            json.dumps([step, loaded, digest(model, optimizer)]),
        )


def resume_all(found: dict[str, list[Path]]) -> dict[str, list[tuple[str, str]]]:
    return {kind: list(resume(kind, folders)) for kind, folders in found.items()}


@pytest.fixture(scope="module")
def resumed(outcomes: dict[str, Outcome]) -> dict[str, list[tuple[str, str]]]:
    """By drill, what every rank has of `resume`."""
    result: dict[str, list[tuple[str, str]]] = {}
    for world in sorted({drill.world for drill in DRILLS.values()}):
        names: dict[str, list[str]] = {}
        for name, drill in DRILLS.items():
            if drill.world == world:
                names.setdefault(drill.kind, []).append(name)
        folders = {kind: [outcomes[name].folder for name in those] for kind, those in names.items()}
        by_rank = ranks.run(world, resume_all, folders, on_cpu=True)
        for kind, those in names.items():
            for index, name in enumerate(those):
                result[name] = [rank[kind][index] for rank in by_rank]
    return result


@pytest.mark.parametrize("name", DRILLS)
def test_the_others_end_with_an_error_within_the_timeout(outcomes: dict[str, Outcome], name: str) -> None:
    drill, outcome = DRILLS[name], outcomes[name]
    everything = "\n---\n".join(outcome.outputs)
    *survivors, failed = outcome.statuses
    assert failed == drill.status, everything
    assert None not in survivors and 0 not in survivors, (survivors, everything)
    assert outcome.seconds < TIMEOUT + SLACK, everything
    for output in outcome.outputs[:-1]:
        assert "Traceback" in output and re.search(drill.waiting, output), everything
    assert re.search(drill.error, outcome.outputs[-1]), everything
    assert ("unchanged" in outcome.outputs[-1]) is (drill.status == 1), everything
    assert not list(outcome.folder.glob("finished*"))
    assert sorted(path.name for path in (outcome.folder / "checkpoints").iterdir()) == ["step-1", "step-3"]


@pytest.mark.parametrize("name", DRILLS)
def test_the_last_checkpoint_resumes_with_equal_bits(
    resumed: dict[str, list[tuple[str, str]]], name: str
) -> None:
    assert len(resumed[name]) == DRILLS[name].world
    for undisturbed, continued in resumed[name]:
        assert json.loads(continued)[0] == FAULT - 1
        assert continued == undisturbed
