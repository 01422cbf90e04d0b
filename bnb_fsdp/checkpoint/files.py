"""Reading of checkpoint directories without a process group, one tensor at a time, and checks of what they hold.

Any directory that `torch.distributed.checkpoint` wrote to files, whatever the key prefix, nested or flattened. Nothing
in it is executed: its ``.metadata`` is a pickle, which is read here with an unpickler that knows the classes of a
checkpoint's description and no others, and everything else with ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import io
import json
import math
import os
import pathlib
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from .. import rules, state
from ..codebook import BLOCK_SIZE
from ..rules import Rule
from . import manifest
from . import state_dict as states
from .layout import Layout, parse
from .manifest import CheckpointError, Manifest

METADATA = ".metadata"
_SMALL = 1 << 14  # bytes
Key = tuple[Any, ...]
"""Where a value is in a nested state dict."""

_STATE = re.compile(r"(?:state|absmax)\d+\.[^.]+")
_TENSOR = re.compile(r"([a-z]+)_(?:8bit_(\d+)|32bit)")
_FOREIGN = {
    "exp_avg": "Adam's or Lion's",
    "exp_avg_sq": "Adam's",
    "momentum_buffer": "SGD's",
    "square_avg": "RMSprop's",
    "sum": "Adagrad's",
}


class Chunk(NamedTuple):
    """A stored box of a tensor: where it lies in the tensor and in which file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    storage: Any


@dataclass
class Parameter:
    """One parameter's state in a checkpoint. ``keys``: by live key (``state1``, ...) and name; ``layout``: if 8-bit."""

    name: str
    shape: tuple[int, ...]
    bits: int
    layout: Layout | None
    step: str | None
    keys: dict[str, dict[str, str]]

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass
class Group:
    """A parameter group: names of its parameters, and keys of its hyperparameters with their paths within the group."""

    params: list[str] = field(default_factory=list)
    keys: dict[str, Key] = field(default_factory=dict)


@dataclass
class Found:
    """One optimizer's state. ``root``: path of the dict that holds ``state``; ``flat``: keys are joined by dots.

    A flattened state dict does not tell which parameters share a group: neighbours with the same hyperparameters do,
    unless a manifest tells more. ``copies`` are the hyperparameters of a group's other parameters.
    """

    root: Key
    flat: bool
    rule: Rule
    format: str
    parameters: dict[str, Parameter]
    groups: list[Group]
    copies: dict[str, list[Group]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The key prefix, for messages."""
        return ".".join(map(str, self.root)) or "(no prefix)"

    def key(self, *path: Any) -> tuple[str, Key]:
        """Key and path of a value at ``path`` below the root, in this checkpoint's form."""
        name = ".".join(map(str, (*self.root, *path)))
        return name, (*self.root, ".".join(map(str, path))) if self.flat else (*self.root, *path)


def _member(kind: Any, name: str) -> Any:
    """What stands for getattr, by which Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for {name!r} of something that is no enum")


class _Unpickler(pickle.Unpickler):
    """Knows the classes that describe a checkpoint, and nothing that could do harm."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return pathlib.PurePosixPath  # the path it was saved to
        if module == metadata.__name__ and getattr(getattr(metadata, name, None), "__module__", "") == module:
            return getattr(metadata, name)
        if module == filesystem.__name__ and name in ("_StorageInfo", "_StoragePrefix"):
            return getattr(filesystem, name)
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), (torch.dtype, torch.layout))
        ):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which has no business in the description of a checkpoint"
        )


def read_metadata(path: Path) -> Any:
    """What a ``.metadata`` file describes, read without executing anything. Raises CheckpointError if it is damaged."""
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        _check_metadata(found)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises anything, MemoryError and RecursionError included
        text = str(error) or type(error).__name__
        raise CheckpointError(f"{path} is damaged: {text.rstrip('.')}.") from error
    return found


