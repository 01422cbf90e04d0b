"""docs/distributed.md and the code: its tables name tests that exist, its table of failures has texts that are said.

A row names a test as `test_x.py::test_name` or `test_x.py::test_name[case]`, where the case is the whole id of a
parametrised test, not a part of it. Two short forms: see `SHORT`. Files are in tests_distributed/, or "(in `tests/`)".

The texts in the first column of "If it fails" (`...` stands for anything) are said for real: in one process that
takes itself for two ranks (`SITUATIONS`), by two ranks of gloo (`mismatch`). What only GPUs can say is in `NOT_RAISED`.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import re
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import bnb_fsdp

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "distributed.md").read_text()
HERE = "tests_distributed"


def tables(section: str) -> list[list[dict[str, str]]]:
    """The tables of a section, each a list of rows, a row by its column's title."""
    [text] = [part for part in DOCUMENT.split("\n## ")[1:] if part.partition("\n")[0] == section]
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        title, _, *rows = lines
        assert all(len(row) == len(title) for row in rows), section
        found.append([dict(zip(title, row)) for row in rows])
    return found


# Names of tests

NAME = re.compile(r"`(?:(test_\w+\.py)(?:::(\w+))?)?(?:\[([^\]`]+)\])?`( \(in `tests/`\))?")
SHORT = {
    "test_fsdp2_features.py": "test_a_step_is_that_of_the_plain_local_tensor",  # `test_fsdp2_features.py[case]`
    "": "test_contracts.py::test_contract",  # `[case]`
}
EXPLAINED = {"`test_fsdp2_features.py[...]`", "`[case]`"}  # how the document introduces the short forms
TESTED = ("What is supported", "LAMB and LARS", "What is refused", "The contracts, broken on purpose")


def id_of(file: str, function: str, case: str, in_tests: str) -> str:
    """What pytest calls the test, or the file alone."""
    folder = "tests" if in_tests else HERE
    if not file:
        return f"{folder}/{SHORT['']}[{case}]"
    if case and not function:
        function = SHORT.get(file, "?")
    return f"{folder}/{file}" + f"::{function}" * bool(function) + f"[{case}]" * bool(case)


def named(text: str) -> list[str]:
    """The tests that a text of the document names."""
    return [id_of(*match.groups()) for match in NAME.finditer(text) if any(match.groups()[:3])]


def missing(name: str, ids: set[str]) -> bool:
    """Without its case a parametrised test stands for all of them; a file has to have tests."""
    without_case = {i.partition("[")[0] for i in ids} | {i.partition("::")[0] for i in ids}
    return name not in (ids if name.endswith("]") else without_case)


def everything_named() -> list[str]:
    text = DOCUMENT
    for explanation in EXPLAINED:
        assert text.count(explanation) == 1, explanation
        text = text.replace(explanation, "")
    return named(text)


@pytest.fixture(scope="module", autouse=True)
def collecting() -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """pytest in another process, which lists the tests of the named files while the texts are raised."""
    files = {name.partition("::")[0] for name in everything_named()}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *sorted(file for file in files if (ROOT / file).exists())],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        yield process, log
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def ids(collecting: tuple[subprocess.Popen[bytes], Any]) -> set[str]:
    process, log = collecting
    process.wait(300)
    log.seek(0)
    output = log.read()
    assert process.returncode == 0, output
    return {line for line in output.splitlines() if line.startswith("tests") and "::" in line}


# Texts of errors


def pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("..."))))


TEXTS = [text for row in tables("If it fails")[0] for text in re.findall(r"`([^`]+)`", row["you see"])]
ON_TWO_RANKS = {
    "clip_grad_norm_ without a backend for CPUs": "No backend",
    "a rank that waits in vain": "Timed out",
    "a layer on one rank only": "what\\(\\):",
    "a rank that ended": "RuntimeError.*peer",
}
NOT_RAISED = {
    "Watchdog caught collective operation timeout": "NCCL: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely": (
        "NCCL: torch/csrc/distributed/c10d/NCCLUtils.cpp, getNcclErrorDetailStr"
    ),
    "remote process exited or there was a network error": "NCCL: its ncclGetErrorString",
}


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def sharded(**options: Any) -> nn.Module:
    return fully_shard(nn.Linear(64, 128), mesh=mesh(), **options)


