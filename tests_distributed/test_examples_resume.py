"""The examples with ``--resume``: killed after a checkpoint, the same command goes on from it to the same end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_examples_end_to_end import EXAMPLES, TORCHRUN, check_checkpoint, number, run, run_any

KILLED = """\
import os
import signal
import sys

sys.path.insert(0, {folder!r})
import common
import {name}

say_saved = common.say_saved


def killed(*arguments):
    say_saved(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


common.say_saved = killed
{name}.main()
"""


def steps_of(output: str) -> list[str]:
    return re.findall(r"step \d of 8: mean loss since step \d: [0-9.]+", output)


@pytest.mark.parametrize("name", ["cpu_offload", "tensor_parallel"])
def test_the_same_command_goes_on_after_a_kill(tmp_path: Path, name: str) -> None:
    script, saves = EXAMPLES / f"{name}.py", tmp_path / "saves"
    options = ("--model=tiny", "--steps=8")
    whole = run(*TORCHRUN, str(script), *options, f"--output={tmp_path / 'whole'}")
    assert len(steps_of(whole)) == 12  # the example resumes once by itself, at its end

    killed = tmp_path / "killed.py"
    killed.write_text(KILLED.format(folder=str(EXAMPLES), name=name))
    options = (*options, "--resume", f"--output={saves}")
    status, output = run_any(*TORCHRUN, str(killed), *options)
    assert status != 0
    assert f"there is no checkpoint in {saves} yet: starting from the beginning" in output
    assert steps_of(output) == steps_of(whole)[:4]

    resumed = run(*TORCHRUN, str(script), *options)
    assert f"going on from {saves / 'step-4'}, saved after step 4 of 8" in resumed
    assert steps_of(resumed) == steps_of(whole)[4:]
    loss = r"held-out loss after 8 steps: ([0-9.]+)"
    assert number(loss, resumed) == number(loss, whole)
    assert number(r"([0-9,]+) tokens per second", resumed) > 0
    assert [item.name for item in saves.iterdir()] == ["step-4"]
    check_checkpoint(saves / "step-4", ranks=2)

    status, output = run_any(str(script), "--model=tiny", "--steps=3", "--resume", f"--output={saves}")
    said = f"--resume: {saves / 'step-4'} was saved after step 4, --steps 3 ends before that; take more."
    assert (status, output.splitlines()[-1]) == (2, said)


def test_a_damaged_checkpoint_is_answered_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "bnb_fsdp.json").write_text("{")
    status, output = run_any(
        str(EXAMPLES / "cpu_offload.py"), "--model=tiny", "--resume", f"--output={tmp_path}"
    )
    assert status == 2 and "Traceback" not in output
    assert f"--resume: {tmp_path} holds no complete checkpoint: " in output.splitlines()[-1]
