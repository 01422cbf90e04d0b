"""Checkpoints of accelerate and the Trainer under FSDP2 on CPUs: saved, loaded elsewhere, trained on.

`resume_runs` is what runs, in a few launches. Every rank writes facts and copies of its live state, judged here. A
scenario that raises ends its launch: the tests of scenarios that did not run any more show its error.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
import resume_runs
import torch
import torchrun
from resume_runs import ACCELERATE, END, SAVED, SETUPS, TRAINER, TRAINER_END, TRAINER_SAVED, Facts
from torch import Tensor

import bnb_fsdp
from bnb_fsdp.codebook import dynamic_map

pytest.importorskip("transformers")
pytest.importorskip("peft")

WORLDS = {"2 ranks save": 2, "1 rank": 1, "2 ranks load": 2, "4 ranks": 4, "plain": 1}
NEEDS = {"1 rank": ["2 ranks save"], "2 ranks load": ["2 ranks save", "1 rank"], "4 ranks": ["2 ranks save"]}
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
Raw = dict[str, dict[str, Tensor]]
"""Parameters and state tensors of a rank, by name of the parameter."""

BLOCK = 256
HALF_GAP = {"state1": 0.0071, "state2": 0.0036}
"""Of the codebook, for blocks that had to be requantised: ../shared/spec/checkpoint.md, section 2."""

MATRICES = ("q_proj", "o_proj", "mlp")
EIGHT_BITS = {
    "float32": (*MATRICES, "lm_head", "embed_tokens"),
    "bf16": (*MATRICES, "lm_head", "embed_tokens"),
    "tied": (*MATRICES, "embed_tokens"),
    "overrides": ("o_proj", "mlp", "lm_head", "embed_tokens"),
    "lora": (*(f"{name}.lora_" for name in ("q_proj", "up_proj")), "v_proj.lora_A"),
}
# The Trainer has no 8-bit state for embeddings, as it does for bitsandbytes.
TRAINER_EIGHT_BITS = {"full": (*MATRICES, "lm_head"), "tied": MATRICES, "lora": ("lora_",)}


class Runs:
    """Results of launches, which start when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._output: dict[str, str] = {}
        self._results: dict[str, list[dict[str, Facts]]] = {}

    def facts(self, launch: str, scenario: str) -> list[Facts]:
        """Of every rank."""
        self._start(launch)
        results = self._results[launch]
        found = [result.get(scenario, {}) for result in results]
        if not all("losses" in facts for facts in found):
            errors = [facts["error"] for result in results for facts in result.values() if "error" in facts]
            text = "\n".join(errors) or self._output[launch][-6000:]
            pytest.fail(f"{launch!r} has no result of {scenario!r}:\n{text}")
        return found

    def raw(self, launch: str, scenario: str, moment: str) -> list[Raw]:
        """Live state of every rank."""
        self.facts(launch, scenario)
        world = WORLDS[launch]
        files = [resume_runs.raw_file(self.folder, scenario, moment, rank, world) for rank in range(world)]
        return [torch.load(file, weights_only=True) for file in files]

    def _start(self, launch: str) -> None:
        """Exit codes are not looked at: the teardown of gloo can abort after all is done."""
        if launch in self._results:
            return
        for earlier in NEEDS.get(launch, []):
            self._start(earlier)
        script = Path(resume_runs.__file__).resolve()
        package = Path(bnb_fsdp.__file__).parents[1]
        paths = [str(script.parent), str(package), os.environ.get("PYTHONPATH")]
        ours = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
        environment = {
            **ours,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLDS[launch]}"]
        _, self._output[launch] = torchrun.run(
            [sys.executable, *(ranks if launch != "plain" else []), str(script), launch, str(self.folder)],
            environment,
            resume_runs.LAUNCH_SECONDS,
        )
        files = [self.folder / f"{launch}, rank {rank}.json" for rank in range(WORLDS[launch])]
        self._results[launch] = [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("resume"))


