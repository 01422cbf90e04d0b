"""Times the CUDA kernels alone: every rule, 8 and 32 bits, against the floor of the bytes that have to move.

One launch a step, between CUDA events; the floor is those bytes over the copy bandwidth measured in the same run.
usage: python benchmarks/cuda_kernels.py [--json OUT.json] [--cases REGEX] [--inventories one64M,llama1b]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import cuda_inventories as inventories
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

RULES = ("adam", "lion", "momentum", "rmsprop", "adagrad", "ademamix")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def bucket(
    rule: str, bits: int, dtype: torch.dtype, shapes: list[tuple[int, ...]], shift: int, data: str
) -> Any:
    """A bucket of random tensors and its gradients; ``shift``: elements by which gradients miss 16 bytes."""
    from bnb_fsdp.backends import BucketKey, Slot
    from bnb_fsdp.backends.cuda import CudaBucket
    from bnb_fsdp.rules import RULES as rules
    from bnb_fsdp.state import blocks

    torch.manual_seed(0)
    slots, gradients = [], []
    for i, shape in enumerate(shapes):
        p = torch.randn(shape, device="cuda", dtype=dtype) * 0.02
        room = torch.randn(p.numel() + 16, device="cuda", dtype=dtype) * 1e-3
        if data == "zeros":
            room.zero_()
        gradients.append(room[shift : shift + p.numel()].view(shape))
        state = torch.uint8 if bits == 8 else torch.float32
        states = tuple(torch.zeros(shape, dtype=state, device="cuda") for _ in rules[rule].signed)
        scales = tuple(torch.zeros(blocks(p.numel()), device="cuda") for _ in rules[rule].signed)
        slots.append(Slot(str(i), 0, p, states, scales if bits == 8 else (), torch.zeros(())))
    return CudaBucket(BucketKey(rule, bits, dtype, dtype, slots[0].parameter.device), slots), gradients, slots


def measure(name: str, rule: str, bits: int, dtype: str, inventory: str, bandwidth: float) -> dict[str, Any]:
    import cuda_parity as parity

    shapes = inventories.inventory(inventory)
    shift = 1 if "misaligned" in name else 0
    prepared, gradients, slots = bucket(
        rule, bits, DTYPES[dtype], shapes, shift, "zeros" if "zeros" in name else "random"
    )
    hyper = parity.HYPERS[rule]._replace(weight_decay=0.01)
    elements = inventories.numel(shapes)
    repeats = 5 if elements > 3e8 else 20
    pointers = torch.tensor([g.data_ptr() for g in gradients], dtype=torch.int64)
    times = inventories.rounds(lambda: prepared.run_pointers(pointers.data_ptr(), [hyper]), repeats)
    size = DTYPES[dtype].itemsize
    traffic = inventories.bytes_per_parameter(len(slots[0].states), bits, size, size) * elements
    floor = traffic / bandwidth * 1e3
    median = statistics.median(times)
    return {
        "case": name, "inventory": inventory, "rule": rule, "bits": bits, "dtype": dtype, "tensors": len(shapes),
        "elements": elements, "ms": median, "min": min(times), "max": max(times), "floor_ms": floor,
        "ratio": median / floor, "TB/s": traffic / median * 1e-9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", default="")
    parser.add_argument("--inventories", default="one64M,llama1b,lora1024")
    arguments = parser.parse_args()
    bandwidth = inventories.copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth * 1e-12:.3f} TB/s",
        flush=True,
    )
    rows = []
    plan = [(f"{r}{b} {d}", r, b, d) for b in (8, 32) for r in RULES for d in DTYPES]
    plan += [
        (f"adam8 {d} {kind}", "adam", 8, d)
        for d in ("bfloat16", "float32")
        for kind in ("misaligned", "zeros")
    ]
    plan += [("adam32 bfloat16 misaligned", "adam", 32, "bfloat16")]
    for inventory in arguments.inventories.split(","):
        for name, rule, bits, dtype in plan:
            if not re.search(arguments.cases, f"{inventory} {name}"):
                continue
            torch.cuda.empty_cache()
            row = measure(name, rule, bits, dtype, inventory, bandwidth)
            rows.append(row)
            print(
                f"{inventory:9s} {name:28s} {row['ms']:8.4f} ms [{row['min']:.4f}, {row['max']:.4f}] "
                f"floor {row['floor_ms']:8.4f}  x{row['ratio']:.3f}  {row['TB/s']:.2f} TB/s",
                flush=True,
            )
    if arguments.json:
        result = {
            **inventories.machine(),
            "command": " ".join(["python", *sys.argv]),
            "copy_TB/s": bandwidth * 1e-12,
        }
        arguments.json.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
