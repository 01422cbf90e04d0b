"""The parts "failure" and "steps" of `fsdp2_evidence.py`: who can step under FSDP2, how fast, in how much memory."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import cuda_inventories as inventories
import evidence_common as shared
import torch
from torch import Tensor

OURS = "bnb_fsdp "
SETTINGS = {"lr": 1e-4, "weight_decay": 0.01}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _ours(name: str, params: list[Tensor]) -> Any:
    import bnb_fsdp

    return getattr(bnb_fsdp, name)(params, **SETTINGS)


def _torch_fused(params: list[Tensor]) -> Any:
    return torch.optim.AdamW(params, fused=True, **SETTINGS)


def _flashoptim(params: list[Tensor]) -> Any:
    import flashoptim

    return flashoptim.FlashAdamW(params, master_weight_bits=None, **SETTINGS)


def _torchao(params: list[Tensor]) -> Any:
    import torchao.optim

    return torchao.optim.AdamW8bit(params, **SETTINGS)


def _bitsandbytes(name: str, params: list[Tensor]) -> Any:
    import bitsandbytes

    return getattr(bitsandbytes.optim, name)(params, **SETTINGS)


Maker = Callable[[list[Tensor]], Any]
# Whoever may leave the device in a bad state comes last.
MAKERS: dict[str, Maker] = {
    f"{OURS}AdamW8bit": functools.partial(_ours, "AdamW8bit"),
    f"{OURS}AdamW32bit": functools.partial(_ours, "AdamW32bit"),
    "torch AdamW fused": _torch_fused,
    "flashoptim AdamW": _flashoptim,
    "torchao AdamW8bit": _torchao,
    "bitsandbytes AdamW8bit": functools.partial(_bitsandbytes, "AdamW8bit"),
}


def _missing(optimizer: str) -> str | None:
    """What has to be installed first, in words."""
    package = optimizer.split()[0]
    return None if importlib.util.find_spec(package) else f"the package {package} is not installed"


# --- failure ------------------------------------------------------------------------------------------


def failure(options: argparse.Namespace, process: shared.Process) -> list[dict[str, Any]]:
    """The first step of bitsandbytes' optimizers on a small sharded model, and of ours on the same."""
    makers: dict[str, Maker] = {
        f"{OURS}AdamW8bit": functools.partial(_ours, "AdamW8bit"),
        **{
            f"bitsandbytes {name}": functools.partial(_bitsandbytes, name)
            for name in ("AdamW8bit", "AdamW32bit", "Lion8bit")
        },
    }
    small = argparse.Namespace(**{**vars(options), "tiny": True})
    return [_first_step(name, make, small, process) for name, make in makers.items()]


def _first_step(
    name: str, make: Maker, options: argparse.Namespace, process: shared.Process
) -> dict[str, Any]:
    missing = _missing(name)
    if missing:
        return {"optimizer": name, "not_run": missing}
    # In bfloat16 weights of 1 would not move by the learning rate.
    model = shared.build(options, process, torch.float32)
    params = list(model.parameters())
    optimizer = make(params)
    before = [p.to_local().detach().clone() for p in params]
    shared.forward_backward(model, shared.batches(options, process, 1)[0])
    error = shared.attempt(optimizer.step)
    synchronised = shared.attempt(lambda: shared.synchronize(process))
    changed = sum(not torch.equal(old, p.to_local()) for old, p in zip(before, params))
    report = {
        "optimizer": name, "parameters": "float32", "error": error, "error_at_synchronize": synchronised,
        "tensors": len(params),
        "tensors_changed": changed,
        "tensors_here": sum(p.to_local().numel() > 0 for p in params),
    }  # fmt: skip
    by_rank = shared.gather(report)
    return {
        **report,
        "ranks": [{key: row[key] for key in ("error", "tensors_changed", "tensors_here")} for row in by_rank],
    }


# --- steps --------------------------------------------------------------------------------------------


