"""The Trainer and accelerate with FSDP2, two gloo ranks on CPUs.

Each launch runs several scenarios in one process group; every rank writes what it saw as JSON, which the
tests judge. A scenario that raises ends its launch, and every test of that launch shows the error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrun

WORLD = 2
LAUNCH_SECONDS = 240
COLLECTIVE_SECONDS = 60
STEPS = 4
Facts = dict[str, Any]


# In the ranks


def _model(dtype: torch.dtype = torch.float32) -> Any:
    """q_proj and o_proj have exactly 4096 elements, k_proj and v_proj 2048, the norms 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def _rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 9, (12,), generator=generator) for _ in range(64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _state_facts(model: Any, optimizer: Any) -> Facts:
    """What the optimizer holds for each trainable parameter of the prepared model, by name."""
    from torch.distributed.tensor import DTensor

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ours = type(optimizer).__module__.startswith("bnb_fsdp.")
    return {
        "optimizer": type(optimizer).__name__,
        "trainable": len(named),
        "same objects": {id(p) for p in parameters} == {id(p) for p in named.values()},
        "all DTensors": all(isinstance(p, DTensor) for p in parameters),
        "groups": [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups],
        "dtype": {name: str(p.dtype) for name, p in named.items()},
        "local": {name: list(p.to_local().shape) for name, p in named.items()},
        "state": {name: str(optimizer.state[p]["state1"].dtype) for name, p in named.items()} if ours else {},
        "steps": sorted({int(values["step"]) for values in optimizer.state.values()}),
    }


def _train(optim: str, out: Path, *, lora: bool = False, **kwargs: Any) -> Facts:
    import transformers
    from transformers import Trainer, TrainingArguments

    model = _model()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    config: dict[str, Any] = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    }
    if int(transformers.__version__.split(".")[0]) >= 5:
        kwargs |= {"fsdp": True, "fsdp_config": {"version": 2, **config}}
    else:
        kwargs |= {"fsdp": "full_shard auto_wrap", "fsdp_config": config}  # FSDP_VERSION=2 by the launcher
    args = TrainingArguments(
        output_dir=str(out),
        optim=optim,
        learning_rate=1e-2 if lora else 2e-3,
        weight_decay=0.125,
        lr_scheduler_type="constant",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_timeout=COLLECTIVE_SECONDS,
        use_cpu=True,
        **kwargs,
    )
    trainer = Trainer(model=model, args=args, train_dataset=_rows())
    trainer.train()
    return {
        "is_fsdp2": trainer.accelerator.is_fsdp2,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        **_state_facts(trainer.model, trainer.optimizer.optimizer),
    }


