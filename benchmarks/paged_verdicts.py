"""What the rows of `paged_steps.py` say about gate B and the project's goals, and its picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paged_trace import Work, timeline

SHOWN = {
    "paged, host": "tab:blue",
    "paged, budget": "tab:cyan",
    "bitsandbytes": "tab:orange",
    "unpaged": "tab:gray",
}

# A step from an idle device over bare copies: copies that were queued beforehand, and copies from an idle device, too.
BOUNDS = {
    "ratio_to_bound": "from an idle device",
    "ratio_to_bound_by_host_clock": "both from an idle device, by the host's clock",
}


def geomean(values: Iterable[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def by_cell(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Cell -> contender -> row."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["cell"], {})[row["contender"]] = row
    return found


def speedups(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Cell -> bitsandbytes' completed time over that of residency="host"."""
    return {
        name: own["bitsandbytes"]["completed"]["median"] / own["paged, host"]["completed"]["median"]
        for name, own in by_cell(rows).items()
        if "bitsandbytes" in own and "paged, host" in own
    }


def resident_ratios(rows: Iterable[dict[str, Any]], contender: str) -> dict[str, float]:
    """Cell -> median over the rounds of the time of back-to-back steps over the unpaged class's in the same round."""
    return {
        name: statistics.median(
            mine / other
            for mine, other in zip(
                own[contender]["back_to_back_rounds"], own["unpaged"]["back_to_back_rounds"]
            )
        )
        for name, own in by_cell(rows).items()
        if contender in own and "unpaged" in own
    }


