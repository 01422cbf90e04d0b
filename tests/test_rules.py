"""The rules against textbook formulas, bitsandbytes, torch.optim and lion-pytorch; bad gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bnb_fsdp import codebook
from bnb_fsdp.rules import ADAM, LION, Hyper, Rule, step8, step32

N = 5 * 256 + 17
HYPER = {
    "adam": Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1),
    "lion": Hyper(lr=1e-2, beta1=0.9, beta2=0.97, weight_decay=0.1),
}

every_rule = pytest.mark.parametrize("rule", [ADAM, LION], ids=["adam", "lion"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def normal(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Trial:
    """One tensor stepped by a rule, with states of either width."""

    def __init__(self, rule: Rule, bits: int, parameter: Tensor) -> None:
        self.rule, self.bits, self.step = rule, bits, 0
        self.parameter = parameter.clone()
        n = parameter.numel()
        kind = torch.uint8 if bits == 8 else torch.float32
        self.states: tuple[Tensor, ...] = tuple(torch.zeros(n, dtype=kind) for _ in rule.signed)
        self.absmax: tuple[Tensor, ...] = tuple(torch.zeros(-(-n // 256)) for _ in rule.signed if bits == 8)

    def run(self, gradient: Tensor, hyper: Hyper | None = None) -> None:
        self.step += 1
        hyper = hyper or HYPER[self.rule.name]
        if self.bits == 8:
            self.parameter, self.states, self.absmax = step8(
                self.rule, hyper, self.step, gradient, self.parameter, self.states, self.absmax
            )
        else:
            self.parameter, self.states = step32(
                self.rule, hyper, self.step, gradient, self.parameter, self.states
            )

    def values(self) -> tuple[Tensor, ...]:
        """The states as float64, scales applied."""
        if self.bits == 32:
            return tuple(state.double() for state in self.states)
        tables = [torch.tensor(codebook.dynamic_map(signed)).double() for signed in self.rule.signed]
        scales = [scale.double().repeat_interleave(256)[: self.parameter.numel()] for scale in self.absmax]
        return tuple(t[code.long()] * scale for t, code, scale in zip(tables, self.states, scales))


def textbook(
    rule: Rule, h: Hyper, step: int, g: Tensor, p: Tensor, s: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """(parameter, states) in float64; Adam decays after its update, Lion before."""
    g, p = g.double(), p.double()
    if rule is LION:
        sign = torch.sign(h.beta1 * s[0] + (1 - h.beta1) * g)
        return p * (1 - h.lr * h.weight_decay) - h.lr * sign, h.beta2 * s[0] + (1 - h.beta2) * g
    m = h.beta1 * s[0] + (1 - h.beta1) * g
    v = h.beta2 * s[1] + (1 - h.beta2) * g * g
    update = h.lr * (m / (1 - h.beta1**step)) / ((v / (1 - h.beta2**step)).sqrt() + h.eps)
    return (p - update) * (1 - h.lr * h.weight_decay), m, v


def steps_beside_textbook(
    rule: Rule, dtype: torch.dtype, bits: int
) -> Iterator[tuple[Trial, tuple[Tensor, ...]]]:
    """Five steps; after each the trial, its parameter compared, and the states that the formula gives."""
    trial = Trial(rule, bits, normal(N, 0, dtype))
    for step in range(1, 6):
        gradient = normal(N, step, dtype)
        wanted = textbook(rule, HYPER[rule.name], step, gradient, trial.parameter, trial.values())
        trial.run(gradient)
        # Three roundings to the parameter's dtype at most; Lion's lr may be one of them.
        torch.testing.assert_close(
            trial.parameter.double(),
            wanted[0],
            rtol=2 * torch.finfo(dtype).eps,
            atol=2 * torch.finfo(dtype).eps,
        )
        yield trial, wanted[1:]


@every_rule
@every_dtype
def test_32_bit_step_is_the_textbook_formula(rule: Rule, dtype: torch.dtype) -> None:
    for trial, states in steps_beside_textbook(rule, dtype, 32):
        for found, value in zip(trial.values(), states):
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-7)


@every_rule
@every_dtype
def test_8_bit_step_is_the_textbook_formula_on_its_quantized_states(rule: Rule, dtype: torch.dtype) -> None:
    for trial, states in steps_beside_textbook(rule, dtype, 8):
        for code, scale, value, signed in zip(trial.states, trial.absmax, states, rule.signed):
            assert_quantized(value, code, scale, signed)


def assert_quantized(value: Tensor, code: Tensor, scale: Tensor, signed: bool) -> None:
    """Codes and scales are those of ``value``: an exact scale, codes nearest up to ties."""
    rows = torch.nn.functional.pad(value, (0, -value.numel() % 256)).view(-1, 256)
    largest = rows.abs().amax(1)
    torch.testing.assert_close(scale.double(), largest, rtol=1e-6, atol=0)
    values = np.array(codebook.dynamic_map(signed), dtype=np.float64)
    x = (rows / largest[:, None]).flatten()[: value.numel()].numpy()
    found = np.abs(values[code.numpy()] - x)
    best = np.abs(values[None, :] - x[:, None]).min(axis=1)
    # 6e-7 is the step from code 127 to 126, which keeps the sign of a negative value that rounds to zero.
    assert (found <= best + 1e-6).all()


@pytest.mark.parametrize("bits", [8, 32])
@every_dtype
def test_adam_decays_after_its_update(bits: int, dtype: torch.dtype) -> None:
    """p = 2, update 0.1, decay 0.95: (2 - 0.1) * 0.95 = 1.805, where decay first would give 1.8."""
    h = Hyper(lr=0.1, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=0.5)
    trial = Trial(ADAM, bits, torch.full((300,), 2.0, dtype=dtype))
    trial.run(torch.ones(300, dtype=dtype), h)
    once = torch.tensor(1.9).to(dtype).float()  # the update and the decay are rounded each
    wanted = (once * torch.tensor(0.95)).to(dtype)
    torch.testing.assert_close(trial.parameter, wanted.expand(300), rtol=torch.finfo(dtype).eps / 2, atol=0)
    if dtype == torch.float32:
        assert abs(trial.parameter[0].item() - 1.805) < 1e-6


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adam_rounds_to_the_parameter_dtype_between_update_and_decay(bits: int, dtype: torch.dtype) -> None:
    h = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1.0)
    parameter, gradient = normal(4096, 0, dtype), normal(4096, 1, dtype)
    decayed, plain = Trial(ADAM, bits, parameter), Trial(ADAM, bits, parameter)
    decayed.run(gradient, h)
    plain.run(gradient, h._replace(weight_decay=0.0))
    decay = torch.tensor(1.0) - torch.tensor(1e-3)
    assert torch.equal(decayed.parameter, (plain.parameter.float() * decay).to(dtype))


def test_8_bit_lion_rounds_the_learning_rate_to_the_parameter_dtype() -> None:
    lr = torch.tensor(1.2345e-3)
    h = HYPER["lion"]._replace(lr=lr.item(), weight_decay=0.0)
    parameter = (normal(N, 0) * 2**-7).bfloat16()
    wanted = {
        8: (parameter.float() + lr.bfloat16().float()).bfloat16(),
        32: (parameter.float() + lr).bfloat16(),
    }
    assert not torch.equal(wanted[8], wanted[32])
    for bits, value in wanted.items():
        trial = Trial(LION, bits, parameter)
        trial.run(-torch.ones(N, dtype=torch.bfloat16), h)
        assert torch.equal(trial.parameter, value)


def theirs(name: str, parameter: Tensor, **kwargs: Any) -> Any:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return getattr(bitsandbytes.optim, name)([torch.nn.Parameter(parameter.clone())], **kwargs)


@every_dtype
@pytest.mark.parametrize(
    ("rule", "name", "bits"),
    [(ADAM, "Adam8bit", 8), (ADAM, "Adam32bit", 32), (LION, "Lion8bit", 8), (LION, "Lion32bit", 32)],
    ids=["adam 8", "adam 32", "lion 8", "lion 32"],
)
def test_a_step_is_that_of_bitsandbytes_on_the_cpu(
    rule: Rule, name: str, bits: int, dtype: torch.dtype
) -> None:
    """From the same state, without decay. Their CPU path computes in another order."""
    h = HYPER[rule.name]._replace(weight_decay=0.0)
    kwargs: dict[str, Any] = {"eps": h.eps} if rule is ADAM else {}
    n = 16 * 256
    other = theirs(name, normal(n, 0, dtype), lr=h.lr, betas=(h.beta1, h.beta2), weight_decay=0.0, **kwargs)
    (parameter,) = other.param_groups[0]["params"]
    trial = Trial(rule, bits, parameter.detach())
    for step in range(1, 6):
        trial.parameter = parameter.detach().clone()
        if step > 1:
            held = other.state[parameter]
            trial.states = tuple(held[key].clone() for key in rule.states)
            trial.absmax = tuple(held[f"absmax{i + 1}"].clone() for i in range(len(rule.states)) if bits == 8)
        gradient = normal(n, step, dtype)
        parameter.grad = gradient.clone()
        other.step()
        trial.run(gradient, h)
        held = other.state[parameter]
        # One rounding of the parameter each; Lion's lr is rounded to the dtype here, to float32 there.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(trial.parameter, parameter.detach(), rtol=eps, atol=h.lr * eps + 1e-6)
        for i, key in enumerate(rule.states):
            if bits == 32:
                # 1 - beta is taken in float32 here and in double there: 1e-6 apart for 0.97.
                torch.testing.assert_close(trial.states[i], held[key], rtol=2e-6, atol=2e-7)
                continue
            torch.testing.assert_close(trial.absmax[i], held[f"absmax{i + 1}"], rtol=2e-6, atol=0)
            # Their CPU code finds a code by a lookup table that is coarse next to zero.
            table = torch.tensor(codebook.dynamic_map(rule.signed[i]))
            ours, upstream = trial.states[i].long(), held[key].long()
            near_zero = (table[ours] - table[upstream]).abs() < 3e-5
            assert (((ours - upstream).abs() <= 1) | near_zero).all()
            assert ((ours != upstream) & ~near_zero).float().mean() < 0.03


def test_adam_with_decay_differs_from_bitsandbytes_on_the_cpu_by_the_order_alone() -> None:
    """CUDA's (p - u)(1 - d) against the CPU's p(1 - d) - u: u * d apart."""
    h = HYPER["adam"]
    parameter, gradient = normal(8192, 0), normal(8192, 1)
    other = theirs(
        "Adam8bit", parameter, lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay
    )
    (held,) = other.param_groups[0]["params"]
    held.grad = gradient.clone()
    other.step()
    trial = Trial(ADAM, 8, parameter)
    trial.run(gradient)
    update = h.lr * torch.sign(gradient)  # the first step's m / sqrt(v)
    difference = trial.parameter - held.detach()
    torch.testing.assert_close(difference, update * h.lr * h.weight_decay, rtol=0, atol=1e-6)
    assert difference.abs().min() > 5e-6


def test_32_bit_adam_without_decay_is_torchs() -> None:
    h = HYPER["adam"]._replace(weight_decay=0.0)
    parameter = torch.nn.Parameter(normal(N, 0))
    other = torch.optim.Adam([parameter], lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps)
    trial = Trial(ADAM, 32, parameter.detach())
    for step in range(1, 21):
        parameter.grad = normal(N, step)
        other.step()
        trial.run(parameter.grad, h)
    torch.testing.assert_close(trial.parameter, parameter.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trial.states[0], other.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(trial.states[1], other.state[parameter]["exp_avg_sq"], rtol=1e-5, atol=1e-7)


def test_32_bit_lion_is_that_of_its_authors() -> None:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    h = HYPER["lion"]
    parameter = torch.nn.Parameter(normal(N, 0))
    other = lion_pytorch.Lion([parameter], lr=h.lr, betas=(h.beta1, h.beta2), weight_decay=h.weight_decay)
    trial = Trial(LION, 32, parameter.detach())
    for step in range(1, 21):
        parameter.grad = normal(N, step)
        other.step()
        trial.run(parameter.grad)
    torch.testing.assert_close(trial.parameter, parameter.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trial.states[0], other.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-7)


@every_rule
@pytest.mark.parametrize("bits", [8, 32])
def test_8_bit_training_stays_near_float32_training(rule: Rule, bits: int) -> None:
    """A quadratic bowl: the loss falls a hundredfold with either state."""
    target = normal(1024, 9)
    trial = Trial(rule, bits, torch.zeros(1024))
    h = HYPER[rule.name]._replace(lr=2e-2, weight_decay=0.0)
    for _ in range(200):
        trial.run(trial.parameter - target, h)
    assert ((trial.parameter - target) ** 2).mean() < 1e-2 * (target**2).mean()


BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
every_bad_value = pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))


def pair(rule: Rule, bits: int, bad: float, dtype: torch.dtype) -> tuple[Trial, Trial, Trial]:
    """Trials before, after a step with a bad value at element 300, and after one with 0 there."""
    trials = [Trial(rule, bits, normal(N, 0, dtype)) for _ in range(3)]
    for trial in trials:
        trial.run(normal(N, 1, dtype))
    for trial, value in zip(trials[1:], (bad, 0.0)):
        gradient = normal(N, 2, dtype)
        gradient[300] = value
        trial.run(gradient)
    return trials[0], trials[1], trials[2]


@every_bad_value
@every_dtype
def test_8_bit_adam_resets_a_bad_element_and_leaves_its_parameter(bad: float, dtype: torch.dtype) -> None:
    before, hit, clean = pair(ADAM, 8, bad, dtype)
    assert hit.parameter[300] == before.parameter[300]  # neither update nor decay
    assert hit.states[0][300] == 127
    assert hit.states[1][300] == 0
    others = torch.arange(N) != 300
    assert torch.equal(hit.parameter[others], clean.parameter[others])
    for found, wanted in zip(hit.states + hit.absmax, clean.states + clean.absmax):
        assert torch.equal(found[others[: found.numel()]], wanted[others[: found.numel()]])


@every_rule
@every_bad_value
@pytest.mark.parametrize("bits", [8, 32])
def test_a_bad_element_never_reaches_another_block(rule: Rule, bad: float, bits: int) -> None:
    _, hit, clean = pair(rule, bits, bad, torch.float32)
    gradient = normal(N, 3)
    hit.run(gradient)
    clean.run(gradient)
    # In 32-bit state it stays within its element, in 8-bit state it may take its block's scale.
    others = (torch.arange(N) // 256 != 1) if bits == 8 else torch.arange(N) != 300
    assert torch.equal(hit.parameter[others], clean.parameter[others])
    for found, wanted in zip(hit.states, clean.states):
        assert torch.equal(found[others], wanted[others])
    for found, wanted in zip(hit.absmax, clean.absmax):
        assert torch.equal(found[torch.arange(found.numel()) != 1], wanted[torch.arange(found.numel()) != 1])


@pytest.mark.parametrize("bits", [8, 32])
def test_lion_with_a_nan_gradient_decays_the_parameter_and_moves_it_nowhere(bits: int) -> None:
    before, hit, clean = pair(LION, bits, math.nan, torch.float32)
    h = HYPER["lion"]
    torch.testing.assert_close(
        hit.parameter[300], before.parameter[300] * (1 - h.lr * h.weight_decay), rtol=1e-7, atol=0
    )
    others = torch.arange(N) != 300
    assert torch.equal(hit.parameter[others], clean.parameter[others])


def test_8_bit_lion_leaves_nan_out_of_the_scale_and_codes_it_as_the_largest_value() -> None:
    _, hit, clean = pair(LION, 8, math.nan, torch.float32)
    assert torch.equal(hit.absmax[0], clean.absmax[0])
    assert hit.states[0][300] == 255  # NaN -> code 0, which is negative where CUDA's NaN is not: 0 - 1
    others = torch.arange(N) != 300
    assert torch.equal(hit.states[0][others], clean.states[0][others])


def test_32_bit_adam_keeps_a_nan_within_its_element() -> None:
    _, hit, clean = pair(ADAM, 32, math.nan, torch.float32)
    assert hit.parameter.isnan().nonzero().tolist() == [[300]]
    assert [state.isnan().nonzero().tolist() for state in hit.states] == [[[300]], [[300]]]
    assert not clean.parameter.isnan().any()


@every_rule
@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_blocks_are_independent_of_how_many_follow(rule: Rule, n: int) -> None:
    """The first blocks of a long tensor and a tensor that ends there agree; a tail is a block of its own."""
    long, short = Trial(rule, 8, normal(2048, 0)), Trial(rule, 8, normal(2048, 0)[:n])
    for step in range(1, 4):
        long.run(normal(2048, step))
        short.run(normal(2048, step)[:n])
    whole = n // 256 * 256
    assert torch.equal(long.parameter[:whole], short.parameter[:whole])
    for a, b in zip(long.states, short.states):
        assert torch.equal(a[:whole], b[:whole])
    for a, b in zip(long.absmax, short.absmax):
        assert torch.equal(a[: n // 256], b[: n // 256])


@every_rule
def test_an_empty_tensor_steps_to_nothing(rule: Rule) -> None:
    for bits in (8, 32):
        trial = Trial(rule, bits, torch.zeros(0))
        trial.run(torch.zeros(0))
        assert trial.parameter.numel() == 0


@every_rule
def test_the_padding_lanes_of_a_tail_take_part_in_the_scale_with_code_128(rule: Rule) -> None:
    """bitsandbytes' kernels load 128 past the end, 5.5e-7 of the old scale; it shows for zeros."""
    trial = Trial(rule, 8, torch.zeros(10))
    trial.run(torch.ones(10))
    old = trial.absmax[0].item()
    trial.states = (torch.full((10,), 127, dtype=torch.uint8), *trial.states[1:])
    trial.run(torch.zeros(10))
    h = HYPER[rule.name]
    beta = h.beta1 if rule is ADAM else h.beta2
    wanted = codebook.dynamic_map(True)[128] * old * beta
    assert trial.absmax[0].item() == pytest.approx(wanted, rel=1e-6)
