"""RMSprop.

Hinton, https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf. As `torch.optim.RMSprop` without
momentum and centring, except that with 8-bit state the decay counts in v alone, as in bitsandbytes' kernel::

    h = g + weight_decay * p
    v = alpha * v + (1 - alpha) * h**2
    p = p - lr * h / (sqrt(v) + eps)               (8-bit state: g instead of h)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import RMSPROP, Hyper
from .base import BlockwiseOptimizer, Overrides, Params, check_rate, fixed, fixed_bits


class RMSprop(BlockwiseOptimizer):
    """RMSprop with 32-bit or 8-bit state.

    Args:
        params: tensors, DTensors, (name, tensor) pairs or group dicts.
        lr: learning rate, a number or a one-element tensor.
        alpha: decay rate of the squared gradient, in (0, 1).
        eps: added to the denominator.
        weight_decay: added to the gradient, times the parameter.
        momentum: must be 0 (bitsandbytes accepts it and ignores it).
        centered: must be False.
        optim_bits: 32, or 8 for block-wise 8-bit state.
        args: must be None (bitsandbytes' namespace of extra settings).
        min_8bit_size: parameters with fewer elements (of the global tensor) keep 32-bit state.
        overrides: ``{name pattern or parameter: {"optim_bits": ..., "min_8bit_size": ...}}``.
        backend: "auto", "cpu", "cuda", "triton" or "torch"; default ``$BNB_FSDP_BACKEND``, else "auto".
        capturable: keep step counts on the CUDA device, so that a CUDA graph can capture `step`. A graph holds the
            state it was captured with: capture again after `load_state_dict` or `add_param_group`.

    Raises:
        ValueError: a hyperparameter out of range, an unsupported dtype, placement or storage.
    """

    rule = RMSPROP

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        *,
        centered: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        overrides: Overrides | None = None,
        backend: str | None = None,
        capturable: bool = False,
    ) -> None:
        fixed(type(self).__name__, momentum=(momentum, 0.0), centered=(centered, False), args=(args, None))
        super().__init__(
            params,
            {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay},
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            overrides=overrides,
            backend=backend,
            capturable=capturable,
        )

    def _check_group(self, group: dict[str, Any], index: int) -> None:
        super()._check_group(group, index)
        check_rate(f"{type(self).__name__}, group {index}", "alpha", group["alpha"])

    def hyper(self, group: dict[str, Any]) -> Hyper:
        return super().hyper(group)._replace(beta1=float(group["alpha"]))


class RMSprop8bit(RMSprop):
    """`RMSprop` with 8-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        *,
        optim_bits: int = 8,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 8, "RMSprop")
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, optim_bits=8, **kwargs)


class RMSprop32bit(RMSprop):
    """`RMSprop` with 32-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        *,
        optim_bits: int = 32,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 32, "RMSprop")
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, optim_bits=32, **kwargs)
