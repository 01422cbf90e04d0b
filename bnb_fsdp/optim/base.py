"""The optimizer frame: parameter groups, state, and the plan that turns a step into a few native calls."""

from __future__ import annotations

import math
import numbers
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .. import arithmetic as f32
from .. import backends, sharding, state
from ..callers import warn_caller
from ..checkpoint import state_dict as checkpoint
from ..groups import check_group_overrides, check_minimum, check_overrides, parameter_name, resolve_overrides
from ..residency import Policy, Residency
from ..rules import Hyper, Rule
from .plan import Plan, check_parameter
from .trust import Trust

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Overrides = Mapping[str | Tensor, Mapping[str, int]]


class _State(defaultdict[Tensor, Any]):
    """``optimizer.state``. Asked whether it is empty, it first makes the state that is still missing.

    `torch.distributed.checkpoint.state_dict` asks before it saves or loads, and else would run a step with zero
    gradients, which counts: https://github.com/pytorch/pytorch/issues/164929.
    """

    def __init__(self, owner: BlockwiseOptimizer, entries: Mapping[Tensor, Any]) -> None:
        super().__init__(dict, entries)
        self._owner = weakref.ref(owner)

    def __bool__(self) -> bool:
        owner = self._owner()
        if owner is not None and owner.state is self:
            checkpoint.materialize(owner)
        return len(self) > 0

    def __reduce__(self) -> Any:  # a copy belongs to another optimizer: see __setstate__
        return defaultdict, (dict,), None, None, iter(self.items())

    def copy(self) -> Any:
        return defaultdict(dict, self)

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()


class _PagedState(_State):
    """Whoever reads state that is in host memory first waits until it is the last step's."""

    def _wait(self) -> None:
        owner = self._owner()
        if owner is not None and owner._residency is not None:
            owner._residency.wait()

    def __getitem__(self, key: Tensor) -> Any:
        self._wait()
        return super().__getitem__(key)

    def get(self, key: Tensor, default: Any = None) -> Any:
        self._wait()
        return super().get(key, default)

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def __iter__(self) -> Any:  # also what dict(), copy() and | go by, which then ask for every item
        self._wait()
        return super().__iter__()

    def setdefault(self, *args: Any) -> Any:
        self._wait()
        return super().setdefault(*args)

    def pop(self, *args: Any) -> Any:
        self._wait()
        return super().pop(*args)

    def popitem(self) -> Any:
        self._wait()
        return super().popitem()