def _check_metadata(found: Any) -> None:
    """Raise if what was unpickled is no description of a checkpoint, so that nothing need be checked later."""
    for key, entry in found.state_dict_metadata.items():
        _need(isinstance(key, str), "a key", key)
        if isinstance(entry, metadata.TensorStorageMetadata):
            _need(_are_sizes(entry.size), key, entry.size)
            _need(isinstance(entry.properties.dtype, torch.dtype), key, entry.properties.dtype)
            for chunk in entry.chunks:
                _need(_are_sizes(chunk.offsets) and _are_sizes(chunk.sizes), key, chunk)
                _need(len(chunk.offsets) == len(chunk.sizes), key, chunk)
        else:
            _need(isinstance(entry, metadata.BytesStorageMetadata), key, entry)
    for index, info in found.storage_data.items():
        _need(isinstance(index.fqn, str), "a key", index.fqn)
        _need(index.offset is None or _are_sizes(index.offset), index.fqn, index.offset)
        _need(_are_sizes((info.offset, info.length)), index.fqn, info)
        name = info.relative_path
        _need(isinstance(name, str) and name not in ("", ".", "..") and "/" not in name, index.fqn, name)
    for key, path in (found.planner_data or {}).items() if isinstance(found.planner_data, dict) else ():
        parts = path if isinstance(path, tuple) else (path,)
        _need(all(isinstance(part, str) or _are_sizes((part,), 1 << 20) for part in parts), key, path)


def _are_sizes(values: Any, bound: int = 1 << 62) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < bound for value in values)


def _need(condition: bool, key: Any, value: Any) -> None:
    if not condition:
        raise ValueError(f"{key!r} is described by {str(value)[:80]!r}")


def reason(error: Exception) -> str:
    """Why ``torch.load(weights_only=True)`` failed, in short."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return f"it refers to {refused[1]}"
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].rstrip(".")


def plainly_loaded(value: Any) -> Any:
    """``value`` after `torch.save` and `torch.load` without executing anything; raises if that is impossible."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


class NoCheckpointError(CheckpointError):
    """There is no checkpoint to load yet: the path is missing or empty, or interrupted saves are all that it holds."""


def interruption(error: BaseException, handled: BaseException | None = None) -> BaseException | None:
    """The Ctrl-C or `sys.exit` that ``error`` came of, None if it came of neither.

    An interrupted `torch.save` fails while it closes its file, with a RuntimeError in place of the KeyboardInterrupt.
    ``handled``: what was being handled before, such as the Ctrl-C upon which somebody saves; it is not the cause.
    """
    known, waiting = {id(handled)}, [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (KeyboardInterrupt, SystemExit)):
            return one
        known.add(id(one))
        causes = (one.__context__, one.__cause__)
        waiting += [cause for cause in causes if cause is not None and id(cause) not in known]
    return None


class Writer(filesystem.FileSystemWriter):
    """torch's writer, but Ctrl-C stays Ctrl-C: what led to an exception is lost where DCP pickles it for other ranks.

    ``interrupted``: the KeyboardInterrupt or SystemExit that ended `write_data` on this rank.
    """

    interrupted: BaseException | None = None

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        handled = sys.exc_info()[1]
        try:
            return super().write_data(*args, **kwargs)
        except BaseException as error:
            self.interrupted = interruption(error, handled)
            if self.interrupted is not None:
                raise self.interrupted from None
            raise


class Reader(filesystem.FileSystemReader):
    """torch's reader, but for ``.metadata``, of which nothing is executed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        found = read_metadata(Path(self.path) / METADATA)
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Planner(DefaultLoadPlanner):
    """torch's planner, but objects are refused if loading them could execute anything."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{read_item.storage_index.fqn} cannot be read: {reason(error)}."
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)


