"""Adagrad.

Duchi et al., https://jmlr.org/papers/v12/duchi11a.html; as `torch.optim.Adagrad` without learning rate
decay, except that with 8-bit state the weight decay counts in v alone, as in bitsandbytes' kernel::

    h = g + weight_decay * p
    v = v + h**2
    p = p - lr * h / (sqrt(v) + eps)               (8-bit state: g instead of h)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import ADAGRAD
from .base import BlockwiseOptimizer, Overrides, Params, fixed, fixed_bits


class Adagrad(BlockwiseOptimizer):
    """Adagrad with 32-bit or 8-bit state.

    Args:
        params: tensors, DTensors, (name, tensor) pairs or group dicts.
        lr: learning rate, a number or a one-element tensor.
        lr_decay: must be 0.
        weight_decay: added to the gradient, times the parameter.
        initial_accumulator_value: must be 0.
        eps: added to the denominator.
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

    rule = ADAGRAD

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        overrides: Overrides | None = None,
        backend: str | None = None,
        capturable: bool = False,
    ) -> None:
        fixed(
            type(self).__name__,
            lr_decay=(lr_decay, 0.0),
            initial_accumulator_value=(initial_accumulator_value, 0.0),
            args=(args, None),
        )
        super().__init__(
            params,
            {"lr": lr, "eps": eps, "weight_decay": weight_decay},
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            overrides=overrides,
            backend=backend,
            capturable=capturable,
        )


class Adagrad8bit(Adagrad):
    """`Adagrad` with 8-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        optim_bits: int = 8,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 8, "Adagrad")
        super().__init__(
            params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, optim_bits=8, **kwargs
        )


class Adagrad32bit(Adagrad):
    """`Adagrad` with 32-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        optim_bits: int = 32,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 32, "Adagrad")
        super().__init__(
            params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, optim_bits=32, **kwargs
        )