def _accelerator(**kwargs: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    return Accelerator(cpu=True, fsdp_plugin=plugin, kwargs_handlers=[timeout], **kwargs)


def _accelerate(mixed_precision: str, accumulation: int, dtype: torch.dtype) -> Facts:
    """prepare, and ``STEPS`` optimizer steps of ``accumulation`` batches each."""
    import bnb_fsdp

    accelerator = _accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=accumulation)
    model = _model(dtype)
    plain = list(model.parameters())
    optimizer = bnb_fsdp.AdamW8bit(
        model.named_parameters(), lr=2e-3, overrides={"*.embed_tokens.weight": {"optim_bits": 32}}
    )
    model, prepared = accelerator.prepare(model, optimizer)
    swapped = [p for group in optimizer.param_groups for p in group["params"]]
    rows = _rows()
    losses = []
    for index in range(STEPS * accumulation):
        batch = torch.stack([row["input_ids"] for row in rows[accelerator.process_index :: WORLD][:4]])
        with accelerator.accumulate(model):
            output = model(input_ids=batch, labels=batch)
            accelerator.backward(output.loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
            prepared.zero_grad()
        if index % accumulation == 0:
            losses.append(accelerator.reduce(output.loss.detach(), "mean").item())
    return {
        "is_fsdp2": accelerator.is_fsdp2,
        "exchanged": not {id(p) for p in plain} & {id(p) for p in swapped},
        "losses": losses,
        **_state_facts(model, optimizer),
    }


def _step_before_prepare() -> Facts:
    import bnb_fsdp

    accelerator = _accelerator()
    model = _model()
    optimizer = bnb_fsdp.AdamW8bit(model.parameters())
    ids = _rows()[0]["input_ids"][None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model, prepared = accelerator.prepare(model, optimizer)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    try:
        prepared.step()
    except RuntimeError as error:
        message = str(error)
    else:
        message = "no error"
    optimizer.state.clear()
    prepared.step()
    return {"message": message, **_state_facts(model, optimizer)}


SCENARIOS: dict[str, dict[str, Callable[[Path], Facts]]] = {
    "trainer": {
        "adamw8bit": lambda out: _train("bnb_fsdp_adamw8bit", out),
        "lion8bit": lambda out: _train("bnb_fsdp_lion8bit", out),
        "adamw32bit": lambda out: _train("bnb_fsdp_adamw32bit", out),
        "torch": lambda out: _train("adamw_torch", out),
        "accumulation": lambda out: _train("bnb_fsdp_adamw8bit", out, gradient_accumulation_steps=2),
        "lora": lambda out: _train("bnb_fsdp_adamw8bit", out, lora=True, optim_args="min_8bit_size=1"),
    },
    "accelerate": {
        "float32": lambda out: _accelerate("no", 1, torch.float32),
        "bf16 and accumulation": lambda out: _accelerate("bf16", 2, torch.float32),
        "bf16 model": lambda out: _accelerate("bf16", 1, torch.bfloat16),
        "pure bf16": lambda out: _accelerate("no", 1, torch.bfloat16),
        "step before prepare": lambda out: _step_before_prepare(),
    },
}


def main(launch: str, out: Path) -> None:
    """Run the launch's scenarios on this rank; stop at the first error, as the other rank then hangs."""
    faulthandler.dump_traceback_later(LAUNCH_SECONDS - 20, exit=True)
    torch.set_num_threads(1)
    import cpu_fsdp_shim  # noqa: F401

    import bnb_fsdp  # noqa: F401

    results: dict[str, Facts] = {}
    failed = False
    for name, scenario in SCENARIOS[launch].items():
        try:
            results[name] = scenario(out / name)
        except BaseException:  # torch.distributed.checkpoint's own error is no Exception
            results[name] = {"error": traceback.format_exc()}
            failed = True
            break
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    if failed:
        os._exit(1)
    torch.distributed.barrier()
    time.sleep(0.2)  # see examples/common.py: gloo may deadlock otherwise
    torch.distributed.destroy_process_group()


# In pytest


def _launch(launch: str, out: Path) -> list[dict[str, Facts]]:
    """The results of every rank, exit codes aside: the teardown of gloo can abort after all is done."""
    here = Path(__file__).resolve()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH")])
        ),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "FSDP_VERSION": "2",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD}"]
    status, output = torchrun.run([*command, str(here), launch, str(out)], environment, LAUNCH_SECONDS)
    files = [out / f"rank{rank}.json" for rank in range(WORLD)]
    results = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    for rank, result in enumerate(results):
        for name, facts in result.items():
            if "error" in facts:
                pytest.fail(f"rank {rank}, scenario {name!r}:\n{facts['error']}\n{output[-3000:]}")
    if not all(results):
        pytest.fail(f"no result; exit status {status}:\n{output[-6000:]}")
    return results


@pytest.fixture(scope="module")
def trainer_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Facts]]]:
    pytest.importorskip("transformers")
    yield _launch("trainer", tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def accelerate_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Facts]]]:
    pytest.importorskip("transformers")
    yield _launch("accelerate", tmp_path_factory.mktemp("accelerate"))


