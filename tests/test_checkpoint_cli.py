"""``python -m bnb_fsdp checkpoint``: what info, verify and convert find, refuse and write."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import bnb_fsdp
from bnb_fsdp import cli
from bnb_fsdp.checkpoint import convert as conversion

SHAPES = {"wide": (20, 512), "narrow": (33, 300), "small": (10,), "deep": (6, 10, 90)}
HALF_GAP = 0.00711  # of a block's scale: the signed codebook's widest gap, halved
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("AdamW8bit", {"lr": 1e-2, "weight_decay": 0.0}),
    "momentum": ("SGD8bit", {"lr": 1e-2, "momentum": 0.9}),
    "rmsprop": ("RMSprop8bit", {"lr": 1e-3}),
    "adagrad": ("Adagrad8bit", {"lr": 1e-3}),
    "lion": ("Lion8bit", {"lr": 1e-3}),
}
TORCH = {
    "adam": ("AdamW", {"state1": "exp_avg", "state2": "exp_avg_sq"}),
    "momentum": ("SGD", {"state1": "momentum_buffer"}),
    "rmsprop": ("RMSprop", {"state1": "square_avg"}),
    "adagrad": ("Adagrad", {"state1": "sum"}),
}


class Model(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def trained(algorithm: str = "adam", model: nn.Module | None = None, **kwargs: Any) -> tuple[nn.Module, Any]:
    """A model and its optimizer (two groups) after three steps."""
    model = model or Model()
    name, defaults = CLASSES[algorithm]
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 5e-3}]
    optimizer = getattr(bnb_fsdp, name)(groups, **{**defaults, **kwargs})
    for seed in range(3):
        gradients(model, seed)
        optimizer.step()
    return model, optimizer


def save(path: Path, values: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values, checkpoint_id=path, no_dist=True)
    return path


def load(values: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(values, checkpoint_id=path, no_dist=True)


def state_dict(model: nn.Module, optimizer: Any, flat: bool = False) -> dict[str, Any]:
    return get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )


def saved(path: Path, model: nn.Module, optimizer: Any, flat: bool = False) -> Path:
    values = {"model": get_model_state_dict(model), "optimizer": state_dict(model, optimizer, flat)}
    return save(path, values)


def checkpoint(*arguments: Any) -> int:
    return cli.main(["checkpoint", *map(str, arguments)])


def stored(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint directory, by key."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    values = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            values, checkpoint_id=path, no_dist=True, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False)
        )
    return values


def code_map(signed: bool) -> Tensor:
    """The codebook as its authors build it."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=signed)


