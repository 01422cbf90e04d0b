"""Times whole optimizer steps on one GPU: this package and its peers on the same tensors in one process.

For each inventory (lists of tensors as LoRA, mixed and full models have them) every optimizer runs rounds in turn,
so that drift hits all alike. Device and host milliseconds are those of completed steps (everything queued is waited
for); "call" is the host time until step() returns. The floor is the traffic of an 8-bit AdamW step over the copy
bandwidth measured in the same run; rows of other algorithms carry their own floor.
usage: python benchmarks/cuda_steps.py [--json OUT] [--png OUT] [--dtype bfloat16] [--inventories a,b] [--only REGEX]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_inventories as inventories
import torch

ROUNDS = 9
Maker = Callable[[list[torch.nn.Parameter]], Any]


def makers(dtype: torch.dtype) -> dict[str, tuple[Maker, tuple[int, int]]]:
    """Name -> (constructor, (states, bits) that its floor counts)."""
    import bnb_fsdp

    found: dict[str, tuple[Maker, tuple[int, int]]] = {
        "bnb_fsdp AdamW8bit": (lambda ps: bnb_fsdp.AdamW8bit(ps, lr=1e-3), (2, 8)),
        "bnb_fsdp AdamW32bit": (lambda ps: bnb_fsdp.AdamW32bit(ps, lr=1e-3), (2, 32)),
        "bnb_fsdp Lion8bit": (lambda ps: bnb_fsdp.Lion8bit(ps, lr=1e-4), (1, 8)),
        "torch AdamW fused": (lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), (2, 8)),
        "torch AdamW foreach": (lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True), (2, 8)),
    }
    try:
        import bitsandbytes as bnb

        found |= {
            "bitsandbytes AdamW8bit": (lambda ps: bnb.optim.AdamW8bit(ps, lr=1e-3), (2, 8)),
            "bitsandbytes AdamW 32-bit": (lambda ps: bnb.optim.AdamW(ps, lr=1e-3), (2, 32)),
            "bitsandbytes Lion8bit": (lambda ps: bnb.optim.Lion8bit(ps, lr=1e-4), (1, 8)),
            "bitsandbytes AdamW8bit, our kernels": (lambda ps: bnb.optim.AdamW8bit(ps, lr=1e-3), (2, 8)),
        }
    except Exception:
        traceback.print_exc()
    try:
        import torchao.optim as ao

        found["torchao AdamW8bit"] = (lambda ps: ao.AdamW8bit(ps, lr=1e-3), (2, 8))
    except Exception:
        traceback.print_exc()
    try:
        import flashoptim as flash

        found["flashoptim AdamW"] = (
            lambda ps: flash.FlashAdamW(ps, lr=1e-3, master_weight_bits=None),
            (2, 8),
        )
    except Exception:
        traceback.print_exc()
    return found


def kernels_for(name: str) -> contextlib.AbstractContextManager[Any]:
    """bitsandbytes' optimizer on our kernels, for the row that is named so."""
    if "our kernels" not in name:
        return contextlib.nullcontext()
    from bnb_fsdp.integrations.bitsandbytes import use_native_kernels

    return use_native_kernels()


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02)
        p.grad = torch.randn(shape, device="cuda", dtype=dtype) * 1e-3
        made.append(p)
    return made


def state_bytes(optimizer: Any) -> int:
    """Bytes of all tensors in the state, each storage once."""
    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flatten = getattr(value, "__tensor_flatten__", None)
            if flatten is not None and type(value) is not torch.Tensor:
                for name in flatten()[0]:
                    walk(getattr(value, name))
            else:
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif hasattr(value, "__dict__"):
            walk(vars(value))

    for entry in optimizer.state.values():
        walk(dict(entry))
    return sum(seen.values())


