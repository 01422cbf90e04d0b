"""Backends and the choice among them."""

from __future__ import annotations

import os

import torch

from ..callers import warn_caller
from .base import Backend, Bucket, BucketKey, Slot
from .torch_backend import TorchBackend

__all__ = ["NAMES", "Backend", "Bucket", "BucketKey", "Slot", "check_name", "forked", "say_again", "select"]

NAMES = ("auto", "cpu", "cuda", "torch", "triton")
ENVIRONMENT_VARIABLE = "BNB_FSDP_BACKEND"

_said: set[str] = set()
_fork = {"forked": False}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _fork.update(forked=True))


def forked() -> bool:
    """Whether this process was forked after bnb_fsdp was imported: OpenMP's threads do not survive that."""
    return _fork["forked"]


def check_name(name: str | None) -> str:
    """``name``, else ``$BNB_FSDP_BACKEND``, else "auto"; ValueError with the choices if unknown."""
    source = "backend"
    if name is None:
        name, source = os.environ.get(ENVIRONMENT_VARIABLE) or "auto", ENVIRONMENT_VARIABLE
    if name not in NAMES:
        raise ValueError(f"{source}={name!r} is not a backend; choose one of {', '.join(NAMES)}.")
    return name


def _warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warn_caller(message, RuntimeWarning)


def say_again() -> None:
    """Let the warnings of `select` come once more, for those who collect them."""
    _said.clear()


def select(device: torch.device, requested: str) -> Backend:
    """The backend for tensors on ``device``.

    "auto" takes the first that can run: on the CPU the native library, else torch; on an NVIDIA GPU the native library,
    else Triton, else torch; on AMD (ROCm's torch, whose devices are called cuda) and Intel GPUs Triton, else torch; on
    other devices torch. What should have been there and is not is said in one warning. A backend asked for by name
    that cannot run there raises RuntimeError; "triton" runs CPU tensors with TRITON_INTERPRET=1 only.
    """
    if requested == "torch":
        return TorchBackend()
    if requested == "triton":
        try:
            return _triton(device)
        except RuntimeError as error:
            raise RuntimeError(f"backend='triton' was asked for, but {error}") from error
    native = device.type if device.type in ("cpu", "cuda") else None
    if requested not in ("auto", native):
        raise RuntimeError(
            f"backend={requested!r} cannot update a tensor on {device}; use backend='auto' or 'torch', "
            "or unset BNB_FSDP_BACKEND."
        )
    reasons = []
    if native is not None and (requested == native or torch.version.hip is None):
        try:
            return _native(device)
        except RuntimeError as error:  # LibraryError is one
            if requested == native:
                raise RuntimeError(f"backend={requested!r} was asked for, but {error}") from error
            reasons.append(str(error))
    if device.type in ("cuda", "xpu"):
        try:
            backend = _triton(device)
        except RuntimeError as error:
            reasons.append(str(error))
        else:
            if reasons:
                _warn_once(f"bnb_fsdp takes its Triton kernels for {device.type} tensors: {reasons[0]}")
            return backend
    reason = " And: ".join(reasons) or f"there are no native kernels for {device.type} tensors."
    _warn_once(f"bnb_fsdp falls back to its slow torch backend for {device.type} tensors: {reason}")
    return TorchBackend()


def _triton(device: torch.device) -> Backend:
    """The Triton backend, if it can run on ``device``."""
    from .triton_backend import TritonBackend

    return TritonBackend(device)


def _native(device: torch.device) -> Backend:
    """The native backend of the device type, its library loaded."""
    if device.type == "cpu":
        from .cpu import CpuBackend  # loads the library, so only when something steps

        return CpuBackend()
    from .cuda import CudaBackend
    from .native import LibraryError

    if torch.version.cuda is None:
        raise LibraryError("this torch is not built for CUDA, which the native kernels need.")
    return CudaBackend(device)
