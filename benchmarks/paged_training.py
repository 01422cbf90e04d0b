"""Times whole training iterations with paged optimizers on one GPU: all parameters trained, activations checkpointed.

Llamas from a configuration (random weights, bfloat16): "smol" has the shape of SmolLM2-135M, "1b" 1.1 billion
parameters; a batch is 8 x 1024 random tokens. An iteration is forward, backward, clipping, step and zero_grad. "1b x4"
accumulates four batches for a step, with fewer optimizers and rounds.

The optimizers share the model and take rounds in turn; within a round iterations follow each other without a wait, and
CUDA events on the stream of the training tell their times, of which the median, minimum and maximum are kept. Peak
memory is what torch allocated at most in an optimizer's own iterations, less what the others hold: parameters,
gradients, activations, this optimizer. bitsandbytes' managed memory is not torch's; its pages stay on the device from
one step to the next if there is room, and in the row "from host memory" the CPU writes to them all before each
iteration, outside of the timing, which starts from an idle device there. Models whose state would take more managed
memory than --managed GIB go without it.

usage: python benchmarks/paged_training.py [--json OUT] [--models smol 1b "1b x4"] [--rounds 5] [--managed 1.5]
       python benchmarks/paged_training.py --dry   tiny models on a simulated device: to see that it runs
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paged_common as common
import torch
from paged_common import MIB, Cuda

import bnb_fsdp

SMOL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32003, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 259,
}  # fmt: skip
BATCH = (8, 1024)
GOAL = 0.05
LR = 1e-5
WARM_UP = 3
REFERENCE = {8: "AdamW8bit", 32: "AdamW32bit"}


@dataclass(frozen=True)
class Run:
    """A model, batches a step, the names of its optimizers (all, if None), rounds at most."""

    shape: dict[str, Any]
    batches: int = 1
    only: tuple[str, ...] | None = None
    rounds: int | None = None


RUNS = {
    "smol": Run(SMOL),
    "1b": Run(LLAMA),
    "1b x4": Run(LLAMA, 4, ("AdamW8bit", "PagedAdamW8bit host"), rounds=3),
}


@dataclass(frozen=True)
class Choice:
    """``bits``: of the unpaged class it is compared with. ``managed``: in managed memory; ``touched``: by the CPU."""

    make: Callable[[list[torch.nn.Parameter]], Any]
    bits: int
    managed: bool = False
    touched: bool = False


def _theirs(params: list[torch.nn.Parameter]) -> Any:
    import bitsandbytes as bnb

    return bnb.optim.PagedAdamW8bit(params, lr=LR)


CHOICES = {
    "AdamW8bit": Choice(lambda ps: bnb_fsdp.AdamW8bit(ps, lr=LR), 8),
    "PagedAdamW8bit auto": Choice(lambda ps: bnb_fsdp.PagedAdamW8bit(ps, lr=LR, residency="auto"), 8),
    "PagedAdamW8bit host": Choice(lambda ps: bnb_fsdp.PagedAdamW8bit(ps, lr=LR, residency="host"), 8),
    "AdamW32bit": Choice(lambda ps: bnb_fsdp.AdamW32bit(ps, lr=LR), 32),
    "PagedAdamW32bit auto": Choice(lambda ps: bnb_fsdp.PagedAdamW32bit(ps, lr=LR, residency="auto"), 32),
    "PagedAdamW32bit host": Choice(lambda ps: bnb_fsdp.PagedAdamW32bit(ps, lr=LR, residency="host"), 32),
    "bitsandbytes PagedAdamW8bit": Choice(_theirs, 8, managed=True),
    "bitsandbytes PagedAdamW8bit, from host memory": Choice(_theirs, 8, managed=True, touched=True),
}


def build(gpu: Cuda, shape: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if gpu.dry:
        shape = {**shape, **TINY}
    with torch.device(gpu.device):
        model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).to(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Trainer:
    """A model and its data."""

    def __init__(self, gpu: Cuda, run: Run) -> None:
        self.gpu = gpu
        self.model = build(gpu, run.shape)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        batch, length = (2, 16) if gpu.dry else BATCH
        size = (run.batches, batch, length)
        self._tokens = torch.randint(self.model.config.vocab_size, size, device=gpu.device)
        self.loss = torch.zeros((), device=gpu.device)
        self.iteration(torch.optim.SGD(self.params, lr=0.0))  # cuBLAS takes its workspace
        gpu.release()
        self.bytes = gpu.allocated()

    @property
    def tokens(self) -> int:
        return self._tokens.numel()

    def iteration(self, optimizer: Any) -> None:
        for tokens in self._tokens:
            loss = self.model(input_ids=tokens, labels=tokens).loss / len(self._tokens)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.loss = loss.detach()

    def timed(self, optimizer: Any, count: int) -> list[float]:
        """Milliseconds of ``count`` iterations that follow another one and each other."""
        self.iteration(optimizer)
        events = [self.gpu.event() for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.iteration(optimizer)
            event.record()
        self.gpu.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]

    def touched(self, optimizer: Any, count: int) -> list[float]:
        """The same, where the CPU writes to all managed pages before each iteration."""
        pages = common.managed_tensors(optimizer)
        times = []
        for _ in range(count):
            self.gpu.synchronize()
            common.touch(pages)
            start, end = self.gpu.event(), self.gpu.event()
            start.record()
            self.iteration(optimizer)
            end.record()
            self.gpu.synchronize()
            times.append(start.elapsed_time(end))
        return times


def measure(gpu: Cuda, name: str, arguments: argparse.Namespace, failed: list[str]) -> list[dict[str, Any]]:
    run = RUNS[name]
    trainer = Trainer(gpu, run)
    elements = sum(p.numel() for p in trainer.params)
    print(
        f"{name}: {elements:,} parameters in {len(trainer.params)} tensors, {trainer.tokens:,} tokens a step",
        flush=True,
    )
    rows: dict[str, dict[str, Any]] = {}
    live: dict[str, Any] = {}
    managed: list[Any] = []
    with common.freed(gpu, managed):
        for key, choice in CHOICES.items():
            if run.only is not None and key not in run.only:
                continue
            if choice.managed and 2 * elements > arguments.managed * (1 << 30):
                print(f"  {key}: left out, {2 * elements / (1 << 30):.2f} GiB of managed memory (--managed)")
                continue
            shared = live.get("bitsandbytes PagedAdamW8bit") if choice.touched else None
            try:
                live[key], rows[key] = prepare(gpu, trainer, choice, shared)
            except Exception as error:
                traceback.print_exc()
                failed.append(f"{name}, {key}: {type(error).__name__}: {error}")
                continue
            rows[key] |= {
                "model": name, "optimizer": key, "bits": choice.bits, "parameters": elements,
                "tensors": len(trainer.params), "tokens": trainer.tokens, "batches": run.batches,
            }  # fmt: skip
            if choice.managed and shared is None:
                managed.append(live[key])
        for turn in range(min(arguments.rounds, run.rounds or arguments.rounds)):
            order = list(live)
            shift = turn % len(order)
            for key in order[shift:] + order[:shift]:
                take = trainer.touched if CHOICES[key].touched else trainer.timed
                rows[key]["ms"] += take(live[key], arguments.iterations)
        for key, row in rows.items():
            finish(row, rows.get(REFERENCE[CHOICES[key].bits]))
        if not bool(torch.isfinite(trainer.loss)):
            failed.append(f"{name}: the loss is {float(trainer.loss)}")
    return list(rows.values())


def prepare(gpu: Cuda, trainer: Trainer, choice: Choice, shared: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizer, warmed up, and what it takes. ``shared``: the one of another row, used again."""
    gpu.release()
    others = gpu.allocated() - trainer.bytes
    gpu.reset_peak()
    optimizer = choice.make(trainer.params) if shared is None else shared
    for _ in range(WARM_UP):  # "auto" settles at the second
        trainer.iteration(optimizer)
    gpu.synchronize()
    first = gpu.peak() - others
    gpu.reset_peak()
    for _ in range(2):
        trainer.iteration(optimizer)
    gpu.synchronize()
    row: dict[str, Any] = {"ms": [], "peak_bytes": gpu.peak() - others, "first_iterations_peak_bytes": first}
    if choice.managed:
        row["managed_bytes"] = sum(t.nbytes for t in common.managed_tensors(optimizer))
    else:
        described = bnb_fsdp.describe(optimizer)
        row |= {
            "residency": described.residency, "state_bytes": described.state_bytes,
            "host_bytes": described.host_bytes, "staging_bytes": described.staging_bytes,
        }  # fmt: skip
    return optimizer, row


