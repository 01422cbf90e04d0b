"""``python -m bnb_fsdp doctor``, ``checkpoint ...`` and ``run script.py args...``."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import __version__, backends, factory, rules, state
from .backends import Backend, BucketKey, Slot
from .checkpoint import commands as checkpoint
from .rules import Hyper, Rule

PACKAGES = ("transformers", "accelerate", "peft", "bitsandbytes", "triton")
SLOW = 3
"""Exit status of doctor where everything works, but a device fell back to a slower backend."""

_RUN_HELP = """\
Imports bnb_fsdp, which makes its optimizer names known to transformers, then runs a script or module as
`python script.py args...` or `python -m module args...` would. For command-line tools that never import it:

  python -m bnb_fsdp run train.py --optim bnb_fsdp_adamw8bit
  torchrun --nproc_per_node=2 -m bnb_fsdp run -m package.train --optim bnb_fsdp_lion8bit
  accelerate launch --module bnb_fsdp run train.py --optim bnb_fsdp_adamw8bit
"""

# A fresh process: doctor must work where transformers is broken, and this package never imports it itself.
_TRAINER_PROBE = """\
import json, bnb_fsdp
from transformers.training_args import OptimizerNames
known = {name.value for name in OptimizerNames}
print(json.dumps([name for name in bnb_fsdp.optimizer_names() if name not in known]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Usage errors exit with status 2, as argparse does."""
    own, rest = _split(list(sys.argv[1:] if arguments is None else arguments))
    parser = _parser()
    options, unknown = parser.parse_known_args(own)
    usage_error = getattr(options, "parser", parser).error  # with the command's own usage
    if unknown:
        usage_error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "doctor":
        return doctor(options.json)
    if options.command == "checkpoint":
        return checkpoint.run(options, parser.error)
    if options.command == "run":
        if (options.module is None) == (options.script is None):
            usage_error("give either a script or -m MODULE, then its arguments.")
        problem = run(options.script or options.module, rest, is_module=options.script is None)
        if problem:
            usage_error(problem)
        return 0
    parser.print_help(sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bnb_fsdp", description="8-bit and 32-bit optimizers for FSDP2.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"bnb_fsdp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{doctor,run,checkpoint}")
    check = commands.add_parser(
        "doctor",
        help="show versions, devices and backends, and test every backend; status 1 if a test fails",
        description="Shows what bnb_fsdp finds on this machine and tests every usable backend against the "
        "reference formulas. Exit status: 0 if all is fine, 1 if a test fails or a device has no backend, "
        f"{SLOW} if all works but a device fell back to a slower backend, as a GPU does without the CUDA library.",
    )
    check.set_defaults(parser=check)
    check.add_argument("--json", action="store_true", help="print one JSON object")
    start = commands.add_parser(
        "run",
        help="run a script or module with bnb_fsdp's optimizer names registered",
        description=_RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m bnb_fsdp run [-h] (script.py | -m MODULE) [arguments ...]",
        allow_abbrev=False,
    )
    start.set_defaults(parser=start)
    start.add_argument("-m", dest="module", metavar="MODULE", help="run a module instead of a script")
    start.add_argument("script", nargs="?", help="path of the script")
    checkpoint.add_parser(commands)
    return parser


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and those that belong to what ``run`` runs: all after the script's or module's name."""
    if arguments[:1] != ["run"]:
        return arguments, []
    end = 3 if arguments[1:2] == ["-m"] else 2
    return arguments[:end], arguments[end:]


def run(target: str, arguments: Sequence[str], *, is_module: bool) -> str | None:
    """Run a script or module as ``__main__``; returns what is wrong if there is no such script or module.

    ``sys.argv`` and ``sys.path[0]`` become what Python itself would have set, but for a script's name, which
    becomes absolute (runpy makes it the same as ``__file__``). Exceptions and SystemExit pass.
    """
    sys.argv = [target, *arguments]
    safe_path = getattr(sys.flags, "safe_path", False)  # `python -P`: nothing is put in front of sys.path
    if is_module:
        if not safe_path:
            sys.path[0] = str(Path.cwd())  # so under `python -m` already, not under a console script
        found = _find_module(target)
        if found is None:
            return f"there is no module {target!r} (sys.path[0] is {sys.path[0]!r})."
        if found.submodule_search_locations is not None and _find_module(f"{target}.__main__") is None:
            return f"{target!r} is a package without a module __main__, which is what would run."
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return None
    path = Path(target)
    if not path.exists():
        return f"there is no file {target!r} (in {Path.cwd()}). Modules are run with -m."
    if (path.is_dir() or zipfile.is_zipfile(path)) and not _has_main(path):
        kind = "directory" if path.is_dir() else "zip file"
        return (
            f"{target!r} is a {kind} without __main__.py, which is what would run. Modules are run with -m."
        )
    # runpy sets sys.path[0] itself for directories and zip files.
    if not safe_path and path.suffix != ".zip" and path.is_file():
        sys.path[0] = str(path.resolve().parent)
    runpy.run_path(str(path.absolute()), run_name="__main__")
    return None


def _find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """The module's spec, None if it or a package it lies in is not there. An error in such a package passes."""
    if name.startswith("."):  # relative to nothing
        return None
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return None
        raise
    except ValueError:  # a module that this process made, such as __main__
        return None


def _has_main(path: Path) -> bool:
    """Whether a directory or zip file can be run."""
    return importlib.machinery.PathFinder.find_spec("__main__", [str(path.absolute())]) is not None


def doctor(as_json: bool) -> int:
    """Print what this machine has and whether its backends are right, each part as soon as it is known.

    Returns 1 if a self-test fails or a device has no backend, `SLOW` if one fell back to a slower backend, else 0.
    """
    try:
        requested = backends.check_name(None)
    except ValueError as error:
        print(f"bnb_fsdp doctor: {error}", file=sys.stderr)
        return 1
    report = _report(requested, _show_nothing if as_json else _show)
    if as_json:
        print(json.dumps(report, indent=2))
    if not report["ok"]:
        return 1
    return SLOW if _slow(report["devices"]) else 0


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _show_nothing(lines: Iterable[str]) -> None:
    pass


def _report(requested: str, show: Callable[[Iterable[str]], None] = _show_nothing) -> dict[str, Any]:
    """All that doctor finds. Its text goes to ``show`` part by part, as the last ones take a while."""
    versions = _versions()
    show(f"{name:<14}{version or 'not installed'}" for name, version in versions.items())
    devices, usable = [], []
    for device in _devices():
        entry, found = _backends_of(device, requested)
        devices.append(entry)
        usable += [(device, backend) for backend in found]
    show(["", f"requested backend: {requested}", *_device_lines(devices)])
    libraries = [_library(name) for name in _library_names()]
    show(_library_lines(libraries))
    threads = {"torch": torch.get_num_threads(), "budget": _thread_budget()}
    show([f"threads: torch {threads['torch']}, native CPU steps {threads['budget']}"])
    trainer = _trainer()
    words = {None: "not applicable", True: "registered", False: "NOT registered"}
    show([f"names in transformers: {words[trainer['registered']]} ({trainer['detail']})", ""])
    tests: list[dict[str, Any]] = []
    for device, backend in usable:
        results = list(self_test(backend, device))
        show(_test_lines(f"self-test of {backend.name} on {device}", results))
        tests += results
    # A backend that was asked for by name need not run everywhere; "auto" has to find one for each device.
    served = [entry["backend"] != "none" for entry in devices]
    passed = all(test["ok"] for test in tests)
    report = {
        "ok": passed and (all(served) if requested == "auto" else any(served)),
        "versions": versions,
        "requested_backend": requested,
        "devices": devices,
        "libraries": libraries,
        "threads": threads,
        "trainer": trainer,
        "self_tests": tests,
    }
    show([_verdict(report)])
    return report


def _backends_of(device: torch.device, requested: str) -> tuple[dict[str, Any], list[Backend]]:
    """What a device gets and, if that is not the best there could be, why; and all backends that can run there."""
    found: dict[str, Backend] = {}
    entry: dict[str, Any] = {"device": str(device), "name": _device_name(device), "backend": "none"}
    entry |= {"error": None, "fallback": None}
    for name in dict.fromkeys((requested, *backends.NAMES)):
        backends.say_again()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                backend = backends.select(device, name)
        except (ImportError, RuntimeError, ValueError) as error:
            if name == requested:
                entry["error"] = str(error)
            continue
        if name == requested:
            entry["backend"] = backend.name
            said = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
            entry["fallback"] = " ".join(said) or None
        found.setdefault(backend.name, backend)
    return entry, list(found.values())


def _slow(devices: Sequence[dict[str, Any]]) -> list[str]:
    """Who fell back to what."""
    fallen: dict[str, list[str]] = {}
    for entry in devices:
        if entry["fallback"]:
            fallen.setdefault(entry["backend"], []).append(entry["device"])
    return [
        f"{', '.join(names)} {'uses' if len(names) == 1 else 'use'} the "
        f"{'slow' if backend == 'torch' else 'slower'} {backend} backend"
        for backend, names in fallen.items()
    ]


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of installed packages; None of those that are not."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _versions() -> dict[str, str | None]:
    own = {"bnb_fsdp": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**own, **installed_versions(PACKAGES)}


def _devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    elif torch.backends.mps.is_available():
        found.append(torch.device("mps", 0))
    elif torch.xpu.is_available():
        found += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return torch.xpu.get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} CPUs" if device.type == "cpu" else device.type


def _library_names() -> list[str]:
    """The CPU's; the CUDA one where torch could use it, or where it lies about."""
    from .backends import native

    wanted = torch.version.cuda is not None or native.find("cuda") is not None
    return ["cpu", "cuda"] if wanted else ["cpu"]


def _library(name: str) -> dict[str, str | None]:
    """Path, build and instruction set of one native library, or why there is none."""
    entry: dict[str, str | None] = dict.fromkeys(("path", "build", "instruction_set", "error"))
    entry = {"name": name, **entry}
    try:
        from .backends import cpu, native

        library = native.load(name)
        entry |= {"path": str(library.path), "build": library.build_info()}
        if name == "cpu":
            entry["instruction_set"] = cpu.instruction_set()
    except (ImportError, RuntimeError, ValueError) as error:  # LibraryError is a RuntimeError
        entry["error"] = str(error)
    return entry


def _thread_budget() -> int | str:
    """Threads a step on the native CPU backend may use, or what is wrong with the setting."""
    try:
        from .backends import cpu

        return cpu.thread_budget()
    except (ImportError, RuntimeError, ValueError) as error:
        return str(error)


def _trainer() -> dict[str, Any]:
    """Whether transformers' Trainer knows the optimizer names, tried out in a process of its own."""
    if importlib.util.find_spec("transformers") is None:
        return {"registered": None, "detail": "transformers is not installed"}
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _TRAINER_PROBE],
            check=False, capture_output=True, text=True, timeout=120, env=environment,
        )  # fmt: skip
        if probe.returncode:
            return {"registered": False, "detail": (probe.stderr.strip().splitlines() or ["no message"])[-1]}
        unknown = json.loads(probe.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        return {"registered": False, "detail": f"could not find out: {error}"}
    if unknown:
        return {"registered": False, "detail": f"unknown to transformers: {', '.join(unknown)}"}
    return {"registered": True, "detail": f"all {len(factory.optimizer_names())} names"}


SIZES = (1, 255, 256, 257, 5000)
_STEPS = 3
_HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, beta3=0.999, alpha=2.0, eps=1e-8, weight_decay=0.1)


