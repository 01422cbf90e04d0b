"""The files of launch/ that users copy, each run: on the CPU, with two processes and, where it matters, two "nodes".

As a script this file runs another one with accelerate's FSDP2 made possible on CPUs: see `cpu_fsdp_shim`.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torchrun

import bnb_fsdp

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parent / "launch"
EXAMPLES = HERE.parent / "examples"
CONFIG = LAUNCH / "accelerate_fsdp2.yaml"
SECONDS = 180


def environment(**more: str) -> dict[str, str]:
    """What a user's shell would have, without what an outer launcher or scheduler left in it."""
    foreign = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "FSDP_",
        "ACCELERATE_",
        "SLURM_",
    )
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(foreign)},
        "CUDA_VISIBLE_DEVICES": "",  # gloo on the CPU, whatever the machine has
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(Path(bnb_fsdp.__file__).parents[1]), str(HERE)]),
        **more,
    }


def run(command: Sequence[str], **more: str) -> str:
    status, output = torchrun.run(command, environment(**more), SECONDS)
    assert status is not None, f"no end after {SECONDS} s; it had printed:\n{output}"
    assert status == 0, f"exit status {status}:\n{output}"
    return output


def free_port() -> int:
    """Of the range that slurm.sbatch uses, below the ports that systems give out by themselves."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as tried:
            try:
                tried.bind(("localhost", port))
            except OSError:
                continue
            return port
    raise RuntimeError("100 ports between 20000 and 29999 are taken")


# --- python -m bnb_fsdp run, by each launcher -------------------------------------------------------------

# A program that does not import bnb_fsdp, as LLaMA-Factory, TRL or axolotl do not.
TRAIN = """\
import json, os, sys, time
{shim}
import torch
from torch.distributed.tensor import DTensor
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

[args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, use_cache=False,
))
rows = torch.randint(1, 9, (32, 12), generator=torch.Generator().manual_seed(1))
trainer = Trainer(model=model, args=args, train_dataset=[{{"input_ids": row, "labels": row}} for row in rows])
trainer.train()
optimizer = trainer.optimizer.optimizer
parameters = [p for group in optimizer.param_groups for p in group["params"]]
facts = {{
    "optimizer": type(optimizer).__module__ + "." + type(optimizer).__name__,
    "world": args.world_size,
    "fsdp2": trainer.accelerator.is_fsdp2,
    "sharded": all(isinstance(p, DTensor) for p in parameters),
    "state": sorted({{str(optimizer.state[p]["state1"].dtype) for p in parameters}}),
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
}}
with open(os.path.join(args.output_dir, "rank" + str(args.process_index) + ".json"), "w") as file:
    json.dump(facts, file)
if torch.distributed.is_initialized():
    time.sleep(0.2)  # see examples/common.py: at the end of a process gloo may abort or deadlock otherwise
    torch.distributed.destroy_process_group()
