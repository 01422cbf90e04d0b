"""Checkpoint directories that are complete or refused: `save_checkpoint` and `load_checkpoint`.

Built on `torch.distributed.checkpoint`, which by itself writes into the directory it is given, notices no flipped byte,
and loads tensors of other dtypes or with missing parts without an error.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import FSDPModule

from .. import sharding, state
from ..codebook import BLOCK_SIZE, flat
from ..rules import Rule
from . import manifest as manifests
from . import state_dict as states
from .files import (
    Files,
    NoCheckpointError,
    Planner,
    Reader,
    Writer,
    interruption,
    parameter_groups,
    plainly_loaded,
    reason,
)
from .layout import Layout, parse
from .manifest import CheckpointError, Manifest
from .packages import TORCH
from .regrid import regrid

if TYPE_CHECKING:
    from ..optim.base import BlockwiseOptimizer

T = TypeVar("T")
_PART = 1 << 22  # elements


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: dict[str, Any] | None = None,
    frozen: bool = True,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> Path:
    """Save model and optimizer to a new ``directory``, which appears complete or not at all. Call it on every rank.

    Args:
        directory: path that must not exist yet, on a filesystem all ranks share, such as ``checkpoints/step-100``.
        model: the model, sharded or not.
        optimizer: an optimizer of this package over its parameters, or a wrapper that has one as ``.optimizer``
            (accelerate's).
        extra: each rank's own additions (epoch, learning rate schedule, random state): what
            ``torch.load(weights_only=True)`` can read.
        frozen: False leaves out parameters that do not require gradients (the base model under LoRA).
        keep: keep only this many newest complete checkpoints of the same folder, this one included (a converted copy
            goes with what it was made from); what interrupted saves left there is removed too. What cannot be
            removed is logged as a warning. None removes nothing.
        process_group: ranks that take part; None for all, or for one process without torch.distributed.
        progress: show progress of a long save on the first rank's stderr; None if that is a terminal.

    Returns:
        The directory, as the first rank has it: relative names are relative to that rank's working directory.

    Raises:
        ValueError: a bad argument on any rank; on every rank alike, as all that follows.
        CheckpointError: the directory exists, a rank could not write, something could not be loaded again, or a plain
            parameter or its state differs between ranks, of which only one can be saved. Nothing is left.
        KeyboardInterrupt, SystemExit: on a rank that was interrupted; others raise CheckpointError. Nothing is left.
    """
    group = _Group(process_group)

    def check() -> BlockwiseOptimizer:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep={keep!r} must be None or an integer >= 1 (checkpoints).")
        if extra is not None and not isinstance(extra, dict):
            raise ValueError(f"extra must be a dict, got {type(extra).__name__}.")
        return _check(model, optimizer)

    inner = group.all_do("save_checkpoint", check, ValueError)
    group.agree(keep=keep, frozen=frozen)
    path = Path(group.gather(os.path.abspath(directory))[0])

    def collect() -> tuple[dict[str, Any], Manifest]:
        values = _state_dict(model, inner, frozen)
        _check_loadable(inner, values)
        return values, _describe(model, inner, values, frozen, group.size)

    values, manifest = group.all_do("collecting state", collect)
    if group.size > 1:
        _raise_if(_differing(group.gather(_checksums(model, values))))
    locks: list[int | None] = []  # on the first rank
    staging, manifest.sequence = group.first_does(f"creating {path}", lambda: _begin(path, locks))
    folder = Path(staging)
    try:
        shown = _Progress(
            f"saving {path.name}", _bytes(values), lambda: _size(folder), group.rank == 0, progress
        )
        with shown:
            writer = Writer(folder, single_file_per_rank=True, sync_files=True)
            with _translated(f"saving {path}", group.rank, writer):
                dcp_save(values, storage_writer=writer, process_group=process_group, no_dist=group.alone)
            own = group.all_do(f"finishing {path}", lambda: _finish(folder, group.rank, extra or {}))
        for files in group.gather(own):
            manifest.files.update(files)
        group.first_does(f"publishing {path}", lambda: _publish(folder, path, manifest))
    except BaseException:
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for lock in locks:
            if lock is not None:
                os.close(lock)
    if keep is not None:
        group.first_does(f"removing old checkpoints of {path.parent}", lambda: _prune(path.parent, keep))
    return path


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Load what `save_checkpoint` saved, at any number of ranks and cut along any dimensions. Call it on every rank.

    Manifest, checksums, coverage, shapes, dtypes, algorithm, bits, groups and hyperparameters are checked before
    anything is changed, and whether the model takes its state dict. Nothing in the checkpoint is executed.
    ``optimizer.load_report`` counts the blocks that had to be requantised.

    Args:
        directory: a checkpoint, or a folder of checkpoints, of which the newest is taken; an error if it is damaged.
            Where there may be none yet, ask `latest_checkpoint` first.
        model: the model, built and sharded as for training.
        optimizer: a fresh or used optimizer of this package over its parameters, with the groups that were saved, or
            a wrapper that has one as ``.optimizer`` (accelerate's).
        verify: False skips reading all files for their checksums; sizes are compared all the same.
        process_group: as for `save_checkpoint`.
        progress: as for `save_checkpoint`.

    Returns:
        ``extra`` of this rank, or of the first one if another number of ranks saved.

    Raises:
        ValueError: a bad argument on any rank; on every rank alike, as all that follows.
        CheckpointError: no complete checkpoint, a damaged file, or one that does not fit. Model and optimizer are as
            they were, unless the text says that they may have been partly overwritten: values that cannot be read
            though sizes (or, with ``verify``, checksums) are right show only then.
        NoCheckpointError: the CheckpointError if there is no checkpoint at all: a missing or empty directory, or a
            folder without any.
    """
    group = _Group(process_group)
    inner = group.all_do("load_checkpoint", lambda: _check(model, optimizer), ValueError)
    found, manifest = group.first_does(
        f"opening {directory}", lambda: _find(Path(os.path.abspath(directory)))
    )
    path = Path(found)
    names = sorted(manifest.files)[group.rank :: group.size]
    done: list[int] = []
    total = sum(manifest.files[name]["bytes"] for name in names)
    with _Progress(f"verifying {path.name}", total, lambda: sum(done), group.rank == 0 and verify, progress):
        group.all_do(
            f"verifying {path}",
            lambda: _raise_if(manifests.problems(path, manifest.files, names, verify, done.append)),
        )
    options = StateDictOptions(ignore_frozen_params=not manifest.frozen, strict=manifest.frozen)
    made: list[Tensor] = []

    def prepare() -> tuple[dict[str, Any], list[_Foreign], dict[str, Any]]:
        values = _state_dict(model, inner, manifest.frozen)
        made.extend(_make_frozen(inner, values, manifest))
        if made:
            values = _state_dict(model, inner, manifest.frozen)
        _raise_if(_misfits(path, manifest, _describe(model, inner, values, manifest.frozen, group.size)))
        with Files(path) as files:
            values["optimizer"]["param_groups"] = parameter_groups(files, ("optimizer",))
            metadata = files.metadata
        _check_groups(inner, values)
        foreign = _adapt(inner, values, metadata)
        _raise_if(_uncovered(path, values, metadata))
        set_model_state_dict(
            model, dict(values["model"]), options=options
        )  # its own values: does it take them?
        return values, foreign, _read_extra(path, group.rank, group.size == manifest.world_size)

    try:
        values, foreign, extra = group.all_do(f"checking {path}", prepare)
    except BaseException:
        for parameter in made:
            del inner.state[parameter]
        raise

    def assign() -> None:
        moved = sum(_convert(inner, values, one) for one in foreign)
        with states.without_warning():
            set_model_state_dict(model, values["model"], options=options)
            # Not by torch's set_optimizer_state_dict, which loses state of what is frozen at the moment, and groups
            # of the same values as an empty one.
            inner.load_state_dict(values["optimizer"])
        report = inner.load_report
        assert report is not None
        inner.load_report = report._replace(requantized=report.requantized + moved)

    with _overwriting():
        with _translated(f"loading {path}", group.rank):
            dcp_load(
                {"model": values["model"], "optimizer": {"state": values["optimizer"]["state"]}},
                storage_reader=Reader(path),
                planner=Planner(),
                process_group=process_group,
                no_dist=group.alone,
            )
        group.all_do(f"loading {path}", assign)
    reports = [report for report in group.gather(inner.load_report) if report is not None]
    requantized = sum(report.requantized for report in reports)
    if requantized and group.rank == 0:
        states.logger.warning(
            "%s: %d of %d blocks of 8-bit state had to be requantised: rows lie in other blocks here than there.",
            path,
            requantized,
            sum(report.blocks for report in reports),
        )
    return extra


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in ``folder``: the one saved last, whatever its name. None if there is none yet.

    For programs that resume if there is something to resume. None is the answer where ``folder`` is missing or empty
    or holds no checkpoint of `save_checkpoint`; what interrupted saves left does not count, nor do directories that
    torch.distributed.checkpoint alone wrote, nor symbolic links. If ``folder`` is a checkpoint, the answer is itself.

    This reads manifests and compares the sizes of the newest one's files (`load_checkpoint` compares checksums). No
    rank talks to another: each may call it alone, and all that see the same files get the same answer, as long as
    nobody saves or removes checkpoints there meanwhile.

    Raises:
        CheckpointError: the newest checkpoint is damaged, or of a newer format. The text names it and the newest one
            before it that is whole, if any: training never goes back silently. Or ``folder`` is a file, or cannot be
            read.
    """
    path = Path(os.path.abspath(folder))
    try:
        found = _newest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be searched for checkpoints: {error}.") from error
    return None if found is None else found[0]


# Ranks


class _Group:
    """The ranks of a process group, or one process without torch.distributed; errors are shared by all."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.group = process_group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(process_group)
        self.size = 1 if self.alone else dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group; call this on the ranks of the group only."
            )

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, **values: Any) -> None:
        """Raise ValueError, on all ranks, if one of the arguments differs between them."""
        every = self.gather(values)
        for name in values:
            found = [one[name] for one in every]
            if any(one != found[0] for one in found):
                raise ValueError(f"{name} must be the same on every rank, got {found}.")

    def all_do(self, what: str, function: Callable[[], T], kind: type[Exception] = CheckpointError) -> T:
        """Run ``function`` on every rank; if it raises on any, an exception of ``kind`` on all of them."""
        result, error = _attempt(function)
        errors = self.gather(None if error is None else _text(error))
        _raise_interruption(error)
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failed:
            texts = list(dict.fromkeys(failed.values()))
            ranks = "" if self.size == 1 else f" on rank {', '.join(map(str, failed))} of {self.size}"
            raise kind(f"{what} failed{ranks}: {' '.join(texts)}") from error
        return result  # type: ignore[return-value]

    def first_does(self, what: str, function: Callable[[], T]) -> T:
        """Run ``function`` on the first rank; its result, or CheckpointError, on all of them."""
        result, error = _attempt(function) if self.rank == 0 else (None, None)
        text = None if error is None else _text(error)
        result, text, is_absent = self.gather((result, text, isinstance(error, NoCheckpointError)))[0]
        _raise_interruption(error)
        if text is not None:
            raise (NoCheckpointError if is_absent else CheckpointError)(f"{what} failed: {text}") from error
        return result  # type: ignore[return-value]