# What is compared


def check_trained(facts: Facts, *, sharded: bool = True, checkpointing: bool = False) -> None:
    """Guards against runs that silently train DDP, or that the optimizer has no part in."""
    assert facts["is_fsdp2"] == facts["DTensors"] == sharded
    assert facts["same objects"] and facts["optimizer"] == "AdamW8bit"
    assert facts["checkpointing"] == checkpointing
    assert all(math.isfinite(loss) for loss in facts["losses"])


def check_files(files: list[str], kind: str) -> None:
    """That the checkpoint is of the kind that was asked for."""
    kinds = {"optimizer_0": "SHARDED", "optimizer.bin": "FULL", "optimizer.pt": "plain"}
    assert [kinds[name] for name in files if name in kinds] == [kind]


def check_state(raw: list[Raw], eight: tuple[str, ...], steps: int) -> None:
    """Exactly the parameters whose name has one of ``eight`` in it have uint8 state, and all were stepped."""
    for rank in raw:
        found = {name for name, values in rank.items() if values["state1"].dtype == torch.uint8}
        assert found == {name for name in rank if any(part in name for part in eight)} != set()
        for values in rank.values():
            assert values["step"].item() == steps
            assert values["state2"].dtype == values["state1"].dtype
            assert ("absmax1" in values) == ("absmax2" in values) == (values["state1"].dtype == torch.uint8)


def check_same(left: list[Raw], right: list[Raw]) -> None:
    """Bit for bit, on every rank."""
    assert len(left) == len(right)
    for one, other in zip(left, right):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].keys() == other[name].keys()
            for key, value in one[name].items():
                assert value.dtype == other[name][key].dtype, (name, key)
                assert torch.equal(value, other[name][key]), (name, key)


def _decoded(raw: list[Raw], name: str, key: str) -> tuple[Tensor, Tensor]:
    """A whole state in float32, from all ranks, and the scale of each element's block (0 for 32-bit state)."""
    values, scales = [], []
    for rank in raw:
        state = rank[name][key]
        scale = torch.zeros(state.shape)
        if state.dtype == torch.uint8:
            absmax = rank[name][key.replace("state", "absmax")].repeat_interleave(BLOCK)
            scale = absmax[: state.numel()].view(state.shape)
            state = torch.tensor(dynamic_map(signed=key == "state1"))[state.long()] * scale
        values.append(state)
        scales.append(scale)
    return torch.cat(values), torch.cat(scales)


def _blocks_lie_alike(left: list[Raw], right: list[Raw], name: str) -> bool:
    """Whether all shards start at blocks, in both."""
    for raw in (left, right):
        start = 0
        for rank in raw:
            if start % BLOCK:
                return False
            start += rank[name]["parameter"].numel()
    return True


def check_resharded(saved: list[Raw], loaded: list[Raw]) -> None:
    """Weights, 32-bit state and blocks that lie alike are equal, others within half a gap; there are both."""
    assert {tuple(rank) for rank in saved} == {tuple(rank) for rank in loaded}
    alike = moved = 0
    for name in saved[0]:
        left, right = (torch.cat([rank[name]["parameter"] for rank in raw]) for raw in (saved, loaded))
        assert torch.equal(left, right), name
        assert {float(rank[name]["step"]) for rank in loaded} == {float(saved[0][name]["step"])}
        for key in ("state1", "state2"):
            assert {rank[name][key].dtype for rank in saved} == {rank[name][key].dtype for rank in loaded}
            old, _ = _decoded(saved, name, key)
            new, scale = _decoded(loaded, name, key)
            if not scale.any() or _blocks_lie_alike(saved, loaded, name):
                assert torch.equal(old, new), (name, key)
                alike += 1
            else:
                assert ((new - old).abs() <= HALF_GAP[key] * scale).all(), (name, key)
                moved += 1
    assert alike and moved