"""
OPTIONS = (
    "--optim=bnb_fsdp_adamw8bit", "--learning_rate=2e-3", "--lr_scheduler_type=constant", "--max_steps=4",
    "--per_device_train_batch_size=4", "--logging_steps=1", "--save_strategy=no", "--report_to=none",
    "--disable_tqdm=true", "--dataloader_pin_memory=false", "--use_cpu=true",
)  # fmt: skip


def train_command(folder: Path, *, fsdp: bool) -> list[str]:
    """The script, written to ``folder``, and its arguments; it reports to ``folder``, too."""
    pytest.importorskip("transformers")
    script = folder / "train.py"
    script.write_text(TRAIN.format(shim="import cpu_fsdp_shim" if fsdp else ""))
    assert "bnb_fsdp" not in script.read_text()
    return [str(script), *OPTIONS, f"--output_dir={folder}"]


def check_trained(folder: Path, world: int, *, fsdp: bool) -> None:
    files = sorted(folder.glob("rank*.json"))
    assert [file.name for file in files] == [f"rank{rank}.json" for rank in range(world)]
    for file in files:
        facts: dict[str, Any] = json.loads(file.read_text())
        assert facts["optimizer"].startswith("bnb_fsdp.") and facts["optimizer"].endswith(".AdamW8bit")
        assert facts["world"] == world
        assert facts["fsdp2"] == facts["sharded"] == fsdp
        assert facts["state"] == ["torch.float32", "torch.uint8"]
        losses = facts["losses"]
        assert len(losses) == 4 and losses[-1] < losses[0] - 0.1


def test_one_node_starts_a_program_that_never_imports_this_package(tmp_path: Path) -> None:
    """torchrun, two processes, FSDP2 by the Trainer's own arguments."""
    command = [
        "bash",
        str(LAUNCH / "one_node.sh"),
        "-m",
        "bnb_fsdp",
        "run",
        *train_command(tmp_path, fsdp=True),
    ]
    # transformers 4 reads the version from the environment alone.
    run([*command, "--fsdp=full_shard auto_wrap"], FSDP_VERSION="2")
    check_trained(tmp_path, 2, fsdp=True)


ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
TWO_BY_CONFIG = (*ACCELERATE, "--config_file", str(CONFIG), "--num_processes=2", "--main_process_port=0")


def test_accelerate_launch_with_the_config_starts_it_under_fsdp2(tmp_path: Path) -> None:
    """The script and its arguments say nothing of FSDP: all of it is from the file."""
    run([*TWO_BY_CONFIG, "--module", "bnb_fsdp", "run", *train_command(tmp_path, fsdp=True)])
    check_trained(tmp_path, 2, fsdp=True)


def test_accelerate_launch_on_the_cpu_starts_one_process(tmp_path: Path) -> None:
    command = [*ACCELERATE, "--cpu", "--num_processes=2", "--module", "bnb_fsdp", "run"]
    run([*command, *train_command(tmp_path, fsdp=False)])
    check_trained(tmp_path, 1, fsdp=False)


# --- accelerate's configuration ---------------------------------------------------------------------------


def test_accelerate_knows_every_key_of_the_config() -> None:
    """accelerate itself checks the outer keys alone; a wrong one in fsdp_config it takes without a word."""
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    loaded = load_config_from_file(str(CONFIG))
    written = yaml.safe_load(CONFIG.read_text())
    options = {action.dest: action for action in launch_command_parser()._actions}
    assert set(loaded.fsdp_config) <= set(options)
    for key, value in loaded.fsdp_config.items():
        choices = options[key].choices
        assert choices is None or str(value) in choices, f"{key}: {value} is none of {choices}"
    assert loaded.fsdp_config == written["fsdp_config"]
    assert (loaded.distributed_type.value, loaded.mixed_precision) == ("FSDP", "bf16")


