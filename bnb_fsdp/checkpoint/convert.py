"""Conversion of checkpoint directories, tensor by tensor: to torch.optim, to bitsandbytes, and to other cuts.

At any time one tensor of the output is in memory, with what it is made from: some 5 bytes for each element of the
largest 8-bit parameter, up to 10 where it is cut or reordered. `FileSystemWriter` is not used: it keeps every tensor it
wrote until its file is complete. What is not converted is copied as stored bytes, part by part.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import math
import os
import pickle
import secrets
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .. import codebook, state
from ..codebook import BLOCK_SIZE
from ..rules import Rule
from . import blocks, manifest
from . import state_dict as states
from .files import (
    METADATA,
    Files,
    Found,
    Group,
    Key,
    Parameter,
    hyperparameters,
    read_step,
    wrong_tensors,
)
from .layout import Cut, Layout, layout_of
from .manifest import CheckpointError
from .packages import BITSANDBYTES, FIRST_BETA, OWN_KEYS, TORCH, WRAPPED, Other, kind_of

_CHUNK = 1 << 18  # elements; a multiple of the block size
Report = Callable[[int], None]
Start = Callable[[str, int], Report]


@dataclasses.dataclass(frozen=True)
class Split:
    """``--split PATTERN=DIMxN``: parameters whose names match are cut along a dimension."""

    pattern: str
    cut: Cut


@dataclasses.dataclass
class Summary:
    """What a conversion did. ``classes``: what continues from it, by the optimizer's key prefix."""

    classes: dict[str, str]
    parameters: int = 0
    blocks: int = 0
    requantized: int = 0
    bytes: int = 0


def convert(files: Files, out: Path, to: str, splits: list[Split], start: Start) -> Summary:
    """Write ``files`` as ``to`` (``torch``, ``bitsandbytes`` or ``bnb_fsdp``) to ``out``, which appears complete or not
    at all. ``start`` is told what begins and its number of bytes, and gives the function to tell of progress.

    Raises CheckpointError if that is impossible or the checkpoint is damaged.
    """
    as_file = out.suffix == ".pt"
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists; choose another name.")
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"{out.absolute().parent}: no such directory.")
    if to == "bitsandbytes" and not as_file:
        raise CheckpointError(f"{out}: bitsandbytes loads one file; give a name that ends in .pt.")
    if to == "bnb_fsdp" and as_file:
        raise CheckpointError(f"{out}: a checkpoint of bnb_fsdp is a directory; give a name without .pt.")
    others = {"torch": TORCH, "bitsandbytes": BITSANDBYTES}.get(to, {})
    for found in files.optimizers:
        if to != "bnb_fsdp" and _kind(found) not in others:
            raise CheckpointError(f"{found.label}: {to} has no counterpart of {_kind(found)!r} state.")
        if to != "bnb_fsdp" and _kind(found) in ("lamb", "lars"):
            for group in found.groups:
                if hyperparameters(files, group).get("trust_ratio") == "published":
                    raise CheckpointError(f"{found.label}: {to} does not have trust_ratio='published'.")
    if not files.optimizers:
        raise CheckpointError(files.no_state())
    _check_source(files, start)
    if as_file and len(files.optimizers) > 1:
        labels = ", ".join(found.label for found in files.optimizers)
        raise CheckpointError(
            f"{files.path} holds {len(files.optimizers)} optimizers ({labels}), {out} can take one."
        )
    with _staged(out, as_file) as staging:
        if as_file:
            [found] = files.optimizers
            return _to_file(files, found, others[_kind(found)], to == "bitsandbytes", staging, start)
        return _to_directory(files, to, splits, staging, start)


def _kind(found: Found) -> str:
    """The algorithm; LAMB and LARS are told from Adam and SGD by their groups."""
    keys = {path[0] for group in found.groups for path in group.keys.values()}
    return kind_of(found.rule.name, keys)


