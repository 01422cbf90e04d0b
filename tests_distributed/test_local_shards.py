"""Every local shard is updated exactly as the plain local tensor would be, whatever the sharding.

On CPU ranks the expectation is computed by the rules on the local tensor alone, independent of backends, plans and
DTensors. On GPUs, whose kernels' approximate divisions only the kernels have (tests/test_cuda_parity.py compares those
with bitsandbytes), it is a plain tensor with the local values and state, stepped by an optimizer of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bnb_fsdp
from bnb_fsdp import rules

STEPS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW8bit": dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    "AdamW32bit": dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    "Lion8bit": dict(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
}
# The others, with fewer shapes. LAMB and LARS, which need norms of whole tensors, are in test_trust_sharded.py.
FAMILY: dict[str, dict[str, Any]] = {
    name + bits: settings
    for name, settings in {
        "Adam": dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        "SGD": dict(lr=1e-2, momentum=0.8, weight_decay=0.1),
        "RMSprop": dict(lr=1e-2, alpha=0.8, eps=1e-6, weight_decay=0.1),
        "Adagrad": dict(lr=1e-2, eps=1e-6, weight_decay=0.1),
        # alpha grows by one a step
        "AdEMAMix": dict(lr=1e-2, betas=(0.8, 0.95, 0.99), alpha=8.0, t_alpha=8, eps=1e-6, weight_decay=0.1),
    }.items()
    for bits in ("8bit", "32bit")
} | {"Lion32bit": dict(lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1)}
RULES = {
    "Adam": rules.ADAM,
    "AdamW": rules.ADAM,
    "Lion": rules.LION,
    "SGD": rules.MOMENTUM,
    "RMSprop": rules.RMSPROP,
    "Adagrad": rules.ADAGRAD,
    "AdEMAMix": rules.ADEMAMIX,
}
WORLDS = (1, 2, 4)
BOUNDARIES = (255, 256, 257, 4095, 4096, 4097)  # of local tensors: a block, and the least size of 8-bit state
Results = Callable[[int], list[Any]]

# Rows of a multiple of 256 elements: blocks do not depend on the number of ranks.
ALIGNED_SHAPES = [(64, 512), (7, 1024), (3, 1792), (16, 256), (15, 256)]


def shapes(world: int) -> list[tuple[int, ...]]:
    """Global shapes whose shards meet every boundary at this world size."""
    around_blocks = [(world * 255,), (world * 256,), (world * 256 + 1,), (world * 257,)]
    around_threshold = [
        (world * 4095,),
        (world * 4096,),
        (world * 4097,),
        (world * 4096 + 1,),
        (4095,),
        (4096,),
    ]
    uneven_and_empty = [(3, 1700), (1, 5000), (37, 300), (5,), (2, 3, 700), (1,)]
    return around_blocks + around_threshold + uneven_and_empty + ALIGNED_SHAPES


def few_shapes(world: int) -> list[tuple[int, ...]]:
    """Local tails around a block and around 4,096, a global 4,095, rows across blocks, empty shards."""
    tails = [(world * tail,) for tail in BOUNDARIES]
    return [*tails, (4095,), (3, 1700), (1, 5000), (5,)]


class Weighted(nn.Module):
    """sum(parameter * weight): the gradient of each parameter is its weight, whatever the number of ranks."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(
            nn.Parameter((torch.randn(shape, generator=torch.Generator().manual_seed(index)) * 0.1).to(dtype))
            for index, shape in enumerate(shapes)
        )

    def forward(self, step: int) -> Tensor:
        total = torch.zeros((), device=ranks.device())
        for index, parameter in enumerate(self.tensors):
            generator = torch.Generator().manual_seed(1000 * step + index)
            spread = 10 ** (3 * torch.rand(parameter.shape, generator=generator) - 3)
            weight = torch.randn(parameter.shape, generator=generator) * spread
            # FSDP2 divides float16 gradients by the number of ranks: keep the quotients clear of subnormals.
            weight = torch.where(weight.abs() < 2**-10, 0, weight).to(parameter.device, parameter.dtype)
            total = total + (parameter * weight).float().sum()
        return total


def settings(name: str) -> dict[str, Any]:
    return (OPTIMIZERS | FAMILY)[name]


def rule_of(name: str) -> rules.Rule:
    return RULES[name.removesuffix("32bit").removesuffix("8bit")]


