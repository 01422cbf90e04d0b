"""What a backend is: it prepares buckets and steps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..rules import Hyper, Rule


class BucketKey(NamedTuple):
    """What all tensors of one native call share."""

    rule: str
    bits: int
    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Slot:
    """One local tensor of a bucket: storage, state, and which parameter group it takes hyperparameters from.

    ``parameter`` is dense; ``states`` share its strides. ``absmax`` is empty in 32-bit buckets.
    """

    name: str
    group: int
    parameter: Tensor
    states: tuple[Tensor, ...]
    absmax: tuple[Tensor, ...]
    step: Tensor


class Bucket(Protocol):
    """Prepared tables for a list of slots."""

    def run(self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper]) -> None:
        """Advance and update every slot whose gradient is not None.

        A gradient has its parameter's shape and strides. Works on the device's current stream; raises
        RuntimeError with operation, device, dtype and cause if the native code reports a failure.
        """


class Backend(Protocol):
    """A way to run buckets on some device types."""

    name: str

    def bucket(self, key: BucketKey, rule: Rule, slots: Sequence[Slot]) -> Bucket:
        """Prepare a bucket; may allocate."""
