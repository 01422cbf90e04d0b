"""``torch.ops.bnb_fsdp``: single-tensor steps as operators, with schemas, mutation annotations and fakes.

For code that steps one tensor at a time, or wants the update inside `torch.compile`; the optimizers use buckets
instead. Registered when ``bnb_fsdp`` is imported. All tensors are plain, dense, of one shape and memory order, and
on one device; states and absmax as in `bnb_fsdp.state.allocate`. ``step`` counts the steps, this one included.

* ``step_8bit(rule, g, p, states, absmax, step, lr, beta1, beta2, beta3, alpha, eps, weight_decay, scale, skip_zeros)``
* ``step_32bit(rule, g, p, states, step, ...)``: the same without absmax.
* ``update_norms(rule, g, p, states, absmax, step, ...) -> Tensor``: float32 (2,), the sums of squares of the coming
  update and of the parameter; rules "adam" and "momentum", CUDA.

``scale``, a float32 tensor of one element, multiplies the update (LAMB, LARS).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import sharding
from .codebook import flat
from .rules import RULES, Hyper, step8, step32
from .state import PARAMETER_DTYPES, blocks

_HYPERS = (
    "int step, float lr, float beta1=0.0, float beta2=0.0, float beta3=0.0, float alpha=0.0, float eps=0.0, "
    "float weight_decay=0.0, Tensor? scale=None, bool skip_zeros=False"
)
_STATES = "str rule, Tensor g, Tensor(a!) p, Tensor(b!)[] states"
_library: Any = torch.library.Library("bnb_fsdp", "DEF")  # type: ignore[no-untyped-call]
_library.define(f"step_8bit({_STATES}, Tensor(c!)[] absmax, {_HYPERS}) -> ()")
_library.define(f"step_32bit({_STATES}, {_HYPERS}) -> ()")
_library.define(
    f"update_norms(str rule, Tensor g, Tensor p, Tensor[] states, Tensor[] absmax, {_HYPERS}) -> Tensor"
)


def _check(
    rule: str,
    g: Tensor,
    p: Tensor,
    states: Sequence[Tensor],
    absmax: Sequence[Tensor],
    step: int,
    scale: Tensor | None,
) -> int:
    """Bits of the states; ValueError, or RuntimeError for another device, naming what does not fit."""
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not known; choose one of {', '.join(RULES)}.")
    wanted = len(RULES[rule].signed)
    if len(states) != wanted or len(absmax) not in (0, wanted):
        raise ValueError(
            f"{rule} has {wanted} states, but got {len(states)} states and {len(absmax)} absmax."
        )
    if step < 1:
        raise ValueError(f"step={step} must be at least 1: it counts this step too.")
    for name, tensor in (("p", p), ("g", g)):
        if tensor.dtype not in PARAMETER_DTYPES:
            choices = ", ".join(map(str, PARAMETER_DTYPES))
            raise ValueError(f"{name}: dtype {tensor.dtype} is not supported; use one of {choices}.")
    dtype = torch.uint8 if absmax else torch.float32
    for name, tensor in (("g", g), *((f"states[{i}]", state) for i, state in enumerate(states))):
        if tensor.shape != p.shape or not sharding.same_order(tensor, p.shape, p.stride()):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, p {tuple(p.shape)} and "
                f"{p.stride()}; they must agree."
            )
        if tensor is not g and tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}.")
        _check_device(rule, name, tensor, p)
    for index, tensor in enumerate(absmax):
        if (
            tensor.shape != (blocks(p.numel()),)
            or tensor.dtype != torch.float32
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"absmax[{index}] is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
                f"expected contiguous float32 of ({blocks(p.numel())},)."
            )
        _check_device(rule, f"absmax[{index}]", tensor, p)
    if scale is not None:
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise ValueError(f"scale is {scale.dtype} of shape {tuple(scale.shape)}, expected one float32.")
        _check_device(rule, "scale", scale, p)
    return 8 if absmax else 32


def _check_device(rule: str, name: str, tensor: Tensor, p: Tensor) -> None:
    if tensor.device != p.device:
        raise RuntimeError(
            f"{rule} step: {name} is on {tensor.device}, p ({p.dtype}, shape {tuple(p.shape)}) on {p.device}; "
            "they must be on one device."
        )


def _check_dense(p: Tensor) -> None:
    sharding.check(p, "p")


def _hyper(
    lr: float, beta1: float, beta2: float, beta3: float, alpha: float, eps: float, weight_decay: float,
    skip_zeros: bool,
) -> Hyper:  # fmt: skip
    return Hyper(lr, beta1, beta2, beta3, alpha, eps, weight_decay, skip_zeros)


def _step_torch(
    bits: int, rule: str, g: Tensor, p: Tensor, states: Sequence[Tensor], absmax: Sequence[Tensor], step: int,
    hyper: Hyper, scale: Tensor | None,
) -> None:  # fmt: skip
    """Devices without a native library: the rules themselves."""
    if scale is not None:
        hyper = hyper._replace(update_scale=float(scale))
    flat_states = tuple(map(flat, states))
    if bits == 8:
        new, codes, scales = step8(RULES[rule], hyper, step, flat(g), flat(p), flat_states, tuple(absmax))
        for old, value in zip((*flat_states, *absmax), (*codes, *scales)):
            old.copy_(value)
    else:
        new, values = step32(RULES[rule], hyper, step, flat(g), flat(p), flat_states)
        for old, value in zip(flat_states, values):
            old.copy_(value)
    flat(p).copy_(new)


def _entry(
    p: Tensor, states: Sequence[Tensor], absmax: Sequence[Tensor], step: ctypes.c_float
) -> ctypes.Structure:
    from .backends import native

    entry = native.TensorEntry(parameter=p.data_ptr(), step=ctypes.addressof(step), numel=p.numel(), group=0)
    for index, state in enumerate(states):
        entry.state[index] = state.data_ptr()
    for index, scales in enumerate(absmax):
        entry.absmax[index] = scales.data_ptr()
    return entry


def _step_cpu(
    bits: int, rule: str, g: Tensor, p: Tensor, states: Sequence[Tensor], absmax: Sequence[Tensor], step: int,
    hyper: Hyper, scale: Tensor | None,
) -> None:  # fmt: skip
    from .backends import BucketKey, Slot
    from .backends.cpu import CpuBackend
    from .backends.native import LibraryError

    try:
        backend = CpuBackend()
    except LibraryError:
        _step_torch(bits, rule, g, p, states, absmax, step, hyper, scale)
        return
    if scale is not None:
        hyper = hyper._replace(update_scale=float(scale))
    slot = Slot("p", 0, p, tuple(states), tuple(absmax), torch.tensor(step - 1.0))
    key = BucketKey(rule, bits, p.dtype, g.dtype, p.device)
    backend.bucket(key, RULES[rule], [slot]).run([g], [hyper])


class CudaSteps:
    """Single-tensor steps on one CUDA device. What a call needs is kept ready: the calls cost host time alone."""

    def __init__(self, index: int) -> None:
        from .backends import cuda, native

        cuda.check_device(torch.device("cuda", index))
        self._cuda, self._index = cuda, index
        self._library = cuda.library()
        self.maps = cuda.maps(index).data_ptr()
        # Larger tensors have more tiles than the device has CTAs, which then take them by a ticket.
        self._with_tickets = 4096 * torch.cuda.get_device_properties(index).multi_processor_count
        self._entry, self._hyper = native.TensorEntry, native.Hyper

    def __call__(
        self, bits: int, rule: str, g: Tensor, p: Tensor, states: Sequence[Tensor], absmax: Sequence[Tensor],
        step: int, hyper: Sequence[float], skip_zeros: bool, scale: Tensor | None,
    ) -> None:  # fmt: skip
        """Step ``p`` on the current stream. The tensors have been checked; ``hyper``: lr to weight_decay."""
        numel = p.numel()
        counter = ctypes.c_float()
        entry = self._entry(parameter=p.data_ptr(), step=ctypes.addressof(counter), numel=numel)
        for index, state in enumerate(states):
            entry.state[index] = state.data_ptr()
        for index, scales in enumerate(absmax):
            entry.absmax[index] = scales.data_ptr()
        # A ticket counter of its own for each launch, as several may be under way.
        tickets = torch.zeros(2, dtype=torch.int32, device=p.device) if numel > self._with_tickets else None
        status = self._library.step(
            rule.encode(), bits, self._cuda.DTYPES[p.dtype], self._cuda.DTYPES[g.dtype], ctypes.byref(entry),
            g.data_ptr() or 1, ctypes.byref(self._hyper(*hyper, skip_zeros)), step,
            None if scale is None else scale.data_ptr(), self.maps, None if tickets is None else tickets.data_ptr(),
            self._index, self._cuda.raw_stream(self._index),
        )  # fmt: skip
        if status != 0:
            raise RuntimeError(
                f"{rule} step ({bits}-bit, {p.dtype} parameter, {g.dtype} gradient, shape {tuple(p.shape)}, "
                f"{p.device}): {self._library.last_error()}"
            )


@cache
def cuda_steps(index: int) -> CudaSteps:
    """The steps of a device. LibraryError if the CUDA library is missing, RuntimeError without kernels for it."""
    return CudaSteps(index)


def _step_cuda(
    bits: int, rule: str, g: Tensor, p: Tensor, states: Sequence[Tensor], absmax: Sequence[Tensor], step: int,
    hyper: Hyper, scale: Tensor | None,
) -> None:  # fmt: skip
    steps = cuda_steps(p.get_device())
    steps(bits, rule, g, p, states, absmax, step, hyper[:7], hyper.skip_zeros, scale)


def _norms_cuda(
    bits: int, rule: str, g: Tensor, p: Tensor, states: Sequence[Tensor], absmax: Sequence[Tensor], step: int,
    hyper: Hyper,
) -> Tensor:  # fmt: skip
    from .backends import cuda

    library, index = cuda.library(), cuda.index_of(p.device)
    counter = ctypes.c_float(step - 1.0)
    entry = _entry(p, states, absmax, counter)
    workspace = torch.empty(max(1, library.tiles(p.numel())), 2, device=p.device)
    sums = torch.zeros(2, device=p.device)
    status = library.norms(
        rule.encode(), bits, cuda.DTYPES[p.dtype], cuda.DTYPES[g.dtype], ctypes.byref(entry), g.data_ptr() or 1,
        ctypes.byref(cuda.native_hyper(hyper)), float(step), cuda_steps(index).maps if bits == 8 else None,
        workspace.data_ptr(), sums.data_ptr(), index, cuda.raw_stream(index),
    )  # fmt: skip
    if status != 0:
        raise RuntimeError(
            f"{rule} norms ({bits}-bit, shape {tuple(p.shape)}, {p.device}): {library.last_error()}"
        )
    return sums


_STEPS = {"CPU": _step_cpu, "CUDA": _step_cuda, "CompositeExplicitAutograd": _step_torch}


def _register(dispatch_key: str) -> None:
    run = _STEPS[dispatch_key]

    def step_8bit(
        rule: str, g: Tensor, p: Tensor, states: list[Tensor], absmax: list[Tensor], step: int, lr: float,
        beta1: float = 0.0, beta2: float = 0.0, beta3: float = 0.0, alpha: float = 0.0, eps: float = 0.0,
        weight_decay: float = 0.0, scale: Tensor | None = None, skip_zeros: bool = False,
    ) -> None:  # fmt: skip
        if not absmax:
            raise ValueError("absmax is empty; step_32bit takes states without scales.")
        _check(rule, g, p, states, absmax, step, scale)
        _check_dense(p)
        hyper = _hyper(lr, beta1, beta2, beta3, alpha, eps, weight_decay, skip_zeros)
        run(8, rule, g, p, states, absmax, step, hyper, scale)
        torch.autograd.graph.increment_version([p, *states, *absmax])

    def step_32bit(
        rule: str, g: Tensor, p: Tensor, states: list[Tensor], step: int, lr: float,
        beta1: float = 0.0, beta2: float = 0.0, beta3: float = 0.0, alpha: float = 0.0, eps: float = 0.0,
        weight_decay: float = 0.0, scale: Tensor | None = None, skip_zeros: bool = False,
    ) -> None:  # fmt: skip
        _check(rule, g, p, states, (), step, scale)
        _check_dense(p)
        hyper = _hyper(lr, beta1, beta2, beta3, alpha, eps, weight_decay, skip_zeros)
        run(32, rule, g, p, states, (), step, hyper, scale)
        torch.autograd.graph.increment_version([p, *states])

    _library.impl("step_8bit", step_8bit, dispatch_key)
    _library.impl("step_32bit", step_32bit, dispatch_key)


def _update_norms(
    rule: str, g: Tensor, p: Tensor, states: list[Tensor], absmax: list[Tensor], step: int, lr: float,
    beta1: float = 0.0, beta2: float = 0.0, beta3: float = 0.0, alpha: float = 0.0, eps: float = 0.0,
    weight_decay: float = 0.0, scale: Tensor | None = None, skip_zeros: bool = False,
) -> Tensor:  # fmt: skip
    bits = _check(rule, g, p, states, absmax, step, scale)
    _check_dense(p)
    hyper = _hyper(lr, beta1, beta2, beta3, alpha, eps, weight_decay, skip_zeros)
    return _norms_cuda(bits, rule, g, p, states, absmax, step, hyper)


for _key in _STEPS:
    _register(_key)
_library.impl("update_norms", _update_norms, "CUDA")


@torch.library.register_fake("bnb_fsdp::step_8bit", lib=_library)
def _(rule, g, p, states, absmax, step, *_args, **_kwargs):  # type: ignore[no-untyped-def]
    _check(rule, g, p, states, absmax, step, None)


@torch.library.register_fake("bnb_fsdp::step_32bit", lib=_library)
def _(rule, g, p, states, step, *_args, **_kwargs):  # type: ignore[no-untyped-def]
    _check(rule, g, p, states, (), step, None)


@torch.library.register_fake("bnb_fsdp::update_norms", lib=_library)
def _(rule, g, p, states, absmax, step, *_args, **_kwargs):  # type: ignore[no-untyped-def]
    _check(rule, g, p, states, absmax, step, None)
    return p.new_empty(2, dtype=torch.float32)
