"""The Triton backend without a GPU: its kernels in Triton's interpreter, compiled for NVIDIA and AMD; how it is chosen.

The cases of the interpreter are in triton_cases.py; test_triton_cuda.py runs them on a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bnb_fsdp import backends, codebook, describe, rules
from bnb_fsdp.backends import BucketKey, triton_backend
from bnb_fsdp.backends.triton_backend import TritonBucket

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton (Linux)"
)
needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces Triton's compiler"
)


def python(
    *arguments: str, cwd: Path, timeout: float = 400, **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


@needs_triton
def test_in_the_interpreter_every_kernel_is_the_rule_and_every_optimizer_follows_its_peer(
    tmp_path: Path,
) -> None:
    # A process of its own: what triton is, is decided when it is imported.
    cases = (
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
        str(ROOT / "tests" / "triton_cases.py"),
    )
    result = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases, cwd=tmp_path, TRITON_INTERPRET="1"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) >= 110, result.stdout


# --- Codes


def code_by_table(x: torch.Tensor, signed: bool) -> torch.Tensor:
    """What `triton_kernels.encode` computes, in torch."""
    bits = x.view(torch.int32).to(torch.int64)
    negative = bits < 0
    magnitude = (bits & 0x7FFFFFFF).clamp((127 - 23) << 23, 127 << 23)
    bucket = (magnitude >> 16) - ((127 - 23) << 7)
    table = triton_backend.encoding_table
    if not signed:
        return torch.where(negative, 0, (table(False, False)[bucket] + magnitude) >> 16)
    above = 127 + ((table(True, False)[bucket] + magnitude) >> 16)
    return torch.where(negative, 126 - ((table(True, True)[bucket] + magnitude) >> 16), above)


@pytest.mark.parametrize("signed", [True, False])
def test_the_encoding_table_honours_every_threshold(signed: bool) -> None:
    # Between two neighbouring bounds or edges of buckets both sides are constant: so all float32 are covered.
    values = torch.tensor(codebook.dynamic_map(signed))
    bounds = ((values[:-1] + values[1:]) / 2).abs().view(torch.int32)
    edges = torch.arange(0x3380, 0x3F82, dtype=torch.int32) << 16
    points = torch.cat([bounds, edges])
    bits = torch.cat(
        [points + step for step in range(-2, 3)] + [torch.tensor([0, 1, 0x7F7FFFFF, 0x7F800000])]
    )
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.cat([x, -x]) if signed else x
    wanted = codebook.encode(x, x, signed).to(torch.int64)
    found = code_by_table(x, signed)
    assert torch.equal(found, wanted), x[found != wanted][:5]
    assert set(wanted.tolist()) >= set(range(256)) - ({127} if signed else set())


# --- Compilation

ADDRESSES = (
    "gradient",
    "parameter",
    "state1",
    "state2",
    "state3",
    "absmax1",
    "absmax2",
    "absmax3",
    "numel",
    "rate",
)
NUMBERS = (
    "beta1", "beta2", "beta3", "alpha", "eps", "weight_decay", "lr", "scale", "correction1", "correction2", "first",
)  # fmt: skip
TYPES = {
    **dict.fromkeys(ADDRESSES, "i64"), **dict.fromkeys(NUMBERS, "fp32"), "maps": "*i32", "tiles": "*i32",
    "table": "*i64", "image": "*i64", "corrections": "*fp32", "scales": "*fp32", "partial": "*fp32", "sums": "*fp32",
    "slots": "i32", "chunks": "i32",
}  # fmt: skip
TARGETS = {"cuda": ("cuda", 90, 32), "cuda_75": ("cuda", 75, 32), "hip": ("hip", "gfx942", 64)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def constants(rule: str, bits: int, parameter: torch.dtype, gradient: torch.dtype) -> dict[str, Any]:
    key = BucketKey(rule, bits, parameter, gradient, CPU)
    return TritonBucket(key, rules.RULES[rule], [])._constants


def compiled(name: str, target: str, warps: int, **values: Any) -> dict[str, Any]:
    """The kernel's forms, down to the machine's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(triton_backend.kernels(), name)
    names = kernel.arg_names
    values = {key: value for key, value in values.items() if key in names}
    signature = {argument: "constexpr" if argument in values else TYPES[argument] for argument in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(
        kernel, signature, {(names.index(key),): value for key, value in values.items()}, aligned
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    try:
        return dict(triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options).asm)
    except Exception as error:
        if "ld.lld not found" in str(error):  # before 3.6 the wheel has no linker for AMD
            pytest.skip(str(error))
        raise


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@needs_triton
@needs_compiler
@pytest.mark.parametrize("target", ["cuda", "hip"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rule", list(rules.RULES))
def test_every_step_compiles(rule: str, bits: int, target: str, cache: None) -> None:
    index = list(rules.RULES).index(rule)
    one = constants(rule, bits, DTYPES[index % 3], DTYPES[index % 3])
    many = constants(rule, bits, DTYPES[(index + 1) % 3], DTYPES[(index + 2) % 3])
    warps = triton_backend.SHAPES[bits].warps
    plain = dict(SKIP=False, PUBLISHED=False, ON_DEVICE=False, SCALED=False)
    special = dict(SKIP=True, PUBLISHED=True, ON_DEVICE=True, SCALED=True)
    forms = [
        compiled("step_one", target, warps, **one, **plain),
        compiled("step_many", target, warps, **many, **special),
    ]
    for form in forms:
        assert form["hsaco" if target == "hip" else "cubin"]
        if target == "cuda":
            text = form["ptx"]
            # IEEE divisions and square roots; whole chunks are read and written as vectors.
            assert ".approx" not in text and "div.full" not in text
            assert re.search(r"ld\.global\.v[24]", text) and re.search(r"st\.global\.v[24]", text)


@needs_triton
@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_the_other_kernels_compile(target: str, cache: None) -> None:
    binary = "hsaco" if target == "hip" else "cubin"
    assert compiled("advance", target, 4, STORE=True, WIDTH=128)[binary]
    assert compiled("sum_tiles", target, 4, WIDTH=256)[binary]
    for rule, bits in (("adam", 8), ("adam", 32), ("momentum", 8), ("momentum", 32)):
        values = constants(rule, bits, torch.bfloat16, torch.float32)
        flags = dict(SKIP=False, PUBLISHED=rule == "adam", ON_DEVICE=bits == 8)
        assert compiled("norms_of_tiles", target, 2, **values, **flags)[binary]


@needs_triton
def test_every_launch_binds_and_compiles_without_contraction(tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "triton_launches.py")
    result = python("-W", "ignore", script, cwd=tmp_path, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    launches = json.loads(result.stdout)
    counts = Counter(launch["kernel"] for launch in launches)
    assert counts == {"step_one": 4, "step_many": 8, "advance": 6, "norms_of_tiles": 6, "sum_tiles": 6}
    assert not any(launch["fusion"] for launch in launches)
    for launch in launches:
        assert launch["types"] == {name: TYPES[name] for name in launch["types"]}, launch["kernel"]
    steps = [launch for launch in launches if launch["kernel"].startswith("step")]
    # 3,000 elements are 12 blocks, or 3 chunks of 1,024.
    assert [launch["grid"][0] for launch in steps] == [12, 36, 36, 3, 9, 9] * 2


# --- Choice


class Fake:
    name = "triton"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that come once come again."""
    monkeypatch.setattr(backends, "_said", set())


def chosen(device: str, name: str = "auto") -> tuple[str, list[str]]:
    """The backend's name, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = backends.select(torch.device(device), name).name
    return found, [str(warning.message) for warning in caught]


@needs_triton
@needs_compiler
def test_cpu_tensors_without_the_interpreter_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        RuntimeError, match=r"backend='triton' was asked for.*CPU tensors; set TRITON_INTERPRET=1"
    ):
        backends.select(CPU, "triton")
    assert backends.select(CPU, "auto").name in ("cpu", "torch")


@needs_triton
def test_a_device_without_triton_kernels_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"backend='triton' was asked for, but Triton has no kernels for mps"
    ):
        backends.select(torch.device("mps"), "triton")


def test_intel_and_amd_gpus_take_triton_and_nvidia_gpus_where_the_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, said: None
) -> None:
    def missing(device: torch.device) -> backends.Backend:
        raise RuntimeError("the library is missing.")

    monkeypatch.setattr(backends, "_triton", lambda device: Fake())
    monkeypatch.setattr(backends, "_native", missing)
    assert chosen("xpu:0") == ("triton", [])
    assert chosen("cuda:0") == (
        "triton", ["bnb_fsdp takes its Triton kernels for cuda tensors: the library is missing."]
    )  # fmt: skip
    assert chosen("cuda:0") == ("triton", [])
    monkeypatch.setattr(backends, "_said", set())
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert chosen("cuda:0") == ("triton", [])
    with pytest.raises(RuntimeError, match="backend='cuda' was asked for, but the library is missing"):
        backends.select(torch.device("cuda:0"), "cuda")


def test_where_neither_can_run_torch_takes_over_and_both_reasons_are_said_once(
    monkeypatch: pytest.MonkeyPatch, said: None
) -> None:
    def fails(reason: str) -> Any:
        def choose(device: torch.device) -> backends.Backend:
            raise RuntimeError(reason)

        return choose

    monkeypatch.setattr(backends, "_triton", fails("no Triton."))
    monkeypatch.setattr(backends, "_native", fails("no library."))
    name, messages = chosen("cuda:0")
    assert name == "torch" and len(messages) == 1 and "no library. And: no Triton." in messages[0]
    assert chosen("cuda:0") == ("torch", [])
    assert "slow torch backend for xpu tensors: no Triton." in chosen("xpu:0")[1][0]


def test_the_package_works_without_triton(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch, bnb_fsdp
from bnb_fsdp import backends
p = torch.nn.Parameter(torch.zeros(5000)); p.grad = torch.ones(5000)
bnb_fsdp.AdamW8bit([p]).step()
before = p.detach().clone()
try:
    bnb_fsdp.AdamW8bit([p], backend="triton").step()
except RuntimeError as error:
    assert "Triton cannot be imported" in str(error) and "pip install" in str(error), error
else:
    raise SystemExit("no error")
assert torch.equal(p, before)
"""
    result = python("-W", "ignore", "-c", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_kernels_are_imported_by_none_but_the_triton_backend(tmp_path: Path) -> None:
    script = """
import sys, torch, bnb_fsdp
import bnb_fsdp.backends.triton_backend
assert "triton" not in sys.modules
p = torch.nn.Parameter(torch.zeros(5000)); p.grad = torch.ones(5000)
bnb_fsdp.AdamW8bit([p], backend="torch").step()
raise SystemExit(int("bnb_fsdp.backends.triton_kernels" in sys.modules))
"""
    result = python("-W", "ignore", "-c", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@needs_triton
@needs_compiler
def test_describe_says_why_there_is_no_backend() -> None:
    import bnb_fsdp

    optimizer = bnb_fsdp.AdamW8bit([torch.nn.Parameter(torch.zeros(5000))], backend="triton")
    description = describe(optimizer)
    assert description.rows[0].backend == "none" and "set TRITON_INTERPRET=1" in str(description)


# --- What is sent


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_host_buffer_is_not_written_while_its_copy_is_under_way() -> None:
    image = triton_backend._Image(3, CPU)
    first = image.buffer()
    first.event = Event()
    second = image.buffer()
    assert second is not first
    second.event = Event()
    assert image.buffer() not in (first, second)
    first.event.done = True
    assert image.buffer() is first