def finish(row: dict[str, Any], reference: dict[str, Any] | None) -> None:
    """Medians, and the overhead over the unpaged class with as many bits (measured before this row)."""
    row["samples"] = [round(value, 4) for value in row["ms"]]
    row |= {**common.summary(row["samples"]), "ms": statistics.median(row["samples"])}
    if reference is not None:
        added = row["ms"] - reference["ms"]
        row["overhead"] = added / reference["ms"]
        # What the step adds does not grow with the tokens, the iteration does.
        row["tokens_for_goal"] = max(0.0, added / GOAL) / (reference["ms"] / row["tokens"])
    overhead = "" if reference is None else f"{row['overhead']:+7.1%}"
    text = (
        f"  {row['optimizer']:46s} {row['ms']:9.3f} ms [{row['min']:.3f}, {row['max']:.3f}]  {overhead:>8s}  "
        f"peak {row['peak_bytes'] / MIB:9.0f} MiB"
    )
    if row.get("host_bytes"):
        text += f"  {row['host_bytes'] / MIB:.0f} MiB in host memory"
        text += f", {GOAL:.0%} from {row['tokens_for_goal']:,.0f} tokens a step"
    if row.get("managed_bytes"):
        text += f"  {row['managed_bytes'] / MIB:.0f} MiB managed"
    print(text, flush=True)


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goal, an iteration at most 5 % longer, for each paged optimizer of this package."""
    found = []
    for row in rows:
        if row["optimizer"].startswith("Paged") and "overhead" in row:
            what = f"{row['model']}: {row['optimizer']} over the unpaged class, an iteration"
            met = row["overhead"] <= GOAL
            found.append({"what": what, "value": row["overhead"], "goal": f"<= {GOAL}", "met": met})
    return found


def _earlier(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """With --add, what the JSON file has of models that are not measured now."""
    if not (arguments.add and arguments.json and arguments.json.exists()):
        return []
    earlier = json.loads(arguments.json.read_text())
    run = {key: earlier[key] for key in ("date", "commit", "command")}
    return [run | row for row in earlier["rows"] if row["model"] not in arguments.models]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="keep what the JSON file has of other models")
    parser.add_argument("--models", nargs="*", default=list(RUNS), choices=RUNS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=5, help="timed ones of a round")
    parser.add_argument(
        "--managed", type=float, default=1.5, help="GiB of managed memory bitsandbytes may take"
    )
    parser.add_argument("--seconds", type=float, default=90, help="start no further model after that")
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    started = time.perf_counter()
    gpu = common.open_device(arguments.dry)
    if arguments.dry:
        arguments.rounds, arguments.iterations = 2, 2
    result: dict[str, Any] = {
        **gpu.machine(), **common.versions(), "command": " ".join(["python", *sys.argv]), "batch": list(BATCH),
        "rows": _earlier(arguments), "failed": [], "left_out": [], "verdicts": [],
    }  # fmt: skip
    run = {key: result[key] for key in ("date", "commit", "command")}
    print(f"{result['device']}, torch {torch.__version__}, {common.versions()}", flush=True)
    for name in arguments.models:
        spent = time.perf_counter() - started
        if spent > arguments.seconds:
            print(f"{name}: left out, {spent:.0f} s are spent (--seconds)")
            result["left_out"].append(name)
            continue
        try:
            result["rows"] += [row | run for row in measure(gpu, name, arguments, result["failed"])]
        except Exception as error:
            traceback.print_exc()
            result["failed"].append(f"{name}: {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            gpu.release()
        result["verdicts"] = verdicts(result["rows"])
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{time.perf_counter() - started:.0f} s", flush=True)
    for v in result["verdicts"]:
        print(f"{'passed' if v['met'] else 'MISSED'}  {v['what']}: {v['value']:+.2%} (goal {v['goal']})")
    for failure in result["failed"]:
        print(f"FAILED {failure}")
    raise SystemExit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
