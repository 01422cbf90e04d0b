"""The rules of `bnb_fsdp.rules`, run as they stand: correct on every device, slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codebook import BLOCK_SIZE, flat
from ..rules import Hyper, Rule, direction8, direction32, read_rate, step8, step32
from .base import BucketKey, Slot

# The rules hold about a dozen float64 temporaries a lane; this bounds them to some 400 MB.
_CHUNK = BLOCK_SIZE * 2**14


Part = tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]


def _parts(slot: Slot, gradient: Tensor) -> Iterator[Part]:
    """Views of gradient, parameter, states and scales, flat, so many elements at a time as memory allows."""
    parameter, gradient = flat(slot.parameter), flat(gradient)
    states = tuple(flat(state) for state in slot.states)
    for start in range(0, parameter.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        blocks = slice(start // BLOCK_SIZE, (start + _CHUNK) // BLOCK_SIZE)
        yield (
            gradient[part],
            parameter[part],
            tuple(state[part] for state in states),
            tuple(absmax[blocks] for absmax in slot.absmax),
        )


@dataclass(frozen=True)
class TorchBucket:
    """See `bnb_fsdp.backends.base.Bucket`."""

    rule: Rule
    bits: int
    slots: tuple[Slot, ...]

    @torch.no_grad()
    def run(
        self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper], scales: Tensor | None = None
    ) -> None:
        used = {slot.group: read_rate(hypers[slot.group]) for slot in self.slots}
        factors = None if scales is None else scales.tolist()
        for index, (slot, gradient) in enumerate(zip(self.slots, gradients)):
            if gradient is None:
                continue
            slot.step.add_(1)
            step, hyper = int(slot.step), used[slot.group]
            if factors is not None:
                hyper = hyper._replace(update_scale=factors[index])
            for part in _parts(slot, gradient):
                self._update(hyper, step, *part)

    @torch.no_grad()
    def norms(self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper]) -> Tensor:
        used = {slot.group: read_rate(hypers[slot.group]) for slot in self.slots}
        sums = torch.zeros(len(self.slots), 2)
        for index, (slot, gradient) in enumerate(zip(self.slots, gradients)):
            if gradient is None:
                continue
            step, total = int(slot.step) + 1, torch.zeros(2, dtype=torch.float64)
            for g, p, states, absmax in _parts(slot, gradient):
                if self.bits == 8:
                    u = direction8(self.rule, used[slot.group], step, g, p, states, absmax)
                else:
                    u = direction32(self.rule, used[slot.group], step, g, p, states)
                total += torch.stack([u.double().square().sum(), p.double().square().sum()]).cpu()
            sums[index] = total.float()
        return sums.to(self.slots[0].parameter.device)

    def _update(
        self,
        hyper: Hyper,
        step: int,
        gradient: Tensor,
        parameter: Tensor,
        states: tuple[Tensor, ...],
        absmax: tuple[Tensor, ...],
    ) -> None:
        if self.bits == 8:
            new, codes, scales = step8(self.rule, hyper, step, gradient, parameter, states, absmax)
            for old, value in zip((*states, *absmax), (*codes, *scales)):
                old.copy_(value)
        else:
            new, values = step32(self.rule, hyper, step, gradient, parameter, states)
            for old, value in zip(states, values):
                old.copy_(value)
        parameter.copy_(new)


class TorchBackend:
    """See `bnb_fsdp.backends.base.Backend`."""

    name = "torch"

    def bucket(self, key: BucketKey, rule: Rule, slots: Sequence[Slot]) -> TorchBucket:
        return TorchBucket(rule, key.bits, tuple(slots))
