"""What `test_resume` runs in other processes: training that is saved, and training that is resumed elsewhere.

As a script it is one rank of a launch, ``python resume_runs.py LAUNCH FOLDER`` (see `LAUNCHES`). Every rank writes the
facts of its scenarios to FOLDER as JSON, and copies of the live state to files that `raw_file` names.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

LAUNCH_SECONDS = 240
COLLECTIVE_SECONDS = 60
ROWS = 8  # of a global batch, at any number of ranks
Facts = dict[str, Any]

# accelerate: what is trained, and how it is saved. Losses are those of `END` steps, state is saved after `SAVED`.
SAVED, END = 3, 6
SETUPS: dict[str, Facts] = {
    "float32": {},
    "bf16": {"mixed_precision": "bf16", "accumulation": 2},
    "tied": {"tied": True, "checkpointing": True},
    "lora": {"lora": True, "lr": 1e-2},
    "overrides": {"overrides": {"*.q_proj.weight": {"optim_bits": 32}}},
}
ACCELERATE = [
    ("float32", "SHARDED"),
    ("float32", "FULL"),
    ("bf16", "SHARDED"),
    ("bf16", "FULL"),
    ("tied", "FULL"),
    ("lora", "SHARDED"),
    ("overrides", "FULL"),
]

# The Trainer
TRAINER = [("full", "SHARDED"), ("full", "FULL"), ("lora", "SHARDED"), ("lora", "FULL"), ("tied", "SHARDED")]
TRAINER_SAVED, TRAINER_END = 3, 6


def raw_file(folder: Path, scenario: str, moment: str, rank: int, world: int) -> Path:
    """Where a rank put its parameters and optimizer state of ``moment``: "saved", "loaded" or "end"."""
    return folder / f"{scenario}, {moment}, rank {rank} of {world}.pt"


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


# Model, data, and what is looked at


def _model(seed: int, *, tied: bool = False, lora: bool = False) -> Any:
    """Matrices of 64 columns, some of 90 rows, so that blocks of 256 lie otherwise on other numbers of ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0 if lora else seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)  # the frozen weights are those of the pretrained model, the adapters are not
    targets = ["q_proj", "v_proj", "up_proj"]
    return get_peft_model(model, LoraConfig(r=10, target_modules=targets, lora_dropout=0.0))


def _rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 9, (12,), generator=generator) for _ in range(64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _facts(model: Any, optimizer: Any) -> Facts:
    from torch.distributed.tensor import DTensor

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    report = optimizer.load_report
    return {
        "optimizer": type(optimizer).__name__,
        "DTensors": all(isinstance(p, DTensor) for p in named.values()),
        "same objects": {id(p) for group in optimizer.param_groups for p in group["params"]}
        == {id(p) for p in named.values()},
        "checkpointing": any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules()),
        "groups": [len(group["params"]) for group in optimizer.param_groups],
        "lr": [float(group["lr"]) for group in optimizer.param_groups],
        "load report": None if report is None else report._asdict(),
    }


def _record(out: Path, scenario: str, moment: str, model: Any, optimizer: Any) -> None:
    """Write copies of this rank's trainable parameters and of their state."""
    from torch.distributed.tensor import DTensor

    result = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            local = p.to_local() if isinstance(p, DTensor) else p
            result[name] = {"parameter": local.detach().clone(), **optimizer.state.get(p, {})}
    torch.save(result, raw_file(out, scenario, moment, _rank(), _world()))


# accelerate


class Session:
    """An accelerator with a prepared model and optimizer, all new."""

    def __init__(
        self,
        kind: str,
        *,
        seed: int = 0,
        lr: float = 2e-3,
        mixed_precision: str = "no",
        accumulation: int = 1,
        checkpointing: bool = False,
        overrides: Any = None,
        **model: Any,
    ) -> None:
        import bnb_fsdp

        self.accumulation = accumulation
        self.accelerator = _accelerator(kind, mixed_precision, accumulation, checkpointing)
        self.model = _model(seed, **model)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        groups: list[dict[str, Any]] = [{"params": named.items()}]
        if model.get("lora"):  # as the Trainer makes groups: one is empty, and there are no names
            groups = [{"params": named.values()}, {"params": [], "weight_decay": 0.0}]
        self.optimizer = bnb_fsdp.AdamW8bit(
            groups, lr=lr, overrides=overrides, min_8bit_size=512 if model.get("lora") else 4096
        )
        self.model, self.prepared = self.accelerator.prepare(self.model, self.optimizer)

    def train(self, first: int, last: int) -> list[float]:
        """The losses of the steps, one for each batch, over all ranks."""
        rows = _rows()
        mine = ROWS // _world()
        losses = []
        for index in range(first * self.accumulation, last * self.accumulation):
            start = (index * ROWS + _rank() * mine) % len(rows)
            batch = torch.stack([row["input_ids"] for row in rows[start : start + mine]])
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.prepared.step()
                self.prepared.zero_grad()
            losses.append(self.accelerator.reduce(loss.detach().float(), "mean").item())
        return losses

    def poison(self) -> None:
        """Give the optimizer, never stepped, the state of a nightmare: what loading leaves out will show."""
        self.optimizer.state_dict()  # makes state that is missing
        for values in self.optimizer.state.values():
            for key, value in values.items():
                value.fill_(1000 if key == "step" else 77 if value.dtype == torch.uint8 else float("nan"))

    def facts(self, losses: list[float]) -> Facts:
        return {
            "losses": losses,
            "is_fsdp2": self.accelerator.is_fsdp2,
            **_facts(self.model, self.optimizer),
        }


