"""Times steps of paged optimizers on one GPU: this package and bitsandbytes on the same tensors in one process.

Cells are states of 16, 64, 256 and 1024 MiB of 8 or 64 unlike tensors, a Transformer's tensors, and a state twice as
large as its budget on the device. In each, optimizers take rounds in turn on the same parameters and gradients:

* paged, host: residency="host". Completed means that the state is in host memory again, too.
* paged, budget: residency = half of the state's bytes (in the cells "half").
* paged, device and paged, auto: residency="device", and "auto" after it has settled; unpaged: the class without Paged.
* bitsandbytes: its paged class, the CPU having written to every page of the state before each timed step. Completed
  means that step() is through; the state is then on the device. "again": the next step, without that.

"bound": as many bytes to the device and back at once, from and to torch's pinned memory in pieces of 32 MiB, queued
beforehand and timed by CUDA events in the same rounds. Times are medians of the host's clock from an idle device until
completion; "back to back" is one step of several that follow each other, "behind" what one adds to work that was queued
before it, as a backward pass is. Overlap is that of one profiled step.

usage: python benchmarks/paged_steps.py [--json OUT] [--png OUT] [--only REGEX] [--sweep] [--no-steps] [--seconds 140]
       python benchmarks/paged_steps.py --plot-from JSON --png OUT
       python benchmarks/paged_steps.py --dry ...   on a simulated device, small: to see that it runs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paged_common as common
import paged_sweep
import paged_trace
import torch
from paged_common import MIB, Cuda
from paged_verdicts import plot, print_verdicts, verdicts

import bnb_fsdp
from bnb_fsdp.residency import residency

ROUNDS = 9
SINGLES = 3
MORE_OF_SMALL = 4
"""Rounds of 16 MiB to one of the others: steps of 40 us vary with the host by half."""
LARGE_PEER_ROUNDS = 5
TIMELINE = "AdamW8bit 64 MiB x64 bf16"
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
LR = {"Lion8bit": 1e-4}
# Class of this package without "Paged": bytes of state an element, scales not counted. bitsandbytes has the same names.
FAMILIES = {"AdamW8bit": 2, "AdamW32bit": 8, "Lion8bit": 1}
# Hidden, intermediate, vocabulary, layers: about 256 MiB of state.
TRANSFORMERS = {
    "AdamW8bit": (1024, 2816, 32000, 9),
    "AdamW32bit": (512, 1408, 16000, 9),
    "Lion8bit": (1024, 2816, 32000, 21),
}


@dataclass(frozen=True)
class Cell:
    """``mib``: of states, scales not counted. ``kind``: "x8", "x64", "transformers" or "half". ``gate``: of gate B."""

    family: str
    mib: int
    kind: str
    dtype: torch.dtype = torch.bfloat16
    gate: bool = True

    @property
    def name(self) -> str:
        return f"{self.family} {self.mib} MiB {self.kind} {SHORT[self.dtype]}"

    def shapes(self, scale: int = 1) -> list[tuple[int, ...]]:
        """``scale``: about how many times smaller."""
        if self.kind == "transformers":
            hidden, intermediate, vocabulary, layers = TRANSFORMERS[self.family]
            return transformer(hidden // scale, intermediate // scale, vocabulary // scale, layers)
        count = int(self.kind[1:]) if self.kind.startswith("x") else 64
        return unlike(self.mib * MIB // FAMILIES[self.family] // scale, count)


def cells() -> list[Cell]:
    """The gate's first: should time run out, the others are left out."""
    made = [
        Cell(family, mib, kind)
        for mib in (64, 256, 16)
        for family in FAMILIES
        for kind in ("x8", "x64")
    ]  # fmt: skip
    made += [Cell(family, 256, "transformers") for family in FAMILIES]
    made += [Cell("AdamW8bit", 64, "x64", torch.float32)]
    made += [Cell(family, 256, "half", gate=False) for family in ("AdamW8bit", "AdamW32bit")]
    made += [Cell(family, 1024, "x64", gate=False) for family in ("AdamW8bit", "AdamW32bit")]
    return made


