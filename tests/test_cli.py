"""The command line: doctor and its self-test, run for scripts and modules."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bnb_fsdp
from bnb_fsdp import backends, cli
from bnb_fsdp.backends import BucketKey, Slot, TorchBackend, cuda, native
from bnb_fsdp.rules import RULES, Hyper, Rule

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
RUN_USAGE = "usage: python -m bnb_fsdp run [-h] (script.py | -m MODULE) [arguments ...]"
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
        (["run"], [RUN_USAGE, "script", "-m MODULE"]),
        (["run", "-m"], [RUN_USAGE, "-m", "expected one argument"]),
        (["run", "missing.py", "x"], [RUN_USAGE, "missing.py", "no file", "-m"]),
        (["run", "-m", "no_such_module.train"], [RUN_USAGE, "no_such_module.train", "no module"]),
        (["run", "-m", ".train"], [RUN_USAGE, "'.train'", "no module"]),
        (["run", "-x", "train.py"], [RUN_USAGE, "-x"]),
        (["doctor", "--yaml"], ["usage: python -m bnb_fsdp doctor [-h] [--json]", "--yaml"]),
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


def nothing_to_run(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Command lines whose target exists, but has no __main__, and what the answer says of it."""
    package = folder / "idle_tool"
    package.mkdir()
    (package / "__init__.py").touch()
    (folder / "data").mkdir()
    with zipfile.ZipFile(folder / "tool.zip", "w") as file:
        file.writestr("train.py", "")
    return {
        "directory": (["data", "--lr", "1"], "'data' is a directory without __main__.py"),
        "zip file": (["tool.zip"], "'tool.zip' is a zip file without __main__.py"),
        "package": (["-m", "idle_tool", "x"], "'idle_tool' is a package without a module __main__"),
    }


@pytest.mark.parametrize("case", ["directory", "zip file", "package"])
def test_what_has_no_main_is_not_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    clean_process: None,
) -> None:  # fmt: skip
    arguments, answer = nothing_to_run(tmp_path)[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert answer in error and RUN_USAGE in error, error


@pytest.mark.parametrize("kind", ["directory", "zip file"])
def test_directories_and_zip_files_with_a_main_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    clean_process: None,
) -> None:  # fmt: skip
    program = "import sys; print('ran', sys.argv[1:])"
    if kind == "directory":
        (tmp_path / "tool").mkdir()
        (tmp_path / "tool" / "__main__.py").write_text(program)
    else:
        with zipfile.ZipFile(tmp_path / "tool", "w") as file:  # as zipapp writes it, without a suffix
            file.writestr("__main__.py", program)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "tool", "--lr"]) == 0
    assert capsys.readouterr().out == "ran ['--lr']\n"