class BlockwiseOptimizer(torch.optim.Optimizer):
    """Base of all optimizers of this package; see its subclasses for hyperparameters.

    Parameters may be plain tensors and DTensors of any mesh (`torch.distributed.fsdp.fully_shard`), mixed.
    ``param_groups`` and ``state`` are keyed by the objects given. ``state[p]`` holds plain tensors of the
    local shard: ``state1``, ``state2`` (uint8 with ``absmax1``, ``absmax2`` per 256 elements, or float32) and
    ``step``; it appears at the first `step` or when a checkpoint is saved or loaded, so that accelerate may swap
    parameters until then.

    Raises ValueError for a parameter, hyperparameter or override that cannot work, naming it.
    """

    rule: ClassVar[Rule]
    betas_count: ClassVar[int] = 2

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        optim_bits: int,
        min_8bit_size: int,
        overrides: Overrides | None,
        backend: str | None,
        capturable: bool = False,
        residency: Residency | None = None,
    ) -> None:
        if residency is not None and capturable:
            raise ValueError(
                f"{type(self).__name__}: capturable=True needs all state on the device, and a graph cannot stream it; "
                "use the class without Paged."
            )
        self._residency = residency
        self._backend = backends.check_name(backend)
        self._overrides = check_overrides(overrides)
        self._plan: Plan | None = None
        self._captured: list[backends.Bucket] = []
        self.load_report: checkpoint.LoadReport | None = None
        """What the last `load_state_dict` did on this rank."""
        defaults = {
            **defaults,
            "optim_bits": optim_bits,
            "min_8bit_size": min_8bit_size,
            "overrides": [],
            "capturable": capturable,
            "format": checkpoint.format_of(self.rule),
        }
        super().__init__(params, defaults)
        self.state = self._new_state(self.state)
        used = {key for group in self.param_groups for key in resolve_overrides(group, self._overrides)[1]}
        unused = [key for key, _ in self._overrides if key not in used]
        if unused:
            raise ValueError(_unused_override(unused[0], self.param_groups))
        # Parameters given as keys have become positions in the groups; only patterns can meet later groups.
        self._overrides = [(key, value) for key, value in self._overrides if isinstance(key, str)]

    def _new_state(self, entries: Mapping[Tensor, Any]) -> _State:
        return _State(self, entries) if self._residency is None else _PagedState(self, entries)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checked first: on an error the optimizer is as it was."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        group = dict(param_group)
        params = group["params"]
        if not isinstance(params, (Tensor, set)):
            group["params"] = params = list(params)
        self._check_group({**self.defaults, **group}, len(self.param_groups))
        before = len(self.param_groups)
        super().add_param_group(group)
        try:
            added = self.param_groups[before]
            for position, parameter in enumerate(added["params"]):
                check_parameter(parameter, parameter_name(self.param_groups, before, position))
            if not added["overrides"]:
                added["overrides"], _ = resolve_overrides(added, self._overrides)
        except Exception:
            del self.param_groups[before:]
            raise
        self._drop_plan()

    def _check_group(self, group: dict[str, Any], index: int) -> None:
        where = f"{type(self).__name__}, group {index}"
        check_number(where, "lr", group["lr"])
        if "betas" in group:
            _check_betas(where, group["betas"], self.betas_count)
        for key in ("eps", "weight_decay"):
            if key in group:
                check_number(where, key, group[key])
        if group["optim_bits"] not in state.OPTIM_BITS:
            raise ValueError(f"{where}: optim_bits={group['optim_bits']!r}; choose 8 or 32.")
        if not isinstance(group["capturable"], bool):
            raise ValueError(f"{where}: capturable={group['capturable']!r}; choose True or False.")
        check_minimum(where, group["min_8bit_size"])
        check_group_overrides(where, group)

    def hyper(self, group: dict[str, Any]) -> Hyper:
        """The group's hyperparameters as plain floats; a learning rate on a CUDA device stays there, unread."""
        betas = group.get("betas", (0.0, 0.0))
        lr = group["lr"]
        rate = lr if isinstance(lr, Tensor) and lr.device.type == "cuda" else None
        return Hyper(
            lr=math.nan if rate is not None else float(lr),
            beta1=float(betas[0]),
            beta2=float(betas[1]),
            eps=float(group.get("eps", 0.0)),
            weight_decay=float(group.get("weight_decay", 0.0)),
            rate=rate,
        )

    def is_scheduled(self, group: dict[str, Any]) -> bool:
        """Whether `schedule` does anything to this group's hyperparameters."""
        return False

    def schedule(self, group: dict[str, Any], hyper: Hyper, step: int) -> Hyper:
        """``hyper`` as it is for parameters whose coming step is the ``step``-th."""
        return hyper

    def trust(self, group: dict[str, Any]) -> Trust | None:
        """How LAMB and LARS scale this group's updates; None for not at all."""
        return None

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """``step(closure=None)``: update every parameter that has a gradient; all else stays as it is.

        Runs no DTensor operator and no collective (LAMB and LARS: one all-reduce for each mesh). All gradients are
        checked before anything changes.
        Returns what ``closure`` (which recomputes the loss, under grad mode) returns.

        Raises ValueError for a gradient that is sparse or of another shape, sharding or dtype family than its
        parameter, RuntimeError if state and parameter have parted ways or a native call fails.
        """
        closure = _closure(*args, **kwargs)
        if kwargs and closure is None and self._only_asks_for_state():
            checkpoint.materialize(self)
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _only_asks_for_state(self) -> bool:
        """Whether this step is how tools that save checkpoints make an optimizer allocate its state.

        torchtitan's do ``step(closure=None)`` with learning rates of 0 and zero gradients for parameters without state,
        and expect that nothing is counted. Ranks decide alike, by an all-reduce or more for each mesh: what one of them
        has to take for real, be it in a plain parameter of its own, is real for all.
        """
        if any(_is_on_cuda(group["lr"]) or float(group["lr"]) != 0 for group in self.param_groups):
            return False
        everything = [p for group in self.param_groups for p in group["params"]]
        have = [p for p in everything if p.grad is not None]
        are_real = any(bool(self.state.get(p)) or _is_real(sharding.local(p.grad)) for p in have)
        flags = torch.tensor([float(bool(have)), float(are_real)])
        graded, real = sharding.any_rank(everything, flags).tolist()
        return bool(graded and not real)

    @_disable_dynamo  # native calls on addresses: nothing that torch.compile could trace
    def _update(self) -> None:
        hypers = [self.hyper(group) for group in self.param_groups]
        if self._residency is not None and self._residency.is_due(self):
            self._drop_plan()
        if self._plan is not None:
            self._plan.begin()
        if self._plan is None or not self._plan.gather(self):
            self._plan = self._new_plan()
        hypers += [
            self.schedule(self.param_groups[cohort.group], hypers[cohort.group], cohort.next_step())
            for cohort in self._plan.cohorts
        ]
        self._plan.run(hypers, [self.trust(group) for group in self.param_groups])

    def _new_plan(self) -> Plan:
        """A plan that holds this step's gradients; if they are refused, nothing is left of it."""
        self._drop_plan()
        plan = None
        try:
            plan = Plan(self)
            if plan.gather(self):
                self._warn_if_stale(plan)
                return plan
            raise RuntimeError(
                "parameters, gradients or state changed during step(); do not share an optimizer between threads."
            )
        except BaseException:
            if plan is not None:
                plan.discard_fresh_state()
            if self._residency is not None:
                self._residency.forget(self.state)
            raise

    def _warn_if_stale(self, plan: Plan) -> None:
        """Say so if this optimizer seems to have been made before something that exchanges parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not parameters or plan.has_gradients():
            return
        if sharding.are_on_meta(parameters):
            why = (
                "on the meta device. load_state_dict(assign=True) exchanges a model's parameters: make the optimizer "
                "after the weights are loaded, or load them without assign (after fully_shard: first "
                "model.to_empty(device=...))."
            )
        elif sharding.could_be_exchanged(parameters):
            why = (
                "plain tensors. fully_shard exchanges a model's parameters: make the optimizer after it (with "
                "accelerate: let prepare() have both before the first step)."
            )
        else:
            return
        count = f"{len(parameters)} parameters" if len(parameters) > 1 else "1 parameter"
        warn_caller(
            f"{type(self).__name__}.step(): none of the {count} has a gradient, and all are {why}",
            UserWarning,
        )

    def _drop_plan(self) -> None:
        if self._plan is not None:
            self._captured += self._plan.captured()
            if self._residency is not None:
                self._residency.wait()  # for copies that its buffers and its state are part of
        self._plan = None

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Parameter groups and state, as tensors that `torch.distributed.checkpoint` can save and reshard.

        As `torch.optim.Optimizer.state_dict`, but each state is a small dict of its tensors, whose names tell algorithm
        and bits (`bnb_fsdp.checkpoint.state_dict`). State of DTensor parameters is made of DTensors on the same mesh;
        if there are any, state that does not exist yet is made, with ``step`` 0, so that every rank has the same keys.
        Codes and float32 state share the optimizer's memory.

        Raises RuntimeError for state whose parameter is gone, ValueError for a shard that is not one box of its tensor.
        """
        return checkpoint.state_dict(self)

    @_disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or at another number of ranks; ``load_report`` tells what was done.

        State dicts of bitsandbytes, torch.optim and lion-pytorch load too, if this class continues theirs: see
        `bnb_fsdp.checkpoint.foreign`.

        Dtypes are kept. Bits are the same for every row whose blocks lie here as they lay there; other blocks are
        dequantised in float32 and requantised, with an error of at most half the distance between two codes.
        State of a sharded parameter may be DTensors on its mesh or whole plain tensors.

        Raises ValueError, before anything changes, for another algorithm, block size, number of bits, shape, dtype,
        group layout, a newer format, or a cut along other dimensions that rows cannot express.
        """
        checkpoint.load(self, state_dict)

    @property
    def residency(self) -> Policy | None:
        """Where a paged optimizer keeps its state: "auto", "device", "host" or bytes; None for any other optimizer.

        Assign another to have the state moved at once. Raises ValueError if there is no such policy or the optimizer is
        not paged, HostMemoryError (a RuntimeError) if host memory is refused; nothing is lost then.
        """
        return None if self._residency is None else self._residency.policy

    @residency.setter
    def residency(self, policy: Policy) -> None:
        self._paged("residency").set_policy(policy)
        self._place()

    def offload(self) -> None:
        """Move all state of a paged optimizer to host memory and give its device memory back, until `reload`.

        For programs that hand the GPU to something else between steps. Waits for the device. A `step` before `reload`
        streams the state from there. Raises as setting `residency` does.
        """
        residency = self._paged("offload()")
        residency.set_offloaded(True, self)
        self._place()
        residency.release_staging()

    def reload(self) -> None:
        """Bring the state back to where the policy wants it, at once: the opposite of `offload`."""
        self._paged("reload()").set_offloaded(False, self)
        self._place()

    def _place(self) -> None:
        self._drop_plan()
        assert self._residency is not None
        self._residency.place(self, fresh=False)

    def _paged(self, what: str) -> Residency:
        if self._residency is None:
            raise ValueError(
                f"{type(self).__name__} is not paged, its state is always on the parameters' device: {what} needs a "
                "Paged class (or is_paged=True)."
            )
        return self._residency

    def __getstate__(self) -> dict[str, Any]:
        if self._residency is not None:
            self._residency.wait()
        own = {"_backend": self._backend, "_overrides": self._overrides, "_residency": self._residency}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_captured" not in vars(self):  # unpickled or copied
            self._plan, self._captured = None, []
            self.load_report = None
        if not isinstance(self.state, _State):
            self.state = self._new_state(self.state)
        self._drop_plan()


def _closure(closure: Callable[[], Any] | None = None) -> Callable[[], Any] | None:
    return closure


def _is_real(gradient: Tensor) -> bool:
    """Whether ``gradient`` has anything but zeros."""
    return gradient.layout != torch.strided or (gradient.device.type != "meta" and bool(gradient.any()))


def _is_on_cuda(lr: Any) -> bool:
    return isinstance(lr, Tensor) and lr.device.type == "cuda"


def check_rate(where: str, key: str, value: Any) -> None:
    """Raise ValueError if ``value`` is no number in (0, 1), also as a float32."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0.0 < float(value) < 1.0 or not 0.0 < f32.scalar(float(value)) < 1.0:
        more = (
            "; without momentum there is no state to keep: use torch.optim.SGD" if key == "momentum" else ""
        )
        raise ValueError(f"{where}: {key}={value!r} must be a number in (0, 1){more}.")


