"""The order of the pipeline's copies and updates, on a made-up runtime that executes them in any order CUDA allows."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SEEDS = 400


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("pipeline") / "harness"
    native, sources = ROOT / "tests" / "native", ROOT / "bnb_fsdp" / "csrc"
    files = [native / "pipeline_harness.cpp", sources / "cuda" / "pipeline.cpp"]
    # Its tensors have tens of bytes.
    flags = ["-std=c++17", "-O1", "-DBNB_FSDP_LEAST_IN_BATCH=64", "-I", native / "fake_cuda", "-I", sources]
    subprocess.run([compiler, *flags, *files, "-o", program], check=True)
    return program


def wrong(harness: Path, *left_out: str) -> int:
    """How many of the seeds' results are not those of a sequential program."""
    run = subprocess.run([harness, str(SEEDS), *left_out], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    words = run.stdout.split()
    assert words[0] == "wrong" and words[2:] == ["of", str(SEEDS)], run.stdout
    return int(words[1])


def test_every_order_that_cuda_allows_gives_the_same_bits(harness: Path) -> None:
    assert wrong(harness) == 0


@pytest.mark.parametrize(
    "wait", ("to_device", "caller", "to_host", "followed", "synchronize", "other_buffers")
)
def test_no_wait_is_superfluous(wait: str, harness: Path) -> None:
    """The test above can fail: without the waits of one stream, of `follow`, of `wait`, or before other buffers."""
    assert wrong(harness, wait) > 0
