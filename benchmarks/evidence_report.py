"""Tables, figure and verdict from the results of `fsdp2_evidence.py`; needs neither torch nor a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LIMIT = 0.005  # of the 32-bit run's final held-out loss
OURS = "bnb_fsdp "
REFERENCE = "torch AdamW fused"
WHY_NOT = ("error", "not_run")
NAMED_KINDS = {
    "collectives": "collectives", "copies": "copies", "device_copies": "copies on the device",
    "memsets": "memsets", "synchronisations": "synchronisations", "allocations": "cudaMalloc and the like",
}  # fmt: skip
FAULTY_KINDS = ("collectives", "copies", "device_copies", "synchronisations")


def compare(mode: str, runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Final held-out losses of a mode: 8 bits relative to 32, and 32 relative to torch's if there is one. None until
    both of ours have run."""
    final = {row["optimizer"]: row["held_out_after"] for row in runs if row["mode"] == mode}
    eight, full = final.get("bnb_fsdp AdamW8bit"), final.get("bnb_fsdp AdamW32bit")
    if eight is None or full is None:
        return None
    theirs = final.get("torch AdamW fused")
    difference = abs(eight - full) / full
    return {
        "mode": mode, "held_out_8bit": eight, "held_out_32bit": full,
        "held_out_torch": theirs, "relative_difference": difference,
        "relative_difference_32bit_torch": None if theirs is None else abs(full - theirs) / theirs,
        "within_limit": bool(difference <= LIMIT),  # not for nan
    }  # fmt: skip


def faults(result: dict[str, Any]) -> list[str]:
    """What must not be, in words; nothing that was timed."""
    found = []
    for row in result.get("failure", []) + result.get("steps", []):
        if row["optimizer"].startswith(OURS) and (text := next(filter(None, map(row.get, WHY_NOT)), None)):
            found.append(f"{row['optimizer']} ({row.get('dtype', 'failure')}): {text}")
        elif row["optimizer"].startswith(OURS):
            found += _unlikely(row)
    losses = result.get("losses", {})
    compared = {row["mode"] for row in losses.get("comparisons", [])}
    for mode in sorted({row["mode"] for row in losses.get("runs", [])} - compared):
        found.append(f"{mode}: only one of AdamW32bit and AdamW8bit was run")
    for row in losses.get("comparisons", []):
        if not row["within_limit"]:
            found.append(
                f"{row['mode']}: the final held-out loss with 8-bit state, {row['held_out_8bit']:.4f}, is "
                f"{row['relative_difference']:.2%} from {row['held_out_32bit']:.4f} with 32-bit state"
            )
    return found + _trace_faults(result.get("trace"), result["world_size"])


def _unlikely(row: dict[str, Any]) -> list[str]:
    """What a row of ours that ended without an error says against it."""
    found = []
    if not row.get("losses_finite", True):
        found.append(f"{row['optimizer']} ({row['dtype']}): a loss is not finite")
    if row.get("parameters") == "float32":  # of the first step; in bfloat16 weights of 1 do not move
        found += [
            f"{row['optimizer']} (failure), rank {rank}: {each['tensors_changed']} of {here} tensors changed"
            for rank, each in enumerate(row["ranks"])
            if each["tensors_changed"] != (here := each.get("tensors_here", row["tensors"]))
        ]
    return found


def _trace_faults(trace: dict[str, Any] | None, world_size: int) -> list[str]:
    if trace is None:
        return []
    name, found = f"{OURS}AdamW8bit", []
    on_cpu = "kernels" in trace
    for rank, row in enumerate(trace[name]["ranks"]):
        where = f"trace of {name}, rank {rank}"
        if row["steps"] != trace["profiled_steps"]:
            found.append(f"{where}: {row['steps']} steps seen of {trace['profiled_steps']}")
        if not on_cpu and not row["kernels"]:
            found.append(f"{where}: no kernel seen")
        if not on_cpu and not row["returns_before_the_device"]:
            found.append(f"{where}: step() waited for what was queued before it")
        found += [f"{where}: {row[kind]} {NAMED_KINDS[kind]}" for kind in FAULTY_KINDS if row[kind]]
    for rank, row in enumerate(trace[f"{OURS}LAMB8bit"]["ranks"]):
        wanted = {"collectives": trace["profiled_steps"] if world_size > 1 else 0}
        found += [
            f"trace of {OURS}LAMB8bit, rank {rank}: {row[kind]} {NAMED_KINDS[kind]}, expected {wanted.get(kind, 0)}"
            for kind in FAULTY_KINDS
            if row[kind] != wanted.get(kind, 0)
        ]
    for rank, buckets in enumerate(trace[name]["handed_over"]):
        for row in buckets:
            if row["elements"] != row["elements_of_shards"]:
                found.append(
                    f"rank {rank}: kernels get {row['elements']} elements, shards have {row['elements_of_shards']}"
                )
    planted = ("collectives",) if on_cpu else ("collectives", "copies", "synchronisations")
    for rank, row in enumerate(trace["control"]["ranks"]):
        found += [
            f"control, rank {rank}: {row[kind]} {NAMED_KINDS[kind]} seen, {trace['profiled_steps']} planted"
            for kind in planted
            if row[kind] < trace["profiled_steps"]
        ]
    return found


