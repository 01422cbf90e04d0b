"""Every class on every backend in every dtype, against the rules: the family's matrix, by one command.

    python benchmarks/family_matrix.py [--json OUT.json] [--classes LAMB8bit,Lion] [--backends cpu,torch]

Each cell is an optimizer of three tensors (8-bit state with a partial last block, one below min_8bit_size, zeros)
stepped four times. After each step parameters, states, scales and step counts are compared with `bnb_fsdp.rules` on
the values that the backend had before the step; trust ratios and schedules are computed here, by their formulas (LAMB
and LARS in both trust ratios). Printed:

    =   bit-equal
    ~   within tolerance. cpu and torch, LAMB and LARS alone, whose norms are summed in another order: parameters 2
        units in the last place, states and scales 1e-6, codes one apart in at most 1 of 1,000. triton and cuda, with
        approximate divisions: parameters 2 units and 1e-4 of the learning rate, states and scales 1e-5, codes one
        apart in at most 1 of 200
    -   not available here, with the reason below the table
    X   failed, with what and where below the table; the exit status is then 1

Without a GPU Triton runs in its interpreter. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from cpu_steps import machine
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import bnb_fsdp
from bnb_fsdp import arithmetic, backends, rules
from bnb_fsdp.backends.native import LibraryError
from bnb_fsdp.rules import Hyper, Rule

CLASSES = [name for name in bnb_fsdp.optim.__all__ if name != "BlockwiseOptimizer"]
BACKENDS = ("cpu", "torch", "triton", "cuda")
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32, bf16 gradient": (torch.float32, torch.bfloat16),
}
STEPS = 4
MINIMUM = 1000  # of elements with 8-bit state
SIZES = (5 * 256 + 77, 300, 1024)

SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6),
    "AdamW": dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
    "Lion": dict(lr=3e-3, betas=(0.9, 0.97), weight_decay=0.1),
    "SGD": dict(lr=2e-2, momentum=0.9, weight_decay=0.1),
    "RMSprop": dict(lr=2e-3, alpha=0.95, eps=1e-6, weight_decay=0.1),
    "Adagrad": dict(lr=1e-2, eps=1e-8, weight_decay=0.1),
    "AdEMAMix": dict(
        lr=1e-2, betas=(0.9, 0.99, 0.999), alpha=3.0, t_alpha=3, t_beta3=9, eps=1e-8, weight_decay=0.1
    ),
    "LAMB": dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, max_unorm=0.5),
    "LARS": dict(lr=0.5, momentum=0.9, weight_decay=0.1, max_unorm=0.02),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "LAMB": {**SETTINGS["LAMB"], "max_unorm": 1.0, "trust_ratio": "published"},
    "LARS": {**SETTINGS["LARS"], "trust_ratio": "published"},
}
RULES = {
    "Adam": rules.ADAM, "AdamW": rules.ADAM, "Lion": rules.LION, "SGD": rules.MOMENTUM, "RMSprop": rules.RMSPROP,
    "Adagrad": rules.ADAGRAD, "AdEMAMix": rules.ADEMAMIX, "LAMB": rules.ADAM, "LARS": rules.MOMENTUM,
}  # fmt: skip


def family(name: str) -> str:
    return name.removeprefix("Paged").removesuffix("32bit").removesuffix("8bit")


def hyper(kind: str, settings: dict[str, Any], step: int) -> Hyper:
    """What the rule of this family takes at this step; the schedule is the paper's equations 2 and 3."""
    first = settings.get("momentum", settings.get("alpha", 0.0) if kind == "RMSprop" else 0.0)
    betas = settings.get("betas", (first, 0.0))
    alpha, beta3 = 0.0, 0.0
    if kind == "AdEMAMix":
        progress = step / settings["t_beta3"]
        alpha = settings["alpha"] * min(1.0, step / settings["t_alpha"])
        inverse = (1 - progress) / math.log(betas[0]) + progress / math.log(betas[2])
        beta3 = min(math.exp(1 / inverse), betas[2]) if progress < 1 else betas[2]
    return Hyper(
        lr=settings["lr"],
        beta1=betas[0],
        beta2=betas[1],
        beta3=beta3,
        alpha=alpha,
        eps=settings.get("eps", 0.0),
        weight_decay=settings.get("weight_decay", 0.0),
        published=settings.get("trust_ratio") == "published",
    )


def scale(
    kind: str, settings: dict[str, Any], rule: Rule, h: Hyper, step: int, g: Tensor, held: list[Tensor]
) -> float:
    """LAMB's and LARS' factor, by the formulas in their docstrings."""
    p, *rest = held
    count = len(rule.states)
    if len(rest) > count:
        u = rules.direction8(rule, h, step, g, p, tuple(rest[:count]), tuple(rest[count:]))
    else:
        u = rules.direction32(rule, h, step, g, p, tuple(rest))
    update, size = float(u.double().norm()), float(p.double().norm())
    if size == 0 or update == 0:
        return 1.0
    limit = settings["max_unorm"]
    if not h.published:
        return min(1.0, limit * size / update)
    return size / update if kind == "LAMB" else limit * size / (update + settings["weight_decay"] * size)


