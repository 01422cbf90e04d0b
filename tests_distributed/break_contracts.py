"""Breaks each contract of the package on purpose, in a copy, and looks whether the distributed test of it fails.

    python tests_distributed/break_contracts.py --json benchmarks/results/broken_contracts.json
    python tests_distributed/break_contracts.py --only 4 Partial   # contract 4, and "Partial" in a text or a test

No test itself (pytest does not collect it), and it never edits the tree. First the unbroken copy must pass all the
tests; then for each breakage of `BREAKAGES` one fresh copy is edited and its test run there, with the native libraries
that are built. A breakage counts as noticed if the test fails by an assertion: not by an error of collection, import or
a fixture, nor because a rank died. Exit status 1 if one is not noticed, if the unbroken copy fails, or if the text to
be replaced is no longer there exactly once: then the breakage has to follow the code.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 900.0

CONTRACTS = {
    1: "one math on every backend",
    2: "keys and state: plain tensors of the local shard, bits by the global parameter",
    3: "shards: every dense placement, updated in place, all else refused",
    4: "step(): no DTensor operator, no collective, no synchronisation, no allocation; None is skipped",
    5: "a bad gradient stays within its block",
    6: "checkpoints: bit for bit, at any number of ranks, never silent",
    7: "native errors raise",
    8: "choice of the backend: by device, said once if a library is missing",
}

LOCAL = "tests_distributed/test_local_shards.py::"
DTENSORS = "tests_distributed/test_dtensors.py::"
TRUST = "tests_distributed/test_trust_sharded.py::"
CHECKPOINTS = "tests_distributed/test_checkpoints.py::"
SAVING = "tests_distributed/test_save_checkpoint.py::"
FOREIGN = "tests_distributed/test_interchange_sharded.py::"
EQUAL = LOCAL + "test_shard_equals_plain_local_tensor_bit_for_bit"
FEATURES = "tests_distributed/test_fsdp2_features.py::test_a_step_is_that_of_the_plain_local_tensor"
NO_OPERATOR = DTENSORS + "test_a_step_runs_no_dtensor_operator_and_no_collective"
PLACEMENTS = DTENSORS + "test_other_placements_and_plain_tensors_in_one_optimizer_step_as_plain_ones"
DRIFT = CHECKPOINTS + "test_ten_saves_at_changing_numbers_of_ranks_do_not_drift"


def contract(case: str) -> str:
    return f"tests_distributed/test_contracts.py::test_contract[{case}]"


class Edit(NamedTuple):
    """In ``file``, ``old`` (there exactly once) becomes ``new``."""

    file: str
    old: str
    new: str


class Breakage(NamedTuple):
    contract: int
    what: str
    edits: Sequence[Edit]
    test: str


STEP = "        self._plan.run(hypers, [self.trust(group) for group in self.param_groups])\n"


def around_step(before: str = "", after: str = "") -> Edit:
    """Code around the call that steps, in `BlockwiseOptimizer._update`, for every ``p``."""
    text = STEP
    loop = "        for p in [p for group in self.param_groups for p in group['params']]:\n"
    if before:
        text = f"{loop}            {before}\n{text}"
    if after:
        text = f"{text}{loop}            {after}\n"
    return Edit("bnb_fsdp/optim/base.py", STEP, text)


def breakage(number: int, what: str, test: str, file: str, old: str, new: str) -> Breakage:
    return Breakage(number, what, [Edit(f"bnb_fsdp/{file}", old, new)], test)


PLAIN_LOOK = "    if sharding.same_order(local, *item.layout):\n        return local\n"
GRADIENT = "    local = sharding.local(gradient)\n"
REDUCE = "                dist.all_reduce(packed, group=group)\n"

BREAKAGES = [
    # 1: one math
    breakage(
        1, "weight decay is not handed to the backend", f"{EQUAL}[AdamW8bit-float32-world2]", "optim/base.py",
        'weight_decay=float(group.get("weight_decay", 0.0)),', "weight_decay=0.0,",
    ),
    breakage(
        1, "the rules' bias correction is one step ahead of the kernels'", f"{EQUAL}[AdamW32bit-float32-world2]",
        "rules.py", "return f32.scalar(1.0 - f32.scalar(beta) ** step)",
        "return f32.scalar(1.0 - f32.scalar(beta) ** (step + 1))",
    ),
    breakage(
        1, "in the rules 8-bit Lion decays after its update, the kernels before", f"{EQUAL}[Lion8bit-float32-world2]",
        "rules.py",
        "    p = f32.round_to(f32.mul(p, _decay(h)), dtype)\n"
        "    return f32.round_to(f32.sub(p, change), dtype), (_first_moment8(g, s[0], h.beta2),)",
        "    p = f32.round_to(f32.sub(p, change), dtype)\n"
        "    return f32.round_to(f32.mul(p, _decay(h)), dtype), (_first_moment8(g, s[0], h.beta2),)",
    ),
    breakage(
        1, "weight decay is not handed to the backend: 16-bit parameters", contract("decay of bfloat16, Lion8bit"),
        "optim/base.py", 'weight_decay=float(group.get("weight_decay", 0.0)),', "weight_decay=0.0,",
    ),
    breakage(
        1, "the torch backend counts a step too many", contract("backends agree, AdamW32bit"),
        "backends/torch_backend.py", "step, hyper = int(slot.step), used[slot.group]",
        "step, hyper = int(slot.step) + 1, used[slot.group]",
    ),
    # 2: keys and state
    breakage(
        2, "bits are decided by the size of the local shard", contract("state of shards"), "state.py",
        "    if parameter.numel() < minimum:\n",
        '    if getattr(parameter, "_local_tensor", parameter).numel() < minimum:\n',
    ),
    breakage(
        2, "blocks are counted over the whole parameter", contract("state of shards"), "state.py",
        "    return -(-numel // codebook.BLOCK_SIZE)\n",
        "    return -(-numel * torch.distributed.get_world_size() // codebook.BLOCK_SIZE)\n",
    ),
    Breakage(
        2, "state is made of DTensors",
        [around_step(after="self.state[p]['state1'] = sharding.like(p, self.state[p]['state1'], p.shape)")],
        contract("state of shards"),
    ),
    breakage(
        2, "an empty shard has no state", contract("state of shards"), "state.py",
        "    return not values and not parameter.requires_grad and parameter.grad is None\n",
        '    empty = getattr(parameter, "_local_tensor", parameter).numel() == 0\n'
        "    return not values and (empty or (not parameter.requires_grad and parameter.grad is None))\n",
    ),
    breakage(
        2, "state is made with the optimizer, not at the first step", contract("state of shards"), "optim/base.py",
        "        self._overrides = [(key, value) for key, value in self._overrides if isinstance(key, str)]\n",
        "        self._overrides = [(key, value) for key, value in self._overrides if isinstance(key, str)]\n"
        "        checkpoint.materialize(self)\n",
    ),
    Breakage(
        2, "the parameters of the constructor are stepped, not those that a wrapper put in their place",
        [
            Edit(
                "bnb_fsdp/optim/base.py", "        self._drop_plan()\n\n    def _check_group",
                "        self._drop_plan()\n"
                '        self._first = [list(group["params"]) for group in self.param_groups]\n\n    def _check_group',
            ),
            Edit(
                "bnb_fsdp/optim/plan.py",
                "            row: list[_Item | None] = []\n"
                '            for position, parameter in enumerate(group["params"]):\n',
                "            row: list[_Item | None] = []\n"
                "            for position, parameter in enumerate(optimizer._first[index]):\n",
            ),
        ],
        contract("parameters exchanged before the first step"),
    ),
    # 3: shards
    breakage(
        3, "a Partial parameter is accepted", contract("refusals"), "sharding.py",
        "            if placement.is_partial():\n", "            if False:\n",
    ),
    breakage(
        3, "a Partial gradient is taken for its Replicate parameter's", contract("refusals"), "sharding.py",
        "        and (a.placements == b.placements or not is_on_mesh(a))\n", "",
    ),
    Breakage(
        3, "a shard with gaps in its storage is accepted",
        [
            Edit("bnb_fsdp/sharding.py", "        if stride != expected:\n            return False\n", ""),
            Edit(
                "bnb_fsdp/state.py", "        if value.stride() != shard.stride() and value.numel() > 1:\n",
                "        if False:\n",
            ),
        ],
        contract("refusals"),
    ),
    breakage(
        3, "FSDP1's flat parameters are accepted", contract("refusals"), "sharding.py",
        '    if getattr(parameter, "_fsdp_flattened", False):', "    if False:",
    ),
    breakage(
        3, "gradients are copied", contract("storage stays, Python look"), "optim/plan.py", PLAIN_LOOK,
        PLAIN_LOOK.replace("return local", "return local.clone()"),
    ),
    Breakage(
        3, "gradients are replaced by copies", [around_step(before="p.grad = p.grad.clone()")],
        contract("storage stays, native look"),
    ),
    Breakage(
        3, "shards are moved to new storage",
        [around_step(after="sharding.local(p).data = sharding.local(p).detach().clone()")],
        f"{PLACEMENTS}[one dimension]",
    ),
    breakage(
        3, "a gradient is read in its parameter's memory order, whatever its own",
        contract("gradient in another memory order"), "optim/plan.py", PLAIN_LOOK, "    return local\n",
    ),
    breakage(
        3, "of a mesh of two dimensions only the first counts as sharded",
        TRUST + "test_sums_count_every_element_once_and_are_the_same_on_every_rank[world4]", "sharding.py",
        "        for dim in range(mesh.ndim)\n        if mesh.size(dim) > 1",
        "        for dim in range(1)\n        if mesh.size(dim) > 1",
    ),
    breakage(
        3, "a gradient whose collective is in flight is not waited for",
        "tests_distributed/test_gradients_in_flight.py::test_gradients_in_flight_are_waited_for", "sharding.py",
        "        return shard.wait()\n", "        return shard.elem\n",
    ),
    # 4: step()
    breakage(
        4, "a step has an all-reduce", NO_OPERATOR, "optim/plan.py", "            self._check(hypers)\n",
        "            self._check(hypers)\n            torch.distributed.all_reduce(torch.zeros(1))\n",
    ),
    breakage(
        4, "a step has a barrier", NO_OPERATOR, "optim/plan.py", "            self._check(hypers)\n",
        "            self._check(hypers)\n            torch.distributed.barrier()\n",
    ),
    Breakage(4, "a step runs an operator on DTensors", [around_step(before="p + 0")], NO_OPERATOR),
    Breakage(
        4, "the host waits for a sum of each gradient",
        [around_step(before="sharding.local(p.grad).sum().item()")], contract("storage stays, native look"),
    ),
    breakage(
        4, "every step makes its tables anew", contract("storage stays, native look"), "optim/base.py",
        "        if self._plan is None or not self._plan.gather(self):\n", "        if True:\n",
    ),
    Breakage(
        4, "a parameter without a gradient is counted",
        [around_step(after="self.state[p]['step'] += p.grad is None")], contract("missing gradients"),
    ),
    breakage(
        4, "LAMB and LARS add nothing over ranks: norms are of shards",
        TRUST + "test_sharded_parameters_become_what_whole_ones_do[LAMB32bit-world2]", "sharding.py", REDUCE,
        "                pass\n",
    ),
    breakage(
        4, "LAMB and LARS run two all-reduces a mesh",
        TRUST + "test_a_step_is_one_all_reduce_a_mesh[LAMB32bit-world2]", "sharding.py", REDUCE,
        f"{REDUCE}                dist.all_reduce(packed.clone(), group=group)\n",
    ),
    breakage(
        4, "copies of a shard are counted as often as there are",
        TRUST + "test_sums_count_every_element_once_and_are_the_same_on_every_rank[world4]", "sharding.py",
        "        weights.append(float(all(coordinate[dim] == 0 for dim in copies)))\n",
        "        weights.append(1.0)\n",
    ),
    breakage(
        4, "norms are added over all ranks, not those of the parameter's mesh alone",
        FEATURES + "[norms of experts by DTensor, LAMB32bit]", "sharding.py",
        "    if len(cut) > 1 and mesh.size() == dist.get_world_size():\n", "    if cut:\n",
    ),
    # 5: bad gradients
    breakage(
        5, "a NaN in a gradient keeps its whole shard from being updated", contract("NaN gradient, AdamW"),
        "optim/plan.py", GRADIENT,
        f"{GRADIENT}    if not local.isfinite().all():\n        local = torch.zeros_like(local)\n",
    ),
    breakage(
        5, "NaN and infinite gradients are taken for zeros", contract("infinite gradient, AdamW"), "optim/plan.py",
        GRADIENT, "    local = sharding.local(gradient).nan_to_num(0.0, 0.0, 0.0)\n",
    ),
    breakage(
        5, "on all backends infinities become large numbers, which leaves a block finite",
        contract("infinite gradient, Lion"), "optim/plan.py", GRADIENT,
        "    local = sharding.local(gradient).nan_to_num()\n",
    ),
    breakage(
        5, "in the torch backend one scale serves all blocks of a shard", contract("backends agree, Lion8bit"),
        "codebook.py", "return magnitude.amax(dim=1) if", "return magnitude.amax().expand(len(magnitude)) if",
    ),
    breakage(
        5, "in the torch backend a NaN enters its block's scale", contract("backends agree, Lion8bit"), "codebook.py",
        "magnitude = torch.where(torch.isnan(values), _NEGATIVE_MAX, values.abs())", "magnitude = values.abs()",
    ),
    breakage(
        5, "in the torch backend 8-bit Adam does not look for NaN", contract("backends agree, AdamW8bit"), "rules.py",
        "    finite = torch.isfinite(g)\n", "    finite = torch.ones_like(g, dtype=torch.bool)\n",
    ),
    # 6: checkpoints
    breakage(
        6, "every rank loads the first rank's part of a whole state",
        FOREIGN + "test_torch_dicts_are_taken_by_parts", "sharding.py",
        "    return value[tuple(slice(start, start + size) for start, size in zip(offset, shape))]\n",
        "    return value[tuple(slice(0, size) for start, size in zip(offset, shape))]\n",
    ),
    breakage(
        6, "ranks write their state at each other's offsets",
        SAVING + "test_cuts_along_other_dimensions_load[2]", "sharding.py", "    return tuple(shape), tuple(offset)\n",
        "    mirrored = (whole - size - start for whole, size, start in zip(tensor.shape, shape, offset))\n"
        "    return tuple(shape), tuple(mirrored)\n",
    ),
    breakage(
        6, "the number of ranks that saved is ignored: rows are taken to lie in the loader's blocks", DRIFT,
        "checkpoint/blocks.py",
        "given = torch.zeros_like(own) if phase is None else phase[start:stop, 0].long()", "given = own",
    ),
    Breakage(
        6, "blocks are requantised by their largest magnitude, so that every reload loses a little",
        [
            Edit(
                "bnb_fsdp/checkpoint/blocks.py",
                "bound = torch.where(values < 0, values / table[:1], values) if signed else values",
                "bound = values.abs()",
            ),
            Edit(
                "bnb_fsdp/checkpoint/blocks.py", "bound = torch.where(leads & inside & (values != 0), scales, bound)",
                "bound = bound.clone()",
            ),
        ],
        DRIFT,
    ),
    breakage(
        6, "phases of rows are saved as zeros",
        CHECKPOINTS + "test_a_model_with_activation_checkpointing_resumes_with_and_without",
        "checkpoint/blocks.py", "    return (torch.arange(rows, device=device) * width % BLOCK_SIZE).to(torch.uint8)\n",
        "    return torch.zeros(rows, dtype=torch.uint8, device=device)\n",
    ),
    breakage(
        6, "saving before the first step takes a step",
        CHECKPOINTS + "test_saving_before_the_first_step_changes_nothing[get_optimizer_state_dict-without gradients]",
        "optim/base.py", "            checkpoint.materialize(owner)\n", "            pass\n",
    ),
    breakage(
        6, "state in a newer format is loaded", contract("unfit state dicts"), "checkpoint/state_dict.py",
        "    if numbers[0] > VERSION:\n", "    if False:\n",
    ),
    breakage(
        6, "state in blocks of another size is loaded", contract("unfit state dicts"), "checkpoint/state_dict.py",
        "    if numbers[1] != BLOCK_SIZE:\n", "    if False:\n",
    ),
    # 7: native errors
    breakage(
        7, "the status of a native step is not looked at", contract("error of the native code"), "backends/cpu.py",
        "        if status != 0:\n", "        if False:\n",
    ),
    breakage(
        7, "a native error does not say which call, tensors and dtypes it was", contract("error of the native code"),
        "backends/cpu.py", "            raise RuntimeError(\n                f\"{key.rule} {what} (",
        "            raise RuntimeError(\n                self._library.last_error() or f\"{key.rule} {what} (",
    ),
    breakage(
        7, "the status of the other native functions is not looked at", contract("refused settings"),
        "backends/native.py", "            if function(*arguments) != 0:\n",
        "            if function(*arguments) and False:\n",
    ),
    # 8: choice of backend
    breakage(
        8, "the fallback to the torch backend is silent", contract("missing library"), "backends/__init__.py",
        '    _warn_once(f"bnb_fsdp falls back to its slow torch backend for {device.type} tensors: {reason}")\n', "",
    ),
    breakage(
        8, "a missing library is said again and again", contract("missing library"), "backends/__init__.py",
        "    if message not in _said:\n", "    if True:\n",
    ),
    breakage(
        8, "a backend that was asked for by name is replaced by another", contract("missing library"),
        "backends/__init__.py",
        "            if requested == native:\n                raise RuntimeError(",
        "            if False:\n                raise RuntimeError(",
    ),
    breakage(
        8, "BNB_FSDP_BACKEND is not looked at", contract("chosen backend"), "backends/__init__.py",
        'os.environ.get(ENVIRONMENT_VARIABLE) or "auto"', '"auto"',
    ),
]  # fmt: skip

# An editable install's finder comes before PYTHONPATH.
SITE = """\
import sys
sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not any("bnb_fsdp" in str(getattr(finder, name, "")) for name in ("known_source_files", "known_packages"))
]
"""
LOOK = """\
import json, torch, bnb_fsdp
from bnb_fsdp.backends import cpu, native
print(json.dumps({
    "package": bnb_fsdp.__file__, "library": str(native.load("cpu").path), "bnb_fsdp": bnb_fsdp.__version__,
    "torch": torch.__version__, "instruction_set": cpu.instruction_set(),
}))
"""


class Result(NamedTuple):
    """Of one test: "passed", "assertion" or what else it was, and the first lines that pytest marks with E."""

    outcome: str
    error: str


class Copy:
    """The Python sources of the package in ``source`` and the distributed tests, in ``folder``; what runs there."""

    def __init__(self, source: Path, folder: Path, library: str | None) -> None:
        self.folder = folder
        shutil.copytree(
            source / "bnb_fsdp",
            folder / "bnb_fsdp",
            ignore=shutil.ignore_patterns("csrc", "lib", "__pycache__"),
        )
        shutil.copytree(
            source / "tests_distributed",
            folder / "tests_distributed",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        shutil.copy(source / "pyproject.toml", folder)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        paths = [str(folder / "site"), str(folder), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
        }
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"
        for name in ("BNB_FSDP_BACKEND", "BNB_FSDP_CPU_ISA", "BNB_FSDP_NUM_THREADS"):
            self.environment.pop(name, None)
        if library:
            self.environment["BNB_FSDP_LIBRARY_PATH"] = library

    def apply(self, edits: Sequence[Edit]) -> None:
        """Raise ValueError if an old text is not there exactly once."""
        for edit in edits:
            path = self.folder / edit.file
            text = path.read_text()
            if text.count(edit.old) != 1:
                raise ValueError(
                    f"{edit.file} has {text.count(edit.old)} times, not once: {edit.old.strip()!r}. "
                    "The code has changed: let the breakage follow it."
                )
            text = text.replace(edit.old, edit.new)
            compile(text, edit.file, "exec")
            path.write_text(text)

    def look(self) -> dict[str, Any]:
        """Versions; RuntimeError if another package than the copy would be tested."""
        done = subprocess.run(
            [sys.executable, "-c", LOOK],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the copy cannot be imported, or has no native library:\n{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        if Path(found["package"]).resolve().parent.parent != self.folder.resolve():
            raise RuntimeError(f"{found['package']} would be tested, not the copy in {self.folder}.")
        return found

    def run(self, tests: Sequence[str]) -> dict[str, Result]:
        """Results by test; those that did not run are missing."""
        report = self.folder / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "--tb=short", "-vv", "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", "-o", "junit_family=xunit1", *tests),
        ]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(tests, Result("timeout", f"not finished after {TIMEOUT:.0f} s"))
        if not report.exists():
            return dict.fromkeys(tests, Result("pytest", done.stdout[-500:] + done.stderr[-500:]))
        found = {
            f"{case.get('file')}::{case.get('name')}": judged(case)
            for case in ElementTree.parse(report).getroot().iter("testcase")
        }
        if set(tests) - set(found):
            found.update(
                dict.fromkeys(set(tests) - set(found), Result("not collected", done.stdout.strip()[-500:]))
            )
        return found


def judged(case: ElementTree.Element) -> Result:
    """Of a test case in pytest's report."""
    for kind in ("error", "failure", "skipped"):
        part = case.find(kind)
        if part is None:
            continue
        text = part.text or ""
        marked = [line[1:].strip() for line in text.splitlines() if re.match(r"E\s", line)]
        full = [index for index, line in enumerate(marked) if line.startswith("Full diff")]
        marked = marked[: min(full, default=None)]
        error = " / ".join(line for line in marked[:12] if line)
        error = re.sub(r"(?<![\w<])(/[\w.+-]+)+/", "", error)  # files by their names alone
        if kind != "failure":
            return Result(f"{kind} before the test", error or str(part.get("message")))
        if "a rank failed" in text or "not finished after" in text:
            return Result("a rank failed", error)
        message = part.get("message") or ""
        is_assertion = message.startswith(("AssertionError", "assert ", "Failed: DID NOT RAISE"))
        return Result("assertion" if is_assertion else message.partition(":")[0], error)
    return Result("passed", "")


