"""The manifest of a checkpoint directory: what it holds, and the checksum of every file.

A directory is a complete checkpoint if and only if it has a manifest: it is the last file written, into a directory of
another name that is then renamed. torch.distributed.checkpoint by itself leaves no trace of a flipped byte, of a
missing file that no rank happens to need, or of a save that died while it overwrote an older one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "bnb_fsdp.json"
KIND = "bnb_fsdp checkpoint"
VERSION = 1
PARTIAL = ".partial-"
DELETED = ".deleted-"
_PIECE = 1 << 22


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not what it should be. Model and optimizer are as they were."""


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


def complete(folder: str | os.PathLike[str]) -> list[tuple[Manifest, Path]]:
    """The complete checkpoints directly in ``folder`` with their manifests, oldest first, without damaged ones."""
    found = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        if path.is_dir() and not is_leftover(path) and (path / FILE).is_file():
            try:
                found.append((read(path), path))
            except CheckpointError:
                continue
    return sorted(found, key=lambda pair: (pair[0].sequence, pair[1].name))


def checksum(path: Path, done: list[int] | None = None) -> dict[str, Any]:
    """``bytes`` and ``sha256`` of a file; adds the bytes read to ``done[0]`` as it goes."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
            if done is not None:
                done[0] += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def problems(
    directory: Path,
    files: Mapping[str, Mapping[str, Any]],
    names: Iterable[str],
    contents: bool,
    done: list[int] | None = None,
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
        elif contents and checksum(path, done)["sha256"] != files[name]["sha256"]:
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
