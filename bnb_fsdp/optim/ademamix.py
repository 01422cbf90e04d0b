"""AdEMAMix.

Pagliardini, Ablin and Grangier, https://arxiv.org/abs/2409.03137. Adam with a second, slow average of the gradient; as
in bitsandbytes decay is applied after the update::

    m1 = beta1 * m1 + (1 - beta1) * g
    nu = beta2 * nu + (1 - beta2) * g**2
    m2 = beta3_t * m2 + (1 - beta3_t) * g
    p = p - lr * (m1 / (1 - beta1**t) + alpha_t * m2) / (sqrt(nu / (1 - beta2**t)) + eps)
    p = p * (1 - lr * weight_decay)

With ``t_alpha`` and ``t_beta3`` the two grow from 0 and beta1 to their final values, so that old gradients count
little at first (the paper's equations 2 and 3)::

    alpha_t = min(t / t_alpha, 1) * alpha
    beta3_t = min(exp(ln(beta1) * ln(beta3) / ((1 - t / t_beta3) * ln(beta3) + t / t_beta3 * ln(beta1))), beta3)
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor

from ..residency import Policy
from ..rules import ADEMAMIX, Hyper
from .base import BlockwiseOptimizer, Overrides, Params, check_number, fixed_bits, paged

Betas = tuple[float, float, float]


class AdEMAMix(BlockwiseOptimizer):
    """AdEMAMix with 32-bit or 8-bit state.

    ``state1`` is the fast average, ``state2`` the second moment, ``state3`` the slow average. (bitsandbytes stacks the
    two averages in ``state1``, and in 8 bits lets their scales overlap.)

    Args:
        params: tensors, DTensors, (name, tensor) pairs or group dicts.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the fast average, the second moment and the slow average, each in [0, 1).
        alpha: weight of the slow average.
        t_alpha: steps over which ``alpha`` grows from 0; None for a constant.
        t_beta3: steps over which ``betas[2]`` grows from ``betas[0]``; None for a constant.
        eps: added to the denominator.
        weight_decay: decoupled decay, multiplied by ``lr``, applied after the update.
        optim_bits: 32, or 8 for block-wise 8-bit state.
        min_8bit_size: parameters with fewer elements (of the global tensor) keep 32-bit state.
        is_paged: keep state in page-locked host memory, or as much of it as ``residency`` says.
        residency: "auto" (default: on the device what fits after the first iteration, the rest in host memory),
            "device", "host", or bytes of device memory that the state may take. Paged classes only.
        residency_reserve: bytes of device memory that "auto" leaves free; default the larger of 1 GiB and 5 %.
        overrides: ``{name pattern or parameter: {"optim_bits": ..., "min_8bit_size": ...}}``.
        backend: "auto", "cpu", "cuda", "triton" or "torch"; default ``$BNB_FSDP_BACKEND``, else "auto".
        capturable: keep step counts on the CUDA device, so that a CUDA graph can capture `step`; not together with
            ``t_alpha`` or ``t_beta3``, whose schedules are computed on the host from each parameter's step.

    Raises:
        ValueError: a hyperparameter out of range, an unsupported dtype, placement or storage.
    """

    rule = ADEMAMIX
    betas_count = 3

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        optim_bits: int = 32,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        residency: Policy | None = None,
        residency_reserve: int | None = None,
        overrides: Overrides | None = None,
        backend: str | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "alpha": alpha,
                "t_alpha": t_alpha,
                "t_beta3": t_beta3,
                "eps": eps,
                "weight_decay": weight_decay,
            },
            optim_bits=optim_bits,
            min_8bit_size=min_8bit_size,
            overrides=overrides,
            backend=backend,
            capturable=capturable,
            residency=paged(type(self).__name__, is_paged, residency, residency_reserve),
        )

    def _check_group(self, group: dict[str, Any], index: int) -> None:
        super()._check_group(group, index)
        where = f"{type(self).__name__}, group {index}"
        check_number(where, "alpha", group["alpha"])
        for key in ("t_alpha", "t_beta3"):
            steps = group[key]
            number = isinstance(steps, numbers.Real) and not isinstance(steps, bool)
            if steps is not None and not (number and 0 < steps < math.inf):
                raise ValueError(f"{where}: {key}={steps!r} must be None or a positive number of steps.")
        if group["t_beta3"] is not None and not all(group["betas"][i] > 0 for i in (0, 2)):
            raise ValueError(
                f"{where}: t_beta3 takes the logarithms of betas[0] and betas[2], which must be > 0; "
                f"betas={group['betas']!r}."
            )
        if group["capturable"] and self.is_scheduled(group):
            raise ValueError(
                f"{where}: capturable=True keeps step counts on the device, but t_alpha and t_beta3 need them on the "
                "host. Leave one out."
            )

    def hyper(self, group: dict[str, Any]) -> Hyper:
        return super().hyper(group)._replace(beta3=float(group["betas"][2]), alpha=float(group["alpha"]))

    def is_scheduled(self, group: dict[str, Any]) -> bool:
        return group["t_alpha"] is not None or group["t_beta3"] is not None

    def schedule(self, group: dict[str, Any], hyper: Hyper, step: int) -> Hyper:
        alpha, beta3 = hyper.alpha, hyper.beta3
        if group["t_alpha"] is not None:
            alpha = min(step * alpha / group["t_alpha"], alpha)
        if group["t_beta3"] is not None:
            start, end, progress = math.log(hyper.beta1), math.log(beta3), step / group["t_beta3"]
            if progress < 1.0:
                beta3 = min(math.exp(start * end / ((1 - progress) * end + progress * start)), beta3)
        return hyper._replace(alpha=alpha, beta3=beta3)


class AdEMAMix8bit(AdEMAMix):
    """`AdEMAMix` with 8-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        optim_bits: int = 8,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 8, "AdEMAMix")
        super().__init__(
            params, lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay, optim_bits=8, **kwargs
        )


class AdEMAMix32bit(AdEMAMix):
    """`AdEMAMix` with 32-bit state."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        optim_bits: int = 32,
        **kwargs: Any,
    ) -> None:
        fixed_bits(type(self).__name__, optim_bits, 32, "AdEMAMix")
        super().__init__(
            params, lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay, optim_bits=32, **kwargs
        )


class PagedAdEMAMix(AdEMAMix):
    """`AdEMAMix` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedAdEMAMix8bit(AdEMAMix8bit):
    """`AdEMAMix8bit` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)


class PagedAdEMAMix32bit(AdEMAMix32bit):
    """`AdEMAMix32bit` with ``is_paged=True``."""

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, is_paged=True, **kwargs)
