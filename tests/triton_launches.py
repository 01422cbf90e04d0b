"""Every launch of the Triton backend, compiled and bound as for an NVIDIA GPU, with a driver that only takes notes.

A program of its own (test_triton.py runs it): the driver stays in triton's caches. Prints a JSON list of what was
launched: kernel, grid, warps, whether contraction was allowed, the types of all arguments but the constants.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bnb_fsdp import rules, state
from bnb_fsdp.backends import BucketKey, Slot
from bnb_fsdp.backends.triton_backend import TritonBucket

CPU = torch.device("cpu")
HYPER = rules.Hyper(1e-3, 0.9, 0.999, 0.9999, 5.0, 1e-8, 0.01)
launched: list[dict[str, Any]] = []


class Utils:
    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        return 1, 2, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Driver:
    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        types = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            launched.append({
                "kernel": metadata.name, "grid": [x, y, z], "warps": metadata.num_warps,
                "fusion": metadata.enable_fp_fusion, "types": types,
            })  # fmt: skip

        return launch


class Bucket(TritonBucket):
    """On the CPU, for which there is no device to enter."""

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        yield


def slot(rule: rules.Rule, bits: int, numel: int) -> Slot:
    p = torch.zeros(numel, dtype=torch.bfloat16)
    values = state.allocate(p, bits, rule)
    absmax = tuple(values[state.absmax_key(key)] for key in rule.states) if bits == 8 else ()
    return Slot("p", 0, p, tuple(values[key] for key in rule.states), absmax, values["step"])


def main() -> None:
    driver.set_active(Driver())
    for rule in (rules.ADAM, rules.LION):
        for bits in (8, 32):
            for count, on_device in ((1, False), (3, False), (3, True)):
                slots = [slot(rule, bits, 3000) for _ in range(count)]
                key = BucketKey(rule.name, bits, torch.bfloat16, torch.float32, CPU, on_device)
                bucket = Bucket(key, rule, slots)
                gradients = [torch.zeros(3000) for _ in slots]
                bucket.run(gradients, [HYPER], torch.ones(count) if on_device else None)
                if rule.direction is not None:
                    bucket.norms(gradients, [HYPER])
                assert all(int(s.step) == (0 if on_device else 1) for s in slots)
    print(json.dumps(launched))


if __name__ == "__main__":
    main()
