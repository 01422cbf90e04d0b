"""``TrainingArguments(optim="bnb_fsdp_adamw8bit")``.

transformers has no public way to add an optimizer by name. This module adds the names to its
``OptimizerNames`` enum and a handler per name to the Trainer's table (transformers 5) or, where there is no
such table, wraps the static ``Trainer.get_optimizer_cls_and_kwargs`` (transformers 4). It happens when
transformers' own modules are imported, at once for those that already are; nothing here imports them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from wrapt import register_post_import_hook

from ..factory import optimizer_class, optimizer_names
from ..optim.base import BlockwiseOptimizer
from .enums import extend_str_enum

logger = logging.getLogger(__name__)


def _policy(text: str) -> str | int:
    """A residency: a name, or a number of bytes."""
    return int(text) if text.lstrip("-").isdecimal() else text


OPTIM_ARGS: dict[str, Callable[[str], Any]] = {
    "backend": str,
    "beta1": float,
    "beta2": float,
    "beta3": float,
    "eps": float,
    "min_8bit_size": int,
    "optim_bits": int,
    "alpha": float,
    "t_alpha": int,
    "t_beta3": int,
    "momentum": float,
    "dampening": float,
    "lr_decay": float,
    "initial_accumulator_value": float,
    "max_unorm": float,
    "residency": _policy,
    "residency_reserve": int,
}
"""Keys of ``optim_args`` and their types; an optimizer takes those that its constructor has."""

_ELSEWHERE = {
    "lr": "the learning rate is TrainingArguments(learning_rate=...), which the scheduler follows",
    "weight_decay": "weight decay is TrainingArguments(weight_decay=...), which the Trainer sets by group",
    "betas": "a tuple cannot be written in optim_args; use beta1=...,beta2=...",
}

_BETAS = ("beta1", "beta2", "beta3")
_REMEDY = (
    "Give the class to the Trainer instead: Trainer(..., optimizer_cls_and_kwargs=(bnb_fsdp.AdamW8bit, "
    '{"lr": ..., ...})), or use another version of transformers.'
)


def install() -> None:
    """Register the optimizer names with transformers, now or when it is imported. May be called again.

    With a transformers that cannot be wired, its import gives a RuntimeWarning.
    """
    register_post_import_hook(_guarded(_extend_names), "transformers.training_args")
    register_post_import_hook(_guarded(_add_handlers), "transformers.trainer_optimizer")
    register_post_import_hook(_guarded(_finish), "transformers.trainer")


def _guarded(hook: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """``hook`` with any error turned into a warning: an import of transformers must not fail over it."""

    @functools.wraps(hook)
    def guarded(module: ModuleType) -> None:
        try:
            hook(module)
        except Exception as error:
            warnings.warn(
                f"bnb_fsdp could not register its optimizers with {module.__name__} "
                f"({type(error).__name__}: {error}), so TrainingArguments(optim='bnb_fsdp_...') will not "
                f"work. {_REMEDY}",
                RuntimeWarning,
                stacklevel=2,
            )

    return guarded


def _extend_names(module: ModuleType) -> None:
    for name in optimizer_names():
        extend_str_enum(module.OptimizerNames, name)


def _add_handlers(module: ModuleType) -> None:
    handlers = getattr(module, "_OPTIMIZER_HANDLERS", None)
    # Changed in place: trainer.py holds this very object. Without a table `_finish` takes the other way.
    if isinstance(handlers, MutableMapping):
        for name in optimizer_names():
            handlers.setdefault(name, _handle)


def _handle(context: Any) -> tuple[type[BlockwiseOptimizer], dict[str, Any]]:
    return optimizer_and_kwargs(context.args, context.model)


def _finish(module: ModuleType) -> None:
    """Check what the other hooks did, and wrap the Trainer's method if there is no table of handlers."""
    names = getattr(sys.modules.get("transformers.training_args"), "OptimizerNames", None)
    if names is None:
        raise RuntimeError("transformers.training_args.OptimizerNames was not found")
    for name in optimizer_names():
        names(name)
    table = getattr(module, "_OPTIMIZER_HANDLERS", None)
    if not isinstance(table, MutableMapping) or any(name not in table for name in optimizer_names()):
        _wrap_trainer(module.Trainer)


def _wrap_trainer(trainer: Any) -> None:
    original = inspect.getattr_static(trainer, "get_optimizer_cls_and_kwargs")
    if not isinstance(original, staticmethod):
        raise TypeError(
            f"Trainer.get_optimizer_cls_and_kwargs is a {type(original).__name__}, not a staticmethod"
        )
    function = original.__func__
    if hasattr(function, "_bnb_fsdp"):
        return

    @functools.wraps(function)
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None, *rest: Any, **keywords: Any) -> Any:
        if _name(args) in optimizer_names():
            return optimizer_and_kwargs(args, model)
        return function(args, model, *rest, **keywords)

    wrapper: Any = get_optimizer_cls_and_kwargs
    wrapper._bnb_fsdp = True
    trainer.get_optimizer_cls_and_kwargs = staticmethod(wrapper)


