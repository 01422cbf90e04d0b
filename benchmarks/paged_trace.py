"""One profiled step of a paged optimizer: its copies and kernels, how much of their time overlaps, a timeline."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paged_common import Cuda

MARK = "paged step"
PAUSE = 0.02
ROWS = {"in": "copies in", "kernel": "kernels", "out": "copies out"}
COLOURS = {"in": "tab:blue", "kernel": "tab:orange", "out": "tab:green"}


class Work(NamedTuple):
    """Something the device did: ``kind`` is "in", "out" (copies), "kernel" or "other"; microseconds from the first."""

    kind: str
    stream: int
    start: float
    duration: float
    bytes: int


def profiled(gpu: Cuda, step: Callable[[], Any], warm_up: int = 2) -> list[Work]:
    """What the device did in one ``step``, which has to include the wait for host memory."""
    if gpu.dry:
        return work_of(simulated_events(12))
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(warm_up):
            step()
        gpu.synchronize()
        time.sleep(PAUSE)
        with record_function(MARK):
            step()
            gpu.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return work_of(json.loads(file.read_text())["traceEvents"])


def work_of(events: Iterable[dict[str, Any]]) -> list[Work]:
    """The device's work of a Chrome trace that began within the mark, or in the idle time just before it.

    The profiler brings the device's clock and the host's together, though not to the microsecond.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    marks = [e["ts"] for e in complete if e["name"] == MARK and e.get("cat") == "user_annotation"]
    if not marks:
        raise RuntimeError(f"the trace has no range {MARK!r}; its categories: {_categories(complete)}.")
    first = marks[0] - PAUSE * 1e6 / 2
    device = [
        e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["ts"] >= first
    ]
    if not device:
        raise RuntimeError(
            f"the profiler saw no work of the device; the trace's categories: {_categories(complete)}."
        )
    origin = min(e["ts"] for e in device)
    works = [
        Work(_kind(e), _number(e, "stream"), e["ts"] - origin, e.get("dur", 0.0), _number(e, "bytes"))
        for e in device
    ]
    return sorted(works, key=lambda work: work.start)


def _categories(events: Iterable[dict[str, Any]]) -> str:
    return ", ".join(sorted({str(e.get("cat")) for e in events})) or "none"


def _number(event: dict[str, Any], key: str) -> int:
    return int(event.get("args", {}).get(key, 0))


def _kind(event: dict[str, Any]) -> str:
    if event["cat"] == "kernel":
        return "kernel"
    return "in" if "HtoD" in event["name"] else "out" if "DtoH" in event["name"] else "other"


def overlap(works: Sequence[Work]) -> dict[str, float]:
    """Shares of the time from the first start to the last end (``length_us``).

    ``both_ways``: copies in and out at once. ``copy_and_kernel``: a kernel beside a copy. ``overlap``: either.
    ``in``, ``out``, ``kernel``: at least one of them. ``idle``: none.
    """
    changes = sorted(
        [(w.start, 1, w.kind) for w in works] + [(w.start + w.duration, -1, w.kind) for w in works]
    )
    active = {"in": 0, "out": 0, "kernel": 0, "other": 0}
    spent = dict.fromkeys(("both_ways", "copy_and_kernel", "overlap", "in", "out", "kernel", "idle"), 0.0)
    before = changes[0][0]
    for at, change, kind in changes:
        span, before = at - before, at
        both = bool(active["in"] and active["out"])
        beside = bool(active["kernel"] and (active["in"] or active["out"]))
        now = {
            "both_ways": both, "copy_and_kernel": beside, "overlap": both or beside, "idle": not any(active.values()),
            "in": bool(active["in"]), "out": bool(active["out"]), "kernel": bool(active["kernel"]),
        }  # fmt: skip
        for key, holds in now.items():
            spent[key] += span if holds else 0.0
        active[kind] += change
    length = max(changes[-1][0] - changes[0][0], 1e-9)
    return {"length_us": length, **{key: value / length for key, value in spent.items()}}


def timeline(axis: Any, works: Sequence[Work], title: str) -> None:
    """A row for copies in, kernels and copies out each, with the streams they ran on; a bar for each piece of work."""
    height = 0.7
    rows = list(ROWS)
    for kind in rows:
        own = [w for w in works if w.kind == kind]
        bars = [(w.start * 1e-3, w.duration * 1e-3) for w in own]
        low = len(rows) - 1 - rows.index(kind) - height / 2
        axis.broken_barh(bars, (low, height), facecolors=COLOURS[kind], edgecolors="white", linewidth=0.3)
    names = []
    for kind in rows:
        streams = sorted({w.stream for w in works if w.kind == kind})
        names.append(f"{ROWS[kind]}\nstream {', '.join(map(str, streams)) or 'none'}")
    axis.set_yticks(range(len(rows)), names[::-1])
    axis.set_ylim(-0.5, len(rows) - 0.5)
    axis.set_xlim(left=0)
    axis.set_xlabel("ms from the step's first work on the device (profiled)")
    axis.set_title(title)
    axis.grid(axis="x", alpha=0.3)


def simulated_events(chunks: int) -> list[dict[str, Any]]:
    """A Chrome trace as a pipeline of three buffers would leave it: copies of 40 us each way, kernels of 4 us."""
    copy, kernel = 40.0, 4.0
    base = 1e6
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": MARK, "ts": base - 10, "dur": 3e3},
        {"ph": "X", "cat": "kernel", "name": "an earlier step", "ts": base - 2e4, "dur": 5, "args": {"stream": 7}},
    ]  # fmt: skip

    def add(category: str, name: str, at: float, length: float, stream: int) -> float:
        arguments = {"stream": stream, "bytes": 1 << 21}
        events.append({"ph": "X", "cat": category, "name": name, "ts": at, "dur": length, "args": arguments})
        return at + length

    came = updated = 0.0
    gone: list[float] = []
    for i in range(chunks):
        came = add(
            "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)",
            max(came, gone[i - 3] if i >= 3 else base, base), copy, 13,
        )  # fmt: skip
        updated = add("kernel", "step8", max(came, updated) + 1, kernel, 7)
        gone.append(
            add("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", max([updated + 1, *gone[-1:]]), copy, 14)
        )
    return events
