"""The CPU library against the rules (bit for bit) and every instruction set against plain code."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bnb_fsdp import rules, state
from bnb_fsdp.backends import BucketKey, Slot, cpu, native
from bnb_fsdp.backends.torch_backend import TorchBackend
from bnb_fsdp.codebook import dynamic_map
from bnb_fsdp.rules import Hyper, Rule

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (0, 1, 3, 255, 256, 257, 4095, 4096, 4097, 3 * 8192 + 5)
GROUPS = (
    Hyper(1e-3, 0.9, 0.999, 0.9999, alpha=5.0, eps=1e-8, weight_decay=0.01),
    Hyper(3e-3, 0.95, 0.99, 0.9, alpha=2.0, eps=1e-6, weight_decay=0.0, update_scale=0.37),
)
X86_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
# instruction set -> lanes, compiler flags
INSTRUCTION_SETS = {
    "avx512vbmi": ("AVX512", [*X86_FLAGS, "-mavx512vbmi", "-DBNB_FSDP_VBMI", "-DBNB_FSDP_X86"]),
    "avx512": ("AVX512", [*X86_FLAGS, "-DBNB_FSDP_X86"]),
    "avx2": ("AVX2", ["-mavx2", "-mfma", "-mf16c", "-DBNB_FSDP_X86"]),
}


@contextmanager
def using(instruction_set: str) -> Iterator[None]:
    choose = native.load("cpu").checked("bnb_fsdp_cpu_set_isa", ctypes.c_char_p)
    before = cpu.instruction_set()
    choose(instruction_set.encode())
    try:
        yield
    finally:
        choose(before.encode())


def slot(name: str, group: int, parameter: Tensor, rule: Rule, bits: int) -> Slot:
    values = state.allocate(parameter, bits, rule)
    absmax = tuple(values[state.absmax_key(key)] for key in rule.states) if bits == 8 else ()
    return Slot(name, group, parameter, tuple(values[key] for key in rule.states), absmax, values["step"])


def slots(rule: Rule, bits: int, dtype: torch.dtype) -> list[Slot]:
    result = []
    for index, size in enumerate(SIZES):
        parameter = torch.randn(size, generator=torch.Generator().manual_seed(index)).to(dtype)
        parameter[::77] = -0.0
        result.append(slot(f"p{index}", index % 2, parameter, rule, bits))
    return result


def adam8_bucket(parameter: Tensor) -> tuple[Slot, cpu.CpuBucket]:
    """A float32 parameter alone in a bucket with 8-bit Adam state."""
    alone = slot("p", 0, parameter, rules.ADAM, 8)
    key = BucketKey("adam", 8, torch.float32, torch.float32, torch.device("cpu"))
    return alone, cpu.CpuBackend().bucket(key, rules.ADAM, [alone])


def gradient(size: int, step: int, dtype: torch.dtype, special: bool) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + size)
    g = torch.randn(size, generator=generator) * 10 ** (6 * torch.rand(size, generator=generator) - 6)
    if special and size > 250:
        g[::7], g[11] = 0.0, -0.0
        g[5], g[9], g[100] = float("nan"), float("inf"), -float("inf")
        g[20:60] *= 1e-22
        if step == 0:
            g[:256] = 0.0
    if special and size > 4000:
        g[256:512] = 0.0
        g[512:768] *= 1e20
        g[1024:1280] = float("nan")
        g[1280:1536] = -0.0
        g[1536:1792] *= 1e-36
    return g.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.view(view) == b.view(view)
    return bool((equal | (torch.isnan(a) & torch.isnan(b))).all())


CASES = {
    "ordinary": (GROUPS, False),
    "nan_inf_zero_subnormal": (GROUPS, True),
    "skip_zeros": (tuple(group._replace(skip_zeros=True) for group in GROUPS), True),
    "published": (tuple(group._replace(published=True, update_scale=0.73) for group in GROUPS), True),
}
WITH_NORMS = [rules.ADAM, rules.MOMENTUM]  # LAMB's and LARS' rules, which the case "published" is for
# Each pair of dtypes; those of mixed dtypes, which differ in reading the gradient alone, with one case.
DTYPES_AND_CASES = [
    (parameter, gradient, case)
    for parameter in DTYPES
    for gradient in DTYPES
    for case in (CASES if parameter == gradient else ["nan_inf_zero_subnormal"])
]


@pytest.mark.parametrize(("parameter_dtype", "gradient_dtype", "case"), DTYPES_AND_CASES)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rule", list(rules.RULES.values()), ids=lambda rule: rule.name)
def test_parameters_and_states_equal_the_rules_bit_for_bit_in_every_instruction_set(
    rule: Rule, bits: int, parameter_dtype: str, gradient_dtype: str, case: str
) -> None:
    if case == "published" and rule not in WITH_NORMS:
        case = "ordinary"
    dtype, g_dtype = DTYPES[parameter_dtype], DTYPES[gradient_dtype]
    groups, special = CASES[case]
    key = BucketKey(rule.name, bits, dtype, g_dtype, torch.device("cpu"))

    def run(backend: cpu.CpuBackend | TorchBackend) -> list[list[Tensor]]:
        """After each step, copies of everything."""
        stepped, copies = slots(rule, bits, dtype), []
        bucket = backend.bucket(key, rule, stepped)
        for step in range(3):
            gradients: list[Tensor | None] = [gradient(size, step, g_dtype, special) for size in SIZES]
            if step == 1:
                gradients[3] = None
            bucket.run(gradients, groups)
            everything = [x for s in stepped for x in (s.step, s.parameter, *s.states, *s.absmax)]
            copies.append([x.clone() for x in everything])
        assert [float(s.step) for s in stepped] == [3, 3, 3, 2, 3, 3, 3, 3, 3, 3]
        return copies

    expected = run(TorchBackend())
    for instruction_set in cpu.instruction_sets():
        with using(instruction_set):
            mine = run(cpu.CpuBackend())
        for step, (found, wanted) in enumerate(zip(mine, expected)):
            for index, (a, b) in enumerate(zip(found, wanted)):
                assert same_bits(a, b), f"{instruction_set}, step {step}, tensor {index} of {len(found)}"


@pytest.mark.parametrize("published", [False, True], ids=["bitsandbytes", "published"])
@pytest.mark.parametrize(
    ("parameter_dtype", "gradient_dtype"),
    [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float32")],
)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rule", WITH_NORMS, ids=lambda rule: rule.name)
def test_norms_are_those_of_the_rules_and_change_nothing(
    rule: Rule, bits: int, parameter_dtype: str, gradient_dtype: str, published: bool
) -> None:
    dtype, g_dtype = DTYPES[parameter_dtype], DTYPES[gradient_dtype]
    groups = [group._replace(published=published) for group in GROUPS]
    key = BucketKey(rule.name, bits, dtype, g_dtype, torch.device("cpu"))
    stepped = slots(rule, bits, dtype)
    bucket, oracle = cpu.CpuBackend().bucket(key, rule, stepped), TorchBackend().bucket(key, rule, stepped)
    for step in range(3):
        gradients: list[Tensor | None] = [gradient(size, step, g_dtype, False) for size in SIZES]
        gradients[3] = None
        before = [x.clone() for s in stepped for x in (s.step, s.parameter, *s.states, *s.absmax)]
        expected = oracle.norms(gradients, groups)
        for instruction_set in cpu.instruction_sets():
            with using(instruction_set):
                found = bucket.norms(gradients, groups)
                torch.testing.assert_close(found, expected, rtol=3e-6, atol=0)
                assert torch.equal(found, bucket.norms(gradients, groups))
        after = [x for s in stepped for x in (s.step, s.parameter, *s.states, *s.absmax)]
        assert all(same_bits(a, b) for a, b in zip(before, after))
        assert found[3].tolist() == [0, 0] and (found[4:, 1] > 0).all()
        bucket.run(gradients, groups)
        assert (found[4:, 0] > 0).all()


def test_norms_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.randn(40 * 8192 + 77, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv(cpu.THREADS_VARIABLE, threads)
        _, bucket = adam8_bucket(parameter.clone())
        bucket.run([gradient(parameter.numel(), 0, torch.float32, False)], GROUPS)
        found.append(bucket.norms([gradient(parameter.numel(), 1, torch.float32, False)], GROUPS))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_rule_without_norms_says_so() -> None:
    alone = slot("p", 0, torch.randn(300), rules.LION, 32)
    key = BucketKey("lion", 32, torch.float32, torch.float32, torch.device("cpu"))
    bucket = cpu.CpuBackend().bucket(key, rules.LION, [alone])
    with pytest.raises(RuntimeError, match=r"lion norms .*lion has no update norm"):
        bucket.norms([torch.randn(300)], GROUPS)


@pytest.mark.parametrize("signed", [True, False])
def test_library_has_the_codebook_of_the_rules(signed: bool) -> None:
    values = (ctypes.c_float * 256)()
    native.load("cpu").checked("bnb_fsdp_codebook", ctypes.c_int, ctypes.c_void_p)(int(signed), values)
    assert list(values) == list(dynamic_map(signed))


def build_and_run_harness(
    tmp_path: Path, compiler: str, name: str, lanes: str, flags: list[str], run: list[str]
) -> str:
    sources = ROOT / "bnb_fsdp" / "csrc"
    common = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w"]
    plain = [
        *common,
        "-c",
        "-DBNB_FSDP_ISA=generic",
        "-DBNB_FSDP_LANES_GENERIC",
        str(sources / "cpu/kernels.cpp"),
    ]
    subprocess.run([compiler, *plain, "-o", str(tmp_path / "generic.o")], check=True)
    harness = [str(ROOT / "tests/native/harness.cpp"), str(tmp_path / "generic.o")]
    ours = [*common, *flags, f"-DBNB_FSDP_ISA={name}", f"-DBNB_FSDP_LANES_{lanes}", *harness]
    program = str(tmp_path / "harness")
    subprocess.run([compiler, *ours, str(sources / "quantize/codebook.cpp"), "-o", program], check=True)
    result = subprocess.run([*run[:-1], program, run[-1]], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", [name for name in cpu.instruction_sets() if name in INSTRUCTION_SETS])
def test_every_float_gets_its_code_and_every_kernel_equals_plain_code(tmp_path: Path, name: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    lanes, flags = INSTRUCTION_SETS[name]
    output = build_and_run_harness(tmp_path, compiler, name, lanes, flags, ["1"])
    assert output.startswith(f"{name}: ") and output.endswith("values equal\n")
    assert int(output.split()[1]) > 600_000_000


def test_neon_kernels_equal_plain_code_under_emulation(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip(
            "needs aarch64-linux-gnu-g++ and qemu-aarch64-static (Debian: g++-aarch64-linux-gnu, qemu-user-static)"
        )
    flags = ["-static", "-DBNB_FSDP_NEON"]
    output = build_and_run_harness(tmp_path, compiler, "neon", "NEON", flags, [emulator, "97"])
    assert output.startswith("neon: ") and output.endswith("values equal\n")


def test_rules_compile_for_cuda_as_they_are(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc (CUDA toolkit)")
    source = str(ROOT / "tests/native/rules_on_cuda.cu")
    command = [nvcc, "-std=c++17", "-arch=sm_90", "-c", source, "-o", str(tmp_path / "rules.o")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_failure_raises_with_operation_dtype_and_message_and_changes_nothing() -> None:
    mine = slots(rules.ADAM, 8, torch.float32)
    before = [slot.parameter.clone() for slot in mine]
    key = BucketKey("nosuchrule", 8, torch.float32, torch.float32, torch.device("cpu"))
    bucket = cpu.CpuBackend().bucket(key, rules.ADAM, mine)
    with pytest.raises(
        RuntimeError, match=r"nosuchrule step \(8-bit, torch.float32.*no kernel for rule nosuchrule"
    ):
        bucket.run([torch.ones(size) for size in SIZES], GROUPS)
    assert all(torch.equal(slot.parameter, old) for slot, old in zip(mine, before))
    assert all(float(slot.step) == 0 for slot in mine)


def cores(monkeypatch: pytest.MonkeyPatch, own: range, launcher: range | type[OSError], machine: int) -> None:
    """Let this process, its parent and the machine have these; an exception: that cannot be found out."""

    def affinity(process: int) -> set[int]:
        if process == 0:
            return set(own)
        assert process == os.getppid()
        if isinstance(launcher, range):
            return set(launcher)
        raise launcher

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(cpu, "_launcher", lambda process: process)


def test_thread_budget_is_torchs_threads_within_this_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.THREADS_VARIABLE, raising=False)
    cores(monkeypatch, range(16), range(16), 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert cpu.thread_budget() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpu.thread_budget() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert cpu.thread_budget() == 1
    # A launcher that binds each of 8 ranks to 2 cores of 16 has divided them already.
    cores(monkeypatch, range(4, 6), range(16), 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert cpu.thread_budget() == 2
    monkeypatch.setenv(cpu.THREADS_VARIABLE, "7")
    assert cpu.thread_budget() == 7
    monkeypatch.setenv(cpu.THREADS_VARIABLE, "many")
    with pytest.raises(ValueError, match="BNB_FSDP_NUM_THREADS='many' must be a positive integer"):
        cpu.thread_budget()


@pytest.mark.parametrize(
    ("own", "launcher", "machine", "ranks", "budget"),
    [
        pytest.param(range(64), range(64), 128, "8", 8, id="8 ranks share a cpuset"),
        pytest.param(range(2), range(2), 128, "8", 1, id="more ranks than cores in the cpuset"),
        pytest.param(range(8, 16), range(64), 128, "8", 8, id="ranks bound to parts of a cpuset"),
        pytest.param(range(64), range(128), 128, "8", 16, id="four ranks bound to each of two NUMA nodes"),
        pytest.param(range(64, 72), range(1), 128, "8", 8, id="bound elsewhere than the launcher"),
        pytest.param(range(64), PermissionError, 128, "8", 16, id="the launcher is hidden"),
        pytest.param(range(8), ProcessLookupError, 64, "8", 8, id="the launcher has ended"),
        pytest.param(range(64), range(64), 128, None, 48, id="number of ranks unknown"),
        pytest.param(range(64), range(64), 128, "eight", 48, id="number of ranks not a number"),
    ],
)
def test_ranks_divide_the_cores_of_their_launcher(
    monkeypatch: pytest.MonkeyPatch, own: range, launcher: Any, machine: int, ranks: str | None, budget: int
) -> None:
    monkeypatch.delenv(cpu.THREADS_VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 48)
    cores(monkeypatch, own, launcher, machine)
    assert cpu.thread_budget() == budget
    monkeypatch.setenv(cpu.THREADS_VARIABLE, "1000")
    assert cpu.thread_budget() == 1000


def test_thread_budget_where_the_system_does_not_bind_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.THREADS_VARIABLE, raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # such as macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 48)
    for ranks, budget in (("1", 12), ("4", 3), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert cpu.thread_budget() == budget


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_the_launcher_is_no_wrapper_around_one_rank() -> None:
    """``torchrun --no-python numactl.sh``: the shell is bound as the rank is, and has its environment."""
    rank = "import os; from bnb_fsdp.backends import cpu; print(cpu._launcher(os.getppid()))"
    wrapper = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], check=True)"
    environment = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
    # This process stands for the launcher's child where it is a rank itself: one that is none is started first.
    start = f"""