def unlike(elements: int, count: int) -> list[tuple[int, ...]]:
    """``count`` shapes of about ``elements`` in all, up to eight times as large as each other, in mixed order.

    Always the same. Every eighth is a vector whose length is no multiple of anything.
    """
    source = random.Random(count)
    weights = [8 ** (i / (count - 1)) for i in range(count)]
    source.shuffle(weights)
    scale = elements / sum(weights)
    shapes: list[tuple[int, ...]] = []
    for i, weight in enumerate(weights):
        numel = round(weight * scale)
        shapes.append((numel | 1,) if i % 8 == 7 else (max(1, round(numel / 256)), 256))
    return shapes


def transformer(hidden: int, intermediate: int, vocabulary: int, layers: int) -> list[tuple[int, ...]]:
    """A decoder with grouped queries and biases on them: embedding, projections, norms."""
    few = hidden // 4
    block: list[tuple[int, ...]] = [
        (hidden,), (hidden, hidden), (hidden,), (few, hidden), (few,), (few, hidden), (few,), (hidden, hidden),
        (hidden,), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate),
    ]  # fmt: skip
    return [(vocabulary, hidden), *block * layers, (hidden,)]


def parameters(gpu: Cuda, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, device=gpu.device, dtype=dtype).mul_(0.02))
        p.grad = torch.randn(shape, device=gpu.device, dtype=dtype).mul_(1e-3)
        made.append(p)
    return made


def ours(family: str, params: list[torch.nn.Parameter], policy: str | int | None) -> Any:
    """This package's optimizer, paged unless ``policy`` is None."""
    rate = LR.get(family, 1e-3)
    if policy is None:
        return getattr(bnb_fsdp, family)(params, lr=rate)
    return getattr(bnb_fsdp, f"Paged{family}")(params, lr=rate, residency=policy)


def theirs(family: str, params: list[torch.nn.Parameter]) -> Any:
    import bitsandbytes as bnb

    return getattr(bnb.optim, f"Paged{family}")(params, lr=LR.get(family, 1e-3))


# One cell


class Contender:
    """An optimizer with its row; warmed up, with what it takes on the device measured."""

    def __init__(self, gpu: Cuda, cell: Cell, name: str, make: Any, elements: int) -> None:
        self._gpu = gpu
        gpu.release()
        gpu.synchronize()
        before = gpu.allocated()
        gpu.reset_peak()
        self.optimizer = make()
        self.wait = common.waiter(self.optimizer)
        for _ in range(4):  # "auto" settles at the second
            self.optimizer.step()
        self._complete()
        first = gpu.peak() - before
        gpu.reset_peak()
        for _ in range(2):
            self.optimizer.step()
        self._complete()
        self.pages = common.managed_tensors(self.optimizer) if name == "bitsandbytes" else []
        self.row: dict[str, Any] = {
            "cell": cell.name, "family": cell.family, "state_MiB": cell.mib, "kind": cell.kind, "gate": cell.gate,
            "dtype": str(cell.dtype)[6:], "contender": name, "elements": elements,
            "peak_bytes": gpu.peak() - before, "first_steps_peak_bytes": first,
            "held_bytes": gpu.allocated() - before,
            "managed_bytes": sum(page.nbytes for page in self.pages),
        }  # fmt: skip
        if name != "bitsandbytes":
            described = bnb_fsdp.describe(self.optimizer)
            self.row |= {
                "state_bytes": described.state_bytes, "host_bytes": described.host_bytes,
                "staging_bytes": described.staging_bytes, "policy": described.residency,
            }  # fmt: skip
        if self.row.get("host_bytes"):
            self.row["chunks"] = sum(getattr(b.prepared, "chunks", 0) for b in self.optimizer._plan._buckets)
        self.samples: list[common.Sample] = []
        self.again: list[common.Sample] = []
        self.touches: list[float] = []
        self.back_to_back: list[float] = []
        self.behind: list[float] = []
        self.behind_late = 0

    def _complete(self) -> None:
        if self.wait is not None:
            self.wait()
        self._gpu.synchronize()

    @property
    def is_on_host(self) -> bool:
        return bool(self.row.get("host_bytes"))

    def take_round(self) -> None:
        gpu, step = self._gpu, self.optimizer.step
        if self.row["contender"] == "bitsandbytes":
            gpu.synchronize()
            before = time.perf_counter()
            common.touch(self.pages)
            self.touches.append((time.perf_counter() - before) * 1e3)
            self.samples.append(common.sample(gpu, step, None))
            self.again.append(common.sample(gpu, step, None))
            return
        self.samples += [common.sample(gpu, step, self.wait) for _ in range(SINGLES)]
        once = statistics.median(s.completed for s in self.samples)
        count = 3 if self.is_on_host else min(50, max(5, int(20 / max(once, 1e-3))))
        self.back_to_back.append(common.back_to_back(gpu, step, 2 if gpu.dry else count))
        if self.is_on_host:
            assert self.wait is not None
            call = statistics.median(s.call for s in self.samples)
            found = common.behind(gpu, step, self.wait, call)
            self.behind += [] if found is None else [found]
            self.behind_late += found is None

    def finish(self) -> dict[str, Any]:
        for key in common.Sample._fields:
            self.row[key] = common.summary([getattr(s, key) for s in self.samples])
        self.row["samples"] = [round(s.completed, 5) for s in self.samples]
        if self.again:
            self.row["again"] = common.summary([s.completed for s in self.again])
            self.row["touch_ms"] = statistics.median(self.touches)
        if self.back_to_back:
            self.row["back_to_back"] = common.summary(self.back_to_back)
            self.row["back_to_back_rounds"] = [round(value, 5) for value in self.back_to_back]
        if self.behind or self.behind_late:
            self.row["behind_late"] = self.behind_late  # rounds left out: the host was later than the work
        if self.behind:
            self.row["behind"] = common.summary(self.behind)
            self.row["behind_rounds"] = [round(value, 5) for value in self.behind]
        return self.row


