"""The manifest of a checkpoint directory: what it holds, and the checksum of every file.

A directory is a complete checkpoint if and only if it has a manifest: it is the last file written, into a directory of
another name that is then renamed. torch.distributed.checkpoint by itself leaves no trace of a flipped byte, of a
missing file that no rank happens to need, or of a save that died while it overwrote an older one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FILE = "bnb_fsdp.json"
KIND = "bnb_fsdp checkpoint"
VERSION = 1
PARTIAL = ".partial-"
DELETED = ".deleted-"
_PIECE = 1 << 22
_HOUR = 3600.0


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not what it should be.

    Model and optimizer are as they were, unless the text says that they may have been partly overwritten.
    """


@dataclass
class Manifest:
    """Contents of a checkpoint directory.

    ``sequence`` orders the checkpoints of one folder. ``optimizer``: ``class``, ``algorithm``, ``state_version``,
    ``block_size`` and ``groups`` (parameter names by group). ``parameters``: by name ``shape``, ``dtype``, ``bits`` (8,
    32 or None without state), ``mesh`` (its shape) and ``placements``. ``files``: by name ``bytes`` and ``sha256``.
    """

    sequence: int
    saved: str
    world_size: int
    versions: dict[str, str]
    optimizer: dict[str, Any]
    parameters: dict[str, dict[str, Any]]
    frozen: bool
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    kind: str = KIND
    version: int = VERSION

    def write(self, directory: Path) -> None:
        """Write it durably into ``directory``."""
        path = directory / FILE
        with path.open("w") as file:
            json.dump(seal(asdict(self)), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(directory)


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's ``values`` with their own checksum, ``sha256``."""
    sealed = {key: value for key, value in values.items() if key != "sha256"}
    text = json.dumps(sealed, sort_keys=True, separators=(",", ":"))
    return {**sealed, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def read(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest of ``directory``. Raises CheckpointError if it is no complete checkpoint that this version reads."""
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint directory.")
    path = directory / FILE
    if is_leftover(directory):
        raise CheckpointError(
            f"{directory} is what an interrupted save or removal left behind, not a checkpoint. Load another one of "
            f"{directory.parent}; this directory can be deleted."
        )
    if not path.is_file():
        what = (
            "has no files" if not any(directory.iterdir()) else "was not written by bnb_fsdp.save_checkpoint"
        )
        raise CheckpointError(
            f"{directory} has no {FILE}: it {what}, or it is a partial copy of a checkpoint. Load another checkpoint; "
            "one that torch.distributed.checkpoint wrote is loaded by it."
        )
    try:
        values = json.loads(path.read_text())
        kind, version = values["kind"], values["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Load another checkpoint.") from error
    if kind != KIND:
        raise CheckpointError(f"{path} describes a {kind!r}, not a {KIND!r}.")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{directory} has format {version}, this version of bnb_fsdp reads up to {VERSION}. Install a newer one."
        )
    if version < 1:
        raise CheckpointError(f"{directory} has format {version}, which no released bnb_fsdp wrote.")
    if seal(values) != values:
        raise CheckpointError(f"{path} is damaged: its own checksum differs. Load another checkpoint.")
    del values["sha256"]
    try:
        return Manifest(**values)
    except TypeError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Load another checkpoint.") from error


def is_leftover(directory: Path) -> bool:
    """Whether the name is that of an interrupted save or removal."""
    return directory.name.startswith(".") and (PARTIAL in directory.name or DELETED in directory.name)


def lost_manifest(directory: Path) -> bool:
    """Whether a checkpoint of `save_checkpoint`, which alone has ``extra_<rank>.pt``, has no manifest any more."""
    return not (directory / FILE).is_file() and any(directory.glob("extra_*.pt"))


class Damaged(NamedTuple):
    """A checkpoint that cannot be read. ``sequence``: as its manifest has it, None if that cannot be told."""

    path: Path
    sequence: int | None
    reason: str


class Folder(NamedTuple):
    """The checkpoints directly in a folder: complete ones with their manifests, oldest first, and all others.

    Symbolic links and what was converted for other packages are neither; nor are directories that one may not enter.
    """

    complete: list[tuple[Manifest, Path]]
    damaged: list[Damaged]

    @property
    def next_sequence(self) -> int:
        """A sequence number that none of them has."""
        known = [manifest.sequence for manifest, _ in self.complete]
        known += [one.sequence for one in self.damaged if one.sequence is not None]
        return max(known, default=0) + sum(one.sequence is None for one in self.damaged) + 1


def survey(folder: Path) -> Folder:
    """The checkpoints directly in ``folder``, which need not exist."""
    found = Folder([], [])
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            if path.is_symlink() or not path.is_dir() or is_leftover(path):
                continue
            if not (path / FILE).is_file() and not lost_manifest(path):
                continue
        except OSError:  # such as lost+found
            continue
        try:
            manifest = read(path)
        except (CheckpointError, OSError) as error:
            found.damaged.append(Damaged(path, _sequence(path), str(error)))
            continue
        if manifest.optimizer["state_version"] >= 1:
            found.complete.append((manifest, path))
    found.complete.sort(key=lambda pair: (pair[0].sequence, pair[1].name))
    return found


def _sequence(directory: Path) -> int | None:
    try:
        number = json.loads((directory / FILE).read_text())["sequence"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if type(number) is int else None


def written(directory: Path) -> float:
    """When the last tensors of a checkpoint were written (seconds), whatever befell its manifest since."""
    times = [path.stat().st_mtime for path in directory.glob("*.distcp")]
    return max(times, default=directory.stat().st_mtime)


def staging(target: Path) -> tuple[Path, int | None]:
    """A new directory beside ``target`` to write into, and its lock: a descriptor to close in the end.

    While it is locked, `remove_leftovers` of other processes leaves it alone. None where the file system has no locks.
    """
    while True:
        directory = target.parent / f".{target.name}{PARTIAL}{secrets.token_hex(4)}"
        directory.mkdir()
        # Before the lock was taken another process may have taken the directory for a leftover.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            lock = _lock(directory)
            if directory.is_dir():
                return directory, lock
            if lock is not None:
                os.close(lock)


def _lock(directory: Path) -> int | None:
    """A descriptor that locks ``directory``, None where that is not possible; BlockingIOError if another one does."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what interrupted saves, conversions and removals left in ``folder``; what could not be, in words.

    Nobody has a leftover's lock; where there are no locks, nothing in it has changed for an hour.
    """
    failed = []
    for directory in folder.iterdir():
        if not is_leftover(directory) or not directory.is_dir():
            continue
        try:
            lock = _lock(directory)
        except BlockingIOError:
            continue  # somebody writes it
        except OSError as error:
            failed.append(f"{directory}: {error}")
            continue
        try:
            if lock is not None or DELETED in directory.name or _is_old(directory):
                shutil.rmtree(directory)
        except FileNotFoundError:
            continue  # another process is faster
        except OSError as error:
            failed.append(f"{directory}: {error}")
        finally:
            if lock is not None:
                os.close(lock)
    return failed


def _is_old(directory: Path) -> bool:
    times = [path.stat().st_mtime for path in (directory, *directory.iterdir())]
    return time.time() - max(times) > _HOUR


def checksum(path: Path, report: Callable[[int], None] | None = None) -> dict[str, Any]:
    """``bytes`` and ``sha256`` of a file; tells ``report`` of the bytes read as it goes."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
            if report is not None:
                report(len(piece))
    return {"bytes": size, "sha256": digest.hexdigest()}


def problems(
    directory: Path,
    files: Mapping[str, Mapping[str, Any]],
    names: Iterable[str],
    contents: bool,
    report: Callable[[int], None] | None = None,
) -> list[str]:
    """What is wrong with the named files, in words; ``contents``: read them whole and compare checksums."""
    found = []
    for name in names:
        path = directory / name
        if not path.is_file():
            found.append(f"{path} is missing")
            continue
        size = path.stat().st_size
        if size != files[name]["bytes"]:
            found.append(f"{path} has {size} bytes instead of {files[name]['bytes']}")
        elif contents and checksum(path, report)["sha256"] != files[name]["sha256"]:
            found.append(f"{path} was changed since it was saved: its checksum differs")
    return found


def sync(path: Path) -> None:
    """Make a file's contents durable: torch's writer, until 2.13, syncs it before it has flushed its own buffer."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    sync(path)
