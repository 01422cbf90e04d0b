"""What a backend is: it prepares buckets and steps them."""

from __future__ import annotations

import array
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
    steps_on_device: bool = False


@dataclass(frozen=True)
class Slot:
    """One local tensor of a bucket: storage, state, and which of a step's hyperparameters are its own.

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

    def run(
        self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper], scales: Tensor | None = None
    ) -> None:
        """Advance and update every slot whose gradient is not None.

        A gradient has its parameter's shape and strides. ``scales``, float32 of one number a slot on the bucket's
        device, are the update scales of LAMB and LARS in place of ``Hyper.update_scale``. Works on the device's current
        stream; raises RuntimeError with operation, device, dtype and cause if the native code reports a failure.
        """

    def norms(self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper]) -> Tensor:
        """float32 of (slots, 2) on the bucket's device: the sums of squares of each slot's direction
        (`bnb_fsdp.rules.direction8`, of the coming step) and of its parameter; 0 without a gradient.

        Changes nothing, and gives the same bits for the same input. For rules with a direction.
        """


@runtime_checkable
class PointerBucket(Bucket, Protocol):
    """A bucket that can also take the gradients as addresses, which spares the step a look at each in Python."""

    def run_pointers(self, pointers: int, hypers: Sequence[Hyper], scales: Tensor | None = None) -> None:
        """As `run`, with the gradients' addresses.

        ``pointers`` is the address of one uint64 in host memory for each slot, in the order of the slots: 0 where
        there is no gradient, 1 for an empty gradient (never to be read), else where the first element of a gradient of
        the bucket's dtype and device lies, with its parameter's shape and strides. Both the array and the gradients are
        alive during the call alone; the array is rewritten by the next step. What is queued on the device's current
        stream before the call returns may still read the gradients, as with any operator: the caching allocator hands
        their memory on in the order of that stream. Work on other streams must be ordered with it by the bucket.
        """

    def norms_pointers(self, pointers: int, hypers: Sequence[Hyper]) -> Tensor:
        """As `norms`, with the gradients' addresses."""


def addresses(gradients: Sequence[Tensor | None]) -> array.array[int]:
    """What `PointerBucket` takes the address of (``buffer_info()[0]``, while the array is alive)."""
    # An empty shard's gradient has no storage; 1 says that there is one, and is never read.
    return array.array("Q", [0 if g is None else g.data_ptr() or 1 for g in gradients])


class ByPointers:
    """What a `PointerBucket` that only works on addresses does with tensors."""

    def run(
        self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper], scales: Tensor | None = None
    ) -> None:
        """See `Bucket.run`."""
        pointers = addresses(gradients)
        self.run_pointers(pointers.buffer_info()[0], hypers, scales)

    def norms(self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper]) -> Tensor:
        """See `Bucket.norms`."""
        pointers = addresses(gradients)
        return self.norms_pointers(pointers.buffer_info()[0], hypers)

    def run_pointers(self, pointers: int, hypers: Sequence[Hyper], scales: Tensor | None = None) -> None:
        """See `PointerBucket.run_pointers`."""
        raise NotImplementedError

    def norms_pointers(self, pointers: int, hypers: Sequence[Hyper]) -> Tensor:
        """See `PointerBucket.norms_pointers`."""
        raise NotImplementedError


def device_rate(hyper: Hyper, device: torch.device) -> int:
    """Address of a learning rate in device memory, 0 for a number. Nothing is read on the host.

    Raises ValueError if the tensor is not one float32 on ``device``.
    """
    lr = hyper.rate
    if lr is None:
        return 0
    if lr.device != device or lr.dtype != torch.float32 or lr.numel() != 1:
        raise ValueError(
            f"lr is a {lr.dtype} tensor of shape {tuple(lr.shape)} on {lr.device}; for parameters on {device} give a "
            f"number, a tensor on the CPU, or a float32 tensor with one element on {device}."
        )
    return lr.data_ptr()


# A bucket may have a method `check(hypers, capturing)`: called before any bucket of a step runs, it raises for what
# this one could not do. Without it a bucket cannot be captured in a CUDA graph.


class Backend(Protocol):
    """A way to run buckets on some device types."""

    name: str

    def bucket(self, key: BucketKey, rule: Rule, slots: Sequence[Slot]) -> Bucket:
        """Prepare a bucket; may allocate."""


def release_with(owner: object, function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function`` when ``owner`` dies, but not at the end of the process, which lets everything go by itself: the
    call would wait for a device that may wait for another rank."""
    weakref.finalize(owner, in_process, os.getpid(), function, *arguments).atexit = False


def in_process(process: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function`` if this is ``process``: a fork has no device."""
    if os.getpid() == process:
        function(*arguments)