def measure(
    gpu: Cuda, cell: Cell, copies: common.Copies, rounds: int, failed: list[str]
) -> list[dict[str, Any]]:
    """Rows of all contenders; those of state in host memory carry the bounds for as many bytes.

    If bitsandbytes fails, the others go on, and ``failed`` says so.
    """
    shapes = cell.shapes(128 if gpu.dry and cell.kind != "transformers" else 8 if gpu.dry else 1)
    params = parameters(gpu, shapes, cell.dtype)
    elements = sum(p.numel() for p in params)
    makers: dict[str, Any] = {"paged, host": lambda: ours(cell.family, params, "host")}
    if cell.kind == "half":
        half = elements * FAMILIES[cell.family] // 2
        makers["paged, budget"] = lambda: ours(cell.family, params, half)
    makers |= {
        "bitsandbytes": lambda: theirs(cell.family, params),
        "paged, device": lambda: ours(cell.family, params, "device"),
        "paged, auto": lambda: ours(cell.family, params, "auto"),
        "unpaged": lambda: ours(cell.family, params, None),
    }
    optimizers: list[Any] = []
    contenders: list[Contender] = []
    with common.freed(gpu, optimizers):
        for name, make in makers.items():
            try:
                contenders.append(Contender(gpu, cell, name, make, elements))
            except Exception as error:
                if name != "bitsandbytes":
                    raise
                failed.append(f"{cell.name}: {name}: {type(error).__name__}: {error}")
                continue
            if name == "bitsandbytes":
                optimizers.append(contenders[-1].optimizer)
        bounds: dict[int, list[dict[str, float]]] = {
            c.row["host_bytes"]: [] for c in contenders if c.is_on_host
        }
        for turn in range(rounds * (1 if gpu.dry or cell.mib > 16 else MORE_OF_SMALL)):
            for size, found in bounds.items():
                found.append({**copies.two_way(size), **copies.one_way(size)})
            shift = turn % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                if contender.pages and cell.mib > 256 and turn >= LARGE_PEER_ROUNDS:
                    continue
                contender.take_round()
        rows = [contender.finish() for contender in contenders]
        for contender in contenders:
            contender.pages = []
    for row in rows:
        row["tensors"] = len(shapes)
        if row.get("host_bytes"):
            _compare_with_bound(row, bounds[row["host_bytes"]])
        print(line(row), flush=True)
    return rows