def check_sharded(facts: Facts, optimizer: str, dtype: str = "float32") -> None:
    """Guards against a run that silently trains DDP or leaves the optimizer with the old parameters."""
    assert facts["is_fsdp2"] and facts["all DTensors"] and facts["same objects"]
    assert facts["optimizer"] == optimizer
    assert set(facts["dtype"].values()) == {f"torch.{dtype}"}
    assert facts["steps"] == [STEPS]


def check_bits(state: dict[str, str], eight: tuple[str, ...]) -> None:
    """Exactly the parameters whose name has one of ``eight`` in it have uint8 state."""
    found = {name for name, dtype in state.items() if dtype == "torch.uint8"}
    assert found == {name for name in state if any(part in name for part in eight)}
    assert set(state.values()) <= {"torch.uint8", "torch.float32"}


LARGE = ("q_proj", "o_proj", "mlp", "lm_head")


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    ("scenario", "optimizer", "eight"),
    [
        pytest.param("adamw8bit", "AdamW8bit", LARGE, id="adamw8bit"),
        pytest.param("lion8bit", "Lion8bit", LARGE, id="lion8bit"),
        pytest.param("adamw32bit", "AdamW32bit", (), id="adamw32bit"),
        pytest.param("accumulation", "AdamW8bit", LARGE, id="adamw8bit-gradient-accumulation"),
        pytest.param("lora", "AdamW8bit", ("lora_",), id="adamw8bit-lora"),
    ],
)
def test_trainer(
    trainer_runs: list[dict[str, Facts]], rank: int, scenario: str, optimizer: str, eight: tuple[str, ...]
) -> None:
    facts = trainer_runs[rank][scenario]
    check_sharded(facts, optimizer)
    check_bits(facts["state"], eight)
    assert facts["local"] and all(shape[0] > 0 for shape in facts["local"].values())
    losses = facts["losses"]
    assert len(losses) == STEPS and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1


def test_trainer_weight_decay_by_group(trainer_runs: list[dict[str, Facts]]) -> None:
    assert trainer_runs[0]["adamw8bit"]["groups"] == [[16, 0.125], [5, 0.0]]


def test_trainer_lora_has_an_empty_group(trainer_runs: list[dict[str, Facts]]) -> None:
    assert trainer_runs[0]["lora"]["groups"] == [[8, 0.125], [0, 0.0]]


def test_trainer_loss_is_that_of_torch(trainer_runs: list[dict[str, Facts]]) -> None:
    """32-bit state: but for the order of decay and update the same mathematics."""
    runs = trainer_runs[0]
    assert runs["torch"]["optimizer"] == "AdamW" and runs["torch"]["is_fsdp2"]
    assert runs["adamw32bit"]["losses"] == pytest.approx(runs["torch"]["losses"], abs=2e-3)
    assert runs["adamw8bit"]["losses"] == pytest.approx(runs["torch"]["losses"], abs=2e-2)


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    ("scenario", "dtype"),
    [
        ("float32", "float32"),
        ("bf16 and accumulation", "float32"),
        ("bf16 model", "float32"),  # accelerate upcasts it
        ("pure bf16", "bfloat16"),
    ],
)
def test_accelerate(accelerate_runs: list[dict[str, Facts]], rank: int, scenario: str, dtype: str) -> None:
    facts = accelerate_runs[rank][scenario]
    check_sharded(facts, "AdamW8bit", dtype)
    check_bits(facts["state"], LARGE)
    assert facts["exchanged"], "accelerate kept the parameters: the exchange was not tested"
    assert facts["losses"][-1] < facts["losses"][0] - 0.1


def test_step_before_prepare_raises(accelerate_runs: list[dict[str, Facts]]) -> None:
    for run in accelerate_runs:
        facts = run["step before prepare"]
        assert (
            "21 of 21 entries of optimizer.state belong to parameters that are no longer" in facts["message"]
        )
        assert "prepare first, or clear optimizer.state" in facts["message"]
        assert facts["steps"] == [1] and facts["same objects"], "clearing the state does not help"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
