"""FSDP2 on the GPUs (or CPU ranks) torchrun gives: AdamW8bit beside torch's AdamW on one model and the same batches.

    torchrun --nproc_per_node=2 benchmarks/two_gpus.py --output benchmarks/results/two_gpus.json

Prints and saves losses, optimizer time, bytes of state and peak memory per rank, and whether any state is plain, local
and 8-bit. Shows behaviour, not speed, while the CUDA kernels do not exist: the torch backend emulates float32 in
float64.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import bnb_fsdp


def build(device: torch.device, hidden: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        vocab_size=8192,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(name: str, make: Any, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = build(device, arguments.hidden, arguments.layers)
    optimizer = make(model)
    losses, times = [], []
    for step in range(arguments.steps):
        generator = torch.Generator().manual_seed(1000 * (step % 4) + dist.get_rank())
        tokens = torch.randint(8192, (2, 256), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    tensors = [
        t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)
    ]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return {
        "optimizer": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "all_parameters_are_dtensors": all(isinstance(p, DTensor) for p in model.parameters()),
        "uint8_state_tensors": sum(t.dtype == torch.uint8 for t in local),
        "state_tensors_that_are_dtensors": sum(isinstance(t, DTensor) for t in tensors),
        "state_bytes_this_rank": sum(t.numel() * t.element_size() for t in local),
        "peak_bytes_this_rank": torch.cuda.max_memory_allocated() if on_gpu else None,
        "optimizer_ms_median": statistics.median(times[2:]) * 1e3,
        "losses": [round(loss, 4) for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    warnings.filterwarnings("ignore", message="bnb_fsdp has no native kernels")
    results = [
        train(
            "bnb_fsdp.AdamW8bit",
            lambda m: bnb_fsdp.AdamW8bit(m.named_parameters(), lr=1e-3),
            device,
            arguments,
        ),
        train("torch.optim.AdamW", lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), device, arguments),
    ]
    if dist.get_rank() == 0:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        report = {
            "date": datetime.date.today().isoformat(),
            "commit": commit.stdout.strip() if commit.returncode == 0 else None,
            "torch": torch.__version__,
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "world_size": dist.get_world_size(),
            "backend": "torch" if on_gpu else "auto",
            "results": results,
        }
        print(json.dumps(report, indent=1))
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    time.sleep(0.2)  # see examples/common.py: gloo may deadlock otherwise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