# accelerate

each_accelerate = pytest.mark.parametrize(("setup", "kind"), ACCELERATE)


@each_accelerate
def test_saving_with_accelerate_changes_nothing(runs: Runs, setup: str, kind: str) -> None:
    name = f"{setup}, {kind}"
    for facts, other in zip(
        runs.facts("2 ranks save", name), runs.facts("2 ranks save", f"never saved, {setup}")
    ):
        check_trained(facts, checkpointing=setup == "tied")
        check_files(facts["files"], kind)
        assert facts["groups"] == {"lora": [12, 0], "tied": [20]}.get(setup, [21])
        assert len(facts["losses"]) == END * SETUPS[setup].get("accumulation", 1)
        assert facts["losses"] == other["losses"] and facts["losses"][-1] < facts["losses"][0] - 0.1
    check_state(runs.raw("2 ranks save", name, "saved"), EIGHT_BITS[setup], SAVED)
    end = runs.raw("2 ranks save", name, "end")
    check_state(end, EIGHT_BITS[setup], END)
    check_same(end, runs.raw("2 ranks save", f"never saved, {setup}", "end"))


@each_accelerate
def test_accelerate_resumes_on_as_many_ranks(runs: Runs, setup: str, kind: str) -> None:
    name = f"{setup}, {kind}"
    loaded = runs.raw("2 ranks load", f"{name}, from 2", "loaded")
    check_same(loaded, runs.raw("2 ranks save", name, "saved"))
    for rank, (facts, saving) in enumerate(
        zip(runs.facts("2 ranks load", f"{name}, from 2"), runs.facts("2 ranks save", name))
    ):
        check_trained(facts, checkpointing=setup == "tied")
        assert facts["losses"] == saving["losses"][-len(facts["losses"]) :]
        assert len(facts["losses"]) == (END - SAVED) * SETUPS[setup].get("accumulation", 1)
        assert facts["lr"] == saving["lr"] == [SETUPS[setup].get("lr", 2e-3)] * len(saving["groups"])
        scales = [
            value for values in loaded[rank].values() for key, value in values.items() if "absmax" in key
        ]
        assert facts["load report"] == {
            "parameters": len(loaded[rank]),
            "blocks": sum(map(len, scales)),
            "requantized": 0,
        }
    check_same(runs.raw("2 ranks load", f"{name}, from 2", "end"), runs.raw("2 ranks save", name, "end"))


@pytest.mark.parametrize(
    ("launch", "source", "saver"),
    [
        pytest.param("1 rank", 2, "2 ranks save", id="2-to-1"),
        pytest.param("4 ranks", 2, "2 ranks save", id="2-to-4"),
        pytest.param("2 ranks load", 1, "1 rank", id="1-to-2"),
    ],
)
@each_accelerate
def test_accelerate_resumes_on_other_numbers_of_ranks(
    runs: Runs, setup: str, kind: str, launch: str, source: int, saver: str
) -> None:
    name = f"{setup}, {kind}"
    loaded = runs.raw(launch, f"{name}, from {source}", "loaded")
    saved = runs.raw(saver, name, "saved")
    check_state(loaded, EIGHT_BITS[setup], SAVED)
    check_resharded(saved, loaded)
    every = runs.facts(launch, f"{name}, from {source}")
    for facts in every:
        check_trained(facts, checkpointing=setup == "tied")
        expected = runs.facts(saver, name)[0]["losses"][-len(facts["losses"]) :]
        assert facts["losses"] == pytest.approx(expected, abs=3e-2 if setup == "bf16" else 1e-4)
    assert sum(facts["load report"]["requantized"] for facts in every) > 0
    check_state(runs.raw(launch, f"{name}, from {source}", "end"), EIGHT_BITS[setup], END)


