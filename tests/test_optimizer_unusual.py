"""Tensors and uses off the beaten path: each once crashed, or gave wrong numbers without a word."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import bnb_fsdp
from bnb_fsdp.residency import residency

BACKENDS = ["cpu", "torch"]


def make(numel: int = 8192, **kwargs: Any) -> tuple[nn.Parameter, bnb_fsdp.AdamW8bit]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    return parameter, bnb_fsdp.AdamW8bit([parameter], **kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazily_negated_gradient_has_its_own_sign(backend: str) -> None:
    a, first = make(backend=backend)
    b, second = make(backend=backend)
    assert a.grad is not None and b.grad is not None
    a.grad, b.grad = torch._neg_view(a.grad), -b.grad
    first.step()
    second.step()
    assert torch.equal(a, b)


def freed(gradient: Tensor) -> Tensor:
    gradient.untyped_storage().resize_(0)
    return gradient


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(freed, id="freed storage"),
        pytest.param(lambda g: torch._efficientzerotensor(g.shape), id="lazy zeros"),
    ],
)
def test_gradient_without_storage_is_refused_by_name(broken: Any) -> None:
    parameter, optimizer = make()
    before = parameter.detach().clone()
    assert parameter.grad is not None
    parameter.grad = broken(parameter.grad)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*without storage"):
        optimizer.step()
    assert torch.equal(parameter, before) and len(optimizer.state) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_notices_that_a_step_changed_a_saved_parameter(backend: str) -> None:
    parameter, optimizer = make(backend=backend)
    other = nn.Parameter(torch.randn(4))
    optimizer.add_param_group({"params": [other]})
    loss, untouched = (parameter * parameter).sum(), (other * other).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    untouched.backward()  # had no gradient, so nothing happened to it


def test_scales_of_another_layout_are_refused() -> None:
    parameter, optimizer = make()
    optimizer.step()
    optimizer.state[parameter]["absmax1"] = torch.zeros(1).expand(32)
    with pytest.raises(ValueError, match=r"absmax1.*contiguous float32"):
        optimizer.step()


def test_parameter_that_turned_float64_is_refused_before_anything_steps() -> None:
    first, second = nn.Parameter(torch.ones(5000)), nn.Parameter(torch.ones(5000))
    optimizer = bnb_fsdp.AdamW8bit([first, second])
    second.data = second.data.double()
    first.grad = torch.ones(5000)
    second.grad = torch.ones(5000, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0.*torch\.float64 is not supported"):
        optimizer.step()
    assert bool((first == 1).all()) and len(optimizer.state) == 0


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda o, m: o.param_groups[0].update(betas=(0.9,)), id="betas of one"),
        pytest.param(lambda o, m: m.setenv("BNB_FSDP_NUM_THREADS", "x"), id="threads not a number"),
    ],
)
def test_error_before_the_first_step_leaves_no_state(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = make()
    spoil(optimizer, monkeypatch)
    with pytest.raises((ValueError, IndexError)):
        optimizer.step()
    assert len(optimizer.state) == 0


def test_optimizer_and_its_state_are_freed_without_the_garbage_collector() -> None:
    parameter, optimizer = make()
    optimizer.step()
    alive = weakref.ref(optimizer.state[parameter]["state1"])
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("betas", [(0.9, 1 - 1e-9), (1 - 1e-9, 0.999)])
def test_betas_that_are_one_in_float32_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="as a float32 too"):
        make(betas=betas)


def test_groups_may_be_taken_away_after_a_step() -> None:
    parameter, optimizer = make()
    other = nn.Parameter(torch.ones(10))
    optimizer.add_param_group({"params": [other]})
    optimizer.step()
    optimizer.param_groups.pop()
    optimizer.step()
    assert int(optimizer.state[parameter]["step"]) == 2


def test_overrides_in_a_group_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(10))
    with pytest.raises(ValueError, match="overrides belong to the optimizer's constructor"):
        bnb_fsdp.AdamW8bit([{"params": [parameter], "overrides": {"*": {"optim_bits": 32}}}])
    optimizer = bnb_fsdp.AdamW8bit([parameter])
    bnb_fsdp.AdamW8bit(optimizer.param_groups)  # groups of an optimizer are fine


def test_parameters_appended_behind_overrides_are_reported() -> None:
    parameter, extra = nn.Parameter(torch.ones(5000)), nn.Parameter(torch.ones(5000))
    optimizer = bnb_fsdp.AdamW8bit([parameter], overrides={parameter: {"optim_bits": 32}})
    optimizer.param_groups[0]["params"].append(extra)
    extra.grad = torch.ones(5000)
    with pytest.raises(ValueError, match="add_param_group"):
        optimizer.step()


def test_other_entries_in_a_parameters_state_are_left_alone() -> None:
    parameter, optimizer = make()
    optimizer.step()
    optimizer.state[parameter]["note"] = "mine"
    optimizer.step()
    assert optimizer.state[parameter]["note"] == "mine" and int(optimizer.state[parameter]["step"]) == 2


def test_state_replaced_by_a_plain_dict_still_loads() -> None:
    parameter, optimizer = make()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.state = dict(optimizer.state)
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert int(optimizer.state[parameter]["step"]) == 2


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion", "AdEMAMix"])
@pytest.mark.parametrize("bits", ["", "8bit", "32bit"])
def test_paged_classes_on_the_cpu_step_as_the_others_and_say_so_once(
    name: str, bits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_said", set())
    results = []
    for cls in (getattr(bnb_fsdp, name + bits), getattr(bnb_fsdp, f"Paged{name}{bits}")):
        said = f"{cls.__name__}: parameters on the CPU have their state there, in ordinary memory; it works as the"
        for once in (True, False):
            parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5000))
            optimizer = cls([parameter], lr=1e-2)
            for step in range(3):
                parameter.grad = parameter.detach() * 2
                warned = once and step == 0 and cls.__name__.startswith("Paged")
                with pytest.warns(UserWarning, match=said) if warned else contextlib.nullcontext():
                    optimizer.step()
        results.append((parameter.detach(), optimizer.state[parameter]["state1"]))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not optimizer.state[parameter]["state1"].is_pinned()


def test_step_under_torch_compile_runs_as_it_is() -> None:
    results = []
    for compiled in (False, True):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5000))
        optimizer = bnb_fsdp.AdamW8bit([parameter], lr=1e-2)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(3):
            parameter.grad = parameter.detach() * 2
            step()
        results.append((parameter.detach(), optimizer.state[parameter]["state1"]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_bucket_that_fails_leaves_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two native calls the second fails: autograd must know that the first has changed its parameters."""
    parameters = [
        torch.nn.Parameter(torch.ones(5000, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)
    ]
    optimizer = bnb_fsdp.AdamW8bit(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    versions = [parameter._version for parameter in parameters]

    def fail(*arguments: object) -> None:
        raise RuntimeError("no more")

    for name in ("run", "run_pointers"):
        monkeypatch.setattr(optimizer._plan._buckets[1].prepared, name, fail)
    with pytest.raises(RuntimeError, match="no more"):
        optimizer.step()
    assert [p._version - v for p, v in zip(parameters, versions)] == [1, 0]


def test_a_gradient_with_other_strides_of_single_elements_is_not_copied() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 128, 1, 1))
    optimizer = bnb_fsdp.AdamW8bit([weight])
    gradient = torch.randn(64 * 128).as_strided((64, 128, 1, 1), (128, 1, 128, 128))
    twin = torch.nn.Parameter(weight.detach().clone())
    other = bnb_fsdp.AdamW8bit([twin])
    for _ in range(3):
        weight.grad, twin.grad = gradient, gradient.contiguous(memory_format=torch.contiguous_format).clone()
        optimizer.step()
        other.step()
    assert optimizer._plan._gatherer is None or optimizer._plan._gatherer.difference == 0
    assert torch.equal(weight, twin)