def test_the_config_gives_accelerate_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file through the launcher's environment to the plugin that shards."""
    pytest.importorskip("accelerate")
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import OffloadPolicy
    from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    command = [f"--config_file={CONFIG}", "--num_processes=2", "--main_process_port=0", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    launched = prepare_multi_gpu_env(args)
    for key in [key for key in os.environ if key.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.delenv(key)
    for key, value in launched.items():
        if key.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.cpu_ram_efficient_loading is True
    assert type(plugin.cpu_offload) is OffloadPolicy  # none; CPUOffloadPolicy is a class below it
    assert plugin.activation_checkpointing is False


def test_the_example_trains_under_fsdp2_by_the_config(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    example = EXAMPLES / "full_finetune_accelerate.py"
    output = run(
        [*TWO_BY_CONFIG, str(HERE / "test_launch_files.py"), str(example), "--model=tiny", "--steps=8",
         f"--output={tmp_path}"]
    )  # fmt: skip
    assert (
        "parallel: FSDP2 through accelerate, SHARDED_STATE_DICT, bf16 mixed precision, from accelerate's "
        "configuration file"
    ) in output
    losses = [float(found) for found in re.findall(r"held-out loss [^:]*: ([0-9.]+)", output)]
    before, after, resumed = losses
    assert after < before - 0.5 and resumed == pytest.approx(after, abs=1e-4)
    assert {folder.name for folder in (tmp_path / "step-4").iterdir() if folder.is_dir()} == {
        "optimizer_0", "pytorch_model_fsdp_0",
    }  # fmt: skip


# --- several nodes ----------------------------------------------------------------------------------------


def test_two_nodes_meet(tmp_path: Path) -> None:
    """Two torchruns on this machine with one process each, started one after the other, train one model."""
    pytest.importorskip("peft")
    load_file = pytest.importorskip("safetensors.torch").load_file
    command = [
        "bash", str(LAUNCH / "several_nodes.sh"), str(EXAMPLES / "peft_lora.py"), "--model=tiny", "--steps=10",
        f"--output={tmp_path}",
    ]  # fmt: skip
    variables = environment(
        HEAD=f"localhost:{free_port()}", NODES="2", PROCESSES="1", NODE_ADDRESS="localhost"
    )
    with ThreadPoolExecutor(2) as pool:
        nodes = []
        for _ in range(2):
            nodes.append(pool.submit(torchrun.run, command, variables, SECONDS))
            time.sleep(0.5)
        ended = [node.result() for node in nodes]
    for status, output in ended:
        assert status == 0, f"exit status {status}:\n{output}"
    [output] = [output for _, output in ended if "devices:" in output]  # rank 0 is on one of them
    assert "devices: 2 processes on CPU, gloo" in output
    assert "the saved adapter gives the same held-out loss" in output
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 28


SBATCH_OPTIONS = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output", "partition",
    "account",
}  # fmt: skip
# srun starts what follows its options once on every node. Anything but long options with a value would be misread.
SRUN = """\
#!/usr/bin/env bash
while [[ "$1" == --* ]]; do
  [[ "$1" =~ ^--(kill-on-bad-exit=1|cpus-per-task=[0-9]+)$ ]] || { echo "srun: invalid option $1" >&2; exit 64; }
  shift
done
for node in 0 1; do
  SLURM_NODEID=$node SLURM_PROCID=$node "$@" & started+=($!)
done
status=0
for one in "${started[@]}"; do wait "$one" || status=1; done
exit $status
"""
SCONTROL = """\
#!/usr/bin/env bash
[ "$*" = "show hostnames node[1-2]" ] || { echo "scontrol: what is $*?" >&2; exit 64; }
printf 'localhost\\nnode2\\n'
"""
RANKS = """\
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
line = f"node {os.environ['SLURM_NODEID']} sum {total.item()} of {dist.get_world_size()} {sys.argv[1:]}"
with open(os.path.join(os.path.dirname(__file__), f"rank{dist.get_rank()}"), "w") as file:
    file.write(line + f" threads {os.environ['OMP_NUM_THREADS']}")
dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
"""


def slurm(folder: Path, **more: str) -> tuple[int | None, str]:
    """Run the batch file as Slurm would on the first node, with stand-ins for its two commands."""
    (folder / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        file = folder / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
    (folder / "ranks.py").write_text(RANKS)
    copy = folder / "slurm_script"  # Slurm runs a copy elsewhere: nothing may be looked for beside it
    copy.write_text((LAUNCH / "slurm.sbatch").read_text())
    variables = environment(PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **more)
    del variables["OMP_NUM_THREADS"]
    return torchrun.run(["bash", str(copy), str(folder / "ranks.py"), "--x", "a b"], variables, SECONDS)


def test_the_slurm_file_starts_one_torchrun_on_every_node(tmp_path: Path) -> None:
    port = free_port()
    job = {"SLURM_JOB_ID": str(port + 50000), "SLURM_JOB_NODELIST": "node[1-2]"}
    status, output = slurm(tmp_path, **job, SLURM_CPUS_PER_TASK="6", SLURM_GPUS_ON_NODE="2")
    assert status == 0, output
    assert f"job {port + 50000}: 2 nodes with 2 processes each, meeting at localhost:{port}" in output
    lines = [(tmp_path / f"rank{rank}").read_text() for rank in range(4)]
    assert sorted(line.partition(" sum")[0] for line in lines) == ["node 0", "node 0", "node 1", "node 1"]
    assert all(line.endswith("sum 10 of 4 ['--x', 'a b'] threads 3") for line in lines), lines


def test_the_slurm_file_outside_a_job_says_how_to_submit_it(tmp_path: Path) -> None:
    status, output = slurm(tmp_path)
    assert (status, output) == (2, "usage: sbatch launch/slurm.sbatch SCRIPT [arguments]\n")


def test_the_slurm_file_needs_the_nodes_names(tmp_path: Path) -> None:
    status, output = slurm(tmp_path, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="odd")
    assert status == 1 and "error: scontrol names no nodes for 'odd'" in output


def test_the_slurm_files_options() -> None:
    """sbatch reads options up to the first command, and only lines that begin with #SBATCH."""
    subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sbatch")], check=True, timeout=60)
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    assert lines[0].startswith("#!")
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [(i, line) for i, line in enumerate(lines) if re.match(r"#+\s*SBATCH", line)]
    assert options and all(i < first_command for i, _ in options)
    matches = [re.fullmatch(r"##?SBATCH --([a-z-]+)=\S+", line) for _, line in options]
    assert all(matches)
    assert {match.group(1) for match in matches if match} == SBATCH_OPTIONS


# --- mistakes and Ctrl-C ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "more", "shown"),
    [
        ("one_node.sh", {}, "bash launch/one_node.sh -m bnb_fsdp run train.py"),
        ("several_nodes.sh", {}, "HEAD=node1:29400 NODES=2 bash launch/several_nodes.sh"),
        ("several_nodes.sh", {"HEAD": "node1:1"}, "NODES            how many nodes"),
    ],
    ids=["one node", "several nodes", "no number of nodes"],
)
def test_a_missing_argument_is_answered_with_the_usage(script: str, more: dict[str, str], shown: str) -> None:
    arguments = ["train.py"] if more else []
    status, output = torchrun.run(["bash", str(LAUNCH / script), *arguments], environment(**more), 60)
    assert status == 2 and shown in output
    assert all(line in (LAUNCH / script).read_text() for line in output.splitlines())
    assert "set -euo" not in output


def test_every_line_to_change_is_named_in_the_table() -> None:
    table = (LAUNCH / "README.md").read_text()
    for file in ("one_node.sh", "several_nodes.sh", "slurm.sbatch", "accelerate_fsdp2.yaml"):
        assert f"| [{file}]({file}) |" in table
        assert "CHANGE" in (LAUNCH / file).read_text()


def test_ctrl_c_ends_every_process_at_once(tmp_path: Path) -> None:
    """SIGINT to torchrun, as a terminal sends it: the ranks end without a traceback of their own."""
    pytest.importorskip("transformers")
    log = tmp_path / "log"
    command = [
        "bash", str(LAUNCH / "one_node.sh"), str(EXAMPLES / "cpu_offload.py"), "--model=tiny", "--steps=1000000",
        f"--output={tmp_path / 'out'}",
    ]  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT)
        ranks: list[int] = []
        try:
            deadline = time.monotonic() + SECONDS
            while "held-out loss before training" not in log.read_text():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            ranks = torchrun._descendants(process.pid)
            assert len(ranks) >= 2
            process.send_signal(signal.SIGINT)
            status = process.wait(60)
        finally:
            outlived = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
            for pid in [*outlived, *([process.pid] if process.poll() is None else [])]:
                os.kill(pid, signal.SIGKILL)
            process.wait()
    assert status != 0
    assert not outlived, "a rank outlived its torchrun"
    # The one traceback is torchrun's own: the ranks have none, which would name lines of the example.
    assert 'examples/cpu_offload.py", line' not in log.read_text()
    assert 'examples/common.py", line' not in log.read_text()


if __name__ == "__main__":
    import cpu_fsdp_shim  # noqa: F401

    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
