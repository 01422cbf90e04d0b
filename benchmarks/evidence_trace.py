"""The part "trace" of `fsdp2_evidence.py`: what the profiler saw within step(), and what the kernels were handed."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evidence_common as shared
import torch
import torch.distributed as dist
from evidence_events import RUNTIME, summarise

STEPS = 3
TILE = 4096  # elements that our kernels hand out together
FORBIDDEN = ("collectives", *RUNTIME)


def handed_over(optimizer: Any) -> list[dict[str, Any]]:
    """Of each bucket of the optimizer's plan: how many elements its kernel gets, beside those of the global tensors."""
    rows = []
    for bucket in optimizer._plan._buckets:
        parameters = [optimizer.param_groups[g]["params"][i] for g, i in bucket.positions]
        local = [slot.parameter.numel() for slot in bucket.slots]
        shapes = Counter(
            (tuple(p.shape), tuple(slot.parameter.shape)) for p, slot in zip(parameters, bucket.slots)
        )
        rows.append({
            "bits": bucket.key.bits, "dtype": str(bucket.key.parameter_dtype).removeprefix("torch."),
            "tensors": len(local), "elements": sum(local),
            "elements_of_shards": sum(p.to_local().numel() for p in parameters),
            "elements_of_whole_tensors": sum(p.numel() for p in parameters),
            "tiles": sum(-(-n // TILE) for n in local),
            "tiles_of_whole_tensors": sum(-(-p.numel() // TILE) for p in parameters),
            "shapes": [
                {"global": list(whole), "local": list(part), "tensors": count}
                for (whole, part), count in shapes.items()
            ],
        })  # fmt: skip
    return rows


def trace(options: argparse.Namespace, process: shared.Process) -> dict[str, Any]:
    """Ours, ours with forbidden work added (which the trace has to find), LAMB (one all-reduce) and torch's fused."""
    import bnb_fsdp

    result: dict[str, Any] = {"profiled_steps": STEPS}
    if process.device.type != "cuda":
        result["kernels"] = "not available without a GPU"

    def forbidden(*_: Any) -> None:
        one = torch.ones((), device=process.device)
        dist.all_reduce(one)
        one.item()

    def control(params: Any) -> Any:
        made = bnb_fsdp.AdamW8bit(params, lr=1e-4)
        made.register_step_pre_hook(forbidden)  # runs within the step's range
        return made

    makers: dict[str, Callable[[Any], Any]] = {
        "bnb_fsdp AdamW8bit": lambda params: bnb_fsdp.AdamW8bit(params, lr=1e-4),
        "control": control,
        "bnb_fsdp LAMB8bit": lambda params: bnb_fsdp.LAMB8bit(params, lr=1e-4),
        "torch AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    }
    for name, make in makers.items():
        result[name] = _profiled(name, make, options, process)
        shared.free(process)
        first = result[name]["ranks"][0]
        process.say(f"trace of {name}: " + ", ".join(f"{kind} {first[kind]}" for kind in FORBIDDEN))
    return result


def _profiled(
    name: str, make: Callable[[Any], Any], options: argparse.Namespace, process: shared.Process
) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    cuda = process.device.type == "cuda"
    model = shared.build(options, process, torch.bfloat16)
    optimizer = make(list(model.parameters()))
    data = shared.batches(options, process, 3 + STEPS + 1)
    for tokens in data[:3]:
        shared.forward_backward(model, tokens)
        optimizer.step()
        optimizer.zero_grad()
    shared.synchronize(process)
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as profiler:
        for tokens in data[3 : 3 + STEPS]:
            shared.forward_backward(model, tokens)
            optimizer.step()
            optimizer.zero_grad()
        shared.synchronize(process)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        found = summarise(json.loads(file.read_text())["traceEvents"])
    shared.forward_backward(model, data[-1])
    before = _blocks_allocated() if cuda else None
    optimizer.step()
    found["allocator_requests_a_step"] = _blocks_allocated() - before if before is not None else None
    found["returns_before_the_device"] = _returns_early(optimizer) if cuda else None
    report: dict[str, Any] = {"ranks": shared.gather(found)}
    if name.startswith("bnb_fsdp"):
        report["handed_over"] = shared.gather(handed_over(optimizer))
    return report


def _returns_early(optimizer: Any) -> bool:
    """Whether step() is done on the host while the stream is still at work that was queued before it.

    Also sees what waits in native code that the profiler does not look into.
    """
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)  # cycles: about 0.2 s
    busy.record()
    optimizer.step()
    early = not busy.query()
    torch.cuda.synchronize()
    return early


def _blocks_allocated() -> int:
    """How often device memory was asked of torch's allocator until now."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])
