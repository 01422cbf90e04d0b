"""What the CUDA benchmarks share: lists of tensor shapes, the copy bandwidth, bytes a step has to move, the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LORA = [(16, 4096), (4096, 16), (4096,), (4096,), (16, 1024), (1024, 16), (16, 14336), (14336, 16)]
MIXED = [(16, 4096), (4096, 16), (4096,), (4096,), (1024, 1024), (16, 1024), (1024, 16), (11008,)]
INVENTORIES = ("lora32", "lora256", "lora1024", "mixed256", "one64M", "llama1b")


def inventory(name: str) -> list[tuple[int, ...]]:
    """Shapes: loraN and mixedN cycle through LoRA, bias, norm and projection sizes; llama1b has 1.236e9 elements."""
    if name.startswith("lora"):
        return [LORA[i % len(LORA)] for i in range(int(name[4:]))]
    if name.startswith("mixed"):
        return [MIXED[i % len(MIXED)] for i in range(int(name[5:]))]
    if name == "one64M":
        return [(8192, 8192)]
    if name == "llama1b":
        block = [
            (2048, 2048),
            (512, 2048),
            (512, 2048),
            (2048, 2048),
            (8192, 2048),
            (8192, 2048),
            (2048, 8192),
        ]
        return [(128256, 2048), *(block + [(2048,), (2048,)]) * 16, (2048,)]
    raise ValueError(f"inventory {name!r}; choose one of {', '.join(INVENTORIES)}")


def numel(shapes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def bytes_per_parameter(states: int, bits: int, parameter: int, gradient: int) -> float:
    """Least traffic: parameter and states read and written, gradient read; 8 bits: a scale per 256 elements too."""
    per_state = 2.0 + 8.0 / 256 if bits == 8 else 8.0
    return 2 * parameter + gradient + states * per_state


def copy_bandwidth(size: int = 2 << 30) -> float:
    """Bytes read plus written per second by a device-to-device copy."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    times = rounds(lambda: target.copy_(source), 5)
    return 2 * size / (statistics.median(times) * 1e-3)


def rounds(run: Callable[[], Any], repeats: int, count: int = 9, warmup: int = 3) -> list[float]:
    """Milliseconds of one ``run``, for each of ``count`` rounds of ``repeats``, between CUDA events."""
    for _ in range(warmup):
        run()
    return [one_round(run, repeats)[0] for _ in range(count)]


def one_round(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(device, host) milliseconds of one ``run`` in a round of ``repeats``; both include completion."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before = time.perf_counter()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats, (time.perf_counter() - before) * 1e3 / repeats


def commit() -> str | None:
    """COMMIT from the environment, else what git says of this checkout; None where there is neither."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return None
    return found.stdout.strip() or None


def nccl_version() -> str | None:
    """Of the library that is loaded, where it is one of its own; else the one that torch was built with."""
    if not torch.distributed.is_nccl_available():
        return None
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def nccl_settings() -> dict[str, str]:
    """What the environment tells NCCL and CUDA's multi-process service."""
    told = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return told | ({"MPS": "on"} if (pipes / "control").exists() else {})


def machine() -> dict[str, Any]:
    """What stands beside every figure."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
