"""Optimizer steps under CPUOffloadPolicy: parameters, gradients and state of every rank on the CPU, beside torch.

    python benchmarks/cpu_offload_steps.py --ranks 1 2 8 --output benchmarks/results/cpu_offload_steps

writes OUTPUT.json and OUTPUT.png and prints a table. For each number of ranks that has a core for each, torchrun starts
them with FSDP2 on a Llama of 110 million parameters: on GPUs with CPUOffloadPolicy if there are as many GPUs as ranks,
else on a mesh of CPUs, where parameters, gradients and state lie on the CPU too and nothing has to be copied.

A backward pass makes the gradients; they are filled with random numbers once and kept. All optimizers step the same
shards in turns (the order rotates), and all ranks the same optimizer at a time: a barrier comes before each step, so
that ranks compete for memory as in training. A round's time is the slowest rank's; the median, quartiles and extremes
over the rounds are kept. "floor" is the time that the step's bytes of one rank take at the copy bandwidth that each
rank gets while all copy: no bound, since a step that reads more than it writes is faster than a copy. A case during
which other programs kept more than a tenth of a core busy is measured again, and the quietest of the tries counts.
torch keeps both moments in the parameter's dtype: in bfloat16 its states have 4 bytes a parameter, of bfloat16
precision, beside 8 of AdamW32bit and 2.03 of AdamW8bit.

Threads of a rank: bnb_fsdp takes torch's number, but no more than the rank's share of the cores, cores //
LOCAL_WORLD_SIZE (torchrun sets that). The ranks are started with OMP_NUM_THREADS = all cores, so that the share is what
decides; then torch is given the same number of threads, without which its ranks would start more threads than there
are cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cpu_steps import copy_bandwidth, machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import bnb_fsdp
from bnb_fsdp.backends import cpu, native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FUSED = "torch AdamW fused"
LR = 1e-4
MAKERS: dict[str, Callable[[Any], Any]] = {
    "AdamW8bit": lambda ps: bnb_fsdp.AdamW8bit(ps, lr=LR),
    "AdamW32bit": lambda ps: bnb_fsdp.AdamW32bit(ps, lr=LR),
    FUSED: lambda ps: torch.optim.AdamW(ps, lr=LR, fused=True),
    "torch AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=LR, foreach=True),
}
WARM_UP = 2
QUIET = 0.1  # cores that others may keep busy


def build(options: argparse.Namespace, dtype: torch.dtype, device: str) -> nn.Module:
    """The sharded model; every parameter of a rank is on its CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=8 * options.hidden // 3, num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64, num_key_value_heads=options.hidden // 64,
        vocab_size=options.vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    more: dict[str, Any] = {"mesh": init_device_mesh(device, (dist.get_world_size(),))}
    if device == "cuda":
        more["offload_policy"] = CPUOffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, **more)
    return fully_shard(model, **more)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def make_gradients(model: nn.Module, options: argparse.Namespace, device: str) -> None:
    """By a backward pass, so that they are what FSDP2 makes, where it makes them; then dense random numbers."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(options.vocabulary, (1, 32), generator=generator).to(device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    for p in model.parameters():
        for tensor in (local(p), local(p.grad)):
            if tensor.device.type != "cpu":
                raise RuntimeError(f"a parameter or gradient is on {tensor.device}, not on the CPU")
        local(p.grad).copy_(torch.randn(local(p.grad).shape, generator=generator) * 1e-3)


def state_bytes(optimizer: Any) -> int:
    """On this rank."""
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    return sum(local(value).nbytes for value in values if isinstance(value, torch.Tensor))


def by_rank(value: Any) -> list[Any]:
    """What each rank gives, on all."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def busy() -> float:
    """Seconds that all cores together have worked, for anyone (also for other virtual machines), since the start."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0
    user, nice, system, _, _, *rest = map(int, path.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


class Attempt(NamedTuple):
    """All rounds of a case: times by optimizer, this rank's copy bandwidth, cores that others kept busy meanwhile."""

    times: dict[str, list[float]]
    bandwidth: float
    others: float


def rounds(optimizers: dict[str, Any], count: int) -> Attempt:
    gc.collect()
    gc.disable()
    all_busy, own, begin = busy(), time.process_time(), time.perf_counter()
    bandwidth = copy_bandwidth()
    times: dict[str, list[float]] = {kind: [] for kind in optimizers}
    order = list(optimizers)
    for number in range(count):
        turn = number % len(order)
        for kind in order[turn:] + order[:turn]:
            dist.barrier()
            start = time.perf_counter()
            optimizers[kind].step()
            times[kind].append(time.perf_counter() - start)
    dist.barrier()
    worked = sum(by_rank(time.process_time() - own))
    others = (busy() - all_busy - worked) / (time.perf_counter() - begin)
    gc.enable()
    return Attempt(times, bandwidth, by_rank(max(others, 0.0))[0])


