"""Other packages' optimizers: what they call the states and hyperparameters of each algorithm."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Other:
    """The class of another package that continues a run: names of its states, and its groups' keys with defaults."""

    name: str
    states: dict[str, str]
    has_step: bool
    keys: dict[str, Any]


_SWITCHES: dict[str, Any] = {"maximize": False, "foreach": None, "differentiable": False}
TORCH = {
    "adam": Other(
        "torch.optim.AdamW",
        {"state1": "exp_avg", "state2": "exp_avg_sq"},
        True,
        {"amsgrad": False, **_SWITCHES, "capturable": False, "fused": None, "decoupled_weight_decay": True},
    ),
    "momentum": Other(
        "torch.optim.SGD",
        {"state1": "momentum_buffer"},
        False,
        {"dampening": 0.0, "nesterov": False, **_SWITCHES, "fused": None},
    ),
    "rmsprop": Other(
        "torch.optim.RMSprop",
        {"state1": "square_avg"},
        True,
        {"momentum": 0.0, "centered": False, **_SWITCHES, "capturable": False},
    ),
    "adagrad": Other(
        "torch.optim.Adagrad",
        {"state1": "sum"},
        True,
        {"lr_decay": 0.0, "initial_accumulator_value": 0.0, **_SWITCHES, "fused": None},
    ),
    "lion": Other("lion_pytorch.Lion", {"state1": "exp_avg"}, False, {}),
}
"""torch.optim has no Lion; the class that its authors' formulas fit is in the package lion-pytorch."""

_ONE = {"state1": "state1"}
_BOTH = {"state1": "state1", "state2": "state2"}
_TWO_STATES: dict[str, Any] = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
BITSANDBYTES = {
    "adam": Other("bitsandbytes.optim.AdamW8bit", _BOTH, True, _TWO_STATES),
    "momentum": Other("bitsandbytes.optim.SGD8bit", _ONE, True, {"eps": 0.0}),
    "rmsprop": Other("bitsandbytes.optim.RMSprop8bit", _ONE, True, {}),
    "adagrad": Other("bitsandbytes.optim.Adagrad8bit", _ONE, True, {"betas": (0.0, 0.0)}),
    "lion": Other("bitsandbytes.optim.Lion8bit", _ONE, True, {"eps": 0.0}),
    "ademamix": Other("bitsandbytes.optim.AdEMAMix8bit", _BOTH, True, {"t_alpha": None, "t_beta3": None}),
    "lamb": Other("bitsandbytes.optim.LAMB8bit", _BOTH, True, _TWO_STATES),
    "lars": Other("bitsandbytes.optim.LARS8bit", _ONE, True, {"eps": 0.0}),
}
"""AdEMAMix has both averages, the fast one first, in ``state1`` of shape ``(2, *shape)``."""

FIRST_BETA = {"momentum": "momentum", "lars": "momentum", "rmsprop": "alpha"}
"""The hyperparameter that bitsandbytes keeps as the first of ``betas``."""

OWN_KEYS = ("optim_bits", "min_8bit_size", "overrides", "capturable", "format", "max_unorm", "trust_ratio")
"""Group keys that no other package has."""

WRAPPED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes' state dicts have their tensors since 0.49.2."""

_CLIPPED = {"adam": "lamb", "momentum": "lars"}


def kind_of(rule: str, keys: Any) -> str:
    """The algorithm, given a rule's name and a group's ``keys``: LAMB and LARS are Adam's and momentum's rule with
    ``max_unorm``."""
    return _CLIPPED.get(rule, rule) if "max_unorm" in keys else rule
