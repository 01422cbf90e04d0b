"""The Triton kernels beside `bnb_fsdp.rules`, and the optimizers on them beside torch.optim.

Collected by no pattern: test_triton.py runs it in a process whose triton interprets kernels on the CPU,
test_triton_cuda.py imports it where there is a GPU. Results are compared bit for bit; two NaN are equal.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import bnb_fsdp
from bnb_fsdp import cli, codebook, rules, state
from bnb_fsdp.backends import BucketKey, Slot
from bnb_fsdp.backends.triton_backend import TritonBackend, TritonBucket
from bnb_fsdp.rules import RULES, Hyper, Rule

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (700, 0, 1, 257)  # tails, an empty tensor; with 32 bits a whole chunk: `WHOLE`
WHOLE = (1024, 1300)
GROUPS = (
    Hyper(1e-3, 0.9, 0.999, 0.9999, alpha=5.0, eps=1e-8, weight_decay=0.01),
    Hyper(3e-3, 0.95, 0.99, 0.9, alpha=2.0, eps=1e-6, weight_decay=0.0, update_scale=0.37),
)

every_rule = pytest.mark.parametrize("rule", list(RULES.values()), ids=list(RULES))
every_width = pytest.mark.parametrize("bits", [8, 32])


def normal(n: int, seed: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(n: int, step: int, dtype: torch.dtype, special: bool) -> Tensor:
    """Magnitudes over six decades; ``special``: NaN, infinities, signed zeros, blocks of zeros and of NaN, 1e12."""
    generator = torch.Generator().manual_seed(100 * step + n)
    g = torch.randn(n, generator=generator) * 10 ** (6 * torch.rand(n, generator=generator) - 6)
    if special and n > 256:
        g[::7], g[11] = 0.0, -0.0
        g[5], g[9], g[100] = float("nan"), float("inf"), -float("inf")
        if step == 0:
            g[:256] = 0.0
    if special and n > 600:
        g[256:512] = (-0.0, float("nan"), 0.0)[step % 3]
        g[512:600] *= 1e12
    return g.to(dtype)


def slot(group: int, parameter: Tensor, rule: Rule, bits: int, device: torch.device = DEVICE) -> Slot:
    parameter = parameter.to(device)
    values = state.allocate(parameter, bits, rule)
    absmax = tuple(values[state.absmax_key(key)] for key in rule.states) if bits == 8 else ()
    return Slot("p", group, parameter, tuple(values[key] for key in rule.states), absmax, values["step"])


def slots(rule: Rule, bits: int, dtype: torch.dtype, sizes: Sequence[int]) -> list[Slot]:
    made = []
    for index, n in enumerate(sizes):
        parameter = normal(n, index, dtype)
        parameter[::77] = -0.0
        made.append(slot(index % 2, parameter, rule, bits))
    return made


def bucket(
    rule: Rule, bits: int, made: Sequence[Slot], gradient_dtype: torch.dtype, **key: Any
) -> TritonBucket:
    dtype = made[0].parameter.dtype
    return TritonBackend(DEVICE).bucket(
        BucketKey(rule.name, bits, dtype, gradient_dtype, DEVICE, **key), rule, made
    )


def on_device(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if g is None else g.to(DEVICE) for g in gradients]


class Oracle:
    """A copy of slots on the CPU, stepped by `rules.step8` and `rules.step32`."""

    def __init__(self, rule: Rule, bits: int, made: Sequence[Slot]) -> None:
        self.rule, self.bits = rule, bits
        self.groups = [s.group for s in made]
        self.tensors = [[x.cpu().clone() for x in (s.parameter, *s.states, *s.absmax)] for s in made]
        self.steps = [int(s.step) for s in made]

    def run(
        self, gradients: Sequence[Tensor | None], hypers: Sequence[Hyper], scales: Tensor | None = None
    ) -> None:
        count = len(self.rule.signed)
        for i, g in enumerate(gradients):
            if g is None:
                continue
            self.steps[i] += 1
            hyper = hypers[self.groups[i]]
            if scales is not None:
                hyper = hyper._replace(update_scale=float(scales[i]))
            p, *rest = self.tensors[i]
            states, absmax = tuple(rest[:count]), tuple(rest[count:])
            if self.bits == 8:
                new, states, absmax = rules.step8(self.rule, hyper, self.steps[i], g, p, states, absmax)
            else:
                new, states = rules.step32(self.rule, hyper, self.steps[i], g, p, states)
            self.tensors[i] = [new, *states, *absmax]


def assert_same_bits(a: Tensor, b: Tensor, what: str) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype, what
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    wrong = (a.view(view) != b.view(view)) & ~(torch.isnan(a) & torch.isnan(b))
    assert not bool(wrong.any()), (
        f"{what}: {int(wrong.sum())} differ, such as {a[wrong][:3]} and {b[wrong][:3]}"
    )


def assert_equal(made: Sequence[Slot], oracle: Oracle, what: str = "") -> None:
    for i, (s, tensors) in enumerate(zip(made, oracle.tensors)):
        names = ("parameter", *oracle.rule.states, *("absmax" for _ in s.absmax))
        for name, found, wanted in zip(names, (s.parameter, *s.states, *s.absmax), tensors):
            assert_same_bits(
                found.cpu(), wanted, f"{what} {name} of tensor {i} ({s.parameter.numel()} elements)"
            )
        assert int(s.step) == oracle.steps[i]


def step_beside_oracle(
    rule: Rule, bits: int, dtypes: tuple[torch.dtype, torch.dtype], hypers: Sequence[Hyper], special: bool,
    sizes: Sequence[int] = SIZES, steps: int = 3, **key: Any,
) -> None:  # fmt: skip
    made = slots(rule, bits, dtypes[0], sizes)
    stepped, oracle = bucket(rule, bits, made, dtypes[1], **key), Oracle(rule, bits, made)
    for step in range(steps):
        gradients: list[Tensor | None] = [gradient(n, step, dtypes[1], special) for n in sizes]
        if step == 1:
            gradients[-1] = None
        stepped.run(on_device(gradients), hypers)
        oracle.run(gradients, hypers)
        assert_equal(made, oracle, f"step {step}:")


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@every_width
@every_rule
def test_a_step_is_the_rule_bit_for_bit_with_nan_infinities_and_blocks_of_zeros(
    rule: Rule, bits: int, dtype: torch.dtype
) -> None:
    step_beside_oracle(rule, bits, (dtype, dtype), GROUPS, special=True)


@every_width
@every_rule
def test_a_bfloat16_gradient_on_a_float32_parameter(rule: Rule, bits: int) -> None:
    step_beside_oracle(rule, bits, (FLOAT32, BFLOAT16), GROUPS, special=False, sizes=(300,))


@every_width
@pytest.mark.parametrize(
    "rule", [RULES[name] for name in ("adam", "lion", "momentum", "adagrad")], ids=lambda r: r.name
)
def test_zero_gradients_are_skipped_in_the_groups_that_say_so(rule: Rule, bits: int) -> None:
    hypers = (GROUPS[0]._replace(skip_zeros=True), GROUPS[1])
    step_beside_oracle(rule, bits, (FLOAT32, FLOAT32), hypers, special=True, sizes=(300, 40, 300), steps=2)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@every_width
@pytest.mark.parametrize("rule", [rules.ADAM, rules.MOMENTUM], ids=lambda rule: rule.name)
def test_published_formulas_and_scales_in_device_memory(rule: Rule, bits: int, dtype: torch.dtype) -> None:
    made = slots(rule, bits, dtype, SIZES)
    hypers = (GROUPS[0]._replace(published=True), GROUPS[1])
    stepped, oracle = bucket(rule, bits, made, dtype), Oracle(rule, bits, made)
    for step in range(2):
        gradients = [gradient(n, step, dtype, False) for n in SIZES]
        scales = torch.tensor([0.5, 1.0, 0.0, 0.3]) if step else None
        stepped.run(on_device(gradients), hypers, None if scales is None else scales.to(DEVICE))
        oracle.run(gradients, hypers, scales)
        assert_equal(made, oracle, f"step {step}:")


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@every_rule
def test_whole_chunks_and_tails_of_32_bit_state(rule: Rule, dtype: torch.dtype) -> None:
    step_beside_oracle(rule, 32, (dtype, dtype), GROUPS, special=True, sizes=WHOLE, steps=2)


@every_width
def test_a_program_takes_several_chunks(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnb_fsdp.backends.triton_backend._PROGRAMS", 1)
    sizes = (700, 513, 1) if bits == 8 else (2500, 1025, 1)
    step_beside_oracle(rules.ADAM, bits, (FLOAT32, FLOAT32), GROUPS, special=False, sizes=sizes, steps=2)


@every_width
def test_tensors_between_16_byte_boundaries(bits: int) -> None:
    n = 1300 if bits == 32 else 300
    rule, made = rules.ADAM, slots(rules.ADAM, bits, FLOAT32, (n, n, n))
    shifted = [torch.empty(n + 1, device=DEVICE)[1:].copy_(s.parameter) for s in made]
    made = [Slot(s.name, s.group, p, s.states, s.absmax, s.step) for s, p in zip(made, shifted)]
    stepped, oracle = bucket(rule, bits, made, FLOAT32), Oracle(rule, bits, made)
    for step in range(2):
        gradients = [gradient(n, step, FLOAT32, False) for _ in made]
        offset = [torch.empty(n + 3, device=DEVICE)[3:].copy_(g) for g in gradients]
        stepped.run(offset, GROUPS)
        oracle.run(gradients, GROUPS)
        assert_equal(made, oracle, f"step {step}:")


@every_width
@pytest.mark.parametrize("rule", [rules.ADAM, rules.ADEMAMIX, rules.MOMENTUM], ids=lambda rule: rule.name)
def test_values_near_the_smallest_normal_number_differ_by_less_than_1e_36(rule: Rule, bits: int) -> None:
    """Subnormal intermediate results are flushed by the rules and not by the kernels."""
    made = slots(rule, bits, FLOAT32, (512,))
    stepped, oracle = bucket(rule, bits, made, FLOAT32), Oracle(rule, bits, made)
    for step in range(3):
        g = gradient(512, step, FLOAT32, False)
        g[256:] *= 10.0 ** -torch.linspace(17, 40, 256)
        stepped.run(on_device([g]), GROUPS)
        oracle.run([g], GROUPS)
    ours = [
        made[0].parameter.cpu(),
        *_values(rule, bits, [x.cpu() for x in (*made[0].states, *made[0].absmax)]),
    ]
    wanted = [oracle.tensors[0][0], *_values(rule, bits, oracle.tensors[0][1:])]
    for a, b in zip(ours, wanted):
        torch.testing.assert_close(a[256:], b[256:], rtol=1e-6, atol=1e-36)
        torch.testing.assert_close(a[:256], b[:256], rtol=0, atol=0)


def _values(rule: Rule, bits: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    count = len(rule.signed)
    if bits == 32:
        return list(tensors)
    return [
        codebook.dequantize(code.view(-1, 256), scale, signed).flatten()
        for code, scale, signed in zip(tensors[:count], tensors[count:], rule.signed)
    ]


@pytest.mark.parametrize("published", [False, True], ids=["", "published"])
@every_width
@pytest.mark.parametrize("rule", [rules.ADAM, rules.MOMENTUM], ids=lambda rule: rule.name)
def test_norms_are_those_of_the_coming_step_and_change_nothing(
    rule: Rule, bits: int, published: bool
) -> None:
    dtype, sizes = BFLOAT16, (700, 0, 1, 1100)
    hypers = (GROUPS[0]._replace(published=published), GROUPS[1])
    made = slots(rule, bits, dtype, sizes)
    stepped, oracle = bucket(rule, bits, made, dtype), Oracle(rule, bits, made)
    for step in range(2):
        gradients: list[Tensor | None] = [gradient(n, step, dtype, False) for n in sizes]
        gradients[2] = None
        sums = stepped.norms(on_device(gradients), hypers)
        again = stepped.norms(on_device(gradients), hypers)
        assert_equal(made, oracle)
        assert torch.equal(sums, again) and sums.dtype == FLOAT32 and sums.device == DEVICE
        for i, g in enumerate(gradients):
            wanted = torch.zeros(2, dtype=torch.float64)
            if g is not None:
                u, p = _direction(oracle, i, g, hypers), oracle.tensors[i][0]
                wanted = torch.stack([u.double().square().sum(), p.double().square().sum()])
            torch.testing.assert_close(sums[i].cpu().double(), wanted, rtol=1e-6, atol=0)
        stepped.run(on_device(gradients), hypers)
        oracle.run(gradients, hypers)


def _direction(oracle: Oracle, i: int, g: Tensor, hypers: Sequence[Hyper]) -> Tensor:
    rule, count = oracle.rule, len(oracle.rule.signed)
    p, *rest = oracle.tensors[i]
    arguments = (rule, hypers[oracle.groups[i]], oracle.steps[i] + 1, g, p, tuple(rest[:count]))
    return (
        rules.direction8(*arguments, tuple(rest[count:]))
        if oracle.bits == 8
        else rules.direction32(*arguments)
    )


def test_norms_of_a_rule_without_a_direction_are_refused() -> None:
    made = slots(rules.LION, 8, FLOAT32, (5,))
    with pytest.raises(
        RuntimeError, match=r"lion has no norms; only adam \(LAMB\) and momentum \(LARS\) have"
    ):
        bucket(rules.LION, 8, made, FLOAT32).norms([torch.zeros(5, device=DEVICE)], GROUPS)


@pytest.mark.parametrize("rule", [rules.ADAM, rules.MOMENTUM], ids=lambda rule: rule.name)
def test_step_counts_and_learning_rates_in_device_memory(rule: Rule) -> None:
    sizes = (300, 0, 40)
    made = slots(rule, 8, FLOAT32, sizes)
    made = [Slot(s.name, s.group, s.parameter, s.states, s.absmax, s.step.to(DEVICE)) for s in made]
    stepped, oracle = bucket(rule, 8, made, FLOAT32, steps_on_device=True), Oracle(rule, 8, made)
    rates = [hyper._replace(lr=float("nan"), rate=torch.tensor(hyper.lr, device=DEVICE)) for hyper in GROUPS]
    for step in range(3):
        gradients: list[Tensor | None] = [gradient(n, step, FLOAT32, False) for n in sizes]
        if step == 1:
            gradients[2] = None
        sums = stepped.norms(on_device(gradients), rates).cpu()
        assert_equal(made, oracle, f"norms before step {step}:")
        squares = _direction(oracle, 0, gradients[0], GROUPS).double().square().sum()  # type: ignore[arg-type]
        torch.testing.assert_close(sums[0, 0].double(), squares, rtol=1e-6, atol=0)
        stepped.run(on_device(gradients), rates)
        oracle.run(gradients, GROUPS)
        assert_equal(made, oracle, f"step {step}:")
    direct = slots(rule, 32, FLOAT32, (40,))
    oracle = Oracle(rule, 32, direct)
    bucket(rule, 32, direct, FLOAT32).run(on_device([gradient(40, 0, FLOAT32, False)]), rates)
    oracle.run([gradient(40, 0, FLOAT32, False)], GROUPS)
    assert_equal(direct, oracle)


def test_an_unusable_learning_rate_or_scale_is_refused_and_nothing_changes() -> None:
    made = slots(rules.ADAM, 8, FLOAT32, (40,))
    stepped, oracle = bucket(rules.ADAM, 8, made, FLOAT32), Oracle(rules.ADAM, 8, made)
    rate = GROUPS[0]._replace(rate=torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match=r"lr is a torch.float32 tensor of shape \(2,\).*one element"):
        stepped.run(on_device([torch.ones(40)]), [rate])
    with pytest.raises(
        ValueError, match=r"scales are torch.float32 of shape \(2,\); expected float32 of \(1,\)"
    ):
        stepped.run(on_device([torch.ones(40)]), GROUPS, torch.ones(2, device=DEVICE))
    assert_equal(made, oracle)


def test_a_failing_kernel_names_operation_dtypes_and_shapes_and_counts_no_step() -> None:
    made = slots(rules.ADAM, 8, BFLOAT16, (40,))
    stepped = bucket(rules.ADAM, 8, made, FLOAT32)
    stepped._constants["UPDATE"] = None
    with pytest.raises(
        RuntimeError, match=r"adam step \(8-bit, torch.bfloat16 .*\[\(40,\)\].*kernel step_one"
    ):
        stepped.run(on_device([torch.ones(40)]), GROUPS)
    assert int(made[0].step) == 0


def test_more_than_2000_tensors_most_without_a_gradient() -> None:
    sizes = [40] * 2050
    made = slots(rules.LION, 32, FLOAT32, sizes)
    stepped, oracle = bucket(rules.LION, 32, made, FLOAT32), Oracle(rules.LION, 32, made)
    gradients = [gradient(40, 0, FLOAT32, False) if i in (0, 1001, 2049) else None for i in range(len(sizes))]
    for _ in range(2):
        stepped.run(on_device(gradients), GROUPS)
        oracle.run(gradients, GROUPS)
    assert_equal(made, oracle)


# --- Optimizers


def optimizer_of(name: str, parameters: list[torch.nn.Parameter], **kwargs: Any) -> Any:
    if name.endswith("8bit"):
        kwargs["min_8bit_size"] = 1
    return getattr(bnb_fsdp, name)(parameters, backend="triton", **kwargs)


def _lion(parameters: list[torch.nn.Parameter]) -> Any:
    return pytest.importorskip("lion_pytorch").Lion(parameters, lr=1e-3, weight_decay=0.0)


PEERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "AdamW": (dict(lr=1e-3, weight_decay=0.0), lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0)),
    "Lion": (dict(lr=1e-3), _lion),
    "SGD": (dict(lr=1e-3, momentum=0.9), lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
    "RMSprop": (dict(lr=1e-3), lambda p: torch.optim.RMSprop(p, lr=1e-3)),
    "Adagrad": (dict(lr=1e-2), lambda p: torch.optim.Adagrad(p, lr=1e-2)),
}


@every_width
@pytest.mark.parametrize("name", PEERS)
def test_50_steps_beside_the_peer_saved_and_reloaded_every_10_with_equal_raw_state(
    name: str, bits: int
) -> None:
    """32-bit state: 2e-6 for each element. 8-bit state: for each four learning rates (flipped signs of Lion) and a
    tenth of the largest change, a fiftieth of that on average."""
    arguments, peer = PEERS[name]
    start = normal(200, 0)
    mine, theirs = torch.nn.Parameter(start.clone().to(DEVICE)), torch.nn.Parameter(start.clone())
    optimizer, reference = optimizer_of(f"{name}{bits}bit", [mine], **arguments), peer([theirs])
    for step in range(1, 51):
        theirs.grad = normal(200, 1) + 0.5 * normal(200, 100 + step)
        mine.grad = theirs.grad.to(DEVICE, copy=True)
        optimizer.step()
        reference.step()
        if step % 10 == 0:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            other = torch.nn.Parameter(mine.detach().clone())
            reloaded = optimizer_of(f"{name}{bits}bit", [other], **arguments)
            reloaded.load_state_dict(torch.load(file, weights_only=True))
            before, after = optimizer.state[mine], reloaded.state[other]
            assert before.keys() == after.keys() and before["state1"].dtype == (
                torch.uint8 if bits == 8 else FLOAT32
            )
            for key, value in before.items():
                assert torch.equal(value, after[key]), f"{key} after step {step}"
            mine, optimizer = other, reloaded
        difference = (mine.detach().cpu() - theirs.detach()).abs()
        moved = float((theirs.detach() - start).abs().max())
        limit = 4 * arguments["lr"] + 0.1 * moved if bits == 8 else 2e-6
        assert float(difference.max()) <= limit, f"step {step}"
        assert float(difference.mean()) <= 0.02 * moved, f"step {step}"
    assert moved > 0.04


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion32bit"])
def test_dense_tensors_of_any_layout_are_stepped_in_storage_order(name: str) -> None:
    flat = normal(2 * 3 * 10 * 12, 0)
    layouts = [
        flat.view(6, 120).t(), flat.view(2, 10, 12, 3).permute(0, 3, 1, 2), flat.clone().view(-1)
    ]  # fmt: skip
    parameters = [
        torch.nn.Parameter(x.clone(memory_format=torch.preserve_format).to(DEVICE)) for x in layouts
    ]
    optimizer = optimizer_of(name, parameters, lr=1e-2)
    for step in range(2):
        for p in parameters:
            g = torch.empty_like(p)
            g.as_strided((p.numel(),), (1,)).copy_(normal(p.numel(), step + 1))
            p.grad = g
        optimizer.step()
    results = [p.detach().as_strided((p.numel(),), (1,)) for p in parameters]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])
    assert not torch.equal(results[2].cpu(), flat)
    assert {row.backend for row in bnb_fsdp.describe(optimizer).rows} == {"triton"}


def test_doctor_tests_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "SIZES", (1, 257, 400))
    monkeypatch.setattr(rules, "RULES", {"momentum": rules.MOMENTUM})
    results = list(cli.self_test(TritonBackend(DEVICE), DEVICE))
    assert len(results) == 6 and all(result["ok"] for result in results), results
    monkeypatch.setattr(cli, "_trainer", lambda: {"registered": True, "detail": ""})
    monkeypatch.setattr(cli, "self_test", lambda backend, device: [{"backend": backend.name, "ok": True}])
    report = cli._report("triton")
    assert {"backend": "triton", "ok": True} in report["self_tests"]
    if INTERPRETED:
        assert report["devices"][0]["backend"] == "triton"
