"""What the parts of `fsdp2_evidence.py` share: the model, its data, agreement among ranks, bytes of state, versions."""

from __future__ import annotations

import argparse
import gc
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cuda_inventories as inventories
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bnb_fsdp.cli import installed_versions

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import common

Process = common.Process

# 1.1 billion parameters in 147 tensors.
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32003, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
# Sizes around min_8bit_size, tails of blocks, and 259 rows that two or four ranks cannot share evenly.
TINY = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 259, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
PACKAGES = (
    "torch", "bnb_fsdp", "bitsandbytes", "torchao", "flashoptim", "transformers", "accelerate", "peft", "gguf",
    "triton",
)  # fmt: skip


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    return TINY if options.tiny else {**LLAMA, "num_hidden_layers": options.layers}


def build(options: argparse.Namespace, process: Process, dtype: torch.dtype) -> Any:
    """The Llama under FSDP2, a group for each layer. float32 parameters are gathered and computed with in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with process.device:
        model = LlamaForCausalLM(LlamaConfig(**configuration(options))).to(dtype)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dtype == torch.float32 else None)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=mixed)
    return fully_shard(model, mp_policy=mixed)


def batches(options: argparse.Namespace, process: Process, count: int) -> Tensor:
    """(count, 2, tokens) on the device: the rank's own, the same for every optimizer, with something to learn."""
    tokens, vocabulary = (16, 256) if options.tiny else (256, 32000)
    generator = torch.Generator().manual_seed(process.rank)
    start = torch.randint(0, vocabulary, (count, 2, 1), generator=generator)
    return ((start + 7 * torch.arange(tokens)) % vocabulary).to(process.device)


def forward_backward(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def synchronize(process: Process) -> None:
    if process.device.type == "cuda":
        torch.cuda.synchronize()


def free(process: Process) -> None:
    """Give back what no longer is referred to; every rank, so that none runs ahead."""
    gc.collect()
    if process.device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()


def gather(value: Any) -> list[Any]:
    """``value`` of every rank, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean_over_ranks(values: Iterable[Tensor]) -> list[float]:
    """Scalars, each averaged over the ranks."""
    total = torch.stack([value.double() for value in values])
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def attempt(run: Callable[[], Any]) -> str | None:
    """What ``run`` raised, as text. A reference to the exception would keep its frames' tensors alive."""
    try:
        run()
    except Exception as error:
        # Of the files in a message, the names within their package, without the folders of this machine.
        return re.sub(r'(?<=File ")[^"]*/(?=[^/"]+/[^/"]+/[^/"]+")', "", f"{type(error).__name__}: {error}")
    return None


def state_bytes(optimizer: Any) -> int:
    """Bytes of every tensor in the state on this rank, each storage once; wrappers of tensors are looked into."""
    storages: dict[tuple[torch.device, int], int] = {}
    seen: dict[int, Any] = {}  # holds what it has seen: a number is used again once its object is gone

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, Tensor):
            # DTensor, and the tensor subclasses of torchao.
            inner = getattr(value, "__tensor_flatten__", None)
            if inner is not None:
                for name in inner()[0]:  # with torch 2.13 a DTensor's mesh is among them
                    if isinstance(getattr(value, name), Tensor):
                        walk(getattr(value, name))
            else:
                storage = value.untyped_storage()
                storages[(value.device, storage.data_ptr())] = storage.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            walk(vars(value))  # flashoptim keeps its codes and scales as attributes

    for entry in optimizer.state.values():
        walk(entry)
    return sum(storages.values())


def machine(process: Process) -> dict[str, Any]:
    """What stands beside every figure."""
    if process.device.type == "cuda":
        return inventories.machine()
    return {
        "date": time.strftime("%Y-%m-%d"), "commit": inventories.commit(), "device": f"CPU ({platform.machine()})",
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip


def versions() -> dict[str, str | None]:
    """Of the packages, and of NCCL where there is a GPU."""
    found: dict[str, str | None] = installed_versions(PACKAGES)
    return found | ({"nccl": inventories.nccl_version()} if torch.cuda.is_available() else {})
