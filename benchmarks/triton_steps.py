"""Times whole optimizer steps of the Triton backend beside torch.optim and the native CUDA kernels on one GPU.

AdamW with 32-bit and 8-bit state on one 4096 x 4096 float32 tensor, on one of 1024 x 9, on 256 LoRA tensors and on
those of a llama model of 1.2 billion parameters, the latter two in bfloat16. All optimizers run rounds in turn, so
that drift hits all alike; large models have theirs one after the other. Milliseconds are those of completed steps
between CUDA events; the floor is the least traffic over the copy bandwidth measured in the same run. Gate D wants
32-bit Triton at twice the speed of torch.optim eager on the first tensor and not slower on the second. ROCm's torch
runs it too, without the native kernels.
usage: python benchmarks/triton_steps.py [--json OUT] [--rounds 9] [--inventories a,b] [--sweep]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_inventories as inventories
import torch
import triton
from cuda_steps import parameters

import bnb_fsdp
from bnb_fsdp.backends import triton_backend

Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
INVENTORIES: dict[str, tuple[list[tuple[int, ...]], torch.dtype]] = {
    "4096x4096": ([(4096, 4096)], torch.float32),
    "1024x9": ([(1024, 9)], torch.float32),
    "lora256": (inventories.inventory("lora256"), torch.bfloat16),
    "llama1b": (inventories.inventory("llama1b"), torch.bfloat16),
}
EAGER, TRITON, NATIVE = "torch AdamW eager", "bnb_fsdp Triton", "bnb_fsdp CUDA"
_LARGE = 3e8  # elements above which optimizers are not held side by side


def _torch(**kwargs: bool) -> Maker:
    return lambda ps: torch.optim.AdamW(ps, lr=1e-3, **kwargs)


def _ours(bits: int, backend: str) -> Maker:
    kind = bnb_fsdp.AdamW8bit if bits == 8 else bnb_fsdp.AdamW32bit
    # The small tensor, too, has 8-bit state where that is what is timed.
    return lambda ps: kind(ps, lr=1e-3, weight_decay=0.01, min_8bit_size=1, backend=backend)


def makers() -> dict[str, tuple[Maker, int]]:
    """Name -> (constructor, bits of the state, by which the floor is counted; 0: it has the parameter's dtype)."""
    found: dict[str, tuple[Maker, int]] = {
        EAGER: (_torch(foreach=False, fused=False), 0),
        "torch AdamW foreach": (_torch(foreach=True), 0),
        "torch AdamW fused": (_torch(fused=True), 0),
    }
    for bits in (32, 8):
        found[f"{TRITON} {bits}"] = (_ours(bits, "triton"), bits)
        if torch.version.cuda is not None:
            found[f"{NATIVE} {bits}"] = (_ours(bits, "cuda"), bits)
    return found


def measure(
    name: str, chosen: dict[str, tuple[Maker, int]], bandwidth: float, rounds: int
) -> list[dict[str, Any]]:
    """A row for each optimizer on one inventory."""
    shapes, dtype = INVENTORIES[name]
    elements = inventories.numel(shapes)
    groups = [[key] for key in chosen] if elements > _LARGE else [list(chosen)]
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        live = {}
        for key in group:
            maker, bits = chosen[key]
            try:
                optimizer = maker(parameters(shapes, dtype))
                for _ in range(3):  # compiles, allocates
                    optimizer.step()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{name} {key}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            live[key] = optimizer
            size = dtype.itemsize
            traffic = elements * (
                7 * size if bits == 0 else inventories.bytes_per_parameter(2, bits, size, size)
            )
            rows[key] = {
                "inventory": name, "dtype": str(dtype)[6:], "optimizer": key, "tensors": len(shapes),
                "elements": elements, "floor_ms": traffic / bandwidth * 1e3, "rounds": [], "host": [],
            }  # fmt: skip
        for _ in range(rounds):
            for key, optimizer in live.items():
                once = inventories.one_round(optimizer.step, 1)[1]
                device, host = inventories.one_round(optimizer.step, min(50, max(3, int(40 / once))))
                rows[key]["rounds"].append(device)
                rows[key]["host"].append(host)
        live.clear()
        torch.cuda.empty_cache()
    for row in rows.values():
        row["ms"], row["host_ms"] = statistics.median(row["rounds"]), statistics.median(row["host"])
        row["min"], row["max"] = min(row["rounds"]), max(row["rounds"])
        row["ratio"] = row["ms"] / row["floor_ms"]
        faster = f"{rows[EAGER]['ms'] / row['ms']:7.2f} x eager" if EAGER in rows else ""
        print(
            f"{name:10s} {row['optimizer']:22s} {row['ms']:9.4f} ms [{row['min']:.4f}, {row['max']:.4f}]  floor x"
            f"{row['ratio']:7.2f} {faster}",
            flush=True,
        )
    return list(rows.values())


def gate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Gate D's two ratios of torch.optim eager to Triton, both with 32-bit state, and whether they pass."""
    ms = {(row["inventory"], row["optimizer"]): row["ms"] for row in rows}
    found: dict[str, Any] = {}
    for inventory, wanted in (("4096x4096", 2.0), ("1024x9", 1.0)):
        eager, ours = ms.get((inventory, EAGER)), ms.get((inventory, f"{TRITON} 32"))
        if eager is not None and ours is not None:
            found[inventory] = {"ratio": eager / ours, "wanted": wanted, "passed": eager / ours >= wanted}
    return found


def sweep(names: list[str], bandwidth: float, rounds: int) -> Iterator[dict[str, Any]]:
    """The Triton rows with other warps a program and chunks a program (`triton_backend.SHAPES`)."""
    before, triton_backend._PROGRAMS = (
        dict(triton_backend.SHAPES),
        1,
    )  # chunks as given, however few programs are left
    for bits, warps in ((8, (1, 2, 4)), (32, (4, 8, 16))):
        for count in warps:
            for chunks in (1, 4, 16):
                triton_backend.SHAPES[bits] = triton_backend.Shape(count, chunks)
                label = f"{bits} w{count} c{chunks}"
                for name in names:
                    yield from measure(name, {label: (_ours(bits, "triton"), bits)}, bandwidth, rounds)
        triton_backend.SHAPES[bits] = before[bits]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--inventories", default=",".join(INVENTORIES))
    parser.add_argument("--only", default="", help="regular expression of optimizers")
    parser.add_argument("--sweep", action="store_true", help="only Triton, with other launch shapes")
    arguments = parser.parse_args()
    names = arguments.inventories.split(",")
    unknown = [name for name in names if name not in INVENTORIES]
    if unknown:
        parser.error(f"unknown inventory {unknown[0]}; choose among {', '.join(INVENTORIES)}")
    bandwidth = inventories.copy_bandwidth()
    machine = {**inventories.machine(), "triton": triton.__version__, "hip": torch.version.hip}
    print(f"{machine['device']}, torch {machine['torch']}, triton {triton.__version__}, "
          f"copy {bandwidth * 1e-12:.3f} TB/s", flush=True)  # fmt: skip
    if arguments.sweep:
        rows = list(sweep(names, bandwidth, arguments.rounds))
    else:
        chosen = {key: made for key, made in makers().items() if re.search(arguments.only, key)}
        rows = [row for name in names for row in measure(name, chosen, bandwidth, arguments.rounds)]
    result = {
        **machine, "command": " ".join(["python", *sys.argv]), "copy_TB/s": bandwidth * 1e-12, "gate": gate(rows),
        "rows": rows,
    }  # fmt: skip
    for name, entry in result["gate"].items():
        print(f"gate D, {name}: {entry['ratio']:.2f} x eager, wanted {entry['wanted']}: "
              f"{'passed' if entry['passed'] else 'MISSED'}", flush=True)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
