"""What the events of a Chrome trace, as torch's profiler writes it, show within an optimizer's step()."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

CALLS = ("cuda_runtime", "cuda_driver")
HOST = re.compile(r"c10d::|_?c10d_functional::|nccl:|gloo:")
RUNTIME = {
    "copies": re.compile(r"cu(da)?Memcpy"),
    "memsets": re.compile(r"cu(da)?Memset"),
    "synchronisations": re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize"),
    "allocations": re.compile(r"cu(da)?(Malloc|Free|HostAlloc|Mem(Alloc|Free|Create|Map))"),
}


def summarise(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the events of a Chrome trace show within the host's ranges of ``Optimizer.step``, all threads counted.

    Device work belongs to the step that launched it (the same correlation number), whenever it runs. Kernels of this
    package belong to a step also if the profiler has not recorded the call that launched them.
    """
    complete = [e for e in events if e.get("ph") == "X" and "ts" in e]
    ranges = [
        (e["ts"], e["ts"] + e.get("dur", 0))
        for e in complete
        if e["name"].startswith("Optimizer.step#") and not str(e.get("cat", "")).startswith("gpu")
    ]

    def inside(event: dict[str, Any]) -> bool:
        return any(start <= event["ts"] <= end for start, end in ranges)

    host = [e for e in complete if e.get("cat") in ("cpu_op", "user_annotation") and inside(e)]
    host = [e for e in host if not e["name"].startswith("Optimizer.step#")]
    calls = [e for e in complete if e.get("cat") in CALLS and inside(e)]
    launched = {number for e in calls if (number := _correlation(e)) is not None}
    recorded = {_correlation(e) for e in complete if e.get("cat") in CALLS}

    def belongs(event: dict[str, Any]) -> bool:
        number = _correlation(event)
        return number in launched or ("bnb_fsdp" in event["name"] and number not in recorded)

    device = [e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and belongs(e)]
    kernels = [e for e in device if e["cat"] == "kernel"]
    by_kind = Counter(HOST.match(e["name"]).group() for e in host if HOST.match(e["name"]))  # type: ignore[union-attr]
    nccl = [e for e in kernels if "nccl" in e["name"].lower()]
    found = {
        kind: [e["name"] for e in calls if pattern.match(e["name"])] for kind, pattern in RUNTIME.items()
    }
    return {
        "steps": len(ranges),
        # One collective shows as an operator, an annotation and a kernel.
        "collectives": max([*by_kind.values(), len(nccl)], default=0),
        **{kind: len(names) for kind, names in found.items()},
        "device_copies": sum(e["cat"] == "gpu_memcpy" for e in device),
        "device_memsets": sum(e["cat"] == "gpu_memset" for e in device),
        "kernels": _kernels(kernels),
        "host_operators": dict(Counter(e["name"] for e in host)),
        "runtime_calls": dict(Counter(e["name"] for e in calls)),
        "collectives_in_whole_trace": sum(
            "nccl" in e["name"].lower() for e in complete if e.get("cat") == "kernel"
        )
        or sum(bool(re.match("c10d::", e["name"])) for e in complete if e.get("cat") == "cpu_op"),
    }


def _correlation(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of one name and launch configuration, with how often they ran and their mean microseconds."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        grid, block = event["args"].get("grid"), event["args"].get("block")
        alike.setdefault((event["name"], json.dumps([grid, block])), []).append(event)
    rows = []
    for (name, launch), members in alike.items():
        grid, block = json.loads(launch)
        mean = sum(e.get("dur", 0) for e in members) / len(members)
        rows.append({"name": name, "grid": grid, "block": block, "count": len(members), "mean_us": mean})
    return rows
