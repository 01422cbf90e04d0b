"""Adam and AdamW.

Kingma and Ba, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. As in
bitsandbytes the two differ in the default of ``weight_decay`` alone, and decay is applied after the update::

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    p = p - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)
    p = p * (1 - lr * weight_decay)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..residency import Policy
from ..rules import ADAM
from .base import BlockwiseOptimizer, Overrides, Params, fixed, fixed_bits, paged


class Adam(BlockwiseOptimizer):
    """Adam with 32-bit or 8-bit state.

    Args:
        params: tensors, DTensors, (name, tensor) pairs or group dicts.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled decay, multiplied by ``lr``, applied after the update.
        amsgrad: must be False.
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

    rule = ADAM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
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
        fixed(type(self).__name__, amsgrad=(amsgrad, False), args=(args, None))
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            overrides=overrides,
            backend=backend,
            capturable=capturable,
            residency=paged(type(self).__name__, is_paged, residency, residency_reserve),
        )


class Adam8bit(Adam):
    """`Adam` with 8-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 8,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 8, "Adam or AdamW")
        super().__init__(params, lr, betas, eps, weight_decay, optim_bits=8, **kwargs)


class Adam32bit(Adam):
    """`Adam` with 32-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 32,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 32, "Adam or AdamW")
        super().__init__(params, lr, betas, eps, weight_decay, optim_bits=32, **kwargs)


class AdamW(Adam):
    """`Adam` with ``weight_decay=1e-2``."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **kwargs)


class AdamW8bit(Adam8bit):
    """`AdamW` with 8-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **kwargs)


class AdamW32bit(Adam32bit):
    """`AdamW` with 32-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **kwargs)


class PagedAdam(Adam):
    """`Adam` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedAdam8bit(Adam8bit):
    """`Adam8bit` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedAdam32bit(Adam32bit):
    """`Adam32bit` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedAdamW(AdamW):
    """`AdamW` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedAdamW8bit(AdamW8bit):
    """`AdamW8bit` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedAdamW32bit(AdamW32bit):
    """`AdamW32bit` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)
