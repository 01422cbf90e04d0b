"""Who gets a GPU: `ranks.py` decides for all other tests."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.parametrize(
    "gpus, told, worlds", [(0, "1", ()), (2, None, (1, 2)), (2, "0", (1, 2)), (1, "1", (1, 2, 3, 4, 64))]
)
def test_ranks_get_gpus_of_their_own_or_share_them_where_nccl_is_told(
    monkeypatch: pytest.MonkeyPatch, gpus: int, told: str | None, worlds: tuple[int, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if told is None:
        monkeypatch.delenv(ranks.SHARE, raising=False)
    else:
        monkeypatch.setenv(ranks.SHARE, told)
    assert [world for world in (1, 2, 3, 4, 64) if world <= ranks.gpu_ranks()] == list(worlds)


class Ended:
    """A process that is over, without a result."""

    returncode = 0

    def poll(self) -> int:
        return 0


# (ranks, on_cpu, SHARE) -> whether they see the two GPUs.
VISIBLE = {
    "a GPU each": (2, False, None, True),
    "a GPU each, told to be on CPUs": (2, True, None, False),
    "more ranks than GPUs": (3, False, None, False),
    "more ranks than GPUs, which they share": (3, False, "1", True),
    "more ranks than GPUs, which they would share, told to be on CPUs": (3, True, "1", False),
}


@pytest.mark.parametrize("world, on_cpu, told, see", VISIBLE.values(), ids=list(VISIBLE))
def test_ranks_on_cpus_see_no_gpu(
    monkeypatch: pytest.MonkeyPatch, world: int, on_cpu: bool, told: str | None, see: bool
) -> None:
    """Or fully_shard would take it, and gloo would be handed its tensors."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv(ranks.SHARE, raising=False)
    if told is not None:
        monkeypatch.setenv(ranks.SHARE, told)
    started: list[dict[str, str]] = []

    def popen(command: list[str], *, env: dict[str, str], **_: Any) -> Ended:
        started.append(env)
        return Ended()

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(AssertionError, match=f"seen on {world} ranks: a rank failed"):
        ranks.run(world, seen, on_cpu=on_cpu)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["0,1" if see else ""] * world
    assert [(env["RANK"], env["WORLD_SIZE"]) for env in started] == [
        (str(r), str(world)) for r in range(world)
    ]


def seen() -> tuple[str, str, int]:
    return dist.get_backend(), str(ranks.device()), torch.cuda.device_count()


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: without one no rank can see it"
)
def test_a_rank_beside_a_gpu_runs_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ranks.SHARE, "1")
    assert ranks.run(2, seen, on_cpu=True) == [("gloo", "cpu", 0)] * 2


def most_on_one_gpu() -> int:
    """As on three ranks of two GPUs, the second shared."""
    sys.path.insert(0, str(EXAMPLES))
    import common

    uuid = ("a", "b", "b")[dist.get_rank()]
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=uuid)
    return int(common._ranks_per_gpu(torch.device("cuda", 0)))


def test_ranks_agree_how_many_are_on_one_gpu() -> None:
    assert ranks.run(3, most_on_one_gpu, on_cpu=True) == [2, 2, 2]
