"""SGD with momentum.

As `torch.optim.SGD` with ``momentum`` and without dampening or Nesterov's correction; decay is added to the gradient::

    m = momentum * m + g + weight_decay * p        (at the first step: g + weight_decay * p)
    p = p - lr * m
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import MOMENTUM, Hyper
from .base import BlockwiseOptimizer, Overrides, Params, check_rate, fixed, fixed_bits


class SGD(BlockwiseOptimizer):
    """SGD with momentum, with 32-bit or 8-bit state.

    Args:
        params: tensors, DTensors, (name, tensor) pairs or group dicts.
        lr: learning rate, a number or a one-element tensor.
        momentum: decay rate of the momentum, in (0, 1). Without momentum there is no state: use `torch.optim.SGD`.
        dampening: must be 0 (bitsandbytes accepts it and ignores it).
        weight_decay: added to the gradient, times the parameter.
        nesterov: must be False (bitsandbytes accepts it and ignores it).
        optim_bits: 32, or 8 for block-wise 8-bit state.
        args: must be None (bitsandbytes' namespace of extra settings).
        min_8bit_size: parameters with fewer elements (of the global tensor) keep 32-bit state.
        overrides: ``{name pattern or parameter: {"optim_bits": ..., "min_8bit_size": ...}}``.
        backend: "auto", "cpu", "cuda", "triton" or "torch"; default ``$BNB_FSDP_BACKEND``, else "auto".
        capturable: keep step counts on the CUDA device, so that a CUDA graph can capture `step`. A graph holds the
            state it was captured with: capture again after `load_state_dict` or `add_param_group`.

    Raises:
        ValueError: no momentum, a hyperparameter out of range, an unsupported dtype, placement or storage.
    """

    rule = MOMENTUM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        overrides: Overrides | None = None,
        backend: str | None = None,
        capturable: bool = False,
    ) -> None:
        fixed(type(self).__name__, dampening=(dampening, 0.0), nesterov=(nesterov, False), args=(args, None))
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            overrides=overrides,
            backend=backend,
            capturable=capturable,
        )

    def _check_group(self, group: dict[str, Any], index: int) -> None:
        super()._check_group(group, index)
        check_rate(f"{type(self).__name__}, group {index}", "momentum", group["momentum"])

    def hyper(self, group: dict[str, Any]) -> Hyper:
        return super().hyper(group)._replace(beta1=float(group["momentum"]))


class SGD8bit(SGD):
    """`SGD` with 8-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 8,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 8, "SGD")
        super().__init__(params, lr, momentum, dampening, weight_decay, optim_bits=8, **kwargs)


class SGD32bit(SGD):
    """`SGD` with 32-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 32,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 32, "SGD")
        super().__init__(params, lr, momentum, dampening, weight_decay, optim_bits=32, **kwargs)