@pytest.mark.parametrize("kind", ["SHARDED", "FULL"])
def test_saving_before_the_first_step_takes_no_step(runs: Runs, kind: str) -> None:
    name = f"never stepped, {kind}"
    for facts, other in zip(
        runs.facts("2 ranks save", name), runs.facts("2 ranks save", "never saved, float32")
    ):
        check_trained(facts)
        assert facts["losses"] == facts["losses again"] == other["losses"][:SAVED]
    check_same(runs.raw("2 ranks save", name, "end"), runs.raw("2 ranks save", f"float32, {kind}", "saved"))
    loaded = runs.raw("2 ranks save", name, "loaded")
    check_state(loaded, EIGHT_BITS["float32"], steps=0)
    for parameter in loaded[0]:
        for key in ("state1", "state2"):
            assert not _decoded(loaded, parameter, key)[0].any(), (parameter, key)


# The Trainer


def _launches(kind: str) -> tuple[str, str, int]:
    """Where the Trainer saves, where it resumes, and the number of ranks."""
    return ("plain", "plain", 1) if kind == "plain" else ("2 ranks save", "2 ranks load", 2)


each_trainer = pytest.mark.parametrize(("setup", "kind"), [*TRAINER, ("full", "plain")])


@each_trainer
def test_saving_with_the_trainer_changes_nothing(runs: Runs, setup: str, kind: str) -> None:
    launch, _, _ = _launches(kind)
    name = f"Trainer, {setup}, {kind}"
    without = f"Trainer, never saved, {setup}"
    for facts, other in zip(runs.facts(launch, name), runs.facts(launch, without)):
        check_trained(facts, sharded=kind != "plain", checkpointing=setup == "tied")
        check_files(facts["files"], kind)
        assert facts["groups"] == {"lora": [12, 0], "tied": [15, 5]}.get(setup, [16, 5])
        assert len(facts["losses"]) == TRAINER_END
        assert facts["losses"] == other["losses"] and facts["losses"][-1] < facts["losses"][0] - 0.1
    check_state(runs.raw(launch, name, "saved"), TRAINER_EIGHT_BITS[setup], TRAINER_SAVED)
    check_same(runs.raw(launch, name, "end"), runs.raw(launch, without, "end"))


@each_trainer
def test_the_trainer_resumes(runs: Runs, setup: str, kind: str) -> None:
    """From ``resume_from_checkpoint``, with a model of other weights."""
    saver, launch, world = _launches(kind)
    name = f"Trainer, {setup}, {kind}"
    resumed = f"{name}, from {world}"
    loaded = runs.raw(launch, resumed, "loaded")
    check_state(loaded, TRAINER_EIGHT_BITS[setup], TRAINER_SAVED)
    check_same(loaded, runs.raw(saver, name, "saved"))
    for facts, saving in zip(runs.facts(launch, resumed), runs.facts(saver, name)):
        check_trained(facts, sharded=kind != "plain", checkpointing=setup == "tied")
        assert facts["losses"] == saving["losses"][TRAINER_SAVED:]
        assert facts["global step"] == TRAINER_END
        assert facts["load report"]["parameters"] == len(loaded[0])
        assert facts["load report"]["requantized"] == 0
        assert [text for text in facts["messages"] if "optimizer" in text.lower()] == []
    end = runs.raw(launch, resumed, "end")
    check_state(end, TRAINER_EIGHT_BITS[setup], TRAINER_END)
    check_same(end, runs.raw(saver, name, "end"))


def test_optimizer_pt_is_plain_data(runs: Runs) -> None:
    runs.facts("plain", "Trainer, full, plain")
    file = runs.folder / "Trainer, full, plain" / f"checkpoint-{TRAINER_SAVED}" / "optimizer.pt"
    saved = torch.load(file, weights_only=True)
    assert {int(values["step"]) for values in saved["state"].values()} == {TRAINER_SAVED}
    codes = [value for values in saved["state"].values() for value in values["state1"].values()]
    assert {value.dtype for value in codes} == {torch.uint8, torch.float32}
