"""Lion.

Chen et al., "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675::

    p = p * (1 - lr * weight_decay)
    p = p - lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..residency import Policy
from ..rules import LION
from .base import BlockwiseOptimizer, Overrides, Params, fixed, fixed_bits, paged


class Lion(BlockwiseOptimizer):
    """Lion with 32-bit or 8-bit state.

    Args:
        params: tensors, DTensors, (name, tensor) pairs or group dicts.
        lr: learning rate, a number or a one-element tensor.
        betas: interpolation weight of the update, decay rate of the momentum, each in [0, 1).
        weight_decay: decoupled decay, multiplied by ``lr``, applied before the update.
        optim_bits: 32, or 8 for block-wise 8-bit state.
        args: must be None (bitsandbytes' namespace of extra settings).
        min_8bit_size: parameters with fewer elements (of the global tensor) keep 32-bit state.
        is_paged: keep state in page-locked host memory, or as much of it as ``residency`` says.
        residency: "auto" (default: on the device what fits after the first iteration, the rest in host memory),
            "device", "host", or bytes of device memory that the state may take. Paged classes only.
        residency_reserve: bytes of device memory that "auto" leaves free; default the larger of 1 GiB and 5 %.
        overrides: ``{name pattern or parameter: {"optim_bits": ..., "min_8bit_size": ...}}``.
        backend: "auto", "cpu", "cuda", "triton" or "torch"; default ``$BNB_FSDP_BACKEND``, else "auto".
        capturable: keep step counts on the CUDA device, so that a CUDA graph can capture `step`. A graph holds the
            state it was captured with: capture again after `load_state_dict` or `add_param_group`.

    Raises:
        ValueError: a hyperparameter out of range, an unsupported dtype, placement or storage.
    """

    rule = LION

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        residency: Policy | None = None,
        residency_reserve: int | None = None,
        overrides: Overrides | None = None,
        backend: str | None = None,
        capturable: bool = False,
    ) -> None:
        fixed(type(self).__name__, args=(args, None))
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            overrides=overrides,
            backend=backend,
            capturable=capturable,
            residency=paged(type(self).__name__, is_paged, residency, residency_reserve),
        )


class Lion8bit(Lion):
    """`Lion` with 8-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 8,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 8, "Lion")
        super().__init__(params, lr, betas, weight_decay, optim_bits=8, **kwargs)


class Lion32bit(Lion):
    """`Lion` with 32-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 32,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 32, "Lion")
        super().__init__(params, lr, betas, weight_decay, optim_bits=32, **kwargs)


class PagedLion(Lion):
    """`Lion` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedLion8bit(Lion8bit):
    """`Lion8bit` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedLion32bit(Lion32bit):
    """`Lion32bit` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)