def decoded(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Values of a tensor whose blocks are 256 consecutive elements, in memory order."""
    order = sorted(range(codes.dim()), key=lambda dim: -codes.stride(dim))
    flat = codes.permute(order).reshape(-1)
    values = code_map(signed)[flat.long()] * absmax[torch.arange(flat.numel()) // 256]
    ordered = values.view([codes.shape[dim] for dim in order])
    return ordered.permute([order.index(dim) for dim in range(codes.dim())])


def oracle(optimizer: Any, parameter: Tensor, key: str) -> Tensor:
    """The values a live optimizer's state stands for."""
    state = optimizer.state[parameter]
    if state[key].dtype == torch.float32:
        return state[key]
    return decoded(state[key], state[key.replace("state", "absmax")], key == "state1")


@pytest.fixture(params=[False, True], ids=["nested", "flattened"])
def flat(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# info


def test_info_tells_of_both_forms_the_same(
    flat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    path = saved(tmp_path / "saved", model, optimizer, flat)
    assert checkpoint("info", path, "--json", "--parameters") == 0
    report = json.loads(capsys.readouterr().out)
    [one] = report["optimizers"]
    assert (one["prefix"], one["flattened"], one["algorithm"]) == ("optimizer", flat, "adam")
    assert one["bits"]["8"] == {"parameters": 3, "elements": 20 * 512 + 33 * 300 + 6 * 10 * 90}
    assert one["bits"]["32"] == {"parameters": 1, "elements": 10}
    assert one["steps"] == [3, 3]
    assert [(group["parameters"], group["lr"]) for group in one["groups"]] == [(2, 1e-2), (2, 5e-3)]
    assert one["groups"][0]["betas"] == [0.9, 0.999]
    assert one["layouts"] == {"grid": 1, "rows": 2}
    assert [row["name"] for row in one["parameter_list"]] == list(SHAPES)
    sizes = [
        value.nbytes
        for values in optimizer.state_dict()["state"].values()
        for part in values.values()
        for value in (part.values() if isinstance(part, dict) else [part])
    ]
    assert one["state_bytes"] == sum(sizes)


def test_info_prints_what_a_manifest_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-3", model, optimizer, extra={"epoch": 2})
    assert checkpoint("info", path, "--parameters") == 0
    out = capsys.readouterr().out
    for fragment in (
        "AdamW8bit",
        f"torch {torch.__version__}",
        "ranks         1",
        "narrow  33x300  8-bit rows",
    ):
        assert fragment in out, out


@pytest.mark.parametrize("prefix", ["optimizer", "optim", "state.optimizer", ""], ids=str)
def test_any_prefix_is_found(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    values = state_dict(model, optimizer)
    for part in reversed(prefix.split(".") if prefix else []):
        values = {part: values}
    assert checkpoint("info", save(tmp_path / "saved", values), "--json") == 0
    [one] = json.loads(capsys.readouterr().out)["optimizers"]
    assert (one["prefix"], one["parameters"], len(one["groups"])) == (prefix, 4, 2)


def test_a_raw_state_dict_and_overrides_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    optimizer = bnb_fsdp.AdamW8bit(model.named_parameters(), overrides={"wide": {"optim_bits": 32}})
    gradients(model, 0)
    optimizer.step()
    path = save(tmp_path / "saved", optimizer.state_dict())
    assert checkpoint("info", path, "--json") == 0
    [one] = json.loads(capsys.readouterr().out)["optimizers"]
    assert one["bits"]["32"]["parameters"] == 2
    assert one["groups"][0]["overrides"] == [{"optim_bits": 32}, {}, {}, {}]
    assert checkpoint("convert", path, tmp_path / "out.pt", "--to", "torch") == 0
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert torch.equal(other.state[model.wide]["exp_avg"], optimizer.state[model.wide]["state1"])


# What is refused


def leave_only(path: Path, *names: str) -> None:
    for item in path.iterdir():
        if item.name not in names:
            item.unlink()


def adamw(path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    gradients(model, 0)
    optimizer.step()
    save(path, {"optimizer": get_optimizer_state_dict(model, optimizer)})


def newer(path: Path) -> None:
    model, optimizer = trained()
    values = state_dict(model, optimizer)
    for group in values["param_groups"]:
        group["format"] = "bnb_fsdp 2 adam 256"
    save(path, {"optimizer": values})


def newer_manifest(path: Path) -> None:
    bnb_fsdp.save_checkpoint(path, *trained())
    manifest = json.loads((path / "bnb_fsdp.json").read_text())
    (path / "bnb_fsdp.json").write_text(json.dumps({**manifest, "version": 9}))


def without_metadata(path: Path) -> None:
    saved(path, *trained())
    (path / ".metadata").unlink()


class _Dangerous:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(os.environ["BNB_FSDP_TEST_TRAP"])),)


def trap(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(_Dangerous()))


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda path: None, ["no such directory"]),
        (lambda path: path.write_text("x"), ["is a file"]),
        (lambda path: path.mkdir(), ["no checkpoint", ".metadata"]),
        (lambda path: saved(path / "optimizer_0", *trained()), ["holds some", "optimizer_0"]),
        (without_metadata, ["partial copy", ".metadata"]),
        (adamw, ["no state of a bnb_fsdp optimizer", "Adam's", "exp_avg_sq"]),
        (lambda path: save(path, get_model_state_dict(Model())), ["no state of a bnb_fsdp", "wide"]),
        (newer, ["newer bnb_fsdp", "format 2"]),
        (newer_manifest, ["format 9", "newer"]),
        (trap, ["damaged", "mkdir"]),
    ],
    ids=["nothing", "a file", "an empty directory", "the folder above", "a partial copy", "torch's AdamW",
         "a model alone", "a newer state", "a newer manifest", "a pickle that runs code"],
)  # fmt: skip
def test_a_directory_without_our_state_is_refused_in_one_line(
    make: Callable[[Path], Any],
    fragments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BNB_FSDP_TEST_TRAP", str(tmp_path / "sprung"))
    path = tmp_path / "given"
    make(path)
    capsys.readouterr()
    for action in (["info", path], ["convert", path, tmp_path / "out", "--to", "torch"]):
        assert checkpoint(*action) == 1
        error = capsys.readouterr().err
        assert all(fragment in error for fragment in fragments), error
        assert error.count("\n") == 1
    assert checkpoint("verify", path) == 1
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "sprung").exists()


