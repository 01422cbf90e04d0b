"""The Trainer plug-in in one process: registration, arguments, and a training run."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import bnb_fsdp
from bnb_fsdp.integrations import transformers as plugin

transformers = pytest.importorskip("transformers")
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402
from transformers.training_args import OptimizerNames  # noqa: E402

PLACE = str(Path(bnb_fsdp.__file__).parents[1])

IMPORT_ORDERS = {
    "before": "import bnb_fsdp; assert 'transformers' not in sys.modules; import transformers",
    "after": "from transformers import Trainer, TrainingArguments; import bnb_fsdp",
    "after-a-lazy-import": "import transformers; import bnb_fsdp",
}

CHECK = """
from transformers import Trainer, TrainingArguments
args = TrainingArguments("out", optim="bnb_fsdp_adamw8bit", use_cpu=True)
method = Trainer.get_optimizer_cls_and_kwargs
assert method(args)[0] is bnb_fsdp.AdamW8bit
bnb_fsdp._install_integrations()
assert Trainer.get_optimizer_cls_and_kwargs is method
assert Trainer.get_optimizer_cls_and_kwargs(args)[0] is bnb_fsdp.AdamW8bit
"""


def run_python(code: str, tmp_path: Path, *paths: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a fresh interpreter, with ``paths`` before all others."""
    start = f"import sys, warnings; sys.path[:0] = {[*paths, PLACE]!r}\n"
    result = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.parametrize("order", [pytest.param(code, id=name) for name, code in IMPORT_ORDERS.items()])
def test_import_order(order: str, tmp_path: Path) -> None:
    run_python(f"warnings.filterwarnings('error', message='bnb_fsdp')\n{order}\n{CHECK}", tmp_path)


def test_wired_through_the_table_where_there_is_one() -> None:
    """Without this, a renamed table would go unnoticed: the fallback hides it."""
    table = getattr(transformers.trainer, "_OPTIMIZER_HANDLERS", None)
    wrapped = hasattr(Trainer.get_optimizer_cls_and_kwargs, "_bnb_fsdp")
    if int(transformers.__version__.split(".")[0]) >= 5:
        assert table is not None and set(bnb_fsdp.optimizer_names()) <= set(table) and not wrapped
    else:
        assert table is None and wrapped


# Future transformers: made-up modules of the names that the hooks wait for.

FAKE_ENUM = "import enum\nclass OptimizerNames(str, enum.Enum):\n    SGD = 'sgd'\n"
FAKE_TRAINER = """
class Trainer:
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return "theirs"
"""
IMPORT_FAKE = """
import bnb_fsdp
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import transformers.training_args, transformers.trainer
print([str(w.message) for w in caught if w.category is RuntimeWarning])
"""


def fake_transformers(folder: Path, **sources: str) -> str:
    package = folder / "fake" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source)
    return str(package.parent)


def test_renamed_table_falls_back_to_the_trainer_method(tmp_path: Path) -> None:
    fake = fake_transformers(tmp_path, training_args=FAKE_ENUM, trainer=FAKE_TRAINER)
    code = """
import types
args = types.SimpleNamespace(
    optim="bnb_fsdp_lion8bit", optim_args=None, learning_rate=1.0, adam_beta1=0.9, adam_beta2=0.5)
get = transformers.trainer.Trainer.get_optimizer_cls_and_kwargs
print(get(args)[0].__name__, get(types.SimpleNamespace(optim="sgd")))
"""
    assert run_python(IMPORT_FAKE + code, tmp_path, fake).stdout.split("\n")[:2] == ["[]", "Lion8bit theirs"]


@pytest.mark.parametrize(
    ("sources", "where"),
    [
        pytest.param({"training_args": "", "trainer": FAKE_TRAINER}, "training_args", id="no-enum"),
        pytest.param({"training_args": FAKE_ENUM, "trainer": ""}, "trainer", id="no-Trainer"),
    ],
)
def test_unknown_transformers_warns_and_imports(tmp_path: Path, sources: dict[str, str], where: str) -> None:
    fake = fake_transformers(tmp_path, **sources)
    output = run_python(IMPORT_FAKE, tmp_path, fake).stdout
    assert f"could not register its optimizers with transformers.{where} (AttributeError" in output
    assert "optimizer_cls_and_kwargs=(bnb_fsdp.AdamW8bit" in output