def resident_ratios_from_idle(rows: Iterable[dict[str, Any]], contender: str) -> dict[str, float]:
    """Cell -> median completed time of single steps from an idle device over the unpaged class's."""
    return {
        name: own[contender]["completed"]["median"] / own["unpaged"]["completed"]["median"]
        for name, own in by_cell(rows).items()
        if contender in own and "unpaged" in own
    }


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal with the measured value, the cell it is worst in, and whether it is met."""
    rows = result["rows"]
    gate = [row for row in rows if row["gate"]]
    found: list[dict[str, Any]] = []

    def judge(what: str, value: float, goal: float, at_most: bool, cell: str = "") -> None:
        met = value <= goal if at_most else value >= goal
        sign = "<=" if at_most else ">="
        found.append({"what": what, "value": value, "goal": f"{sign} {goal}", "cell": cell, "met": met})

    def gains(what: str, some: list[dict[str, Any]], goals: tuple[float, ...], worst: float) -> None:
        ratios = speedups(some)
        if not ratios:
            return
        for goal in goals:
            judge(
                f"{what}: geometric mean against bitsandbytes, {len(ratios)} cells",
                geomean(ratios.values()),
                goal,
                False,
            )
        cell = min(ratios, key=lambda name: ratios[name])
        judge(f"{what}: worst cell against bitsandbytes", ratios[cell], worst, False, cell)

    def of(*families: str) -> list[dict[str, Any]]:
        return [row for row in gate if row["family"] in families]

    gains("8-bit", of("AdamW8bit", "Lion8bit"), (1.15, 2.5), 0.95)
    gains("AdamW 8-bit", of("AdamW8bit"), (1.15, 2.5), 0.95)
    gains("AdamW 32-bit", of("AdamW32bit"), (1.15, 1.5), 0.95)
    for bits, families in (("8-bit", ("AdamW8bit", "Lion8bit")), ("32-bit", ("AdamW32bit",))):
        lists = [row for row in of(*families) if row["kind"] == "transformers"]
        gains(f"{bits}, Transformer's list", lists, (1.15,), 0.95)

    def worst(what: str, ratios: dict[str, float], goal: float) -> None:
        if ratios:
            cell = max(ratios, key=lambda name: ratios[name])
            judge(f"{what}, worst of {len(ratios)} cells (geometric mean {geomean(ratios.values()):.3f})",
                  ratios[cell], goal, True, cell)  # fmt: skip

    host = [row for row in rows if row["contender"] == "paged, host" and "ratio_to_bound" in row]
    for key, timed in BOUNDS.items():
        for what, least, most, goal in (("from 256 MiB up", 256, 1 << 30, 1.08), ("at 64 MiB", 64, 64, 1.2)):
            some = {r["cell"]: r[key] for r in host if least <= r["state_MiB"] <= most and key in r}
            worst(f"host-resident over the two-way bound, {what}, {timed}", some, goal)
    for contender in ("paged, device", "paged, auto"):
        worst(f"{contender} over unpaged, back to back", resident_ratios(rows, contender), 1.03)
    stayed = {r["cell"]: float(r["host_bytes"]) for r in rows if r["contender"] == "paged, auto"}
    if stayed:
        judge("bytes in host memory after auto has settled, sum", sum(stayed.values()), 0, True)
    for row in rows:
        if row["contender"] == "paged, budget":
            judge(
                "peak over the budget of device memory",
                row["peak_bytes"] / max(1, row["policy"]),
                1.0,
                True,
                row["cell"],
            )
    traces = result.get("traces") or {}
    if traces:
        cell = min(traces, key=lambda name: traces[name]["overlap"])
        judge(
            f"overlap of transfers, worst of {len(traces)} traces",
            traces[cell]["overlap"],
            0.3,
            False,
            cell,
        )
    return found


def print_verdicts(result: dict[str, Any]) -> None:
    rows = result["rows"]
    ratios = speedups(rows)
    resident = {c: resident_ratios(rows, c) for c in ("paged, device", "paged, auto")}
    print("\ncell: host-resident against bitsandbytes, over the bound; device and auto over unpaged; overlap")
    for name, own in by_cell(rows).items():
        host = own.get("paged, host", {})
        values = {
            "bitsandbytes": ratios.get(name), "bound": host.get("ratio_to_bound"),
            **{c.removeprefix("paged, "): found.get(name) for c, found in resident.items()},
            "overlap": result["traces"].get(name, {}).get("overlap"),
        }  # fmt: skip
        text = "  ".join(f"{k} {'-' if v is None else f'{v:.3f}'}" for k, v in values.items())
        print(f"{name:38s} {text}")
    for contender in resident:
        idle = resident_ratios_from_idle(rows, contender)
        if idle:
            worst = max(idle, key=lambda name: idle[name])
            print(
                f"{contender} over unpaged, single steps from an idle device, whose rounds vary with the host: "
                f"geometric mean {geomean(idle.values()):.3f}, worst {idle[worst]:.3f} [{worst}]"
            )
    print()
    for v in result["verdicts"]:
        cell = f"  [{v['cell']}]" if v["cell"] else ""
        print(f"{'passed' if v['met'] else 'MISSED'}  {v['what']}: {v['value']:.3f} (goal {v['goal']}){cell}")
    print(flush=True)


def plot(result: dict[str, Any], path: Path) -> None:
    """One step's timeline above the cells' completed times; the vertical marks are the two-way bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = by_cell(result["rows"])
    order = sorted(found, key=lambda name: _order(next(iter(found[name].values()))))
    figure, (top, bars) = pyplot.subplots(
        2, 1, figsize=(11, 3.4 + 0.42 * len(found)), height_ratios=[2.4, max(2.0, 0.42 * len(found))]
    )
    drawn = result.get("timeline")
    if drawn:
        works = [Work(*work) for work in drawn["works"]]
        timeline(top, works, f"{result['device']}: one host-resident step, {drawn['cell']}")
    else:
        top.set_axis_off()
        top.text(0.5, 0.5, "no trace in this run", ha="center")
    present = [c for c in SHOWN if any(c in own for own in found.values())]
    labelled: set[str] = set()
    for place, name in enumerate(order):
        own = [c for c in present if c in found[name]]
        height = 0.8 / len(own)
        for i, contender in enumerate(own):
            row = found[name][contender]
            label = None if contender in labelled else contender
            labelled.add(contender)
            at = place - 0.4 + (i + 0.5) * height
            bars.barh(at, row["completed"]["median"], height, color=SHOWN[contender], label=label)
            if "bound" in row:
                x = row["bound"]["ms"]["median"]
                first = None if "bound" in labelled else "two-way bound of pinned copies"
                labelled.add("bound")
                bars.vlines(x, at - height / 2, at + height / 2, colors="black", linewidth=1.5, label=first)
    bars.set_yticks(range(len(order)), order, fontsize=8)
    bars.margins(y=0.01)
    bars.invert_yaxis()
    bars.set_xscale("log")
    bars.set_xlabel("ms a step, completed (paged, host and budget: state back in host memory)")
    bars.grid(axis="x", which="both", alpha=0.25)
    figure.legend(loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.5 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        row["family"],
        row["dtype"],
        row["state_MiB"],
        row["kind"] not in ("x8", "x64"),
        row["kind"] != "x8",
    )
