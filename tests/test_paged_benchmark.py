"""The benchmark of paged steps: that it runs, on the simulated device, and what its verdicts make of known times."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_dry_run_writes_every_contender(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["--dry", "--only", "AdamW8bit 16 MiB x8", "--json", path]
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "paged_steps.py", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(path.read_text())
    assert result["failed"] == [] or all("bitsandbytes" in failure for failure in result["failed"])
    rows = {row["contender"]: row for row in result["rows"]}
    assert {"paged, host", "paged, device", "paged, auto", "unpaged"} <= set(rows)
    host = rows["paged, host"]
    assert host["host_bytes"] == host["state_bytes"] > 0 and host["chunks"] > 0
    assert rows["paged, auto"]["host_bytes"] == rows["paged, device"]["host_bytes"] == 0
    assert host["behind"]["median"] > 0 and host["ratio_to_bound"] == pytest.approx(
        host["completed"]["median"] / host["bound"]["ms"]["median"]
    )
    for verdict in result["verdicts"]:
        assert f"{verdict['what']}: {verdict['value']:.3f}" in run.stdout


def row(cell: str, contender: str, completed: float, **more: Any) -> dict[str, Any]:
    family, mib, _, kind, dtype = cell.split()
    return {
        "cell": cell, "family": family, "state_MiB": int(mib), "kind": kind, "gate": True, "dtype": dtype,
        "contender": contender, "completed": {"median": completed}, "host_bytes": 0, "peak_bytes": 0, **more,
    }  # fmt: skip


def test_verdicts_of_known_times(modules: Any) -> None:
    small, large = "AdamW8bit 64 MiB x8 bf16", "AdamW8bit 256 MiB x8 bf16"
    bounds = {"ratio_to_bound": 1.19, "ratio_to_bound_by_host_clock": 1.1}
    over = {"ratio_to_bound": 1.09, "ratio_to_bound_by_host_clock": 1.05}
    rows = [
        row(small, "paged, host", 2.0, **bounds), row(small, "bitsandbytes", 4.0),
        row(large, "paged, host", 6.0, **over), row(large, "bitsandbytes", 48.0),
        row(large, "paged, device", 1.0, back_to_back_rounds=[1.0, 2.2, 3.0]),
        row(large, "unpaged", 1.0, back_to_back_rounds=[1.0, 2.0, 2.0]),
        row(large, "paged, budget", 1.0, peak_bytes=90, policy=100),
    ]  # fmt: skip
    found = {
        v["what"].split(", worst of")[0]: v
        for v in modules("paged_verdicts").verdicts({"rows": rows, "traces": {large: {"overlap": 0.2}}})
        if v["goal"] != ">= 1.15"
    }

    def value(what: str) -> tuple[float, bool]:
        [verdict] = [v for name, v in found.items() if name.startswith(what)]
        return verdict["value"], verdict["met"]

    assert value("8-bit: geometric mean") == (pytest.approx(4.0), True)  # of 2 and 8
    assert value("8-bit: worst cell") == (pytest.approx(2.0), True)
    idle, host_clock = "from an idle device", "both from an idle device, by the host's clock"
    over_bound = "host-resident over the two-way bound"
    assert value(f"{over_bound}, from 256 MiB up, {idle}") == (1.09, False)
    assert value(f"{over_bound}, from 256 MiB up, {host_clock}") == (1.05, True)
    assert value(f"{over_bound}, at 64 MiB, {idle}") == (1.19, True)
    assert value("paged, device over unpaged") == (pytest.approx(1.1), False)  # median of 1, 1.1 and 1.5
    assert value("peak over the budget") == (pytest.approx(0.9), True)
    assert value("overlap of transfers") == (pytest.approx(0.2), False)