import os, subprocess, sys
for code in ({rank!r}, {wrapper!r}):
    environment = {{**os.environ, "LOCAL_RANK": "0"}}
    print(os.getpid(), flush=True)
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=environment)
"""
    result = subprocess.run(
        [sys.executable, "-c", start],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    one, two, three, four = result.stdout.split()
    assert one == two == three == four
    assert cpu._launcher(0) == 0 and cpu._launcher(2**22 + 1) == 2**22 + 1  # no such process


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    results = []
    for count in (1, threads):
        monkeypatch.setenv(cpu.THREADS_VARIABLE, str(count))
        parameter = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
        alone, bucket = adam8_bucket(parameter)
        for step in range(20):
            bucket.run([gradient(300_001, step, torch.float32, False)], GROUPS)
        results.append([parameter, *alone.states, *alone.absmax])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_optimizers_in_several_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.THREADS_VARIABLE, "3")
    g = gradient(200_000, 0, torch.float32, False)

    def train(out: list[Tensor]) -> None:
        parameter = torch.zeros(200_000)
        _, bucket = adam8_bucket(parameter)
        for _ in range(20):
            bucket.run([g], GROUPS)
        out.append(parameter)

    expected: list[Tensor] = []
    train(expected)
    results: list[Tensor] = []
    workers = [threading.Thread(target=train, args=(results,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4 and all(torch.equal(result, expected[0]) for result in results)


def test_a_forked_child_steps_with_threads_of_its_own() -> None:
    script = """
