"""Optimizer section and whole iterations of an FSDP2 run, this package beside its peers, on the GPUs torchrun gives.

    torchrun --nproc_per_node=2 benchmarks/fsdp2_steps.py --json OUT.json

A Llama of 1.1 billion bfloat16 parameters (147 DTensors) from a configuration, one model for each optimizer in turn.
Reported for rank 0: completed device and host milliseconds of step(), the host time until it returns, the ratio to the
floor of the rank's shard (10.06 bytes a parameter over the copy bandwidth measured in the same run).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_inventories as inventories
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

ROUNDS = 9


def build(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32003, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def makers() -> dict[str, Callable[[Any], Any]]:
    import bnb_fsdp

    found: dict[str, Callable[[Any], Any]] = {
        "bnb_fsdp AdamW8bit": lambda ps: bnb_fsdp.AdamW8bit(ps, lr=1e-4),
        "torch AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True),
    }
    try:
        import flashoptim

        found["flashoptim AdamW"] = lambda ps: flashoptim.FlashAdamW(ps, lr=1e-4, master_weight_bits=None)
    except ImportError:
        pass
    try:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = lambda ps: bitsandbytes.optim.AdamW8bit(ps, lr=1e-4)
    except ImportError:
        pass
    return found


def measure(name: str, make: Callable[[Any], Any], layers: int, bandwidth: float) -> dict[str, Any]:
    model = build(layers)
    params = list(model.parameters())
    optimizer = make(params)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())

    def forward_backward() -> None:
        tokens = torch.randint(0, 32000, (2, 512), device="cuda", generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()

    for _ in range(3):
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()
    forward_backward()
    device, host, call = [], [], []
    for _ in range(ROUNDS):
        dist.barrier()
        optimizer.step()
        once = inventories.one_round(optimizer.step, 5)
        device.append(once[0])
        host.append(once[1])
        before = time.perf_counter()
        optimizer.step()
        call.append((time.perf_counter() - before) * 1e3)
    optimizer.zero_grad()
    whole = []
    for _ in range(20):
        torch.cuda.synchronize()
        before = time.perf_counter()
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - before) * 1e3)
    local = sum(p.to_local().numel() for p in params)
    floor = inventories.bytes_per_parameter(2, 8, 2, 2) * local / bandwidth * 1e3
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    return {
        "optimizer": name, "world_size": dist.get_world_size(), "tensors": len(params),
        "parameters": sum(p.numel() for p in params), "local_parameters": local, "floor_ms": floor,
        "ms": statistics.median(device), "min": min(device), "max": max(device),
        "host_ms": statistics.median(host), "call_ms": statistics.median(call),
        "ratio": statistics.median(device) / floor, "iteration_ms": statistics.median(whole),
        "state_bytes": sum(getattr(v, "_local_tensor", v).nbytes for v in state),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    bandwidth = inventories.copy_bandwidth()
    rows = []
    for name, make in makers().items():
        torch.cuda.reset_peak_memory_stats()
        try:
            row = measure(name, make, arguments.layers, bandwidth)
        except Exception as error:
            row = {"optimizer": name, "error": f"{type(error).__name__}: {error}"[:400]}
        rows.append(row)
        if dist.get_rank() == 0:
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
    if dist.get_rank() == 0 and arguments.json:
        command = f"torchrun --nproc_per_node={dist.get_world_size()} {' '.join(sys.argv)}"
        result = {**inventories.machine(), "command": command, "copy_TB/s": bandwidth * 1e-12, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