def _name(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))


def optimizer_and_kwargs(
    args: Any, model: nn.Module | None = None
) -> tuple[type[BlockwiseOptimizer], dict[str, Any]]:
    """Class and keyword arguments for ``TrainingArguments`` ``args`` whose ``optim`` is one of our names.

    As with transformers' bitsandbytes optimizers, ``lr`` is ``learning_rate``; where the optimizer has betas,
    the first two are ``adam_beta1`` and ``adam_beta2`` (also for Lion, whose own default differs) and ``eps``
    is ``adam_epsilon``; ``weight_decay`` comes by parameter group. With 8-bit state, the weights of all
    trainable ``nn.Embedding`` modules of ``model`` keep 32-bit state.

    ``args.optim_args``, such as ``"min_8bit_size=16384,beta2=0.95"``, sets more:

    - ``beta1``, ``beta2``, ``beta3``, ``eps``: win over ``adam_beta1``, ``adam_beta2``, ``adam_epsilon``;
    - ``min_8bit_size``: parameters with fewer elements keep 32-bit state;
    - ``optim_bits``: 8 or 32, for names without a number of bits (``bnb_fsdp_adamw``); the class of any other
      name refuses a contradiction;
    - ``backend``: as the optimizers' argument;
    - what else the optimizer's constructor has of `OPTIM_ARGS`.

    ``lr`` and ``weight_decay`` are refused, as they have arguments of their own that would win.

    Raises ValueError for a key that the optimizer does not have, a value of the wrong type or a malformed
    string.
    """
    name = _name(args)
    cls = optimizer_class(name)
    keywords = _keywords(cls)
    settings = parse_optim_args(name, args.optim_args)
    kwargs: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in keywords:
        betas = [args.adam_beta1, args.adam_beta2, *keywords["betas"][2:]]
        for position in range(len(betas)):
            betas[position] = settings.pop(_BETAS[position], betas[position])
        kwargs["betas"] = tuple(betas)
        if "eps" in keywords:
            kwargs["eps"] = args.adam_epsilon
    kwargs.update(settings)
    if model is not None and kwargs.get("optim_bits", keywords.get("optim_bits")) == 8:
        overrides = _embeddings_in_32_bit(model)
        if overrides:
            kwargs["overrides"] = overrides
    return cls, kwargs


def parse_optim_args(name: str, text: str | None) -> dict[str, Any]:
    """``"min_8bit_size=1,eps=1e-6"`` as typed keyword arguments of the optimizer ``name``.

    Spaces have no meaning, as in transformers. Raises ValueError as `optimizer_and_kwargs`.
    """
    keywords = _keywords(optimizer_class(name))
    betas = _BETAS[: len(keywords["betas"])] if "betas" in keywords else ()
    unusable = () if "paged_" in name else ("residency", "residency_reserve")
    valid = [key for key in OPTIM_ARGS if (key in betas or key in keywords) and key not in unusable]
    result: dict[str, Any] = {}
    for item in text.replace(" ", "").split(",") if text else ():
        key, equals, value = item.partition("=")
        if not key or not equals or not value or "=" in value:
            raise ValueError(
                f"optim_args={text!r}: {item!r} is not of the form key=value; write for example "
                "optim_args='min_8bit_size=4096,eps=1e-8', without a trailing comma."
            )
        if key not in valid:
            reason = f": {_ELSEWHERE[key]}" if key in _ELSEWHERE else ""
            raise ValueError(
                f"optim_args={text!r}: {name} does not take {key!r}{reason}. Choose from {', '.join(valid)}."
            )
        if key in result:
            raise ValueError(f"optim_args={text!r} gives {key!r} twice.")
        kind = OPTIM_ARGS[key]
        try:
            result[key] = kind(value)
        except ValueError:
            raise ValueError(
                f"optim_args={text!r}: {key}={value!r} is not of type {getattr(kind, '__name__', kind)}."
            ) from None
    return result


def _keywords(cls: type) -> dict[str, Any]:
    """Names and defaults that the constructor takes, through the ``**kwargs`` of its base classes."""
    result: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                result.setdefault(parameter.name, parameter.default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return result


def _embeddings_in_32_bit(model: nn.Module) -> dict[Tensor, dict[str, int]]:
    """Overrides for the modules that the Trainer exempts for bitsandbytes; a tied output layer goes along.

    8-bit state of embeddings is unstable: https://arxiv.org/abs/2110.02861, section 2.3.
    """
    overrides: dict[Tensor, dict[str, int]] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            overrides[module.weight] = {"optim_bits": 32}
            logger.info("%s keeps 32-bit optimizer state (%d elements)", module, module.weight.numel())
    return overrides
