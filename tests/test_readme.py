"""What README.md and docs/paged.md show runs as it is written there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bnb_fsdp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SECONDS = 120


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def environment() -> dict[str, str]:
    package = str(Path(bnb_fsdp.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def program_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def test_the_program_trains_and_saves_on_two_ranks(tmp_path: Path) -> None:
    [program] = blocks(README)
    (tmp_path / "train.py").write_text(program)
    assert "`torchrun --nproc_per_node=2 train.py`" in README
    command = ["-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "AdamW8bit: 4 parameters with state" in finished.stdout
    assert "[Shard(dim=0)]" in finished.stdout
    # Its data are of one seed on both ranks, so that the ranks' mean is one process's gradient.
    torch.manual_seed(torch.default_generator.initial_seed())
    model = program_model()
    optimizer = bnb_fsdp.AdamW8bit(model.named_parameters(), lr=1e-3)
    bnb_fsdp.load_checkpoint(tmp_path / "checkpoints", model, optimizer)
    assert all(float(optimizer.state[p]["step"]) == 10 for p in model.parameters())
    assert optimizer.state[model[0].weight]["state1"].dtype == torch.uint8  # type: ignore[index]
    data = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    losses = [float((each(data) - data).square().mean().detach()) for each in (program_model(), model)]
    assert losses[1] < losses[0] - 0.02


# --- the table of what one writes -------------------------------------------------------------------------

# What is no expression or statement of Python, word for word: each has a test of its own (tests/test_transformers.py,
# tests/test_cli.py).
NOT_PYTHON = {"--optim bnb_fsdp_adamw8bit", "python -m bnb_fsdp run train.py ..."}


def table() -> dict[str, list[str]]:
    """What one uses -> the code in what one writes."""
    rows = README.partition("| you use | you write |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    cells = [re.fullmatch(r"\| (.*?) \| (.*) \|", row) for row in rows]
    assert cells and all(cells)
    return {cell[1]: re.findall(r"`([^`]*)`", cell[2]) for cell in cells if cell}


def model() -> nn.Module:
    """A model with an embedding below another module, and gradients."""
    result = nn.Module()
    result.model = nn.Module()
    result.model.embed_tokens = nn.Embedding(100, 64)
    result.model.head = nn.Linear(64, 128)
    for parameter in result.parameters():
        parameter.grad = torch.ones_like(parameter)
    return result


def names() -> dict[str, Any]:
    """What the table's code takes for granted."""
    ours, other = model(), model()
    params = list(ours.parameters())
    theirs = torch.optim.AdamW(other.parameters())
    theirs.step()
    found: dict[str, Any] = {
        "bnb_fsdp": bnb_fsdp, "load_checkpoint": bnb_fsdp.load_checkpoint, "model": ours, "params": params,
        "optimizer": bnb_fsdp.AdamW8bit(params), "theirs": theirs.state_dict(),
    }  # fmt: skip
    found["optimizer"].step()
    return found


def prepare(use: str, found: dict[str, Any]) -> None:
    """What a row needs of another package."""
    if use == "accelerate":
        found["accelerator"] = pytest.importorskip("accelerate").Accelerator(cpu=True)
    if use == "transformers Trainer":
        pytest.importorskip("accelerate")
        found["TrainingArguments"] = pytest.importorskip("transformers").TrainingArguments
    if use == "state in host memory":
        found["optimizer"] = bnb_fsdp.PagedAdamW8bit(found["params"])
        found["optimizer"].step()
    if use.startswith("state of bitsandbytes"):
        live = pytest.importorskip("bitsandbytes").optim.AdamW8bit(model().parameters())
        found["live_optimizer"] = live
    if use == "bitsandbytes' own optimizers":
        pytest.importorskip("bitsandbytes")


@pytest.mark.filterwarnings("ignore")  # of other packages; ours are looked at elsewhere
@pytest.mark.parametrize("use", table())
def test_the_tables_code_runs(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = names()
    prepare(use, found)
    value: Any = None
    for code in table()[use]:
        if code in NOT_PYTHON:
            continue
        code = code.replace("lr=...", "lr=1e-3")
        try:
            if code.startswith("."):  # of what was shown before it
                value = eval(f"value{code}", {"value": value})
            elif re.match(r"import |[\w, ]+ = ", code):
                exec(code, found)
            else:
                value = eval(code, found)
        except RuntimeError as error:  # on a machine for CPUs; nothing else may go wrong
            reasons = "libbnb_fsdp_cuda.so is missing", "needs a torch that is built for CUDA"
            assert "use_native_kernels" in code and any(reason in str(error) for reason in reasons), error
            return
    if use == "torch":
        bits = {row.name: row.bits for row in bnb_fsdp.describe(value).rows}
        assert bits["model.embed_tokens.weight"] == 32 and bits["model.head.weight"] == 8


def test_every_row_shows_code_that_is_tried() -> None:
    rows = table()
    assert len(rows) >= 10
    assert {use for use, code in rows.items() if not set(code) - NOT_PYTHON} == {
        "a program that never imports it"
    }


def test_the_plug_in_for_bitsandbytes_is_there_without_an_import_and_costs_nothing_before() -> None:
    script = """
import sys, bnb_fsdp
loaded = lambda: {name for name in sys.modules if "bitsandbytes" in name}
assert loaded() == set(), loaded()
assert "bitsandbytes" in dir(bnb_fsdp.integrations)
assert loaded() == set(), loaded()
use = bnb_fsdp.integrations.bitsandbytes.use_native_kernels
assert loaded() == {"bnb_fsdp.integrations.bitsandbytes"}, loaded()
try:
    bnb_fsdp.integrations.bitsandbites
except AttributeError as error:
    assert "'bnb_fsdp.integrations' has no attribute 'bitsandbites'" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SECONDS, env=environment())


# --- docs/paged.md ----------------------------------------------------------------------------------------


def test_the_first_snippet_of_paged_goes_into_the_readmes_program() -> None:
    text = (ROOT / "docs" / "paged.md").read_text()
    assert "In the [README's program](../README.md), instead of `AdamW8bit`:\n\n```python" in text
    found: dict[str, Any] = {"bnb_fsdp": bnb_fsdp, "model": model()}
    for statement in ast.parse(blocks(text)[0]).body:
        exec(ast.unparse(statement), found)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*it works as the unpaged class")
            found["optimizer"].step()
    assert found["optimizer"].residency == 4 * 1024**3


def test_numbers_of_the_bitwise_comparison_agree() -> None:
    """The page of differences once had an older run's count."""
    [compared] = set(re.findall(r"compares ([\d,]+) tensors", README))
    assert f"0 of {compared} tensors differ" in (ROOT / "docs" / "parity.md").read_text()