def self_test(backend: Backend, device: torch.device) -> Iterator[dict[str, Any]]:
    """Step ``backend`` beside `bnb_fsdp.rules`; one result for each rule, bits and dtype.

    States and scales must be equal bit for bit, parameters within one unit in the last place. On CUDA, whose
    reciprocals and square roots are approximate, a code may be the next one, a parameter off by 0.1 % of its update.
    """
    for rule in rules.RULES.values():
        for bits in state.OPTIM_BITS:
            for dtype in state.PARAMETER_DTYPES:
                try:
                    problem = _compare(backend, device, rule, bits, dtype)
                except Exception as error:  # whatever a broken build throws is a finding
                    problem = f"{type(error).__name__}: {error}"
                yield {
                    "backend": backend.name,
                    "device": str(device),
                    "rule": rule.name,
                    "bits": bits,
                    "dtype": str(dtype).removeprefix("torch."),
                    "ok": problem is None,
                    "detail": problem,
                }


def _compare(backend: Backend, device: torch.device, rule: Rule, bits: int, dtype: torch.dtype) -> str | None:
    """The first difference between a bucket of all `SIZES` and the oracle, or None."""
    generator = torch.Generator().manual_seed(0)
    slots = []
    for size in SIZES:
        parameter = torch.randn(size, generator=generator).to(dtype).to(device)
        values = state.allocate(parameter, bits, rule)
        tensors = tuple(values[key] for key in rule.states)
        scales = tuple(values[state.absmax_key(key)] for key in rule.states) if bits == 8 else ()
        slots.append(Slot(f"size {size}", 0, parameter, tensors, scales, values["step"]))
    bucket = backend.bucket(BucketKey(rule.name, bits, dtype, dtype, device), rule, slots)
    for step in range(1, _STEPS + 1):
        gradients = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
        gradients[-1][:300] = 0  # a block of zeros has codes of its own
        before = [slot.parameter.cpu().float() for slot in slots]
        wanted = [_oracle(rule, step, gradient, slot) for gradient, slot in zip(gradients, slots)]
        bucket.run([gradient.to(device) for gradient in gradients], [_HYPER])
        for slot, start, (parameter, tensors) in zip(slots, before, wanted):
            names = (*rule.states, *(state.absmax_key(key) for key in rule.states))
            for name, tensor, found in zip(names, tensors, (*slot.states, *slot.absmax)):
                if not _agree(tensor, found.cpu(), exact=backend.name != "cuda"):
                    return f"{slot.name}, step {step}: {name} differs"
            found = slot.parameter.cpu()
            distance = (_ordered(parameter) - _ordered(found)).abs()
            allowed = distance <= 1
            if backend.name == "cuda":
                error = (parameter.float() - found.float()).abs()
                allowed |= (distance <= 2) | (error <= 1e-3 * (parameter.float() - start).abs())
            if not bool(allowed.all()):
                return f"{slot.name}, step {step}: a parameter is {int(distance.max())} units in the last place off"
    return None