@contextmanager
def _staged(out: Path, as_file: bool) -> Iterator[Path]:
    """A directory or the name of a file beside ``out`` that is renamed in the end, or removed with all below it."""
    staging = out.absolute().parent / f".{out.name}{manifest.PARTIAL}{secrets.token_hex(4)}"
    lock = None
    if not as_file:
        staging, lock = manifest.staging(out.absolute())
    try:
        yield staging
        for path in (staging, *staging.glob("*")) if staging.is_dir() else (staging,):
            manifest.sync(path)
        if out.exists():
            raise CheckpointError(f"{out} was created meanwhile; choose another name.")
        staging.rename(out)
        manifest.sync_directory(staging.parent)
    finally:
        if staging.is_dir():
            shutil.rmtree(staging, ignore_errors=True)
        else:
            staging.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def _check_source(files: Files, start: Start) -> None:
    """What is damaged must not get new checksums."""
    problems: list[str] = []
    if files.manifest is not None:
        told = files.manifest.files
        report = start("verifying", sum(entry["bytes"] for entry in told.values()))
        problems += manifest.problems(files.path, told, told, True, report)
    for found in files.optimizers:
        for parameter in found.parameters.values():
            problems += wrong_tensors(files, found, parameter)
    if problems:
        more = f" (and {len(problems) - 1} more; see checkpoint verify)" if len(problems) > 1 else ""
        raise CheckpointError(f"{problems[0].rstrip('.')}{more}.")


# One state of one parameter


@dataclasses.dataclass
class Stored:
    """The 8-bit state of one parameter as it was saved; ``codes`` in memory order, flat."""

    codes: Tensor
    layout: Layout
    scales: Tensor
    phase: Tensor | None
    signed: bool


def _read(
    files: Files, rule: Rule, parameter: Parameter, key: str, order: tuple[int, ...] | None = None
) -> Stored:
    """``order``: dimensions from slowest to fastest that ``codes`` are in; None for that of the parameter."""
    layout = parameter.layout
    assert layout is not None
    names = parameter.keys
    phase = None
    if layout.has_phase:
        phase = files.read(names[state.absmax_key(rule.states[0])][layout.phase_name])
    scales = files.read(names[state.absmax_key(key)][layout.name])
    codes = files.read(names[key][states.codes_name(rule)]).permute(order or layout.order).reshape(-1)
    return Stored(codes, layout, scales, phase, rule.signed[rule.states.index(key)])


