"""Checkpoints of optimizer state: bytes on disk, time and extra memory, beside torch AdamW's, in one run.

    python benchmarks/checkpoints.py --json OUT.json                                  # one process
    torchrun --nproc_per_node=2 benchmarks/checkpoints.py --json OUT.json             # FSDP2 shards, GPUs if there are

A Llama-shaped list of about a billion bfloat16 parameters. Saved and loaded with torch.distributed.checkpoint through
get_optimizer_state_dict, and with `bnb_fsdp.save_checkpoint` (with checksums, model included). Peak memory is what
the process (and on GPUs the allocator) holds beyond what it held before the call; page cache is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cpu_steps import machine
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import bnb_fsdp


class Layer(nn.Module):
    """One Llama layer's parameters."""

    def __init__(self, hidden: int, inner: int, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        for name, rows, columns in (
            ("q", hidden, hidden), ("k", hidden // 4, hidden), ("v", hidden // 4, hidden), ("o", hidden, hidden),
            ("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner),
        ):  # fmt: skip
            self.register_parameter(name, nn.Parameter(torch.full((rows, columns), 0.01, **options)))
        self.norm = nn.Parameter(torch.ones(hidden, **options))


def build(layers: int, hidden: int, device: torch.device) -> nn.Module:
    model = nn.Module()
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    model.embedding = nn.Parameter(torch.full((32000, hidden), 0.01, **options))
    model.layers = nn.ModuleList(Layer(hidden, 4 * hidden, device) for _ in range(layers))
    if dist.is_initialized():
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def resident(peak: bool = False) -> int:
    """Bytes of memory of this process, now or at most since `forget_peak`."""
    key = "VmHWM" if peak else "VmRSS"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak(device: torch.device) -> None:
    Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def measured(function: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds (the slowest rank's) and extra peak memory (this rank's), in bytes."""
    gc.collect()
    forget_peak(device)
    before = resident(), torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    seconds = time.perf_counter() - start
    result = {"seconds": seconds, "extra host bytes": max(0, resident(peak=True) - before[0])}
    if device.type == "cuda":
        result["extra device bytes"] = torch.cuda.max_memory_allocated() - before[1]
    return result


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(
    kind: str, make: Callable[[Any], Any], options: argparse.Namespace, device: torch.device, folder: Path
) -> dict[str, Any]:
    model = build(options.layers, options.hidden, device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = make(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    found: dict[str, Any] = {"parameters": parameters}
    rounds: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds):
        path = folder / f"{kind}{number}"

        def save(path: Path = path) -> None:
            dcp.save(
                {"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path, no_dist=alone
            )

        def load(path: Path = path) -> None:
            values = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(values, checkpoint_id=path, no_dist=alone)
            set_optimizer_state_dict(model, optimizer, values["optimizer"])

        rounds.setdefault("save", []).append(measured(save, device))
        rounds.setdefault("load", []).append(measured(load, device))
        found["bytes on disk"] = size(path)
        if not alone:
            dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
        if kind.startswith("bnb_fsdp"):
            path = folder / f"whole{number}"
            rounds.setdefault("save_checkpoint", []).append(
                measured(lambda path=path: bnb_fsdp.save_checkpoint(path, model, optimizer), device)
            )
            rounds.setdefault("load_checkpoint", []).append(
                measured(lambda path=path: bnb_fsdp.load_checkpoint(path, model, optimizer), device)
            )
            found["bytes on disk, model included"] = size(path)
            if not alone:
                dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
    for name, values in rounds.items():
        found[name] = {
            key: (statistics.median if key == "seconds" else max)(value[key] for value in values)
            for key in values[0]
        }
        found[name]["seconds of each round"] = [round(value["seconds"], 2) for value in values]
    found["bytes a parameter on disk"] = found["bytes on disk"] / parameters
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cpu")
    if "RANK" in os.environ:
        gpus = torch.cuda.is_available()
        if gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if gpus else "gloo")
    elif torch.cuda.is_available():
        device = torch.device("cuda", 0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    name = [tempfile.mkdtemp(dir=options.folder) if rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(name)
    folder = Path(str(name[0]))
    makers: dict[str, Callable[[Any], Any]] = {
        "bnb_fsdp AdamW8bit": lambda ps: bnb_fsdp.AdamW8bit(ps, lr=1e-4),
        "bnb_fsdp AdamW32bit": lambda ps: bnb_fsdp.AdamW32bit(ps, lr=1e-4),
        "torch AdamW (bfloat16 state)": lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True),
    }
    results = {}
    try:
        for kind, make in makers.items():
            results[kind] = run(kind, make, options, device, folder)
            gc.collect()
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        report = {
            **machine(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "largest process, bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "results": results,
        }
        count = results["bnb_fsdp AdamW8bit"]["parameters"]
        print(f"{count / 1e9:.3f} billion parameters, {report['ranks']} ranks, {device}")
        where = "extra device bytes" if device.type == "cuda" else "extra host bytes"
        print(f"{'':30} {'B/param':>8} {'save s':>8} {'load s':>8} {'extra MB saving':>16} {'loading':>8}")
        for kind, found in results.items():
            rows = [(kind, found["bytes a parameter on disk"], "save", "load")]
            if "save_checkpoint" in found:
                whole = found["bytes on disk, model included"] / found["parameters"]
                rows.append(("  save_checkpoint, with model", whole, "save_checkpoint", "load_checkpoint"))
            for label, per, save, load in rows:
                print(
                    f"{label:30} {per:8.3f} {found[save]['seconds']:8.2f} {found[load]['seconds']:8.2f} "
                    f"{found[save][where] / 1e6:16.0f} {found[load][where] / 1e6:8.0f}"
                )
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.2)
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
