"""Faults that a checkpoint directory must survive or refuse.

``python tests_distributed/checkpoint_faults.py [--kills N]`` tries all of them and prints the counts: faults tried,
refused (with a clear error, model and optimizer bit for bit as they were), survived (the last complete checkpoint loads
and is what was saved), and checkpoints lost, which is zero or the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bnb_fsdp

SHAPES = {"large": (64, 512), "odd": (37, 300), "small": (7,)}


class Model(nn.Module):
    def __init__(
        self, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(index))
            self.register_parameter(name, nn.Parameter(values.to(dtype)))


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    """One step whose gradients depend on the step alone, not on the number of ranks."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(parameter, nn.Parameter) and hasattr(parameter, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            parameter.grad = distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        else:
            parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def contents(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of this rank's parameters and complete state."""
    found = {}
    for name, parameter in model.named_parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        found[name] = local.detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value.clone()
    found["lr"] = torch.tensor([group["lr"] for group in optimizer.param_groups])
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether both are equal bit for bit."""
    return set(a) == set(b) and all(
        a[key].dtype == b[key].dtype
        and a[key].shape == b[key].shape
        and torch.equal(
            a[key].contiguous().reshape(-1).view(torch.uint8),
            b[key].contiguous().reshape(-1).view(torch.uint8),
        )
        for key in a
    )


# Damaged and unfit checkpoints, in one process

Fault = tuple[str, Callable[[Path], None] | None, dict[str, Any], str]
"""(name, damage to the directory, how the loading side differs, a part of the error text)."""


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "bnb_fsdp.json"
        values = json.loads(path.read_text())
        change(values)
        del values["sha256"]  # its own checksum, as one would make it by hand
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps({**values, "sha256": hashlib.sha256(text.encode()).hexdigest()}))

    return damage


def _flip(name: str, share: float) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / name
        data = bytearray(path.read_bytes())
        data[min(len(data) - 1, int(len(data) * share))] ^= 0x10
        path.write_bytes(data)

    return damage


def _cut(name: str, lost: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:-lost])

    return damage


def _remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


class _Code:
    def __reduce__(self) -> Any:
        return sys.exit, ("code of a checkpoint was run",)


def _with_code(directory: Path) -> None:
    """A description that runs code when it is unpickled, with a sound checksum."""
    data = pickle.dumps(_Code())
    (directory / ".metadata").write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _edit(lambda m: m["files"].update({".metadata": entry}))(directory)


def faults() -> Iterator[Fault]:
    """Every fault of a single checkpoint."""
    for name in ("__0_0.distcp", ".metadata", "extra_0.pt"):
        for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
            yield f"a flipped bit at {share:.0%} of {name}", _flip(name, share), {}, f"{name} was changed"
        for lost in (1, 100):
            yield f"{lost} bytes cut from {name}", _cut(name, lost), {}, f"{name} has "
        yield f"{name} missing", _remove(name), {}, f"{name} is missing"
    yield "manifest missing", _remove("bnb_fsdp.json"), {}, "has no bnb_fsdp.json"
    yield "manifest cut", _cut("bnb_fsdp.json", 40), {}, "is damaged"
    yield "manifest empty", lambda d: (d / "bnb_fsdp.json").write_text(""), {}, "is damaged"
    for share in (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95):
        yield f"a flipped bit at {share:.0%} of the manifest", _flip("bnb_fsdp.json", share), {}, "is damaged"
    yield "manifest of something else", _edit(lambda m: m.update(kind="other")), {}, "'other'"
    yield "manifest with an unknown field", _edit(lambda m: m.update(colour=1)), {}, "is damaged"
    yield "a newer format", _edit(lambda m: m.update(version=99)), {}, "Install a newer"
    yield "an older format", _edit(lambda m: m.update(version=0)), {}, "no released"
    yield (
        "newer optimizer state",
        _edit(lambda m: m["optimizer"].update(state_version=9)),
        {},
        "reads up to 1",
    )
    yield "another block size", _edit(lambda m: m["optimizer"].update(block_size=2048)), {}, "blocks of 2048"
    yield "another optimizer class", None, {"kind": "Lion8bit"}, "saved by AdamW8bit (adam)"
    yield "another number of bits", None, {"kind": "AdamW32bit"}, "bits of state 8, here it has 32"
    yield "another 8-bit threshold", None, {"min_8bit_size": 1}, "small was saved with bits of state 32"
    yield "another shape", None, {"shapes": {**SHAPES, "large": (64, 256)}}, "large was saved with shape"
    yield "another dtype", None, {"dtype": torch.bfloat16}, "dtype float32, here it has bfloat16"
    yield "a parameter more", None, {"shapes": {**SHAPES, "more": (5,)}}, "lacks more"
    yield "a parameter less", None, {"shapes": {"large": (64, 512), "odd": (37, 300)}}, "has small"
    yield "other groups", None, {"groups": 2}, "parameter groups of [3] parameters, the optimizer of [1, 2]"
    yield "groups in another order", None, {"groups": -1}, "another order"
    yield (
        "what a killed save leaves",
        lambda d: d.rename(d.parent / ".saved.partial-0000"),
        {"path": ".saved.partial-0000"},
        "interrupted save",
    )
    yield "the only checkpoint of a folder damaged", _cut("bnb_fsdp.json", 40), {"path": "."}, "no complete"
    yield ".metadata that runs code", _with_code, {}, "it refers to sys.exit"
    yield "no such directory", lambda d: shutil.rmtree(d), {}, "no such checkpoint"
    yield "an empty directory", lambda d: [f.unlink() for f in d.iterdir()] and None, {}, "has no files"


def optimizer_for(model: nn.Module, kind: str = "AdamW8bit", groups: int = 1, **kwargs: Any) -> Any:
    named = list(model.named_parameters())
    if groups == 1:
        params: Any = named
    else:
        parts = [named[:1], named[1:]] if groups == 2 else [named[::-1]]
        params = [{"params": part} for part in parts]
    return getattr(bnb_fsdp, kind)(params, lr=0.01 if kind != "Lion8bit" else 0.001, **kwargs)


def trained(steps: int = 2) -> tuple[nn.Module, Any]:
    model = Model()
    optimizer = optimizer_for(model)
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def try_fault(fault: Fault, folder: Path) -> str:
    """ "refused" or what went wrong."""
    _, damage, other, text = fault
    model = Model()
    optimizer = optimizer_for(model)
    for step in range(2):
        train(model, optimizer, step)
    path = folder / "saved"
    bnb_fsdp.save_checkpoint(path, model, optimizer, extra={"step": 2})
    if damage is not None:
        damage(path)
    other = dict(other)
    path = folder / other.pop("path", "saved")
    target = Model(other.pop("shapes", SHAPES), other.pop("dtype", torch.float32))
    target_optimizer = optimizer_for(target, **other)
    train(target, target_optimizer, 77)
    before = contents(target, target_optimizer)
    groups = copy.deepcopy(
        [{k: v for k, v in g.items() if k != "params"} for g in target_optimizer.param_groups]
    )
    try:
        bnb_fsdp.load_checkpoint(path, target, target_optimizer)
    except bnb_fsdp.CheckpointError as error:
        if text not in str(error):
            return f"refused without {text!r}: {error}"
    else:
        return "loaded"
    if not same(before, contents(target, target_optimizer)):
        return "refused, but something changed"
    now = [{k: v for k, v in g.items() if k != "params"} for g in target_optimizer.param_groups]
    if now != groups:
        return "refused, but a group changed"
    train(target, target_optimizer, 78)
    return "refused"


# Killed ranks


def digest(model: nn.Module, optimizer: Any) -> str:
    """Of parameters and complete state, gathered in full: the same at every number of ranks."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = [parameter.full_tensor().detach()]
        state = optimizer.state[parameter]
        values.append(state["step"])
        for key in ("state1", "state2"):
            pieces: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(pieces, (state[key], state.get(key.replace("state", "absmax"))))
            values += [part for piece in pieces for part in piece if part is not None]
        for value in values:
            found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        found.update(name.encode())
    return found.hexdigest()


def rank_main(rank: int, world: int, folder: Path, trial: int) -> None:
    """Resume from the newest complete checkpoint, check it, then step and save until killed."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'rendezvous{trial}'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    model = Model({"large": (64, 512), "odd": (37, 300), "wide": (256, 4096), "small": (7,)})
    fully_shard(model)
    optimizer = optimizer_for(model)
    saves = folder / "saves"
    step = 0
    if saves.is_dir() and any(path.name[0] != "." for path in saves.iterdir()):
        extra = bnb_fsdp.load_checkpoint(saves, model, optimizer)
        step = extra["step"]
        own = digest(model, optimizer)
        wanted = json.loads((folder / f"digest{step}.json").read_text())
        if own != wanted or extra["rank"] != rank:
            (folder / f"lost{trial}").write_text(f"step {step}: {own} is not {wanted}")
            os._exit(3)
        (folder / f"resumed{trial}").write_text(str(step))
    while True:
        train(model, optimizer, step)
        step += 1
        value = digest(model, optimizer)
        if rank == 0:
            path = folder / f"digest{step}.json"
            path.with_suffix(".new").write_text(json.dumps(value))
            path.with_suffix(".new").rename(path)
        bnb_fsdp.save_checkpoint(
            saves / f"step-{step}", model, optimizer, extra={"step": step, "rank": rank}, keep=2
        )


def partial(saves: Path) -> bool:
    """Whether a checkpoint is being written, or was when its ranks died."""
    return saves.is_dir() and any(".partial-" in path.name for path in saves.iterdir())


def kill_drill(folder: Path, trials: int, world: int = 2, seed: int = 0) -> dict[str, int]:
    """Start ranks, kill one or all of them, start again; counts of what was seen.

    Every other kill comes at a random moment, the rest while a checkpoint is being written.

    Ranks are forked from this process, which must not have started threads or a process group.
    """
    chance = random.Random(seed)
    counts = {"kills": 0, "of one rank": 0, "left a partial save": 0, "resumed": 0, "lost": 0, "hung": 0}
    saves = folder / "saves"
    for trial in range(trials):
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                try:
                    with (folder / f"log{trial}_{rank}").open("w") as log:
                        os.dup2(log.fileno(), 1)
                        os.dup2(log.fileno(), 2)
                        rank_main(rank, world, folder, trial)
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                os._exit(1)
            children.append(child)
        # The clock starts when the ranks are at work: after the load, or at the first save.
        begun = time.monotonic()
        expected = saves.is_dir() and any(path.name[0] != "." for path in saves.iterdir())
        while time.monotonic() - begun < 30:
            if (folder / f"resumed{trial}").exists() or (folder / f"lost{trial}").exists():
                break
            if not expected and saves.is_dir() and any(saves.iterdir()):
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.6))
        if trial % 2:  # in the middle of a save
            begun = time.monotonic()
            while time.monotonic() - begun < 30 and not partial(saves):
                time.sleep(0.0005)
            time.sleep(chance.uniform(0.0, 0.02))
        one = trial % 3 == 0
        victims = [chance.choice(children)] if one else list(children)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 30
        waiting = set(children)
        while waiting and time.monotonic() < deadline:
            waiting -= {child for child in waiting if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.01)
        for child in waiting:
            counts["hung"] += 1
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        counts["kills"] += 1
        counts["of one rank"] += one
        counts["left a partial save"] += partial(saves)
        if expected:
            counts["resumed"] += (folder / f"resumed{trial}").exists()
            if not (folder / f"resumed{trial}").exists():
                counts["lost"] += 1
                for rank in range(world):
                    print((folder / f"log{trial}_{rank}").read_text(), file=sys.stderr)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60, help="how often ranks are killed")
    parser.add_argument("--only-kills", action="store_true", help="leave the other faults out")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The drill's ranks have gloo, but fully_shard takes a GPU if there is one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        drill = kill_drill(Path(folder), options.kills)
    outcomes: dict[str, str] = {}
    for fault in () if options.only_kills else faults():
        with tempfile.TemporaryDirectory() as folder:
            outcomes[fault[0]] = try_fault(fault, Path(folder))
            print(f"{outcomes[fault[0]]:10} {fault[0]}")
    refused = sum(outcome == "refused" for outcome in outcomes.values())
    result = {
        "faults tried": len(outcomes) + drill["kills"],
        "refused": refused,
        "survived": drill["kills"] - drill["lost"] - drill["hung"],
        "checkpoints lost": drill["lost"] + len(outcomes) - refused,
        "drill": drill,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["checkpoints lost"] > 0 or drill["hung"] > 0)


if __name__ == "__main__":
    sys.exit(main())