class _Part(io.RawIOBase):
    """A stretch of an open file, which it shares with others."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._start + self._place)
        count = self._file.readinto(memoryview(buffer).cast("B")[:count])
        self._place += count
        return count


class Files:
    """A checkpoint directory, opened for reading; use it in a ``with`` statement.

    ``manifest`` is None if the directory has none. Raises CheckpointError if it is no complete checkpoint.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.manifest = self._manifest()
        self._open: dict[str, io.BufferedReader] = {}
        self._objects: dict[bytes, Any] = {}
        self.metadata = read_metadata(self.path / METADATA)
        self.entries: dict[str, Any] = dict(self.metadata.state_dict_metadata)
        self._storage = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): info
            for index, info in self.metadata.storage_data.items()
        }
        given = self.metadata.planner_data
        paths: dict[str, Key] = given if isinstance(given, dict) else {}
        self.paths = {key: tuple(paths.get(key) or _split(key)) for key in self.entries}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}

    def _manifest(self) -> Manifest | None:
        path = self.path
        if not path.exists():
            raise CheckpointError(f"{path}: no such directory.")
        if not path.is_dir():
            raise CheckpointError(f"{path} is a file, not a checkpoint directory.")
        if manifest.is_leftover(path.resolve()) or (path / manifest.FILE).is_file():
            found = manifest.read(path.resolve())
            if not (path / METADATA).is_file():
                raise CheckpointError(
                    f"{path / METADATA} is missing: this is a partial copy of a checkpoint."
                )
            return found
        if (path / METADATA).is_file():
            return None
        inside = sorted(item.name for item in path.iterdir() if (item / METADATA).is_file())
        if inside:
            raise CheckpointError(f"{path} is no checkpoint, but holds some: {', '.join(inside[-5:])}.")
        if any(path.glob("*.distcp")):
            raise CheckpointError(
                f"{path} has no {METADATA}: it is a partial copy, or the save was interrupted."
            )
        raise CheckpointError(f"{path} is no checkpoint of torch.distributed.checkpoint: no {METADATA}.")

    def is_tensor(self, key: str) -> bool:
        """Whether ``key`` is a tensor, not another object."""
        return hasattr(self.entries[key], "chunks")

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.entries[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a tensor."""
        dtype: torch.dtype = self.entries[key].properties.dtype
        return dtype

    def nbytes(self, key: str) -> int:
        """Bytes of a tensor; of another object, those it takes in its file."""
        if self.is_tensor(key):
            return math.prod(self.shape(key)) * self.dtype(key).itemsize
        info = self._storage.get((key, None))
        return 0 if info is None else int(info.length)

    def chunks(self, key: str) -> Iterator[Chunk]:
        """Where the parts of a value are stored; an object has one part. Raises CheckpointError if one is nowhere."""
        entry = self.entries[key]
        if not self.is_tensor(key):
            yield Chunk((), (), self._stored(key, None))
            return
        for chunk in entry.chunks:
            yield Chunk(tuple(chunk.offsets), tuple(chunk.sizes), self._stored(key, tuple(chunk.offsets)))

    def _stored(self, key: str, offset: tuple[int, ...] | None) -> Any:
        info = self._storage.get((key, offset))
        if info is None:
            where = "" if offset is None else f" at {offset}"
            raise CheckpointError(f"{key}: {self.path / METADATA} does not tell where it{where} is stored.")
        return info

    def raw(self, key: str, info: Any) -> IO[bytes]:
        """The stored bytes of a part. Raises CheckpointError, naming file and key, if they are not there."""
        name = info.relative_path
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{key}: written with {info.transform_descriptors}, which is not supported."
            )
        if name not in self._open:
            if len(self._open) > 64:
                self._open.pop(next(iter(self._open))).close()
            try:
                self._open[name] = (self.path / name).open("rb")
            except OSError as error:
                raise CheckpointError(f"{self.path / name}: {error.strerror} (needed for {key}).") from error
        file = self._open[name]
        if os.fstat(file.fileno()).st_size < info.offset + info.length:
            raise CheckpointError(f"{self.path / name} ends before {key} does: the file is truncated.")
        return cast("IO[bytes]", _Part(file, info.offset, info.length))

    def load(self, key: str, info: Any) -> Any:
        """The value of a part, read without executing anything."""
        data = self.raw(key, info)
        try:
            return torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged zip file or pickle raises anything
            raise CheckpointError(
                f"{self.path / info.relative_path}: {key} cannot be read: {reason(error)}."
            ) from error

    def _object(self, key: str, info: Any) -> Any:
        """As `load`; hyperparameters, of which many are alike, are unpickled once."""
        data = self.raw(key, info).read() if info.length < _SMALL else b""
        if not data:
            return self.load(key, info)
        if data not in self._objects:
            self._objects[data] = self.load(key, info)
        return copy.deepcopy(self._objects[data])

    def part(self, key: str, chunk: Chunk) -> Tensor:
        """The tensor of a chunk. Raises CheckpointError if it has not the dtype and shape it should have."""
        value = self.load(key, chunk.storage)
        wanted = self.dtype(key)
        if not isinstance(value, Tensor) or value.dtype != wanted or tuple(value.shape) != chunk.shape:
            what = (
                f"{value.dtype} of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise CheckpointError(
                f"{self.path / chunk.storage.relative_path}: {key} is {what}, expected {wanted} of {chunk.shape}."
            )
        return value

    def read(self, key: str) -> Any:
        """A whole tensor (contiguous), or another object."""
        if not self.is_tensor(key):
            return self._object(key, next(self.chunks(key)).storage)
        problem = self.coverage(key)
        if problem:
            raise CheckpointError(problem)
        shape = self.shape(key)
        result: Tensor | None = None
        for chunk in self.chunks(key):
            value = self.part(key, chunk)
            if chunk.shape == shape:
                return value.contiguous()
            if result is None:
                result = torch.empty(shape, dtype=value.dtype)
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offset, chunk.shape))
            result[box].copy_(value)
        return torch.empty(shape, dtype=self.dtype(key)) if result is None else result

    def coverage(self, key: str) -> str | None:
        """What is wrong with the boxes a tensor was stored in, or None: they must fill it, once."""
        shape = self.shape(key)
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self.entries[key].chunks]
        boxes = [box for box in boxes if math.prod(box[1])]
        for offset, sizes in boxes:
            ends = [start + size for start, size in zip(offset, sizes)]
            if len(offset) != len(shape) or any(
                start < 0 or end > size for start, end, size in zip(offset, ends, shape)
            ):
                return f"{key}: a part of shape {sizes} at {offset} lies outside of {shape}."
        total = sum(math.prod(sizes) for _, sizes in boxes)
        pair = _overlap(boxes, len(shape))
        if pair:
            return f"{key}: its parts at {pair[0]} and {pair[1]} overlap."
        if total != math.prod(shape):
            return f"{key}: {total} of {math.prod(shape)} elements were saved."
        return None

    @cached_property
    def optimizers(self) -> list[Found]:
        """The optimizers of this package whose state is here; none only if the manifest says so.

        Raises CheckpointError if there is none, or for a newer format, another block size or an unknown algorithm.
        """
        return _find(self)

    @property
    def has_no_state(self) -> bool:
        """Whether the manifest says that there is none of ours: converted for others, or all parameters were frozen."""
        told = self.manifest
        return told is not None and (
            told.optimizer["state_version"] < 1
            or not any(entry["bits"] for entry in told.parameters.values())
        )

    def no_state(self) -> str:
        """That there is no state of ours, in words."""
        return f"{self.path} holds no state of a bnb_fsdp optimizer: {_contents(self)}."


def _split(key: str) -> Key:
    """The path of a key that comes without one."""
    match = re.match(r"(?:(.*?)\.)?((?:state|param_groups)\..+)", key)
    if match is None:
        return (key,)
    head = (match[1],) if match[1] else ()
    return (*head, match[2])


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], dims: int) -> tuple[Key, Key] | None:
    """Offsets of two boxes that share an element, or None."""
    if dims == 0:
        return ((), ()) if len(boxes) > 1 else None
    # Along the dimension with most cuts few boxes are side by side at a time.
    along = max(range(dims), key=lambda dim: len({offset[dim] for offset, _ in boxes}))
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offset, sizes in sorted(boxes, key=lambda box: box[0][along]):
        active = [box for box in active if box[0][along] + box[1][along] > offset[along]]
        for other, size in active:
            if all(a < b + n and b < a + m for a, m, b, n in zip(offset, sizes, other, size)):
                return other, offset
        active.append((offset, sizes))
    return None


# Which parameters have which state


def _place(path: Key) -> tuple[Key, bool, str, Key] | None:
    """(root, whether flat, ``state`` or ``param_groups``, path below) of a path, or None if it is no optimizer's."""
    for at, part in enumerate(path):
        kind, dot, rest = str(part).partition(".")
        if dot and kind in ("state", "param_groups"):
            return path[:at], True, kind, (*rest.split("."), *path[at + 1 :])
    size = len(path)
    if size > 2 and path[-3] == "state" and path[-1] == "step":
        return path[:-3], False, "state", path[-2:]
    if size > 3 and path[-4] == "state":
        return path[:-4], False, "state", path[-3:]
    for at in range(size - 2):
        if path[at] == "param_groups" and isinstance(path[at + 1], int):
            return path[:at], False, "param_groups", path[at + 1 :]
    if size > 2 and path[-3] == "state":  # of another optimizer
        return path[:-3], False, "state", path[-2:]
    return None


def _find(files: Files) -> list[Found]:
    raw: dict[tuple[Key, bool], dict[str, dict[str, dict[str, str]]]] = {}
    steps: dict[tuple[Key, bool], dict[str, str]] = {}
    hypers: dict[tuple[Key, bool], dict[str, Key]] = {}
    for key, path in files.paths.items():
        place = _place(path)
        if place is None:
            continue
        root, flat, kind, below = place
        if kind == "param_groups":
            hypers.setdefault((root, flat), {})[key] = below
        elif below[-1] == "step":
            steps.setdefault((root, flat), {})[".".join(map(str, below[:-1]))] = key
        elif len(below) > 2 and _STATE.fullmatch(f"{below[-2]}.{below[-1]}"):
            name = ".".join(map(str, below[:-2]))
            entry = raw.setdefault((root, flat), {}).setdefault(name, {})
            entry.setdefault(below[-2], {})[below[-1]] = key
    found = [
        _optimizer(files, where, entries, steps.get(where, {}), hypers.get(where, {}))
        for where, entries in raw.items()
    ]
    if not found and not files.has_no_state:
        raise CheckpointError(files.no_state())
    return found


def _contents(files: Files) -> str:
    names = Counter(str(path[-1]).rpartition(".")[2] for path in files.paths.values() if _place(path))
    foreign = [name for name in _FOREIGN if names[name]]
    if foreign:
        owner = _FOREIGN[foreign[-1]] if foreign != ["exp_avg"] else _FOREIGN["exp_avg"]
        return f"it has {owner} state of torch.optim or the like ({', '.join(foreign)})"
    if names:
        return f"it has an optimizer's values {', '.join(sorted(names)[:6])}"
    keys = list(files.entries)
    return (
        f"it has no optimizer's values, but {len(keys)} others, such as {', '.join(keys[:3])}"
        if keys
        else "it is empty"
    )


def _optimizer(
    files: Files,
    where: tuple[Key, bool],
    entries: dict[str, dict[str, dict[str, str]]],
    steps: dict[str, str],
    hypers: dict[str, Key],
) -> Found:
    root, flat = where
    label = ".".join(map(str, root)) or str(files.path)
    names = {
        name for entry in entries.values() for key in entry for name in entry[key] if key.startswith("state")
    }
    algorithms = set()
    for name in names:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{label}: {name} is a state of another optimizer, or of a newer bnb_fsdp.")
        if match[2] and int(match[2]) != BLOCK_SIZE:
            raise CheckpointError(
                f"{label} has blocks of {match[2]} elements, this bnb_fsdp has {BLOCK_SIZE}."
            )
        algorithms.add(match[1])
    if len(algorithms) != 1 or not algorithms <= set(rules.RULES):
        raise CheckpointError(
            f"{label} has state of {sorted(algorithms)}, expected one of {', '.join(rules.RULES)}."
        )
    rule = rules.RULES[algorithms.pop()]
    found = Found(root, flat, rule, states.format_of(rule), {}, [])
    if flat:
        found.groups, found.copies = _flat_groups(files, found, hypers)
    else:
        found.groups = _groups(files, hypers)
    for group in found.groups:
        for key, path in group.keys.items():
            if path == ("format",):
                found.format = str(files.read(key))
                _check_format(label, found.format)
    for name, entry in entries.items():
        found.parameters[name] = _parameter(files, found, name, entry, steps.get(name))
    return found


def _check_format(label: str, given: str) -> None:
    parts = given.split()
    if len(parts) == 4 and parts[0] == "bnb_fsdp" and parts[1].isdigit() and int(parts[1]) > states.VERSION:
        raise CheckpointError(
            f"{label} was written by a newer bnb_fsdp: format {parts[1]}, this version reads up to "
            f"{states.VERSION}. Install a newer bnb_fsdp."
        )


def _parameter(
    files: Files, found: Found, name: str, entry: dict[str, dict[str, str]], step: str | None
) -> Parameter:
    first = entry.get(found.rule.states[0], {})
    key = first.get(states.codes_name(found.rule)) or first.get(states.float_name(found.rule))
    if key is None or not files.is_tensor(key):
        raise CheckpointError(
            f"{name}: {found.rule.states[0]} holds {sorted(first)}; the checkpoint is damaged."
        )
    shape = files.shape(key)
    layout = None
    if states.codes_name(found.rule) in first:
        scales = entry.get(state.absmax_key(found.rule.states[0]), {})
        kinds = [kind for kind in scales if not kind.startswith("phase")]
        if len(kinds) != 1:
            raise CheckpointError(f"{name}: its scales are {sorted(scales)}, expected one layout of them.")
        try:
            layout = parse(kinds[0], shape)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
    return Parameter(name, shape, 32 if layout is None else 8, layout, step, entry)


def parameter_groups(files: Files, root: Key) -> list[dict[str, Any]]:
    """The parameter groups of the nested state dict at ``root``, as they were saved."""
    above = (*root, "param_groups")
    hypers = {key: path[len(above) :] for key, path in files.paths.items() if path[: len(above)] == above}
    return [{**hyperparameters(files, group), "params": group.params} for group in _groups(files, hypers)]


def _groups(files: Files, hypers: dict[str, Key]) -> list[Group]:
    groups: dict[int, Group] = {}
    for key, path in hypers.items():
        group = groups.setdefault(int(path[0]), Group())
        if path[1] == "params":
            group.params = [str(name) for name in files.read(key)]
        else:
            group.keys[key] = path[1:]
    return [groups[index] for index in sorted(groups)]


def _flat_groups(
    files: Files, found: Found, hypers: dict[str, Key]
) -> tuple[list[Group], dict[str, list[Group]]]:
    """Groups of a flattened state dict, which has the hyperparameters of each parameter, in order."""
    single: dict[str, Group] = {}
    for key, path in hypers.items():
        # Positions in a list are integers, parts of a name are strings.
        cut = next((at for at, part in enumerate(path) if isinstance(part, int)), len(path)) - 1
        name = ".".join(map(str, path[:cut]))
        single.setdefault(name, Group([name])).keys[key] = path[cut:]
    told: dict[str, int] = {}
    if files.manifest is not None:
        for index, names in enumerate(files.manifest.optimizer.get("groups", [])):
            told.update(dict.fromkeys(names, index))
    groups: list[Group] = []
    copies: dict[str, list[Group]] = {}
    last: Any = None
    for name, group in single.items():
        values: Any = told.get(name)
        if values is None:
            values = {
                path: repr(files.read(key)) for key, path in group.keys.items() if path[0] != "overrides"
            }
        if groups and values == last:
            groups[-1].params.append(name)
        else:
            groups.append(Group([name], group.keys))
        copies.setdefault(groups[-1].params[0], []).append(group)
        last = values
    return groups, copies


def hyperparameters(files: Files, group: Group) -> dict[str, Any]:
    """The values of a group, without ``params``."""
    result: dict[str, Any] = {}
    for key, path in group.keys.items():
        value = files.read(key)
        place: Any = result
        for part, following in pairwise(path):
            if isinstance(place, list):
                place.extend({} for _ in range(int(part) + 1 - len(place)))
                place = place[int(part)]
            else:
                place = place.setdefault(part, [] if isinstance(following, int) else {})
        place[path[-1]] = value
    if isinstance(result.get("overrides"), str):
        with contextlib.suppress(ValueError):
            result["overrides"] = json.loads(result["overrides"])
    return result


# Checks


def missing_bytes(files: Files) -> list[str]:
    """Files that ``.metadata`` names and that are missing or too short, in words."""
    needed: dict[str, int] = {}
    for key in files.entries:
        for chunk in _known(files, key):
            end = chunk.storage.offset + chunk.storage.length
            needed[chunk.storage.relative_path] = max(end, needed.get(chunk.storage.relative_path, 0))
    found = []
    for name, size in needed.items():
        path = files.path / name
        if not path.is_file():
            found.append(f"{path} is missing.")
        elif path.stat().st_size < size:
            found.append(f"{path} has {path.stat().st_size} bytes, at least {size} were written.")
    return found


def _known(files: Files, key: str) -> Iterator[Chunk]:
    try:
        yield from files.chunks(key)
    except CheckpointError:
        return


class Readable(NamedTuple):
    """What reading every value found."""

    problems: list[str]
    not_finite: dict[str, int]


def unreadable(files: Files, keys: Sequence[str], report: Callable[[int], None]) -> Readable:
    """Read every value: what is wrong with any, in words, and how many elements of which tensors are not finite."""
    problems: list[str] = []
    counts: dict[str, int] = {}
    seen: set[bytes] = set()  # many hyperparameters are alike
    for key in keys:
        try:
            if not files.is_tensor(key):
                _check_object(files, key, seen)
            else:
                problem = files.coverage(key)
                if problem:
                    problems.append(problem)
                for chunk in files.chunks(key):
                    value = files.part(key, chunk)
                    if value.is_floating_point():
                        bad = _not_finite(value.reshape(-1))
                        if bad:
                            counts[key] = counts.get(key, 0) + bad
        except CheckpointError as error:
            problems.append(str(error))
        report(files.nbytes(key))
    return Readable(problems, counts)


def _not_finite(flat: Tensor) -> int:
    step = 1 << 22  # the mask is as long as what is looked at
    return sum(int((~flat[start : start + step].isfinite()).sum()) for start in range(0, flat.numel(), step))


def _check_object(files: Files, key: str, seen: set[bytes]) -> None:
    info = next(files.chunks(key)).storage
    data = files.raw(key, info)
    if info.length < _SMALL:
        stored = data.read()
        if stored in seen:
            return
        seen.add(stored)
        data.seek(0)
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(data)
        data.seek(0)
        if not unknown:  # else it is none of ours, and not looked into
            torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged zip file or pickle raises anything
        raise CheckpointError(f"{files.path / info.relative_path}: {key} cannot be read: {error}") from error


def inconsistent(files: Files, found: Found, report: Callable[[int], None]) -> list[str]:
    """What is wrong with an optimizer's state besides files and values, in words."""
    problems = []
    listed = {name for group in found.groups for name in group.params}
    if found.format != states.format_of(found.rule):
        problems.append(
            f"{found.label}: its groups have format {found.format!r}, its state {states.format_of(found.rule)!r}."
        )
    for name, parameter in found.parameters.items():
        if found.groups and name not in listed:
            problems.append(f"{name}: has state, but is in no parameter group.")
        names = wrong_tensors(files, found, parameter)
        problems += names
        try:
            problems += _wrong_step(files, parameter)
            if not names and parameter.layout is not None and parameter.layout.has_phase:
                problems += _wrong_phases(files, found.rule, parameter, parameter.layout)
        except CheckpointError as error:
            problems.append(str(error))
        report(1)
    return problems


def wrong_tensors(files: Files, found: Found, parameter: Parameter) -> list[str]:
    """Tensors of a parameter's state that are missing, too many, or of a dtype or shape that its layout has not."""
    wanted = states.expected(found.rule, parameter.bits, parameter.shape, parameter.layout)
    given = {(key, name) for key, names in parameter.keys.items() for name in names}
    needed = {(key, name) for key, names in wanted.items() for name in names}
    problems = [f"{parameter.name}: {key}.{name} is missing." for key, name in sorted(needed - given)]
    problems += [
        f"{parameter.name}: {key}.{name} should not be there." for key, name in sorted(given - needed)
    ]
    for key, name in sorted(needed & given):
        full, tensor = parameter.keys[key][name], wanted[key][name]
        if not files.is_tensor(full):
            problems.append(f"{full} is no tensor.")
        elif files.dtype(full) != tensor.dtype or files.shape(full) != tensor.shape:
            problems.append(
                f"{full} is {files.dtype(full)} of shape {files.shape(full)}, expected {tensor.dtype} of "
                f"{tensor.shape}."
            )
    return problems


def read_step(files: Files, parameter: Parameter) -> float:
    """Steps that were counted. Raises CheckpointError if there is no such count."""
    if parameter.step is None:
        raise CheckpointError(f"{parameter.name}: step is missing.")
    try:
        step = float(files.read(parameter.step))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{parameter.step} is no number.") from error
    if not math.isfinite(step):
        raise CheckpointError(f"{parameter.step} is {step}, expected a count of steps.")
    return step


def _wrong_step(files: Files, parameter: Parameter) -> list[str]:
    step = read_step(files, parameter)
    if 0 <= step < 2**53 and step == int(step):
        return []
    return [f"{parameter.step} is {step}, expected a count of steps."]


def _wrong_phases(files: Files, rule: Rule, parameter: Parameter, layout: Layout) -> list[str]:
    """A row goes on where the one before it ended, in the same block, or starts a rank's shard."""
    first = state.absmax_key(rule.states[0])
    phase = files.read(parameter.keys[first][layout.phase_name]).long()
    key = parameter.keys[first][layout.phase_name]
    widths = torch.tensor(layout.widths)
    following = (phase + widths) % BLOCK_SIZE
    goes_on = phase[1:] == following[:-1]
    wrong = ~goes_on & (phase[1:] != 0)
    problems = []
    bad = int(wrong.sum()) + int((phase[:1] != 0).sum())
    if bad:
        problems.append(f"{key}: {bad} rows start where no cut of the rows could make them start.")
    shared = goes_on & (phase[1:] != 0) & (widths > 0)
    last = ((phase + widths + BLOCK_SIZE - 1) // BLOCK_SIZE - 1).clamp_min(0)[:-1]
    column = torch.arange(layout.pieces) * layout.count
    for name in rule.states:
        key = parameter.keys[state.absmax_key(name)][layout.name]
        bits = files.read(key).view(torch.int32)
        if int(last.max() if last.numel() else 0) >= layout.count:
            problems.append(f"{key}: a row would need more scales than there are.")
            continue
        ends = bits[:-1].gather(1, last + column)
        differ = int((shared & (ends != bits[1:, column])).sum())
        if differ:
            problems.append(
                f"{key}: {differ} rows have another scale than the row before for the block they share."
            )
    return problems
