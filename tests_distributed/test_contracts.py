"""What the other distributed tests leave open of the package's promises about shards: see `break_contracts.py`.

State before and after the first step, storage that stays, refusals, missing and bad gradients, errors of the native
code, a missing library. One run of `everything` on two ranks, which the test below judges case by case; a case returns
what was wrong. No step communicates, so that one rank may fail without the other.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bnb_fsdp
from bnb_fsdp import backends
from bnb_fsdp.backends import gather, native

WORLD = 2
# Blocks that run across rows, with less than 4,096 elements on a rank; a shard that is empty on rank 1; 32-bit state.
SHAPES = {"matrix": (21, 300), "row": (1, 5000), "small": (7, 5)}
LR, DECAY = 1e-2, 0.1
SETTINGS: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}


def mesh() -> DeviceMesh:
    return init_device_mesh(ranks.device().type, (WORLD,))


def full(name: str, seed: int) -> Tensor:
    """A parameter (seed 0) or its gradient, never zero."""
    index = list(SHAPES).index(name)
    value = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * seed + index))
    return torch.where(value.abs() < 1e-3, 1e-3, value)


def shard(value: Tensor, on_host: bool = False) -> Tensor:
    """This rank's rows as a DTensor. ``on_host``: on the CPU, where NCCL ranks can have a plain tensor only."""
    if on_host and ranks.device().type == "cuda":
        return value.tensor_split(WORLD)[dist.get_rank()].clone()
    return distribute_tensor(value.to(ranks.device()), mesh(), [Shard(0)], src_data_rank=None)


def parameters(on_host: bool = False) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(shard(full(name, 0), on_host)) for name in SHAPES}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def set_gradients(params: dict[str, nn.Parameter], step: int, on_host: bool = False) -> None:
    for name, p in params.items():
        p.grad = shard(full(name, step + 1), on_host)


def same(a: Tensor, b: Tensor) -> bool:
    """Dtype, shape and all bits."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Bits, any NaN being as good as another."""
    if not a.is_floating_point():
        return same(a, b)
    return torch.equal(a.isnan(), b.isnan()) and same(
        *(x.nan_to_num(0.0, torch.inf, -torch.inf) for x in (a, b))
    )


def held(optimizer: Any, p: nn.Parameter) -> dict[str, Tensor]:
    """Copies of parameter and state on this rank."""
    return {
        "parameter": local(p).clone(),
        **{key: local(value).clone() for key, value in (optimizer.state.get(p) or {}).items()},
    }


def different(
    found: dict[str, Tensor], wanted: dict[str, Tensor], equal: Callable[[Tensor, Tensor], bool] = same
) -> list[str]:
    if set(found) != set(wanted):
        return [f"keys {sorted(found)}, not {sorted(wanted)}"]
    return [key for key in found if not equal(found[key], wanted[key])]


# State


