"""Who gets a GPU: `ranks.py` decides for all other tests."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist


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


def seen() -> tuple[str, str, int]:
    return dist.get_backend(), str(ranks.device()), torch.cuda.device_count()


def test_ranks_on_cpus_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or fully_shard would take it, and gloo would be handed its tensors."""
    monkeypatch.setenv(ranks.SHARE, "1")
    assert ranks.run(2, seen, on_cpu=True) == [("gloo", "cpu", 0)] * 2