# --- tables ---------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [f"{result['world_size']} ranks ({result['backend']}), {_devices(result)}."]
    if _sharing(result) > 1:
        lines += ["", "Ranks share a GPU: no step was timed."]

    def part(name: str, title: str, rows_of: Callable[[Any], list[str]]) -> list[str]:
        if name not in result:
            return []
        run = _run_line(result.get("measured", {}).get(name, result))
        return ["", f"### {title}", "", run, "", *rows_of(result[name])]

    lines += part("failure", "First step under FSDP2", _failure_table)
    lines += _steps_tables(result.get("steps", []))
    lines += part("losses", "Losses on real text", _losses_table)
    lines += part("trace", "Within step()", _trace_table)
    return "\n".join(lines)


def _sharing(result: dict[str, Any]) -> int:
    """Ranks on one GPU. Older files do not say: they are of one each."""
    return int(result.get("ranks_per_gpu", 1))


def _devices(result: dict[str, Any]) -> str:
    sharing = _sharing(result)
    if result["backend"] != "nccl":
        return str(result["device"])
    if sharing == 1:
        return f"{result['world_size']} x {result['device']}"
    return f"up to {sharing} on one {result['device']}"


def _run_line(run: dict[str, Any]) -> str:
    """Command, date, commit, versions and NCCL's settings of a run; older files' rows do not have all."""
    if "command" not in run:
        return "not recorded"
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items() if version)
    settings = "".join(f", {name}={value}" for name, value in run.get("nccl_settings", {}).items())
    return f"`{run['command']}`, {run['date']}, commit {run['commit']}; {versions}{settings}"


def _steps_tables(rows: list[dict[str, Any]]) -> list[str]:
    """A table for each dtype, and the runs that the rows are of."""
    runs = _runs(rows)
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype]
        lines += ["", f"### {dtype} parameters", "", *_steps_table(own, runs)]
    if len(runs) > 1:
        lines += ["", "Several runs, maybe on several hosts: iterations compare within a run only."]
    if runs:
        lines.append("")
    first = {_run_of(row): row for row in reversed(rows)}
    return lines + [f"* run {number}: {_run_line(first[run])}" for number, run in enumerate(runs, 1)]


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _one_line(text: str, limit: int = 300) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= limit else text[:limit] + " ..."


def _failure_table(rows: list[dict[str, Any]]) -> list[str]:
    def outcome(row: dict[str, Any]) -> str:
        if row.get("not_run"):
            return f"not run: {_one_line(row['not_run'])}"
        return f"fails: {_one_line(row['error'])}" if row["error"] else "works"

    def changed(row: dict[str, Any]) -> str:
        if row.get("not_run"):
            return "-"
        counts = sorted({rank["tensors_changed"] for rank in row["ranks"]})
        return f"{' or '.join(map(str, counts))} of {row['tensors']}"

    header = ("optimizer", "first step", "tensors changed (each rank)")
    lines = _table(header, ((row["optimizer"], outcome(row), changed(row)) for row in rows))
    # Of a record from before they were float32.
    if any("parameters" not in row for row in rows if not row.get("not_run")):
        lines += ["", "bfloat16 on GPUs: the norms' weights of 1 do not move by the learning rate."]
    return lines


