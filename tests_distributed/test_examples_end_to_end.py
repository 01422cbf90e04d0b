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
from bnb_fsdp import cli

pytest.importorskip("transformers")
pytest.importorskip("peft")
load_file = pytest.importorskip("safetensors.torch").load_file

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run_any(*command: str, timeout: float = 180) -> tuple[int, str]:
    """Exit status of ``python command`` and what it prints. Its ranks are killed with it if it takes too long."""
    environment = {
        **{
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
            and not key.startswith(("FSDP_", "ACCELERATE_"))
        },
        "CUDA_VISIBLE_DEVICES": "",  # gloo on the CPU, whatever the machine has
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(bnb_fsdp.__file__).parents[1]),
    }
    status, output = torchrun.run([sys.executable, *command], environment, timeout)
    assert status is not None, f"no end after {timeout} s; it had printed:\n{output}"
    return status, output


def run(*command: str, timeout: float = 180) -> str:
    """What ``python command`` prints, if it ends well."""
    status, output = run_any(*command, timeout=timeout)
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


# The example as it is on GPUs: it asks for one before it shards, and accelerate does not shard on CPUs by itself.
SHARDED = f"""\
import sys

sys.path[:0] = {[str(HERE), str(EXAMPLES)]}
import cpu_fsdp_shim
import trainer_lora

trainer_lora.shards = lambda process: process.world > 1
trainer_lora.main()
"""


@pytest.mark.parametrize("parallel", ["DDP", "FSDP2"])
def test_trainer_lora_on_two_ranks(tmp_path: Path, parallel: str) -> None:
    script, adapter = EXAMPLES / "trainer_lora.py", tmp_path / "adapter"
    if parallel == "FSDP2":
        script = tmp_path / "sharded.py"
        script.write_text(SHARDED)
    output = run(*TORCHRUN, str(script), "--model=tiny", "--steps=20", f"--output={adapter}")
    if parallel == "FSDP2":
        assert "parallel: FSDP2 through accelerate" in output and "NO FSDP" not in output
        assert "[Shard(dim=0)]" in output
    else:
        assert "parallel: NO FSDP: accelerate cannot shard on a CPU, so this is DDP" in output
        assert "[Shard(dim=0)]" not in output
    check(output, adapter)


# --- every parameter trained ------------------------------------------------------------------------------

PARAMETERS = 1_313_024
SMALL = 5 * 256  # the norms, each below the 4,096 elements from which state is kept in 8 bits


def check_full(output: str, replicas: int = 1) -> tuple[float, float]:
    """Losses fall, state is in 8 bits, and the resumed run ends as the other. Returns the losses around training."""
    before = number(r"held-out loss before training: ([0-9.]+)", output)
    after = number(r"held-out loss after 8 steps: ([0-9.]+)", output)
    resumed = number(r"held-out loss after resuming at step 4: ([0-9.]+)", output)
    assert after < before - 0.5
    assert resumed == pytest.approx(after, abs=1e-4)
    assert f"parameters: {PARAMETERS:,}, all of them trained" in output

    # The resumed run prints the losses of the second half once more, the same to the last digit.
    lines = re.findall(r"\] (step \d of 8: mean loss since step \d: [0-9.]+)", output)
    assert len(lines) == 12 and lines[4:8] == lines[8:]
    losses = [float(line.rpartition(" ")[2]) for line in lines[:8]]
    assert sum(losses[4:]) < sum(losses[:4]) - 1

    state = number(r"optimizer state over all ranks: ([0-9,]+) bytes", output)
    assert 2 * PARAMETERS < state < replicas * (2.1 * PARAMETERS + 8 * SMALL)
    assert number(r"speed: ([0-9,]+) tokens per second", output) > 0
    return before, after


def check_checkpoint(folder: Path, ranks: int) -> None:
    """Complete, and readable by this package's own tool."""
    assert len(list(folder.glob("*.distcp"))) == ranks
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0


