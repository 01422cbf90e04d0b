"""``python -m bnb_fsdp checkpoint info | verify | convert``: arguments, and what is printed."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..codebook import BLOCK_SIZE
from ..report import counted
from . import manifest
from .convert import Split, Summary, convert
from .files import (
    METADATA,
    Files,
    Found,
    hyperparameters,
    inconsistent,
    interruption,
    missing_bytes,
    read_step,
    unreadable,
)
from .manifest import CheckpointError

_HELP = """\
Looks into, checks and converts checkpoint directories of torch.distributed.checkpoint that hold optimizer state of
bnb_fsdp: those of bnb_fsdp.save_checkpoint, of dcp.save, and of accelerate (its optimizer_0 folder). Runs in one
process, without a process group and without a GPU; memory is bounded by the largest tensor.

  python -m bnb_fsdp checkpoint info checkpoints/step-100
  python -m bnb_fsdp checkpoint verify checkpoints/step-100
  python -m bnb_fsdp checkpoint convert checkpoints/step-100 adamw.pt --to torch
"""
_VERIFY_HELP = """\
Reads the whole checkpoint. With a manifest (bnb_fsdp.json) the checksum of every file is compared first; without one,
flipped bits can show only where they make something unreadable or contradictory. Then: every file that .metadata
names is there and long enough, every value readable, every tensor complete and of the dtype named, and codes, scales,
phases and steps agree with one another.

.metadata is a pickle, which torch.distributed.checkpoint executes when it loads a checkpoint: verify one from elsewhere
before you give it to dcp.load. This command, as bnb_fsdp.load_checkpoint, reads it, and all else, without executing
anything.

Exit status: 0 if all is fine, 1 if there is a problem.
"""
_CONVERT_HELP = """\
OUT must not exist; it appears complete or not at all.

  --to torch         states as float32 under the names of torch.optim's classes (Adam and AdamW: AdamW; SGD; RMSprop;
                     Adagrad; Lion: lion_pytorch's). OUT is a checkpoint directory with the same keys otherwise, or, if
                     it ends in .pt, one file that the class's load_state_dict takes from torch.load.
  --to bitsandbytes  one .pt file for load_state_dict of the bitsandbytes 0.50.2 class. Blocks that lie here as they
                     lie there are kept bit for bit, others requantised, and counted.
  --to bnb_fsdp      a checkpoint directory whose state loads at any number of ranks that cut parameters along their
                     first dimension. State that was saved so is copied bit for bit.
                     --split 'layers.*.down_proj.weight=1x2' writes parameters for a model that is cut in 2 along
                     dimension 1 (tensor parallel); several --split of one parameter cut it in that order.

What is not optimizer state is copied, and a manifest is written if there was one.
"""


def add_parser(commands: Any) -> None:
    """Add ``checkpoint`` to the command line's subcommands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "checkpoint",
        help="show, verify or convert a checkpoint directory; status 1 if there is a problem",
        description=_HELP,
        formatter_class=raw,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="{info,verify,convert}", required=True)
    info = actions.add_parser("info", help="show what it holds", allow_abbrev=False)
    info.add_argument("directory", metavar="DIR", type=Path)
    info.add_argument("--parameters", action="store_true", help="a line for each parameter")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    verify = actions.add_parser(
        "verify",
        help="read and check all of it",
        description=_VERIFY_HELP,
        formatter_class=raw,
        allow_abbrev=False,
    )
    verify.add_argument("directory", metavar="DIR", type=Path)
    into = actions.add_parser(
        "convert",
        help="write it for torch, bitsandbytes, or another sharding",
        description=_CONVERT_HELP,
        formatter_class=raw,
        allow_abbrev=False,
    )
    into.add_argument("directory", metavar="DIR", type=Path)
    into.add_argument("out", metavar="OUT", type=Path)
    into.add_argument("--to", required=True, choices=("torch", "bitsandbytes", "bnb_fsdp"))
    into.add_argument("--split", action="append", default=[], type=_split, metavar="PATTERN=DIMxN")