def reductions(row: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[float, float | None]:
    """State saved, over all ranks: against 8 bytes a parameter, and against what torch's AdamW was seen to keep."""
    state = sum(row["state_bytes"])
    reference = next(
        (sum(r["state_bytes"]) for r in rows if r["optimizer"] == REFERENCE and "state_bytes" in r), None
    )
    return 1 - state / (8 * sum(row["local_parameters"])), 1 - state / reference if reference else None


def _run_of(row: dict[str, Any]) -> tuple[Any, ...]:
    settings = tuple(sorted(row.get("nccl_settings", {}).items()))
    return row.get("date"), row.get("commit"), row.get("command"), settings


def _runs(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(map(_run_of, rows)))


def _steps_table(rows: list[dict[str, Any]], runs: list[tuple[Any, ...]]) -> list[str]:
    header = (
        "optimizer", "state a rank, MiB", "B/parameter", "less than float32 state", f"less than {REFERENCE}",
        "peak allocated, GiB", "peak reserved, GiB", "step() of the slowest rank, ms: median (p10 to p90)",
        "its iteration, ms", "steps",
        "loss, first to last",
    )  # fmt: skip

    def cells(row: dict[str, Any]) -> list[str]:
        if "state_bytes" not in row:
            text = _one_line(row.get("not_run") or row["error"])
            return [row["optimizer"], f"{_why_not(row)}: {text}", *["-"] * 9]
        by_formula, by_measure = reductions(row, rows)
        finite = "" if row["losses_finite"] else ", NOT FINITE"
        medians = row.get("optimizer_median_ms", [])
        floor = ""
        if medians and "timed_rank" not in row:
            floor = f" on rank 0, medians {', '.join(f'{ms:.2f}' for ms in medians)}"
        if "floor_ms" in row:
            floor += f"; slowest {max(medians) / row['floor_ms']:.2f} x floor"
        few = "" if row["steps"] == row["steps_wanted"] else f" of {row['steps_wanted']}: out of time"
        return [
            row["optimizer"], f"{max(row['state_bytes']) / 2**20:,.1f}",
            f"{sum(row['state_bytes']) / sum(row['local_parameters']):.3f}", _percent(by_formula),
            "-" if by_measure is None else _percent(by_measure), _gibibytes(row["peak_allocated_bytes"]),
            _gibibytes(row["peak_reserved_bytes"]), _times(row.get("optimizer_ms")) + floor,
            _times(row.get("iteration_ms")), f"{row['steps']}{few}",
            f"{row['loss_first']:.3f} to {row['loss_last']:.3f}{finite}",
        ]  # fmt: skip

    if len(runs) == 1:
        return _table(header, map(cells, rows))
    return _table((*header, "run"), ([*cells(row), str(runs.index(_run_of(row)) + 1)] for row in rows))


def _why_not(row: dict[str, Any]) -> str:
    if "not_run" in row:
        return "not run"
    return f"fails at step {row['failed_at_step']}" if "failed_at_step" in row else "fails when made"


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:.1%}"  # + 0.0: no "-0.0%"


def _gibibytes(by_rank: list[int | None]) -> str:
    known = [value for value in by_rank if value is not None]
    return f"{max(known) / 2**30:.2f}" if known else "-"


