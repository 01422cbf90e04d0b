"""The rules of `bnb_fsdp.rules`, run as they stand: correct on every device, slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codebook import BLOCK_SIZE
from ..rules import Hyper, Rule, read_rate, step8, step32
from .base import BucketKey, Slot

# The rules hold about a dozen float64 temporaries a lane; this bounds them to some 400 MB.
_CHUNK = BLOCK_SIZE * 2**14


def _flat(tensor: Tensor) -> Tensor:
    """The elements in storage order, as a view (``tensor`` is dense)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class TorchBucket:
    """See `bnb_fsdp.backends.base.Bucket`."""

    rule: Rule
    bits: int
    slots: tuple[Slot, ...]

    @torch.no_grad()
    def run(self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper]) -> None:
        used = {slot.group: read_rate(hypers[slot.group]) for slot in self.slots}
        for slot, gradient in zip(self.slots, gradients):
            if gradient is None:
                continue
            slot.step.add_(1)
            step = int(slot.step)
            parameter, gradient = _flat(slot.parameter), _flat(gradient)
            states = tuple(_flat(state) for state in slot.states)
            for start in range(0, parameter.numel(), _CHUNK):
                part = slice(start, start + _CHUNK)
                scales = slice(start // BLOCK_SIZE, (start + _CHUNK) // BLOCK_SIZE)
                self._update(
                    used[slot.group],
                    step,
                    gradient[part],
                    parameter[part],
                    tuple(state[part] for state in states),
                    tuple(absmax[scales] for absmax in slot.absmax),
                )

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
