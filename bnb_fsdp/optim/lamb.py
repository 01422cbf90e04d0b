"""LAMB.

You et al., https://arxiv.org/abs/1904.00962. Adam's update u with a factor for each parameter tensor. Norms are of the
whole tensor, also of a sharded one, and deterministic. ``trust_ratio="bitsandbytes"`` is bitsandbytes' rule, a clip::

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    u = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)
    scale = min(1, max_unorm * |p| / |u|)          (1 where |p| is 0: bitsandbytes' 0 would freeze such a parameter)
    p = p - lr * scale * u
    p = p * (1 - lr * weight_decay)

``trust_ratio="published"`` is the paper's algorithm 2 with the identity as its function phi, and a ratio of 1 where a
norm is 0::

    r = u + weight_decay * p
    p = p - lr * |p| / |r| * r
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import ADAM, Hyper
from .base import BlockwiseOptimizer, Overrides, Params, check_number, fixed, fixed_bits
from .trust import Trust, check_ratio


class LAMB(BlockwiseOptimizer):
    """LAMB with 32-bit or 8-bit state.

    `step` runs one all-reduce for each device mesh, of two numbers a parameter: every rank of the mesh has to call it.

    Args:
        params: tensors, DTensors, (name, tensor) pairs or group dicts.
        lr: learning rate, a number or a one-element tensor.
        bias_correction: must be True (bitsandbytes accepts False and ignores it).
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled decay, multiplied by ``lr`` (and by the ratio, if published).
        amsgrad: must be False.
        adam_w_mode: must be True (bitsandbytes accepts False and ignores it).
        optim_bits: 32, or 8 for block-wise 8-bit state.
        args: must be None (bitsandbytes' namespace of extra settings).
        min_8bit_size: parameters with fewer elements (of the global tensor) keep 32-bit state.
        max_unorm: largest norm of an update in parts of its parameter's norm; 0 for no limit. Not for "published".
        trust_ratio: "bitsandbytes" or "published".
        overrides: ``{name pattern or parameter: {"optim_bits": ..., "min_8bit_size": ...}}``.
        backend: "auto", "cpu", "cuda", "triton" or "torch"; default ``$BNB_FSDP_BACKEND``, else "auto".
        capturable: must be False: norms need step counts on the host.

    Raises:
        ValueError: a hyperparameter out of range, an unsupported dtype, placement or storage.
    """

    rule = ADAM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        max_unorm: float = 1.0,
        trust_ratio: str = "bitsandbytes",
        overrides: Overrides | None = None,
        backend: str | None = None,
        capturable: bool = False,
    ) -> None:
        fixed(
            type(self).__name__,
            bias_correction=(bias_correction, True),
            amsgrad=(amsgrad, False),
            adam_w_mode=(adam_w_mode, True),
            args=(args, None),
        )
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
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
        check_number(where, "max_unorm", group["max_unorm"])
        check_ratio(where, group)
        if group["trust_ratio"] == "published" and group["max_unorm"] != 1.0:
            raise ValueError(
                f"{where}: max_unorm={group['max_unorm']!r} belongs to trust_ratio='bitsandbytes'; the published "
                "formula has no such limit. Leave it at 1.0."
            )

    def hyper(self, group: dict[str, Any]) -> Hyper:
        return super().hyper(group)._replace(published=group["trust_ratio"] == "published")

    def trust(self, group: dict[str, Any]) -> Trust | None:
        published = group["trust_ratio"] == "published"
        if not published and group["max_unorm"] == 0:
            return None
        return Trust(published, float(group["max_unorm"]), 0.0)


class LAMB8bit(LAMB):
    """`LAMB` with 8-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 8,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 8, "LAMB")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, optim_bits=8, **kwargs)


class LAMB32bit(LAMB):
    """`LAMB` with 32-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 32,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 32, "LAMB")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, optim_bits=32, **kwargs)
