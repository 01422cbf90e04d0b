"""LARS.

You, Gitman and Ginsburg, https://arxiv.org/abs/1708.03888. SGD with momentum and a factor for each parameter tensor.
Norms are of the whole tensor, also of a sharded one, and deterministic. ``trust_ratio="bitsandbytes"`` is bitsandbytes'
rule, a clip of the update (|m| without this step's decay)::

    m = momentum * m + g + weight_decay * p        (at the first step: g + weight_decay * p)
    scale = min(1, max_unorm * |p| / |m|)          (1 where |p| is 0: bitsandbytes' 0 would freeze such a parameter)
    p = p - lr * scale * m

``trust_ratio="published"`` is the paper's algorithm 1, with ``max_unorm`` as its coefficient eta, and a local rate of 1
where a norm is 0::

    rate = max_unorm * |p| / (|g| + weight_decay * |p|)
    m = momentum * m + lr * rate * (g + weight_decay * p)
    p = p - m
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import MOMENTUM, Hyper
from .base import BlockwiseOptimizer, Overrides, Params, check_number, check_rate, fixed, fixed_bits
from .trust import Trust, check_ratio


class LARS(BlockwiseOptimizer):
    """LARS with 32-bit or 8-bit state.

    `step` runs one all-reduce for each device mesh, of two numbers a parameter: every rank of the mesh has to call it.

    Args:
        params: tensors, DTensors, (name, tensor) pairs or group dicts.
        lr: learning rate, a number or a one-element tensor.
        momentum: decay rate of the momentum, in (0, 1).
        dampening: must be 0 (bitsandbytes accepts it and ignores it).
        weight_decay: added to the gradient, times the parameter.
        nesterov: must be False (bitsandbytes accepts it and ignores it).
        optim_bits: 32, or 8 for block-wise 8-bit state.
        args: must be None (bitsandbytes' namespace of extra settings).
        min_8bit_size: parameters with fewer elements (of the global tensor) keep 32-bit state.
        max_unorm: largest norm of an update in parts of its parameter's norm, 0 for no limit; with "published" the
            coefficient eta, > 0.
        trust_ratio: "bitsandbytes" or "published".
        overrides: ``{name pattern or parameter: {"optim_bits": ..., "min_8bit_size": ...}}``.
        backend: "auto", "cpu", "cuda", "triton" or "torch"; default ``$BNB_FSDP_BACKEND``, else "auto".
        capturable: must be False: norms need step counts on the host.

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
        max_unorm: float = 0.02,
        trust_ratio: str = "bitsandbytes",
        overrides: Overrides | None = None,
        backend: str | None = None,
        capturable: bool = False,
    ) -> None:
        fixed(type(self).__name__, dampening=(dampening, 0.0), nesterov=(nesterov, False), args=(args, None))
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "max_unorm": max_unorm,
                "trust_ratio": trust_ratio,
            },
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            overrides=overrides,
            backend=backend,
            capturable=capturable,
        )

    def _check_group(self, group: dict[str, Any], index: int) -> None:
        super()._check_group(group, index)
        where = f"{type(self).__name__}, group {index}"
        check_rate(where, "momentum", group["momentum"])
        check_number(where, "max_unorm", group["max_unorm"])
        check_ratio(where, group)
        if group["trust_ratio"] == "published" and not group["max_unorm"] > 0:
            raise ValueError(
                f"{where}: max_unorm={group['max_unorm']!r} is the coefficient eta of the published formula and must "
                "be > 0, such as 0.001."
            )

    def hyper(self, group: dict[str, Any]) -> Hyper:
        published = group["trust_ratio"] == "published"
        return super().hyper(group)._replace(beta1=float(group["momentum"]), published=published)

    def trust(self, group: dict[str, Any]) -> Trust | None:
        if group["max_unorm"] == 0:
            return None
        return Trust(
            group["trust_ratio"] == "published", float(group["max_unorm"]), float(group["weight_decay"])
        )


class LARS8bit(LARS):
    """`LARS` with 8-bit state."""

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
        fixed_bits(type(self).__name__, optim_bits, 8, "LARS")
        super().__init__(params, lr, momentum, dampening, weight_decay, optim_bits=8, **kwargs)


class LARS32bit(LARS):
    """`LARS` with 32-bit state."""

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
        fixed_bits(type(self).__name__, optim_bits, 32, "LARS")
        super().__init__(params, lr, momentum, dampening, weight_decay, optim_bits=32, **kwargs)
