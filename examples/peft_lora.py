"""Fine-tune a language model with LoRA under FSDP2, its optimizer state in 8 bits.

    torchrun --nproc_per_node=2 examples/peft_lora.py

runs on GPUs if there are any and on the CPU otherwise; `python examples/peft_lora.py` is one process. What is
special about bnb_fsdp is one line, the call of create_optimizer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm.auto import tqdm

import bnb_fsdp


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """FSDP2: every decoder layer is one group, the rest (embedding, final norm, head) another."""
    layer_classes = model.get_base_model()._no_split_modules or ()
    for module in model.modules():
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Any, optimizer: Any, data: common.ChatData, args: Any, process: common.Process) -> float:
    """Run ``args.steps`` steps and return how many seconds they took."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed)).tolist()
    model.train()
    started = time.perf_counter()
    # A log file gets a line now and then, a terminal a moving bar.
    pause = 0.2 if sys.stderr.isatty() else 5.0
    bar = tqdm(range(args.steps), desc="training", unit="step", mininterval=pause, disable=process.rank != 0)
    for step in bar:
        # Each rank has its own samples of a step; after the last sample comes the first again.
        first = (step * process.world + process.rank) * args.batch_size
        rows = [data[order[i % len(data)]] for i in range(first, first + args.batch_size)]
        batch = {key: torch.stack([row[key] for row in rows]).to(process.device) for key in rows[0]}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return time.perf_counter() - started


def save(model: Any, output: Path, process: common.Process) -> None:
    """Gather the adapter's shards on rank 0, which writes it as PEFT would without FSDP."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapter = get_model_state_dict(model, options=options)
    if process.rank == 0:
        model.save_pretrained(output, state_dict=adapter, save_embedding_layers=False)
    dist.barrier()


def main() -> None:
    args = common.arguments(__doc__, "outputs/peft_lora")
    with common.processes() as process:
        source = common.model_source(args.model)
        process.say(f"devices: {process.label}")
        process.say(f"model: {source.line}")
        train_data, held_out = common.load_data(args, source)
        process.say(f"data: {args.data}, {len(train_data)} samples to train on, {len(held_out)} held out")
        process.say("loading the model")

        mesh = init_device_mesh(process.device.type, (process.world,))
        model = shard(
            common.add_lora(common.load_model(source, process.device), args.lora_rank, args.seed), mesh
        )
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        process.say(common.parameter_line(model))

        optimizer = bnb_fsdp.create_optimizer(args.optim, trainable, lr=args.lr)

        before = common.held_out_loss(model, held_out, process)
        process.say(f"held-out loss before training: {before:.4f}")
        seconds = train(model, optimizer, train_data, args, process)
        after = common.held_out_loss(model, held_out, process)
        process.say(f"held-out loss after {args.steps} steps: {after:.4f} (before: {before:.4f})")
        common.say_speed(args, seconds, process)
        common.say_state(optimizer, process)

        common.say_overwritten(args.output, process)
        save(model, args.output, process)
        process.say(f"adapter saved in {args.output}; loading it into a fresh base")
        del model, optimizer, trainable
        model = shard(common.load_lora(source, args.output, process.device), mesh)
        common.check_reloaded(common.held_out_loss(model, held_out, process), after, process)


if __name__ == "__main__":
    main()
