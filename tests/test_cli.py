"""The command line: doctor and its self-test, run for scripts and modules."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bnb_fsdp
from bnb_fsdp import backends, cli
from bnb_fsdp.backends import BucketKey, Slot, TorchBackend
from bnb_fsdp.rules import RULES, Hyper, Rule

CPU = torch.device("cpu")
TESTS = len(RULES) * 2 * 3  # bits, dtypes
ROOT = str(Path(bnb_fsdp.__file__).parent.parent)

SHOW = """\
import json, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "imported": "bnb_fsdp" in sys.modules, "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""


def python(*arguments: str, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ROOT, "BNB_FSDP_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


@pytest.fixture
def clean_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives sys.argv and sys.path back after `cli.run` has set them."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the import of transformers in a process of its own, which takes seconds."""
    monkeypatch.setattr(cli, "_trainer", lambda: {"registered": True, "detail": "not looked at"})


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"bnb_fsdp {bnb_fsdp.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["docter"], ["docter", "doctor", "run"]),
        (["run"], ["script", "-m MODULE"]),
        (["run", "-m"], ["-m", "expected one argument"]),
        (["run", "missing.py", "x"], ["missing.py", "no file", "-m"]),
        (["run", "-m", "no_such_module.train"], ["no_such_module.train", "no module"]),
        (["run", "-x", "train.py"], ["-x"]),
        (["doctor", "--yaml"], ["--yaml"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("docter", "run", "doctor") else "",
)
def test_a_usage_error_says_what_is_wrong_with_status_2(
    arguments: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str], clean_process: None
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert all(fragment in error for fragment in fragments), error


def test_no_command_prints_the_help_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "{doctor,run,checkpoint}" in capsys.readouterr().err


def shown(text: str) -> dict[str, Any]:
    """What the script SHOW printed; a script's own name made absolute."""
    values: dict[str, Any] = json.loads(text)
    values["argv"][0] = str(Path(values["file"]).parent / Path(values["argv"][0]).name)
    return values


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    (script.parent / "neighbour.py").write_text("STATUS = 7\n")
    script.write_text(
        SHOW + "import neighbour, pickle\n"
        "class Config: pass\n"
        "assert isinstance(pickle.loads(pickle.dumps(Config())), Config)\n"
        "sys.exit(neighbour.STATUS)\n"
    )
    arguments = ("scripts/train.py", "--optim", "bnb_fsdp_adamw8bit", "-m", "--", "run", "--help")
    plain = python(*arguments, cwd=tmp_path)
    ours = python("-m", "bnb_fsdp", "run", *arguments, cwd=tmp_path)
    assert ours.returncode == plain.returncode == 7, ours.stderr
    assert shown(ours.stdout) == {**shown(plain.stdout), "imported": True}


@pytest.mark.parametrize("module", ["tool.train", "tool"], ids=["module", "package"])
def test_a_module_runs_as_python_would_run_it(
    module: str,
    tmp_path: Path,
    clean_process: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(SHOW)
    (package / "__main__.py").write_text(SHOW)
    plain = python("-m", module, "--lr", "1", "-m", "x", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "-m", module, "--lr", "1", "-m", "x"]) == 0
    assert shown(capsys.readouterr().out) == {**shown(plain.stdout), "imported": True}
    sys.modules.pop("tool", None)


def test_an_exception_of_the_script_is_its_own(tmp_path: Path, clean_process: None) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise KeyError('mine')\n")
    with pytest.raises(KeyError, match="mine"):
        cli.main(["run", str(script)])


def test_a_tool_that_never_imports_this_package_knows_the_names(tmp_path: Path) -> None:
    """The tool is doctor's probe of transformers without its import, so this tries out the probe as well."""
    pytest.importorskip("transformers")
    ours = "import json, bnb_fsdp\n"
    assert ours in cli._TRAINER_PROBE
    without = cli._TRAINER_PROBE.replace(ours, "import json, sys\nbnb_fsdp = sys.modules['bnb_fsdp']\n")
    (tmp_path / "tool.py").write_text(without)
    finished = python("-m", "bnb_fsdp", "run", "tool.py", cwd=tmp_path)
    assert finished.stdout.strip() == "[]", finished.stderr


def test_torchrun_starts_a_module_through_it_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "print(f\"rank {os.environ['RANK']} {sys.argv[1]} {'bnb_fsdp' in sys.modules}\", flush=True)\n"
    )
    finished = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "-m", "bnb_fsdp", "run", "-m", "train", "--x", cwd=tmp_path,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert sorted(re.findall(r"rank \d --x True", finished.stdout)) == ["rank 0 --x True", "rank 1 --x True"]


def test_doctor_reports_on_this_machine_and_finds_it_well(
    capsys: pytest.CaptureFixture[str], no_probe: None
) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for fragment in (
        f"torch         {torch.__version__}", "device cpu", "library cpu", "threads:",
        "names in transformers", f"self-test of torch on cpu: {TESTS} of {TESTS} passed",
    ):  # fmt: skip
        assert fragment in out
    assert out.strip().endswith("all is fine")


def test_doctor_prints_one_json_object(capsys: pytest.CaptureFixture[str], no_probe: None) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["versions"]["bnb_fsdp"] == bnb_fsdp.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert {"path", "build", "instruction_set", "error"} <= set(report["libraries"][0])
    covered = {(t["rule"], t["bits"], t["dtype"]) for t in report["self_tests"] if t["backend"] == "torch"}
    assert covered == {
        (rule, bits, dtype)
        for rule in RULES for bits in (8, 32) for dtype in ("float32", "bfloat16", "float16")
    }  # fmt: skip


def test_doctor_says_why_a_library_is_missing(monkeypatch: pytest.MonkeyPatch, no_probe: None) -> None:
    native = pytest.importorskip("bnb_fsdp.backends.native")

    def load(name: str) -> Any:
        raise native.LibraryError(f"lib{name}.so is not there. Build it.")

    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(backends, "_said", set())
    report = cli._report("auto")
    assert report["libraries"][0]["error"] == "libcpu.so is not there. Build it."
    assert report["devices"][0]["backend"] == "torch"
    assert report["ok"] is True
    report = cli._report("cpu")
    assert report["devices"][0]["backend"] == "none"
    assert "Build it" in report["devices"][0]["error"]
    assert report["ok"] is False
    assert "no device can use the requested backend" in list(cli._text(report))


def test_doctor_refuses_an_unknown_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BNB_FSDP_BACKEND", "tpu")
    assert cli.main(["doctor"]) == 1
    assert "BNB_FSDP_BACKEND='tpu'" in capsys.readouterr().err


class _SpoiltBucket:
    def __init__(self, bucket: Any, slots: Sequence[Slot], spoil: Any) -> None:
        self._bucket, self._slots, self._spoil = bucket, slots, spoil

    def run(self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper]) -> None:
        self._bucket.run(gradients, hypers)
        self._spoil(self._slots[-1])


