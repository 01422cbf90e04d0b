"""Times whole training iterations of a PEFT LoRA model on one GPU with several optimizers, in turn.

Forward, backward, clipping, step and zero_grad of a Llama from a configuration (random weights, bfloat16), LoRA of rank
16 on every linear layer. The optimizers take rounds on the same model and batch; milliseconds are medians.
usage: python benchmarks/peft_loop.py [--json OUT.json] [--rounds 9] [--iterations 10] [--models small 1b]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_inventories as inventories
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import bnb_fsdp

# hidden, layers, batch, sequence: 0.1 billion parameters with short batches, 1 billion
MODELS = {"small": (768, 12, 1, 128), "1b": (2048, 16, 1, 512)}


def build(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 4, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, vocab_size=32000, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))


def optimizers(params: list[torch.nn.Parameter]) -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Name -> (optimizer, context its steps run in)."""
    import bitsandbytes as bnb

    from bnb_fsdp.integrations.bitsandbytes import use_native_kernels

    plain = contextlib.nullcontext
    return {
        "bitsandbytes AdamW8bit": (bnb.optim.AdamW8bit(params, lr=1e-4), plain),
        "bitsandbytes AdamW8bit, our kernels": (bnb.optim.AdamW8bit(params, lr=1e-4), use_native_kernels),
        "bnb_fsdp AdamW8bit": (bnb_fsdp.AdamW8bit(params, lr=1e-4), plain),
        "bitsandbytes AdamW 32-bit": (bnb.optim.AdamW(params, lr=1e-4), plain),
        "bnb_fsdp AdamW32bit": (bnb_fsdp.AdamW32bit(params, lr=1e-4), plain),
        "bitsandbytes Lion8bit": (bnb.optim.Lion8bit(params, lr=1e-5), plain),
        "bnb_fsdp Lion8bit": (bnb_fsdp.Lion8bit(params, lr=1e-5), plain),
        "torch AdamW fused": (torch.optim.AdamW(params, lr=1e-4, fused=True), plain),
    }


def iterations(
    model: Any, optimizer: Any, tokens: torch.Tensor, clip: list[torch.nn.Parameter], count: int
) -> float:
    """Milliseconds of one iteration, completed, over ``count``."""
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(count):
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(clip, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - before) * 1e3 / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        hidden, layers, batch, length = MODELS[name]
        model = build(hidden, layers)
        trainable = [p for p in model.parameters() if p.requires_grad]
        tokens = torch.randint(32000, (batch, length), device="cuda")
        found = optimizers(trainable)
        times: dict[str, list[float]] = {key: [] for key in found}
        for turn in range(arguments.rounds + 1):
            for key, (optimizer, context) in found.items():
                with context():
                    elapsed = iterations(model, optimizer, tokens, trainable, arguments.iterations)
                if turn > 0:  # the first warms up
                    times[key].append(elapsed)
        reference = statistics.median(times["bitsandbytes AdamW8bit"])
        print(
            f"{name}: {len(trainable)} trainable tensors, {sum(p.numel() for p in trainable)} elements",
            flush=True,
        )
        for key, values in times.items():
            median = statistics.median(values)
            rows.append(
                {
                    "model": name,
                    "optimizer": key,
                    "tensors": len(trainable),
                    "ms": median,
                    "min": min(values),
                    "max": max(values),
                    "vs_bitsandbytes_AdamW8bit": reference / median,
                }
            )
            print(
                f"  {key:36s} {median:8.3f} ms [{min(values):.3f}, {max(values):.3f}]  "
                f"{100 * (reference / median - 1):+.1f} % against bitsandbytes AdamW8bit",
                flush=True,
            )
        del model, found
        torch.cuda.empty_cache()
    if arguments.json:
        result = {**inventories.machine(), "command": " ".join(["python", *sys.argv]), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
