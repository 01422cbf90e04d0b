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
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .. import sharding, state
from ..codebook import BLOCK_SIZE
from ..rules import Rule
from . import manifest as manifests
from . import state_dict as states
from .layout import Layout, parse
from .manifest import CheckpointError, Manifest
from .regrid import regrid

if TYPE_CHECKING:
    from ..optim.base import BlockwiseOptimizer

T = TypeVar("T")


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: BlockwiseOptimizer,
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
        optimizer: an optimizer of this package over its parameters.
        extra: each rank's own additions (epoch, learning rate schedule, random state): what
            ``torch.load(weights_only=True)`` can read.
        frozen: False leaves out parameters that do not require gradients (the base model under LoRA).
        keep: keep only this many newest complete checkpoints of the same folder, this one included; what interrupted
            saves left there is removed too. None removes nothing.
        process_group: ranks that take part; None for all, or for one process without torch.distributed.
        progress: show progress of a long save on the first rank's stderr; None if that is a terminal.

    Returns:
        The directory.

    Raises:
        ValueError: a bad argument.
        CheckpointError: the directory exists, or a rank could not write; on every rank alike, and nothing is left.
    """
    group = _Group(process_group)
    path = Path(os.path.abspath(directory))
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep={keep!r} must be None or an integer >= 1 (checkpoints).")
    if extra is not None and not isinstance(extra, dict):
        raise ValueError(f"extra must be a dict, got {type(extra).__name__}.")
    _check_optimizer(optimizer)

    def collect() -> tuple[dict[str, Any], Manifest]:
        values = _state_dict(model, optimizer, frozen)
        return values, _describe(model, optimizer, values, frozen, group.size)

    values, manifest = group.all_do("collecting state", collect)
    staging, manifest.sequence = group.first_does(f"creating {path}", lambda: _begin(path))
    folder = Path(staging)
    try:
        shown = _Progress(
            f"saving {path.name}", _bytes(values), lambda: _size(folder), group.rank == 0, progress
        )
        with shown:
            with _translated(f"saving {path}"):
                writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
                dcp_save(values, storage_writer=writer, process_group=process_group, no_dist=group.alone)
            own = group.all_do(f"finishing {path}", lambda: _finish(folder, group.rank, extra or {}))
        for files in group.gather(own):
            manifest.files.update(files)
        group.first_does(f"publishing {path}", lambda: _publish(folder, path, manifest))
    except BaseException:
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if keep is not None:
        group.first_does(f"removing old checkpoints of {path.parent}", lambda: _prune(path, keep))
    return path


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: BlockwiseOptimizer,
    *,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Load what `save_checkpoint` saved, at any number of ranks and cut along any dimensions. Call it on every rank.

    Manifest, checksums, coverage, shapes, dtypes, algorithm, bits and groups are checked before anything is changed.
    ``optimizer.load_report`` counts the blocks that had to be requantised.

    Args:
        directory: a checkpoint, or a folder of checkpoints, of which the newest complete one is taken.
        model: the model, built and sharded as for training.
        optimizer: a fresh or used optimizer of this package over its parameters, with the groups that were saved.
        verify: False skips reading all files for their checksums; sizes are compared all the same.
        process_group: as for `save_checkpoint`.
        progress: as for `save_checkpoint`.

    Returns:
        ``extra`` of this rank, or of the first one if another number of ranks saved.

    Raises:
        CheckpointError: no complete checkpoint, a damaged file, or one that does not fit; on every rank alike.
    """
    group = _Group(process_group)
    _check_optimizer(optimizer)
    found, manifest = group.first_does(
        f"opening {directory}", lambda: _find(Path(os.path.abspath(directory)))
    )
    path = Path(found)
    names = sorted(manifest.files)[group.rank :: group.size]
    done = [0]
    total = sum(manifest.files[name]["bytes"] for name in names)
    with _Progress(f"verifying {path.name}", total, lambda: done[0], group.rank == 0 and verify, progress):
        group.all_do(
            f"verifying {path}",
            lambda: _raise_if(manifests.problems(path, manifest.files, names, verify, done)),
        )

    def prepare() -> tuple[dict[str, Any], list[_Foreign], dict[str, Any]]:
        values = _state_dict(model, optimizer, manifest.frozen)
        _raise_if(_misfits(path, manifest, _describe(model, optimizer, values, manifest.frozen, group.size)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            metadata = FileSystemReader(path).read_metadata()
        foreign = _adapt(optimizer, values, metadata)
        _raise_if(_uncovered(path, values, metadata))
        return values, foreign, _read_extra(path, group.rank, group.size == manifest.world_size)

    values, foreign, extra = group.all_do(f"checking {path}", prepare)
    with _translated(f"loading {path}"):
        dcp_load(
            values,
            storage_reader=FileSystemReader(path),
            process_group=process_group,
            no_dist=group.alone,
        )

    def assign() -> None:
        moved = sum(_convert(optimizer, values, one) for one in foreign)
        options = StateDictOptions(ignore_frozen_params=not manifest.frozen, strict=manifest.frozen)
        with states.without_warning():
            set_state_dict(
                model,
                optimizer,
                model_state_dict=values["model"],
                optim_state_dict=values["optimizer"],
                options=options,
            )
        report = optimizer.load_report
        assert report is not None
        optimizer.load_report = report._replace(requantized=report.requantized + moved)

    group.all_do(f"loading {path}", assign)
    reports = [report for report in group.gather(optimizer.load_report) if report is not None]
    requantized = sum(report.requantized for report in reports)
    if requantized and group.rank == 0:
        states.logger.warning(
            "%s: %d of %d blocks of 8-bit state had to be requantised: rows lie in other blocks here than there.",
            path,
            requantized,
            sum(report.blocks for report in reports),
        )
    return extra


# Ranks


class _Group:
    """The ranks of a process group, or one process without torch.distributed; errors are shared by all."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.group = process_group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(process_group)
        self.size = 1 if self.alone else dist.get_world_size(process_group)

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_do(self, what: str, function: Callable[[], T]) -> T:
        """Run ``function`` on every rank; if it raises on any, CheckpointError on all of them."""
        result, error = _attempt(function)
        errors = self.gather(None if error is None else _text(error))
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failed:
            texts = list(dict.fromkeys(failed.values()))
            ranks = "" if self.size == 1 else f" on rank {', '.join(map(str, failed))} of {self.size}"
            raise CheckpointError(f"{what} failed{ranks}: {' '.join(texts)}") from error
        return result  # type: ignore[return-value]

    def first_does(self, what: str, function: Callable[[], T]) -> T:
        """Run ``function`` on the first rank; its result, or CheckpointError, on all of them."""
        result, error = _attempt(function) if self.rank == 0 else (None, None)
        shared = self.gather((result, None if error is None else _text(error)))[0]
        if shared[1] is not None:
            raise CheckpointError(f"{what} failed: {shared[1]}") from error
        return shared[0]  # type: ignore[return-value]


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _text(error: Exception) -> str:
    return (
        str(error) if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {error}"
    )


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """DCP's own exception, raised on all ranks, is no Exception: make it one."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is, and that is all right
            yield
    except CheckpointException as error:
        reasons = {str(failure[0]) for failure in error.failures.values()}
        ranks = ", ".join(map(str, sorted(error.failures)))
        raise CheckpointError(f"{what} failed on rank {ranks}: {'; '.join(sorted(reasons))}") from error


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


def _check_optimizer(optimizer: Any) -> None:
    from ..optim.base import BlockwiseOptimizer

    if not isinstance(optimizer, BlockwiseOptimizer):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, expected an optimizer of bnb_fsdp (unwrap accelerate's with "
            ".optimizer)."
        )


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
    found = []
    for name in sorted(set(saved.parameters) | set(live.parameters)):
        if name not in live.parameters:
            found.append(f"{path} has {name}, which the model lacks.")
        elif name not in saved.parameters:
            found.append(f"{path} lacks {name} of the model.")
        else:
            for key, label in (("shape", "shape"), ("dtype", "dtype"), ("bits", "bits of state")):
                a, b = saved.parameters[name][key], live.parameters[name][key]
                if a != b:
                    found.append(f"{path}: {name} was saved with {label} {a}, here it has {b}.")
    if not found and was["groups"] != own["groups"]:
        sizes = [len(group) for group in was["groups"]], [len(group) for group in own["groups"]]
        found.append(
            f"{path} has parameter groups of {sizes[0]} parameters, the optimizer of {sizes[1]}, or in another "
            "order; build the optimizer with the groups that were saved."
        )
    return found


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
        codes = states.flat(sharding.local(entry[key][states.codes_name(rule)]))
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


def _begin(path: Path) -> tuple[str, int]:
    """A new directory beside ``path`` to write into, and the checkpoint's sequence number."""
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} exists; a checkpoint is never written over. Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".{path.name}{manifests.PARTIAL}{secrets.token_hex(4)}"
    staging.mkdir()
    newest = manifests.complete(path.parent)
    return str(staging), newest[-1][0].sequence + 1 if newest else 1


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
            f"extra cannot be read back with torch.load(weights_only=True): {error}. Give tensors, numbers, strings, "
            "and dicts and lists of these."
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


def _prune(path: Path, keep: int) -> None:
    """Remove the oldest complete checkpoints of the folder beyond ``keep``, and what interrupted saves left."""
    others = [directory for _, directory in manifests.complete(path.parent)]
    for directory in others[:-keep]:
        # Renamed first: interrupted here, what is left is known as a leftover.
        deleted = directory.parent / f".{directory.name}{manifests.DELETED}{secrets.token_hex(4)}"
        directory.rename(deleted)
    manifests.sync_directory(path.parent)
    for directory in path.parent.iterdir():
        if directory.is_dir() and manifests.is_leftover(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _find(path: Path) -> tuple[str, Manifest]:
    """The checkpoint at ``path``, or the newest complete one in it."""
    if path.is_dir() and not (path / manifests.FILE).is_file() and not manifests.is_leftover(path):
        found = manifests.complete(path)
        if found:
            return str(found[-1][1]), found[-1][0]
        leftovers = [item.name for item in path.iterdir() if item.is_dir() and manifests.is_leftover(item)]
        if leftovers:
            raise CheckpointError(
                f"{path} holds no complete checkpoint, only what interrupted saves left: {', '.join(leftovers)}."
            )
    return str(path), manifests.read(path)