def steps(
    options: argparse.Namespace, process: shared.Process, save: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Every optimizer on the same model and data, with parameters of both dtypes; ``save`` gets the rows so far."""
    alone = process.device.type == "cuda" and process.ranks_per_gpu == 1
    bandwidth = inventories.copy_bandwidth() if alone else None
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for name, make in MAKERS.items():
            if not re.search(options.only, name):
                continue
            missing = _missing(name)
            measured = {"not_run": missing} if missing else _measure(make, dtype, options, process)
            row = {"optimizer": name, "dtype": dtype, **measured}
            if bandwidth is not None and name.startswith(OURS) and "optimizer_ms" in row:
                width = DTYPES[dtype].itemsize
                bits = 8 if "8bit" in name else 32
                traffic = inventories.bytes_per_parameter(2, bits, width, width) * row["local_parameters"][0]
                row["floor_ms"] = traffic / bandwidth * 1e3
            rows.append(row)
            shared.free(process)
            save(rows)
            shown = row.get("optimizer_ms", {}).get("median")
            text = row.get("error") or row.get("not_run") or f"{row['steps']} steps"
            text = text if shown is None else f"{shown:.3f} ms a step"
            process.say(f"{dtype} {name}: {str(text)[:150]}")


def _measure(make: Maker, dtype: str, options: argparse.Namespace, process: shared.Process) -> dict[str, Any]:
    cuda = process.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    model = shared.build(options, process, DTYPES[dtype])
    params = list(model.parameters())
    data = shared.batches(options, process, options.warmup + options.steps + 1)
    build_peak = torch.cuda.max_memory_allocated() if cuda else None
    # Counted anew: while it was made, the whole model was on this rank. What a forward and backward keep (workspaces)
    # is there before the optimizer is.
    shared.forward_backward(model, data[-1])
    for p in params:
        p.grad = None
    shared.free(process)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if cuda else 0

    made: list[Any] = []
    error = shared.attempt(lambda: made.append(make(params)))
    by_rank = shared.gather(error)
    if any(by_rank):
        return {"error": next(text for text in by_rank if text), "errors": by_rank}
    optimizer = made[0]

    started, last, warmed = time.perf_counter(), 0.0, 0
    losses: list[Tensor] = []
    # Never one alone: it may be the compiler's time.
    while warmed < options.warmup and (warmed < 2 or time_left(options, started)):
        before = time.perf_counter()
        losses.append(shared.forward_backward(model, data[warmed]))
        error = shared.attempt(lambda: (optimizer.step(), shared.synchronize(process)))
        # All stop together: a rank that failed would leave the others waiting in the next forward.
        by_rank = shared.gather(error)
        if any(by_rank):
            return {
                "error": next(text for text in by_rank if text),
                "failed_at_step": warmed + 1,
                "errors": by_rank,
            }
        optimizer.zero_grad()
        warmed += 1
        last = time.perf_counter() - before
    held = torch.cuda.memory_allocated() - base if cuda else None
    budget = options.seconds_per_optimizer
    left = max(budget - (time.perf_counter() - started), 0.1 * budget)
    # Decided once and together: in the loop nobody may wait for anybody.
    count = min(shared.gather(max(1, min(options.steps, int(left / max(last, 1e-9))))))
    times = _timed_steps(model, optimizer, data[warmed : warmed + count], losses, cuda)
    mean = shared.mean_over_ranks(losses)
    here = {
        "local_parameters": sum(p.to_local().numel() for p in params),
        "state_bytes": shared.state_bytes(optimizer),
        "held_bytes": held,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "build_peak_allocated_bytes": build_peak,
    }
    by_rank = shared.gather(here)
    return {
        "tensors": len(params), "parameters": sum(p.numel() for p in params), "warmup_steps": warmed,
        "steps": count, "steps_wanted": options.steps,
        **{key: [row[key] for row in by_rank] for key in here},
        **({} if process.ranks_per_gpu > 1 else _of_the_slowest(times)),
        "loss_first": mean[0], "loss_last": mean[-1], "losses_finite": all(map(math.isfinite, mean)),
    }  # fmt: skip


def _of_the_slowest(times: dict[str, list[float]]) -> dict[str, Any]:
    """Median times of step() of every rank, and all times of the one whose is longest."""
    by_rank = shared.gather(times)
    medians = [statistics.median(each["optimizer_ms"]) for each in by_rank]
    slowest = medians.index(max(medians))
    return {
        "optimizer_median_ms": medians, "timed_rank": slowest,
        **{key: spread(values) for key, values in by_rank[slowest].items()},
    }  # fmt: skip


def time_left(options: argparse.Namespace, started: float) -> bool:
    """Whether all ranks are within the time that one optimizer has."""
    spent = max(shared.gather(time.perf_counter() - started))
    return bool(spent < options.seconds_per_optimizer)


def _timed_steps(
    model: Any, optimizer: Any, data: Tensor, losses: list[Tensor], cuda: bool
) -> dict[str, list[float]]:
    """Milliseconds of each step(), of each iteration (from step to step), and of each call on the host.

    Nothing waits for the device until all steps are queued. An exception here ends the program: see `_measure`.
    """

    def stamp() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(a: Any, b: Any) -> float:
        return float(a.elapsed_time(b)) if cuda else (b - a) * 1e3

    starts, ends, calls = [], [stamp()], []
    for tokens in data:
        losses.append(shared.forward_backward(model, tokens))
        starts.append(stamp())
        before = time.perf_counter()
        optimizer.step()
        calls.append((time.perf_counter() - before) * 1e3)
        ends.append(stamp())
        optimizer.zero_grad()
    if cuda:
        torch.cuda.synchronize()
    return {
        "optimizer_ms": [between(a, b) for a, b in zip(starts, ends[1:])],
        "iteration_ms": [between(a, b) for a, b in itertools.pairwise(ends)],
        "call_ms": calls,
    }


def spread(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[8], "count": len(values)}
