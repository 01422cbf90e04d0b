"""The factor of each parameter's update in LAMB and LARS, from norms of whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import sharding

RATIOS = ("bitsandbytes", "published")


class Trust(NamedTuple):
    """How one group's factors come from its norms. ``weight_decay`` is 0 where the update's norm has it already."""

    published: bool
    limit: float
    weight_decay: float


def check_ratio(where: str, group: dict[str, Any]) -> None:
    """Raise ValueError for an unknown ``trust_ratio``, or one that ``capturable`` rules out."""
    if group["trust_ratio"] not in RATIOS:
        raise ValueError(
            f"{where}: trust_ratio={group['trust_ratio']!r} is unknown; choose one of {', '.join(RATIOS)}."
        )
    if group["capturable"]:
        raise ValueError(f"{where}: capturable=True is not supported: norms need step counts on the host.")


class Scales:
    """Update scales for the buckets of a plan."""

    def __init__(
        self,
        parameters: Sequence[Sequence[Tensor]],
        positions: Sequence[Sequence[tuple[int, int]]],
        groups: Sequence[Sequence[int]],
    ) -> None:
        """By bucket: parameters (DTensors as they are), their places in the optimizer, their parameter groups."""
        self._sums = sharding.sums_over_shards(parameters, positions)
        self._groups = groups
        self._kept: dict[int, tuple[list[Trust | None], Tensor]] = {}

    def __call__(self, norms: Sequence[Tensor], trusts: Sequence[Trust | None], law: str) -> list[Tensor]:
        """float32, one factor a slot, for each bucket; ``norms`` are `bnb_fsdp.backends.Bucket.norms`, of local shards.

        Runs one all-reduce for each mesh, and nothing that waits for the device.
        """
        totals = self._sums(norms)
        return [self._scale(bucket, total, trusts, law) for bucket, total in enumerate(totals)]

    def _scale(self, bucket: int, sums: Tensor, trusts: Sequence[Trust | None], law: str) -> Tensor:
        update, parameter = sums.sqrt().unbind(1)
        published, limit, weight_decay = self._settings(bucket, sums.device, trusts).unbind(0)
        is_clipped = (parameter > 0) & (update > limit * parameter)
        clipped = torch.where(is_clipped, limit * parameter / update, 1.0)
        if law == "adam":
            ratio = parameter / update
        else:
            ratio = limit * parameter / (update + weight_decay * parameter)
        ratio = torch.where((parameter > 0) & (update > 0), ratio, 1.0)
        return torch.where(published > 0, ratio, clipped)

    def _settings(self, bucket: int, device: torch.device, trusts: Sequence[Trust | None]) -> Tensor:
        """(3, slots) on the device; sent there again only if a group was changed."""
        own = [trusts[group] for group in self._groups[bucket]]
        kept = self._kept.get(bucket)
        if kept is None or kept[0] != own:
            rows = [
                (0.0, math.inf, 0.0)
                if trust is None
                else (float(trust.published), trust.limit, trust.weight_decay)
                for trust in own
            ]
            table = torch.tensor(rows, dtype=torch.float32).view(-1, 3).t().contiguous()
            kept = self._kept[bucket] = own, table.to(device)
        return kept[1]