def state_of_shards() -> list[str]:
    """None before the first step; then plain tensors of the local shard, keyed by the parameters, empty ones too."""
    params = parameters()
    optimizer = bnb_fsdp.AdamW8bit(params.items(), **SETTINGS)
    problems = [f"{len(optimizer.state)} entries before the first step"] * (len(optimizer.state) > 0)
    set_gradients(params, 0)
    optimizer.step()
    if list(map(id, optimizer.state)) != list(map(id, params.values())):
        problems.append("the keys are not the parameters")
    for name, p in params.items():
        state, shape = optimizer.state.get(p) or {}, local(p).shape
        eight = torch.Size(SHAPES[name]).numel() >= 4096
        wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"step": (torch.float32, ())}
        for number in "12":
            wanted["state" + number] = (torch.uint8 if eight else torch.float32, tuple(shape))
            if eight:
                wanted["absmax" + number] = (torch.float32, (-(-shape.numel() // 256),))
        found = {key: (value.dtype, tuple(value.shape)) for key, value in state.items()}
        if found != wanted:
            problems.append(f"{name}: {found}, expected {wanted}")
        problems += [f"{name}: {key} is {type(v)}" for key, v in state.items() if type(v) is not Tensor]
    return problems


def exchanged_parameters() -> list[str]:
    """Parameters that a wrapper puts in place of those the optimizer was made with, before the first step."""
    plain = [nn.Parameter(full(name, 0).to(ranks.device())) for name in SHAPES]
    optimizer = bnb_fsdp.AdamW8bit(plain, **SETTINGS, overrides={plain[0]: {"optim_bits": 32}})
    params, twins = parameters(), parameters()
    optimizer.param_groups[0]["params"] = list(params.values())
    overrides = {twins["matrix"]: {"optim_bits": 32}}
    twin = bnb_fsdp.AdamW8bit(list(twins.values()), **SETTINGS, overrides=overrides)
    for step in range(2):
        set_gradients(params, step)
        set_gradients(twins, step)
        optimizer.step()
        twin.step()
    problems = [
        f"{name}: {key} differs"
        for name, p in params.items()
        for key in different(held(optimizer, p), held(twin, twins[name]))
    ]
    return problems + ["state of a parameter that is gone"] * any(p in optimizer.state for p in plain)


# Storage


class Operators(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(function).startswith("profiler."):  # torch.optim.Optimizer marks each step
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def look(is_native: bool) -> Iterator[None]:
    """Gradients are gathered by the native code, or by Python."""
    make = gather.Gatherer.make
    if not is_native:
        gather.Gatherer.make = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        gather.Gatherer.make = make  # type: ignore[method-assign]


def addresses(params: dict[str, nn.Parameter]) -> list[tuple[int, ...]]:
    """Of parameters, gradients and their storage."""
    return [(id(p), local(p).data_ptr(), id(p.grad), local(p.grad).data_ptr()) for p in params.values()]


def storage(is_native: bool) -> list[str]:
    """Parameters and gradients stay where they are; after the first steps no operator runs: nothing is allocated."""
    params, problems = parameters(), []
    optimizer = bnb_fsdp.AdamW8bit(params.items(), **SETTINGS)
    with look(is_native):
        for step in range(4):
            set_gradients(params, step)
            before = addresses(params)
            gradients = [local(p.grad).clone() for p in params.values()]
            old = [local(p).clone() for p in params.values()]
            with Operators() as operators:
                optimizer.step()
            if addresses(params) != before:
                problems.append(f"step {step}: a parameter or gradient is another or lies elsewhere")
            if not all(same(local(p.grad), g) for p, g in zip(params.values(), gradients)):
                problems.append(f"step {step}: a gradient was changed")
            if any(same(local(p), o) and o.numel() for p, o in zip(params.values(), old)):
                problems.append(f"step {step}: a parameter was not updated in place")
            if step > 1 and operators.names:
                problems.append(f"step {step} ran {operators.names}")
    return problems


def other_memory_order() -> list[str]:
    """A gradient whose shard lies transposed in memory gives what a contiguous one gives."""
    found = []
    for transposed in (True, False):
        p = nn.Parameter(shard(full("matrix", 0)))
        gradient = local(shard(full("matrix", 1)))
        if transposed:
            gradient = gradient.t().contiguous().t()
        p.grad = DTensor.from_local(
            gradient, mesh(), [Shard(0)], shape=p.shape, stride=p.stride(), run_check=False
        )
        optimizer = bnb_fsdp.AdamW8bit([p], **SETTINGS)
        optimizer.step()
        found.append(held(optimizer, p))
    return different(*found)


# Refusals


def refusals() -> list[str]:
    """ValueErrors that name the parameter; nothing was changed."""
    device, problems = ranks.device(), []
    whole = full("matrix", 0).to(device)
    rows = 2 * SHAPES["matrix"][0]
    sparse = torch.zeros(SHAPES["small"], device=device).to_sparse()
    cases: dict[str, tuple[Tensor, Tensor | None]] = {
        "a partial parameter": (DTensor.from_local(whole.clone(), mesh(), [Partial()]), None),
        "a shard with gaps": (
            DTensor.from_local(
                torch.zeros(21, 600, device=device)[:, :300], mesh(), [Shard(0)], shape=(rows, 300), stride=(300, 1),
                run_check=False,
            ),
            None,
        ),
        "a partial gradient of the shape of its parameter": (
            DTensor.from_local(whole.clone(), mesh(), [Replicate()]),
            DTensor.from_local(whole.clone(), mesh(), [Partial()]),
        ),
        "a gradient with all rows": (shard(whole.cpu()), DTensor.from_local(whole, mesh(), [Replicate()])),
        "a sparse gradient": (full("small", 0).to(device), sparse),
    }  # fmt: skip
    wrapped = FullyShardedDataParallel(nn.Linear(64, 64).to(device), use_orig_params=False, device_id=device)
    cases["a flat parameter of FSDP1"] = (
        next(wrapped.parameters()),
        torch.ones(64 * 65 // WORLD, device=device),
    )
    for what, (value, gradient) in cases.items():
        p = value if isinstance(value, nn.Parameter) else nn.Parameter(value)
        beside = nn.Parameter(shard(full("matrix", 0)))
        before = [local(x).clone() for x in (p, beside)]
        try:
            optimizer = bnb_fsdp.AdamW8bit([("beside", beside), ("decoder.weight", p)], **SETTINGS)
            p.grad, beside.grad = gradient, shard(full("matrix", 1))
            optimizer.step()
            problems.append(f"{what}: accepted")
        except ValueError as error:
            if "parameter 'decoder.weight'" not in str(error):
                problems.append(f"{what}: {error}")
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__}: {error}")
        if not all(map(same, map(local, (p, beside)), before)):
            problems.append(f"{what}: a parameter was changed")
    return problems


# Gradients


def missing_gradients() -> list[str]:
    """A parameter without a gradient, on all ranks or on one, keeps its value, its state and its count."""
    params, problems = parameters(), []
    optimizer = bnb_fsdp.AdamW8bit(params.items(), **SETTINGS)
    counts = dict.fromkeys(params, 0)
    for step in range(4):
        set_gradients(params, step)
        missing = {0: ["matrix"], 1: [], 2: ["matrix", "row"], 3: ["small"] if dist.get_rank() == 0 else []}[
            step
        ]
        before = {name: held(optimizer, p) for name, p in params.items()}
        for name in missing:
            params[name].grad = None
        optimizer.step()
        for name, p in params.items():
            counts[name] += name not in missing
            if int(optimizer.state[p]["step"]) != counts[name]:
                problems.append(
                    f"step {step}, {name}: counted {int(optimizer.state[p]['step'])}, not {counts[name]}"
                )
            if name in missing and step:  # the first step makes the state
                problems += [
                    f"step {step}, {name}: {key}" for key in different(held(optimizer, p), before[name])
                ]
            elif name in missing and not same(local(p), before[name]["parameter"]):
                problems.append(f"step {step}, {name}: the parameter was changed")
    return problems


BAD = 300  # the element of rank 0's matrix whose gradient is bad: in the second block of 256
BAD_SMALL = 3


def stepped(kind: str, bad: float | None, steps: int = 1) -> dict[str, dict[str, Tensor]]:
    """What is held after the steps; the first has a ``bad`` gradient in two elements of rank 0, None: a zero there."""
    params = parameters()
    optimizer = getattr(bnb_fsdp, kind)(params.items(), **SETTINGS)
    for step in range(steps):
        set_gradients(params, step)
        if step == 0 and dist.get_rank() == 0:
            for name, place in (("matrix", BAD), ("small", BAD_SMALL)):
                local(params[name].grad).flatten()[place] = 0.0 if bad is None else bad
        optimizer.step()
    return {name: held(optimizer, p) for name, p in params.items()}


def bad_gradient_adam(bad: float) -> list[str]:
    """8-bit: as a zero, but the element is not even decayed. 32-bit: that element is lost, and no other."""
    found, wanted = stepped("AdamW8bit", bad), stepped("AdamW8bit", None)
    problems = []
    if dist.get_rank() == 0:
        start = local(parameters()["matrix"]).flatten()[BAD]
        decayed = wanted["matrix"]["parameter"].flatten()[BAD].clone()
        if not torch.allclose(decayed, start * (1 - LR * DECAY), rtol=1e-6) or torch.equal(decayed, start):
            problems.append("the comparison is not what it is meant to be")
        wanted["matrix"]["parameter"].flatten()[BAD] = start
        for key in ("parameter", "state1", "state2"):
            if torch.isfinite(found["small"][key].flatten()[BAD_SMALL]):
                problems.append(f"small: {key} of the element is finite")
            for held_ in (found, wanted):
                held_["small"][key].flatten()[BAD_SMALL] = 0.0
    problems += [f"{name}: {key}" for name in SHAPES for key in different(found[name], wanted[name])]
    return problems


def bad_gradient_lion() -> list[str]:
    """An infinite gradient takes its block with it, at the next step, and nothing beyond."""
    found, wanted = stepped("Lion8bit", torch.inf, 2), stepped("Lion8bit", None, 2)
    problems = []
    if dist.get_rank() == 0:
        block = slice(256, 512)
        if torch.isfinite(found["matrix"]["absmax1"][1]):
            problems.append("the scale of the block is finite")
        for key, part in (("parameter", block), ("state1", block), ("absmax1", slice(1, 2))):
            found["matrix"][key].flatten()[part] = wanted["matrix"][key].flatten()[part]
        for key in ("parameter", "state1"):
            found["small"][key].flatten()[BAD_SMALL] = wanted["small"][key].flatten()[BAD_SMALL]
    return problems + [f"{name}: {key}" for name in SHAPES for key in different(found[name], wanted[name])]


def backends_agree(kind: str) -> list[str]:
    """The native library and the torch backend on the same shards, also after NaN and infinite gradients."""
    found = []
    for backend in ("cpu", "torch"):
        params = parameters(on_host=True)
        optimizer = getattr(bnb_fsdp, kind)(params.items(), **SETTINGS, backend=backend)
        for step in range(3):
            set_gradients(params, step, on_host=True)
            if step == 1:
                gradient = local(params["matrix"].grad).flatten()
                gradient[BAD + dist.get_rank()], gradient[700] = torch.nan, -torch.inf
            optimizer.step()
        found.append({name: held(optimizer, p) for name, p in params.items()})
    return [
        f"{name}: {key}" for name in SHAPES for key in different(found[0][name], found[1][name], same_numbers)
    ]


def decay_of_bfloat16(kind: str) -> list[str]:
    """Zero gradients leave the decay alone: one multiplication, rounded once. (Usual rates are rounded away.)"""
    params = {name: nn.Parameter(shard(full(name, 0).bfloat16())) for name in SHAPES}
    optimizer = getattr(bnb_fsdp, kind)(params.items(), lr=0.125, weight_decay=0.5)
    before = {name: local(p).clone() for name, p in params.items()}
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    factor = 1 - 0.125 * 0.5
    return [
        name for name, p in params.items() if not same(local(p), (before[name].float() * factor).bfloat16())
    ]


# State dicts


def unfit_state_dicts() -> list[str]:
    """ValueErrors that say why; nothing was changed. (Between ranks: every one has its own part.)"""
    params, problems = parameters(), []
    optimizer = bnb_fsdp.AdamW8bit(params.items(), **SETTINGS)
    columns = nn.Parameter(
        distribute_tensor(full("matrix", 0).to(ranks.device()), mesh(), [Shard(1)], src_data_rank=None)
    )
    cut = bnb_fsdp.AdamW8bit([columns, *list(parameters().values())[1:]], **SETTINGS)
    set_gradients(params, 0)
    optimizer.step()
    lion = bnb_fsdp.Lion8bit(parameters().items(), **SETTINGS)

    def changed(**values: Any) -> dict[str, Any]:
        found = optimizer.state_dict()
        found["param_groups"] = [{**group, **values} for group in found["param_groups"]]
        return found

    def without_scales() -> dict[str, Any]:
        found = optimizer.state_dict()
        found["state"][0] = {key: value for key, value in found["state"][0].items() if key != "absmax2"}
        return found

    cases = {
        "another algorithm": (lion.state_dict(), "was saved by another algorithm: 'lion'"),
        "a newer format": (changed(format="bnb_fsdp 2 adam 256"), "written by a newer bnb_fsdp: format 2"),
        "another block size": (changed(format="bnb_fsdp 1 adam 2048"), "blocks of 2048 elements"),
        "a missing state": (without_scales(), "'matrix'"),
        "a cut along columns": (cut.state_dict(), "'matrix'"),
    }
    before = {name: held(optimizer, p) for name, p in params.items()}
    for what, (state_dict, text) in cases.items():
        try:
            optimizer.load_state_dict(state_dict)
            problems.append(f"{what}: accepted")
        except ValueError as error:
            if text not in str(error):
                problems.append(f"{what}: {error}")
        for name, p in params.items():
            problems += [
                f"{what}: {name}: {key} was changed" for key in different(held(optimizer, p), before[name])
            ]
    return problems


# Native code


def native_errors() -> list[str]:
    """A call that the library refuses, on one rank: RuntimeError with operation, bits, dtype, device, shape, cause."""
    params, problems = parameters(on_host=True), []
    optimizer = bnb_fsdp.AdamW8bit(params.items(), **SETTINGS, backend="cpu")
    set_gradients(params, 0, on_host=True)
    optimizer.step()
    before = {name: held(optimizer, p) for name, p in params.items()}
    bucket = optimizer._plan._buckets[0].prepared
    if dist.get_rank() == 1:
        bucket._key = bucket._key._replace(rule="nonsense")
    set_gradients(params, 1, on_host=True)
    text = ""
    try:
        optimizer.step()
    except RuntimeError as error:
        text = str(error)
    if dist.get_rank() == 0:
        return [f"without a fault: {text}"] * bool(text)
    bits = (
        "8-bit" if isinstance(params["matrix"], DTensor) else "32-bit"
    )  # of a plain tensor of 3,000 elements
    for part in ("nonsense step", bits, "torch.float32", "cpu", "(10, 300)"):
        if part not in text:
            problems.append(f"{part!r} is not in {text!r}")
    if not text.partition("): ")[2]:
        problems.append(f"no cause in {text!r}")
    problems += [
        f"matrix: {key} was changed" for key in different(held(optimizer, params["matrix"]), before["matrix"])
    ]
    return problems


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """With these variables, and with what was found by the others forgotten."""

    def forget() -> None:
        native.load.cache_clear()
        gather._library.cache_clear()
        backends._said.clear()

    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    forget()
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        forget()


def refused_settings() -> list[str]:
    """Settings by the environment that the library or the choice of a backend cannot follow."""
    problems = []
    cases = {
        "BNB_FSDP_CPU_ISA": "nonsense is no instruction set",
        "BNB_FSDP_BACKEND": "nonsense is no backend",
        "BNB_FSDP_NUM_THREADS": "nonsense is no number",
    }
    for variable, value in cases.items():
        with environment(**{variable: value}):
            params = parameters(on_host=True)
            set_gradients(params, 0, on_host=True)
            try:
                bnb_fsdp.AdamW8bit(params.items(), **SETTINGS).step()
                problems.append(f"{variable}={value}: accepted")
            except ValueError as error:
                if variable not in str(error) or value not in str(error):
                    problems.append(f"{variable}: {error}")
            if not all(
                same(local(p), local(q)) for p, q in zip(params.values(), parameters(on_host=True).values())
            ):
                problems.append(f"{variable}: a parameter was changed")
    return problems


def run_once(**options: Any) -> tuple[Any, dict[str, dict[str, Tensor]], list[str]]:
    """(optimizer, what it holds after two steps, warnings)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = parameters(on_host=True)
        optimizer = bnb_fsdp.AdamW8bit(params.items(), **SETTINGS, **options)
        for step in range(2):
            set_gradients(params, step, on_host=True)
            optimizer.step()
    texts = [str(w.message) for w in caught if "bnb_fsdp" in str(w.message)]
    return optimizer, {name: held(optimizer, p) for name, p in params.items()}, texts


def chosen(optimizer: Any) -> set[str]:
    return {row.backend for row in bnb_fsdp.describe(optimizer).rows}


def missing_library() -> list[str]:
    """Said once and shown; the math stays; a backend asked for by name is not replaced."""
    problems = []
    optimizer, wanted, texts = run_once()
    if texts or chosen(optimizer) != {"cpu"}:
        problems.append(f"with the library: {texts}, {chosen(optimizer)}")
    with tempfile.TemporaryDirectory() as empty, environment(BNB_FSDP_LIBRARY_PATH=empty):
        optimizer, found, texts = run_once()
        texts += run_once()[2]
        if len(texts) != 1 or "libbnb_fsdp_cpu.so" not in texts[0] or "torch" not in texts[0]:
            problems.append(f"without the library: warnings {texts}")
        if chosen(optimizer) != {"torch"}:
            problems.append(f"without the library: {chosen(optimizer)}")
        for name in SHAPES:
            problems += [
                f"without the library: {name}: {key}" for key in different(found[name], wanted[name])
            ]
        try:
            run_once(backend="cpu")
            problems.append("backend='cpu' without the library: accepted")
        except RuntimeError as error:
            if "backend='cpu' was asked for" not in str(error):
                problems.append(str(error))
    return problems


def chosen_backend() -> list[str]:
    """By argument and by environment."""
    problems = []
    with environment(BNB_FSDP_BACKEND="torch"):
        if chosen(run_once()[0]) != {"torch"}:
            problems.append("BNB_FSDP_BACKEND is not followed")
        if chosen(run_once(backend="cpu")[0]) != {"cpu"}:
            problems.append("backend= does not come before BNB_FSDP_BACKEND")
        kind = type(run_once()[0]._plan._buckets[0].prepared).__name__
        if kind != "TorchBucket":
            problems.append(f"BNB_FSDP_BACKEND=torch steps a {kind}")
    return problems


Case = tuple[Callable[..., list[str]], tuple[Any, ...]]
CASES: dict[str, Case] = {
    "state of shards": (state_of_shards, ()),
    "parameters exchanged before the first step": (exchanged_parameters, ()),
    "storage stays, native look": (storage, (True,)),
    "storage stays, Python look": (storage, (False,)),
    "gradient in another memory order": (other_memory_order, ()),
    "refusals": (refusals, ()),
    "missing gradients": (missing_gradients, ()),
    "NaN gradient, AdamW": (bad_gradient_adam, (float("nan"),)),
    "infinite gradient, AdamW": (bad_gradient_adam, (float("-inf"),)),
    "infinite gradient, Lion": (bad_gradient_lion, ()),
    "backends agree, AdamW8bit": (backends_agree, ("AdamW8bit",)),
    "backends agree, Lion8bit": (backends_agree, ("Lion8bit",)),
    "backends agree, AdamW32bit": (backends_agree, ("AdamW32bit",)),
    "decay of bfloat16, AdamW8bit": (decay_of_bfloat16, ("AdamW8bit",)),
    "decay of bfloat16, Lion8bit": (decay_of_bfloat16, ("Lion8bit",)),
    "unfit state dicts": (unfit_state_dicts, ()),
    "error of the native code": (native_errors, ()),
    "refused settings": (refused_settings, ()),
    "missing library": (missing_library, ()),
    "chosen backend": (chosen_backend, ()),
}


def everything() -> dict[str, list[str]]:
    return ranks.each(CASES)


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[str]]]:
    return ranks.run(WORLD, everything)


@pytest.mark.parametrize("case", CASES)
def test_contract(results: list[dict[str, list[str]]], case: str) -> None:
    for rank, result in enumerate(results):
        assert result[case] == [], f"rank {rank}"