def expected(kind: str, settings: dict[str, Any], step: int, g: Tensor, held: list[Tensor]) -> list[Tensor]:
    """Parameter, states and scales after the step, from those before it (all flat)."""
    rule, h = RULES[kind], hyper(kind, settings, step)
    if kind in PUBLISHED:
        h = h._replace(update_scale=arithmetic.scalar(scale(kind, settings, rule, h, step, g, held)))
    p, *rest = held
    count = len(rule.states)
    if len(rest) > count:
        new, codes, absmax = rules.step8(rule, h, step, g, p, tuple(rest[:count]), tuple(rest[count:]))
        return [new, *codes, *absmax]
    new, values = rules.step32(rule, h, step, g, p, tuple(rest))
    return [new, *values]


def held_by(optimizer: Any, p: nn.Parameter) -> list[Tensor]:
    """Copies on the CPU: parameter, states, scales; zeros before the first step."""
    state, rule = optimizer.state.get(p, {}), optimizer.rule
    if not state:
        eight = optimizer.param_groups[0]["optim_bits"] == 8 and p.numel() >= MINIMUM
        kind, blocks = (torch.uint8, -(-p.numel() // 256)) if eight else (torch.float32, 0)
        scales = [torch.zeros(blocks) for _ in rule.states] if eight else []
        return [p.detach().cpu().clone(), *(torch.zeros(p.numel(), dtype=kind) for _ in rule.states), *scales]
    keys = [*rule.states, *(key.replace("state", "absmax") for key in rule.states)]
    return [p.detach().cpu().clone(), *(state[key].cpu().clone() for key in keys if key in state)]


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


class Tolerance(NamedTuple):
    """Of parameters in parts of the learning rate, of states and scales, and codes that may be one apart."""

    parameter: float
    state: float
    codes: float


EXACT = Tolerance(2e-7, 1e-6, 1 / 1000)  # 2e-7 is an ulp of the parameters' largest values
APPROXIMATE = Tolerance(1e-4, 1e-5, 1 / 200)


def compare(found: list[Tensor], wanted: list[Tensor], lr: float, allowed: Tolerance) -> tuple[bool, str]:
    """(bit-equal, what is out of tolerance)."""
    if all(torch.equal(bits(a), bits(b)) for a, b in zip(found, wanted, strict=True)):
        return True, ""
    for index, (a, b) in enumerate(zip(found, wanted)):
        what = "parameter" if index == 0 else f"tensor {index} of {len(found)}"
        if a.dtype == torch.uint8:
            apart = (a.int() - b.int()).abs()
            if apart.max() > 1 or (apart > 0).float().mean() > allowed.codes:
                return False, f"{what}: {int((apart > 0).sum())} codes differ, by {int(apart.max())} at most"
            continue
        rtol, atol = allowed.state, allowed.state * float(b.float().abs().max())
        if index == 0:
            rtol, atol = 2 * torch.finfo(a.dtype).eps, allowed.parameter * lr
        apart = (a.float() - b.float()).abs()
        if not bool((apart <= rtol * b.float().abs() + atol).all()):
            return False, f"{what}: {float(apart.max()):.2e} apart"
    return False, ""


def gradient(p: nn.Parameter, step: int, index: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + step)
    spread = 10 ** (3 * torch.rand(p.numel(), generator=generator) - 3)
    return (torch.randn(p.numel(), generator=generator) * spread).to(dtype).to(p.device)


def run(name: str, backend: str, dtype: str, device: torch.device, settings: dict[str, Any]) -> str:
    """ "equal" or "within tolerance"; raises AssertionError with what is wrong."""
    kind, (p_dtype, g_dtype) = family(name), DTYPES[dtype]
    starts = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in SIZES]
    starts[-1].zero_()
    params = [nn.Parameter(start.to(p_dtype).to(device, copy=True)) for start in starts]
    optimizer = getattr(bnb_fsdp, name)(params, min_8bit_size=MINIMUM, backend=backend, **settings)
    equal, allowed = True, EXACT if backend in ("cpu", "torch") else APPROXIMATE
    for step in range(1, STEPS + 1):
        for index, p in enumerate(params):
            if g_dtype is not p_dtype:
                p.grad_dtype = None  # type: ignore[attr-defined]
            p.grad = gradient(p, step, index, g_dtype)
        before = [held_by(optimizer, p) for p in params]
        optimizer.step()
        for index, (p, held) in enumerate(zip(params, before)):
            assert p.grad is not None
            wanted = expected(kind, settings, step, p.grad.cpu(), held)
            same, problem = compare(held_by(optimizer, p), wanted, settings["lr"], allowed)
            assert same or kind in PUBLISHED or allowed is APPROXIMATE, (
                f"step {step}: not bit-equal. {problem}"
            )
            assert not problem, f"step {step}, {SIZES[index]} elements: {problem}"
            assert int(optimizer.state[p]["step"]) == step, f"step count {optimizer.state[p]['step']}"
            equal &= same
    moved = [float((p.detach().cpu() - start.to(p_dtype)).abs().max()) for p, start in zip(params, starts)]
    assert min(moved) > 0, f"a parameter did not move: {moved}"
    return "equal" if equal else "within tolerance"


def cell(name: str, backend: str, dtype: str, device: torch.device) -> dict[str, str]:
    results = []
    for settings in (SETTINGS[family(name)], PUBLISHED.get(family(name))):
        if settings is None:
            continue
        try:
            results.append(run(name, backend, dtype, device, settings))
        except Exception as error:
            rule = f" ({settings['trust_ratio']})" if "trust_ratio" in settings else ""
            return {"result": "failed", "reason": f"{type(error).__name__}{rule}: {error}"}
    return {"result": max(results)}  # "within tolerance" > "equal"


def available(backend: str) -> tuple[torch.device, str]:
    """(device, reason why the backend cannot be had, or nothing)."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu and backend in ("cuda", "triton") else "cpu")
    if backend == "cuda" and not gpu:
        return device, "needs an NVIDIA GPU"
    if backend not in backends.NAMES:
        return device, "this version has no such backend"
    try:
        backends.select(device, backend)
    except LibraryError:
        return device, "its library is not built"
    except RuntimeError as error:
        missing = isinstance(error.__cause__, LibraryError)
        return device, "its library is not built" if missing else str(error).splitlines()[0]
    return device, ""


def matrix(names: list[str], chosen: list[str]) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """(class, backend, dtype, cell)."""
    reached = {backend: available(backend) for backend in chosen}
    for name in names:
        for backend in chosen:
            device, reason = reached[backend]
            for dtype in DTYPES:
                if reason:
                    yield name, backend, dtype, {"result": "not available", "reason": reason}
                else:
                    yield name, backend, dtype, cell(name, backend, dtype, device)


def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "not installed"


def as_text(found: dict[str, str]) -> str:
    """A cell for the JSON file; why a backend is not available is said once there."""
    return f"failed: {found['reason']}" if found["result"] == "failed" else found["result"]


SYMBOLS = {"equal": "=", "within tolerance": "~", "not available": "-", "failed": "X"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the cells, date, versions and machine there")
    parser.add_argument("--classes", default=",".join(CLASSES), help="some of them, by commas")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="some of them, by commas")
    arguments = parser.parse_args()
    names, chosen = arguments.classes.split(","), arguments.backends.split(",")
    for given, known in ((names, CLASSES), (chosen, list(BACKENDS))):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"{', '.join(unknown)}: not known; choose from {', '.join(known)}")
    warnings.filterwarnings("ignore", message=".*it works as the unpaged class")
    width, column = max(map(len, names)), 1 + sum(len(dtype) + 2 for dtype in DTYPES)
    print(" " * width + "".join(f"  {backend:<{column}}" for backend in chosen))
    heads = "".join(f" {dtype} " for dtype in DTYPES)
    print(" " * width + "".join(f"  {heads:<{column}}" for _ in chosen))
    cells: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
    for name, backend, dtype, found in matrix(names, chosen):
        cells.setdefault(name, {}).setdefault(backend, {})[dtype] = found
        if backend == chosen[-1] and dtype == list(DTYPES)[-1]:
            row = ""
            for own in cells[name].values():
                marks = "".join(f" {SYMBOLS[one['result']]:^{len(dtype)}} " for dtype, one in own.items())
                row += f"  {marks:<{column}}"
            print(f"{name:<{width}}{row}", flush=True)
    every = [
        (name, backend, dtype, found)
        for name, by_backend in cells.items()
        for backend, by_dtype in by_backend.items()
        for dtype, found in by_dtype.items()
    ]
    counts = {result: sum(found["result"] == result for *_, found in every) for result in SYMBOLS}
    print("\n" + ", ".join(f"{SYMBOLS[result]} {result}: {count}" for result, count in counts.items()))
    missing = {b: f["reason"] for _, b, _, f in every if f["result"] == "not available"}
    for backend, reason in missing.items():
        print(f"- {backend}: {reason}")
    for name, backend, dtype, found in every:
        if found["result"] == "failed":
            print(f"X {name}, {backend}, {dtype}: {found['reason']}")
    if arguments.json:
        report = {
            "command": "python benchmarks/family_matrix.py --json OUT.json",
            "machine": machine(),
            "triton": triton_version(),
            "triton_interpreted": os.environ.get("TRITON_INTERPRET") == "1",
            "counts": counts,
            "not_available": missing,
            "cells": {
                name: {
                    backend: {dtype: as_text(found) for dtype, found in by_dtype.items()}
                    for backend, by_dtype in by_backend.items()
                }
                for name, by_backend in cells.items()
            },
        }
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
