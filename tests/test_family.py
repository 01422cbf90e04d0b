"""The whole family: bitsandbytes' signatures, and its known faults, none of which is ours.

docs/algorithms.md lists every known fault with the test that shows it absent; what another file tests is not tested
again here.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib
import inspect
import io
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from optimizer_helpers import N, assert_like, assert_same, normal, parameter, snapshot, train
from torch import Tensor, nn

import bnb_fsdp
from bnb_fsdp import rules, state
from bnb_fsdp.backends import native
from bnb_fsdp.optim import BlockwiseOptimizer

bitsandbytes = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings("ignore:.*it works as the unpaged class:UserWarning")

ROOT = Path(__file__).resolve().parent.parent
NAMES = [name for name in bnb_fsdp.optim.__all__ if name != "BlockwiseOptimizer"]
BITS = ("8bit", "32bit")
every_bits = pytest.mark.parametrize("bits", BITS)
every_backend = pytest.mark.parametrize("backend", ["cpu", "torch"])
every_name = pytest.mark.parametrize("name", NAMES)
# The classes that other files' tests of layouts, copies and state dicts do not have.
NEW = ["AdEMAMix8bit", "AdEMAMix32bit", "LAMB8bit", "LAMB32bit", "LARS8bit", "LARS32bit"]
every_new_class = pytest.mark.parametrize("name", NEW)


def make(name: str, params: Any, **kwargs: Any) -> Any:
    if name.startswith(("SGD", "LARS")):
        kwargs = {"lr": 1e-2, "momentum": 0.9} | kwargs
    return getattr(bnb_fsdp, name)(params, **kwargs)


def family(name: str) -> str:
    return name.removeprefix("Paged").removesuffix("32bit").removesuffix("8bit")


# --- signatures


def arguments(cls: type) -> dict[str, inspect.Parameter]:
    """A class's arguments, those it hands on to its bases by ``**kwargs`` included."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if base is BlockwiseOptimizer:
            return found
        for key, argument in inspect.signature(base).parameters.items():
            if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
                found.setdefault(key, argument)
    raise AssertionError(f"{cls} is no BlockwiseOptimizer")


def test_every_class_of_bitsandbytes_is_here() -> None:
    theirs = {
        name
        for name, value in vars(bitsandbytes.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    # PytorchLARS is their unquantised example, not a class of the family.
    assert theirs - {"PytorchLARS"} == set(NAMES) and len(NAMES) == 27 + 12


@every_name
def test_signature_is_bitsandbytes_and_more(name: str) -> None:
    theirs = inspect.signature(getattr(bitsandbytes.optim, name)).parameters
    ours = arguments(getattr(bnb_fsdp, name))
    assert set(theirs) - set(ours) == set()
    differ = {key for key, argument in theirs.items() if ours[key].default != argument.default}
    # Adam8bit and AdamW8bit say 32 there, and mean 8.
    expected = {"optim_bits"} if name.endswith(("Adam8bit", "AdamW8bit")) else set()
    assert differ == expected
    added = {"optim_bits", "overrides", "backend", "capturable", "trust_ratio", "is_paged"}
    added |= {"residency", "residency_reserve"}
    assert set(ours) - set(theirs) <= added
    positional = [key for key, value in ours.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)[: len(positional)]
    assert ours["params"].default is inspect.Parameter.empty
    made = make(name, [parameter(8)]).defaults
    for key, argument in theirs.items():
        if key in made and argument.default is not inspect.Parameter.empty and key not in ("lr", "momentum"):
            bits = {"8bit": 8, "32bit": 32}.get(name.removeprefix("Paged").removeprefix(family(name)), 32)
            assert made[key] == (bits if key == "optim_bits" else argument.default), key


POSITIONAL = {
    "Adam": "lr betas eps weight_decay", "AdamW": "lr betas eps weight_decay", "Lion": "lr betas weight_decay",
    "SGD": "lr momentum dampening weight_decay", "RMSprop": "lr alpha eps weight_decay momentum",
    "Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps",
    "AdEMAMix": "lr betas alpha t_alpha t_beta3 eps weight_decay", "LAMB": "lr bias_correction betas eps weight_decay",
    "LARS": "lr momentum dampening weight_decay",
}  # fmt: skip


@every_name
def test_positions_that_moved_upstream_take_no_argument(name: str) -> None:
    """bitsandbytes 0.50 dropped two arguments: later positional ones silently became max_unorm=100, skip_zeros=True."""
    values = [0.5] * (1 + len(POSITIONAL[family(name)].split()))
    with pytest.raises(TypeError, match="positional arguments"):
        getattr(bnb_fsdp, name)([parameter(8)], *values)


IGNORED: list[tuple[str, dict[str, Any]]] = [
    *[(name, {"amsgrad": True}) for name in NAMES if family(name) in ("Adam", "AdamW", "LAMB")],
    *[
        (name, {"optim_bits": 16})
        for name in NAMES
        if name.endswith("Adam32bit") or name.endswith("AdamW32bit")
    ],
    *[("LAMB" + bits, {key: False}) for bits in ("", *BITS) for key in ("bias_correction", "adam_w_mode")],
    *[("LARS" + bits, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}) for bits in ("", *BITS)],
    *[("LARS" + bits, {"lr": 0.1, "momentum": 0.9, "nesterov": True}) for bits in ("", *BITS)],
    *[("SGD" + bits, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}) for bits in ("", *BITS)],
    *[("SGD" + bits, {"lr": 0.1, "momentum": 0.9, "nesterov": True}) for bits in ("", *BITS)],
    *[("RMSprop" + bits, {"momentum": 0.5}) for bits in ("", *BITS)],
]
REFUSED_BY_BOTH: list[tuple[str, dict[str, Any]]] = [
    *[("RMSprop" + bits, {"centered": True}) for bits in ("", *BITS)],
    *[("RMSprop" + bits, {"alpha": 0.0}) for bits in ("", *BITS)],
    *[("Adagrad" + bits, {"lr_decay": 0.1}) for bits in ("", *BITS)],
    *[("Adagrad" + bits, {"initial_accumulator_value": 1.0}) for bits in ("", *BITS)],
    *[(name + bits, {"lr": 0.1, "momentum": 0.0}) for name in ("SGD", "LARS") for bits in ("", *BITS)],
]


