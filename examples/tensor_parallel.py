"""Train a language model on a 2-D mesh: tensor parallel inside, FSDP2 outside, 8-bit optimizer state.

    torchrun --nproc_per_node=4 examples/tensor_parallel.py --tensor-parallel 2

splits every layer over two ranks and shards that over two more (2 x 2); two ranks make 1 x 2, or 2 x 1 with
`--tensor-parallel 1`. Runs on GPUs if there are any and on the CPU otherwise. Parameters lie on two meshes, and some
are sharded twice: the optimizer takes them as they are, and so do save_checkpoint and load_checkpoint. After an
interruption, the same command with `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import common
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bnb_fsdp

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def options(parser: argparse.ArgumentParser) -> None:
    common.resume_options(parser)
    parser.set_defaults(model=common.TINY)
    parser.add_argument(
        "--tensor-parallel",
        type=common.above_zero(int),
        help="ranks that share each layer; must divide the number of ranks and the model's attention heads; "
        "if left out 2 where that is possible, else 1",
    )


def tensor_ranks(args: argparse.Namespace, process: common.Process, model: Any) -> int:
    """How many ranks share each layer. A split that does not come out even is refused, with those that do."""
    config = model.config
    layers = getattr(getattr(model, "model", None), "layers", None)
    names = {name for name, _ in layers[0].named_modules()} if layers else set()
    missing = sorted({*COLUMNS, *ROWS} - names)
    if missing:
        common.fail(
            f"--model {args.model}: its layers have no {', '.join(missing)}; this example splits models that are "
            "built as Llama is (change COLUMNS and ROWS for others)."
        )
    sizes = {
        "ranks": process.world,
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate features": config.intermediate_size,
    }
    fits = [n for n in range(1, process.world + 1) if not any(size % n for size in sizes.values())]
    wanted = args.tensor_parallel or (2 if 2 in fits else 1)
    if wanted not in fits:
        uneven = [f"the {size} {what}" for what, size in sizes.items() if size % wanted]
        common.fail(
            f"--tensor-parallel {wanted}: does not divide {' nor '.join(uneven)}; possible here: "
            f"{', '.join(map(str, fits))}."
        )
    return wanted


def parallelize(model: Any, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> Any:
    """Split every layer's matrices over the axis "tensor", then shard everything over the axis "data"."""
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["data"], mp_policy=precision)
    # Embedding, final norm and head are whole on every rank of a tensor-parallel group.
    return fully_shard(model, mesh=mesh["data"], mp_policy=precision)


def main() -> None:
    args = common.arguments(__doc__, "outputs/tensor_parallel", options=options)
    with common.processes() as process:
        source = common.model_source(args.model)
        process.say(f"devices: {process.label}")
        process.say(f"model: {source.line}")
        process.say("loading the model")
        model = common.load_model(source, process.device, torch.float32)
        process = replace(process, tensor_ranks=tensor_ranks(args, process, model))
        train_data, held_out = common.load_data(args, source)
        process.say(f"data: {args.data}, {len(train_data)} samples to train on, {len(held_out)} held out")
        process.say(common.parameter_line(model))

        shape = (process.replicas, process.tensor_ranks)
        mesh = init_device_mesh(process.device.type, shape, mesh_dim_names=("data", "tensor"))
        process.say(f"mesh: data {shape[0]} x tensor {shape[1]}")

        def build() -> tuple[Any, Any]:
            model = common.load_model(source, process.device, torch.float32)
            model = parallelize(model, mesh, common.precision(process))
            return model, bnb_fsdp.create_optimizer(args.optim, model.named_parameters(), lr=args.lr)

        model, optimizer = build()
        before = common.held_out_loss(model, held_out, process)
        process.say(f"held-out loss before training: {before:.4f}")
        start, folder = common.resume(args, model, optimizer, process)
        half = (args.steps + 1) // 2
        seconds = 0.0
        if start < half:
            folder = common.checkpoint_folder(args, half, process)
            seconds, _ = common.train(model, optimizer, train_data, args, process, first=start, last=half)
            bnb_fsdp.save_checkpoint(folder, model, optimizer, extra={"step": half})
            common.say_saved(folder, process)
        seconds += common.train(model, optimizer, train_data, args, process, first=max(start, half))[0]
        after = common.held_out_loss(model, held_out, process)
        process.say(f"held-out loss after {args.steps} steps: {after:.4f} (before: {before:.4f})")
        common.say_speed(args, seconds, process, start)
        common.say_state(optimizer, process)

        process.say(f"resuming from {folder} with a fresh model and optimizer")
        del model, optimizer
        model, optimizer = build()
        done = bnb_fsdp.load_checkpoint(folder, model, optimizer)["step"]
        common.train(model, optimizer, train_data, args, process, first=done)
        common.check_resumed(common.held_out_loss(model, held_out, process), after, done, process)


if __name__ == "__main__":
    main()