def _times(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return f"{spread['median']:.2f} ({spread['p10']:.2f} to {spread['p90']:.2f})"


def _losses_table(losses: dict[str, Any]) -> list[str]:
    if "not_run" in losses:
        return [f"Not run: {losses['not_run']}"]
    lines = [
        f"{losses['model']}; {losses['data']}: {losses['training_samples']} samples, {losses['held_out_samples']} "
        f"held out; {losses['steps']} steps of {losses['batch']} samples.",
        "",
    ]
    header = ("run", "optimizer", "held-out loss before", "after", "8-bit from 32-bit", "32-bit from torch")
    differences = {row["mode"]: row for row in losses["comparisons"]}

    def cells(row: dict[str, Any]) -> list[str]:
        difference = differences.get(row["mode"])
        eight = full = ""
        if difference and row["optimizer"] == f"{OURS}AdamW8bit":
            inside = "within" if difference["within_limit"] else "NOT within"
            eight = f"{difference['relative_difference']:.3%}, {inside} {losses['limit']:.1%}"
        if difference and row["optimizer"] == f"{OURS}AdamW32bit":
            relative = difference["relative_difference_32bit_torch"]
            full = "" if relative is None else f"{relative:.3%}"
        before, after = row["held_out_before"], row["held_out_after"]
        return [row["mode"], row["optimizer"], f"{before:.4f}", f"{after:.4f}", eight, full]

    lines += _table(header, map(cells, losses["runs"]))
    return lines + [f"{mode}: not run: {reason}" for mode, reason in losses["not_run_modes"].items()]


def _trace_table(trace: dict[str, Any]) -> list[str]:
    names = [name for name, value in trace.items() if isinstance(value, dict)]
    kinds = [*NAMED_KINDS]
    header = (
        "optimizer",
        *(NAMED_KINDS[kind] for kind in kinds),
        "kernels",
        "allocator requests a step",
        "returns before the device is done",
    )

    def cells(name: str) -> list[str]:
        rows = trace[name]["ranks"]
        kernels = "-" if "kernels" in trace else str(max(sum(k["count"] for k in r["kernels"]) for r in rows))
        asked, early = rows[0]["allocator_requests_a_step"], rows[0]["returns_before_the_device"]
        label = "control: AdamW8bit with an all-reduce and item() planted" if name == "control" else name
        counts = [str(max(row[kind] for row in rows)) for kind in kinds]
        rest = ["-" if value is None else str(value) for value in (asked, early)]
        return [label, *counts, kernels, *rest]

    first = trace[names[0]]
    lines = [f"Calls in {trace['profiled_steps']} profiled steps, of the rank with most.", ""]
    lines += _table(header, map(cells, names))
    seen = max(row["collectives_in_whole_trace"] for row in first["ranks"])
    lines += ["", f"Forward and backward of the same steps: {seen} collectives in the same trace.", ""]
    if "kernels" in trace:
        lines.append(f"Kernels: {trace['kernels']}.")
    else:
        shown = first["ranks"][0]["kernels"]
        lines += _table(
            ("kernel (rank 0)", "grid", "block", "launches", "mean us"),
            (
                [
                    _one_line(k["name"], 90),
                    str(k["grid"]),
                    str(k["block"]),
                    str(k["count"]),
                    f"{k['mean_us']:.1f}",
                ]
                for k in shown
            ),
        )
    header = (
        "rank",
        "bucket",
        "tensors",
        "elements handed over",
        "elements of the shards",
        "of the whole tensors",
    )
    rows = (
        [str(rank), f"{b['bits']}-bit, {b['dtype']}", str(b["tensors"])]
        + [f"{b[key]:,}" for key in ("elements", "elements_of_shards", "elements_of_whole_tensors")]
        for rank, buckets in enumerate(first["handed_over"])
        for b in buckets
    )
    return [*lines, "", *_table(header, rows)]


# --- figure ---------------------------------------------------------------------------------------------

COLOURS = {
    f"{OURS}AdamW8bit": "#d62728", f"{OURS}AdamW32bit": "#ff9896", REFERENCE: "#1f77b4", "flashoptim AdamW": "#2ca02c",
    "torchao AdamW8bit": "#9467bd", "bitsandbytes AdamW8bit": "#8c564b",
}  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> bool:
    """Times of step and iteration, memory, loss curves. False if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result.get("steps", [])
    panels: list[Callable[[Any], None]] = [lambda axis: _draw_memory(axis, rows)]
    timed = _sharing(result) == 1
    if timed:
        panels = [
            lambda axis: _draw_times(axis, rows, "optimizer_ms", "step(): ms, median, p10 to p90", log=True),
            lambda axis: _draw_times(
                axis, rows, "iteration_ms", "whole iteration: ms, median, p10 to p90", log=False
            ),
            *panels,
        ]
    if timed or "losses" in result:
        panels.append(lambda axis: _draw_losses(axis, result.get("losses", {"not_run": "not in this run"})))
    high = math.ceil(len(panels) / 2)
    wide = min(len(panels), 2)
    figure, axes = pyplot.subplots(high, wide, figsize=(7.5 * wide, 5.25 * high), squeeze=False)
    for panel, axis in zip(panels, axes.flat):
        panel(axis)
    size = "tiny Llama" if result["tiny"] else "Llama of 1.1 billion parameters"
    title = f"FSDP2, {result['world_size']} ranks, {_devices(result)}: {size}; torch {result['torch']}"
    figure.suptitle(title, fontsize=None if wide > 1 else 9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _places(rows: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Heights of horizontal bars: a group for each dtype, from the top down."""
    places, at, last = [], 0.0, None
    for row in rows:
        at -= 1.0 if row["dtype"] == last or last is None else 1.8
        last = row["dtype"]
        places.append((at, row))
    return places


def _label(axis: Any, places: list[tuple[float, dict[str, Any]]]) -> None:
    axis.set_yticks(
        [at for at, _ in places], [f"{row['optimizer']}, {row['dtype']}" for _, row in places], fontsize=8
    )
    if places:
        axis.set_ylim(places[-1][0] - 0.8, places[0][0] + 0.8)
    axis.grid(axis="x", which="both", alpha=0.3)
    axis.set_axisbelow(True)
    for at, row in places:
        if "state_bytes" not in row:
            axis.text(
                0.01,
                at,
                _why_not(row),
                transform=axis.get_yaxis_transform(),
                va="center",
                fontsize=8,
                style="italic",
            )


def _draw_times(axis: Any, rows: list[dict[str, Any]], key: str, title: str, log: bool) -> None:
    from matplotlib import ticker

    axis.set_title(title, fontsize=11)
    places = _places(rows)
    runs = _runs(rows)
    shown = [(at, row) for at, row in places if key in row]
    for at, row in shown:
        spread = row[key]
        error = [[spread["median"] - spread["p10"]], [spread["p90"] - spread["median"]]]
        axis.barh(at, spread["median"], 0.8, color=COLOURS.get(row["optimizer"], "grey"), xerr=error, capsize=3,
                  error_kw={"elinewidth": 1})  # fmt: skip
        note = f"  {spread['median']:.2f}" + (
            "" if spread["count"] >= row["steps_wanted"] else f" ({spread['count']} steps)"
        )
        note += f", run {runs.index(_run_of(row)) + 1}" if len(runs) > 1 else ""
        axis.text(max(spread["p90"], spread["median"]), at, note, va="center", fontsize=8)
        if key == "optimizer_ms" and "floor_ms" in row:
            axis.vlines(row["floor_ms"], at - 0.4, at + 0.4, colors="black", linestyles="dashed", linewidth=1)
    if log and shown:
        axis.set_xscale("log")
        low = min(min(row[key]["p10"], row.get("floor_ms", math.inf)) for _, row in shown)
        high = max(row[key]["p90"] for _, row in shown)
        axis.set_xlim(low / 2, high * 4)
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        if any("floor_ms" in row for _, row in shown):
            axis.set_xlabel("dashed: least traffic over the measured copy bandwidth", fontsize=8)
    elif shown:
        axis.set_xlim(0, 1.35 * max(row[key]["p90"] for _, row in shown))
    _label(axis, places)


def _draw_memory(axis: Any, rows: list[dict[str, Any]]) -> None:
    places = _places(rows)
    shown = [(at, row) for at, row in places if "state_bytes" in row]
    peaks = any(row["peak_allocated_bytes"][0] is not None for _, row in shown)
    large = max((max(row["state_bytes"]) for _, row in shown), default=0) > 2**28
    unit, scale = ("GiB", 2**30) if large or peaks else ("KiB", 2**10)
    axis.set_title(
        f"a rank's optimizer state{' (solid) and peak allocated (light)' if peaks else ''}, {unit}",
        fontsize=11,
    )
    right = 0.0
    for at, row in shown:
        colour = COLOURS.get(row["optimizer"], "grey")
        state = max(row["state_bytes"]) / scale
        end, text = state, f"  {state:,.2f}"
        if peaks:
            end = max(row["peak_allocated_bytes"]) / scale
            axis.barh(at, end, 0.8, color=colour, alpha=0.35)
            text = f"  {state:.2f}, peak {end:.2f}"
        saved, _ = reductions(row, rows)
        axis.barh(at, state, 0.8 if not peaks else 0.45, color=colour)
        axis.text(end, at, f"{text} ({_percent(1 - saved)} of float32 state)", va="center", fontsize=8)
        right = max(right, end)
    if shown:
        axis.set_xlim(0, 1.8 * right)
    _label(axis, places)


def _draw_losses(axis: Any, losses: dict[str, Any]) -> None:
    axis.set_title("training loss on real text, mean of 10 steps", fontsize=11)
    if "not_run" in losses:
        axis.set_axis_off()
        axis.text(
            0.5, 0.5, f"not run: {_one_line(losses['not_run'], 60)}", ha="center", transform=axis.transAxes
        )
        return
    dashes = {f"{OURS}AdamW32bit": "-", f"{OURS}AdamW8bit": "--", REFERENCE: ":"}
    hues = {"full": ("#ff9896", "#d62728", "#1f77b4"), "lora": ("#98df8a", "#2ca02c", "#9467bd")}
    widths = {f"{OURS}AdamW32bit": 3.5, f"{OURS}AdamW8bit": 1.6, REFERENCE: 1.6}
    for row in losses["runs"]:
        name = row["optimizer"]
        values = row["losses"]
        window = min(10, len(values))
        mean = [sum(values[i - window : i]) / window for i in range(window, len(values) + 1)]
        axis.plot(
            range(window, len(values) + 1), mean, dashes[name], linewidth=widths[name],
            color=hues[row["mode"]][list(dashes).index(name)],
            label=f"{row['mode']}, {name}: held-out {row['held_out_before']:.3f} to {row['held_out_after']:.4f}",
        )  # fmt: skip
    differences = "; ".join(f"{r['mode']} {r['relative_difference']:.3%}" for r in losses["comparisons"])
    axis.set_xlabel(f"step (final held-out loss, 8-bit from 32-bit: {differences})", fontsize=9)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