def _compare_with_bound(row: dict[str, Any], found: list[dict[str, float]]) -> None:
    row["bound"] = {key: common.summary([bound[key] for bound in found]) for key in found[0]}
    completed = row["completed"]["median"]
    row["bandwidth_GB/s"] = 2 * row["host_bytes"] / completed * 1e-6
    row["bound_GB/s"] = 2 * row["host_bytes"] / row["bound"]["ms"]["median"] * 1e-6
    row["ratio_to_bound"] = completed / row["bound"]["ms"]["median"]
    row["ratio_to_bound_by_host_clock"] = completed / row["bound"]["host_ms"]["median"]


def line(row: dict[str, Any]) -> str:
    completed = row["completed"]
    text = (
        f"{row['cell']:36s} {row['contender']:14s} {completed['median']:9.4f} ms [{completed['min']:.4f}, "
        f"{completed['max']:.4f}]  caller {row['caller']['median']:9.4f}  call {row['call']['median']:8.4f}"
    )
    if "back_to_back" in row:
        text += f"  back to back {row['back_to_back']['median']:9.4f}"
    text += f"  peak {row['peak_bytes'] / MIB:8.1f} MiB"
    if "bound" in row:
        text += (
            f"  {row['bandwidth_GB/s']:6.1f} GB/s, bound {row['bound']['ms']['median']:.4f} ms "
            f"x{row['ratio_to_bound']:.3f} (by the host's clock x{row['ratio_to_bound_by_host_clock']:.3f}), "
            f"behind work {row.get('behind', {}).get('median', float('nan')):.4f} ms, "
            f"{row['chunks']} chunks"
        )
    if "again" in row:
        text += f"  again {row['again']['median']:.4f}, touched in {row['touch_ms']:.0f} ms"
    return text


