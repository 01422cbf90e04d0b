"""A run saved at one number of ranks and resumed at others: its losses beside those of the run that never stopped.

    python benchmarks/reshard_losses.py --worlds 2 4 --json OUT.json     # NCCL if there are GPUs enough, else gloo

Trains two small Llamas (rows of 512 elements, whose blocks stay; rows of 360, whose blocks move) with AdamW8bit under
FSDP2 on a fixed stream of tokens, saves with `bnb_fsdp.save_checkpoint` in the middle, and continues from it at
every number of ranks. The global batch does not depend on the number of ranks, so the losses agree to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import common
from cuda_inventories import commit, nccl_settings, nccl_version

BEFORE, AFTER, BATCH, LENGTH = 10, 10, 8, 64
HEADS = {512: 8, 360: 6}


def build(hidden: int, device: torch.device) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=2, num_attention_heads=HEADS[hidden],
        num_key_value_heads=HEADS[hidden] // 2, vocab_size=1000, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model: Any, optimizer: Any, first: int, count: int, device: torch.device) -> list[float]:
    """Losses over the global batch, which each step splits among the ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(0, 1000, (BATCH, 1), generator=generator)
        tokens = (start + 7 * torch.arange(LENGTH)) % 1000  # something to learn
        own = tokens[rank * BATCH // world : (rank + 1) * BATCH // world].to(device)
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    return losses


def rank_main(folder: Path, hidden: int, source: int | None) -> None:
    import bnb_fsdp

    # None of the ranks has one unless all have: see `launch`.
    gpu = common.gpu_of(int(os.environ["LOCAL_RANK"]))
    gpus = gpu is not None
    device = gpu if gpu is not None else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpus else "gloo")
    world = dist.get_world_size()
    model = build(hidden, device)
    optimizer = bnb_fsdp.AdamW8bit(model.parameters(), lr=3e-3)
    result: dict[str, Any] = {"backend": dist.get_backend(), "world": world}
    path = folder / f"saved{hidden}_{world if source is None else source}"
    if source is None:
        result["before"] = train(model, optimizer, 0, BEFORE, device)
        bnb_fsdp.save_checkpoint(path, model, optimizer)
    else:
        bnb_fsdp.load_checkpoint(path, model, optimizer)
        report = optimizer.load_report
        counts = torch.tensor([report.blocks, report.requantized], dtype=torch.float64, device=device)
        dist.all_reduce(counts)
        result["blocks"], result["requantized"] = int(counts[0]), int(counts[1])
    result["after"] = train(model, optimizer, BEFORE, AFTER, device)
    if dist.get_rank() == 0:
        name = f"result{hidden}_{world}_{source}.json"
        (folder / name).write_text(json.dumps(result))
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def launch(folder: Path, world: int, hidden: int, source: int | None) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", __file__,
        "--rank-folder", str(folder), "--hidden", str(hidden),
    ]  # fmt: skip
    if source is not None:
        command += ["--source", str(source)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if common.gpu_of(world - 1) is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # or fully_shard would take the GPUs that there are
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    path = folder / f"result{hidden}_{world}_{source}.json"
    if not path.exists():
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def described(run: tuple[int, int, int], saved: dict[str, Any], resumed: dict[str, Any]) -> dict[str, Any]:
    """A row of the report, printed too."""
    world, hidden, source = run
    reference = saved["after"]
    row = {
        "hidden": hidden, "saved at": source, "resumed at": world, "backend": resumed["backend"],
        "blocks": resumed["blocks"], "requantized": resumed["requantized"],
        "first loss": saved["before"][0], "loss at the save": saved["before"][-1], "last loss": resumed["after"][-1],
        "last loss, never stopped": reference[-1],
        "largest difference of a loss": max(abs(a - b) for a, b in zip(resumed["after"], reference)),
    }  # fmt: skip
    print(
        f"rows of {hidden}: saved at {source}, resumed at {world} ({row['backend']}): loss "
        f"{row['first loss']:.4f} -> {row['loss at the save']:.4f} -> {row['last loss']:.4f}, "
        f"never stopped {reference[-1]:.4f}, largest difference {row['largest difference of a loss']:.1e}; "
        f"{row['requantized']} of {row['blocks']} blocks requantised",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parallel", type=int, default=1, help="launches at once")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_folder:
        rank_main(options.rank_folder, options.hidden, options.source)
        return 0
    worlds = options.worlds
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.parallel) as pool:
        folder = Path(name)
        saves = [(world, hidden, None) for hidden in HEADS for world in worlds]
        saved = dict(zip(saves, pool.map(lambda run: launch(folder, *run), saves)))
        resumes = [(world, hidden, source) for hidden in HEADS for source in worlds for world in worlds]
        rows = [
            described(run, saved[run[2], run[1], None], resumed)
            for run, resumed in zip(resumes, pool.map(lambda run: launch(folder, *run), resumes))
        ]
    exact = [row for row in rows if row["saved at"] == row["resumed at"]]
    wrong = [row for row in exact if row["largest difference of a loss"] != 0 or row["requantized"] != 0]
    # Another number of ranks adds the batch up in another order; a requantised block adds its own rounding.
    wrong += [row for row in rows if row["largest difference of a loss"] > 0.02]
    if options.json:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        report = {
            "date": date.today().isoformat(),
            "commit": commit(),
            "machine": machine,
            "gpus": torch.cuda.device_count(),
            "nccl": nccl_version() if torch.cuda.is_available() else None,
            "nccl_settings": nccl_settings(),
            **versions,
            "rows": rows,
            "wrong": len(wrong),
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(rows)} resumed runs, {len(wrong)} with other losses")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