def _attempt(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """The function's result or exception: Ctrl-C as it is, whatever became of it on its way."""
    handled = sys.exc_info()[1]
    try:
        return function(), None
    except BaseException as error:
        return None, interruption(error, handled) or error


def _raise_interruption(error: BaseException | None) -> None:
    """Raise what is no Exception, now that the other ranks know that this one failed."""
    if error is not None and not isinstance(error, Exception):
        raise error


def _text(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@contextmanager
def _translated(what: str, rank: int, writer: Writer | None = None) -> Iterator[None]:
    """DCP's own exception, raised on all ranks, is no Exception: make it one, except where Ctrl-C was pressed."""
    handled = sys.exc_info()[1]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is, and that is all right
            yield
    except BaseException as error:
        failures = error.failures if isinstance(error, CheckpointException) else {}
        own: BaseException = failures.get(rank, (error,))[0]
        interrupted = (writer and writer.interrupted) or interruption(own, handled)
        if interrupted is not None:
            raise interrupted from None
        if not isinstance(error, CheckpointException):
            raise
        reasons = {
            str(one) if isinstance(one, Exception) and str(one) else _text(one)
            for one, _ in failures.values()
        }
        ranks = ", ".join(map(str, sorted(error.failures)))
        raise CheckpointError(f"{what} failed on rank {ranks}: {'; '.join(sorted(reasons))}") from error


@contextmanager
def _overwriting() -> Iterator[None]:
    """CheckpointError from within tells that model and optimizer may have changed."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{str(error).rstrip('.')}. Model and optimizer may have been partly overwritten: load another checkpoint "
            "before you go on."
        ) from error


class _Progress:
    """A line on stderr every few seconds, or kept up to date on a terminal, while a long job runs."""

    def __init__(
        self, label: str, total: int, done: Callable[[], int], active: bool, progress: bool | None
    ) -> None:
        self._label, self._total, self._done = label, total, done
        self._terminal = sys.stderr.isatty()
        self._active = active and (self._terminal if progress is None else progress)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._shown = False

    def __enter__(self) -> None:
        if self._active:
            self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._active:
            self._thread.join()
            if self._shown and self._terminal:
                print(file=sys.stderr)

    def _run(self) -> None:
        start, wait = time.monotonic(), 1.0
        while not self._stop.wait(wait):
            done, seconds = self._done(), time.monotonic() - start
            share = f"{min(100, 100 * done // max(1, self._total))} % of {self._total / 1e9:.2f} GB"
            text = f"{self._label}: {share} after {seconds:.0f} s"
            print(
                f"\r{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr
            )
            self._shown, wait = True, 1.0 if self._terminal else 10.0


# Description


def _check(model: nn.Module, optimizer: Any) -> BlockwiseOptimizer:
    """The optimizer, out of its wrapper if it has one; ValueError if the arguments can be neither saved nor loaded."""
    from ..report import _unwrap

    try:
        inner = _unwrap(optimizer)
    except TypeError:
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, expected an optimizer of bnb_fsdp, or a wrapper that has one "
            "as .optimizer."
        ) from None
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if value.device.type == "meta":
            raise ValueError(
                f"{name} of the model is on the meta device: give the model storage first (to_empty())."
            )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without a backward pass the root has its gathered parameters
    known = set(model.parameters())
    for name, parameter, _ in states.named(inner):
        if parameter not in known:
            raise ValueError(f"{name} of the optimizer is not in the model.")
    return inner


def _check_groups(optimizer: BlockwiseOptimizer, values: dict[str, Any]) -> None:
    """ValueError if `load_state_dict` would refuse the parameter groups."""
    states.check_groups(optimizer, [states.unpacked(group) for group in values["optimizer"]["param_groups"]])


def _check_loadable(optimizer: BlockwiseOptimizer, values: dict[str, Any]) -> None:
    """Refuse now what could not be loaded later."""
    _check_groups(optimizer, values)
    stack: list[tuple[str, Any]] = [
        *((f"{key} of the model", value) for key, value in values["model"].items()),
        *(
            (f"{key!r} of a parameter group", v)
            for group in values["optimizer"]["param_groups"]
            for key, v in group.items()
        ),
    ]
    for where, value in stack:
        if not isinstance(value, Tensor) and type(value) not in (str, int, float, bool, type(None)):
            try:
                plainly_loaded(value)
            except Exception as error:
                raise CheckpointError(
                    f"{where} is a {type(value).__name__}, which cannot be read back with torch.load(weights_only=True)"
                    f": {reason(error)}. Keep tensors, numbers, strings, and dicts and lists of these there, or "
                    "allow the class with torch.serialization.add_safe_globals, here and where you load."
                ) from error


def _checksums(model: nn.Module, values: dict[str, Any]) -> dict[str, list[int]]:
    """Of all plain tensors that every rank should have alike: parameters and their state, without buffers."""
    buffers = {buffer.data_ptr() for buffer in model.buffers()}
    return {
        key: _checksum(value)
        for key, value in _tensors(values)
        if value.dim() and type(value) in (Tensor, nn.Parameter) and value.data_ptr() not in buffers
    }


def _checksum(value: Tensor) -> list[int]:
    """Sums over the elements' bits; computed where they are, a part at a time."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(value.element_size(), torch.int64)
    total = torch.zeros(2, dtype=torch.int64, device=value.device)
    for part in torch.split(value.detach().reshape(-1).view(word), _PART):
        wide = part.to(torch.int64)
        total += torch.stack([wide.sum(), wide.square_().sum()])
    return total.tolist()


def _differing(every: list[dict[str, list[int]]]) -> list[str]:
    """Plain tensors that are not the same on all ranks that have them, in words."""
    first: dict[str, tuple[int, list[int]]] = {}
    found: dict[str, str] = {}
    for rank, checksums in enumerate(every):
        for key, value in checksums.items():
            other, wanted = first.setdefault(key, (rank, value))
            if value != wanted and key not in found:
                found[key] = (
                    f"{key} is a plain tensor that differs between rank {other} and rank {rank}: one of them would be "
                    "lost. Keep it alike (DistributedDataParallel), or shard the model (fully_shard)"
                )
    return list(found.values())


def _make_frozen(optimizer: BlockwiseOptimizer, values: dict[str, Any], manifest: Manifest) -> list[Tensor]:
    """Make the state of parameters that are frozen now and were not before; which they are."""
    entries = values["optimizer"]["state"]
    waiting = [
        parameter
        for name, parameter in _parameters(optimizer, values).items()
        if name not in entries and manifest.parameters.get(name, {}).get("bits")
    ]
    states.materialize(optimizer, waiting)
    return waiting


def _state_dict(model: nn.Module, optimizer: BlockwiseOptimizer, frozen: bool) -> dict[str, Any]:
    options = StateDictOptions(ignore_frozen_params=not frozen)
    own, others = get_state_dict(model, optimizer, options=options)
    return {"model": own, "optimizer": others}


def _parameters(optimizer: BlockwiseOptimizer, values: dict[str, Any]) -> dict[str, Tensor]:
    """The optimizer's parameters by the names they have in a state dict."""
    named: dict[str, Tensor] = {}
    for group, saved in zip(optimizer.param_groups, values["optimizer"]["param_groups"]):
        named.update(zip(saved["params"], group["params"]))
    return named


def _describe(
    model: nn.Module, optimizer: BlockwiseOptimizer, values: dict[str, Any], frozen: bool, world_size: int
) -> Manifest:
    from .. import __version__

    bits: dict[str, int] = {}
    for name, entry in values["optimizer"]["state"].items():
        bits[name] = 8 if states.codes_name(optimizer.rule) in entry["state1"] else 32
    parameters: dict[str, dict[str, Any]] = {}
    trained = _parameters(optimizer, values)
    for name, value in {**values["model"], **trained}.items():
        if not isinstance(value, Tensor):
            continue
        parameters[name] = {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "bits": bits.get(name),
            **sharding.placed(value),
        }
    return Manifest(
        sequence=0,
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=world_size,
        versions={"bnb_fsdp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        optimizer={
            "class": type(optimizer).__name__,
            "algorithm": optimizer.rule.name,
            "state_version": states.VERSION,
            "block_size": BLOCK_SIZE,
            "groups": [list(group["params"]) for group in values["optimizer"]["param_groups"]],
        },
        parameters=parameters,
        frozen=frozen,
    )


def _misfits(path: Path, saved: Manifest, live: Manifest) -> list[str]:
    """Why a checkpoint does not fit model and optimizer."""
    was, own = saved.optimizer, live.optimizer
    if was["state_version"] > own["state_version"]:
        return [
            f"{path} has optimizer state of format {was['state_version']}, this version of bnb_fsdp reads up to "
            f"{own['state_version']}. Install a newer one."
        ]
    if was["algorithm"] != own["algorithm"]:
        return [
            f"{path} was saved by {was['class']} ({was['algorithm']}), the optimizer is {own['class']} "
            f"({own['algorithm']}). Build the optimizer that was saved."
        ]
    if was["block_size"] != own["block_size"]:
        return [f"{path} has blocks of {was['block_size']} elements, this bnb_fsdp has {own['block_size']}."]
    found: list[str] = []
    misfits: list[str] = []
    if hint := _wrapped(saved, live):
        return [f"{path}: {hint}"]
    for name in sorted(set(saved.parameters) | set(live.parameters)):
        if name not in live.parameters:
            found.append(f"{path} has {name}, which the model lacks.")
        elif name not in saved.parameters:
            found.append(f"{path} lacks {name} of the model.")
        else:
            misfits += _misfit(path, name, saved.parameters[name], live.parameters[name])
    other_bits = [name for name in saved.parameters if _has_other_bits(name, saved, live)]
    if other_bits:
        misfits.insert(0, _bits_remedy(path, sorted(other_bits), saved, live))
    if not found and was["groups"] != own["groups"]:
        sizes = [len(group) for group in was["groups"]], [len(group) for group in own["groups"]]
        found.append(
            f"{path} has parameter groups of {sizes[0]} parameters, the optimizer of {sizes[1]}, or in another "
            "order; build the optimizer with the groups that were saved."
        )
    return found or misfits


def _misfit(path: Path, name: str, was: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    for key, label in (("shape", "shape"), ("dtype", "dtype"), ("bits", "bits of state")):
        if was[key] != own[key] and not (key == "bits" and was[key] and own[key]):
            text = f"{path}: {name} was saved with {label} {was[key]}, here it has {own[key]}."
            if key == "bits" and was[key] is None:
                text += " It was frozen: freeze it (requires_grad_(False)) until it is loaded."
            yield text


def _has_other_bits(name: str, saved: Manifest, live: Manifest) -> bool:
    """Whether there was state of the parameter, and is, but with other bits."""
    was, own = saved.parameters[name]["bits"], live.parameters.get(name, {}).get("bits")
    return bool(was and own and was != own)


def _bits_remedy(path: Path, names: list[str], saved: Manifest, live: Manifest) -> str:
    """Which parameters have state of other bits here, and what to do, once for all of them."""
    name, more = names[0], len(names) - 1
    others = f", as {more} more" if more else ""
    was, own = saved.parameters[name]["bits"], live.parameters[name]["bits"]
    kind = saved.optimizer["class"]
    has_torch = saved.optimizer["algorithm"] in TORCH and not kind.startswith(("LAMB", "LARS"))
    return (
        f"{path}: {name} was saved with bits of state {was}, here it has {own}{others}. Load it with the optimizer "
        f"that was saved: {kind}, with the same optim_bits, min_8bit_size and overrides. To go on with other bits, run "
        f"'python -m bnb_fsdp checkpoint convert {path} OUT.pt --to {'torch' if has_torch else 'bitsandbytes'}', and "
        "after this load give torch.load('OUT.pt') to the new optimizer's load_state_dict, on every rank."
    )


def _wrapped(saved: Manifest, live: Manifest) -> str:
    """What to do if all names differ by the prefix of a wrapper, else nothing."""
    prefix = "module."
    if {prefix + name for name in saved.parameters} == set(live.parameters):
        return f"all names differ by {prefix!r}: the model is wrapped (DataParallel); give its .module."
    if {prefix + name for name in live.parameters} == set(saved.parameters):
        return f"all names differ by {prefix!r}: a wrapped model (DataParallel) was saved; wrap this one too."
    return ""


def _raise_if(problems: list[str]) -> None:
    if problems:
        shown = problems[:5] + ([f"and {len(problems) - 5} more."] if len(problems) > 5 else [])
        raise CheckpointError("; ".join(text.rstrip(".") for text in shown) + ".")


def _tensors(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Keys as torch.distributed.checkpoint has them, and tensors, of the model and of the optimizer's state."""
    stack: list[tuple[str, Any]] = [
        ("model", values["model"]),
        ("optimizer.state", values["optimizer"]["state"]),
    ]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{key}.{name}", part) for name, part in value.items()]
        elif isinstance(value, Tensor):
            yield key, value


def _uncovered(path: Path, values: dict[str, Any], metadata: Any) -> list[str]:
    """Tensors that the checkpoint lacks, has in another shape or dtype, or has not all elements of."""
    found = []
    for key, value in _tensors(values):
        entry = metadata.state_dict_metadata.get(key)
        if entry is None or not hasattr(entry, "chunks"):
            found.append(f"{path} lacks {key}")
            continue
        if tuple(entry.size) != tuple(value.shape) or entry.properties.dtype != value.dtype:
            found.append(
                f"{path}: {key} is {entry.properties.dtype} of shape {tuple(entry.size)}, expected {value.dtype} of "
                f"{tuple(value.shape)}"
            )
        elif sum(chunk.sizes.numel() for chunk in entry.chunks) != value.numel():
            found.append(f"{path}: not all elements of {key} were saved")
    return found


# Scales of another layout


class _Foreign:
    """A parameter whose scales were saved in a layout that is not its own here."""

    def __init__(self, name: str, parameter: Tensor, stored: Layout) -> None:
        self.name, self.parameter, self.stored = name, parameter, stored


def _adapt(optimizer: BlockwiseOptimizer, values: dict[str, Any], metadata: Any) -> list[_Foreign]:
    """Replace scales in ``values`` by room for those that were saved, where they have another layout."""
    rule, found = optimizer.rule, []
    entries = values["optimizer"]["state"]
    first = state.absmax_key(rule.states[0])
    stored_names: dict[str, list[str]] = {}
    marker = f".{first}."
    for key in metadata.state_dict_metadata:
        if key.startswith("optimizer.state.") and marker in key:
            owner, _, name = key.removeprefix("optimizer.state.").rpartition(marker)
            stored_names.setdefault(owner, []).append(name)
    for name, parameter in _parameters(optimizer, values).items():
        entry = entries.get(name)
        if not entry or first not in entry:
            continue
        names = [key for key in stored_names.get(name, ()) if not key.startswith("phase")]
        if len(names) != 1 or names[0] in entry[first]:
            continue
        [saved] = names
        try:
            stored = parse(saved, parameter.shape)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from None
        dims = _row_dims(stored, parameter)
        for key in rule.states:
            scales = sharding.new_like(parameter, stored.scales_shape, dims, torch.float32)
            entry[state.absmax_key(key)] = {stored.name: scales}
        if stored.has_phase:
            entry[first][stored.phase_name] = sharding.new_like(
                parameter, stored.phase_shape, dims, torch.uint8
            )
        found.append(_Foreign(name, parameter, stored))
    return found


def _row_dims(stored: Layout, parameter: Tensor) -> list[int | None]:
    """Dimension of the scales that each dimension of the parameter cuts: rows are, all else is whole on every rank."""
    row = stored.outer if stored.grid else 0
    return [row if dim == stored.outer else None for dim in range(parameter.dim())]


def _convert(optimizer: BlockwiseOptimizer, values: dict[str, Any], one: _Foreign) -> int:
    """Requantise a parameter's state from the saved layout into its own; returns the number of blocks."""
    rule: Rule = optimizer.rule
    entry = values["optimizer"]["state"][one.name]
    shard = sharding.local(one.parameter).detach()
    shape, offset = sharding.local_box(one.parameter)
    own = states.layout_for(one.parameter, one.name)
    phase = None
    if one.stored.has_phase:
        phase = sharding.local(entry[state.absmax_key(rule.states[0])][one.stored.phase_name])
    count, scales = 0, {}
    for key, signed in zip(rule.states, rule.signed):
        given = sharding.local(entry[state.absmax_key(key)][one.stored.name])
        first_row = offset[one.stored.outer] if offset else 0
        codes = flat(sharding.local(entry[key][states.codes_name(rule)]))
        absmax = regrid(codes, shape, offset, own.order, one.stored, given, phase, first_row, signed)
        scales[key] = absmax
        count += len(absmax)
    entry.update(states.exported_scales(one.parameter, own, shard, scales, rule))
    return count


# Files


def _bytes(values: dict[str, Any]) -> int:
    return sum(value.numel() * value.element_size() for _, value in _tensors(values))


def _size(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed or removed meanwhile
            continue
    return total


def _begin(path: Path, locks: list[int | None]) -> tuple[str, int]:
    """A new directory beside ``path`` to write into, and the checkpoint's sequence number."""
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} exists; a checkpoint is never written over. Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    sequence = manifests.survey(path.parent).next_sequence
    staging, lock = manifests.staging(path)
    locks.append(lock)
    return str(staging), sequence


def _finish(folder: Path, rank: int, extra: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Write this rank's extra, make its files durable; their checksums."""
    with (folder / f"extra_{rank}.pt").open("wb") as file:
        torch.save(extra, file)
    _read_extra(folder, rank, True)  # refuse now what could not be read later
    names = [path for path in folder.glob(f"__{rank}_*")] + [folder / f"extra_{rank}.pt"]
    if rank == 0:
        names.append(folder / ".metadata")
    for path in names:
        manifests.sync(path)
    return {path.name: manifests.checksum(path) for path in names}


def _read_extra(path: Path, rank: int, own: bool) -> dict[str, Any]:
    file = path / f"extra_{rank if own else 0}.pt"
    try:
        extra: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(
            f"extra cannot be read back with torch.load(weights_only=True): {reason(error)}. Give tensors, numbers, "
            "strings, and dicts and lists of these."
        ) from error
    return extra


def _publish(staging: Path, path: Path, manifest: Manifest) -> None:
    """Complete the directory with its manifest and give it its name."""
    _raise_if(
        [
            f"{text}; do all ranks share this filesystem?"
            for text in manifests.problems(staging, manifest.files, manifest.files, False)
        ]
    )
    manifest.write(staging)
    if path.exists():
        raise CheckpointError(f"{path} was created meanwhile; a checkpoint is never written over.")
    staging.rename(path)
    manifests.sync_directory(path.parent)


def _prune(folder: Path, keep: int) -> None:
    """Remove the oldest complete checkpoints of the folder beyond ``keep``, and what interrupted saves left."""
    found = manifests.survey(folder).complete
    kept = sorted({manifest.sequence for manifest, _ in found})[-keep:]
    failed = []
    for manifest, directory in found:
        if manifest.sequence in kept:
            continue
        # Renamed first: interrupted here, what is left is known as a leftover.
        deleted = directory.parent / f".{directory.name}{manifests.DELETED}{secrets.token_hex(4)}"
        try:
            directory.rename(deleted)
        except OSError as error:
            failed.append(f"{directory}: {error}")
    manifests.sync_directory(folder)
    for text in failed + manifests.remove_leftovers(folder):
        states.logger.warning("a checkpoint could not be removed: %s", text)


def _find(path: Path) -> tuple[str, Manifest]:
    """The checkpoint at ``path``, or the newest one in it. Raises CheckpointError if that one is damaged."""
    found = _newest(path)
    if found is None:
        raise NoCheckpointError(
            f"{_absence(path)}. There is no checkpoint to load yet: correct the path, or start without one "
            "(bnb_fsdp.latest_checkpoint returns None where there is none)."
        )
    return str(found[0]), found[1]


def _absence(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such checkpoint directory"
    names = sorted(item.name for item in path.iterdir())
    if not names:
        return f"{path} has no files"
    leftovers = [name for name in names if manifests.is_leftover(path / name)]
    if leftovers:
        return (
            f"{path} holds no complete checkpoint, only what interrupted saves left: {', '.join(leftovers)}"
        )
    return f"{path} has no {manifests.FILE}, and holds no checkpoint of bnb_fsdp.save_checkpoint"


def _newest(path: Path) -> tuple[Path, Manifest] | None:
    """The checkpoint at ``path``, or the newest one in it; None if there is none. CheckpointError if it is damaged."""
    if not path.exists():
        return None
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a checkpoint directory, or a folder of these.")
    if (path / manifests.FILE).is_file() or manifests.is_leftover(path):
        return path, manifests.read(path)
    complete, damaged = manifests.survey(path)
    bad = [(one.sequence or 0, manifests.written(one.path), one.path, one.reason) for one in damaged]
    whole = None
    while complete and whole is None:
        manifest, directory = complete.pop()
        problems = manifests.problems(directory, manifest.files, sorted(manifest.files), False)
        if problems:
            bad.append((manifest.sequence, manifests.written(directory), directory, "; ".join(problems)))
        else:
            whole = directory, manifest
    if whole is None:
        if bad:
            raise CheckpointError(f"{path} holds no complete checkpoint: {max(bad)[-1].rstrip('.')}.")
        if any(path.glob("*.distcp")) or any(path.glob(".metadata")) or any(path.glob("extra_*.pt")):
            return path, manifests.read(path)  # says that its manifest is missing
        return None
    since = manifests.written(whole[0])
    newer = [one for one in bad if one[0] > whole[1].sequence or one[1] > since]
    if newer:
        _, _, directory, reason = max(newer)
        raise CheckpointError(
            f"the newest checkpoint of {path} cannot be loaded: {reason.rstrip('.')}. To go on from the one before it, "
            f"load {whole[0]} by its own path, or remove {directory}."
        )
    return whole