def summary(rounds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(rounds, n=4)
    return {
        "ms": median * 1e3, "ms_p25": low * 1e3, "ms_p75": high * 1e3,
        "ms_min": min(rounds) * 1e3, "ms_max": max(rounds) * 1e3,
    }  # fmt: skip


def measure(options: argparse.Namespace, name: str, device: str) -> dict[str, Any]:
    """One dtype: times of all optimizers on the same shards."""
    model = build(options, DTYPES[name], device)
    make_gradients(model, options, device)
    parameters = list(model.parameters())
    optimizers: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for kind, make in MAKERS.items():
        before = local(parameters[0]).clone()
        try:
            optimizers[kind] = make(parameters)
            for _ in range(WARM_UP):
                optimizers[kind].step()
        except Exception as error:  # a peer that does not take these parameters is a row that says so
            if kind in ("AdamW8bit", "AdamW32bit"):
                raise
            optimizers.pop(kind, None)
            rows[kind] = {"error": f"{type(error).__name__}: {error}"[:400]}
            continue
        if torch.equal(before, local(parameters[0])):
            raise RuntimeError(f"{kind}: the step changed nothing")
    tries = []
    for _ in range(options.tries):
        dist.barrier()
        tries.append(rounds(optimizers, options.rounds))
        if tries[-1].others < QUIET:
            break
    times, bandwidth, others = min(tries, key=lambda attempt: attempt.others)
    total = sum(p.numel() for p in parameters)
    own = sum(local(p).numel() for p in parameters)
    moved = 3 * sum(local(p).nbytes for p in parameters)  # gradient and parameter read, parameter written
    all_times, locals_, bandwidths = by_rank(times), by_rank(own), by_rank(bandwidth)
    for kind, optimizer in optimizers.items():
        slowest = [max(rank) for rank in zip(*(rank[kind] for rank in all_times))]
        floor = (moved + 2 * state_bytes(optimizer)) / bandwidth  # state is read and written
        rows[kind] = {
            **summary(slowest),
            "rounds_ms": [seconds * 1e3 for seconds in slowest],
            "million_parameters_per_s": total / statistics.median(slowest) / 1e6,
            "state_bytes_by_rank": by_rank(state_bytes(optimizer)),
            "floor_ms": max(by_rank(floor)) * 1e3,
        }
    for row in rows.values():
        if "ms" in row and "ms" in rows[FUSED]:
            row["time / torch fused"] = row["ms"] / rows[FUSED]["ms"]
    return {
        "ranks": dist.get_world_size(), "dtype": name, "mesh": device,
        "policy": "CPUOffloadPolicy" if device == "cuda" else "fully_shard on a mesh of CPUs",
        "tensors": len(parameters), "parameters": total, "parameters_by_rank": locals_,
        "threads": cpu.thread_budget(), "copy_bandwidth_by_rank": bandwidths, "rounds": options.rounds,
        "cores_busy_with_others": others, "tries": [attempt.others for attempt in tries],
        "results": {kind: rows[kind] for kind in MAKERS},
    }  # fmt: skip


def rank_main(options: argparse.Namespace) -> None:
    """One rank, started by torchrun."""
    device = options.worker
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    given = torch.get_num_threads()
    threads = cpu.thread_budget()
    torch.set_num_threads(threads)
    cases = []
    for name in options.dtypes:
        cases.append({**measure(options, name, device), "torch_threads_before": given})
        gc.collect()
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(cases))
    dist.barrier()
    time.sleep(0.2)  # see examples/common.py: gloo may deadlock otherwise
    dist.destroy_process_group()


def start(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """The cases of one number of ranks, with the machine's load averages before them."""
    load = os.getloadavg()
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # or fully_shard would take the GPUs that there are
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__),
            *("--worker", device, "--output", str(path), "--rounds", str(options.rounds)),
            *("--tries", str(options.tries)),
            *("--layers", str(options.layers), "--hidden", str(options.hidden)),
            *("--vocabulary", str(options.vocabulary), "--dtypes", *options.dtypes),
        ]  # fmt: skip
        subprocess.run(command, env=environment, check=True)
        cases: list[dict[str, Any]] = json.loads(path.read_text())
        return [{**case, "load_before": load} for case in cases]


