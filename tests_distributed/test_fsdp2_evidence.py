"""`benchmarks/fsdp2_evidence.py` on tiny models with two gloo ranks; what it makes of faults and of a GPU's trace."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ranks
import torch
import torchrun

import bnb_fsdp

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "fsdp2_evidence.py"
KINDS = ("collectives", "copies", "device_copies", "memsets", "synchronisations", "allocations")
STEPS = 3


def module(name: str) -> ModuleType:
    """A helper of the benchmark that needs neither torch nor the other helpers."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


REPORT, EVENTS = module("evidence_report"), module("evidence_events")


def run(*arguments: str, ranks: int = 0) -> tuple[int, str]:
    environment = {
        **{
            key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        },
        "CUDA_VISIBLE_DEVICES": "",  # gloo on the CPU, whatever the machine has
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(bnb_fsdp.__file__).parents[1]),
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    status, output = torchrun.run([sys.executable, *launcher, str(SCRIPT), *arguments], environment, 180)
    assert status is not None, f"no end after 180 s; it had printed:\n{output}"
    return status, output


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a run, which also wrote a figure."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("evidence") / "result.json"
    parts = ("--parts", "failure", "steps", "trace", "--steps", str(STEPS), "--warmup", "2")
    status, output = run(
        "--tiny", *parts, "--json", str(path), "--png", str(path.with_suffix(".png")), ranks=2
    )
    assert status == 0, f"exit status {status}:\n{output}"
    assert "### First step under FSDP2" in output and "FAULT" not in output
    return path


@pytest.fixture
def result(written: Path) -> Any:
    return json.loads(written.read_text())


def shapes(result: dict[str, Any]) -> list[torch.Size]:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return [p.shape for p in LlamaForCausalLM(LlamaConfig(**result["model"])).parameters()]


