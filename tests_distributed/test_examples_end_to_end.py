"""The examples from start to end on the tiny model: two gloo ranks under torchrun, and one plain process."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torchrun

import bnb_fsdp

pytest.importorskip("transformers")
pytest.importorskip("peft")
load_file = pytest.importorskip("safetensors.torch").load_file

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run(*command: str, timeout: float = 180) -> str:
    """What ``python command`` prints. Its ranks are killed with it if it takes too long."""
    environment = {
        **{
            key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        },
        "CUDA_VISIBLE_DEVICES": "",  # gloo on the CPU, whatever the machine has
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(bnb_fsdp.__file__).parents[1]),
    }
    status, output = torchrun.run([sys.executable, *command], environment, timeout)
    assert status is not None, f"no end after {timeout} s; it had printed:\n{output}"
    assert status == 0, f"exit status {status}:\n{output}"
    return output


def number(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    assert found, f"{pattern!r} not in:\n{output}"
    return float(found.group(1).replace(",", ""))


def check(output: str, adapter: Path) -> None:
    before = number(r"held-out loss before training: ([0-9.]+)", output)
    after = number(r"held-out loss after 20 steps: ([0-9.]+)", output)
    reloaded = number(r"held-out loss with the reloaded adapter: ([0-9.]+)", output)
    assert after < before - 0.5
    assert reloaded == pytest.approx(after, abs=1e-4)
    assert number(r"speed: ([0-9,]+) tokens per second", output) > 0

    state = number(r"optimizer state over all ranks: ([0-9,]+) bytes", output)
    float32 = number(r"of the ([0-9,]+) bytes of float32 state", output)
    # Adapters of 4,096 elements and more have two bytes instead of eight, the others are in 32 bits.
    assert 0.25 < state / float32 < 0.35

    weights = load_file(adapter / "adapter_model.safetensors")
    assert len(weights) == 28
    first = weights["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert first.shape == (256, 16) and torch.count_nonzero(first) == first.numel()


def test_peft_lora_on_two_ranks(tmp_path: Path) -> None:
    output = run(
        *TORCHRUN, str(EXAMPLES / "peft_lora.py"), "--model=tiny", "--steps=20", f"--output={tmp_path}"
    )
    assert "devices: 2 processes on CPU, gloo" in output
    assert "model: tiny Llama with random weights, on bytes (--model tiny)" in output
    assert "[Shard(dim=0)]" in output
    assert "is overwritten" not in output
    check(output, tmp_path)


def test_peft_lora_in_one_process_and_again_in_the_same_folder(tmp_path: Path) -> None:
    command = (str(EXAMPLES / "peft_lora.py"), "--model=tiny", "--steps=20", f"--output={tmp_path}")
    first = run(*command)
    assert "devices: 1 process on CPU, gloo" in first
    check(first, tmp_path)
    second = run(*command)
    assert f"{tmp_path} has the adapter of an earlier run, which is overwritten" in second
    loss = r"held-out loss after 20 steps: ([0-9.]+)"
    assert number(loss, first) == number(loss, second), "the same seed gave another result"


def test_trainer_lora_on_two_ranks(tmp_path: Path) -> None:
    output = run(
        *TORCHRUN, str(EXAMPLES / "trainer_lora.py"), "--model=tiny", "--steps=20", f"--output={tmp_path}"
    )
    assert "parallel: NO FSDP: accelerate cannot shard on a CPU, so this is DDP" in output
    check(output, tmp_path)