def table(report: dict[str, Any]) -> str:
    lines = [
        "| ranks | dtype | threads a rank | optimizer | ms, slowest rank (quartiles) | million parameters/s | "
        "time / torch fused | / floor | state, MB a rank | cores busy with others |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in report["cases"]:
        for kind, row in case["results"].items():
            start = f"| {case['ranks']} | {case['dtype']} | {case['threads']} | {kind} |"
            if "error" in row:
                lines.append(f"{start} {row['error']} | | | | | |")
                continue
            ratio = f"{row['time / torch fused']:.2f}" if "time / torch fused" in row else ""
            lines.append(
                f"{start} {row['ms']:.1f} ({row['ms_p25']:.1f} to {row['ms_p75']:.1f}) | "
                f"{row['million_parameters_per_s']:.0f} | {ratio} | "
                f"{row['ms'] / row['floor_ms']:.2f} | {max(row['state_bytes_by_rank']) / 1e6:.0f} | "
                f"{case['cores_busy_with_others']:.2f} |"
            )
    return "\n".join([*lines, *(f"\nLeft out: {text}." for text in report["left_out"])])


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = list(dict.fromkeys(case["dtype"] for case in report["cases"]))
    figure, columns = plt.subplots(
        1, len(dtypes), figsize=(5.5 * len(dtypes), 4.5), layout="constrained", squeeze=False
    )
    width = 0.8 / len(MAKERS)
    for axes, dtype in zip(columns[0], dtypes):
        cases = [case for case in report["cases"] if case["dtype"] == dtype]
        for index, kind in enumerate(MAKERS):
            rows = [case["results"][kind] for case in cases]
            heights = [row.get("million_parameters_per_s", 0.0) for row in rows]
            bars = axes.bar([i + index * width for i in range(len(cases))], heights, width, label=kind)
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
        labels = [
            f"{c['ranks']} rank{'s' * (c['ranks'] > 1)}\n{c['threads']} thread{'s' * (c['threads'] > 1)} each"
            for c in cases
        ]
        axes.set_xticks([i + 0.4 - width / 2 for i in range(len(cases))], labels, fontsize=9)
        axes.set_title(dtype, fontsize=10)
        axes.set_ylabel("million parameters / s, all ranks", fontsize=9)
        axes.margins(y=0.1)
    about = report["machine"]
    figure.suptitle(
        f"One step with parameters, gradients and state on the CPU, higher is better: {about['cores']} cores, "
        f"{about['processor']},\n{about['instruction_set']}, torch {about['torch']}, "
        f"{report['cases'][0]['parameters'] / 1e6:.0f} million parameters, {about['date']}",
        fontsize=10,
    )
    handles, names = columns[0][0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=9, ncols=len(MAKERS), loc="outside lower center")
    figure.savefig(path, dpi=110)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="path without suffix for the .json and .png")
    parser.add_argument("--replot", type=Path, help="draw OUTPUT.png and the table from this .json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=15, help="at least 9")
    parser.add_argument("--tries", type=int, default=5, help="of a case while others keep the machine busy")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 192")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--worker", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 9:
        parser.error(f"--rounds {options.rounds}: at least 9 make a median worth reading")
    if options.hidden % 192:
        parser.error(
            f"--hidden {options.hidden}: heads of 64 and an inner width of 8/3 need a multiple of 192"
        )
    if min(options.ranks) < 1:
        parser.error(f"--ranks {min(options.ranks)}: at least 1")
    return options


def write(report: dict[str, Any], output: Path | None) -> None:
    print(table(report))
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    try:
        plot(report, output.with_suffix(".png"))
    except ImportError:
        print("matplotlib is not installed: no picture")


def main() -> None:
    options = parsed()
    if options.worker:
        rank_main(options)
        return
    if options.replot:
        write(json.loads(options.replot.read_text()), options.output)
        return
    cores = len(os.sched_getaffinity(0))
    report: dict[str, Any] = {
        "machine": machine(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "library": native.load("cpu").build_info(),
        "command": " ".join(["python", *sys.argv]),
        "left_out": [f"{n} ranks, which {cores} cores cannot give a core each" for n in options.ranks if n > cores],
        "cases": [],
    }  # fmt: skip
    for ranks in options.ranks:
        if ranks <= cores:
            report["cases"] += start(options, ranks)
    report["load_after"] = os.getloadavg()
    write(report, options.output)


if __name__ == "__main__":
    main()