class SpoiltBackend:
    """The torch backend with an error put into the last tensor."""

    name = "spoilt"

    def __init__(self, spoil: Any) -> None:
        self._spoil = spoil

    def bucket(self, key: BucketKey, rule: Rule, slots: Sequence[Slot]) -> Any:
        return _SpoiltBucket(TorchBackend().bucket(key, rule, slots), slots, self._spoil)


def one_code_off(slot: Slot) -> None:
    if slot.absmax:
        slot.states[0][-1] ^= 1


def one_scale_off(slot: Slot) -> None:
    if slot.absmax:
        slot.absmax[-1][-1] = torch.nextafter(slot.absmax[-1][-1], torch.tensor(9.0))


def state_one_bit_off(slot: Slot) -> None:
    if not slot.absmax:
        slot.states[0][-1] = torch.nextafter(slot.states[0][-1], torch.tensor(9.0))


def move(slot: Slot, steps: int) -> None:
    kind = torch.int32 if slot.parameter.dtype == torch.float32 else torch.int16
    slot.parameter.view(kind)[-1] += steps


def raises(slot: Slot) -> None:
    raise RuntimeError("library broken")


@pytest.mark.parametrize(
    ("spoil", "failing", "detail"),
    [
        (lambda slot: None, 0, ""),
        (lambda slot: move(slot, 1), 0, ""),
        (lambda slot: move(slot, 2), TESTS, "size 5000, step 1: a parameter is 2 units"),
        (one_code_off, TESTS // 2, "size 5000, step 1: state1 differs"),
        (one_scale_off, TESTS // 2, "size 5000, step 1: absmax"),
        (state_one_bit_off, TESTS // 2, "size 5000, step 1: state1 differs"),
        (raises, TESTS, "RuntimeError: library broken"),
    ],
    ids=["nothing", "one ulp", "two ulp", "a code", "a scale", "a 32-bit state", "an exception"],
)
def test_the_self_test_finds(spoil: Any, failing: int, detail: str) -> None:
    results = list(cli.self_test(SpoiltBackend(spoil), CPU))
    failed = [result for result in results if not result["ok"]]
    assert len(results) == TESTS
    assert len(failed) == failing
    assert all(result["detail"].startswith(detail) for result in failed)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_failing_self_test_is_shown_and_gives_status_1(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_probe: None
) -> None:
    monkeypatch.setattr(backends, "select", lambda device, name: SpoiltBackend(one_code_off))
    assert cli.main(["doctor", *(["--json"] if as_json else [])]) == 1
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["ok"] is False
    else:
        assert f"self-test of spoilt on cpu: {TESTS // 2} of {TESTS} passed" in out
        assert "FAILED adam 8-bit float32: size 5000, step 1: state1 differs" in out
        assert out.strip().endswith("a self-test failed: do not train with this backend")


@pytest.mark.parametrize(
    ("probe", "registered", "detail"),
    [
        ("raise ImportError('broken install')", False, "ImportError: broken install"),
        ("print('[\"bnb_fsdp_adam\"]')", False, "unknown to transformers: bnb_fsdp_adam"),
        ("print('[]')", True, f"all {len(bnb_fsdp.optimizer_names())} names"),
        ("print('?')", False, "could not find out"),
    ],
    ids=["broken transformers", "a name missing", "all known", "nonsense"],
)
def test_the_probe_of_transformers_is_reported(
    probe: str, registered: bool, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: types.SimpleNamespace())
    monkeypatch.setattr(cli, "_TRAINER_PROBE", probe)
    found = cli._trainer()
    assert found["registered"] is registered
    assert found["detail"].startswith(detail)


def test_without_transformers_there_is_nothing_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli._trainer()["registered"] is None
