"""The scripts of launch/ that other tests do not run, and what they do where something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}
LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPT = LAUNCH / "gpu.sh"


def test_gpu_script_explains_itself() -> None:
    result = subprocess.run(
        ["bash", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 2
    assert "bash launch/gpu.sh OUTPUT [tests distributed parity kernels" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_gpu_script_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), str(tmp_path), "tests"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("no CUDA device is visible to torch")


# --- without the environment ------------------------------------------------------------------------------

# A python without torch, and the one of a .venv, which does what it is told without doing it.
NO_TORCH = """\
#!/bin/bash
if [[ "$*" == *torch* ]]; then echo "ModuleNotFoundError: No module named 'torch'" >&2; exit 1; fi
exec {python} "$@"
"""
ANY = """\
#!/bin/bash
case "$*" in
  *device_count*) echo 0 ;;
  *sched_getaffinity*) echo 2 ;;
  "-m pip install "*) echo "installed with SKBUILD_CMAKE_DEFINE=$SKBUILD_CMAKE_DEFINE" ;;
  *torch.distributed.run*) echo "trained" ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("one_node.sh", {}),
        ("several_nodes.sh", {"HEAD": "localhost:1", "NODES": "2"}),
        ("slurm.sbatch", {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a"}),
    ],
    ids=["one node", "several nodes", "Slurm"],
)
def test_a_python_without_torch_is_answered_with_what_to_do(
    script: str, more: dict[str, str], tmp_path: Path
) -> None:
    executable(tmp_path / "python3", NO_TORCH.format(python=sys.executable))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **more}
    environment.pop("PYTHON", None)
    result = subprocess.run(
        ["bash", str(LAUNCH / script), "train.py"],
        capture_output=True, text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    assert "error: python3 cannot import torch. Activate the environment" in result.stderr
    assert ("PYTHON=" if script == "slurm.sbatch" else "source .venv/bin/activate") in result.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a .venv that was made before, beside stand-ins for the system's python; there is no GPU."""
    shutil.copytree(LAUNCH, tmp_path / "checkout" / "launch")
    executable(tmp_path / "checkout" / ".venv" / "bin" / "python", ANY)
    for name in ("python", "python3"):
        executable(tmp_path / "bin" / name, NO_TORCH.format(python=sys.executable))
    executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/bash\nexit 9\n")
    return tmp_path / "checkout"


def quickstart(checkout: Path, cwd: Path, path: str | None = None, **more: str) -> str:
    removed = ("VIRTUAL_ENV", "SKBUILD_CMAKE_DEFINE", "CUDACXX", "CUDA_PATH")
    environment = {key: value for key, value in os.environ.items() if key not in removed}
    environment |= {"PATH": path or f"{checkout.parent / 'bin'}:{os.environ['PATH']}", **more}
    result = subprocess.run(
        ["bash", str(checkout / "launch" / "quickstart.sh"), "--steps", "1"],
        capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trained" in result.stdout
    return result.stdout


def test_the_quickstart_ends_with_how_to_go_on(checkout: Path) -> None:
    inside = quickstart(checkout, checkout).splitlines()
    assert inside[-1] == "== to go on: source .venv/bin/activate"
    outside = quickstart(checkout, checkout.parent).splitlines()
    assert outside[-1] == f"== to go on: source {checkout}/.venv/bin/activate"
    assert "to go on" not in quickstart(checkout, checkout, VIRTUAL_ENV=str(checkout / ".venv"))


def test_the_quickstart_says_when_it_switches_the_cuda_library_off(checkout: Path) -> None:
    shown = quickstart(checkout, checkout)
    assert "installed with SKBUILD_CMAKE_DEFINE=BNB_FSDP_CUDA=OFF" in shown
    note = [line for line in shown.splitlines() if line.startswith("note: ")]
    assert len(note) == 1 and "without its CUDA library (BNB_FSDP_CUDA=OFF)" in note[0]
    assert note[0].endswith(f"SKBUILD_CMAKE_DEFINE=BNB_FSDP_CUDA=ON bash {checkout}/launch/quickstart.sh")
    by_hand = quickstart(checkout, checkout, SKBUILD_CMAKE_DEFINE="BNB_FSDP_CUDA=ON")
    assert "installed with SKBUILD_CMAKE_DEFINE=BNB_FSDP_CUDA=ON" in by_hand and "note: " not in by_hand


def test_the_quickstart_says_that_a_gpu_has_no_compiler(checkout: Path) -> None:
    executable(checkout.parent / "bin" / "nvidia-smi", "#!/bin/bash\necho 9.0\necho 9.0\n")
    for tool in ("bash", "dirname", "basename", "mktemp", "rm", "cp", "sed", "tr", "sort", "cat", "env"):
        found = shutil.which(tool)
        assert found
        (checkout.parent / "bin" / tool).symlink_to(found)
    alone = str(checkout.parent / "bin")  # without nvcc, wherever this machine has it
    shown = quickstart(checkout, checkout, path=alone)
    assert "installed with SKBUILD_CMAKE_DEFINE=BNB_FSDP_CUDA=AUTO;BNB_FSDP_CUDA_ARCHITECTURES=90" in shown
    assert "note: there is a GPU but no nvcc on PATH" in shown
    executable(checkout.parent / "bin" / "nvcc", "#!/bin/bash\n")
    assert "note: " not in quickstart(checkout, checkout, path=alone)
