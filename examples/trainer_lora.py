"""The fine-tuning of peft_lora.py through the transformers Trainer, which knows the optimizer by its name.

    torchrun --nproc_per_node=2 examples/trainer_lora.py

On GPUs the Trainer shards the model with FSDP2. On a CPU accelerate cannot do that, so every process keeps
the whole model there (DDP), which the output says. Works with transformers 4.57 and 5.
"""

from __future__ import annotations

import os
from typing import Any

import common
import torch.distributed as dist
import transformers
from packaging.version import Version
from transformers import Trainer, TrainingArguments

TRANSFORMERS_5 = Version(transformers.__version__).major >= 5


def fsdp_arguments(model: Any) -> dict[str, Any]:
    """What tells the Trainer to use FSDP2, with every decoder layer as one group."""
    config: dict[str, Any] = {
        "version": 2,
        "transformer_layer_cls_to_wrap": sorted(model.get_base_model()._no_split_modules),
        "state_dict_type": "FULL_STATE_DICT",  # with shards, save_model() would write nothing
    }
    if TRANSFORMERS_5:
        return {"fsdp": True, "fsdp_config": config}
    # transformers 4 passes neither of these two on to accelerate, which reads them from the environment.
    os.environ["FSDP_VERSION"] = str(config.pop("version"))
    os.environ["FSDP_STATE_DICT_TYPE"] = config.pop("state_dict_type")
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}


def shards(process: common.Process) -> bool:
    """Whether accelerate can do FSDP here."""
    return process.device.type == "cuda" and "RANK" in os.environ


def parallel_line(process: common.Process) -> str:
    """How the Trainer will spread the work."""
    if shards(process):
        return "FSDP2 through accelerate"
    if process.world == 1:
        return "NO FSDP: one process without sharding (start it with torchrun on GPUs for FSDP2)"
    return "NO FSDP: accelerate cannot shard on a CPU, so this is DDP, each process with the whole model"


def training_arguments(args: Any, model: Any, process: common.Process) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(args.output),
        optim=args.optim,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        seed=args.seed,
        use_cpu=process.device.type == "cpu",
        logging_steps=max(1, args.steps // 10),
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,  # the data are small, and without a GPU it only warns
        ddp_find_unused_parameters=False,
        **(fsdp_arguments(model) if shards(process) else {}),
    )


def main() -> None:
    args = common.arguments(__doc__, "outputs/trainer_lora")
    with common.processes() as process:
        source = common.model_source(args.model)
        process.say(f"devices: {process.label}")
        process.say(f"parallel: {parallel_line(process)}")
        process.say(f"model: {source.line}")
        train_data, held_out = common.load_data(args, source)
        process.say(f"data: {args.data}, {len(train_data)} samples to train on, {len(held_out)} held out")
        process.say("loading the model")

        model = common.add_lora(common.load_model(source, process.device), args.lora_rank, args.seed)
        process.say(common.parameter_line(model))
        before = common.held_out_loss(model.to(process.device), held_out, process)
        process.say(f"held-out loss before training: {before:.4f}")

        trainer = Trainer(
            model=model, args=training_arguments(args, model, process), train_dataset=train_data
        )
        trained = trainer.train()
        if shards(process) and not trainer.accelerator.is_fsdp2:
            common.fail("error: the Trainer was asked for FSDP2 and trained without it.")
        after = common.held_out_loss(trainer.model_wrapped, held_out, process)
        process.say(f"held-out loss after {args.steps} steps: {after:.4f} (before: {before:.4f})")
        common.say_speed(args, trained.metrics["train_runtime"], process)
        common.say_state(trainer.optimizer, process)

        common.say_overwritten(args.output, process)
        trainer.save_model(str(args.output))
        dist.barrier()  # rank 0 writes, all ranks read
        process.say(f"adapter saved in {args.output}; loading it into a fresh base")
        reloaded = common.load_lora(source, args.output, process.device).to(process.device)
        common.check_reloaded(common.held_out_loss(reloaded, held_out, process), after, process)


if __name__ == "__main__":
    main()
