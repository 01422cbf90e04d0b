"""Train every parameter of a language model under FSDP2 with accelerate, optimizer state in 8 bits.

    accelerate launch --config_file launch/accelerate_fsdp2.yaml --num_processes 2 examples/full_finetune_accelerate.py
    torchrun --nproc_per_node=2 examples/full_finetune_accelerate.py

The first takes FSDP's settings from the file, the second those in plugin(). On a CPU accelerate cannot shard, so
every process keeps the whole model there (DDP), which the output says. Saves with accelerator.save_state and resumes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import common
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import Tensor

import bnb_fsdp


def plugin() -> FullyShardedDataParallelPlugin:
    """FSDP2 with every decoder layer as one group, as launch/accelerate_fsdp2.yaml has it."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",  # the layers that the model names in _no_split_modules
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def accelerator_for(process: common.Process) -> tuple[Accelerator, str]:
    """The accelerator, and where its settings are from."""
    on_cpu = process.device.type == "cpu"
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if on_cpu:
            # transformers would leave the weights out on all ranks but the first, waiting for an FSDP that never comes.
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        return Accelerator(cpu=on_cpu), "accelerate's configuration file"
    precision = "no" if on_cpu else "bf16"
    made = Accelerator(
        cpu=on_cpu, fsdp_plugin=plugin() if process.world > 1 else None, mixed_precision=precision
    )
    return made, "plugin() of this example"


def parallel_line(accelerator: Accelerator, settings: str, process: common.Process) -> str:
    """How accelerate spreads the work."""
    if accelerator.is_fsdp2:
        kind = accelerator.state.fsdp_plugin.state_dict_type.name
        return f"FSDP2 through accelerate, {kind}, {accelerator.mixed_precision} mixed precision, from {settings}"
    if process.world == 1:
        return "NO FSDP: one process without sharding (start it with torchrun or accelerate launch for FSDP2)"
    return "NO FSDP: accelerate cannot shard on a CPU, so this is DDP, each process with the whole model"


def save_model(accelerator: Accelerator, model: Any, folder: Path) -> None:
    """Gather the whole model on rank 0, which writes it for from_pretrained."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        with common.no_progress_bars():
            accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
    accelerator.wait_for_everyone()


def main() -> None:
    args = common.arguments(__doc__, "outputs/full_finetune_accelerate", options=common.full_options)
    with common.processes(offload=os.environ.get("FSDP_OFFLOAD_PARAMS") == "true") as process:
        source = common.model_source(args.model)
        process.say(f"devices: {process.label}")
        accelerator, settings = accelerator_for(process)
        if process.device.type == "cuda" and process.world > 1 and not accelerator.is_fsdp2:
            common.fail(
                "error: accelerate's configuration has no fsdp_version: 2; see launch/accelerate_fsdp2.yaml."
            )
        process.say(f"parallel: {parallel_line(accelerator, settings, process)}")
        process.say(f"model: {source.line}")
        train_data, held_out = common.load_data(args, source)
        process.say(f"data: {args.data}, {len(train_data)} samples to train on, {len(held_out)} held out")
        process.say("loading the model")

        def build() -> tuple[Any, Any]:
            # Mixed precision keeps the parameters in float32 and computes in bfloat16.
            model = common.load_model(source, process.device, torch.float32)
            optimizer = bnb_fsdp.create_optimizer(args.optim, model.named_parameters(), lr=args.lr)
            return accelerator.prepare(model, optimizer)

        def train(first: int, last: int) -> float:
            def backward(loss: Tensor) -> None:
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)

            return common.train(
                model, optimizer, train_data, args, process, first=first, last=last, backward=backward
            )[0]

        model, optimizer = build()
        process.say(common.parameter_line(model))
        before = common.held_out_loss(model, held_out, process)
        process.say(f"held-out loss before training: {before:.4f}")
        half = (args.steps + 1) // 2
        folder = common.checkpoint_folder(args, half, process)
        seconds = train(0, half)
        accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()
        common.say_saved(folder, process)
        seconds += train(half, args.steps)
        after = common.held_out_loss(model, held_out, process)
        process.say(f"held-out loss after {args.steps} steps: {after:.4f} (before: {before:.4f})")
        common.say_speed(args, seconds, process)
        common.say_state(optimizer.optimizer, process)
        save_model(accelerator, model, args.output / "model")
        process.say(f"model saved in {args.output / 'model'}, for from_pretrained")

        process.say(f"resuming from {folder} with a fresh model and optimizer")
        model, optimizer = accelerator.free_memory(model, optimizer)
        model, optimizer = build()
        accelerator.load_state(str(folder))
        train(half, args.steps)
        common.check_resumed(common.held_out_loss(model, held_out, process), after, half, process)


if __name__ == "__main__":
    main()