def _accelerator(kind: str, mixed_precision: str, accumulation: int, checkpointing: bool) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type=f"{kind}_STATE_DICT",
        activation_checkpointing=checkpointing,
    )
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        kwargs_handlers=[timeout],
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=accumulation,
    )


def _never_saved(out: Path, setup: str) -> Facts:
    session = Session("SHARDED", **SETUPS[setup])
    facts = session.facts(session.train(0, END))
    _record(out, f"never saved, {setup}", "end", session.model, session.optimizer)
    return facts


def _save(out: Path, setup: str, kind: str) -> Facts:
    """Train, save, go on."""
    name = f"{setup}, {kind}"
    session = Session(kind, **SETUPS[setup])
    losses = session.train(0, SAVED)
    folder = out / f"{name}, from {_world()}"
    session.accelerator.save_state(str(folder))
    _record(out, name, "saved", session.model, session.optimizer)
    losses += session.train(SAVED, END)
    _record(out, name, "end", session.model, session.optimizer)
    session.accelerator.wait_for_everyone()
    return {**session.facts(losses), "files": sorted(os.listdir(folder))}


def _load(out: Path, setup: str, kind: str, source: int, poison: bool = True) -> Facts:
    """Into a model of other weights and an optimizer of another learning rate."""
    name = f"{setup}, {kind}, from {source}"
    session = Session(kind, **{**SETUPS[setup], "seed": 1, "lr": 0.5})
    if poison:
        session.poison()
    session.accelerator.load_state(str(out / name))
    _record(out, name, "loaded", session.model, session.optimizer)
    facts = session.facts([])
    facts["losses"] = session.train(SAVED, END)
    _record(out, name, "end", session.model, session.optimizer)
    return facts


def _save_first(out: Path, kind: str) -> Facts:
    """Save before the first step, train; load that, train."""
    folder = out / f"never stepped, {kind}"
    session = Session(kind)
    session.accelerator.save_state(str(folder))
    losses = session.train(0, SAVED)
    _record(out, f"never stepped, {kind}", "end", session.model, session.optimizer)
    again = Session(kind, seed=1, lr=0.5)
    again.poison()
    again.accelerator.load_state(str(folder))
    _record(out, f"never stepped, {kind}", "loaded", again.model, again.optimizer)
    return {**session.facts(losses), "losses again": again.train(0, SAVED)}


# The Trainer