def local_numel(shape: torch.Size, rank: int, world: int) -> int:
    """Elements of FSDP2's shard: rows, dealt out in equal stretches of which the last may be shorter."""
    stretch = math.ceil(shape[0] / world)
    rows = max(0, min(shape[0], (rank + 1) * stretch) - rank * stretch)
    return rows * (shape.numel() // shape[0])


def expected_bytes(shape: torch.Size, rank: int, bits: int) -> int:
    """Two states of a shard: codes with a float32 scale for each 256 of them, or float32; and a float32 step count."""
    n = local_numel(shape, rank, 2)
    if bits == 8 and shape.numel() >= 4096:
        return 2 * (n + 4 * math.ceil(n / 256)) + 4
    return 2 * 4 * n + 4


def test_the_state_of_every_optimizer_is_counted_to_the_byte(result: dict[str, Any]) -> None:
    rows = {(row["optimizer"], row["dtype"]): row for row in result["steps"]}
    inventory = shapes(result)
    assert {shape.numel() >= 4096 for shape in inventory} == {True, False}
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        for name, bits in (("bnb_fsdp AdamW8bit", 8), ("bnb_fsdp AdamW32bit", 32)):
            row = rows[name, dtype]
            assert row["parameters"] == sum(shape.numel() for shape in inventory)
            for rank in range(2):
                assert row["local_parameters"][rank] == sum(local_numel(s, rank, 2) for s in inventory)
                assert row["state_bytes"][rank] == sum(expected_bytes(s, rank, bits) for s in inventory)
        fused = rows["torch AdamW fused", dtype]
        for rank, count in enumerate(fused["local_parameters"]):
            assert fused["state_bytes"][rank] == 2 * width * count + 4 * len(inventory)
    assert (
        rows["bnb_fsdp AdamW8bit", "float32"]["local_parameters"][0] != sum(s.numel() for s in inventory) / 2
    )


def test_times_losses_and_what_is_said_of_them_agree(result: dict[str, Any]) -> None:
    for row in result["steps"]:
        if not row["optimizer"].startswith(("bnb_fsdp", "torch AdamW")):
            assert "steps" in row or "error" in row or "not_run" in row
            continue
        assert row["steps"] == row["steps_wanted"] == STEPS and row["warmup_steps"] == 2
        for key in ("optimizer_ms", "iteration_ms", "call_ms"):
            assert row[key]["count"] == STEPS
            assert 0 < row[key]["p10"] <= row[key]["median"] <= row[key]["p90"]
        assert row["iteration_ms"]["median"] > row["optimizer_ms"]["p10"]
        assert row["losses_finite"] and row["loss_last"] < row["loss_first"]
    # The same model and data for all, so the same first loss.
    for dtype in ("float32", "bfloat16"):
        first = {r["loss_first"] for r in result["steps"] if r["dtype"] == dtype and "loss_first" in r}
        assert len(first) == 1
    assert result["versions"]["torch"] and result["world_size"] == 2 and result["backend"] == "gloo"
    assert "fsdp2_evidence.py --tiny" in result["command"] and result["date"]


def test_a_later_run_adds_to_an_earlier_one(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    before = json.loads(written.read_text())
    del before["ranks_per_gpu"]  # as in files from before ranks could share one
    path.write_text(json.dumps(before))
    arguments = ("--tiny", "--add", "--json", str(path), "--warmup", "1")
    more = ("--parts", "steps", "losses", "--only", "torch AdamW", "--steps", "5", "--loss-steps", "3")
    status, output = run(*arguments, *more, ranks=2)
    assert status in (0, 1), output  # three steps need not end within half a percent
    after = json.loads(path.read_text())
    assert after["failure"] == before["failure"] and after["trace"] == before["trace"]
    keys = [(row["optimizer"], row["dtype"]) for row in before["steps"]]
    assert [(row["optimizer"], row["dtype"]) for row in after["steps"]] == keys
    for old, new in zip(before["steps"], after["steps"]):
        is_anew = "torch AdamW" in old["optimizer"]
        assert (new["steps_wanted"] == 5) if is_anew else (new == old)
    assert set(after["measured"]) == {"failure", "steps", "losses", "trace"}
    assert after["measured"]["trace"] == before["measured"]["trace"]
    assert "--parts steps losses" in after["measured"]["losses"]["command"]
    runs = [(row["mode"], row["optimizer"]) for row in after["losses"]["runs"]]
    modes = {mode for mode, _ in runs}
    assert "full" in modes and len(runs) == 3 * len(modes)
    for row in after["losses"]["runs"]:
        assert len(row["losses"]) == 3 and row["held_out_after"] < row["held_out_before"]
    assert {row["mode"] for row in after["losses"]["comparisons"]} == modes
    status, output = run(*arguments, "--parts", "failure", ranks=1)
    assert status == 1 and "world_size is 2, here 1: give another file" in output
    assert json.loads(path.read_text()) == after


def test_the_failure_of_bitsandbytes_is_recorded(result: dict[str, Any]) -> None:
    rows = {row["optimizer"]: row for row in result["failure"]}
    ours = rows["bnb_fsdp AdamW8bit"]
    assert ours["error"] is None and [r["tensors_changed"] for r in ours["ranks"]] == [ours["tensors"]] * 2
    pytest.importorskip("bitsandbytes")
    theirs = rows["bitsandbytes AdamW8bit"]
    assert "mixed torch.Tensor and DTensor" in theirs["error"] and theirs["error"].startswith(
        "RuntimeError: "
    )
    assert [r["tensors_changed"] for r in theirs["ranks"]] == [0, 0]
    in_steps = [row for row in result["steps"] if row["optimizer"] == "bitsandbytes AdamW8bit"]
    assert len(in_steps) == 2
    assert all("DTensor" in row["error"] and row["failed_at_step"] == 1 for row in in_steps)


def test_the_trace_sees_planted_collectives_and_none_in_our_step(result: dict[str, Any]) -> None:
    trace = result["trace"]
    assert trace["kernels"] == "not available without a GPU"
    for row in trace["bnb_fsdp AdamW8bit"]["ranks"]:
        assert row["steps"] == 3 and not any(row[kind] for kind in KINDS)
        assert row["collectives_in_whole_trace"] > 0
    assert [row["collectives"] for row in trace["control"]["ranks"]] == [3, 3]
    assert [row["collectives"] for row in trace["bnb_fsdp LAMB8bit"]["ranks"]] == [3, 3]
    inventory = shapes(result)
    for rank, buckets in enumerate(trace["bnb_fsdp AdamW8bit"]["handed_over"]):
        assert {bucket["bits"] for bucket in buckets} == {8, 32}
        for bucket in buckets:
            own = [s for s in inventory if (s.numel() >= 4096) == (bucket["bits"] == 8)]
            assert bucket["tensors"] == len(own)
            assert bucket["elements"] == sum(local_numel(s, rank, 2) for s in own)
            assert bucket["elements_of_whole_tensors"] == sum(s.numel() for s in own)


def test_table_and_figure_come_from_the_file_too(written: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.png"
    status, output = run("--from", str(written), "--png", str(again))
    assert status == 0 and again.read_bytes().startswith(b"\x89PNG")
    for title in ("First step under FSDP2", "float32 parameters", "bfloat16 parameters", "Within step()"):
        assert f"### {title}" in output
    columns = {line.count(" | ") for line in output.splitlines() if line.startswith("| bnb_fsdp AdamW")}
    assert len(columns) == 3  # three kinds of tables
    changed = json.loads(written.read_text())
    changed["trace"]["bnb_fsdp AdamW8bit"]["ranks"][1]["collectives"] = 1
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(changed))
    status, output = run("--from", str(bad))
    assert status == 1 and "FAULT: trace of bnb_fsdp AdamW8bit, rank 1: 1 collectives" in output


def test_ranks_that_share_a_gpu_are_not_timed(written: Path, tmp_path: Path) -> None:
    """Neither measured: no time is in the row; nor shown: a result of theirs is a table and a figure without times."""
    row, alone = ranks.run(1, shared_and_alone, on_cpu=True)[0]
    times = {"optimizer_ms", "iteration_ms", "call_ms", "optimizer_median_ms", "timed_rank"}
    assert alone.keys() - row.keys() == times and row.keys() < alone.keys()
    for key in ("state_bytes", "local_parameters", "steps", "loss_first", "loss_last"):
        assert row[key] == alone[key]
    result = json.loads(written.read_text())
    result.update(ranks_per_gpu=2, backend="nccl")
    result["steps"] = [{k: v for k, v in each.items() if k not in times} for each in result["steps"]]
    path = tmp_path / "shared.json"
    path.write_text(json.dumps(result))
    status, output = run("--from", str(path), "--png", str(path.with_suffix(".png")))
    assert status == 0, output
    assert "2 ranks (nccl), up to 2 on one CPU" in output and "no step was timed" in output
    measured = [
        line for line in output.splitlines() if line.startswith("| bnb_fsdp AdamW8bit |") and "%" in line
    ]
    assert len(measured) == 2 and all("| - | - | 3 |" in line for line in measured)
    result["backend"] = "gloo"
    path.write_text(json.dumps(result))
    before = path.read_text()
    status, output = run("--tiny", "--add", "--json", str(path), "--parts", "failure", ranks=2)
    assert status == 1 and "ranks_per_gpu is 2, here 1: give another file" in output
    assert path.read_text() == before


def shared_and_alone() -> list[dict[str, Any]]:
    sys.path.insert(0, str(BENCHMARKS))
    import evidence_common
    import evidence_steps

    options = argparse.Namespace(tiny=True, warmup=2, steps=STEPS, seconds_per_optimizer=60.0)
    rows = []
    for sharing in (4, 1):
        process = evidence_common.Process(0, 1, torch.device("cpu"), ranks_per_gpu=sharing)
        rows.append(
            evidence_steps._measure(evidence_steps.MAKERS["bnb_fsdp AdamW8bit"], "float32", options, process)
        )
    return rows


# --- the verdict ------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_the_result(result: dict[str, Any]) -> None:
    assert REPORT.faults(result) == []


@pytest.mark.parametrize("kind", ["collectives", "copies", "device_copies", "synchronisations"])
def test_forbidden_work_in_our_step_is_a_fault(result: dict[str, Any], kind: str) -> None:
    result["trace"]["bnb_fsdp AdamW8bit"]["ranks"][1][kind] = 2
    [fault] = REPORT.faults(result)
    assert "rank 1: 2 " in fault


@pytest.mark.parametrize("found", [0, 6])
def test_lamb_with_another_number_of_collectives_is_a_fault(result: dict[str, Any], found: int) -> None:
    result["trace"]["bnb_fsdp LAMB8bit"]["ranks"][0]["collectives"] = found
    assert REPORT.faults(result) == [f"trace of bnb_fsdp LAMB8bit, rank 0: {found} collectives, expected 3"]


def test_one_rank_has_nobody_to_reduce_with(result: dict[str, Any]) -> None:
    result["world_size"] = 1
    for row in result["trace"]["bnb_fsdp LAMB8bit"]["ranks"]:
        row["collectives"] = 0
    assert REPORT.faults(result) == []
    result["trace"]["bnb_fsdp LAMB8bit"]["ranks"][0]["collectives"] = 3
    assert REPORT.faults(result) == ["trace of bnb_fsdp LAMB8bit, rank 0: 3 collectives, expected 0"]


def test_a_loss_that_is_not_finite_and_weights_that_do_not_move_are_faults(result: dict[str, Any]) -> None:
    result["steps"][0]["losses_finite"] = False
    result["failure"][0]["ranks"][1]["tensors_changed"] = 20
    assert REPORT.faults(result) == [
        "bnb_fsdp AdamW8bit (failure), rank 1: 20 of 21 tensors changed",
        "bnb_fsdp AdamW8bit (float32): a loss is not finite",
    ]


def test_a_trace_that_sees_nothing_is_a_fault(result: dict[str, Any]) -> None:
    result["trace"]["control"]["ranks"][0]["collectives"] = 0
    assert ["3 planted" in fault for fault in REPORT.faults(result)] == [True]
    result["trace"]["bnb_fsdp AdamW8bit"]["ranks"][0]["steps"] = 0
    assert any("0 steps seen of 3" in fault for fault in REPORT.faults(result))


def test_our_error_is_a_fault_and_a_peers_is_none(result: dict[str, Any]) -> None:
    for row in result["steps"]:
        if row["optimizer"] == "torch AdamW fused":
            row["error"] = "RuntimeError: theirs"
    assert REPORT.faults(result) == []
    result["steps"][1] = {
        "optimizer": "bnb_fsdp AdamW32bit",
        "dtype": "float32",
        "error": "RuntimeError: ours",
    }
    assert REPORT.faults(result) == ["bnb_fsdp AdamW32bit (float32): RuntimeError: ours"]


@pytest.mark.parametrize(("final", "count"), [(2.009, 0), (2.011, 1), (float("nan"), 1)])
def test_half_a_percent_of_held_out_loss_is_the_limit(
    result: dict[str, Any], final: float, count: int
) -> None:
    runs = [
        {"mode": "full", "optimizer": name, "held_out_after": loss}
        for name, loss in (
            ("bnb_fsdp AdamW8bit", final),
            ("bnb_fsdp AdamW32bit", 2.0),
            ("torch AdamW fused", 2.0),
        )
    ]
    result["losses"] = {"comparisons": [REPORT.compare("full", runs)]}
    assert len(REPORT.faults(result)) == count
    assert REPORT.compare("full", runs[:1]) is None and REPORT.compare("lora", runs) is None
    without = REPORT.compare("full", runs[:2])
    assert without["held_out_torch"] is without["relative_difference_32bit_torch"] is None
    result["losses"] = {"comparisons": [], "runs": runs[:1]}  # ended before the other
    assert REPORT.faults(result) == ["full: only one of AdamW32bit and AdamW8bit was run"]


# --- a GPU's trace ----------------------------------------------------------------------------------------


def event(category: str, name: str, start: float, length: float = 1.0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": arguments}


def gpu_trace(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """A step from 100 to 200 that launches two kernels, which run after it; all kinds of work before and after it."""
    return [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "Optimizer.step#AdamW8bit.step", 100, 100),
        event("gpu_user_annotation", "Optimizer.step#AdamW8bit.step", 0, 1000),
        event("cuda_runtime", "cudaLaunchKernelExC", 120, correlation=1),
        event(
            "kernel", "void bnb_fsdp::step8()", 300, 50, correlation=1, grid=[132, 1, 1], block=[288, 1, 1]
        ),
        event("cuda_driver", "cuLaunchKernelEx", 150, correlation=2),
        event("kernel", "void bnb_fsdp::step32()", 350, 5, correlation=2, grid=[4, 1, 1], block=[256, 1, 1]),
        event("cpu_op", "c10d::_allgather_base_", 10, correlation=3),
        event("cuda_driver", "cuLaunchKernelEx", 11, correlation=3),
        event(
            "kernel",
            "ncclDevKernel_AllGather_RING_LL",
            130,
            30,
            correlation=3,
            grid=[24, 1, 1],
            block=[512, 1, 1],
        ),
        event("cuda_runtime", "cudaMemcpyAsync", 250, correlation=4),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 260, correlation=4),
        event("cuda_runtime", "cudaStreamSynchronize", 255),
        *more,
    ]


def test_only_what_the_step_launched_belongs_to_it() -> None:
    found = EVENTS.summarise(gpu_trace())
    assert found["steps"] == 1 and found["collectives_in_whole_trace"] == 1
    assert {kind: found[kind] for kind in KINDS} == dict.fromkeys(KINDS, 0)
    assert [(k["name"], k["grid"], k["count"], k["mean_us"]) for k in found["kernels"]] == [
        ("void bnb_fsdp::step8()", [132, 1, 1], 1, 50),
        ("void bnb_fsdp::step32()", [4, 1, 1], 1, 5),
    ]
    assert found["runtime_calls"] == {"cudaLaunchKernelExC": 1, "cuLaunchKernelEx": 1}


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ([event("cuda_runtime", "cudaMemcpyAsync", 160, correlation=9),
          event("gpu_memcpy", "Memcpy HtoD", 400, correlation=9)], {"copies", "device_copies"}),
        ([event("cuda_runtime", "cudaMemsetAsync", 160)], {"memsets"}),
        ([event("cuda_runtime", "cudaStreamSynchronize", 160)], {"synchronisations"}),
        ([event("cuda_runtime", "cudaDeviceSynchronize", 160)], {"synchronisations"}),
        ([event("cuda_runtime", "cudaEventSynchronize", 160)], {"synchronisations"}),
        ([event("cuda_runtime", "cudaMalloc", 160)], {"allocations"}),
        ([event("cuda_driver", "cuLaunchKernelEx", 160, correlation=9),
          event("kernel", "ncclDevKernel_AllReduce", 500, correlation=9)], {"collectives"}),
        ([event("cpu_op", "c10d::allreduce_", 160), event("user_annotation", "nccl:all_reduce", 161)], {"collectives"}),
        ([event("cuda_runtime", "cudaEventQuery", 160), event("cuda_runtime", "cudaStreamWaitEvent", 161)], set()),
    ],
    ids=lambda value: " and ".join(e["name"] for e in value) if isinstance(value, list) else "",
)  # fmt: skip
def test_forbidden_work_within_the_step_is_counted(more: list[dict[str, Any]], kinds: set[str]) -> None:
    found = EVENTS.summarise(gpu_trace(*more))
    assert {kind for kind in KINDS if found[kind]} == kinds
    assert all(found[kind] == 1 for kind in kinds)


def test_our_kernels_count_even_if_their_launch_was_not_recorded() -> None:
    trace = [e for e in gpu_trace() if e["name"] not in ("cudaLaunchKernelExC",)]
    assert sum(k["count"] for k in EVENTS.summarise(trace)["kernels"]) == 2