def _call_time(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    before = time.perf_counter()
    step()
    return (time.perf_counter() - before) * 1e3


def measure(inventory: str, dtype: torch.dtype, bandwidth: float, only: str) -> list[dict[str, Any]]:
    """All optimizers on one inventory; large ones get their tensors one after the other."""
    shapes = inventories.inventory(inventory)
    elements = inventories.numel(shapes)
    large = elements > 3e8
    rows: dict[str, dict[str, Any]] = {}
    chosen = {name: made for name, made in makers(dtype).items() if re.search(only, name)}
    groups = [[name] for name in chosen] if large else [list(chosen)]
    for group in groups:
        torch.cuda.empty_cache()
        live = {}
        for name in group:
            if name.startswith("torchao") and inventory not in ("lora32", "one64M"):
                continue  # it compiles every shape and calls it for every tensor: minutes
            try:
                params = parameters(shapes, dtype)
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                optimizer = chosen[name][0](params)
                with kernels_for(name):
                    for _ in range(3):
                        optimizer.step()
                    torch.cuda.synchronize()
                held = torch.cuda.memory_allocated() - before
                peak = torch.cuda.max_memory_allocated() - before
                live[name] = (params, optimizer)
                states, bits = chosen[name][1]
                traffic = (
                    inventories.bytes_per_parameter(states, bits, dtype.itemsize, dtype.itemsize) * elements
                )
                rows[name] = {
                    "inventory": inventory, "dtype": str(dtype)[6:], "optimizer": name, "tensors": len(shapes),
                    "elements": elements, "floor_ms": traffic / bandwidth * 1e3, "rounds": [], "host": [], "call": [],
                    "state_bytes_per_parameter": state_bytes(optimizer) / elements,
                    "held_bytes_per_parameter": held / elements, "peak_bytes_per_parameter": peak / elements,
                }  # fmt: skip
            except Exception as error:
                print(f"{inventory} {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        for _ in range(ROUNDS):
            for name, (_, optimizer) in live.items():
                row = rows[name]
                with kernels_for(name):
                    _, once = inventories.one_round(optimizer.step, 1)
                    steps = min(20, max(3, int(40 / once)))
                    device, host = inventories.one_round(optimizer.step, steps)
                    row["call"].append(_call_time(optimizer.step))
                row["rounds"].append(device)
                row["host"].append(host)
        live.clear()
    for row in rows.values():
        row["ms"] = statistics.median(row["rounds"])
        row["min"], row["max"] = min(row["rounds"]), max(row["rounds"])
        row["host_ms"] = statistics.median(row["host"])
        row["call_ms"] = statistics.median(row["call"])
        row["ratio"] = row["ms"] / row["floor_ms"]
        print(
            f"{inventory:9s} {row['dtype']:9s} {row['optimizer']:36s} {row['ms']:9.4f} ms "
            f"[{row['min']:.4f}, {row['max']:.4f}] x{row['ratio']:8.2f}  call {row['call_ms']:8.4f}  state "
            f"{row['state_bytes_per_parameter']:.3f} peak {row['peak_bytes_per_parameter']:.3f} B/param",
            flush=True,
        )
    return list(rows.values())


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "our kernels" not in row["optimizer"]]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    colours = {name: pyplot.get_cmap("tab10")(i) for i, name in enumerate(names)}
    figure, axes = pyplot.subplots(len(dtypes), 1, figsize=(11, 4.2 * len(dtypes) + 0.8), squeeze=False)
    for axis, dtype in zip(axes[:, 0], dtypes):
        own = [row for row in rows if row["dtype"] == dtype]
        cases = list(dict.fromkeys(row["inventory"] for row in own))
        shown = [name for name in names if any(row["optimizer"] == name for row in own)]
        width = 0.8 / len(shown)
        for i, name in enumerate(shown):
            values = {row["inventory"]: row["ms"] for row in own if row["optimizer"] == name}
            at = [c + (i + 0.5) * width - 0.4 for c, case in enumerate(cases) if case in values]
            axis.bar(
                at, [values[case] for case in cases if case in values], width, label=name, color=colours[name]
            )
        for c, case in enumerate(cases):
            floor = next(row["floor_ms"] for row in own if row["inventory"] == case)
            axis.hlines(floor, c - 0.42, c + 0.42, colors="black", linestyles="dashed", linewidth=1)
        axis.set_yscale("log")
        axis.set_xticks(range(len(cases)), cases)
        axis.set_ylabel("ms a step, completed")
        axis.set_title(f"{title}, {dtype} (dashed: floor of an 8-bit AdamW step)")
        axis.grid(axis="y", alpha=0.3)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    figure.legend(handles, names, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--inventories", default=",".join(inventories.INVENTORIES))
    parser.add_argument("--only", default="")
    parser.add_argument("--plot-from", type=Path, nargs="*", help="only draw PNG from earlier JSON files")
    arguments = parser.parse_args()
    if arguments.plot_from:
        parts = [json.loads(path.read_text()) for path in arguments.plot_from]
        plot([row for part in parts for row in part["rows"]], arguments.png, parts[0]["device"])
        return
    bandwidth = inventories.copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth * 1e-12:.3f} TB/s",
        flush=True,
    )
    rows = []
    for inventory in arguments.inventories.split(","):
        rows += measure(inventory, getattr(torch, arguments.dtype), bandwidth, arguments.only)
    if arguments.json:
        versions = {name: _version(name) for name in ("bitsandbytes", "torchao", "flashoptim")}
        result = {
            **inventories.machine(), **versions, "command": " ".join(["python", *sys.argv]),
            "copy_TB/s": bandwidth * 1e-12, "rows": rows,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.png:
        plot(rows, arguments.png, torch.cuda.get_device_name())


def _version(name: str) -> str | None:
    module = sys.modules.get(name)
    return getattr(module, "__version__", None) if module is not None else None


if __name__ == "__main__":
    main()