def _trainer(out: Path, name: str, setup: str, kind: str, resume: Path | None = None, **kwargs: Any) -> Any:
    """A Trainer that records the loss of every step unrounded, and the state when it is saved, loaded and left."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Recorder(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **now: Any) -> None:
            if state.global_step == TRAINER_SAVED:
                _record(out, name, "saved", now["model"], now["optimizer"].optimizer)

        def on_train_begin(self, args: Any, state: Any, control: Any, **now: Any) -> None:
            if resume is not None:
                _record(out, name, "loaded", now["model"], now["optimizer"].optimizer)

        def on_train_end(self, args: Any, state: Any, control: Any, **now: Any) -> None:
            _record(out, name, "end", now["model"], now["optimizer"].optimizer)

    class Recording(Trainer):
        losses: list[float]

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    args = TrainingArguments(
        output_dir=str(out / name),
        optim="bnb_fsdp_adamw8bit",
        optim_args="min_8bit_size=1" if setup == "lora" else None,
        learning_rate=1e-2 if setup == "lora" else 2e-3,
        weight_decay=0.125,
        max_steps=TRAINER_END,
        per_device_train_batch_size=ROWS // _world(),
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_timeout=COLLECTIVE_SECONDS,
        use_cpu=True,
        **({} if kind == "plain" else _fsdp(kind, setup == "tied")),
        **kwargs,
    )
    model = _model(0 if resume is None else 1, lora=setup == "lora", tied=setup == "tied")
    trainer = Recording(model=model, args=args, train_dataset=_rows(), callbacks=[Recorder()])
    trainer.losses = []
    return trainer


def _fsdp(kind: str, checkpointing: bool) -> Facts:
    """TrainingArguments for FSDP2; transformers 4 takes the version and the kind of checkpoint from variables."""
    import transformers

    config = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "activation_checkpointing": checkpointing,
    }
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {
            "fsdp": True,
            "fsdp_config": {"version": 2, "state_dict_type": f"{kind}_STATE_DICT", **config},
        }
    os.environ.update(FSDP_VERSION="2", FSDP_STATE_DICT_TYPE=f"{kind}_STATE_DICT")
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}


@contextmanager
def _messages() -> Iterator[list[str]]:
    """All warnings and logged messages from WARNING up."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(f"{record.name}: {record.getMessage()}")  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in (None, "transformers", "accelerate", "torch", "bnb_fsdp")]
    for logger in loggers:
        logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    for logger in loggers:
        logger.removeHandler(handler)
    found += [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def _trained(trainer: Any, resume: Path | None = None) -> Facts:
    with _messages() as messages:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return {
        "losses": trainer.losses,
        "is_fsdp2": trainer.accelerator.is_fsdp2,
        "global step": trainer.state.global_step,
        "messages": messages,
        **_facts(trainer.model, trainer.optimizer.optimizer),
    }


def _trainer_never_saved(out: Path, setup: str, kind: str) -> Facts:
    return _trained(_trainer(out, f"Trainer, never saved, {setup}", setup, kind, save_strategy="no"))


def _trainer_save(out: Path, setup: str, kind: str) -> Facts:
    name = f"Trainer, {setup}, {kind}"
    facts = _trained(
        _trainer(out, name, setup, kind, save_strategy="steps", save_steps=TRAINER_SAVED, save_total_limit=2)
    )
    return {**facts, "files": sorted(os.listdir(out / name / f"checkpoint-{TRAINER_SAVED}"))}


def _trainer_resume(out: Path, setup: str, kind: str) -> Facts:
    folder = out / f"Trainer, {setup}, {kind}" / f"checkpoint-{TRAINER_SAVED}"
    name = f"Trainer, {setup}, {kind}, from {_world()}"
    return _trained(_trainer(out, name, setup, kind, folder, save_strategy="no"), folder)


# Launches

Scenarios = dict[str, Callable[[Path], Facts]]


def _saves() -> Scenarios:
    result: Scenarios = {f"{s}, {k}": partial(_save, setup=s, kind=k) for s, k in ACCELERATE}
    result.update({f"never saved, {s}": partial(_never_saved, setup=s) for s in SETUPS})
    return result


def _loads(source: int, poison: bool = True) -> Scenarios:
    return {
        f"{s}, {k}, from {source}": partial(_load, setup=s, kind=k, source=source, poison=poison)
        for s, k in ACCELERATE
    }


LAUNCHES: dict[str, Scenarios] = {
    "2 ranks save": {
        **_saves(),
        **{f"never stepped, {k}": partial(_save_first, kind=k) for k in ("SHARDED", "FULL")},
        **{f"Trainer, {s}, {k}": partial(_trainer_save, setup=s, kind=k) for s, k in TRAINER},
        **{
            f"Trainer, never saved, {s}": partial(_trainer_never_saved, setup=s, kind=k)
            for s, k in {s: k for s, k in TRAINER}.items()
        },
    },
    "1 rank": {**_saves(), **_loads(2)},
    "2 ranks load": {
        **_loads(2),
        **_loads(1, poison=False),
        **{f"Trainer, {s}, {k}, from 2": partial(_trainer_resume, setup=s, kind=k) for s, k in TRAINER},
    },
    "4 ranks": _loads(2),
    "plain": {
        "Trainer, never saved, full": partial(_trainer_never_saved, setup="full", kind="plain"),
        "Trainer, full, plain": partial(_trainer_save, setup="full", kind="plain"),
        "Trainer, full, plain, from 1": partial(_trainer_resume, setup="full", kind="plain"),
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
    for name, scenario in LAUNCHES[launch].items():
        began = time.monotonic()
        try:
            results[name] = scenario(out)
        except BaseException:  # torch.distributed.checkpoint's own error is no Exception
            results[name] = {"error": traceback.format_exc()}
            failed = True
            break
        print(f"{time.monotonic() - began:.1f} s {name}", flush=True)
    (out / f"{launch}, rank {_rank()}.json").write_text(json.dumps(results))
    if failed:
        os._exit(1)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        time.sleep(0.2)  # see examples/common.py: gloo may deadlock otherwise
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
