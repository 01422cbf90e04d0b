"""The part "losses" of `fsdp2_evidence.py`: AdamW in 32 and in 8 bits, and torch's, side by side on real text."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evidence_common as shared
import torch
from evidence_common import common
from evidence_report import LIMIT, compare
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bnb_fsdp

RATES = {"full": 1e-4, "lora": 5e-4}
LORA_RANK = 16
SAMPLES = 4
"""A step, of all ranks together, be they one, two or four."""
HELD_OUT = 64
PIECE = 900  # characters, of which 256 tokens hold most


def _settings(mode: str) -> dict[str, Any]:
    return {"lr": RATES[mode], "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


OPTIMIZERS: dict[str, Callable[[Any, str], Any]] = {
    "bnb_fsdp AdamW32bit": lambda params, mode: bnb_fsdp.AdamW32bit(params, **_settings(mode)),
    "bnb_fsdp AdamW8bit": lambda params, mode: bnb_fsdp.AdamW8bit(params, **_settings(mode)),
    "torch AdamW fused": lambda params, mode: torch.optim.AdamW(params, fused=True, **_settings(mode)),
}


def losses(
    options: argparse.Namespace, process: shared.Process, save: Callable[[dict[str, Any]], None]
) -> None:
    """Full fine-tuning and LoRA: every training loss, held-out losses, and how far 8 bits end from 32.

    ``save`` gets what there is so far after every run; our optimizers come before torch's.
    """
    source = _source(options)
    if isinstance(source, str):
        save({"not_run": source})
        return
    train, held_out = _data(source, 160 if options.tiny else 256)
    base = common.load_model(source, torch.device("cpu"), torch.float32)
    result: dict[str, Any] = {
        "model": source.line, "data": "the topics of Python's own help()", "training_samples": len(train),
        "held_out_samples": len(held_out), "steps": options.loss_steps, "batch": _batch(process) * process.world,
        "limit": LIMIT, "runs": [], "comparisons": [], "not_run_modes": {},
    }  # fmt: skip
    modes = list(RATES)
    if importlib.util.find_spec("peft") is None:
        modes.remove("lora")
        result["not_run_modes"]["lora"] = "the package peft is not installed: pip install peft"
    for (name, make), mode in itertools.product(OPTIMIZERS.items(), modes):
        row = _run(mode, name, make, base, train, held_out, options, process)
        result["runs"].append(row)
        shared.free(process)
        process.say(
            f"{mode} {name}: held-out loss {row['held_out_before']:.4f} -> {row['held_out_after']:.4f}"
        )
        result["comparisons"] = [compared for m in modes if (compared := compare(m, result["runs"]))]
        save(result)


def _source(options: argparse.Namespace) -> Any:
    """The model to train, or in words why there is none."""
    if options.tiny:
        return common.model_source(common.TINY)
    if importlib.util.find_spec("gguf") is None:
        return "the package gguf, which reads the weights' file, is not installed: pip install gguf"
    if options.smollm2 is None:
        found = common.model_source(common.SMOLLM2)
        return found.line if found.fallback else found
    file = Path(options.smollm2)
    if not file.is_file():
        return f"--smollm2 {file}: there is no such file"
    return common.Source(common.SMOLLM2, str(file), f"SmolLM2-135M-Instruct ({file.name})")


def _data(source: Any, tokens: int) -> tuple[Any, Any]:
    """Pieces of the topics; every fifth topic is held out, as a whole."""
    pairs: tuple[list[Any], list[Any]] = ([], [])
    for index, (question, text) in enumerate(common.load_pairs(common.PYDOC)):
        pairs[index % 5 == 4].extend((question, piece) for piece in _pieces(text))
    every = max(1, len(pairs[1]) // HELD_OUT)
    encode = common.encoder(source)
    return common.ChatData(pairs[0], encode, tokens), common.ChatData(
        pairs[1][::every][:HELD_OUT], encode, tokens
    )


def _pieces(text: str) -> list[str]:
    """Paragraphs, put together up to the size of a piece."""
    pieces = [""]
    for paragraph in text.split("\n\n"):
        if pieces[-1] and len(pieces[-1]) + len(paragraph) > PIECE:
            pieces.append("")
        pieces[-1] += paragraph + "\n\n"
    return [piece for piece in pieces if piece.strip()]


def _run(
    mode: str, name: str, make: Callable[[Any, str], Any], base: Any, train: Any, held_out: Any,
    options: argparse.Namespace, process: shared.Process,
) -> dict[str, Any]:  # fmt: skip
    model = copy.deepcopy(base)
    if mode == "lora":
        # The base in the dtype that it is computed in, as in examples/peft_lora.py.
        computed = torch.float32 if process.device.type == "cpu" else torch.bfloat16
        model = common.add_lora(model.to(computed), LORA_RANK, seed=0)
    policy = common.precision(process) if mode == "full" else MixedPrecisionPolicy()
    model = _shard(model.to(process.device), policy)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(params, mode)
    before = common.held_out_loss(model, held_out, process)
    started = time.perf_counter()
    recorded = _train(model, optimizer, train, options.loss_steps, process)
    seconds = time.perf_counter() - started
    row: dict[str, Any] = {
        "mode": mode, "optimizer": name, "trained_parameters": sum(p.numel() for p in params),
        "held_out_before": before, "held_out_after": common.held_out_loss(model, held_out, process),
        "seconds": seconds, "losses": recorded, "state_bytes": shared.gather(shared.state_bytes(optimizer)),
    }  # fmt: skip
    if name.startswith("bnb_fsdp"):
        rows = bnb_fsdp.describe(optimizer).rows
        row["parameters_by_bits"] = {str(bits): sum(r.bits == bits for r in rows) for bits in (8, 32)}
    return row


def _batch(process: shared.Process) -> int:
    """Samples of each rank."""
    return max(1, SAMPLES // process.world)


def _shard(model: Any, policy: MixedPrecisionPolicy) -> Any:
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module in model.modules():
        if type(module).__name__ in (plain._no_split_modules or ()):
            fully_shard(module, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _train(model: Any, optimizer: Any, data: Any, steps: int, process: shared.Process) -> list[float]:
    """The loss of each step, averaged over the ranks. Samples come in the same order for every optimizer."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    model.train()
    recorded = []
    for step in range(steps):
        first = (step * process.world + process.rank) * _batch(process)
        rows = [data[order[i % len(data)]] for i in range(first, first + _batch(process))]
        loss = model(
            **{key: torch.stack([row[key] for row in rows]).to(process.device) for key in rows[0]}
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorded.append(loss.detach())
    return shared.mean_over_ranks(recorded)