@pytest.mark.parametrize(
    "method", [pytest.param(lambda self, args: None, id="plain-method"), pytest.param(None, id="missing")]
)
def test_trainer_that_cannot_be_wrapped_warns(method: Callable[..., Any] | None) -> None:
    module = ModuleType("transformers.trainer")
    module.Trainer = type("Trainer", (), {"get_optimizer_cls_and_kwargs": method} if method else {})  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match=r"transformers\.trainer \((Type|Attribute)Error.*will not work"):
        plugin._guarded(plugin._finish)(module)


# TrainingArguments


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., Any]:
    def make(optim: str = "bnb_fsdp_adamw8bit", **kwargs: Any) -> Any:
        return TrainingArguments(
            **{"output_dir": str(tmp_path), "optim": optim, "use_cpu": True, "report_to": "none", **kwargs}
        )

    return make


@pytest.mark.filterwarnings("ignore:Paged.*it works as the unpaged class:UserWarning")
@pytest.mark.parametrize("name", bnb_fsdp.optimizer_names())
def test_every_name_makes_its_optimizer(arguments: Callable[..., Any], name: str) -> None:
    args = arguments(
        name, optim_args="momentum=0.9" if name.startswith(("bnb_fsdp_sgd", "bnb_fsdp_lars")) else None
    )
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    assert args.optim is OptimizerNames(name) and cls is bnb_fsdp.optimizer_class(name)
    optimizer = cls([{"params": [torch.nn.Parameter(torch.zeros(4))], "weight_decay": 0.25}], **kwargs)
    assert optimizer.param_groups[0]["lr"] == args.learning_rate
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_unknown_name_lists_ours(arguments: Callable[..., Any]) -> None:
    with pytest.raises(
        ValueError, match=r"bnb_fsdp_adamw9bit is not a valid OptimizerNames.*'bnb_fsdp_adamw8bit'"
    ):
        arguments("bnb_fsdp_adamw9bit")


def test_other_optimizers_are_as_before(arguments: Callable[..., Any]) -> None:
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments("adamw_torch"), None)
    assert cls is torch.optim.AdamW and set(kwargs) == {"lr", "betas", "eps"}


def test_argument_parser_and_round_trips(arguments: Callable[..., Any], tmp_path: Path) -> None:
    values = {"output_dir": str(tmp_path), "optim": "bnb_fsdp_lion8bit", "use_cpu": True, "report_to": "none"}
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items())
    )
    parser = HfArgumentParser(TrainingArguments)
    command_line = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    parsed = {
        "command line": parser.parse_args_into_dataclasses(command_line),
        "dict": parser.parse_dict(values),
        "json": parser.parse_json_file(str(tmp_path / "a.json")),
        "yaml": parser.parse_yaml_file(str(tmp_path / "a.yaml")),
        "deepcopy": [copy.deepcopy(arguments("bnb_fsdp_lion8bit"))],
        "pickle": [pickle.loads(pickle.dumps(arguments("bnb_fsdp_lion8bit")))],
        "set_optimizer": [arguments().set_optimizer("bnb_fsdp_lion8bit")],
    }
    for way, (args,) in parsed.items():
        assert args.optim is OptimizerNames("bnb_fsdp_lion8bit"), way
        assert json.loads(args.to_json_string())["optim"] == "bnb_fsdp_lion8bit", way


