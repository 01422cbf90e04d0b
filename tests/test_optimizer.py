"""The optimizer frame in one process: steps, parameters of every layout, groups, what torch users do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_helpers import (
    N,
    assert_like,
    assert_same,
    every_class,
    normal,
    parameter,
    snapshot,
    train,
)
from torch import Tensor, nn

from bnb_fsdp import AdamW, AdamW8bit, Lion8bit, rules
from bnb_fsdp.backends import torch_backend


@every_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 255, 256, 257, N])
def test_a_step_is_the_rule(kind: Any, dtype: torch.dtype, n: int) -> None:
    optimizer = kind([parameter(n, dtype=dtype)], lr=1e-2, weight_decay=0.1, min_8bit_size=0)
    (p,) = optimizer.param_groups[0]["params"]
    rule, hyper = optimizer.rule, optimizer.hyper(optimizer.param_groups[0])
    for step in range(1, 4):
        old, held = p.detach().clone(), {k: v.clone() for k, v in optimizer.state.get(p, {}).items()}
        train(optimizer, steps=1, first=step)
        state = optimizer.state[p]
        assert state["step"].item() == step
        if not held:
            held = {key: torch.zeros_like(value) for key, value in state.items()}
        states = tuple(held[key] for key in rule.states)
        if state["state1"].dtype == torch.uint8:
            scales = tuple(held[f"absmax{i + 1}"] for i in range(len(states)))
            new, states, scales = rules.step8(rule, hyper, step, p.grad, old, states, scales)
        else:
            new, states = rules.step32(rule, hyper, step, p.grad, old, states)
            scales = ()
        names = [*rule.states, *(f"absmax{i + 1}" for i in range(len(scales)))]
        assert sorted(state) == sorted([*names, "step"])
        for name, wanted in zip(names, (*states, *scales)):
            assert torch.equal(state[name], wanted), name
        torch.testing.assert_close(p.detach(), new, rtol=torch.finfo(dtype).eps, atol=0)  # within one ulp


def test_state_is_what_the_documentation_says() -> None:
    large, small = parameter(20, 300, dtype=torch.bfloat16), parameter(70, dtype=torch.bfloat16)
    optimizer = AdamW8bit([large, small])
    assert len(optimizer.state) == 0
    train(optimizer, steps=1)
    state = optimizer.state[large]
    for i in "12":
        assert state[f"state{i}"].dtype == torch.uint8
        assert state[f"state{i}"].shape == (20, 300)
        assert state[f"absmax{i}"].dtype == torch.float32
        assert state[f"absmax{i}"].shape == (24,)
        assert optimizer.state[small][f"state{i}"].dtype == torch.float32
    assert set(optimizer.state[small]) == {"state1", "state2", "step"}
    assert state["step"].dtype == torch.float32


@pytest.mark.parametrize(("size", "bits"), [(999, 32), (1000, 8), (1001, 8)])
def test_min_8bit_size_divides_at_the_size_itself(size: int, bits: int) -> None:
    optimizer = Lion8bit([parameter(size)], min_8bit_size=1000)
    train(optimizer, steps=1)
    (state,) = optimizer.state.values()
    assert state["state1"].dtype == (torch.uint8 if bits == 8 else torch.float32)


def layouts() -> dict[str, Tensor]:
    return {
        "transposed": normal(60, 100).t(),
        "channels last": normal(8, 16, 6, 7).contiguous(memory_format=torch.channels_last),
        "permuted": normal(10, 30, 20).permute(2, 0, 1),
        "one row of many": normal(4, N)[2:3],
        "size one with an odd stride": torch.empty_strided((1, N), (77777, 1)).copy_(normal(1, N)),
        "scalar": normal(1)[0],
        "empty": torch.zeros(0, 5),
        "offset into a buffer": normal(2 * N)[N - 3 : 2 * N - 3],
    }


@every_class
@pytest.mark.parametrize("layout", list(layouts()))
def test_a_parameter_of_any_dense_layout_is_updated_in_storage_order(kind: Any, layout: str) -> None:
    p = nn.Parameter(layouts()[layout])
    order = sorted(range(p.dim()), key=lambda dim: -p.stride(dim) if p.shape[dim] > 1 else 1)
    flat = nn.Parameter(p.detach().permute(order).flatten().clone())
    optimizer, reference = kind([p], lr=1e-2), kind([flat], lr=1e-2)
    pointer, stride = p.data_ptr(), p.stride()
    for step in range(3):
        p.grad = torch.empty_like(p).copy_(normal(*p.shape, seed=step + 1))
        flat.grad = p.grad.permute(order).flatten()
        optimizer.step()
        reference.step()
    assert (p.data_ptr(), p.stride()) == (pointer, stride)
    assert torch.equal(p.detach().permute(order).flatten(), flat.detach())
    for key, value in optimizer.state[p].items():
        wanted = reference.state[flat][key]
        assert torch.equal(value.permute(order).flatten() if key.startswith("state") else value, wanted), key
    other = kind([nn.Parameter(p.detach().clone())], lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, first=5)
    train(other, first=5)
    assert_like(optimizer, other)


@pytest.mark.parametrize(
    "reshape",
    [
        lambda g: g.clone(memory_format=torch.contiguous_format),
        lambda g: g.t().contiguous().t(),
        lambda g: torch.stack([g, g], -1)[..., 0],
        lambda g: g[:1].expand_as(g),
    ],
    ids=["contiguous", "transposed", "gapped", "expanded"],
)
def test_a_gradient_with_other_strides_is_paired_element_by_element(
    reshape: Callable[[Tensor], Tensor],
) -> None:
    for base in (normal(70, 80), normal(80, 70).t()):
        p, q = nn.Parameter(base.clone(memory_format=torch.preserve_format)), nn.Parameter(base.clone())
        gradient = reshape(normal(70, 80, seed=1))
        first, second = AdamW8bit([p]), AdamW8bit([q])
        p.grad, q.grad = gradient, torch.empty_like(q).copy_(gradient)
        first.step()
        second.step()
        assert torch.equal(p, q)
        assert torch.equal(p.grad, gradient)


def test_an_absent_gradient_changes_nothing_and_does_not_count() -> None:
    p, q = parameter(N), parameter(N, seed=1)
    optimizer = AdamW8bit([p, q], weight_decay=0.5)
    train(optimizer, steps=2)
    before = snapshot(optimizer)[3:]
    q.grad = None
    for step in range(3):
        p.grad = normal(N, seed=step)
        optimizer.step()
    assert_same(snapshot(optimizer)[3:], before)
    assert optimizer.state[p]["step"].item() == 5
    assert optimizer.state[q]["step"].item() == 2
    optimizer.zero_grad()
    unchanged = snapshot(optimizer)
    optimizer.step()
    assert_same(snapshot(optimizer), unchanged)


def test_frozen_parameters_get_no_state_until_they_thaw() -> None:
    p, q = parameter(N), parameter(N, seed=1)
    q.requires_grad_(False)
    old = q.detach().clone()
    optimizer = AdamW8bit([p, q])
    train(optimizer)
    assert q not in optimizer.state
    assert torch.equal(q, old)
    q.requires_grad_(True)
    train(optimizer)
    assert optimizer.state[q]["step"].item() == 3
    assert optimizer.state[p]["step"].item() == 6
    q.requires_grad_(False)
    q.grad = None
    before = snapshot(optimizer)[3:]
    train(optimizer)
    assert_same(snapshot(optimizer)[3:], before)


def test_groups_keep_their_own_hyperparameters() -> None:
    settings: list[dict[str, Any]] = [
        {}, {"lr": 0.1}, {"betas": [0.5, 0.6]}, {"weight_decay": 0.3}, {"eps": 1e-2}, {"optim_bits": 32},
        {"min_8bit_size": N + 1},
    ]  # fmt: skip
    together = AdamW8bit([{"params": [parameter(N)], **setting} for setting in settings], lr=1e-2)
    train(together)
    for group, setting in zip(together.param_groups, settings):
        bits = setting.pop("optim_bits", 8)
        alone = AdamW([parameter(N)], **{"lr": 1e-2, "optim_bits": bits, **setting})
        train(alone)
        (p,), (q,) = group["params"], alone.param_groups[0]["params"]
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        torch.testing.assert_close(together.state[p], alone.state[q], rtol=0, atol=0)


def test_a_group_added_later_starts_at_its_own_first_step() -> None:
    p, q = parameter(N), parameter(N, seed=1)
    optimizer = AdamW8bit([p])
    train(optimizer, steps=2)
    optimizer.add_param_group({"params": (x for x in [q]), "lr": 0.5})
    train(optimizer, steps=1)
    assert [optimizer.state[x]["step"].item() for x in (p, q)] == [3, 1]
    assert optimizer.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize("groups", [[{"params": []}], [{"params": []}, {"params": [parameter(N)]}]], ids=len)
def test_an_empty_group_is_no_trouble(groups: list[dict[str, Any]]) -> None:
    optimizer = Lion8bit(copy.deepcopy(groups))
    train(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer)


def bits_by_name(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {
        name: 8 if optimizer.state[p]["state1"].dtype == torch.uint8 else 32
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"])
    }


def test_overrides_apply_by_pattern_and_by_parameter_and_the_later_wins() -> None:
    named = {name: parameter(N, seed=i) for i, name in enumerate(["a.w", "a.b", "c.w", "d.w"])}
    overrides: dict[Any, dict[str, int]] = {
        "a.*": {"optim_bits": 32},
        named["c.w"]: {"min_8bit_size": N + 1},
        "*.b": {"optim_bits": 8},
    }
    optimizer = AdamW8bit(named.items(), overrides=overrides)
    train(optimizer, steps=1)
    assert bits_by_name(optimizer) == {"a.w": 32, "a.b": 8, "c.w": 32, "d.w": 8}
    optimizer.add_param_group({"params": [("a.late", parameter(N)), ("e.late", parameter(N))]})
    train(optimizer, steps=1)
    assert bits_by_name(optimizer) == {"a.w": 32, "a.b": 8, "c.w": 32, "d.w": 8, "a.late": 32, "e.late": 8}


def test_overrides_survive_copies_and_exchanged_parameters() -> None:
    optimizer = AdamW8bit([("a", parameter(N)), ("b", parameter(N))], overrides={"a": {"optim_bits": 32}})
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        made.param_groups[0]["params"] = [parameter(N), parameter(N)]  # as accelerate does
        train(made, steps=1)
        assert bits_by_name(made) == {"a": 32, "b": 8}


def test_dtypes_mix_in_one_optimizer() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    together = AdamW8bit([parameter(n, dtype=dtype) for dtype in dtypes for n in (N, 50)])
    train(together)
    for p in together.param_groups[0]["params"]:
        alone = AdamW8bit([parameter(p.numel(), dtype=p.dtype)])
        train(alone)
        (q,) = alone.param_groups[0]["params"]
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        torch.testing.assert_close(together.state[p], alone.state[q], rtol=0, atol=0)


@every_class
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_parameter_takes_a_gradient_of_lower_precision(kind: Any, dtype: torch.dtype) -> None:
    p, q = parameter(N), parameter(N)
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch ties a gradient's dtype to its parameter's")
    first, second = kind([p]), kind([q])
    p.grad_dtype = dtype
    for step in range(3):
        p.grad = normal(N, seed=step, dtype=dtype)
        q.grad = p.grad.float()
        first.step()
        second.step()
    assert_like(first, second)


@every_class
def test_a_long_tensor_is_the_same_in_chunks(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = (kind([parameter(N, dtype=torch.bfloat16)], backend="torch") for _ in range(2))
    train(whole)
    monkeypatch.setattr(torch_backend, "_CHUNK", 512)
    train(chunked)
    assert_like(whole, chunked)


def test_a_tensor_learning_rate_is_read_at_every_step() -> None:
    first, second = AdamW8bit([parameter(N)], lr=torch.tensor(0.5)), AdamW8bit([parameter(N)], lr=0.5)
    train(first, steps=1)
    train(second, steps=1)
    first.param_groups[0]["lr"].fill_(0.25)
    second.param_groups[0]["lr"] = 0.25
    train(first, first=1)
    train(second, first=1)
    assert_same(snapshot(first)[1:], snapshot(second)[1:])


@pytest.mark.parametrize("kind", [int, np.float32, np.float64], ids=lambda kind: kind.__name__)
def test_any_real_number_is_a_learning_rate(kind: Any) -> None:
    first, second = AdamW8bit([parameter(N)], lr=kind(1)), AdamW8bit([parameter(N)], lr=1.0)
    train(first)
    train(second)
    assert torch.equal(first.param_groups[0]["params"][0], second.param_groups[0]["params"][0])
    second.load_state_dict(first.state_dict())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_schedule_acts_as_the_values_it_sets(scheduler: str) -> None:
    scheduled = AdamW8bit([parameter(N)], lr=1e-2)
    schedule = SCHEDULERS[scheduler](scheduled)
    by_hand = AdamW8bit([parameter(N)], lr=1e-2)
    rates = []
    for step in range(5):
        for key in ("lr", "betas"):
            by_hand.param_groups[0][key] = scheduled.param_groups[0][key]
        rates.append(by_hand.param_groups[0]["lr"])
        train(scheduled, steps=1, first=step)
        train(by_hand, steps=1, first=step)
        schedule.step()
    assert len(set(rates)) == 5
    assert_same(snapshot(scheduled)[1:], snapshot(by_hand)[1:])


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad], ids=["no grad", "grad"])
def test_a_closure_runs_once_with_gradients_enabled(outer: Any) -> None:
    p = parameter(N)
    optimizer = AdamW8bit([p])
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    old = p.detach().clone()
    with outer():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert not torch.equal(p, old)


def test_hooks_run_around_every_step() -> None:
    optimizer = AdamW8bit([parameter(N)])
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, steps=2)
    assert seen == ["before", "after"] * 2


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])
def test_zero_grad_clears_gradients(to_none: bool) -> None:
    p = parameter(N)
    optimizer = AdamW8bit([p])
    train(optimizer, steps=1)
    optimizer.zero_grad(set_to_none=to_none)
    assert p.grad is None if to_none else not p.grad.any()


def test_a_grad_scaler_skips_steps_with_infinite_gradients() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    p, q = parameter(N), parameter(N)
    optimizer, plain = AdamW8bit([p]), AdamW8bit([q])
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        before = snapshot(optimizer)
        scaler.scale((p * normal(N, seed=3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor == 1.0:
            q.grad = normal(N, seed=3)
            plain.step()
        else:
            assert_same(snapshot(optimizer), before)
    assert_like(optimizer, plain)


def test_training_through_autograd_reduces_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    x, y = normal(256, 64), normal(256, 1, seed=1)
    optimizer = AdamW8bit(model.named_parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
