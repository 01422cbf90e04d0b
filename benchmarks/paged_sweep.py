"""Chunk sizes and numbers of staging buffers, measured, beside what the policy predicts and takes; costs of asking."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from paged_common import MIB, Cuda, sample

import bnb_fsdp
from bnb_fsdp.residency import policy, residency

# MiB of state, list of tensors: few large ones are cut, which takes more copies.
CASES = ((16, "x64"), (64, "x64"), (64, "x8"), (256, "x64"), (256, "x8"), (1024, "x64"))
BUFFERS = (2, 3, 4)


@contextmanager
def pipelines_of(chunk: int, buffers: int) -> Iterator[None]:
    """New pipelines get ``buffers`` staging buffers of ``chunk`` bytes."""
    with mock.patch.multiple(policy, chunk_size=lambda size, speed, limit=None: chunk, BUFFERS=buffers):
        yield


def rebuild(optimizer: Any, chunk: int, buffers: int) -> None:
    """Stream the state, where it is, by other chunks from now on."""
    own = optimizer._residency
    own.wait()
    own._pipelines.clear()
    with pipelines_of(chunk, buffers):
        optimizer.residency = "host"  # drops the plan
        optimizer.step()


def sweep(
    gpu: Cuda,
    make: Callable[[int, str], tuple[list[torch.nn.Parameter], Any]],
    device: torch.device,
    repeats: int = 7,
) -> dict[str, Any]:
    """``make``: MiB of state, list of tensors -> parameters with gradients, their host-resident optimizer."""
    speed = residency._speed(device)
    print(
        f"measured by the policy: one way {speed.one_way * 1e-9:.1f} GB/s, two ways {speed.two_way * 1e-9:.1f} GB/s, "
        f"{speed.chunk_seconds * 1e6:.1f} us a chunk, {speed.copy_seconds * 1e6:.1f} us each further copy of it; "
        f"taken for the host's time: {policy.HOST_SECONDS * 1e6:.1f} us a chunk",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    for mib, kind in CASES:
        params, optimizer = make(mib, kind)
        optimizer.step()
        size = bnb_fsdp.describe(optimizer).host_bytes
        chosen = policy.chunk_size(size, speed)
        for chunk in policy.CHUNK_SIZES:
            if chunk > 2 * size:
                continue
            for buffers in BUFFERS:
                rebuild(optimizer, chunk, buffers)
                times = _timed(gpu, optimizer, repeats)
                chunks = sum(bucket.prepared.chunks for bucket in optimizer._plan._buckets)
                rows.append({
                    "state_MiB": mib, "kind": kind, "bytes": size, "chunk_MiB": chunk // MIB, "buffers": buffers,
                    "chosen": chunk == chosen and buffers == policy.BUFFERS, **times,
                    "chunks": chunks,
                    "copies": sum(copies_of(bucket.prepared) for bucket in optimizer._plan._buckets),
                    "predicted_ms": sum(bucket.prepared.seconds for bucket in optimizer._plan._buckets) * 1e3,
                    "host_us": times["call_ms"] * 1e3 / chunks,
                })  # fmt: skip
        _print_case([row for row in rows if (row["state_MiB"], row["kind"]) == (mib, kind)])
        del params, optimizer
        gpu.release()
    print(f"predicted with an error of {error(rows):.1%} (root of the mean square)", flush=True)
    return {"speed": speed._asdict(), "host_seconds": policy.HOST_SECONDS, "rows": rows}


def _timed(gpu: Cuda, optimizer: Any, repeats: int) -> dict[str, float]:
    wait = optimizer._residency.wait
    sample(gpu, optimizer.step, wait)
    samples = [sample(gpu, optimizer.step, wait) for _ in range(repeats)]
    return {
        "ms": statistics.median(s.completed for s in samples),
        "min": min(s.completed for s in samples),
        "max": max(s.completed for s in samples),
        "call_ms": statistics.median(s.call for s in samples),
    }


def error(rows: list[dict[str, Any]]) -> float:
    """Root of the mean square of predicted over measured minus one, of rows with the policy's number of buffers."""
    own = [row for row in rows if row["buffers"] == policy.BUFFERS]
    return math.sqrt(statistics.mean((row["predicted_ms"] / row["ms"] - 1) ** 2 for row in own))


def copies_of(prepared: Any) -> int:
    """Copies in each direction; 0 where the pipeline does not tell."""
    return len(getattr(prepared._run, "copies", ()))


def _print_case(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{rows[0]['state_MiB']} MiB of 8-bit AdamW state, {rows[0]['kind']}: ms completed (call), * = the policy's"
    )
    print(
        f"{'chunk':>9s}"
        + "".join(f"{f'{b} buffers':>22s}" for b in BUFFERS)
        + "    predicted host us each   chunks   copies"
    )
    for chunk in dict.fromkeys(row["chunk_MiB"] for row in rows):
        own = {row["buffers"]: row for row in rows if row["chunk_MiB"] == chunk}
        cells = [
            f"{'*' if own[b]['chosen'] else ''}{own[b]['ms']:.3f} ({own[b]['call_ms']:.3f})" for b in BUFFERS
        ]
        usual = own[policy.BUFFERS]
        print(
            f"{chunk:5d} MiB" + "".join(f"{cell:>22s}" for cell in cells)
            + f"    {usual['predicted_ms']:9.3f}  {usual['host_us']:12.1f}  {usual['chunks']:7d}  {usual['copies']:7d}"
        )  # fmt: skip
    best = min(rows, key=lambda row: row["ms"])
    chosen = [row for row in rows if row["chosen"]]
    if chosen:
        print(
            f"fastest: {best['chunk_MiB']} MiB, {best['buffers']} buffers; what the policy takes needs "
            f"{chosen[0]['ms'] / best['ms']:.3f} times as long",
            flush=True,
        )


def costs(gpu: Cuda, optimizer: Any, device: torch.device) -> dict[str, float]:
    """Microseconds on the host of what residency="auto" asks before each step; ``optimizer`` has settled."""

    def mean(run: Callable[[], Any], count: int = 200) -> float:
        before = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - before) * 1e6 / count

    asked = optimizer._residency

    def free() -> Any:
        return residency._free_memory(device)

    for run in (free, lambda: asked.is_due(optimizer)):
        mean(run, 10)
    result = {"mem_get_info_us": mean(free), "is_due_us": mean(lambda: asked.is_due(optimizer))}
    if not gpu.dry:
        torch.cuda._sleep(100_000_000)  # some 50 ms of work: does the call wait for it?
        result["mem_get_info_busy_us"] = mean(free, 50)
        gpu.synchronize()
    print(
        "host cost of a call: " + ", ".join(f"{k.removesuffix('_us')} {v:.2f} us" for k, v in result.items())
    )
    return result