def only(given: dict[str, Any]) -> str:
    """The last argument, which is the one to refuse, as a pattern of the message."""
    key, value = list(given.items())[-1]
    return f"{key}={value!r}"


@pytest.mark.parametrize(
    ("name", "given", "ignored"),
    [(*case, True) for case in IGNORED] + [(*case, False) for case in REFUSED_BY_BOTH],
    ids=lambda value: only(value) if isinstance(value, dict) else str(value),
)
def test_what_bitsandbytes_ignores_or_refuses_raises(name: str, given: dict[str, Any], ignored: bool) -> None:
    def upstream() -> None:
        p = nn.Parameter(torch.zeros(8))
        p.grad = torch.ones(8)
        getattr(bitsandbytes.optim, name)([p], **given).step()

    if ignored and not (given.get("amsgrad") or "optim_bits" in given):
        upstream()  # accepts it
    elif not ignored:
        with pytest.raises((ValueError, NotImplementedError)):
            upstream()
    with pytest.raises(ValueError, match=only(given).replace("optim_bits=16", "got 16")) as caught:
        getattr(bnb_fsdp, name)([parameter(8)], **given)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", [n for n in NAMES if "args" in arguments(getattr(bnb_fsdp, n))])
def test_a_namespace_of_extra_settings_raises(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} does not support args="):
        make(name, [parameter(8)], args=object())


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("bit")])
def test_bits_that_contradict_the_name_raise(name: str) -> None:
    wrong = 32 if name.endswith("8bit") else 8
    chooser = {"Adam": "Adam or AdamW", "AdamW": "Adam or AdamW"}.get(family(name), family(name))
    with pytest.raises(ValueError, match=f"{name} has optim_bits=.*, got {wrong}; use {chooser} to choose"):
        make(name, [parameter(8)], optim_bits=wrong)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("SGD", {"lr": 0.1}, r"momentum=0.0 must be a number in \(0, 1\); without momentum.*torch.optim.SGD"),
        ("SGD8bit", {"lr": 0.1, "momentum": 1.0}, r"group 0: momentum=1.0 must be a number in \(0, 1\)"),
        ("LAMB", {"max_unorm": -1.0}, "group 0: max_unorm=-1.0 must be finite and >= 0"),
        ("LAMB", {"max_unorm": math.inf}, "max_unorm=inf must be finite"),
        (
            "LAMB",
            {"trust_ratio": "paper"},
            "trust_ratio='paper' is unknown; choose one of bitsandbytes, published",
        ),
        (
            "LAMB8bit",
            {"trust_ratio": "published", "max_unorm": 0.5},
            "max_unorm=0.5 belongs to trust_ratio='bits",
        ),
        (
            "LAMB",
            {"capturable": True},
            "capturable=True is not supported: norms need step counts on the host",
        ),
        ("LARS", {"lr": 1.0, "momentum": 0.9, "max_unorm": "big"}, "max_unorm='big' must be a number"),
        (
            "LARS8bit",
            {"lr": 1.0, "momentum": 0.9, "max_unorm": 0.0, "trust_ratio": "published"},
            "max_unorm=0.0 is the coefficient eta of the published formula and must be > 0",
        ),
        ("AdEMAMix", {"betas": (0.9, 0.999)}, r"betas=\(0.9, 0.999\) must be three numbers"),
        ("AdEMAMix", {"alpha": -1.0}, "alpha=-1.0 must be finite and >= 0"),
    ],
)
def test_bad_values_of_the_familys_own_arguments_raise(
    name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(bnb_fsdp, name)([parameter(8)], **given)


# --- AdEMAMix: overlapping scales, half-allocated state, schedules


def spans(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)


@pytest.mark.parametrize("numel", [4097, 4096 + 255, 4096, 16 * 256 + 128])
@every_backend
def test_ademamix_has_three_states_that_share_no_scale(numel: int, backend: str) -> None:
    """bitsandbytes' slow average has its first scale where the fast one has its last, unless numel % 256 == 0."""
    p = parameter(numel)
    optimizer = make("AdEMAMix8bit", [p], backend=backend, betas=(0.5, 0.9, 0.99))
    fast, slow = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(4):
        # The first and the last block differ a millionfold: one scale for both would lose one of them.
        p.grad = normal(numel, seed=step)
        p.grad[:256] *= 1e3
        p.grad[numel // 256 * 256 - 256 :] *= 1e-3
        fast, slow = 0.5 * fast + 0.5 * p.grad.double(), 0.99 * slow + 0.01 * p.grad.double()
        optimizer.step()
    held = optimizer.state[p]
    scales = [held[f"absmax{i}"] for i in (1, 2, 3)]
    assert [scale.shape for scale in scales] == [(-(-numel // 256),)] * 3
    occupied = spans([*scales, *(held[f"state{i}"] for i in (1, 2, 3))])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(occupied))
    for key, wanted in (("1", fast), ("3", slow)):
        rows = nn.functional.pad(wanted, (0, -numel % 256)).view(-1, 256).abs().amax(1)
        # Three requantisations: 1.4 % of the largest value each at most.
        torch.testing.assert_close(held["absmax" + key].double(), rows, rtol=0.05, atol=0)


@pytest.mark.parametrize("name", ["AdEMAMix32bit", "PagedAdEMAMix32bit", "AdEMAMix", "PagedAdEMAMix"])
def test_32_bit_ademamix_has_whole_state_and_its_schedules(name: str) -> None:
    """bitsandbytes allocates half the state for these 32-bit classes and never schedules them (its issue 2075)."""
    settings = {"lr": 1e-2, "t_alpha": 7, "t_beta3": 11}

    def trained(cls: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        p = parameter(70, 80)
        optimizer = cls([p], **kwargs)
        for step in range(5):
            p.grad = normal(70, 80, seed=10 + step)
            optimizer.step()
        return p.detach(), optimizer.state[p]

    ours, held = trained(getattr(bnb_fsdp, name), **settings)
    assert [held[f"state{i}"].shape for i in (1, 2, 3)] == [(70, 80)] * 3
    theirs, their_state = trained(bitsandbytes.optim.AdEMAMix, **settings)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(held["state3"], their_state["state1"][1], rtol=2e-5, atol=5e-7)
    constant, _ = trained(getattr(bnb_fsdp, name), lr=1e-2)
    assert (ours - constant).abs().max() > 1e-4


def test_upstreams_32_bit_ademamix_still_has_the_fault_or_this_table_is_old() -> None:
    p = parameter(70, 80)
    p.grad = normal(70, 80)
    with pytest.raises((RuntimeError, IndexError)):
        bitsandbytes.optim.AdEMAMix32bit([p]).step()


@pytest.mark.parametrize("key", ["t_alpha", "t_beta3"])
@pytest.mark.parametrize("steps", [0, -3, True, math.inf, math.nan, "ten"])
def test_a_schedule_of_no_steps_is_refused_and_not_divided_by(key: str, steps: Any) -> None:
    with pytest.raises(ValueError, match=f"group 0: {key}=.* must be None or a positive number of steps"):
        make("AdEMAMix", [parameter(8)], **{key: steps})


# --- dtypes and classes that upstream has no kernel for


@every_backend
@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "LARS"])
def test_bfloat16_parameters_with_32_bit_state_step(name: str, backend: str) -> None:
    """Upstream has no bfloat16 kernels for these, nor for the small parameters of their 8-bit classes."""
    for bits, numel in (("32bit", N), ("8bit", 100)):
        p, wide = parameter(numel, dtype=torch.bfloat16), nn.Parameter(normal(numel).bfloat16().float())
        lr = 1.0 if name == "LARS" else 1e-2  # its update has a hundredth of the parameter's norm
        optimizer, other = (make(name + bits, [x], lr=lr, backend=backend) for x in (p, wide))
        for step in range(3):
            g = normal(numel, seed=step + 1).bfloat16()
            wide.data.copy_(p.detach())
            p.grad, wide.grad = g, g.float()
            optimizer.step()
            other.step()
            eps = torch.finfo(torch.bfloat16).eps
            torch.testing.assert_close(p.detach().float(), wide.detach(), rtol=eps, atol=1e-6)
        assert optimizer.state[p]["state1"].dtype == torch.float32
        assert (p.detach() != normal(numel).bfloat16()).float().mean() > 0.5


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["LAMB8bit", "LARS8bit"])
def test_8_bit_lamb_and_lars_step_and_are_clipped(name: str, dtype: torch.dtype, backend: str) -> None:
    """Upstream raises for parameters of 4,096 elements or more on CUDA, and ignores max_unorm in 8 bits elsewhere."""
    p = parameter(N, dtype=dtype)
    start = p.detach().double()
    optimizer = make(name, [p], lr=1.0, max_unorm=0.05, backend=backend)
    p.grad = normal(N, seed=1, dtype=dtype)
    optimizer.step()
    assert optimizer.state[p]["state1"].dtype == torch.uint8
    # Rounding to 16 bits adds its own noise, which is not in the direction of the update.
    slack = 2 * torch.finfo(dtype).eps
    assert float((p.detach().double() - start).norm() / start.norm()) == pytest.approx(0.05, rel=1e-3 + slack)


# --- LAMB and LARS: trust ratio


@every_backend
@every_bits
@pytest.mark.parametrize("ratio", ["bitsandbytes", "published"])
@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_a_parameter_of_zeros_moves(name: str, ratio: str, bits: str, backend: str) -> None:
    """bitsandbytes' update scale is 0 where the parameter's norm is."""
    p = nn.Parameter(torch.zeros(N))
    optimizer = make(name + bits, [p], lr=0.1, trust_ratio=ratio, backend=backend)
    p.grad = normal(N)
    optimizer.step()
    update = torch.sign(p.grad) if name == "LAMB" else p.grad
    torch.testing.assert_close(p.detach(), -0.1 * update, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["LAMB32bit", "LARS32bit"])
def test_upstream_still_freezes_zeros_or_this_table_is_old(name: str) -> None:
    p = nn.Parameter(torch.zeros(N))
    p.grad = normal(N)
    extra = {"lr": 0.1, "momentum": 0.9} if name.startswith("LARS") else {"lr": 0.1}
    getattr(bitsandbytes.optim, name)([p], **extra).step()
    assert not p.detach().any()


@every_bits
@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_max_unorm_is_honoured_and_0_is_no_limit(name: str, bits: str) -> None:
    """bitsandbytes' LAMB had 1.0 whatever was given until 0.50."""
    moved = {}
    for limit in (0.0, 0.01, 0.02):
        p = parameter(N)
        optimizer = make(name + bits, [p], lr=1e-2, max_unorm=limit)
        p.grad = normal(N, seed=1)
        optimizer.step()
        moved[limit] = float((p.detach() - normal(N)).norm())
    assert moved[0.02] == pytest.approx(2 * moved[0.01], rel=1e-3)
    assert moved[0.01] == pytest.approx(1e-2 * 0.01 * float(normal(N).norm()), rel=1e-3)
    assert moved[0.0] > 10 * moved[0.02]


@every_bits
def test_lamb_and_lars_repeat_bit_for_bit(bits: str) -> None:
    """bitsandbytes adds norms in any order on CUDA."""
    for name in ("LAMB", "LARS"):
        runs = []
        for _ in range(2):
            optimizer = make(name + bits, [parameter(N), parameter(70, 300, seed=1)], lr=1e-2)
            train(optimizer, 3)
            runs.append(snapshot(optimizer))
        assert_same(*runs)


# --- bad gradients


@every_backend
@every_bits
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("base", ["Adam", "Lion", "SGD", "RMSprop", "Adagrad", "AdEMAMix", "LAMB", "LARS"])
def test_a_bad_gradient_stays_within_its_block(base: str, bad: float, bits: str, backend: str) -> None:
    p, other = parameter(N), parameter(300, seed=5)
    optimizer = make(base + bits, [p, other], lr=1e-2, backend=backend)
    for step in range(3):
        p.grad, other.grad = normal(N, seed=step), normal(300, seed=step)
        if step == 1:
            p.grad[300] = bad
        optimizer.step()
    spoilt = ~p.detach().isfinite()
    contained = base in ("Adam", "AdEMAMix", "LAMB") and bits == "8bit"
    if contained or (base == "Lion" and bits == "32bit" and math.isnan(bad)):
        assert not spoilt.any()
    if bits == "32bit":
        assert set(spoilt.nonzero().flatten().tolist()) <= {300}
    assert not spoilt[:256].any() and not spoilt[512:].any()
    assert other.detach().isfinite().all()
    for key, value in optimizer.state[p].items():
        if key.startswith("absmax"):
            assert value[torch.arange(value.numel()) != 1].isfinite().all()
            assert not contained or value.isfinite().all()


# --- sizes


def test_more_than_2_to_the_31_elements_are_counted_right() -> None:
    """bitsandbytes passes numel as an int32, which wraps. Nothing is allocated here."""
    numel = 2**31 + 2**30 + 77
    big = torch.empty(numel, dtype=torch.bfloat16, device="meta")
    assert state.blocks(numel) == -(-numel // 256) == 12582913
    for rule in rules.RULES.values():
        for bits in (8, 32):
            made = state.allocate(big, bits, rule)
            width = 1 if bits == 8 else 4
            assert {made[key].numel() for key in rule.states} == {numel}
            bytes_ = sum(t.numel() * t.element_size() for t in made.values())
            scales = 4 * 12582913 if bits == 8 else 0
            assert bytes_ == state.expected_bytes(numel, bits, rule)
            assert bytes_ == len(rule.states) * (width * numel + scales) + 4
            state.check_shapes("big", big, {**made, "step": torch.zeros(())}, rule)
    assert bnb_fsdp.optim.AdamW8bit([nn.Parameter(big)])


def test_native_tables_hold_64_bit_sizes() -> None:
    entry = native.TensorEntry
    assert entry.numel.size == entry.group.size == 8
    assert ctypes.sizeof(entry) == 8 * (1 + 3 + 3 + 1 + 1 + 1)
    assert entry(numel=2**31 + 5).numel == 2**31 + 5
    header = (ROOT / "bnb_fsdp/csrc/c_api.h").read_text()
    assert "int64_t numel;" in header and "int64_t count" in header and "int numel" not in header


RECORDER = r"""
// The CPU library's distribution of work with a kernel that only writes down what it is given.
#include "cpu/api.cpp"
#include <stdio.h>
#include <mutex>
#include <thread>
namespace bnb_fsdp {
std::vector<std::pair<int64_t, int64_t>> seen;
std::mutex lock;
Kernel recording(const char*, int, int) {
  return {1, [](const bnb_fsdp_hyper&, float, float, ScalarBlock&) {},
          [](const Range& r, int) {
            const std::lock_guard<std::mutex> guard(lock);
            seen.emplace_back(r.begin, r.end);
          },
          nullptr};
}
const InstructionSet generic_set{"recording", [] { return true; }, recording};
const Codebook& codebook(bool) { static const Codebook none{}; return none; }
void run_parallel(int threads, bool, const std::function<void()>& job) {
  std::vector<std::thread> team;
  for (int i = 1; i < threads; ++i) team.emplace_back(job);
  job();
  for (std::thread& one : team) one.join();
}
}  // namespace bnb_fsdp
int main() {
  const int64_t sizes[] = {(int64_t{1} << 31) + 77, (int64_t{1} << 33) + 1, 5};
  for (const int threads : {1, 3}) {
    for (const int64_t numel : sizes) {
      bnb_fsdp::seen.clear();
      float step = 0, x = 0;
      bnb_fsdp_tensor t{&x, {&x, nullptr, nullptr}, {&x, nullptr, nullptr}, &step, numel, 0};
      const void* gradient = &x;
      const bnb_fsdp_hyper hyper{};
      if (bnb_fsdp_cpu_step("adam", 8, 0, 0, &t, &gradient, 1, &hyper, 1, nullptr, threads, 0) != 0) return 1;
      std::sort(bnb_fsdp::seen.begin(), bnb_fsdp::seen.end());
      int64_t at = 0, blocks = 1;
      for (const auto& range : bnb_fsdp::seen) {
        if (range.first != at || range.second <= at) return 2;
        blocks &= range.first % 256 == 0;
        at = range.second;
      }
      printf("%d %lld %lld %lld %zu\n", threads, (long long)numel, (long long)at, (long long)blocks,
             bnb_fsdp::seen.size());
    }
  }
}
"""


def test_the_cpu_library_deals_out_more_than_2_to_the_31_elements(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "recorder.cpp").write_text(RECORDER)
    sources = str(ROOT / "bnb_fsdp/csrc")
    build = [compiler, "-std=c++17", "-O0", '-DBNB_FSDP_TARGET="test"', "-I", sources, "-I", f"{sources}/cpu"]
    program = str(tmp_path / "recorder")
    subprocess.run([*build, str(tmp_path / "recorder.cpp"), "-pthread", "-o", program], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.split(
        "\n"
    )
    found = [tuple(map(int, line.split())) for line in lines if line]
    assert len(found) == 6
    for threads, numel, covered, aligned, pieces in found:
        assert covered == numel and aligned == 1
        assert pieces == 1 if threads == 1 or numel == 5 else 3 * 8 <= pieces <= 3 * 8 + 1


def test_the_cuda_library_counts_the_tiles_of_more_than_2_to_the_31_elements() -> None:
    from bnb_fsdp.backends import cuda

    try:
        library = cuda.library()
    except native.LibraryError as missing:
        pytest.skip(f"the CUDA library is not built: {missing}")
    for numel in (0, 1, 4096, 4097, 2**31 - 1, 2**31, 2**31 + 4097, 2**33 + 1):
        assert library.tiles(numel) == -(-numel // 4096)


@every_name
@pytest.mark.parametrize("shape", [(0,), (0, 300), (5, 0, 3)], ids=str)
def test_empty_tensors_step(name: str, shape: tuple[int, ...]) -> None:
    """bitsandbytes launches a grid of 0 and ends the process: empty shards are common."""
    for backend in ("cpu", "torch"):
        p, q = nn.Parameter(torch.zeros(shape)), parameter(50)
        optimizer = make(name, [p, q], min_8bit_size=0, backend=backend)
        for step in range(2):
            p.grad, q.grad = torch.zeros(shape), normal(50, seed=step)
            optimizer.step()
        held = optimizer.state[p]
        assert int(held["step"]) == 2 and held["state1"].shape == shape
        assert all(value.numel() == 0 for key, value in held.items() if key != "step")
        assert q.detach().isfinite().all() and not torch.equal(q.detach(), normal(50))
        again = make(
            name, [nn.Parameter(p.detach().clone()), parameter(50)], min_8bit_size=0, backend=backend
        )
        again.load_state_dict(optimizer.state_dict())


# --- layouts, copies and state dicts of the classes that other files do not have


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: normal(60, 100).t(),
    "channels last": lambda: normal(8, 16, 6, 7).contiguous(memory_format=torch.channels_last),
    "permuted": lambda: normal(10, 30, 20).permute(2, 0, 1),
    "offset into a buffer": lambda: normal(2 * N)[N - 3 : 2 * N - 3],
}


@every_new_class
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_strided_parameter_is_updated_where_it_lies(name: str, layout: str) -> None:
    """bitsandbytes re-points ``p.data`` to a contiguous copy, away from buffers that share its memory."""
    p = nn.Parameter(LAYOUTS[layout]())
    view = p.detach()
    order = sorted(range(p.dim()), key=lambda dim: -p.stride(dim))
    flat = nn.Parameter(p.detach().permute(order).flatten().clone())
    optimizer, reference = make(name, [p], lr=1e-2), make(name, [flat], lr=1e-2)
    pointer, stride = p.data_ptr(), p.stride()
    for step in range(3):
        p.grad = normal(*p.shape, seed=step + 1)  # contiguous, other strides than the parameter's
        flat.grad = p.grad.permute(order).flatten()
        optimizer.step()
        reference.step()
    assert (p.data_ptr(), p.stride()) == (pointer, stride)
    assert torch.equal(view, p)
    assert torch.equal(p.detach().permute(order).flatten(), flat.detach())
    for key, value in optimizer.state[p].items():
        wanted = reference.state[flat][key]
        assert torch.equal(value.permute(order).flatten() if key.startswith("state") else value, wanted), key


def deep_copied(optimizer: Any, name: str) -> Any:
    return copy.deepcopy(optimizer)


def pickled(optimizer: Any, name: str) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


def loaded(optimizer: Any, name: str) -> Any:
    fresh = make(name, [nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return fresh


def saved(optimizer: Any, name: str) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = make(name, [nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


EXTRA: dict[str, dict[str, Any]] = {
    "AdEMAMix": {"t_alpha": 9, "t_beta3": 6},
    "LAMB": {"max_unorm": 0.5},
    "LARS": {"max_unorm": 0.01, "trust_ratio": "published"},
}


@every_new_class
@pytest.mark.parametrize("how", [deep_copied, pickled, loaded, saved], ids=lambda how: how.__name__)
def test_a_copy_continues_bit_for_bit_and_apart_from_the_original(name: str, how: Callable[..., Any]) -> None:
    """bitsandbytes cannot be deep-copied, fails at the first step after unpickling, and casts what it loads."""
    sizes = [(n, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for n in (N, 50)]
    params = [parameter(n, dtype=dtype) for n, dtype in sizes]
    original = make(name, params, lr=1e-2, weight_decay=0.1, **EXTRA[family(name)])
    train(original)
    other = how(original, name)
    assert_like(original, other)
    wanted = torch.uint8 if name.endswith("8bit") else torch.float32
    kinds = [other.state[p]["state1"].dtype for p in other.param_groups[0]["params"]]
    assert kinds == [wanted, torch.float32] * 3
    before = snapshot(other)
    train(original, first=3)
    assert_same(snapshot(other), before)
    train(other, first=3)
    assert_like(original, other)


@pytest.mark.parametrize("name", ["AdEMAMix8bit", "LAMB32bit", "LARS8bit"])
def test_what_a_state_dict_says_of_the_new_classes(name: str) -> None:
    optimizer = make(name, [parameter(N)], **EXTRA[family(name)])
    train(optimizer)
    saved_dict = optimizer.state_dict()
    assert EXTRA[family(name)].items() <= saved_dict["param_groups"][0].items()
    other = make(name, [parameter(N)])
    other.load_state_dict(saved_dict)
    for key, value in EXTRA[family(name)].items():
        assert other.param_groups[0][key] == value


@pytest.mark.parametrize(
    ("first", "second"),
    [("AdEMAMix8bit", "Adam8bit"), ("LARS8bit", "LAMB8bit"), ("LAMB32bit", "AdEMAMix32bit")],
)
def test_state_of_another_algorithm_is_refused(first: str, second: str) -> None:
    source, target = make(first, [parameter(N)]), make(second, [parameter(N)])
    train(source)
    train(target)
    before = snapshot(target)
    with pytest.raises(ValueError):
        target.load_state_dict(source.state_dict())
    assert_same(snapshot(target), before)


# --- overrides stay with their optimizer


def test_overrides_do_not_leak_to_other_optimizers() -> None:
    """bitsandbytes keeps them by position and by id() for the whole process: recycled ids inherit them."""
    p = parameter(N)
    first = bnb_fsdp.AdamW8bit([("embedding.weight", p)], overrides={"embedding.*": {"optim_bits": 32}})
    by_parameter = bnb_fsdp.Lion8bit([p], overrides={p: {"optim_bits": 32}})
    plain = bnb_fsdp.AdamW8bit([("embedding.weight", p)])
    for optimizer, dtype in ((first, torch.float32), (by_parameter, torch.float32), (plain, torch.uint8)):
        train(optimizer, 1)
        assert optimizer.state[p]["state1"].dtype == dtype
    address = id(p)
    del p, first, by_parameter, plain, optimizer
    gc.collect()
    fresh = [parameter(N) for _ in range(200)]  # one of them takes the address, if any may
    later = bnb_fsdp.AdamW8bit([(f"embedding.weight{i}", q) for i, q in enumerate(fresh)])
    train(later, 1)
    assert {later.state[q]["state1"].dtype for q in fresh} == {torch.uint8}, address


def test_bitsandbytes_global_overrides_do_not_reach_us(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "pid2config", {})
    monkeypatch.setattr(manager, "index2config", {})
    p = parameter(N)
    manager.register_parameters([p])
    manager.override_config(p, "optim_bits", 32)
    assert manager.pid2config or manager.index2config
    for optimizer, dtype in (
        (bnb_fsdp.AdamW8bit([p]), torch.uint8),
        (bitsandbytes.optim.AdamW8bit([p]), torch.float32),
    ):
        train(optimizer, 1)
        assert optimizer.state[p]["state1"].dtype == dtype


# --- state is plain: no shared maps, no integers


@every_name
def test_state_is_tensors_of_its_own(name: str) -> None:
    """bitsandbytes' step is an int, which FSDP cannot move, and one map is shared by all parameters' state."""
    params = [parameter(N), parameter(N, seed=1)]
    optimizer = make(name, params)
    train(optimizer, 1)
    held = [optimizer.state[p] for p in params]
    assert all(type(value) is Tensor for values in held for value in values.values())
    tensors = [value for values in held for value in values.values()]
    occupied = spans(tensors)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(occupied))
    rule = type(optimizer).rule
    bits = 8 if name.endswith("8bit") else 32
    assert set(held[0]) == set(state.keys(rule, bits))
    assert sum(value.nbytes for value in held[0].values()) == state.expected_bytes(N, bits, rule)


def test_8_bit_decay_counts_in_the_second_moment_alone() -> None:
    """bitsandbytes' kernel divides the gradient without its decay: one step from zero state, by hand."""
    for name, given in (("RMSprop8bit", {"alpha": 0.9}), ("Adagrad8bit", {})):
        p = nn.Parameter(torch.full((4096,), 2.0))
        p.grad = torch.full((4096,), 0.5)
        getattr(bnb_fsdp, name)([p], lr=0.1, weight_decay=0.25, **given).step()
        share = 0.1 if name == "RMSprop8bit" else 1.0
        wanted = 2.0 - 0.1 * 0.5 / (share * (0.5 + 0.25 * 2.0) ** 2) ** 0.5
        torch.testing.assert_close(p.detach(), torch.full((4096,), wanted), rtol=1e-5, atol=0)


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))  # taken back afterwards
    return importlib.import_module("family_matrix")


def run_matrix(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["family_matrix.py", "--backends", "cpu,torch,cuda", *arguments])
    status: int = matrix.main()
    return status


def test_the_matrix_passes_and_has_no_unexplained_hole(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "AdEMAMix8bit,LARS,PagedLion32bit"
    assert run_matrix(matrix, monkeypatch, "--classes", names, "--json", str(tmp_path / "out.json")) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["cells"]) == names.split(",")
    for by_backend in report["cells"].values():
        for backend, by_dtype in by_backend.items():
            assert list(by_dtype) == list(matrix.DTYPES)
            for cell in by_dtype.values():
                if backend in ("cpu", "torch"):
                    assert cell in ("equal", "within tolerance")
                assert cell != "not available" or report["not_available"][backend]
    assert "X failed: 0" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["parameter", "scale", "code"])
def test_the_matrix_notices_a_wrong_result(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    honest = matrix.expected

    def spoilt(*arguments: Any) -> list[Tensor]:
        values = [value.clone() for value in honest(*arguments)]
        if wrong == "parameter":
            values[0] += 1e-4
        elif wrong == "scale":
            values[-1] *= 1.001
        elif len(values) > 4:
            values[1][3] = (int(values[1][3]) + 9) % 256
        return values

    monkeypatch.setattr(matrix, "expected", spoilt)
    assert run_matrix(matrix, monkeypatch, "--classes", "LAMB8bit") == 1
    out = capsys.readouterr().out
    assert "X LAMB8bit, cpu, fp32: AssertionError" in out and "X failed: 8" in out
