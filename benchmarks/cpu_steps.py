"""Optimizer steps on the CPU: ours beside torch's fused AdamW and bitsandbytes, in one process, in turns.

    python benchmarks/cpu_steps.py --output benchmarks/results/cpu_steps

writes OUTPUT.json and OUTPUT.png and prints a table. Each round steps every optimizer once; the median over the rounds
and the quartiles are kept. "floor" is the time the step's bytes take at the copy bandwidth measured in the same run:
16.06 bytes a parameter for AdamW8bit in float32 (gradient and parameter read, parameter written, two codes read and
written, scales), 10.06 in bfloat16.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda_inventories import commit
from torch import nn

import bnb_fsdp
from bnb_fsdp.backends import cpu

INVENTORIES: dict[str, list[tuple[int, ...]]] = {
    "one tensor of 16.8 million": [(4096, 4096)],
    "210 LoRA tensors, 4.9 million": [
        shape
        for _ in range(30)
        for shape in ((16, 576), (576, 16), (16, 576), (1536, 16), (16, 1536), (4096,), (5, 20480))
    ],
}  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PEERS_SLOW = {"bitsandbytes AdamW8bit"}
STATE_BYTES = {
    "AdamW8bit": 4 + 16 / 256,
    "AdamW32bit": 16,
    "Lion8bit": 2 + 8 / 256,
    "torch AdamW fused": None,
    "bitsandbytes AdamW8bit": 4 + 16 / 256,
}


def makers() -> dict[str, Callable[[list[nn.Parameter]], Any]]:
    made: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "AdamW8bit": lambda ps: bnb_fsdp.AdamW8bit(ps, lr=1e-3),
        "AdamW32bit": lambda ps: bnb_fsdp.AdamW32bit(ps, lr=1e-3),
        "Lion8bit": lambda ps: bnb_fsdp.Lion8bit(ps, lr=1e-4),
        "torch AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    }
    try:
        import bitsandbytes

        made["bitsandbytes AdamW8bit"] = lambda ps: bitsandbytes.optim.AdamW8bit(ps, lr=1e-3)
    except ImportError:
        print("bitsandbytes is not installed: left out")
    return made


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    result = []
    for shape in shapes:
        parameter = nn.Parameter((torch.randn(shape) * 0.02).to(dtype))
        parameter.grad = (torch.randn(shape) * 1e-3).to(dtype)
        result.append(parameter)
    return result


def copy_bandwidth() -> float:
    """Bytes a second of a large copy, reads and writes counted."""
    source = torch.ones(2**27, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(times)


def measure(shapes: list[tuple[int, ...]], dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    optimizers = {name: make(parameters(shapes, dtype)) for name, make in makers().items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(rounds + 2):
            for name, optimizer in optimizers.items():
                if name in PEERS_SLOW and index > 8:
                    continue  # seconds a step; seven rounds say enough
                start = time.perf_counter()
                optimizer.step()
                if index >= 2:
                    times[name].append(time.perf_counter() - start)
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    result = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        result[name] = {"ms": median * 1e3, "ms_p25": low * 1e3, "ms_p75": high * 1e3, "rounds": len(values),
                        "million_parameters_per_s": numel / median / 1e6}  # fmt: skip
        state = STATE_BYTES[name]
        if state is None:
            state = 4 * dtype.itemsize
        result[name]["bytes_per_parameter"] = 3 * dtype.itemsize + state
    return result


def machine() -> dict[str, Any]:
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": cpu.instruction_set(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bnb_fsdp": bnb_fsdp.__version__,
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        "| tensors | dtype | threads | optimizer | ms (quartiles) | million parameters/s | / torch fused | / floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in report["cases"]:
        fused = case["results"]["torch AdamW fused"]["million_parameters_per_s"]
        for name, r in case["results"].items():
            floor = case["numel"] * r["bytes_per_parameter"] / case["copy_bandwidth"] * 1e3
            lines.append(
                f"| {case['inventory']} | {case['dtype']} | {case['threads']} | {name} | {r['ms']:.2f} "
                f"({r['ms_p25']:.2f} to {r['ms_p75']:.2f}) | {r['million_parameters_per_s']:.0f} | "
                f"{r['million_parameters_per_s'] / fused:.2f} | {r['ms'] / floor:.1f} |"
            )
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(report["cases"][0]["results"])
    inventories = list(dict.fromkeys(case["inventory"] for case in report["cases"]))
    width = 0.8 / len(names)
    figure, rows = plt.subplots(len(inventories), figsize=(11, 4 * len(inventories)), layout="constrained")
    for axes, inventory in zip(rows, inventories):
        cases = [case for case in report["cases"] if case["inventory"] == inventory]
        for index, name in enumerate(names):
            heights = [case["results"][name]["million_parameters_per_s"] for case in cases]
            bars = axes.bar([i + index * width for i in range(len(cases))], heights, width, label=name)
            axes.bar_label(bars, fmt="%.0f", fontsize=7, rotation=60)
        labels = [f"{c['dtype']}\n{c['threads']} thread{'s' * (c['threads'] > 1)}" for c in cases]
        axes.set_xticks([i + 0.4 - width / 2 for i in range(len(cases))], labels, fontsize=8)
        axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.set_ylabel("million parameters / s", fontsize=8)
        axes.set_title(inventory, fontsize=9)
    about = report["machine"]
    figure.suptitle(
        f"One optimizer step, higher is better: {about['cores']} cores, {about['processor']}, "
        f"{about['instruction_set']}, torch {about['torch']}, {about['date']}",
        fontsize=10,
    )
    rows[0].legend(fontsize=8, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="path without suffix for the .json and .png")
    parser.add_argument(
        "--replot", type=Path, help="draw OUTPUT.png and the table from this .json, measure nothing"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, nargs="*", help="default: 1 and all cores")
    arguments = parser.parse_args()
    if arguments.replot:
        report = json.loads(arguments.replot.read_text())
        print(table(report))
        if arguments.output:
            plot(report, arguments.output.with_suffix(".png"))
        return
    report = {"machine": machine(), "command": " ".join(["python", *sys.argv]), "cases": []}
    threads = arguments.threads or sorted({1, report["machine"]["cores"]})
    for count in threads:
        torch.set_num_threads(count)
        for inventory, shapes in INVENTORIES.items():
            for name, dtype in DTYPES.items():
                report["cases"].append(
                    {
                        "inventory": inventory,
                        "numel": sum(torch.Size(shape).numel() for shape in shapes),
                        "dtype": name,
                        "threads": count,
                        "copy_bandwidth": copy_bandwidth(),
                        "results": measure(shapes, dtype, arguments.rounds),
                    }
                )
    print(table(report))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        try:
            plot(report, arguments.output.with_suffix(".png"))
        except ImportError:
            print("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