def trace(gpu: Cuda, cell: Cell) -> tuple[dict[str, float], list[paged_trace.Work]]:
    """Of one step of the host-resident optimizer, made anew."""
    shapes = cell.shapes(128 if gpu.dry and cell.kind != "transformers" else 8 if gpu.dry else 1)
    optimizer = ours(cell.family, parameters(gpu, shapes, cell.dtype), "host")

    def step() -> None:
        optimizer.step()
        optimizer._residency.wait()

    step()
    works = paged_trace.profiled(gpu, step)
    return paged_trace.overlap(works), works


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--only", default="", help="cells whose name matches, such as 'AdamW8bit 64 MiB x8'")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sweep", action="store_true", help="chunk sizes and numbers of buffers as well")
    parser.add_argument("--no-steps", action="store_true", help="with --sweep: nothing else")
    parser.add_argument("--no-traces", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=140, help="start no further cell or trace after that"
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--plot-from", type=Path, help="only draw PNG from an earlier JSON file")
    arguments = parser.parse_args()
    if arguments.plot_from:
        plot(json.loads(arguments.plot_from.read_text()), arguments.png)
        return
    raise SystemExit(Run(arguments).all())


class Run:
    """A run of the benchmark, saved after every cell."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._started = time.perf_counter()
        self._gpu = common.open_device(arguments.dry)
        self._device = (
            torch.device("cpu") if arguments.dry else torch.device("cuda", torch.cuda.current_device())
        )
        self._cells = [cell for cell in cells() if re.search(arguments.only, cell.name)]
        self.result: dict[str, Any] = {
            **self._gpu.machine(), **common.versions(), "command": " ".join(["python", *sys.argv]), "rows": [],
            "traces": {}, "failed": [],
        }  # fmt: skip

    def _has_time(self, what: str) -> bool:
        spent = time.perf_counter() - self._started
        if spent > self._arguments.seconds:
            print(f"{what}: left out, {spent:.0f} s are spent (--seconds)", flush=True)
            self.result.setdefault("left_out", []).append(what)
        return spent <= self._arguments.seconds

    def _attempt(self, what: str, run: Any) -> Any:
        """What ``run`` returns; a failure is printed and kept, and the rest goes on."""
        try:
            return run()
        except Exception as error:
            traceback.print_exc()
            self.result["failed"].append(f"{what}: {type(error).__name__}: {error}")
            return None
        finally:
            self._save()
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                self._gpu.release()

    def all(self) -> int:
        print(f"{self.result['device']}, torch {torch.__version__}, {common.versions()}", flush=True)
        self.result["costs"] = self._attempt("costs", self._costs)
        if self._arguments.sweep:
            self.result["sweep"] = self._attempt("sweep", self._sweep)
        if not self._arguments.no_steps:
            self._steps()
            if not self._arguments.no_traces:
                self._traces()  # last: the profiler may leave launches slower
            self.result["verdicts"] = verdicts(self.result)
            print_verdicts(self.result)
        self._save()
        if self._arguments.png and self.result["rows"]:
            self._attempt("plot", lambda: plot(self.result, self._arguments.png))
        for failure in self.result["failed"]:
            print(f"FAILED {failure}", flush=True)
        print(f"{time.perf_counter() - self._started:.0f} s", flush=True)
        return 1 if self.result["failed"] else 0

    def _costs(self) -> dict[str, float]:
        optimizer = ours("AdamW8bit", parameters(self._gpu, [(1024, 1024)], torch.bfloat16), "auto")
        for _ in range(4):
            optimizer.step()
        return paged_sweep.costs(self._gpu, optimizer, self._device)

    def _sweep(self) -> dict[str, Any]:
        def make(mib: int, kind: str) -> tuple[list[torch.nn.Parameter], Any]:
            shapes = Cell("AdamW8bit", mib, kind).shapes(16 if self._gpu.dry else 1)
            params = parameters(self._gpu, shapes, torch.bfloat16)
            return params, ours("AdamW8bit", params, "host")

        return paged_sweep.sweep(self._gpu, make, self._device, repeats=1 if self._gpu.dry else 7)

    def _warm_up(self, cell: Cell) -> None:
        """The first cell's calls took the host up to twice as long as later ones: let a second of them go by."""
        optimizer = ours(cell.family, parameters(self._gpu, cell.shapes(), torch.bfloat16), "host")
        end = time.perf_counter() + 1
        while time.perf_counter() < end:
            common.sample(self._gpu, optimizer.step, common.waiter(optimizer))

    def _steps(self) -> None:
        copies = common.Copies(self._gpu)
        if self._cells and not self._gpu.dry:
            self._warm_up(self._cells[0])
        rounds = 2 if self._gpu.dry else self._arguments.rounds
        for cell in self._cells:
            if self._has_time(cell.name):
                rows = self._attempt(
                    cell.name, lambda c=cell: measure(self._gpu, c, copies, rounds, self.result["failed"])
                )
                self.result["rows"] += rows or []
        if self.result["rows"]:
            size = common.PINNED
            rates = {**copies.two_way(size), **copies.one_way(size)}
            self.result["copies_GB/s"] = {
                "two_way": 2 * size / rates["ms"] * 1e-6,
                "to_device": size / rates["to_device_ms"] * 1e-6,
                "to_host": size / rates["to_host_ms"] * 1e-6,
            }
            print(f"copies of 512 MiB, GB/s: {self.result['copies_GB/s']}", flush=True)
            self.result["policy_speed"] = residency._speed(self._device)._asdict()
            print(f"what the policy measured: {self.result['policy_speed']}", flush=True)

    def _traces(self) -> None:
        for cell in sorted(self._cells, key=lambda c: c.name != TIMELINE):
            if not self._has_time(f"trace of {cell.name}"):
                return
            found = self._attempt(f"trace of {cell.name}", lambda c=cell: trace(self._gpu, c))
            if found is None:
                if not self.result["traces"]:
                    return  # no profiler here: it would fail for all
                continue
            shares, works = found
            self.result["traces"][cell.name] = shares
            self.result.setdefault("timeline", {"cell": cell.name, "works": [list(work) for work in works]})
            print(
                f"{cell.name:36s} profiled step {shares['length_us'] * 1e-3:8.3f} ms, overlap {shares['overlap']:.1%} "
                f"(both ways {shares['both_ways']:.1%}, kernel beside copy {shares['copy_and_kernel']:.1%}), copies in "
                f"{shares['in']:.1%}, out {shares['out']:.1%}, idle {shares['idle']:.1%}",
                flush=True,
            )

    def _save(self) -> None:
        if self._arguments.json:
            self._arguments.json.write_text(json.dumps(self.result, indent=1) + "\n")


if __name__ == "__main__":
    main()