def _oracle(rule: Rule, step: int, gradient: Tensor, slot: Slot) -> tuple[Tensor, tuple[Tensor, ...]]:
    parameter = slot.parameter.cpu().clone()
    states = tuple(tensor.cpu().clone() for tensor in slot.states)
    scales = tuple(tensor.cpu().clone() for tensor in slot.absmax)
    if scales:
        parameter, states, scales = rules.step8(rule, _HYPER, step, gradient, parameter, states, scales)
        return parameter, (*states, *scales)
    return rules.step32(rule, _HYPER, step, gradient, parameter, states)


def _agree(wanted: Tensor, found: Tensor, exact: bool) -> bool:
    """Equal bits; for a backend with approximate instructions, codes one apart in a hundredth of the places."""
    if torch.equal(_bits(wanted), _bits(found)):
        return True
    if exact or wanted.dtype != torch.uint8:
        return False
    apart = (wanted.int() - found.int()).abs()
    return int(apart.max()) <= 1 and int((apart > 0).sum()) <= max(1, wanted.numel() // 100)


def _bits(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.int32)


def _ordered(tensor: Tensor) -> Tensor:
    """Integers in the order of the floats, neighbours one apart."""
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    bits = tensor.view(kind).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def _device_lines(devices: Sequence[dict[str, Any]]) -> Iterator[str]:
    said: set[str] = set()
    for entry in devices:
        yield f"device {entry['device']} ({entry['name']}): backend {entry['backend']}"
        reason = entry["error"] or entry["fallback"]
        if reason and reason not in said:
            said.add(reason)
            yield f"    {reason}"


def _library_lines(libraries: Sequence[dict[str, str | None]]) -> Iterator[str]:
    for library in libraries:
        if library["error"]:
            yield f"library {library['name']}: cannot be used: {library['error']}"
        else:
            yield f"library {library['name']}: {library['path']}"
            instructions = library["instruction_set"]
            yield f"    {library['build']}" + (f", instruction set {instructions}" if instructions else "")


def _test_lines(title: str, tests: Sequence[dict[str, Any]]) -> Iterator[str]:
    failed = [test for test in tests if not test["ok"]]
    yield f"{title}: {len(tests) - len(failed)} of {len(tests)} passed"
    for test in failed:
        yield f"    FAILED {test['rule']} {test['bits']}-bit {test['dtype']}: {test['detail']}"


def _verdict(report: dict[str, Any]) -> str:
    if not all(test["ok"] for test in report["self_tests"]):
        return "a self-test failed: do not train with this backend"
    unserved = [entry["device"] for entry in report["devices"] if entry["backend"] == "none"]
    if len(unserved) == len(report["devices"]):
        return "no device can use the requested backend"
    if not report["ok"]:
        return f"{', '.join(unserved)} cannot be used: the reason is above"
    slow = _slow(report["devices"])
    return f"works, but {' and '.join(slow)}: the reason is above" if slow else "all is fine"