def test_what_an_interrupted_save_left_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / ".step-3.partial-00ff", *trained())
    assert checkpoint("info", path) == 1
    assert "interrupted save" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "fragments"),
    [
        (["--to", "bitsandbytes", "out"], 1, ["ends in .pt"]),
        (["--to", "bnb_fsdp", "out.pt"], 1, ["without .pt"]),
        (["--to", "torch", "given"], 1, ["given exists"]),
        (["--to", "torch", "no/where"], 1, ["no such directory"]),
        (["--to", "bnb_fsdp", "out", "--split", "layers.*=1x2"], 1, ["'layers.*'", "none of 4", "wide"]),
        (["--to", "bnb_fsdp", "out", "--split", "small=1x2"], 1, ["small", "(10,)"]),
        (["--to", "bnb_fsdp", "out", "--split", "wide=2"], 2, ["PATTERN=DIMxN"]),
        (["--to", "torch", "out", "--split", "wide=1x2"], 2, ["--split", "bnb_fsdp"]),
        (["--to", "onnx", "out"], 2, ["onnx", "bitsandbytes"]),
        (["out"], 2, ["--to"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0][:1] in "-o" else "",
)
def test_a_conversion_that_cannot_be_is_refused(
    arguments: list[str],
    status: int,
    fragments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "given", *trained())
    capsys.readouterr()
    try:
        found = checkpoint("convert", "given", *arguments)
    except SystemExit as ended:
        found = ended.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert found == status
    assert all(fragment in error for fragment in fragments), error
    assert [item.name for item in tmp_path.iterdir()] == ["given"]


def test_an_algorithm_without_counterpart_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained("lion")
    values = state_dict(model, optimizer)
    for entry in values["state"].values():
        for part in entry.values():
            for name in list(part) if isinstance(part, dict) else ():
                if name.startswith("lion"):
                    part[name.replace("lion", "ademamix")] = part.pop(name)
    path = save(tmp_path / "saved", {"optimizer": values})
    assert checkpoint("convert", path, tmp_path / "out", "--to", "torch") == 1
    assert "no counterpart of 'ademamix'" in capsys.readouterr().err


# verify


def test_verify_finds_what_was_saved_well(
    flat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    assert checkpoint("verify", saved(tmp_path / "plain", model, optimizer, flat)) == 0
    out = capsys.readouterr().out
    assert "there are no checksums" in out
    assert out.splitlines()[-1].endswith("parameters with state 4, not finite 0, problems 0")
    assert checkpoint("verify", bnb_fsdp.save_checkpoint(tmp_path / "step-3", model, optimizer)) == 0
    assert "files with checksums 3," in capsys.readouterr().out


def flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size - 9000)


def edit_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return edit


CODES = "optimizer.state.narrow.state1.adam_8bit_256"


def boxes(*given: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Path], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[CODES].chunks = [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in given
        ]

    return edit_metadata(change)


def other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata[CODES].properties.dtype = torch.int8


def forget(metadata: Any) -> None:
    metadata.storage_data = {key: info for key, info in metadata.storage_data.items() if key.fqn != CODES}


@pytest.mark.parametrize(
    ("damage", "with_manifest", "fragments"),
    [
        (flip, True, ["__0_0.distcp", "checksum"]),
        (truncate, True, ["__0_0.distcp", "bytes instead of"]),
        (truncate, False, ["__0_0.distcp", "were written"]),
        (lambda path: (path / "__0_0.distcp").unlink(), False, ["__0_0.distcp is missing"]),
        (lambda path: (path / "extra_0.pt").unlink(), True, ["extra_0.pt is missing"]),
        (boxes(((0, 0), (20, 300))), False, [CODES, "6000 of 9900 elements"]),
        (boxes(((0, 0), (33, 300)), ((10, 0), (3, 300))), False, [CODES, "overlap", "(10, 0)"]),
        (boxes(((1, 0), (33, 300))), False, [CODES, "outside of (33, 300)"]),
        (edit_metadata(other_dtype), False, [CODES, "torch.uint8", "torch.int8"]),
        (edit_metadata(forget), False, [CODES, "does not tell where"]),
    ],
    ids=["a flipped bit", "a truncated file, manifest", "a truncated file", "a missing file", "missing extra",
         "a part missing", "parts overlap", "a part outside", "another dtype", "stored nowhere"],
)  # fmt: skip
def test_verify_names_a_damaged_file_or_key(
    damage: Callable[[Path], None],
    with_manifest: bool,
    fragments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = trained()
    path = tmp_path / "saved"
    if with_manifest:
        bnb_fsdp.save_checkpoint(path, model, optimizer)
    else:
        saved(path, model, optimizer)
    damage(path)
    assert checkpoint("verify", path) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert any(all(fragment in line for fragment in fragments) for line in problems), problems


def info_of(metadata: Any) -> Any:
    return next(info for key, info in metadata.storage_data.items() if key.fqn == CODES)


def far_away(metadata: Any) -> None:
    info_of(metadata).offset = 1 << 70


def before_the_start(metadata: Any) -> None:
    info_of(metadata).offset = -5


def elsewhere(metadata: Any) -> None:
    info_of(metadata).relative_path = "../saved/__0_0.distcp"


def a_number_as_file(metadata: Any) -> None:
    info_of(metadata).relative_path = 7


def no_size(metadata: Any) -> None:
    metadata.state_dict_metadata[CODES].size = ("a", None)


def no_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata[CODES].properties.dtype = "uint8"


def no_entry(metadata: Any) -> None:
    metadata.state_dict_metadata[CODES] = 5


def far_group(metadata: Any) -> None:
    metadata.planner_data["optimizer.param_groups.0.lr"] = ("optimizer", "param_groups", 0, 1 << 40, "lr")


@pytest.mark.parametrize(
    "change",
    [far_away, before_the_start, elsewhere, a_number_as_file, no_size, no_dtype, no_entry, far_group],
    ids=lambda change: change.__name__,
)
def test_a_description_of_nonsense_is_refused_in_one_line(
    change: Callable[[Any], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "saved", *trained())
    edit_metadata(change)(path)
    capsys.readouterr()
    for action in (["info", path], ["verify", path], ["convert", path, tmp_path / "out", "--to", "torch"]):
        assert checkpoint(*action) == 1
        error = capsys.readouterr().err
        assert ".metadata is damaged: " in error and error.count("\n") == 1


def test_a_description_that_takes_all_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bnb_fsdp.checkpoint import files

    def exhausted(*args: Any) -> Any:
        raise MemoryError

    path = saved(tmp_path / "saved", *trained())
    monkeypatch.setattr(files._Unpickler, "find_class", exhausted)
    assert checkpoint("info", path) == 1
    assert ".metadata is damaged: MemoryError" in capsys.readouterr().err


class _ByGetattr:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


class _Described:
    """Pickled as TensorProperties of uint8 with this memory format."""

    def __init__(self, memory_format: Any) -> None:
        self.memory_format = memory_format

    def __reduce__(self) -> Any:
        return TensorProperties, (), (torch.uint8, torch.strided, False, self.memory_format, False)


def test_a_description_by_another_python_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python 3.11.0 to 3.11.3 pickle members of enums as calls of getattr, which else must not be called."""
    path = saved(tmp_path / "saved", *trained())

    def describe(*arguments: Any) -> None:
        def change(metadata: Any) -> None:
            metadata.state_dict_metadata[CODES].properties = _Described(_ByGetattr(*arguments))

        edit_metadata(change)(path)
        assert b"getattr" in (path / ".metadata").read_bytes()

    describe(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    assert checkpoint("verify", path) == 0
    describe(TensorProperties, "create_from_tensor")
    assert checkpoint("verify", path) == 1
    assert "'create_from_tensor' of something that is no enum" in capsys.readouterr().err


def test_verify_stops_where_the_description_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-3", *trained())
    edit_metadata(other_dtype)(path)
    assert checkpoint("verify", path) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 2
    assert ".metadata" in problems[0] and "nothing else can be checked" in problems[1]


def test_verify_misses_the_manifest_of_save_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-3", *trained())
    (path / "bnb_fsdp.json").unlink()
    assert checkpoint("verify", path) == 1
    assert "the manifest of bnb_fsdp.save_checkpoint, is missing" in capsys.readouterr().out


def test_what_holds_no_state_by_its_manifest_is_shown_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-3", *trained())
    assert checkpoint("convert", path, tmp_path / "for-torch", "--to", "torch") == 0
    frozen = Model().requires_grad_(False)
    bnb_fsdp.save_checkpoint(tmp_path / "frozen", frozen, bnb_fsdp.AdamW8bit(frozen.parameters()))
    for name, owner in (("for-torch", "torch.optim.AdamW"), ("frozen", "AdamW8bit")):
        capsys.readouterr()
        assert checkpoint("info", tmp_path / name) == 0
        assert f"no state of bnb_fsdp: {owner}" in capsys.readouterr().out
        assert checkpoint("verify", tmp_path / name) == 0
        assert "parameters with state 0, not finite 0, problems 0" in capsys.readouterr().out
        for out in ("out", "out.pt"):
            assert checkpoint("convert", tmp_path / name, tmp_path / out, "--to", "torch") == 1
            assert "holds no state of a bnb_fsdp optimizer" in capsys.readouterr().err
        flip(tmp_path / name)
        assert checkpoint("verify", tmp_path / name) == 1


def test_hyperparameters_that_are_alike_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flattened state dict has those of every parameter."""
    counts = []
    for number in (4, 40):
        model = Model({f"p{index}": (10,) for index in range(number)})
        optimizer = bnb_fsdp.AdamW8bit(model.parameters())
        gradients(model, 0)
        optimizer.step()
        path = saved(tmp_path / f"saved{number}", model, optimizer, flat=True)
        load, calls = torch.load, []
        monkeypatch.setattr(
            torch, "load", lambda *a, load=load, calls=calls, **k: calls.append(1) or load(*a, **k)
        )
        assert checkpoint("verify", path) == 0
        monkeypatch.undo()
        counts.append(len(calls) - 7 * number)  # the model, step twice, two states; with a margin
    assert counts[1] <= counts[0]


def spoil_phase(state: dict[str, Any]) -> None:
    state["narrow"]["absmax1"]["phase"][7] += 4


def spoil_shared_scale(state: dict[str, Any]) -> None:
    state["narrow"]["absmax2"]["rows"][8, 0] *= 2


def spoil_step(state: dict[str, Any]) -> None:
    state["narrow"]["step"].fill_(2.5)


def spoil_shape(state: dict[str, Any]) -> None:
    state["wide"]["absmax2"]["grid"] = state["wide"]["absmax2"]["grid"][:-1]


def spoil_keys(state: dict[str, Any]) -> None:
    del state["narrow"]["absmax2"]


@pytest.mark.parametrize(
    ("spoil", "fragments"),
    [
        (spoil_phase, ["narrow.absmax1.phase", "2 rows start"]),
        (spoil_shared_scale, ["narrow.absmax2.rows", "1 rows have another scale"]),
        (spoil_step, ["narrow.step", "2.5"]),
        (spoil_shape, ["wide.absmax2.grid", "(19, 2)", "(20, 2)"]),
        (spoil_keys, ["narrow", "absmax2.rows is missing"]),
    ],
    ids=["a phase", "a scale two rows share", "a step", "a shape", "a missing tensor"],
)
def test_verify_names_state_that_contradicts_itself(
    spoil: Callable[[dict[str, Any]], None],
    fragments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = trained()
    values = state_dict(model, optimizer)
    spoil(values["state"])
    assert checkpoint("verify", save(tmp_path / "saved", {"optimizer": values})) == 1
    out = capsys.readouterr().out
    assert all(fragment in out for fragment in fragments), out
    assert out.strip().endswith("problems 1")


def test_scales_that_are_not_finite_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    optimizer.state[model.wide]["absmax1"][3:5] = math.nan
    assert checkpoint("verify", saved(tmp_path / "saved", model, optimizer)) == 0
    out = capsys.readouterr().out
    assert "wide.absmax1.grid: 2 elements are NaN or infinite" in out
    assert "not finite 2, problems 0" in out


# convert --to torch


@pytest.mark.parametrize("algorithm", TORCH)
def test_torch_loads_the_file_and_goes_on(algorithm: str, tmp_path: Path) -> None:
    model, optimizer = trained(algorithm)
    path = saved(tmp_path / "saved", model, optimizer)
    assert checkpoint("convert", path, tmp_path / "out.pt", "--to", "torch") == 0
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None
    name, states = TORCH[algorithm]
    parameters = list(model.parameters())
    other = getattr(torch.optim, name)([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=1.0)
    keys = [set(group) for group in other.param_groups]
    other.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    assert [set(group) for group in other.param_groups] == keys
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        for key, theirs in states.items():
            assert torch.equal(other.state[parameter][theirs], oracle(optimizer, parameter, key))
        assert float(other.state[parameter].get("step", 3)) == 3
    before = [parameter.detach().clone() for parameter in parameters]
    gradients(model, 9)
    other.step()
    after = [parameter.detach().clone() for parameter in parameters]
    for parameter, value in zip(parameters, before):
        parameter.data.copy_(value)
    optimizer.step()
    for parameter, theirs in zip(parameters, after):
        torch.testing.assert_close(parameter.detach(), theirs, rtol=1e-5, atol=1e-6)


def test_lion_goes_on_in_lion_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    model, optimizer = trained("lion")
    path = saved(tmp_path / "saved", model, optimizer)
    assert checkpoint("convert", path, tmp_path / "out.pt", "--to", "torch") == 0
    assert "lion_pytorch.Lion" in capsys.readouterr().out
    parameters = list(model.parameters())
    other = lion_pytorch.Lion([{"params": parameters[:2]}, {"params": parameters[2:]}])
    other.load_state_dict(torch.load(tmp_path / "out.pt"))
    for parameter in parameters:
        assert torch.equal(other.state[parameter]["exp_avg"], oracle(optimizer, parameter, "state1"))


def test_torch_loads_the_directory_by_name(flat: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    path = saved(tmp_path / "saved", model, optimizer, flat)
    assert checkpoint("convert", path, tmp_path / "out", "--to", "torch") == 0
    parameters = list(model.parameters())
    model.zero_grad()  # with gradients, torch takes a fresh optimizer for one without state
    other = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=torch.tensor(1.0))
    values = {"model": get_model_state_dict(model), "optimizer": state_dict(model, other, flat)}
    own = {name: value.clone() for name, value in values["model"].items()}
    for value in values["model"].values():
        value.data.fill_(7)
    load(values, tmp_path / "out")
    set_optimizer_state_dict(
        model, other, values["optimizer"], options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    assert all(torch.equal(value, own[name]) for name, value in values["model"].items())
    assert [float(group["lr"]) for group in other.param_groups] == [1e-2, 5e-3]
    for parameter in parameters:
        assert torch.equal(other.state[parameter]["exp_avg_sq"], oracle(optimizer, parameter, "state2"))
        assert torch.equal(other.state[parameter]["exp_avg"], oracle(optimizer, parameter, "state1"))
    leftover = [key for key in stored(tmp_path / "out") if "8bit" in key or "absmax" in key]
    assert leftover == []


# convert --to bitsandbytes


@pytest.mark.parametrize("algorithm", CLASSES)
def test_bitsandbytes_loads_the_file_and_goes_on(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    model, optimizer = trained(algorithm)
    path = saved(tmp_path / "saved", model, optimizer)
    capsys.readouterr()
    assert checkpoint("convert", path, tmp_path / "out.pt", "--to", "bitsandbytes") == 0
    out = capsys.readouterr().out
    name, defaults = CLASSES[algorithm]
    assert ", 0 requantised" in out and f"bitsandbytes.optim.{name}" in out
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None
    parameters = list(model.parameters())
    other = getattr(optim, name)([{"params": parameters[:2]}, {"params": parameters[2:]}], **defaults)
    keys = [set(group) for group in other.param_groups]
    other.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    assert [set(group) for group in other.param_groups] == keys
    for parameter in parameters:
        ours, theirs = optimizer.state[parameter], other.state[parameter]
        assert theirs["step"] == 3 and isinstance(theirs["step"], int)
        for key in ("state1", "state2", "absmax1", "absmax2"):
            assert (key in ours) == (key in theirs)
            assert key not in ours or torch.equal(ours[key], theirs[key])
        for number in (1, 2):
            if f"absmax{number}" in ours:
                assert torch.equal(theirs[f"qmap{number}"], code_map(number == 1))
    before = [parameter.detach().clone() for parameter in parameters]
    gradients(model, 9)
    other.step()
    after = [parameter.detach().clone() for parameter in parameters]
    for parameter, value in zip(parameters, before):
        parameter.data.copy_(value)
    optimizer.step()
    for parameter, theirs in zip(parameters, after):
        torch.testing.assert_close(parameter.detach(), theirs, rtol=1e-5, atol=1e-6)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        value = torch.randn(30, 20, 3, 3, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(value.to(memory_format=torch.channels_last))


def test_other_memory_orders_are_requantised_for_bitsandbytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained(model=ChannelsLast())
    path = saved(tmp_path / "saved", model, optimizer)
    capsys.readouterr()
    assert checkpoint("convert", path, tmp_path / "out.pt", "--to", "bitsandbytes") == 0
    blocks = 2 * math.ceil(5400 / 256)
    assert (
        f"of {blocks} blocks converted, 0 kept bit for bit, {blocks} requantised" in capsys.readouterr().out
    )
    state = torch.load(tmp_path / "out.pt")["state"][0]["__bnb_optimizer_quant_state__"]
    check_close(
        decoded(state["state1"], state["absmax1"], True),
        oracle(optimizer, model.weight, "state1"),
        state["absmax1"].repeat_interleave(256)[:5400].view(30, 20, 3, 3),
    )
    assert checkpoint("convert", path, tmp_path / "torch.pt", "--to", "torch") == 0
    theirs = torch.load(tmp_path / "torch.pt")["state"][0]["exp_avg"]
    assert theirs.stride() == model.weight.stride()
    assert torch.equal(theirs, oracle(optimizer, model.weight, "state1"))


@pytest.mark.parametrize("to", ["bnb_fsdp", "torch", "bitsandbytes"])
def test_what_is_damaged_gets_no_new_checksums(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-3", *trained())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    info = next(info for key, info in metadata.storage_data.items() if key.fqn == "model.wide")
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[info.offset + info.length // 2] ^= 0x40  # within the values: all else stays readable
    (path / "__0_0.distcp").write_bytes(data)
    capsys.readouterr()
    out = tmp_path / ("out.pt" if to == "bitsandbytes" else "out")
    assert checkpoint("convert", path, out, "--to", to) == 1
    assert "__0_0.distcp was changed since it was saved: its checksum differs" in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["step-3"]


def check_close(found: Tensor, wanted: Tensor, scale: Tensor | float) -> None:
    """Within half a gap between codes."""
    assert float(((found - wanted).abs() - HALF_GAP * scale).max()) <= 1e-12


# convert --to bnb_fsdp


def test_state_that_rows_can_load_is_copied_bit_for_bit(
    flat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    path = saved(tmp_path / "saved", model, optimizer, flat)
    capsys.readouterr()
    assert checkpoint("convert", path, tmp_path / "out", "--to", "bnb_fsdp") == 0
    assert "copied bit for bit" in capsys.readouterr().out
    before, after = stored(path), stored(tmp_path / "out")
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    fresh = bnb_fsdp.AdamW8bit(
        [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}]
    )
    values = {"optimizer": state_dict(model, fresh, flat)}
    load(values, tmp_path / "out")
    set_optimizer_state_dict(
        model, fresh, values["optimizer"], options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    for parameter in model.parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, fresh.state[parameter][key])


def test_a_manifest_is_written_and_extra_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-3", model, optimizer, extra={"epoch": 2})
    split = ["--split", "narrow=1x2"]
    assert checkpoint("convert", path, tmp_path / "cut", "--to", "bnb_fsdp", *split) == 0
    assert checkpoint("verify", tmp_path / "cut") == 0
    assert "files with checksums 3," in capsys.readouterr().out
    assert checkpoint("convert", tmp_path / "cut", tmp_path / "back", "--to", "bnb_fsdp") == 0
    parameters = list(model.parameters())
    fresh = bnb_fsdp.AdamW8bit([{"params": parameters[:2]}, {"params": parameters[2:]}])
    assert bnb_fsdp.load_checkpoint(tmp_path / "back", model, fresh) == {"epoch": 2}
    for parameter in (model.wide, model.small, model.deep):
        assert torch.equal(fresh.state[parameter]["state1"], optimizer.state[parameter]["state1"])
    scale = float(optimizer.state[model.narrow]["absmax1"].max())
    check_close(oracle(fresh, model.narrow, "state1"), oracle(optimizer, model.narrow, "state1"), 2 * scale)
    assert checkpoint("convert", path, tmp_path / "torch", "--to", "torch") == 0
    assert "torch.optim.AdamW" in (tmp_path / "torch" / "bnb_fsdp.json").read_text()
    with pytest.raises(bnb_fsdp.CheckpointError, match=r"torch\.optim\.AdamW"):
        bnb_fsdp.load_checkpoint(tmp_path / "torch", model, fresh)


Cut = tuple[int, int]


def cut(sizes: tuple[int, ...], cuts: list[Cut]) -> Iterator[tuple[slice, ...]]:
    """The parts of a tensor as a mesh of these cuts would have them, the first cut outermost."""
    if not cuts:
        yield tuple(slice(0, size) for size in sizes)
        return
    (dim, parts), *others = cuts
    length = math.ceil(sizes[dim] / parts)
    for part in range(parts):
        span = range(sizes[dim])[part * length : (part + 1) * length]
        for box in cut((*sizes[:dim], len(span), *sizes[dim + 1 :]), others):
            start = part * length
            moved = slice(box[dim].start + start, box[dim].stop + start)
            yield (*box[:dim], moved, *box[dim + 1 :])


def by_hand(
    shape: tuple[int, ...], cuts: list[Cut], rows: list[int]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of one parameter on ranks that cut it by ``cuts`` and its rows into parts of these sizes: what a
    checkpoint of it holds, and the values it stands for."""
    generator = torch.Generator().manual_seed(3)
    width = math.prod(shape[1:])
    largest = max(math.prod(len(range(10**6)[part]) for part in box[1:]) for box in cut(shape, cuts))
    even = all(shape[dim] % parts == 0 for dim, parts in cuts)
    step = math.gcd(largest, 256) if even else 1
    count = math.ceil((256 - step + largest) / 256)
    boxes = list(cut(shape, cuts))
    name = "_".join(["rows", *(f"dim{dim}x{parts}" for dim, parts in cuts)])
    entry: dict[str, Any] = {"step": torch.tensor(5.0)}
    values = {}
    phase = torch.zeros(shape[0], len(boxes), dtype=torch.uint8)
    for key, signed in (("state1", True), ("state2", False)):
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.zeros(shape[0], len(boxes) * count)
        value = torch.empty(shape)
        for piece, box in enumerate(boxes):
            first = 0
            for size in rows:
                index = (slice(first, first + size), *box[1:])
                local = codes[index]
                own = torch.rand(math.ceil(local.numel() / 256), generator=generator) + 0.1
                if local.numel():
                    value[index] = decoded(local.contiguous(), own, signed)
                length = local.numel() // max(size, 1)
                for row in range(size):
                    start, stop = row * length, (row + 1) * length
                    touched = own[start // 256 : math.ceil(stop / 256)] if length else own[:0]
                    scales[first + row, piece * count : piece * count + len(touched)] = touched
                    phase[first + row, piece] = start % 256
                first += size
        entry[key] = {"adam_8bit_256": codes}
        entry[key.replace("state", "absmax")] = {name: scales}
        values[key] = value
    entry["absmax1"][name.replace("rows", "phase")] = phase
    assert width == math.prod(shape) // shape[0]
    return entry, values


@pytest.mark.parametrize(
    ("shape", "cuts", "rows"),
    [
        ((24, 300), [(1, 2)], [24]),
        ((24, 300), [(1, 2)], [9, 9, 6]),
        ((24, 301), [(1, 2)], [12, 12]),
        ((24, 10, 60), [(1, 2)], [24]),
        ((24, 10, 60), [(2, 3)], [13, 11]),
        ((24, 10, 60), [(2, 3), (1, 2)], [12, 12]),
        ((24, 11, 61), [(1, 2), (2, 3)], [24]),
        ((24, 3, 90), [(1, 2)], [24]),
    ],
    ids=["two parts", "two parts, three ranks of rows", "uneven parts", "a middle dimension", "the last dimension",
         "two dimensions", "two dimensions, uneven", "more parts than even ones"],
)  # fmt: skip
def test_parts_cut_along_inner_dimensions_are_put_together(
    shape: tuple[int, ...],
    cuts: list[Cut],
    rows: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry, values = by_hand(shape, cuts, rows)
    model = Model({"weight": shape})
    optimizer = bnb_fsdp.AdamW8bit(model.parameters())
    given = state_dict(model, optimizer)
    given["state"]["weight"] = entry
    path = save(tmp_path / "saved", {"optimizer": given})
    assert checkpoint("verify", path) == 0, capsys.readouterr().out
    assert checkpoint("convert", path, tmp_path / "out.pt", "--to", "torch") == 0
    found = torch.load(tmp_path / "out.pt")["state"][0]
    assert torch.equal(found["exp_avg"], values["state1"]) and torch.equal(
        found["exp_avg_sq"], values["state2"]
    )
    assert checkpoint("convert", path, tmp_path / "out", "--to", "bnb_fsdp") == 0
    assert checkpoint("verify", tmp_path / "out") == 0
    loaded = {"optimizer": state_dict(model, optimizer)}
    load(loaded, tmp_path / "out")
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    assert optimizer.load_report.requantized == 0
    for key, wanted in values.items():
        absmax = optimizer.state[model.weight][key.replace("state", "absmax")]
        scale = absmax.repeat_interleave(256)[: wanted.numel()].view(shape)
        check_close(oracle(optimizer, model.weight, key), wanted, scale)
    # And cut again: each part has blocks of its own, which start with its first row.
    arguments = [text for dim, parts in cuts for text in ("--split", f"weight={dim}x{parts}")]
    assert checkpoint("convert", tmp_path / "out", tmp_path / "again", "--to", "bnb_fsdp", *arguments) == 0
    assert checkpoint("verify", tmp_path / "again") == 0
    again, ours = stored(tmp_path / "again"), by_hand(shape, cuts, [shape[0]])[0]
    for key in ("absmax1", "absmax2"):
        for name, tensor in ours[key].items():
            assert again[f"optimizer.state.weight.{key}.{name}"].shape == tensor.shape
            if name.startswith("phase"):
                assert torch.equal(again[f"optimizer.state.weight.{key}.{name}"], tensor)
    assert checkpoint("convert", tmp_path / "again", tmp_path / "again.pt", "--to", "torch") == 0
    found = torch.load(tmp_path / "again.pt")["state"][0]["exp_avg"]
    scale = float(optimizer.state[model.weight]["absmax1"].max())
    check_close(found, values["state1"], 2 * scale)


def test_blocks_of_one_scale_are_kept_whatever_the_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    for parameter in model.parameters():
        for number in (1, 2):
            if f"absmax{number}" in optimizer.state[parameter]:
                optimizer.state[parameter][f"absmax{number}"].fill_(0.3)
    path = saved(tmp_path / "saved", model, optimizer)
    capsys.readouterr()
    arguments = ["--split", "narrow=1x2", "--split", "deep=1x5", "--split", "wide=1x2"]
    assert checkpoint("convert", path, tmp_path / "out", "--to", "bnb_fsdp", *arguments) == 0
    assert ", 0 requantised" in capsys.readouterr().out
    found = stored(tmp_path / "out")
    for name, key in (("narrow", "state1"), ("deep", "state2"), ("wide", "state1")):
        codes = found[f"optimizer.state.{name}.{key}.adam_8bit_256"]
        assert torch.equal(codes, optimizer.state[getattr(model, name)][key])
    assert "optimizer.state.wide.absmax1.grid" in found
    assert "optimizer.state.deep.absmax2.rows_dim1x5" in found


# Ranks

TP_SHAPES = {"weight": (24, 300), "rows": (33, 300)}


def _tensor_parallel(given: str, cut_saved: str, row_saved: str) -> Any:
    """On two ranks: load the checkpoint cut for them, step, save it; save one cut by rows."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def build(dim: int) -> tuple[nn.Module, Any]:
        model = Model(TP_SHAPES)
        for name, placement in (("weight", Shard(dim)), ("rows", Shard(0))):
            whole = getattr(model, name).detach()
            setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh, [placement])))
        return model, bnb_fsdp.AdamW8bit(model.parameters())

    model, optimizer = build(1)
    values = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(values, checkpoint_id=given)
    set_optimizer_state_dict(model, optimizer, values["optimizer"])
    state = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    report = optimizer.load_report
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=cut_saved)
    by_rows, other = build(0)
    for name, parameter in by_rows.named_parameters():
        generator = torch.Generator().manual_seed(dist.get_rank())
        parameter.grad = torch.distributed.tensor.DTensor.from_local(
            torch.randn(parameter.to_local().shape, generator=generator), mesh, parameter.placements,
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        assert name in TP_SHAPES
    other.step()
    dcp.save({"optimizer": get_optimizer_state_dict(by_rows, other)}, checkpoint_id=row_saved)
    rows = {name: other.state[parameter] for name, parameter in by_rows.named_parameters()}
    return state, report, {name: dict(values) for name, values in rows.items()}


def test_two_ranks_load_what_was_cut_for_them_and_back(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests_distributed"))
    try:
        import ranks
    finally:
        del sys.path[0]
    model, optimizer = trained(model=Model(TP_SHAPES))
    # One group, as the ranks have.
    whole = bnb_fsdp.AdamW8bit(model.parameters())
    for parameter in model.parameters():
        whole.state[parameter] = optimizer.state[parameter]
    path = saved(tmp_path / "saved", model, whole)
    assert checkpoint("convert", path, tmp_path / "cut", "--to", "bnb_fsdp", "--split", "weight=1x2") == 0
    assert checkpoint("convert", tmp_path / "cut", tmp_path / "cut.pt", "--to", "torch") == 0
    wanted = torch.load(tmp_path / "cut.pt")["state"]
    places = [str(tmp_path / name) for name in ("cut", "cut2", "rows2")]
    results = ranks.run(2, _tensor_parallel, *places)
    for rank, (state, report, _) in enumerate(results):
        half = wanted[0]["exp_avg"][:, rank * 150 : (rank + 1) * 150]
        assert torch.equal(decoded(state["state1"], state["absmax1"], True), half)
        assert report.requantized <= 2 * math.ceil(16 * 300 / 256)  # of the rows of the other parameter
    for name in ("cut2", "rows2"):
        assert checkpoint("verify", tmp_path / name) == 0
        assert checkpoint("convert", tmp_path / name, tmp_path / f"{name}.pt", "--to", "torch") == 0
        assert checkpoint("convert", tmp_path / name, tmp_path / f"{name}-out", "--to", "bnb_fsdp") == 0
    again = torch.load(tmp_path / "cut2.pt")["state"]
    assert torch.equal(again[0]["exp_avg"], wanted[0]["exp_avg"])
    rows = torch.load(tmp_path / "rows2.pt")["state"]
    for number, name in enumerate(TP_SHAPES):
        parts = [result[2][name] for result in results]
        expected = torch.cat([decoded(part["state2"], part["absmax2"], False) for part in parts])
        assert torch.equal(rows[number]["exp_avg_sq"], expected)
    assert stored(tmp_path / "rows2-out").keys() == stored(tmp_path / "rows2").keys()
    assert checkpoint("convert", tmp_path / "rows2", tmp_path / "bnb.pt", "--to", "bitsandbytes") == 0
    theirs = torch.load(tmp_path / "bnb.pt")["state"][1]["__bnb_optimizer_quant_state__"]
    scale = theirs["absmax2"].repeat_interleave(256)[: 33 * 300].view(33, 300)
    check_close(decoded(theirs["state2"], theirs["absmax2"], False), rows[1]["exp_avg_sq"], scale)
    assert torch.equal(theirs["state2"][:17], results[0][2]["rows"]["state2"])  # the first rank's blocks stay


# Memory, interruption, progress

_MEASURE = """\
import sys
from bnb_fsdp import cli
status = cli.main(["checkpoint", *sys.argv[1:]])
print(*[line for line in open("/proc/self/status") if line.startswith("VmHWM")])
sys.exit(status)
"""


def peak(*arguments: Any) -> float:
    """Most memory (MB) that a process of its own had."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MEASURE, *map(str, arguments)],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return int(finished.stdout.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.parametrize(
    "target", [["out", "--to", "torch"], ["out.pt", "--to", "torch"]], ids=["directory", "file"]
)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_bounded_by_the_largest_tensor(target: list[str], tmp_path: Path) -> None:
    one = 2048 * 2000 * 4 / 1e6  # of 16 tensors in 8 parameters: 262 MB in all

    def measured(count: int) -> float:
        model = Model({f"p{index}": (2048, 2000) for index in range(count)})
        optimizer = bnb_fsdp.AdamW8bit(model.parameters())
        bool(optimizer.state)  # makes it
        path = save(tmp_path / f"saved{count}", {"optimizer": state_dict(model, optimizer)})
        return peak("convert", path, tmp_path / f"{count}{target[0]}", *target[1:])

    assert measured(8) - measured(1) < 2.5 * one


@pytest.mark.parametrize("out", ["out", "out.pt"])
def test_an_interrupted_conversion_leaves_nothing(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "saved", *trained())
    seen = []

    def interrupt(*arguments: Any) -> Any:
        seen.append([item.name for item in tmp_path.iterdir()])
        if len(seen) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    original = conversion.values
    monkeypatch.setattr(conversion, "values", interrupt)
    assert checkpoint("convert", path, tmp_path / out, "--to", "torch") == 130
    assert any(f".{out}.partial-" in name for name in seen[-1])
    assert [item.name for item in tmp_path.iterdir()] == ["saved"]
    assert "interrupted" in capsys.readouterr().err


def test_progress_is_a_bar_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "saved", *trained())
    capsys.readouterr()
    assert checkpoint("convert", path, tmp_path / "quiet", "--to", "torch") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("bnb_fsdp.checkpoint.commands.time.monotonic", iter(range(10000)).__next__)
    assert checkpoint("convert", path, tmp_path / "shown", "--to", "torch") == 0
    error = capsys.readouterr().err
    assert "\rconverting saved [" in error and "100%" in error and error.endswith("s\n")