def fixed(owner: str, **values: tuple[Any, Any]) -> None:
    """Raise ValueError for a keyword that bitsandbytes accepts without effect and that is not at its default."""
    for key, (value, only) in values.items():
        if value != only:
            raise ValueError(
                f"{owner} does not support {key}={value!r}: bitsandbytes accepts it and ignores it. "
                f"Leave it at {only!r}."
            )


def fixed_bits(owner: str, bits: int, only: int, other: str) -> None:
    """Raise ValueError for ``optim_bits`` on a class whose name fixes it."""
    if bits != only:
        raise ValueError(f"{owner} has optim_bits={only}, got {bits!r}; use {other} to choose.")


def paged(owner: str, is_paged: bool, residency: Policy | None, reserve: int | None) -> Residency | None:
    """What keeps the state of a paged optimizer, None if it is not paged. Raises ValueError for unusable values."""
    if not isinstance(is_paged, bool):
        raise ValueError(f"{owner}: is_paged={is_paged!r}; choose True or False.")
    if is_paged:
        return Residency(owner, "auto" if residency is None else residency, reserve)
    for key, value in (("residency", residency), ("residency_reserve", reserve)):
        if value is not None:
            raise ValueError(f"{owner}: {key}={value!r} needs a Paged class (or is_paged=True).")
    return None


