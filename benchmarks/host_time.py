"""Host time of `optimizer.step()` for many small parameters, plain and DTensor: the native look beside Python's.

    python benchmarks/host_time.py --output benchmarks/results/host_time

writes OUTPUT.json and prints a table of nanoseconds a parameter, medians over the rounds. "gather" is the look at
parameters, state and gradients, "update" the call that updates (on CUDA: that queues the update; the device is waited
for between the steps, untimed), "rest" everything else: hyperparameters, version counters, the wrappers of torch.optim.
"same" gradients are stepped with again and again, caches warm; "new" ones come from a backward pass before each step
(DTensors: are made with the parameter's spec, as FSDP2 does it), which also leaves the caches cold, as training does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cpu_steps import machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bnb_fsdp
from bnb_fsdp.backends.gather import Gatherer

SHAPE = (16, 16)
PARTS = ("step", "gather", "update", "rest")


class Timed:
    """A bucket that adds up how long its updates take."""

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket
        self.seconds = 0.0
        if not hasattr(bucket, "run_pointers"):
            del self.run_pointers

    def _timed(self, function: Callable[..., None], *args: Any) -> None:
        start = time.perf_counter()
        function(*args)
        self.seconds += time.perf_counter() - start

    def run(self, *arguments: Any) -> None:
        self._timed(self.bucket.run, *arguments)

    def run_pointers(self, *arguments: Any) -> None:
        self._timed(self.bucket.run_pointers, *arguments)


def parameters(count: int, sharded: bool, device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    tensors = [torch.randn(SHAPE, device=device) for _ in range(count)]
    if sharded:
        mesh = init_device_mesh(device.type, (1,))
        tensors = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in tensors]
    return [nn.Parameter(tensor) for tensor in tensors]


def new_gradients(parameters: list[nn.Parameter]) -> None:
    if isinstance(parameters[0], DTensor):
        for p in parameters:
            p.grad = DTensor(torch.randn_like(p._local_tensor), p._spec, requires_grad=False)
        return
    for p in parameters:
        p.grad = None
    torch.stack([p.square().sum() for p in parameters]).sum().backward()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(optimizer: Any, renew: Callable[[], None], rounds: int, device: torch.device) -> dict[str, float]:
    """Median nanoseconds a parameter of each part of a step."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    for _ in range(3):
        renew()
        optimizer.step()
    plan = optimizer._plan
    buckets = [Timed(bucket.prepared) for bucket in plan._buckets]
    for bucket, timed in zip(plan._buckets, buckets):
        bucket.prepared = timed
    gather, looked = plan.gather, 0.0

    def timed_gather(*args: Any) -> bool:
        nonlocal looked
        start = time.perf_counter()
        current: bool = gather(*args)
        looked += time.perf_counter() - start
        return current

    plan.gather = timed_gather
    samples = []
    for _ in range(rounds):
        renew()
        wait(device)
        looked = 0.0
        for timed in buckets:
            timed.seconds = 0.0
        start = time.perf_counter()
        optimizer.step()
        total = time.perf_counter() - start
        update = sum(timed.seconds for timed in buckets)
        samples.append((total, looked, update, total - looked - update))
    assert optimizer._plan is plan
    medians = (statistics.median(part) for part in zip(*samples))
    return {name: 1e9 * seconds / count for name, seconds in zip(PARTS, medians)}


@contextlib.contextmanager
def path(native: bool) -> Iterator[None]:
    make = Gatherer.make
    if not native:
        Gatherer.make = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Gatherer.make = make  # type: ignore[method-assign]


def cases(count: int, rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    for sharded in (False, True):
        for fresh in (False, True):
            for native in (False, True):
                ps = parameters(count, sharded, device)
                new_gradients(ps)
                with path(native):
                    optimizer = bnb_fsdp.AdamW8bit(ps, lr=1e-4, min_8bit_size=0)
                    nanoseconds = measure(
                        optimizer,
                        (lambda ps=ps: new_gradients(ps)) if fresh else lambda: None,
                        rounds,
                        device,
                    )
                if native and optimizer._plan._gatherer is None:
                    print("there is no native look here: Python's was measured twice")
                yield {
                    "parameters": "DTensor" if sharded else "plain",
                    "gradients": "new" if fresh else "same",
                    "look": "native" if native else "Python",
                    "nanoseconds_a_parameter": nanoseconds,
                }


def table(report: dict[str, Any]) -> str:
    count = report["count"]
    lines = [
        f"| {count} parameters | gradients | look | step, ms | without update, ms | gather, ns | update, ns | rest, ns"
        " |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in report["cases"]:
        ns = case["nanoseconds_a_parameter"]
        outside = (ns["step"] - ns["update"]) * count * 1e-6
        lines.append(
            f"| {case['parameters']} | {case['gradients']} | {case['look']} | {ns['step'] * count * 1e-6:.3f} | "
            f"{outside:.3f} | {ns['gather']:.0f} | {ns['update']:.0f} | {ns['rest']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="path without suffix for the .json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    report = {
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "count": arguments.count,
        "rounds": arguments.rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            report["cases"] = list(cases(arguments.count, arguments.rounds, device))
        finally:
            dist.destroy_process_group()
    print(table(report))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