def with_gradients(*parameters: nn.Parameter) -> list[nn.Parameter]:
    for p in parameters:
        p.grad = torch.ones_like(p)
    return list(parameters)


def local(tensor: Tensor | None) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain() -> nn.Parameter:
    return nn.Parameter(torch.ones(10))


def dtensor(placement: Any, rows: int = 4, on: DeviceMesh | None = None) -> DTensor:
    return DTensor.from_local(torch.ones(rows, 8), on or mesh(), [placement], run_check=False)


def remedy(function: Callable[[], Any]) -> None:
    try:
        function()
    except Exception as error:
        raise AssertionError(f"the remedy does not help: {error}") from error


def bitsandbytes_step(name: str) -> None:
    import bitsandbytes

    parameters = with_gradients(*sharded().parameters())
    getattr(bitsandbytes.optim, name)(parameters).step()


def clipped(foreach: bool | None) -> None:
    nn.utils.clip_grad_norm_(with_gradients(*sharded().parameters(), plain()), 1.0, foreach=foreach)


def clipped_on_two_meshes() -> None:
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"]
    nn.utils.clip_grad_norm_(
        with_gradients(nn.Parameter(dtensor(Shard(0))), nn.Parameter(dtensor(Shard(0), on=other))), 1.0
    )


def unscaled() -> None:
    kinds = [with_gradients(*sharded().parameters()), with_gradients(plain())]
    remedy(lambda: scaled_step(kinds))
    scaled_step([kinds[0] + kinds[1]])


def scaled_step(groups: list[list[nn.Parameter]]) -> None:
    """An optimizer for each group, and one GradScaler."""
    optimizers = [bnb_fsdp.AdamW8bit(group) for group in groups]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer, group in zip(optimizers, groups):
        assert all(float(local(p.grad).max()) == 0.25 and p in optimizer.state for p in group)


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)

    def features(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def outside_forward(layer: nn.Module, *shape: int) -> None:
    """By a method that is not `forward`, registered and not."""
    model, twin = (fully_shard(Model(copy.deepcopy(layer)), mesh=mesh()) for _ in range(2))
    register_fsdp_forward_method(twin, "features")
    remedy(lambda: twin.features(torch.ones(shape)))
    model.features(torch.ones(shape))


def offloaded() -> None:
    remedy(lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))(torch.ones(2, 64)))
    sharded(offload_policy=CPUOffloadPolicy())(torch.ones(2, 64))


def unevenly_sharded() -> None:
    def placed(where: Callable[[nn.Parameter], Shard | None]) -> None:
        fully_shard(nn.Linear(63, 128), mesh=mesh(), shard_placement_fn=where)

    remedy(lambda: placed(lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None))
    placed(lambda p: Shard(1) if p.dim() == 2 else None)


def on_meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 128)
    fully_shard(model, mesh=mesh())(torch.ones(2, 64))


def prepared(with_stranger: bool) -> None:
    """accelerate, with a parameter that is not the model's, or with the model alone before its optimizer."""
    import cpu_fsdp_shim  # noqa: F401
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert accelerator.is_fsdp2
    model = nn.Linear(64, 128)
    optimizer = bnb_fsdp.AdamW8bit([*model.parameters(), *([plain()] if with_stranger else [])])
    if with_stranger:
        accelerator.prepare(model, optimizer)
    accelerator.prepare(model)
    accelerator.prepare(optimizer)


def fsdp1() -> None:
    model = FullyShardedDataParallel(nn.Linear(64, 64), device_id=torch.device("cpu"))
    bnb_fsdp.AdamW8bit(model.parameters()).step()


def exchanged_late() -> None:
    model = nn.Linear(64, 128)
    optimizer = bnb_fsdp.AdamW8bit(with_gradients(*model.parameters()))
    optimizer.step()
    fully_shard(model, mesh=mesh())
    optimizer.param_groups[0]["params"] = with_gradients(*model.parameters())
    optimizer.step()