def test_betas_and_eps_are_those_of_the_arguments(arguments: Callable[..., Any]) -> None:
    """As transformers does for its own names: Lion gets adam_beta1 and adam_beta2, and no eps."""
    settings = {"learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.7, "adam_epsilon": 1e-5}
    adam = Trainer.get_optimizer_cls_and_kwargs(arguments("bnb_fsdp_adam8bit", **settings))[1]
    assert adam == {"lr": 3e-4, "betas": (0.8, 0.7), "eps": 1e-5}
    assert adam == Trainer.get_optimizer_cls_and_kwargs(arguments("adamw_torch", **settings))[1]
    lion = Trainer.get_optimizer_cls_and_kwargs(arguments("bnb_fsdp_lion8bit", **settings))[1]
    assert lion == {"lr": 3e-4, "betas": (0.8, 0.7)}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("adamw8bit", "min_8bit_size=1", {"min_8bit_size": 1}),
        ("adamw8bit", "eps=1e-6, beta2 = 0.95", {"eps": 1e-6, "betas": (0.9, 0.95)}),
        ("adamw8bit", "beta1=0,beta2=0.5,optim_bits=8", {"betas": (0.0, 0.5), "optim_bits": 8}),
        ("adamw", "optim_bits=8,backend=torch", {"optim_bits": 8, "backend": "torch"}),
        ("lion8bit", "beta2=0.99", {"betas": (0.9, 0.99)}),
        ("lion8bit", "", {}),
        ("paged_adamw8bit", "residency=host", {"residency": "host"}),
        (
            "paged_lion",
            "residency=2000000000,residency_reserve=0",
            {"residency": 2_000_000_000, "residency_reserve": 0},
        ),
    ],
)
def test_optim_args(arguments: Callable[..., Any], name: str, text: str, expected: dict[str, Any]) -> None:
    name = "bnb_fsdp_" + name
    plain = Trainer.get_optimizer_cls_and_kwargs(arguments(name))[1]
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(name, optim_args=text))
    assert kwargs == {**plain, **expected}
    assert all(type(kwargs[key]) is type(value) for key, value in expected.items())
    cls([torch.nn.Parameter(torch.zeros(4))], **kwargs)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adamw8bit", "min_8bit=1", "does not take 'min_8bit'.*beta1, beta2, eps, min_8bit_size, optim_bits"),
        (
            "lion8bit",
            "eps=1e-8",
            "bnb_fsdp_lion8bit does not take 'eps'. Choose from backend, beta1, beta2, min",
        ),
        ("adamw8bit", "beta3=0.9", "does not take 'beta3'"),
        ("adamw8bit", "lr=1e-3", r"does not take 'lr'.*learning_rate"),
        ("adamw8bit", "weight_decay=0.1", r"does not take 'weight_decay'.*TrainingArguments\(weight_decay"),
        ("adamw8bit", "betas=0.9", "does not take 'betas'.*beta1=...,beta2="),
        ("adamw8bit", "overrides=1", "does not take 'overrides'"),
        ("adamw8bit", "min_8bit_size=4096.0", "min_8bit_size='4096.0' is not of type int"),
        ("adamw8bit", "eps=tiny", "eps='tiny' is not of type float"),
        ("adamw8bit", "eps=1e-8,eps=1e-6", "'eps' twice"),
    ],
)
def test_optim_args_errors(arguments: Callable[..., Any], name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer.get_optimizer_cls_and_kwargs(arguments("bnb_fsdp_" + name, optim_args=text))


@pytest.mark.parametrize("text", ["eps", "eps=1e-8,", ",eps=1", "eps=", "=1", "eps=1=2", ","])
def test_malformed_optim_args(arguments: Callable[..., Any], text: str) -> None:
    """transformers 5 unpacks the string before it calls us, so its own message may come first."""
    with pytest.raises(ValueError, match=r"is not of the form key=value.*'min_8bit_size=4096,eps=1e-8'"):
        plugin.parse_optim_args("bnb_fsdp_adamw8bit", text)
    with pytest.raises(ValueError):
        Trainer.get_optimizer_cls_and_kwargs(arguments(optim_args=text))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adamw8bit", "optim_bits=32", "AdamW8bit has optim_bits=8, got 32"),
        ("adamw", "optim_bits=4", "choose 8 or 32"),
        ("adamw", "backend=tpu", "'tpu' is not a backend"),
        ("adamw", "beta2=1.5", "must be a number in"),
    ],
)
def test_optim_args_out_of_range(arguments: Callable[..., Any], name: str, text: str, message: str) -> None:
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments("bnb_fsdp_" + name, optim_args=text))
    with pytest.raises(ValueError, match=message):
        cls([torch.nn.Parameter(torch.zeros(4))], **kwargs)