def test_a_package_that_misses_another_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_process: None
) -> None:
    (tmp_path / "broken_tool").mkdir()
    (tmp_path / "broken_tool" / "__init__.py").write_text("import no_such_dependency\n")
    (tmp_path / "broken_tool" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        cli.main(["run", "-m", "broken_tool.train"])


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
    assert "slow torch backend for cpu tensors: libcpu.so is not there." in report["devices"][0]["fallback"]
    assert report["ok"] is True
    assert cli._verdict(report).startswith("works, but cpu uses the slow torch backend")
    report = cli._report("cpu")
    assert report["devices"][0]["backend"] == "none"
    assert "Build it" in report["devices"][0]["error"]
    assert report["ok"] is False
    assert cli._verdict(report) == "no device can use the requested backend"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_probe: None) -> Iterator[None]:
    """A machine with an NVIDIA GPU, torch for CUDA and no library for it; self-tests are left out."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cli, "_devices", lambda: [CPU, GPU])
    monkeypatch.setattr(cli, "_device_name", str)
    monkeypatch.setattr(cli, "self_test", lambda backend, device: iter(()))
    monkeypatch.setattr(backends, "_said", {"everything was said before"})
    (tmp_path / "libbnb_fsdp_cpu.so").symlink_to(native.load("cpu").path)
    monkeypatch.setenv(native.DIRECTORY_VARIABLE, str(tmp_path))
    native.load.cache_clear()
    cuda.library.cache_clear()
    yield
    native.load.cache_clear()


def no_triton(device: torch.device) -> Any:
    raise RuntimeError("Triton is missing.")


REMEDY = "SKBUILD_CMAKE_DEFINE=BNB_FSDP_CUDA=ON pip install --force-reinstall --no-deps ."


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_doctor_is_not_content_with_a_gpu_without_its_library(
    triton: bool, gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = types.SimpleNamespace(name="triton")
    monkeypatch.setattr(backends, "_triton", (lambda device: taken) if triton else no_triton)
    assert cli.main(["doctor"]) == cli.SLOW == 3
    lines = capsys.readouterr().out.splitlines()
    name, words = (
        ("triton", "takes its Triton kernels")
        if triton
        else ("torch", "falls back to its slow torch backend")
    )
    place = lines.index(f"device cuda:0 (cuda:0): backend {name}")
    assert f"bnb_fsdp {words} for cuda tensors: " in lines[place + 1]
    assert "libbnb_fsdp_cuda.so is missing" in lines[place + 1]
    assert REMEDY in lines[place + 1] and "nvcc (CUDA 12.1 or newer) on PATH" in lines[place + 1]
    assert "C++ compiler" not in lines[place + 1]
    assert lines[place - 1] == "device cpu (cpu): backend cpu"
    library = next(line for line in lines if line.startswith("library cuda: "))
    assert "cannot be used" in library and REMEDY in library
    speed = "slower triton" if triton else "slow torch"
    assert lines[-1] == f"works, but cuda:0 uses the {speed} backend: the reason is above"


def test_doctors_json_has_the_reason_of_a_fallback(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "_triton", no_triton)
    assert cli.main(["doctor", "--json"]) == cli.SLOW
    report = json.loads(capsys.readouterr().out)
    cpu, gpu = report["devices"]
    assert report["ok"] is True
    assert cpu["fallback"] is None and "libbnb_fsdp_cuda.so is missing" in gpu["fallback"]
    assert "And: Triton is missing." in gpu["fallback"]
    assert [library["name"] for library in report["libraries"]] == ["cpu", "cuda"]


def test_doctor_is_content_with_the_backend_that_was_asked_for(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BNB_FSDP_BACKEND", "torch")
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all is fine"


def test_several_devices_that_fell_back_are_named_and_the_reason_is_said_once(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "_triton", no_triton)
    monkeypatch.setattr(cli, "_devices", lambda: [CPU, GPU, torch.device("cuda", 1)])
    assert cli.main(["doctor"]) == cli.SLOW
    out = capsys.readouterr().out
    assert "works, but cuda:0, cuda:1 use the slow torch backend: the reason is above" in out
    assert out.count("falls back to its slow torch backend for cuda") == 1


def test_a_device_without_any_backend_is_status_1(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(device: torch.device) -> Any:
        if device == CPU:
            return TorchBackend()
        raise ValueError("BNB_FSDP_CUDA_KERNELS='fast': choose auto or portable.")

    monkeypatch.setattr(backends, "_native", refuses)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BNB_FSDP_CUDA_KERNELS='fast': choose auto or portable." in out
    assert out.strip().endswith("cuda:0 cannot be used: the reason is above")


@pytest.mark.parametrize(
    ("version", "file", "names"),
    [(None, False, ["cpu"]), ("13.0", False, ["cpu", "cuda"]), (None, True, ["cpu", "cuda"])],
    ids=["neither", "torch for CUDA", "a file"],
)
def test_the_cuda_library_is_listed_where_there_is_use_for_it(
    version: str | None, file: bool, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setenv(native.DIRECTORY_VARIABLE, str(tmp_path))
    if file:
        (tmp_path / "libbnb_fsdp_cuda.so").touch()
    assert cli._library_names() == names


def test_a_broken_cuda_library_has_its_own_remedy(tmp_path: Path) -> None:
    (tmp_path / "libbnb_fsdp_cuda.so").write_bytes(b"not a library")
    with pytest.raises(native.LibraryError) as caught:
        native.NativeLibrary(tmp_path / "libbnb_fsdp_cuda.so")
    assert "cannot be loaded" in str(caught.value) and REMEDY in str(caught.value)


def test_the_remedy_names_the_compiler_that_cmake_asks_for() -> None:
    rules = Path(ROOT, "bnb_fsdp", "csrc", "cuda", "CMakeLists.txt")
    if not rules.exists():
        pytest.skip("needs the sources")
    [least] = re.findall(
        r"CMAKE_CUDA_COMPILER_VERSION VERSION_LESS (\d+\.\d+)\)\n +message\(FATAL", rules.read_text()
    )
    assert f"nvcc (CUDA {least} or newer)" in native._remedy(Path("libbnb_fsdp_cuda.so"))


def test_doctor_shows_the_versions_before_it_has_looked_at_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []

    def look() -> Any:
        printed.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_devices", look)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["doctor"])
    assert f"torch         {torch.__version__}" in printed[0]


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