def test_capturable_may_be_changed_and_stays_this_runs_choice() -> None:
    parameter = torch.nn.Parameter(torch.ones(5000))
    optimizer = bnb_fsdp.AdamW8bit([parameter], capturable=True)
    parameter.grad = torch.ones(5000)
    optimizer.step()
    assert optimizer.state[parameter]["step"].device.type == "cpu"  # it has a meaning on CUDA alone
    saved = bnb_fsdp.AdamW8bit([parameter]).state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["capturable"] is True
    plan = optimizer._plan
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = False
    optimizer.step()
    assert optimizer._plan is not plan
    with pytest.raises(ValueError, match="capturable='yes'; choose True or False"):
        bnb_fsdp.AdamW8bit([parameter], capturable="yes")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "fully_shard"])
def test_an_optimizer_left_with_meta_parameters_says_so(is_sharded: bool, mesh: Any) -> None:
    """``load_state_dict(assign=True)`` exchanges them: steps would go on in silence, and do nothing."""
    with torch.device("meta"):
        model = nn.Linear(64, 128)
    if is_sharded:
        fully_shard(model, mesh=mesh)
    optimizer = bnb_fsdp.AdamW8bit(model.named_parameters(), backend="torch")
    weights = nn.Linear(64, 128).state_dict()
    if is_sharded:
        weights = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in weights.items()}
    model.load_state_dict(weights, assign=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    said = r"AdamW8bit\.step\(\): none of the 2 parameters has a gradient, and all are on the meta device.*assign=True"
    with pytest.warns(UserWarning, match=said):
        optimizer.step()


def test_other_steps_without_gradients_say_nothing() -> None:
    meta, real = nn.Parameter(torch.empty(5000, device="meta")), nn.Parameter(torch.ones(5000))
    real.grad = torch.ones(5000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnb_fsdp.AdamW8bit([nn.Parameter(torch.ones(5000))], backend="torch").step()
        bnb_fsdp.AdamW8bit([meta, real], backend="torch").step()
        bnb_fsdp.AdamW8bit([meta, nn.Parameter(torch.ones(5000))], backend="torch").step()
        meta.grad = torch.empty_like(meta)
        bnb_fsdp.AdamW8bit([meta], backend="torch").step()