def _split(text: str) -> Split:
    match = re.fullmatch(r"(.+)=(\d+)x(\d+)", text)
    if match is None or int(match[3]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=DIMxN, such as '*.down_proj.weight=1x2'")
    return Split(match[1], (int(match[2]), int(match[3])))


def run(options: argparse.Namespace, error: Callable[[str], Any]) -> int:
    """Run a subcommand; the exit status. ``error`` ends the process with a usage error."""
    if options.action == "convert" and options.split and options.to != "bnb_fsdp":
        error(f"checkpoint convert: --split goes with --to bnb_fsdp, not {options.to}.")
    try:
        if options.action == "info":
            return _info(options.directory, options.parameters, options.json)
        if options.action == "verify":
            return _verify(options.directory)
        return _convert(options.directory, options.out, options.to, options.split)
    except (KeyboardInterrupt, Exception) as problem:
        if isinstance(interruption(problem), KeyboardInterrupt):
            print(f"bnb_fsdp checkpoint {options.action}: interrupted.", file=sys.stderr)
            return 130
        if not isinstance(problem, (CheckpointError, OSError)):
            raise
        print(f"bnb_fsdp checkpoint {options.action}: {problem}", file=sys.stderr)
    return 1


class Progress:
    """A bar on stderr; a line now and then if that is no terminal."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, max(total, 1), 0
        self._terminal = sys.stderr.isatty()
        self._every = 0.2 if self._terminal else 10.0
        self._start = self._last = time.monotonic()
        self._shown = False

    def __call__(self, amount: int) -> None:
        """``amount`` more of the total is done."""
        self._done = min(self._done + amount, self._total)
        now = time.monotonic()
        if now - self._last >= self._every:
            self._show(now)

    def close(self) -> None:
        """End the line."""
        if self._shown and self._terminal:
            self._show(time.monotonic())
            print(file=sys.stderr)
        self._shown = False

    def _show(self, now: float) -> None:
        share = self._done / self._total
        bar = ("#" * int(24 * share)).ljust(24, ".")
        text = f"{self._label} [{bar}] {share:4.0%} {now - self._start:.0f} s"
        if self._terminal:
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
        self._last, self._shown = now, True


# info


def _info(directory: Path, parameters: bool, as_json: bool) -> int:
    with Files(directory) as files:
        report = _report(files, parameters)
    print(json.dumps(report, indent=2) if as_json else "\n".join(_text(report)))
    return 0


def _report(files: Files, parameters: bool) -> dict[str, Any]:
    found = files.manifest
    ours = {
        key for optimizer in files.optimizers for one in optimizer.parameters.values() for key in _keys(one)
    }
    others = [key for key in files.entries if files.is_tensor(key) and key not in ours]
    report: dict[str, Any] = {
        "directory": str(files.path),
        "manifest": found is not None,
        "saved": found.saved if found else None,
        "versions": found.versions if found else None,
        "world_size": found.world_size if found else None,
        "class": found.optimizer["class"] if found else None,
        "meshes": sorted(
            {tuple(entry["mesh"]) for entry in found.parameters.values() if entry["mesh"]} if found else ()
        ),
        "files": sum(path.is_file() for path in files.path.iterdir()),
        "bytes": sum(path.stat().st_size for path in files.path.iterdir() if path.is_file()),
        "other_tensors": len(others),
        "other_bytes": sum(map(files.nbytes, others)),
        "optimizers": [_describe(files, optimizer, parameters) for optimizer in files.optimizers],
    }
    return report


def _keys(parameter: Any) -> Iterator[str]:
    for names in parameter.keys.values():
        yield from names.values()
    if parameter.step:
        yield parameter.step


def _describe(files: Files, found: Found, parameters: bool) -> dict[str, Any]:
    steps = {name: read_step(files, one) for name, one in found.parameters.items()}
    sizes = {name: sum(map(files.nbytes, _keys(one))) for name, one in found.parameters.items()}
    elements = sum(one.numel for one in found.parameters.values())
    result: dict[str, Any] = {
        "prefix": ".".join(map(str, found.root)),
        "flattened": found.flat,
        "algorithm": found.rule.name,
        "format": found.format,
        "block_size": BLOCK_SIZE,
        "parameters": len(found.parameters),
        "elements": elements,
        "bits": {
            str(bits): {
                "parameters": sum(one.bits == bits for one in found.parameters.values()),
                "elements": sum(one.numel for one in found.parameters.values() if one.bits == bits),
            }
            for bits in (8, 32)
        },
        "layouts": dict(Counter(one.layout.name for one in found.parameters.values() if one.layout)),
        "state_bytes": sum(sizes.values()),
        "bytes_per_parameter": round(sum(sizes.values()) / max(elements, 1), 4),
        "steps": [int(min(steps.values())), int(max(steps.values()))],
        "groups": [
            {"parameters": len(group.params), **_plain(hyperparameters(files, group))}
            for group in found.groups
        ],
    }
    if parameters:
        result["parameter_list"] = [
            {
                "name": name,
                "shape": list(one.shape),
                "bits": one.bits,
                "layout": one.layout.name if one.layout else None,
                "step": int(steps[name]),
                "bytes": sizes[name],
            }
            for name, one in found.parameters.items()
        ]
    return result


def _plain(value: Any) -> Any:
    """As JSON can have it."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _text(report: dict[str, Any]) -> Iterator[str]:
    yield f"{report['directory']}: {report['files']} files, {_size(report['bytes'])}"
    if report["manifest"]:
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        yield f"  saved         {report['saved']} by {versions}"
        meshes = ", ".join("x".join(map(str, mesh)) for mesh in report["meshes"]) or "none"
        yield f"  ranks         {report['world_size']}, mesh {meshes}"
    else:
        yield "  manifest      none: class, versions, ranks and mesh are not known"
    yield f"  other tensors {report['other_tensors']}, {_size(report['other_bytes'])}"
    if not report["optimizers"]:
        yield f"  optimizer     no state of bnb_fsdp: {report['class']}"
    for one in report["optimizers"]:
        name = report["class"] or one["algorithm"]
        yield ""
        yield f"{one['prefix'] or 'optimizer'}: {name}"
        yield f"  algorithm     {one['algorithm']}, blocks of {one['block_size']}, format '{one['format']}'"
        yield f"  steps         {' to '.join(dict.fromkeys(map(str, one['steps'])))}"
        for bits, counts in one["bits"].items():
            parameters = counted(counts["parameters"], "parameter")
            yield f"  {bits:>2}-bit state  {parameters}, {counts['elements']:,} elements"
        layouts = ", ".join(f"{layout} {count}" for layout, count in one["layouts"].items())
        yield f"  scales        {layouts or 'none'}"
        yield f"  state         {_size(one['state_bytes'])}, {one['bytes_per_parameter']:.3f} bytes a parameter element"
        for index, group in enumerate(one["groups"]):
            values = ", ".join(
                f"{key} {value}" for key, value in group.items() if key not in ("parameters", "format")
            )
            yield f"  group {index:<8}{counted(group['parameters'], 'parameter')}: {values}"
        for row in one.get("parameter_list", ()):
            shape = "x".join(map(str, row["shape"])) or "scalar"
            kind = f"{row['bits']}-bit" + (f" {row['layout']}" if row["layout"] else "")
            yield f"  {row['name']}  {shape}  {kind}  step {row['step']}  {_size(row['bytes'])}"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


# verify


def _verify(directory: Path) -> int:
    problems: list[str] = []
    counts: dict[str, int] = {}
    checked = 0
    if (directory / manifest.FILE).is_file():
        checked = _checksums(directory, problems)
        if any(METADATA in problem for problem in problems):
            return _verdict([*problems, f"without a sound {METADATA}, nothing else can be checked."], counts)
    elif manifest.lost_manifest(directory):
        problems.append(f"{directory / manifest.FILE}, the manifest of bnb_fsdp.save_checkpoint, is missing.")
    else:
        print(
            f"no {manifest.FILE} in {directory}: there are no checksums, so that flipped bits need not show"
        )
    try:
        files = Files(directory)
    except CheckpointError as error:
        if not problems:
            raise
        problems.append(str(error))
        return _verdict(problems, counts)
    with files:
        total = sum(map(files.nbytes, files.entries))
        problems += missing_bytes(files)
        progress = Progress("values", total)
        found = unreadable(files, list(files.entries), progress)
        progress.close()
        problems += found.problems
        for key, number in found.not_finite.items():
            print(f"note: {key}: {number} elements are NaN or infinite")
        parameters = 0
        try:
            for optimizer in files.optimizers:
                progress = Progress(f"state of {optimizer.label}", len(optimizer.parameters))
                problems += inconsistent(files, optimizer, progress)
                progress.close()
                parameters += len(optimizer.parameters)
            problems += _unlike_manifest(files)
        except CheckpointError as error:
            problems.append(str(error))
        tensors = sum(map(files.is_tensor, files.entries))
        counts = {
            "files with checksums": checked,
            "tensors": tensors,
            "other values": len(files.entries) - tensors,
            "parameters with state": parameters,
            "not finite": sum(found.not_finite.values()),
        }
    return _verdict(list(dict.fromkeys(problems)), counts)


def _checksums(directory: Path, problems: list[str]) -> int:
    described = manifest.read(directory)
    progress = Progress("checksums", sum(entry["bytes"] for entry in described.files.values()))
    for name in sorted(described.files):
        found = manifest.problems(directory, described.files, [name], True, progress)
        problems += [f"{text}." for text in found]
    progress.close()
    for path in sorted(directory.iterdir()):
        if path.name not in described.files and path.name != manifest.FILE:
            print(f"note: {path} is not in the manifest")
    return len(described.files)


def _unlike_manifest(files: Files) -> Iterator[str]:
    described = files.manifest
    if described is None:
        return
    where = files.path / manifest.FILE
    for found in files.optimizers:
        if found.rule.name != described.optimizer["algorithm"]:
            yield f"{where} tells of {described.optimizer['algorithm']}, {found.label} is {found.rule.name}."
        for name, one in found.parameters.items():
            entry = described.parameters.get(name)
            if entry is None or entry["bits"] != one.bits or math.prod(entry["shape"]) != one.numel:
                yield f"{where}: {name} is told to be {entry}, it has {one.bits}-bit state of {one.shape}."
        for name, entry in described.parameters.items():
            if entry["bits"] and name not in found.parameters:
                yield f"{where}: {name} is told to have state, it has none."


def _verdict(problems: list[str], counts: dict[str, int]) -> int:
    for problem in problems:
        print(f"problem: {problem}")
    text = ", ".join(f"{name} {number}" for name, number in counts.items())
    print(f"{text + ', ' if text else ''}problems {len(problems)}")
    return 1 if problems else 0


# convert


def _convert(directory: Path, out: Path, to: str, splits: list[Split]) -> int:
    bars: list[Progress] = []

    def start(what: str, total: int) -> Progress:
        for bar in bars:
            bar.close()
        bars.append(Progress(f"{what} {directory.name}", total))
        return bars[-1]

    try:
        with Files(directory) as files:
            summary = convert(files, out, to, splits, start)
    finally:
        for bar in bars:
            bar.close()
    print("\n".join(_told(out, to, summary)))
    return 0


def _told(out: Path, to: str, summary: Summary) -> Iterator[str]:
    yield f"{out}: {counted(summary.parameters, 'parameter')}, {_size(summary.bytes)}"
    if to == "bnb_fsdp" and not summary.blocks:
        yield "all state copied bit for bit"
    elif to != "torch":
        kept = summary.blocks - summary.requantized
        yield f"of {summary.blocks} blocks converted, {kept} kept bit for bit, {summary.requantized} requantised"
    for prefix, name in summary.classes.items():
        yield f"{prefix}: state for {name}"
