"""Train every parameter of a language model under FSDP2 with CPUOffloadPolicy, 8-bit optimizer state on the CPU.

    OMP_NUM_THREADS=8 torchrun --nproc_per_node=2 examples/cpu_offload.py

Sharded parameters, gradients and optimizer state stay in host memory; a GPU holds one gathered layer at a time. The
optimizer is the ordinary one: it sees parameters on the CPU and runs the native CPU step there, with a thread budget
per rank. On a machine without a GPU the same code runs and the output says what that leaves out. After an
interruption, the same command with `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

import common
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import bnb_fsdp
from bnb_fsdp.backends.cpu import thread_budget


def shard(model: Any, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> Any:
    """FSDP2 with offload: every decoder layer is one group, the rest (embedding, final norm, head) another."""
    # Pinned memory makes the copies to and from a GPU quicker, and cannot be had without one.
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    layer_classes = model._no_split_modules or ()
    for module in model.modules():
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=policy)


def say_offload(model: Any, process: common.Process) -> None:
    """Print where parameters are and how far this machine can go with offload."""
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    process.say(
        f"offload: the {sum(1 for _ in model.parameters())} sharded parameters are on: {', '.join(devices)}"
    )
    if process.device.type == "cpu":
        process.say(
            "offload: there is no GPU, so CPUOffloadPolicy(pin_memory=False) takes the same path through FSDP2, but "
            "the layers are computed on the CPU too: nothing is copied and no GPU memory is saved"
        )


def say_step(optimizer: Any, stepping: float, steps: int, process: common.Process) -> None:
    """Print which backend the step had, its threads and its time."""
    backends = sorted({row.backend for row in bnb_fsdp.describe(optimizer).rows})
    threads = thread_budget()
    process.say(
        f"optimizer step on the CPU: backend {', '.join(backends)}, {threads} "
        f"{'thread' if threads == 1 else 'threads'} a rank, {1e3 * stepping / max(1, steps):.2f} ms a step"
    )
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if threads < cores:
        process.say(
            f"each rank could have {cores} threads: torchrun sets OMP_NUM_THREADS=1 unless it is set; set "
            f"OMP_NUM_THREADS={cores}, or BNB_FSDP_NUM_THREADS={cores} for the optimizer alone"
        )


def main() -> None:
    args = common.arguments(__doc__, "outputs/cpu_offload", options=common.resume_options)
    with common.processes(offload=True) as process:
        source = common.model_source(args.model)
        process.say(f"devices: {process.label}")
        process.say(f"model: {source.line}")
        train_data, held_out = common.load_data(args, source)
        process.say(f"data: {args.data}, {len(train_data)} samples to train on, {len(held_out)} held out")
        process.say("loading the model")
        mesh = init_device_mesh(process.device.type, (process.world,))

        def build() -> tuple[Any, Any]:
            model = common.load_model(source, process.device, torch.float32)
            model = shard(model, mesh, common.precision(process))
            return model, bnb_fsdp.create_optimizer(args.optim, model.named_parameters(), lr=args.lr)

        model, optimizer = build()
        process.say(common.parameter_line(model))
        say_offload(model, process)
        before = common.held_out_loss(model, held_out, process)
        process.say(f"held-out loss before training: {before:.4f}")
        start, folder = common.resume(args, model, optimizer, process)
        half = (args.steps + 1) // 2
        seconds, stepping = 0.0, 0.0
        if start < half:
            folder = common.checkpoint_folder(args, half, process)
            seconds, stepping = common.train(
                model, optimizer, train_data, args, process, first=start, last=half
            )
            bnb_fsdp.save_checkpoint(folder, model, optimizer, extra={"step": half})
            common.say_saved(folder, process)
        rest = common.train(model, optimizer, train_data, args, process, first=max(start, half))
        seconds, stepping = seconds + rest[0], stepping + rest[1]
        after = common.held_out_loss(model, held_out, process)
        process.say(f"held-out loss after {args.steps} steps: {after:.4f} (before: {before:.4f})")
        common.say_speed(args, seconds, process, start)
        say_step(optimizer, stepping, args.steps - start, process)
        if process.device.type == "cuda":
            process.say(f"GPU memory, peak on this rank: {torch.cuda.max_memory_allocated():,} bytes")
        common.say_state(optimizer, process)

        process.say(f"resuming from {folder} with a fresh model and optimizer")
        del model, optimizer
        model, optimizer = build()
        done = bnb_fsdp.load_checkpoint(folder, model, optimizer)["step"]
        common.train(model, optimizer, train_data, args, process, first=done)
        common.check_resumed(common.held_out_loss(model, held_out, process), after, done, process)


if __name__ == "__main__":
    main()