import os, torch, bnb_fsdp
torch.set_num_threads(1)  # torch's own team would hang in the child
os.environ["BNB_FSDP_NUM_THREADS"] = "3"
def train():
    p = torch.nn.Parameter(torch.zeros(300_000)); optimizer = bnb_fsdp.AdamW8bit([p])
    p.grad = torch.linspace(-1, 1, 300_000)
    for _ in range(3): optimizer.step()
    return p.sum().item()
parent = train()
pid = os.fork()
if pid == 0:
    os._exit(0 if train() == parent else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


def test_a_child_forked_before_the_first_step_does_not_wait_for_openmp_threads_it_lacks() -> None:
    script = """
import os, signal, torch, bnb_fsdp
torch.set_num_threads(2)
torch.randn(1_000_000).exp()  # the parent's OpenMP team is up, and no optimizer has stepped
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    torch.set_num_threads(1)  # as in data loader workers
    os.environ["BNB_FSDP_NUM_THREADS"] = "2"
    p = torch.nn.Parameter(torch.zeros(300_000)); p.grad = torch.ones(300_000)
    bnb_fsdp.AdamW8bit([p]).step()
    os._exit(0 if float(p.detach().abs().min()) > 0 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


def test_more_threads_than_the_system_gives_still_step() -> None:
    script = """
import os, resource, torch, bnb_fsdp
p = torch.nn.Parameter(torch.zeros(3_000_000)); p.grad = torch.ones(3_000_000)
optimizer = bnb_fsdp.AdamW8bit([p])
optimizer.step()
os.environ["BNB_FSDP_NUM_THREADS"] = "64"
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 40_000_000, size + 40_000_000))  # room for a few stacks of 8 MiB
for _ in range(3): optimizer.step()
assert int(optimizer.state[p]["step"]) == 4
"""
    environment = {**os.environ, "OMP_STACKSIZE": "256M"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60, env=environment)


def test_subnormal_mode_of_the_calling_thread_is_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(512))
    parameter.grad = torch.ones(512)
    from bnb_fsdp import AdamW8bit

    AdamW8bit([parameter], min_8bit_size=1).step()
    tiny = torch.tensor(1e-40)
    assert float(tiny * 1.0) != 0.0


def test_missing_library_is_said_once_and_torch_takes_over(tmp_path: Path) -> None:
    script = f"""
import os, warnings
os.environ["{native.DIRECTORY_VARIABLE}"] = {str(tmp_path)!r}
import torch, bnb_fsdp
def optimizer(**kwargs):
    p = torch.nn.Parameter(torch.zeros(5000)); p.grad = torch.ones(5000)
    return bnb_fsdp.AdamW8bit([p], **kwargs)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2): optimizer().step()
messages = [str(w.message) for w in caught if "bnb_fsdp" in str(w.message)]
assert len(messages) == 1 and "libbnb_fsdp_cpu.so is missing" in messages[0] and "Reinstall" in messages[0], messages
try:
    optimizer(backend="cpu").step()
except RuntimeError as error:
    assert "backend='cpu' was asked for" in str(error) and "missing" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_broken_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libbnb_fsdp_cpu.so").write_bytes(b"not a library")
    with pytest.raises(native.LibraryError, match=r"libbnb_fsdp_cpu.so cannot be loaded.*Reinstall"):
        native.NativeLibrary(tmp_path / "libbnb_fsdp_cpu.so")


def test_unknown_instruction_set_lists_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match=r"BNB_FSDP_CPU_ISA='mmx'.*choose one of .*generic"):
        cpu.CpuBackend()
