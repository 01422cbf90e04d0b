"""Faster kernels under bitsandbytes' own optimizers."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .. import codebook
from ..ops import cuda_steps
from ..state import PARAMETER_DTYPES

SUPPORTED_VERSIONS = ("0.50.2",)
"""Versions of bitsandbytes whose operators and ``step()`` were read and compared."""

_RULES_8BIT = {name: name for name in ("adam", "momentum", "rmsprop", "adagrad", "lion", "ademamix")}
_RULES_32BIT = {**_RULES_8BIT, "lamb": "adam", "lars": "momentum"}

_active: NativeKernels | None = None


def use_native_kernels() -> NativeKernels:
    """Let bitsandbytes' optimizers on CUDA run this package's kernels, without a synchronise for every parameter.

    Existing and new optimizers of `bitsandbytes.optim` then step asynchronously on the current stream, with the same
    bits. Returned is a handle: ``handle.restore()`` (or leaving ``with use_native_kernels():``) puts bitsandbytes'
    own kernels and synchronises back. Calling it again returns the same handle.

    What our kernels do not cover runs upstream's, between two synchronises: paged state (larger than 1e5 elements in
    Paged* optimizers), ``gnorm_scale`` other than 1, ``max_unorm`` in rules other than Adam's and momentum's, other
    code maps than bitsandbytes' dynamic ones. AdEMAMix keeps its scales of the slow average in their own row
    (upstream's kernel overlaps the rows unless the size is a multiple of 256), so that a run of AdEMAMix8bit should
    use one kind of kernels from its first step.

    Raises RuntimeError if bitsandbytes is missing or of a version not in `SUPPORTED_VERSIONS`, if the CUDA library is
    missing or has no kernels for one of the devices, or if torch is not built for CUDA; nothing is changed then.
    Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2050.
    """
    global _active
    if _active is None:
        _active = NativeKernels()
    return _active


class NativeKernels:
    """What `use_native_kernels` changed, to put it back."""

    def __init__(self) -> None:
        self._optimizer_module = _checked_import()
        from ..backends import cuda

        cuda.library()  # a missing library, or one without kernels for a device, shows before anything is changed
        if torch.version.cuda is None:
            raise RuntimeError(
                f"use_native_kernels() needs a torch that is built for CUDA, but {torch.__version__} is installed."
            )
        for index in range(torch.cuda.device_count()):
            cuda.check_device(torch.device("cuda", index))
        self._upstream_sync = self._optimizer_module.sync_gpu
        kernels = __import__("bitsandbytes.backends.cuda.ops", fromlist=["ops"])
        self._upstream8: Callable[..., None] = kernels._optimizer_update_8bit_blockwise_impl
        self._upstream32: Callable[..., None] = kernels._optimizer_update_32bit_impl
        self._maps: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        registrations: Any = torch.library.Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            try:
                registrations.impl(
                    "optimizer_update_8bit_blockwise", self._update8, "CUDA", allow_override=True
                )
                registrations.impl("optimizer_update_32bit", self._update32, "CUDA", allow_override=True)
            except Exception:
                registrations._destroy()
                raise
        self._registrations = registrations
        self._optimizer_module.sync_gpu = self._sync

    def restore(self) -> None:
        """Put bitsandbytes' kernels and synchronises back; waits for what is under way. May be called twice."""
        global _active
        if _active is not self:
            return
        torch.cuda.synchronize()
        self._registrations._destroy()
        self._optimizer_module.sync_gpu = self._upstream_sync
        _active = None

    def __enter__(self) -> NativeKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _sync(self, tensor: Tensor) -> None:
        """In place of the synchronise after every parameter; upstream's kernels are synchronised where they run."""
        if tensor.device.type != "cuda":
            self._upstream_sync(tensor)

    def _is_dynamic_map(self, qmap: Tensor, signed: bool) -> bool:
        """Whether a code map is ours. Looked at once a tensor, as it costs a synchronise."""
        known = self._maps.get(id(qmap))
        if known is None or known[0]() is not qmap:
            ours = torch.tensor(codebook.dynamic_map(signed))
            known = (weakref.ref(qmap), torch.equal(qmap.cpu(), ours))
            self._maps[id(qmap)] = known
        return known[1]

    def _run_upstream(self, function: Callable[..., None], device: torch.device, *arguments: Any) -> None:
        # Its kernels run on the legacy stream, which waits for nobody.
        torch.cuda.synchronize(device)
        function(*arguments)
        torch.cuda.synchronize(device)

    def _update8(
        self, optimizer_name: str, g: Tensor, p: Tensor, state1: Tensor, state2: Tensor | None, beta1: float,
        beta2: float, beta3: float, alpha: float, eps: float, step: int, lr: float, qmap1: Tensor,
        qmap2: Tensor | None, absmax1: Tensor, absmax2: Tensor | None, weight_decay: float, gnorm_scale: float,
        skip_zeros: bool = False,
    ) -> None:  # fmt: skip
        rule = _RULES_8BIT.get(optimizer_name)
        ours = (
            rule is not None
            and gnorm_scale == 1.0
            and state1.is_cuda
            and self._is_dynamic_map(qmap1, signed=True)
            and (qmap2 is None or self._is_dynamic_map(qmap2, signed=False))
        )
        if not ours or rule is None:
            self._run_upstream(
                self._upstream8, p.device, optimizer_name, g, p, state1, state2, beta1, beta2, beta3, alpha, eps,
                step, lr, qmap1, qmap2, absmax1, absmax2, weight_decay, gnorm_scale, skip_zeros,
            )  # fmt: skip
            return
        states, scales = _states(rule, p, state1, state2), _scales(rule, absmax1, absmax2)
        _check(g, p, states)
        cuda_steps(p.get_device())(
            8,
            rule,
            g,
            p,
            states,
            scales,
            step,
            (lr, beta1, beta2, beta3, alpha, eps, weight_decay),
            skip_zeros,
            None,
        )

    def _update32(
        self, optimizer_name: str, g: Tensor, p: Tensor, state1: Tensor, state2: Tensor | None,
        unorm_vec: Tensor | None, max_unorm: float, param_norm: float, beta1: float, beta2: float, beta3: float,
        alpha: float, eps: float, weight_decay: float, step: int, lr: float, gnorm_scale: float,
        skip_zeros: bool = False,
    ) -> None:  # fmt: skip
        rule = _RULES_32BIT.get(optimizer_name)
        ours = (
            rule is not None
            and gnorm_scale == 1.0
            and state1.is_cuda
            and (max_unorm <= 0.0 or rule in ("adam", "momentum"))
        )
        if not ours or rule is None:
            self._run_upstream(
                self._upstream32, p.device, optimizer_name, g, p, state1, state2, unorm_vec, max_unorm, param_norm,
                beta1, beta2, beta3, alpha, eps, weight_decay, step, lr, gnorm_scale, skip_zeros,
            )  # fmt: skip
            return
        states = _states(rule, p, state1, state2)
        _check(g, p, states)
        hyper = (lr, beta1, beta2, beta3, alpha, eps, weight_decay)
        scale = None
        if max_unorm > 0.0:
            norm = torch.ops.bnb_fsdp.update_norms(rule, g, p, states, [], step, *hyper)[:1]
            if unorm_vec is not None:
                unorm_vec.copy_(norm)
            limit = max_unorm * param_norm + (eps if rule == "momentum" else 0.0)
            norm = norm.sqrt()
            scale = torch.where(norm > limit, limit / norm, 1.0)
        cuda_steps(p.get_device())(32, rule, g, p, states, (), step, hyper, skip_zeros, scale)


def _checked_import() -> Any:
    """bitsandbytes' optimizer module; RuntimeError if the package is missing or of an unknown version."""
    try:
        import bitsandbytes
        import bitsandbytes.optim.optimizer as module
    except ImportError as error:
        raise RuntimeError(
            f"use_native_kernels() needs bitsandbytes {' or '.join(SUPPORTED_VERSIONS)}: {error}."
        ) from error
    if bitsandbytes.__version__ not in SUPPORTED_VERSIONS:
        raise RuntimeError(
            f"use_native_kernels() knows the operators of bitsandbytes {', '.join(SUPPORTED_VERSIONS)}, but "
            f"{bitsandbytes.__version__} is installed. Install one of these versions, or use the optimizers of "
            "bnb_fsdp."
        )
    return module


def _check(g: Tensor, p: Tensor, states: list[Tensor]) -> None:
    """What upstream's Python ensures, as the kernels get addresses alone: one size, contiguous, a known dtype."""
    numel = p.numel()
    if (
        g.numel() == numel
        and all(state.numel() == numel for state in states)
        and g.is_contiguous()
        and p.is_contiguous()
        and g.dtype in PARAMETER_DTYPES
        and p.dtype in PARAMETER_DTYPES
        and g.is_cuda
    ):
        return
    raise RuntimeError(
        f"cannot step a parameter of {p.dtype} {tuple(p.shape)}, strides {p.stride()}, on {p.device} with a "
        f"gradient of {g.dtype} {tuple(g.shape)}, strides {g.stride()}, on {g.device} and states of "
        f"{[state.numel() for state in states]} elements: all must be contiguous, of one size, on one CUDA device, "
        "parameter and gradient float32, bfloat16 or float16."
    )


def _states(rule: str, p: Tensor, state1: Tensor, state2: Tensor | None) -> list[Tensor]:
    """Our list of states. AdEMAMix has both averages in ``state1``, of shape (2, *p.shape)."""
    if rule != "ademamix":
        return [state1] if state2 is None else [state1, state2]
    if state1.numel() != 2 * p.numel() or state2 is None:
        raise RuntimeError(
            f"AdEMAMix needs state1 of shape (2, *{tuple(p.shape)}), but it has {tuple(state1.shape)}: bitsandbytes' "
            "AdEMAMix32bit allocates half of it and its kernel writes behind the end "
            "(https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2075). Use AdEMAMix or AdEMAMix8bit."
        )
    fast, slow = state1.view(2, *p.shape)
    return [fast, state2, slow]


def _scales(rule: str, absmax1: Tensor, absmax2: Tensor | None) -> list[Tensor]:
    if rule != "ademamix":
        return [absmax1] if absmax2 is None else [absmax1, absmax2]
    assert absmax2 is not None
    fast, slow = absmax1.view(2, -1)
    return [fast, absmax2, slow]
