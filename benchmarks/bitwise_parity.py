"""Compares every CUDA kernel with bitsandbytes', bit for bit, and prints the totals (gate: zero mismatches).

usage: python benchmarks/bitwise_parity.py [--json OUT.json] [--rule NAME] [--kernels auto|portable]
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rule")
    parser.add_argument("--kernels", default="auto", choices=("auto", "portable"))
    arguments = parser.parse_args()
    os.environ["BNB_FSDP_CUDA_KERNELS"] = arguments.kernels

    import bitsandbytes
    import cuda_parity as parity
    import torch

    started = time.time()
    totals: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0, 0])
    failures = {}
    for case in parity.cases():
        if arguments.rule and case.rule != arguments.rule:
            continue
        compared, wrong = parity.compare(case)
        row = totals[f"{case.rule} {case.bits}-bit {case.dtype}"]
        row[0] += 1
        row[1] += compared
        row[2] += len(wrong)
        row[3] += sum(wrong.values())
        if wrong:
            failures[str(case)] = wrong
    print(f"{'kernel':28s} {'cases':>6s} {'tensors':>8s} {'differ':>7s} {'elements':>9s}")
    for name, row in totals.items():
        print(f"{name:28s} {row[0]:6d} {row[1]:8d} {row[2]:7d} {row[3]:9d}")
    cases, tensors, differ, elements = (sum(row[i] for row in totals.values()) for i in range(4))
    print(f"{cases} comparisons of {tensors} tensors: {differ} tensors and {elements} elements differ")
    for name, wrong in list(failures.items())[:60]:
        print("DIFFERS", name, dict(list(wrong.items())[:6]))
    if arguments.json:
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": None,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "bitsandbytes": bitsandbytes.__version__,
            "kernels": arguments.kernels,
            "command": " ".join(["python", *sys.argv]),
            "seconds": round(time.time() - started, 1),
            "comparisons": cases,
            "tensors": tensors,
            "tensors_differing": differ,
            "elements_differing": elements,
            "by_kernel": dict(totals),
            "failures": failures,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