def made_early() -> str:
    """A warning."""
    model = nn.Linear(64, 128)
    optimizer = bnb_fsdp.AdamW8bit(model.parameters())
    fully_shard(model, mesh=mesh())
    model(torch.ones(2, 64)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return "\n".join(str(warning.message) for warning in caught)


def described() -> str:
    return str(bnb_fsdp.describe(bnb_fsdp.AdamW8bit([plain()])))


def stepped(parameter: DTensor, gradient: Tensor) -> None:
    p = nn.Parameter(parameter)
    p.grad = gradient
    bnb_fsdp.AdamW8bit([p]).step()


def ended_by(signal: int) -> None:
    failure = ProcessFailure(local_rank=1, pid=12345, exitcode=-signal, error_file="<N/A>")
    raise ChildFailedError("train.py", {1: failure})


SITUATIONS: dict[str, Callable[[], str | None]] = {
    "bitsandbytes, 8 bits": lambda: bitsandbytes_step("AdamW8bit"),
    "bitsandbytes, 32 bits": lambda: bitsandbytes_step("AdamW32bit"),
    "clip_grad_norm_ beside a plain parameter": lambda: clipped(None),
    "the same one by one": lambda: clipped(False),
    "clip_grad_norm_ on two meshes": clipped_on_two_meshes,
    "GradScaler beside a plain parameter": unscaled,
    "a linear layer outside forward": lambda: outside_forward(nn.Linear(64, 128), 2, 64),
    "a convolution outside forward": lambda: outside_forward(nn.Conv2d(4, 8, 3), 1, 4, 8, 8),
    "CPUOffloadPolicy without a GPU": offloaded,
    "Shard(1), uneven": unevenly_sharded,
    "meta device": on_meta,
    "accelerate, a stranger among the parameters": lambda: prepared(True),
    "accelerate, one after the other": lambda: prepared(False),
    "FSDP1": fsdp1,
    "parameters exchanged after a step": exchanged_late,
    "optimizer made before fully_shard": made_early,
    "describe": described,
    "partial parameter": lambda: stepped(dtensor(Partial()), dtensor(Partial())),
    "partial gradient": lambda: stepped(dtensor(Replicate()), dtensor(Partial())),
    "gradient of another placement": lambda: stepped(dtensor(Shard(0)), dtensor(Replicate(), 8)),
    "sparse gradient": lambda: stepped(dtensor(Shard(0)), torch.ones(8, 8).to_sparse()),
    "gradient of another shape": lambda: stepped(
        dtensor(Shard(0)),
        DTensor.from_local(
            torch.ones(1, 8), mesh(), [Shard(0)], shape=(8, 8), stride=(8, 1), run_check=False
        ),
    ),
    "torchrun, killed": lambda: ended_by(9),
    "torchrun, aborted": lambda: ended_by(6),
}


ONLY_SAID_BY = {
    "bitsandbytes, 8 bits": ["bitsandbytes.optimizer_update_8bit"],
    "bitsandbytes, 32 bits": ["bitsandbytes.optimizer_update_32bit"],
    "accelerate, a stranger among the parameters": ["couldn't be switched"],
    "accelerate, one after the other": ["must be passed together"],
    "CPUOffloadPolicy without a GPU": ["Cannot access accelerator device"],
}
"""Parts of the texts of what may be left out."""


def left_out() -> set[str]:
    """Situations that need another package; and a build of torch for GPUs may word the lack of one otherwise."""
    lacking = {package for package in ("bitsandbytes", "accelerate") if not importlib.util.find_spec(package)}
    result = {name for name in SITUATIONS if name.split(",")[0] in lacking}
    return result | ({"CPUOffloadPolicy without a GPU"} if torch.version.cuda else set())


def said_by_one() -> dict[str, str]:
    """What each situation says. A group of torch's own for tests makes this process rank 0 of two."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = {}
    for name in [name for name in SITUATIONS if name not in left_out()]:
        try:
            found[name] = SITUATIONS[name]() or "nothing"
        except AssertionError:
            raise  # of `remedy`
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error.args[0] if error.args else error}"
    return found


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(64, 100), nn.Linear(100, 30)
        for layer in (self.always, self.sometimes):
            fully_shard(layer, mesh=mesh())

    def forward(self, x: Tensor, how: str) -> Tensor:
        x = self.always(x)
        if how == "skip":
            return x
        y: Tensor = self.sometimes(x)
        return x + 0 * y.sum() if how == "times zero" else y


def mismatch() -> None:
    """Says each of `ON_TWO_RANKS`. In the end rank 1 alone skips a layer: gloo ends rank 0, and rank 1 notices."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = dist.get_rank() == 0
    model = fully_shard(Branched(), mesh=mesh())
    model(torch.ones(2, 64), "run" if first else "times zero").sum().backward()
    assert all(p.grad is not None for p in model.parameters()), "the remedy does not help"
    no_cpus = DeviceMesh.from_group(dist.new_group(backend="cuda:gloo"), "cpu")
    try:
        nn.utils.clip_grad_norm_(with_gradients(nn.Parameter(dtensor(Shard(0), on=no_cpus))), 1.0)
    except RuntimeError as error:
        print(error, flush=True)
    group = dist.new_group()
    dist.barrier(group)
    if first:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1)
        try:
            group.allreduce([torch.ones(1)], options).wait()
        except RuntimeError as error:
            print(error, flush=True)
    dist.barrier()
    model(torch.ones(2, 64), "run" if first else "skip").sum().backward()


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each situation says, by its name."""
    [found] = ranks.run(1, said_by_one, on_cpu=True)
    with pytest.raises(AssertionError) as failure:
        ranks.run(2, mismatch, on_cpu=True)
    lines = str(failure.value).splitlines()
    for name, text in ON_TWO_RANKS.items():
        found[name] = "\n".join(line for line in lines if re.search(text, line))
        assert found[name], failure.value
    # Which of the two the other rank says is a matter of timing.
    found["a rank that ended"] += found["a rank that ended"].replace("closed by", "reset by")
    found["a rank that ended"] += found["a rank that ended"].replace("reset by", "closed by")
    return found


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:60])
def test_a_text_of_the_table_of_failures_is_really_said(said: dict[str, str], text: str) -> None:
    assert max(map(len, text.split("..."))) > 10, "too little to look for"
    if text in NOT_RAISED:
        return
    if not any(pattern(text).search(message) for message in said.values()):
        if any(part in text for name in left_out() for part in ONLY_SAID_BY[name]):
            pytest.skip("not raised here")
        pytest.fail("\n".join(f"{name}: {message[:300]}" for name, message in sorted(said.items())))


@pytest.mark.parametrize("name", [*SITUATIONS, *ON_TWO_RANKS])
def test_what_is_said_is_in_the_table_of_failures(said: dict[str, str], name: str) -> None:
    if name in left_out():
        pytest.skip("not raised here")
    assert any(pattern(text).search(said[name]) for text in TEXTS), said[name]


def test_what_is_not_raised_is_in_the_table_too() -> None:
    assert NOT_RAISED.keys() <= set(TEXTS)


@pytest.mark.parametrize("section", TESTED)
def test_every_row_names_tests_that_exist(ids: set[str], section: str) -> None:
    wrong = []
    assert tables(section) and all(tables(section))
    for row in itertools.chain(*tables(section)):
        names = named(row["the test"])
        if not names or len(names) != len(re.findall(r"`[^`]+`(?!\))", row["the test"])):
            wrong.append(row)
        wrong += [name for name in names if missing(name, ids)]
    assert wrong == []


def test_whatever_the_document_names_exists(ids: set[str]) -> None:
    """In prose and in other tables as well; functions of test files that are no tests by their definition."""
    assert [name for name in everything_named() if missing(name, ids)] == []
    helpers = re.findall(r"`(\w+)` in `(test_\w+\.py)`", DOCUMENT)
    assert helpers
    for function, file in helpers:
        assert f"\ndef {function}(" in (ROOT / HERE / file).read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        "`test_local_shards.py::test_shard_equals_plain_local_tensor`",
        "`test_no_such_file.py`",
        "`test_fsdp2_features.py[compile]`",
        "`test_fsdp2_features.py::clip`",
        "`test_dtensors.py[refusals]`",
        "`test_examples_end_to_end.py::test_trainer_lora_on_two_ranks[FSDP3]`",
        "`test_optimizer_errors.py::test_what_cannot_be_stepped_is_refused_before_anything_changes`",
        "`[refusal]`",
    ],
)
def test_a_wrong_name_is_noticed(ids: set[str], wrong: str) -> None:
    [name] = named(wrong)
    assert missing(name, ids)