def fresh_state(name: str, parameter: Tensor, bits: int) -> dict[str, Tensor]:
    """State before the first step, of a local tensor."""
    state = {"step": torch.zeros(())}
    for number in range(1, 1 + len(rule_of(name).signed)):
        dtype = torch.uint8 if bits == 8 else torch.float32
        state[f"state{number}"] = torch.zeros(parameter.shape, dtype=dtype)
        if bits == 8:
            state[f"absmax{number}"] = torch.zeros(-(-parameter.numel() // 256))
    return state


def expected_step(
    name: str,
    given: dict[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Parameter and state after one step of the rules, from clones of the local tensors; ``given``: all settings."""
    rule = rule_of(name)
    step = int(state["step"]) + 1
    rates = given.get("betas") or (given.get("momentum") or given.get("alpha") or 0.0,)
    hyper = rules.Hyper(
        lr=given["lr"],
        eps=given.get("eps", 0.0),
        weight_decay=given["weight_decay"],
        alpha=float(step),  # AdEMAMix: see FAMILY
    )
    hyper = hyper._replace(**dict(zip(("beta1", "beta2", "beta3"), rates)))
    names = ["state1", "state2", "state3"][: len(rule.signed)]
    flat = [state[name].flatten() for name in names]
    p, g = parameter.flatten(), gradient.flatten()
    result = {"step": torch.tensor(float(step))}
    if "absmax1" in state:
        scales = tuple(state[name.replace("state", "absmax")] for name in names)
        new, codes, absmax = rules.step8(rule, hyper, step, g, p, tuple(flat), scales)
        result.update({name: value.view(parameter.shape) for name, value in zip(names, codes)})
        result.update({name.replace("state", "absmax"): value for name, value in zip(names, absmax)})
    else:
        new, values = rules.step32(rule, hyper, step, g, p, tuple(flat))
        result.update({name: value.view(parameter.shape) for name, value in zip(names, values)})
    return {**result, "parameter": new.view(parameter.shape)}


def plain_step(
    name: str,
    given: dict[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Parameter and state after one step of a plain tensor on this rank's GPU, from clones of the local tensors."""
    plain = nn.Parameter(parameter.to(ranks.device()))
    if hasattr(plain, "grad_dtype"):
        plain.grad_dtype = gradient.dtype
    plain.grad = gradient.to(ranks.device())
    minimum = 0 if "absmax1" in state else 2**62
    other = getattr(bnb_fsdp, name)([plain], **given, min_8bit_size=minimum)
    other.state[plain] = {
        name: value.clone() if name == "step" else value.to(ranks.device()) for name, value in state.items()
    }
    other.step()
    result = {name: value.cpu() for name, value in other.state[plain].items()}
    return {**result, "parameter": plain.detach().cpu()}


def different(actual: Tensor, expected: Tensor) -> int:
    """Elements whose bits differ, -1 if shape or dtype do."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return -1
    as_bytes = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (actual, expected)]
    return int((as_bytes[0] != as_bytes[1]).sum())


def check_case(shapes: list[tuple[int, ...]], dtype_name: str, optimizer_name: str) -> dict[str, Any]:
    """Train for some steps; mismatches by place, and what other world sizes must reproduce."""
    model = Weighted(shapes, DTYPES[dtype_name]).to(ranks.device())
    fully_shard(model)
    optimizer = getattr(bnb_fsdp, optimizer_name)(model.parameters(), **settings(optimizer_name))
    mismatches: list[str] = []
    checked = 0
    previous: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        model(step).backward()
        parameters = list(model.parameters())
        before = [
            (p.to_local().detach().to("cpu", copy=True), p.grad.to_local().to("cpu", copy=True))
            for p in parameters
        ]
        optimizer.step()
        for index, p in enumerate(parameters):
            assert isinstance(p, DTensor)
            state = optimizer.state[p]
            if step == 0:
                bits = 8 if p.numel() >= 4096 and "8bit" in optimizer_name else 32
                previous.append(fresh_state(optimizer_name, before[index][0], bits))
            oracle = plain_step if ranks.device().type == "cuda" else expected_step
            expected = oracle(optimizer_name, settings(optimizer_name), *before[index], previous[index])
            actual = {name: tensor.cpu() for name, tensor in (*state.items(), ("parameter", p.to_local()))}
            if set(actual) != set(expected):
                mismatches.append(
                    f"step {step} shape {tuple(p.shape)}: keys {sorted(actual)} != {sorted(expected)}"
                )
            for name in set(actual) & set(expected):
                count = different(actual[name], expected[name])
                checked += 1
                if count:
                    mismatches.append(
                        f"step {step} shape {tuple(p.shape)} {name}: {count} of {expected[name].numel()}"
                    )
            previous[index] = {name: value for name, value in expected.items() if name != "parameter"}
        optimizer.zero_grad()
    kinds = {tuple(p.shape): optimizer.state[p]["state1"].dtype for p in model.parameters()}
    local = [p.to_local().numel() for p in model.parameters()]
    aligned = {}
    for p in model.parameters():
        if tuple(p.shape) in ALIGNED_SHAPES:
            mesh, placements = p.device_mesh, p.placements
            state1 = DTensor.from_local(
                optimizer.state[p]["state1"],
                mesh,
                placements,
                shape=p.shape,
                stride=p.stride(),
                run_check=False,
            )
            aligned[tuple(p.shape)] = (p.full_tensor().detach().cpu(), state1.full_tensor().cpu())
    found = {"mismatches": mismatches, "checked": checked, "kinds": kinds, "aligned": aligned, "local": local}
    return {**found, "device": ranks.device().type}


def check_all(world: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Every dtype and optimizer, on this rank."""
    assert dist.get_world_size() == world
    found = {(d, o): check_case(shapes(world), d, o) for d in DTYPES for o in OPTIMIZERS}
    return found | {(d, o): check_case(few_shapes(world), d, o) for d in DTYPES for o in FAMILY}


@pytest.fixture(scope="module")
def results() -> Results:
    """What every rank found at a number of ranks, which are run when a test first asks."""
    return functools.cache(lambda world: ranks.run(world, check_all, world))


def matching(results: list[Any], key: tuple[str, str], wanted: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """What every rank found of ``key``: that all was as it should be, and that shards of ``wanted`` were looked at."""
    cases = [result[key] for result in results]
    for rank, case in enumerate(cases):
        assert case["mismatches"] == [], f"rank {rank}"
        assert case["checked"] >= STEPS * len(wanted) * 3
    return cases


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"world{world}")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_shard_equals_plain_local_tensor_bit_for_bit(
    results: Results, world: int, dtype: str, optimizer: str
) -> None:
    matching(results(world), (dtype, optimizer), shapes(world))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"world{world}")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", FAMILY)
def test_every_other_optimizer_steps_shards_as_plain_local_tensors(
    results: Results, world: int, dtype: str, optimizer: str
) -> None:
    sizes = set()
    for case in matching(results(world), (dtype, optimizer), few_shapes(world)):
        for shape, kind in case["kinds"].items():
            eight = optimizer.endswith("8bit") and torch.Size(shape).numel() >= 4096
            assert kind == (torch.uint8 if eight else torch.float32), shape
        sizes |= set(case["local"])
    assert (0 in sizes) == (world > 1)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *FAMILY])
def test_shards_meet_the_boundaries_they_are_meant_to(results: Results, optimizer: str) -> None:
    for world in WORLDS:
        for dtype in DTYPES:
            for result in results(world):
                local = result[(dtype, optimizer)]["local"]
                assert set(BOUNDARIES) - set(local) == set(), (world, dtype)
    assert any(0 in result[("float32", optimizer)]["local"] for result in results(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bit_width_is_that_of_the_global_parameter_on_every_rank(
    results: Results, dtype: str, optimizer: str
) -> None:
    for world in WORLDS:
        for result in results(world):
            for shape, kind in result[(dtype, optimizer)]["kinds"].items():
                eight = optimizer.endswith("8bit") and torch.Size(shape).numel() >= 4096
                assert kind == (torch.uint8 if eight else torch.float32), (world, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_and_codes_of_aligned_rows_are_equal_at_every_world_size(
    results: Results, dtype: str, optimizer: str
) -> None:
    references: dict[str, Any] = {}  # a machine with few GPUs runs the larger worlds on its CPU
    for world in WORLDS:
        case = results(world)[0][(dtype, optimizer)]
        assert set(case["aligned"]) == set(ALIGNED_SHAPES)
        reference = references.setdefault(case["device"], case["aligned"])
        for shape, tensors in case["aligned"].items():
            for expected, actual in zip(reference[shape], tensors):
                assert different(actual, expected) == 0, (world, shape)