@pytest.fixture(scope="module")
def cpu_offload(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("cpu_offload")
    command = ("--model=tiny", "--steps=8", f"--output={folder}")
    return run(*TORCHRUN, str(EXAMPLES / "cpu_offload.py"), *command), folder


def test_cpu_offload_on_two_ranks(cpu_offload: tuple[str, Path]) -> None:
    output, folder = cpu_offload
    check_full(output)
    assert "offload: the 21 sharded parameters are on: cpu" in output
    assert (
        "there is no GPU, so CPUOffloadPolicy(pin_memory=False) takes the same path through FSDP2" in output
    )
    assert re.search(
        r"optimizer step on the CPU: backend (cpu|torch), 1 thread a rank, [0-9.]+ ms a step", output
    )
    assert "[Shard(dim=0)]" in output
    check_checkpoint(folder / "step-4", ranks=2)


def test_tensor_parallel_on_two_ranks_keeps_the_checkpoint_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    command = ("--model=tiny", "--steps=8", f"--output={tmp_path}")
    output = run(*TORCHRUN, str(EXAMPLES / "tensor_parallel.py"), *command)
    assert "mesh: data 1 x tensor 2" in output
    check_full(output, replicas=2)
    assert f"{tmp_path} has the checkpoint of an earlier run, so this one's name ends in -run-2" in output
    assert not list((tmp_path / "step-4").iterdir())
    check_checkpoint(tmp_path / "step-4-run-2", ranks=2)


def test_tensor_parallel_on_four_ranks_trains_as_two_without_it(
    cpu_offload: tuple[str, Path], tmp_path: Path
) -> None:
    """Two shares of the samples on either, so but for rounding the losses are those of FSDP2 alone."""
    four = [*TORCHRUN[:-1], "--nproc_per_node=4"]
    command = ("--model=tiny", "--steps=8", "--tensor-parallel=2", f"--output={tmp_path}")
    output = run(*four, str(EXAMPLES / "tensor_parallel.py"), *command)
    assert "mesh: data 2 x tensor 2" in output
    for placement in (
        "[Shard(dim=0)]",
        "[_StridedShard(dim=0, sf=2), Shard(dim=0)]",
        "[Shard(dim=0), Shard(dim=1)]",
    ):
        assert placement in output
    losses = check_full(output, replicas=2)
    assert losses == pytest.approx(check_full(cpu_offload[0]), abs=5e-3)
    check_checkpoint(tmp_path / "step-4", ranks=4)


def test_full_finetune_with_accelerate_on_two_ranks(tmp_path: Path) -> None:
    """Without the file of launch/ (test_launch_files.py has it) and so, on a CPU, without FSDP."""
    import transformers

    command = ("--model=tiny", "--steps=8", f"--output={tmp_path}")
    output = run(*TORCHRUN, str(EXAMPLES / "full_finetune_accelerate.py"), *command)
    assert "parallel: NO FSDP: accelerate cannot shard on a CPU, so this is DDP" in output
    check_full(output, replicas=2)
    assert {file.name for file in (tmp_path / "step-4").iterdir()} >= {"model.safetensors", "optimizer.bin"}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "model").architectures == ["LlamaForCausalLM"]
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == PARAMETERS
    initial = load_file(tmp_path / "step-4" / "model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], initial["lm_head.weight"]), (
        "that is the checkpoint's model"
    )


@pytest.mark.parametrize(
    ("script", "option", "said"),
    [
        (
            "tensor_parallel.py",
            "--tensor-parallel=2",
            "--tensor-parallel 2: does not divide the 1 ranks; possible here: 1.",
        ),
        ("cpu_offload.py", "--optim=adamw8", "argument --optim: unknown optimizer 'adamw8'"),
        ("full_finetune_accelerate.py", "--steps=0", "argument --steps: '0' must be an integer above 0"),
    ],
    ids=["uneven split", "optimizer", "steps"],
)
def test_a_mistake_is_answered_in_one_line(script: str, option: str, said: str) -> None:
    status, output = run_any(str(EXAMPLES / script), option)
    assert status == 2
    assert said in output.splitlines()[-1]
    assert "Traceback" not in output