def machine() -> dict[str, Any]:
    processor = platform.processor()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    commit, changes = (
        subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", "bnb_fsdp"))
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "uncommitted_changes": sorted(line[3:] for line in changes.stdout.splitlines()),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def shortened(text: str, length: int) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= length else f"{text[: length - 3]}..."


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| contract | broken | test | unbroken | broken | first error |", "|---|---|---|---|---|---|"]
    for row in rows:
        test = row["test"].partition("::")[2]
        lines.append(
            f"| {row['contract']} | {row['breakage']} | `{test}` | {row['unbroken']} | {row['broken']} | "
            f"{shortened(row['error'], 200)} |"
        )
    return "\n".join(lines)


def chosen(only: Sequence[str]) -> list[Breakage]:
    """Those of the contracts whose numbers are given, and those with one of the other words in their text or test."""
    numbers = {int(word) for word in only if word.isdecimal()}
    words = [word for word in only if not word.isdecimal()]
    return [
        b
        for b in BREAKAGES
        if not only or b.contract in numbers or any(word in f"{b.what} {b.test}" for word in words)
    ]


def broken(breakage: Breakage, whole: Copy, library: str) -> Result:
    """The result of its test in a copy of ``whole`` that has the breakage."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(whole.folder, Path(folder), library)
        try:
            copy.apply(breakage.edits)
        except ValueError as error:
            return Result("text not found", str(error))
        return copy.run([breakage.test])[breakage.test]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="numbers of contracts, or parts of a breakage's text or test",
    )
    options = parser.parse_args()
    unknown = [word for word in options.only if not chosen([word])]
    if unknown:
        numbers = ", ".join(map(str, CONTRACTS))
        parser.error(
            f"--only {' '.join(unknown)}: no such breakage; contracts are {numbers}, else give a part of a text"
        )
    breakages = chosen(options.only)
    start = time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # the tree may change meanwhile
        whole = Copy(ROOT, Path(folder), os.environ.get("BNB_FSDP_LIBRARY_PATH"))
        about = machine()
        found = whole.look()
        library = str(Path(found.pop("library")).parent)
        whole.environment["BNB_FSDP_LIBRARY_PATH"] = library
        del found["package"]
        unbroken = whole.run(list(dict.fromkeys(breakage.test for breakage in breakages)))
        for number, b in enumerate(breakages, 1):
            result = broken(b, whole, library)
            rows.append({
                "contract": b.contract, "breakage": b.what, "edits": [edit._asdict() for edit in b.edits],
                "test": b.test, "unbroken": unbroken[b.test].outcome, "broken": result.outcome,
                "error": result.error,
            })  # fmt: skip
            print(f"{number} of {len(breakages)}: {b.contract}, {b.what}: {result.outcome}", flush=True)
            print(f"    E  {shortened(result.error, 160)}", flush=True)
    wrong = [row for row in rows if (row["unbroken"], row["broken"]) != ("passed", "assertion")]
    print(f"\n{table(rows)}\n\n{len(rows) - len(wrong)} of {len(rows)} breakages were noticed.")
    for row in wrong:
        before = unbroken[row["test"]]
        print(f"NOT NOTICED: {row['contract']}, {row['breakage']}: unbroken {before}, broken {row['broken']}")
    if options.json:
        report = {
            "machine": {**about, **found},
            "command": " ".join(["python", *sys.argv]),
            "seconds": round(time.monotonic() - start),
            "contracts": CONTRACTS,
            "noticed": len(rows) - len(wrong),
            "rows": [{**row, "error": shortened(row["error"], 600)} for row in rows],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