def _in_memory(shape: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """Sizes from the slowest dimension to the fastest."""
    return [shape[dim] for dim in order]


def _box(shape: tuple[int, ...], offset: tuple[int, ...], order: tuple[int, ...]) -> tuple[slice, ...]:
    """A box as an index into a tensor whose dimensions are those of memory."""
    return tuple(slice(offset[dim], offset[dim] + shape[dim]) for dim in order)


def _blocks_in_order(layout: Layout, scales: Tensor) -> Tensor:
    """Scales of a grid in the memory order of the parameter: those of its blocks."""
    return scales.permute(layout.order).reshape(-1)


def _scale_of_each(stored: Stored, start: int, stop: int) -> Tensor:
    """Scale (float32, flat, in memory order) of each element of the rows from ``start`` to ``stop``."""
    layout = stored.layout
    if layout.grid:
        by_row = _blocks_in_order(layout, stored.scales).view(layout.rows, -1)[start:stop]
        return by_row.reshape(-1).repeat_interleave(BLOCK_SIZE)
    parts = []
    for piece, width in enumerate(layout.widths):
        place: Tensor = torch.arange(width)[None]
        if stored.phase is not None:
            place = place + stored.phase[start:stop, piece, None].long()
        column = slice(piece * layout.count, (piece + 1) * layout.count)
        index = (place // BLOCK_SIZE).expand(stop - start, width)
        parts.append(stored.scales[start:stop, column].gather(1, index))
    if len(parts) == 1:
        return parts[0].reshape(-1)
    inner = layout.order[1:]
    result = torch.empty([stop - start, *_in_memory(layout.shape, inner)])
    for part, (shape, offset) in zip(parts, layout.boxes):
        place_in_rows = (slice(None), *_box(shape, offset, inner))
        result[place_in_rows] = part.view(stop - start, *_in_memory(shape, inner))
    return result.reshape(-1)


def _row_chunks(layout: Layout) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK // max(layout.width, 1))
    for start in range(0, layout.rows if layout.width else 0, step):
        yield start, min(start + step, layout.rows)


def values(stored: Stored) -> Tensor:
    """Values (float32, flat, in memory order) of an 8-bit state."""
    layout, codes = stored.layout, stored.codes
    result = torch.empty(codes.numel(), dtype=torch.float32)
    table = codebook.values(stored.signed, codes.device)
    for start, stop in _row_chunks(layout):
        some = slice(start * layout.width, stop * layout.width)
        # Not table[...]: that takes threads for a few elements already.
        torch.mul(
            table.index_select(0, codes[some].int()), _scale_of_each(stored, start, stop), out=result[some]
        )
    return result.add_(0.0)  # the code of zeros that were never stepped is a negative one: no -0.0


def moved(stored: Stored, target: Layout) -> tuple[list[Tensor], int]:
    """Scales of the blocks that ``target`` has, for each of its pieces, and how many blocks were requantised.

    ``stored.codes``, in the memory order of ``target``, are changed in place where the elements of a block had several
    scales; all else is kept bit for bit.
    """
    source, codes = stored.layout, stored.codes
    boxes = target.boxes
    if len(boxes) == 1 and source.order == target.order:
        if source.grid:
            return [_blocks_in_order(source, stored.scales)], 0
        if not source.cuts and _has_own_phases(stored):
            absmax, count = blocks.gather(codes, stored.scales, stored.phase, source.width, stored.signed)
            return [absmax], count
    scales = torch.empty(codes.numel(), dtype=torch.float32)
    for start, stop in _row_chunks(source):
        scales[start * source.width : stop * source.width] = _scale_of_each(stored, start, stop)
    if source.order != target.order:
        scales = unordered(scales, source.shape, source.order).permute(target.order).reshape(-1)
    sizes = _in_memory(target.shape, target.order)
    result, total = [], 0
    for shape, offset in boxes:
        box = _box(shape, offset, target.order)
        part = codes.view(sizes)[box].reshape(-1)
        absmax, count = _requantized(part, scales.view(sizes)[box].reshape(-1), stored.signed)
        codes.view(sizes)[box] = part.view(_in_memory(shape, target.order))
        result.append(absmax)
        total += count
    return result, total


def _requantized(codes: Tensor, scales: Tensor, signed: bool) -> tuple[Tensor, int]:
    """Scales of blocks of consecutive ``codes``, which have a scale each, and how many of them were changed in place:
    those with more than one scale."""
    absmax = torch.zeros(state.blocks(codes.numel()), dtype=torch.float32)
    total = 0
    for start in range(0, codes.numel(), _CHUNK):
        some, given = codes[start : start + _CHUNK], scales[start : start + _CHUNK]
        found, count = blocks.regridded(some, given, signed)
        absmax[start // BLOCK_SIZE : start // BLOCK_SIZE + len(found)] = found
        total += count
    return absmax, total


def _has_own_phases(stored: Stored) -> bool:
    """Whether every row starts where it does in a parameter that is not sharded."""
    if stored.phase is None:
        return True
    own = blocks.phases(stored.layout.rows, stored.layout.width, stored.codes.device)
    return torch.equal(stored.phase[:, 0], own)


def unordered(flat: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """The tensor of this shape whose elements in memory order are ``flat``."""
    return flat.view(_in_memory(shape, order)).permute([order.index(dim) for dim in range(len(shape))])


def _by_row(target: Layout, absmax: list[Tensor]) -> Tensor:
    """The scales as they are saved, from those of each piece's blocks."""
    if target.grid:
        sizes = _in_memory(target.shape, target.order)
        sizes[-1] //= BLOCK_SIZE
        return absmax[0].view(sizes).permute([target.order.index(dim) for dim in range(len(sizes))])
    parts = [
        blocks.spread(one, target.rows, width, target.count) for one, width in zip(absmax, target.widths)
    ]
    return torch.cat(parts, dim=1)


def _phases(target: Layout) -> Tensor:
    cpu = torch.device("cpu")
    return torch.stack([blocks.phases(target.rows, width, cpu) for width in target.widths], dim=1)


# Parameter groups


def _other_group(
    files: Files, found: Found, group: Group, other: Other, is_bitsandbytes: bool
) -> dict[str, Any]:
    given = hyperparameters(files, group)
    kept = {key: value for key, value in given.items() if key not in OWN_KEYS or key in other.keys}
    if is_bitsandbytes:
        kept["lr"] = float(kept["lr"])
        if _kind(found) in FIRST_BETA:
            kept["betas"] = (kept.pop(FIRST_BETA[_kind(found)]), 0.0)
    return {**other.keys, **kept}


# A directory


class _Directory:
    """Writes the files of torch.distributed.checkpoint, value by value."""

    def __init__(self, folder: Path, files: Files, report: Report) -> None:
        self._folder, self._files, self._report = folder, files, report
        self._name = "__0_0.distcp"
        self._file: BinaryIO = (folder / self._name).open("wb")
        self._entries: dict[str, Any] = {}
        self._paths: dict[str, Key] = {}
        self._storage: dict[MetadataIndex, Any] = {}

    def copy(self, key: str) -> None:
        """Copy a value as it is stored, part by part."""
        self._entries[key] = self._files.entries[key]
        self._paths[key] = self._files.paths[key]
        for number, chunk in enumerate(self._files.chunks(key)):
            if self._files.is_tensor(key):
                index = MetadataIndex(key, chunk.offset, number)
                self._report(math.prod(chunk.shape) * self._files.dtype(key).itemsize)
            else:
                index = MetadataIndex(key)
            self._write(index, self._files.raw(key, chunk.storage))

    def tensor(self, key: str, path: Key, value: Tensor) -> None:
        """Add a tensor."""
        zeros = torch.Size([0] * value.dim())
        chunk = ChunkStorageMetadata(zeros, value.shape)
        properties = TensorProperties.create_from_tensor(value)
        self._entries[key] = TensorStorageMetadata(properties, value.shape, [chunk])
        self._paths[key] = path
        self._write(MetadataIndex(key, zeros, 0), value)
        self._report(value.nbytes)

    def object(self, key: str, path: Key, value: Any) -> None:
        """Add another object."""
        self._entries[key] = BytesStorageMetadata()
        self._paths[key] = path
        self._write(MetadataIndex(key), value)

    def _write(self, index: MetadataIndex, value: Any) -> None:
        start = self._file.tell()
        if isinstance(value, io.RawIOBase):
            shutil.copyfileobj(value, self._file, 1 << 22)
        else:
            torch.save(value, self._file)
        self._storage[index] = _StorageInfo(self._name, start, self._file.tell() - start)

    def close(self) -> int:
        """Write the description; returns the bytes of all files."""
        self._file.close()
        source = self._files.metadata
        described = Metadata(
            state_dict_metadata=self._entries,
            planner_data=self._paths if source.planner_data is not None else None,
            storage_data=self._storage,
            storage_meta=StorageMeta(checkpoint_id=str(self._folder), save_id=secrets.token_hex(8)),
        )
        if hasattr(source, "version"):
            described.version = source.version
        with (self._folder / METADATA).open("wb") as file:
            pickle.dump(described, file)
        return sum(path.stat().st_size for path in self._folder.iterdir())

    def abandon(self) -> None:
        """Close what is open."""
        self._file.close()


def _to_directory(files: Files, to: str, splits: list[Split], folder: Path, start: Start) -> Summary:
    targets = _targets(files, splits) if to == "bnb_fsdp" else {}
    report = start("converting", _directory_bytes(files, to))
    summary = Summary({})
    writer = _Directory(folder, files, report)
    try:
        copied = dict.fromkeys(files.entries)
        for index, found in enumerate(files.optimizers):
            changed = _changed(found, to, targets, index)
            for key in changed:
                del copied[key]
        for key in copied:
            writer.copy(key)
        for index, found in enumerate(files.optimizers):
            if to == "torch":
                summary.classes[found.label] = TORCH[_kind(found)].name
                _add_torch(files, found, writer, summary)
            else:
                summary.classes[found.label] = f"bnb_fsdp, {found.rule.name}"
                for name, parameter in found.parameters.items():
                    if (index, name) in targets:
                        _add_moved(files, found, parameter, targets[index, name], writer, summary)
                    summary.parameters += 1
        summary.bytes = writer.close()
    finally:
        writer.abandon()
    if files.manifest is not None:
        _add_manifest(files, to, folder)
    return summary


def _directory_bytes(files: Files, to: str) -> int:
    """About what will be written: tensors only."""
    total = sum(files.nbytes(key) for key in files.entries if files.is_tensor(key))
    if to == "torch":
        for found in files.optimizers:
            for parameter in found.parameters.values():
                if parameter.bits == 8:
                    keys = [key for names in parameter.keys.values() for key in names.values()]
                    total += 4 * parameter.numel * len(found.rule.states) - sum(map(files.nbytes, keys))
    return total


def _targets(files: Files, splits: list[Split]) -> dict[tuple[int, str], Layout]:
    """The layout of each parameter whose own is another one, by optimizer and name."""
    result, used = {}, set()
    for index, found in enumerate(files.optimizers):
        for name, parameter in found.parameters.items():
            cuts = []
            for split in splits:
                if fnmatchcase(name, split.pattern):
                    used.add(split)
                    dim, parts = split.cut
                    if dim >= len(parameter.shape):
                        raise CheckpointError(
                            f"--split {split.pattern}={dim}x{parts}: {name} has shape {parameter.shape}."
                        )
                    cuts.append(split.cut)
            if parameter.layout is None:
                continue
            target = layout_of(parameter.shape, parameter.layout.order, cuts)
            if len({dim for dim, _ in target.cuts}) < len(target.cuts):
                raise CheckpointError(
                    f"--split: {name} of shape {parameter.shape} is cut twice, into uneven parts."
                )
            if target != parameter.layout:
                result[index, name] = target
    unused = [split.pattern for split in splits if split not in used]
    if unused:
        names = [name for found in files.optimizers for name in found.parameters]
        raise CheckpointError(
            f"--split: {unused[0]!r} matches none of {len(names)} parameters, such as {names[:3]}."
        )
    return result


def _changed(found: Found, to: str, targets: dict[tuple[int, str], Layout], index: int) -> Iterator[str]:
    """Keys that are not copied."""
    for name, parameter in found.parameters.items():
        if to == "torch" or (index, name) in targets:
            for names in parameter.keys.values():
                yield from names.values()
        if to == "torch" and not TORCH[_kind(found)].has_step and parameter.step:
            yield parameter.step
    if to == "torch":
        for _, group in _written_groups(found):
            for key, path in group.keys.items():
                if path[0] in OWN_KEYS and path[0] not in TORCH[_kind(found)].keys:
                    yield key


def _written_groups(found: Found) -> Iterable[tuple[Any, Group]]:
    """Every group as it is written, with the part of its path that names it."""
    if not found.flat:
        return enumerate(found.groups)
    return [(group.params[0], group) for copies in found.copies.values() for group in copies]


def _add_torch(files: Files, found: Found, writer: _Directory, summary: Summary) -> None:
    other = TORCH[_kind(found)]
    for owner, group in _written_groups(found):
        given = {path[0] for path in group.keys.values()}
        for name, value in other.keys.items():
            if name not in given:
                writer.object(*found.key("param_groups", owner, name), value)
    for parameter in found.parameters.values():
        for key, name in other.states.items():
            writer.tensor(
                *found.key("state", parameter.name, name), _torch_state(files, found, parameter, key)
            )
        summary.parameters += 1


def _torch_state(files: Files, found: Found, parameter: Parameter, key: str) -> Tensor:
    if parameter.layout is None:
        value: Tensor = files.read(parameter.keys[key][states.float_name(found.rule)])
        return value
    flat = values(_read(files, found.rule, parameter, key))
    return unordered(flat, parameter.shape, parameter.layout.order)


def _add_moved(
    files: Files, found: Found, parameter: Parameter, target: Layout, writer: _Directory, summary: Summary
) -> None:
    rule = found.rule
    for key in rule.states:
        stored = _read(files, rule, parameter, key)
        absmax, count = moved(stored, target)
        summary.blocks += sum(map(len, absmax))
        summary.requantized += count
        codes = unordered(stored.codes, parameter.shape, target.order)
        scales = _by_row(target, absmax)
        below = ("state", parameter.name)
        writer.tensor(*found.key(*below, key, states.codes_name(rule)), codes)
        writer.tensor(*found.key(*below, state.absmax_key(key), target.name), scales.contiguous())
    if target.has_phase:
        writer.tensor(
            *found.key("state", parameter.name, state.absmax_key(rule.states[0]), target.phase_name),
            _phases(target),
        )


def _add_manifest(files: Files, to: str, folder: Path) -> None:
    from .. import __version__

    source = files.manifest
    assert source is not None
    optimizer = dict(source.optimizer)
    if to == "torch":
        name = TORCH[_kind(files.optimizers[0])].name
        optimizer |= {"class": name, "algorithm": name, "state_version": 0, "block_size": 0}
    bits = {"bits": 32} if to == "torch" else {}
    whole = {"mesh": None, "placements": None}
    parameters = {
        name: {**entry, **whole, **(bits if entry["bits"] else {})}
        for name, entry in source.parameters.items()
    }
    for path in sorted(files.path.glob("extra_*.pt")):
        shutil.copyfile(path, folder / path.name)
    described = dataclasses.replace(
        source,
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={**source.versions, "bnb_fsdp": __version__, "torch": torch.__version__},
        optimizer=optimizer,
        parameters=parameters,
        files={path.name: manifest.checksum(path) for path in sorted(folder.iterdir())},
    )
    described.write(folder)


# One file


@dataclasses.dataclass(frozen=True, eq=False)
class _Later:
    """A tensor of the file, by shape and memory order, and how to make its elements, flat in memory order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    make: Callable[[], Tensor]

    def empty(self) -> Tensor:
        """A tensor of this description without values."""
        return unordered(torch.empty(math.prod(self.shape), dtype=self.dtype), self.shape, self.order)


def _plain(value: Tensor) -> _Later:
    order = tuple(range(value.dim()))
    return _Later(value.dtype, tuple(value.shape), order, lambda: value.reshape(-1))


def _to_file(
    files: Files,
    found: Found,
    other: Other,
    is_bitsandbytes: bool,
    path: Path,
    start: Start,
) -> Summary:
    numbers: dict[str, int] = {}
    groups = []
    for group in found.groups:
        for name in group.params:
            numbers.setdefault(name, len(numbers))
        packed = _other_group(files, found, group, other, is_bitsandbytes)
        groups.append({**packed, "params": [numbers[name] for name in group.params]})
    missing = [name for name in found.parameters if name not in numbers]
    if missing:
        raise CheckpointError(f"{found.label}: {missing[0]} has state, but is in no parameter group.")
    summary = Summary({found.label: other.name}, len(found.parameters))
    entries: dict[int, Any] = {}
    maps = {signed: _plain(codebook.values(signed, torch.device("cpu"))) for signed in (True, False)}
    for name, parameter in sorted(found.parameters.items(), key=lambda item: numbers[item[0]]):
        if is_bitsandbytes:
            entries[numbers[name]] = _bitsandbytes_entry(files, found, parameter, maps, summary)
        else:
            entries[numbers[name]] = _torch_entry(files, found, parameter, other)
    tree = {
        "state": entries,
        "param_groups": groups,
        "converted_from": {"format": found.format, "class": other.name, "parameters": list(numbers)},
    }
    _save(_tensors_later(tree), path, start)
    summary.bytes = path.stat().st_size
    return summary


def _tensors_later(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return _plain(tree)
    if isinstance(tree, dict):
        return {key: _tensors_later(value) for key, value in tree.items()}
    return [_tensors_later(value) for value in tree] if isinstance(tree, list) else tree


def _torch_entry(files: Files, found: Found, parameter: Parameter, other: Other) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    if other.has_step:
        entry["step"] = torch.tensor(read_step(files, parameter), dtype=torch.float32)
    order = parameter.layout.order if parameter.layout else tuple(range(len(parameter.shape)))
    for key, name in other.states.items():
        entry[name] = _Later(
            torch.float32,
            parameter.shape,
            order,
            lambda key=key: _torch_state(files, found, parameter, key).permute(order).reshape(-1),  # type: ignore[misc]
        )
    return entry


def _bitsandbytes_entry(
    files: Files, found: Found, parameter: Parameter, maps: dict[bool, _Later], summary: Summary
) -> dict[str, Any]:
    wrapped: dict[str, Any] = {}
    rule, shape = found.rule, parameter.shape
    order = tuple(range(len(shape)))
    flat = Layout(shape, order, False, ())
    is_stacked = rule.name == "ademamix"
    # See `export`: upstream's kernel reads the scales of AdEMAMix' slow average at another place.
    as_floats = parameter.layout is None or (is_stacked and parameter.numel % BLOCK_SIZE != 0)
    blocks_of_one = state.blocks(parameter.numel)
    sources: list[tuple[str, ...]] = [("state1", "state3"), ("state2",)]
    if not is_stacked:
        sources = [(key,) for key in rule.states]
    for number, keys in enumerate(sources, start=1):
        key, stack = keys[0], ((len(keys),) if len(keys) > 1 else ())
        sizes, dims = (*stack, *shape), tuple(range(len(stack) + len(shape)))
        if as_floats:
            wrapped[key] = _Later(
                torch.float32,
                sizes,
                dims,
                lambda keys=keys: _joined(  # type: ignore[misc]
                    [_torch_state(files, found, parameter, key).reshape(-1) for key in keys]
                ),
            )
            continue
        scales: list[Tensor] = []

        def codes(keys: tuple[str, ...] = keys, scales: list[Tensor] = scales) -> Tensor:
            result = []
            for key in keys:
                stored = _read(files, rule, parameter, key, order)
                absmax, count = moved(stored, flat)
                scales.extend(absmax)
                summary.blocks += len(absmax[0])
                summary.requantized += count
                result.append(stored.codes)
            return _joined(result)

        def absmax(scales: list[Tensor] = scales) -> Tensor:
            result = _joined(scales)
            scales.clear()
            return result

        wrapped[key] = _Later(torch.uint8, sizes, dims, codes)
        wrapped[f"qmap{number}"] = maps[rule.signed[rule.states.index(key)]]
        # Asked for after the codes, which come with it.
        wrapped[state.absmax_key(key)] = _Later(
            torch.float32, (*stack, blocks_of_one), tuple(range(len(stack) + 1)), absmax
        )
    if _kind(found) in ("lamb", "lars"):
        wrapped["unorm_vec"] = _plain(torch.zeros(1))
    return {"step": int(read_step(files, parameter)), WRAPPED: wrapped}


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _save(tree: Any, path: Path, start: Start) -> None:
    """As torch.save of ``tree``, whose `_Later` tensors are made one at a time while the file is written."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fakes: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if isinstance(value, _Later):
            if id(value) not in fakes:
                fakes[id(value)] = value.empty()
            return fakes[id(value)]
        if isinstance(value, dict):
            return {key: fake(part) for key, part in value.items()}
        return [fake(part) for part in value] if isinstance(value, list) else value

    with FakeTensorMode():
        empty = fake(tree)
    with torch.serialization.skip_data(materialize_fake_tensors=True), path.open("wb") as new:
        torch.save(empty, new)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        places = torch.load(path, weights_only=True)
    pairs = list(_pairs(tree, places))
    report = start("converting", sum(math.prod(later.shape) * later.dtype.itemsize for later, _ in pairs))
    checksums: dict[int, int] = {}
    with path.open("r+b") as file:
        for later, place in pairs:
            offset = int(place.untyped_storage()._checkpoint_offset or 0)
            value = later.make()
            if offset in checksums or not value.nbytes:
                continue  # a tensor that several entries share
            assert value.dtype == later.dtype and value.shape == (math.prod(later.shape),)
            data = (ctypes.c_char * value.nbytes).from_address(value.data_ptr())
            file.seek(offset)
            file.write(data)
            checksums[offset] = zlib.crc32(data)
            report(value.nbytes)
            del value, data
        _set_checksums(file, checksums)


def _pairs(tree: Any, places: Any) -> Iterator[tuple[_Later, Tensor]]:
    if isinstance(tree, _Later):
        yield tree, places
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _pairs(value, places[key])
    elif isinstance(tree, list):
        for value, place in zip(tree, places):
            yield from _pairs(value, place)


def _set_checksums(file: BinaryIO, checksums: dict[int, int]) -> None:
    """Put the CRC-32 of records, by the offset of their data, into the zip file, for readers other than torch."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        directory = archive.start_dir
    for entry in entries:
        file.seek(entry.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))
        data = entry.header_offset + 30 + name + extra
        file.seek(directory + 28)
        sizes = struct.unpack("<HHH", file.read(6))
        if data in checksums:
            crc = struct.pack("<L", checksums[data])
            file.seek(directory + 16)
            file.write(crc)
            if entry.flag_bits & 8:  # the sizes follow the data
                file.seek(data + entry.compress_size)
                signature = file.read(4) == b"PK\x07\x08"
                file.seek(data + entry.compress_size + (4 if signature else 0))
            else:
                file.seek(entry.header_offset + 14)
            file.write(crc)
        directory += 46 + sum(sizes)
    file.flush()
    os.fsync(file.fileno())