def test_optimizers_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three betas and other hyperparameters are read off the constructor; no beta, no adam_epsilon."""

    class Three(bnb_fsdp.AdamW8bit):
        def __init__(
            self, params: Any, lr: float = 1, betas: Any = (0.1, 0.2, 0.3), alpha: float = 5.0, **kw: Any
        ) -> None:
            pass

    class Momentum(bnb_fsdp.Lion):
        def __init__(
            self, params: Any, lr: float = 1, momentum: float = 0.0, eps: float = 1e-3, optim_bits: int = 8
        ) -> None:
            pass

    args = SimpleNamespace(
        optim="x", optim_args=None, learning_rate=1.0, adam_beta1=0.9, adam_beta2=0.8, adam_epsilon=1e-6
    )
    monkeypatch.setattr(plugin, "optimizer_class", lambda name: Three)
    assert plugin.optimizer_and_kwargs(args) == (Three, {"lr": 1.0, "betas": (0.9, 0.8, 0.3), "eps": 1e-6})
    args.optim_args = "alpha=2,beta3=0.5"
    assert plugin.optimizer_and_kwargs(args)[1]["betas"] == (0.9, 0.8, 0.5)
    monkeypatch.setattr(plugin, "optimizer_class", lambda name: Momentum)
    args.optim_args = "momentum=0.5"
    assert plugin.optimizer_and_kwargs(args) == (Momentum, {"lr": 1.0, "momentum": 0.5})
    args.optim_args = "beta1=0.5"
    with pytest.raises(ValueError, match="Choose from eps, optim_bits, momentum"):
        plugin.optimizer_and_kwargs(args)


# Models


def llama(**kwargs: Any) -> Any:
    """Embeddings and q_proj have at least 4096 elements, k_proj, v_proj and the norms fewer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **kwargs,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("name", ["adamw8bit", "adamw"])
@pytest.mark.parametrize("tied", [False, True], ids=["separate-head", "tied-head"])
def test_embeddings_keep_32_bit_state(arguments: Callable[..., Any], name: str, tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    optim_args = "optim_bits=8" if name == "adamw" else None
    args = arguments("bnb_fsdp_" + name, optim_args=optim_args)
    optimizer = Trainer(model=model, args=args).create_optimizer()
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    dtypes = {name: optimizer.state[p]["state1"].dtype for name, p in model.named_parameters()}
    assert dtypes["model.embed_tokens.weight"] == torch.float32
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == torch.uint8
    assert dtypes["model.layers.0.self_attn.k_proj.weight"] == torch.float32
    assert dtypes.get("lm_head.weight", torch.uint8) == torch.uint8 and ("lm_head.weight" in dtypes) != tied


def test_no_override_without_need(arguments: Callable[..., Any]) -> None:
    """32-bit names need none, and a frozen embedding is not in the optimizer, which would refuse it."""
    model = llama()
    assert "overrides" not in Trainer.get_optimizer_cls_and_kwargs(arguments("bnb_fsdp_adamw32bit"), model)[1]
    assert "overrides" not in Trainer.get_optimizer_cls_and_kwargs(arguments("bnb_fsdp_adamw"), model)[1]
    assert "overrides" in Trainer.get_optimizer_cls_and_kwargs(arguments(), model=model)[1]
    model.model.embed_tokens.requires_grad_(False)
    assert "overrides" not in Trainer.get_optimizer_cls_and_kwargs(arguments(), model)[1]
    Trainer(model=model, args=arguments()).create_optimizer()


@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit", "adamw32bit"])
def test_train(arguments: Callable[..., Any], name: str) -> None:
    model = llama()
    ids = torch.arange(16) % 8 + 1
    args = arguments(
        "bnb_fsdp_" + name,
        learning_rate=1e-3,
        weight_decay=0.125,
        max_steps=6,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids}] * 12)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is bnb_fsdp.optimizer_class("bnb_fsdp_" + name)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.125, 0.0]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]
    dtypes = {optimizer.state[p]["state1"].dtype for p in model.parameters()}
    assert dtypes == ({torch.float32} if "32" in name else {torch.float32, torch.uint8})
