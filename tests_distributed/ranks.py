"""Runs a function on N ranks, each a process of its own, and hands their results back.

As a script it is one rank: ``python ranks.py SPEC RANK`` (see `run`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = 300.0


SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own variable: 1 lets several ranks of a group be on one GPU. NCCL 2.30 is the first to know it."""


def gpu_ranks() -> int:
    """How many ranks may have a GPU: each one of its own, or any number where NCCL is told to share them."""
    count = torch.cuda.device_count()
    return sys.maxsize if count and os.environ.get(SHARE) == "1" else count


def device() -> Any:
    """This rank's device: its GPU if the group runs on GPUs, else the CPU."""
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    on_cpu: bool = False,
) -> list[Any]:
    """``function(*args)`` on every rank of an NCCL group if there are GPUs enough, else gloo; the results by rank.

    ``on_cpu``: gloo in any case. Ranks share GPUs if NCCL_MULTI_RANK_GPU_ENABLE is 1 (see `SHARE`).

    ``function`` is a module-level function. Ranks meet through a file, so that runs side by side cannot collide on a
    port. A rank that raises, dies or does not finish in ``timeout`` seconds fails the test with the output of all.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        directory = Path(folder)
        spec = directory / "spec.pickle"
        source = sys.modules[function.__module__].__file__
        spec.write_bytes(pickle.dumps((source, function.__name__, args, world_size, str(directory))))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "PYTHONFAULTHANDLER": "1",
        }
        if on_cpu or gpu_ranks() < world_size:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # or fully_shard would take the GPUs that there are
        results = [directory / f"result{rank}.pickle" for rank in range(world_size)]
        logs = [stack.enter_context((directory / f"out{rank}").open("w+")) for rank in range(world_size)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(spec), str(rank)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(world_size)
        ]
        try:
            problem = _wait(processes, results, timeout)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        # Judged by the results, not the exit status: gloo at times aborts after all work is done.
        if problem or not all(path.exists() for path in results):
            text = ""
            for rank, log in enumerate(logs):
                log.seek(0)
                text += f"\n--- rank {rank} (status {processes[rank].returncode}) ---\n{log.read()}"
            raise AssertionError(
                f"{function.__name__} on {world_size} ranks: {problem or 'a rank failed'}{text}"
            )
        return [pickle.loads(path.read_bytes()) for path in results]


def each(cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[str, Any]:
    """What every case, a function and its arguments, returns on this rank; a list of its traceback if it raises.

    Cases raise on all ranks alike, or else the others wait for this one until the time is up.
    """
    found = {}
    for name, (function, arguments) in cases.items():
        try:
            found[name] = function(*arguments)
        except Exception:
            found[name] = [traceback.format_exc()]
    return found


def _wait(processes: list[subprocess.Popen[bytes]], results: list[Path], timeout: float) -> str:
    """Wait for all; as soon as one fails, or all have results, they get a short while to end by themselves."""
    deadline = time.monotonic() + timeout
    failed = done = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() not in (None, 0) for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + 10.0)
        if not done and all(path.exists() for path in results):
            done = True
            deadline = min(deadline, time.monotonic() + 10.0)
        if time.monotonic() > deadline:
            if done:
                return ""
            return "a rank failed" if failed else f"not finished after {timeout:.0f} s"
        time.sleep(0.02)
    return ""


def _main() -> None:
    source, name, args, world_size, folder = pickle.loads(Path(sys.argv[1]).read_bytes())
    rank = int(sys.argv[2])
    directory = Path(folder)
    sys.path.insert(0, str(Path(source).parent))
    spec = importlib.util.spec_from_file_location("rank_module", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_module"] = module
    spec.loader.exec_module(module)
    on_gpus = gpu_ranks() >= world_size
    if on_gpus:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{directory / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        result = getattr(module, name)(*args)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the others may wait in a collective: do not join them in tearing down
    partial = directory / f"partial{rank}"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(directory / f"result{rank}.pickle")
    dist.barrier()
    time.sleep(0.2)  # see examples/common.py: gloo may deadlock otherwise
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