def check_number(where: str, key: str, value: Any) -> None:
    """Raise ValueError if ``value`` is no finite number >= 0."""
    number = value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{where}: {key} is a tensor of {value.numel()} elements, expected one.")
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ValueError(f"{where}: {key}={value!r} must be a number.")
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{where}: {key}={number!r} must be finite and >= 0.")


def _check_betas(where: str, betas: Any, count: int) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != count:
        such = "two numbers in [0, 1), such as (0.9, 0.999)"
        if count == 3:
            such = "three numbers in [0, 1), such as (0.9, 0.999, 0.9999)"
        raise ValueError(f"{where}: betas={betas!r} must be {such}.")
    for beta in betas:
        if isinstance(beta, bool) or not isinstance(beta, numbers.Real) or not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"{where}: betas={betas!r}: each must be a number in [0, 1).")
        if not f32.scalar(float(beta)) < 1.0:  # the update is computed in float32
            raise ValueError(f"{where}: betas={betas!r}: each must be in [0, 1) as a float32 too.")


def _unused_override(key: str | Tensor, groups: list[dict[str, Any]]) -> str:
    if isinstance(key, Tensor):
        return f"overrides: a parameter of shape {tuple(key.shape)} is not among the optimizer's parameters."
    names = [name for group in groups for name in group.get("param_names", ())]
    if not names:
        return (
            f"overrides: the pattern {key!r} needs parameter names; pass model.named_parameters() "
            "instead of model.parameters()."
        )
    return f"overrides: the pattern {key!r} matches none of {len(names)} parameters, such as {names[:3]}."
