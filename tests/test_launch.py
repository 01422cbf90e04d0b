"""The scripts of launch/ that other tests do not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}
SCRIPT = Path(__file__).parents[1] / "launch" / "gpu.sh"


def test_gpu_script_explains_itself() -> None:
    result = subprocess.run(
        ["bash", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 2
    assert "bash launch/gpu.sh OUTPUT [tests parity kernels" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_gpu_script_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), str(tmp_path), "tests"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("no CUDA device is visible to torch")
