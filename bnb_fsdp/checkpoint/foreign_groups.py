"""Parameter groups of bitsandbytes, torch.optim and lion-pytorch, as this package's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .packages import FIRST_BETA, TORCH

_MUST_BE: dict[str, dict[str, tuple[Any, str]]] = {
    "adam": {"amsgrad": (False, "")},
    "momentum": {"dampening": (0, ""), "nesterov": (False, "")},
    "rmsprop": {"momentum": (0, ""), "centered": (False, "")},
    "adagrad": {"lr_decay": (0, ""), "initial_accumulator_value": (0, "")},
    "lion": {},
}
_SWITCHES: dict[str, tuple[Any, str]] = {
    "maximize": (False, "; negate the loss instead"),
    "differentiable": (False, ""),
}
_IGNORED = {"foreach", "fused", "capturable", "decoupled_weight_decay"}
"""How torch.optim runs a step, not what it computes; the last is looked at by itself."""


def from_torch(where: str, kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of torch.optim or lion-pytorch as ours. ValueError, by name, for what ours cannot express."""
    rules = {**_MUST_BE[kind], **_SWITCHES}
    for key, (only, remedy) in rules.items():
        if group.get(key, only) != only:
            raise ValueError(
                f"{where} has {key}={group[key]!r}, which this package's optimizer does not have: it needs "
                f"{key}={only!r}{remedy}."
            )
    decay = float(group.get("weight_decay", 0.0))
    if kind == "adam" and decay > 0 and group.get("decoupled_weight_decay") is not True:
        found = group.get("decoupled_weight_decay", "(not given: Adam's or AdamW's)")
        raise ValueError(
            f"{where} has weight_decay={decay} with decoupled_weight_decay={found}: torch.optim.Adam adds decay to the "
            "gradient, this package's (as bitsandbytes') takes it off the parameter, as AdamW. Set weight_decay=0, or "
            "decoupled_weight_decay=True if that is what you want or AdamW saved it."
        )
    dropped = set(rules) | _IGNORED
    result = {key: value for key, value in group.items() if key not in dropped and key != "params"}
    for key in ("lr", *_NEEDED[kind]):
        if key not in result:
            raise ValueError(f"{where} lacks {key!r}: it was not saved by {TORCH[kind].name}.")
    if kind == "momentum" and result["momentum"] == 0:
        raise ValueError(
            f"{where} has momentum={result['momentum']!r}: without momentum there is no state to take over; make a new "
            "optimizer."
        )
    return _with_tuple(result)


_NEEDED = {
    "adam": ("betas", "eps", "weight_decay"),
    "momentum": ("momentum", "weight_decay"),
    "rmsprop": ("alpha", "eps", "weight_decay"),
    "adagrad": ("eps", "weight_decay"),
    "lion": ("betas", "weight_decay"),
}


def _with_tuple(group: dict[str, Any]) -> dict[str, Any]:
    if isinstance(group.get("betas"), list):
        group["betas"] = tuple(group["betas"])
    return group


def from_bitsandbytes(
    where: str, owner: str, kind: str, group: Mapping[str, Any], is_certain: bool = False
) -> dict[str, Any]:
    """A group of bitsandbytes as ours, without ``params``.

    Its groups do not tell the algorithm. What can be told is: SGD, LARS and Lion have ``eps`` 0, Adagrad ``betas`` (0,
    0), SGD, LARS and RMSprop one beta, AdEMAMix three. ValueError for a group of another algorithm than ``kind``,
    unless that ``is_certain``.
    """
    result = {key: value for key, value in group.items() if key != "params"}
    missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in result]
    if missing:
        raise ValueError(f"{where} lacks {missing}: it was not saved by bitsandbytes.")
    betas = result.pop("betas")
    if not isinstance(betas, (tuple, list)) or not 2 <= len(betas) <= 3:
        raise ValueError(f"{where} has betas={betas!r}, expected two or three numbers.")
    reason = _not_ignored(kind, betas) if is_certain else _other_kind(kind, group)
    if reason and is_certain:
        raise ValueError(f"{where} has {reason}.")
    if reason:
        raise ValueError(
            f"{where} was saved by another algorithm than {owner}'s ({kind}): it has {reason}. Build the optimizer "
            "that was saved."
        )
    extra = {"alpha": result.pop("alpha", 0.0)} if kind != "rmsprop" else {}
    extra |= {key: result.pop(key, None) or None for key in ("t_alpha", "t_beta3")}  # 0 means none, too
    if kind == "ademamix":
        result.update(extra)
    elif any(extra.values()):
        key = next(key for key, value in extra.items() if value)
        raise ValueError(f"{where} has {key}={extra[key]!r}: AdEMAMix saved it, {owner} is {kind!r}.")
    if kind in FIRST_BETA:
        result[FIRST_BETA[kind]] = betas[0]
    elif kind != "adagrad":
        result["betas"] = tuple(betas)
    if kind in ("momentum", "lars", "lion"):
        del result["eps"]
    return result


def _other_kind(kind: str, group: Mapping[str, Any]) -> str:
    """What shows that the group is not of ``kind``; "" for nothing."""
    betas, eps = tuple(group["betas"]), group["eps"]
    if (len(betas) == 3) != (kind == "ademamix"):
        return f"{len(betas)} betas"
    if kind in ("adam", "lamb", "ademamix"):
        return ""  # their second state tells
    if "t_alpha" in group:
        return "keys of an optimizer with two states (t_alpha)"
    if kind in ("momentum", "lars", "lion") and eps != 0:
        return f"eps={eps!r}: RMSprop or Adagrad"
    if kind == "adagrad" and any(betas):
        return f"betas={betas}: SGD, Lion or RMSprop"
    if kind == "rmsprop" and (eps == 0 or betas[0] == 0):
        return f"eps={eps!r}, betas={betas}: SGD, Lion or Adagrad"
    if kind == "lion" and betas[1] == 0 and betas[0] != 0:
        return f"betas={betas}: SGD"
    ignored = _not_ignored(kind, betas)
    return f"betas={betas}: Lion, or {ignored}" if ignored else ""


def _not_ignored(kind: str, betas: Sequence[float]) -> str:
    """The second beta of an algorithm that has one: bitsandbytes accepts it and ignores it."""
    if kind not in FIRST_BETA or betas[1] == 0:
        return ""
    name = "momentum" if kind == "rmsprop" else "dampening"
    return f"{name}={betas[1]!r} (the second of betas), which bitsandbytes ignores; set it to 0 if it is to be ignored"
