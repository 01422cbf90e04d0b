"""Bit for bit: this package's CUDA kernels beside bitsandbytes' own, on the same data in one process.

`cases()` is the matrix; `compare(case)` steps both sides and counts what differs. benchmarks/bitwise_parity.py
prints the totals, tests/test_cuda_parity.py asserts them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bnb_fsdp import codebook
from bnb_fsdp.backends import BucketKey, Slot
from bnb_fsdp.backends.cuda import CudaBucket
from bnb_fsdp.rules import RULES, Hyper
from bnb_fsdp.state import blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HYPERS = {
    "adam": Hyper(1e-3, 0.9, 0.999, eps=1e-8),
    "ademamix": Hyper(1e-3, 0.9, 0.999, 0.9999, 5.0, 1e-8),
    "lion": Hyper(1e-4, 0.9, 0.99, eps=1e-8),
    "momentum": Hyper(1e-2, 0.9, eps=1e-8),
    "rmsprop": Hyper(1e-3, 0.99, eps=1e-8),
    "adagrad": Hyper(1e-2, eps=1e-10),
}
TAILS = (1, 255, 256, 257, 4095, 4096, 4097, 5383, 65_537, 65_793, 2**20 + 13)
WHOLE = (256, 512, 4096, 4352, 65_536, 2**20, 2**20 + 256)
LARGE = (2**24,)
MANY = (256, 512, 768, 1024) * 400  # more tensors than the launch parameters hold


@dataclass(frozen=True)
class Case:
    """One comparison. ``offset``: elements by which parameter and gradient miss a 16-byte boundary."""

    rule: str
    bits: int
    dtype: str
    data: str = "spread"
    sizes: tuple[int, ...] = TAILS
    weight_decay: float = 0.0
    skip_zeros: bool = False
    steps: int = 4
    gradient_offset: int = 0
    parameter_offset: int = 0
    absent: bool = False  # every fifth gradient is missing, others at each step

    def __str__(self) -> str:
        extra = [f"wd={self.weight_decay}"] if self.weight_decay else []
        extra += ["skip_zeros"] if self.skip_zeros else []
        extra += [f"offset={self.parameter_offset},{self.gradient_offset}"] if self.gradient_offset else []
        extra += [f"{len(self.sizes)} tensors", "absent"] if self.absent else []
        return "-".join([self.rule, str(self.bits), self.dtype, self.data, str(max(self.sizes)), *extra])


def is_defined(rule: str, bits: int, dtype: str) -> bool:
    """Whether bitsandbytes 0.50.2 has the kernel: docs/parity.md."""
    return not (bits == 32 and dtype == "bfloat16" and rule in ("momentum", "rmsprop", "adagrad"))


def cases() -> Iterator[Case]:
    """Every kernel upstream has, with ordinary and special data, decay, tails, alignments, repeated steps."""
    for rule, bits, dtype in itertools.product(HYPERS, (8, 32), DTYPES):
        if not is_defined(rule, bits, dtype):
            continue
        # Upstream's AdEMAMix8bit overlaps scales unless the size is a multiple of 256.
        sizes = WHOLE if (rule, bits) == ("ademamix", 8) else TAILS
        yield Case(rule, bits, dtype, sizes=sizes, steps=1)
        yield Case(rule, bits, dtype, sizes=sizes, steps=20)
        yield Case(rule, bits, dtype, sizes=sizes, weight_decay=0.1)
        yield Case(rule, bits, dtype, "special", sizes, 0.0)
        yield Case(rule, bits, dtype, "special", sizes, 0.01)
        yield Case(rule, bits, dtype, "zeros", sizes, 0.01)
        yield Case(rule, bits, dtype, "negative zeros", sizes, 0.01)
        yield Case(rule, bits, dtype, "tiny", sizes, 0.01)
        yield Case(rule, bits, dtype, sizes=sizes, weight_decay=0.01, gradient_offset=1)
        yield Case(rule, bits, dtype, "special", sizes, 0.01, gradient_offset=3, parameter_offset=1)
        yield Case(rule, bits, dtype, sizes=LARGE, weight_decay=0.01, steps=5)
        yield Case(rule, bits, dtype, sizes=sizes[:6] * 2, steps=4, absent=True)
        if dtype == "bfloat16":
            yield Case(rule, bits, dtype, sizes=MANY, weight_decay=0.01, steps=3, absent=True)
        if bits == 32 and rule != "ademamix":
            yield Case(rule, bits, dtype, "sparse", sizes, 0.01, skip_zeros=True)


def gradient(size: int, step: int, dtype: torch.dtype, data: str, device: str = "cuda") -> Tensor:
    """Data whose scale varies over six decades; "special" has NaN, infinities, -0, zero and extreme blocks."""
    generator = torch.Generator(device).manual_seed(1000 * step + size % 997)
    g = torch.randn(size, generator=generator, device=device)
    g = g * 10 ** (6 * torch.rand(size, generator=generator, device=device) - 6)
    if data == "zeros":
        g[: size // 2] = 0.0 if step < 2 else -0.0
    if data == "negative zeros":  # blocks of them, and mixed with zeros, from the first step on
        g[: size // 2] = -0.0
        g[: size // 4 : 3] = 0.0
    if data == "tiny":
        # Blocks around the smallest normal numbers and below, where scales and products leave the range.
        scale = 10.0 ** -torch.linspace(17, 40, size, device=device)
        g = torch.where(torch.arange(size, device=device) % 3 == 0, g, g * scale)
        g[: size // 2] *= scale[: size // 2]
    if data == "sparse":
        g[torch.rand(size, generator=generator, device=device) < 0.4] = 0.0
    if data == "special":
        row = torch.arange(size, device=device) // 256
        g[row % 11 == 1] = 0.0
        g[row % 11 == 2] *= 1e-18
        g[row % 11 == 3] *= 1e15 if dtype != torch.float16 else 1e3
        chance = torch.rand(size, generator=generator, device=device)
        odd = (row % 11 > 4) & (step != 1)
        for value, share in (
            (float("nan"), 0.001),
            (float("inf"), 0.0005),
            (-float("inf"), 0.0005),
            (-0.0, 0.01),
        ):
            g[odd & (chance < share)] = value
            chance = torch.where(chance < share, 2.0, chance - share)
    return g.to(dtype)


def parameter(size: int, dtype: torch.dtype, data: str) -> Tensor:
    p = torch.randn(size, generator=torch.Generator("cuda").manual_seed(size % 997), device="cuda")
    if data in ("special", "tiny"):
        p[::7] *= 1e-38
        p[::1013] = 0.0
    return p.to(dtype)


def offset_copy(x: Tensor, offset: int) -> Tensor:
    """A contiguous copy whose address is ``offset`` elements behind a 16-byte boundary."""
    room = torch.empty(x.numel() + 16, dtype=x.dtype, device=x.device)
    view = room[offset : offset + x.numel()]
    return view.copy_(x)


class Ours:
    """All tensors of a case in one bucket."""

    def __init__(self, case: Case, params: list[Tensor]) -> None:
        rule = RULES[case.rule]
        self.hyper = HYPERS[case.rule]._replace(weight_decay=case.weight_decay, skip_zeros=case.skip_zeros)
        self.slots = []
        for i, p in enumerate(params):
            dtype = torch.uint8 if case.bits == 8 else torch.float32
            states = tuple(torch.zeros(p.numel(), dtype=dtype, device="cuda") for _ in rule.signed)
            absmax = tuple(torch.zeros(blocks(p.numel()), device="cuda") for _ in rule.signed)
            self.slots.append(Slot(str(i), 0, p, states, absmax if case.bits == 8 else (), torch.zeros(())))
        dtype = params[0].dtype
        self.bucket = CudaBucket(BucketKey(case.rule, case.bits, dtype, dtype, params[0].device), self.slots)

    def step(self, gradients: list[Tensor | None]) -> None:
        self.bucket.run(gradients, [self.hyper])

    def tensors(self, i: int) -> dict[str, Tensor]:
        slot = self.slots[i]
        named = {"p": slot.parameter}
        named |= {f"state{s + 1}": state for s, state in enumerate(slot.states)}
        return named | {f"absmax{s + 1}": scale for s, scale in enumerate(slot.absmax)}


class Upstream:
    """bitsandbytes' operators on the same tensors, as its optimizers call them."""

    def __init__(self, case: Case, params: list[Tensor]) -> None:
        self.case, self.params = case, params
        self.hyper = HYPERS[case.rule]
        self.qmaps = [torch.tensor(codebook.dynamic_map(signed), device="cuda") for signed in (True, False)]
        rows = 2 if case.rule == "ademamix" else 1
        two = case.rule in ("adam", "ademamix")
        dtype = torch.uint8 if case.bits == 8 else torch.float32
        self.states = [
            (
                torch.zeros(rows, p.numel(), dtype=dtype, device="cuda"),
                torch.zeros(p.numel(), dtype=dtype, device="cuda") if two else None,
                torch.zeros(rows, blocks(p.numel()), device="cuda"),
                torch.zeros(blocks(p.numel()), device="cuda") if two else None,
            )
            for p in params
        ]
        self.counts = [0] * len(params)

    def step(self, gradients: list[Tensor | None]) -> None:
        h, case = self.hyper, self.case
        for i, (p, g, (s1, s2, a1, a2)) in enumerate(zip(self.params, gradients, self.states)):
            if g is None:
                continue
            self.counts[i] += 1
            if case.bits == 8:
                torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
                    case.rule, g, p, s1, s2, h.beta1, h.beta2, h.beta3, h.alpha, h.eps, self.counts[i], h.lr,
                    self.qmaps[0], self.qmaps[1] if s2 is not None else None, a1, a2, case.weight_decay, 1.0,
                    case.skip_zeros,
                )  # fmt: skip
            else:
                torch.ops.bitsandbytes.optimizer_update_32bit(
                    case.rule, g, p, s1, s2, None, 0.0, 0.0, h.beta1, h.beta2, h.beta3, h.alpha, h.eps,
                    case.weight_decay, self.counts[i], h.lr, 1.0, case.skip_zeros,
                )  # fmt: skip
        torch.cuda.synchronize()

    def tensors(self, i: int) -> dict[str, Tensor]:
        s1, s2, a1, a2 = self.states[i]
        named = {"p": self.params[i], "state1": s1[0], "absmax1": a1[0]}
        if s2 is not None and a2 is not None:
            named |= {"state2": s2, "absmax2": a2}
        if len(s1) == 2:
            named |= {"state3": s1[1], "absmax3": a1[1]}
        return named


def differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ; two NaN count as equal."""
    if a.dtype == torch.uint8:
        return int((a != b).sum())
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    same = (a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())
    return int((~same).sum())


def compare(case: Case) -> tuple[int, dict[str, int]]:
    """Steps both sides; the number of tensors compared and, for those that differ, how many elements do."""
    dtype = DTYPES[case.dtype]
    start = [parameter(size, dtype, case.data) for size in case.sizes]
    ours = Ours(case, [offset_copy(p, case.parameter_offset) for p in start])
    upstream = Upstream(case, [p.clone() for p in start])
    for step in range(case.steps):
        gradients: list[Tensor | None] = [gradient(size, step, dtype, case.data) for size in case.sizes]
        if case.absent:
            gradients = [None if i % 5 == step else g for i, g in enumerate(gradients)]
        ours.step([None if g is None else offset_copy(g, case.gradient_offset) for g in gradients])
        upstream.step(gradients)
    compared, wrong = 0, {}
    for i, size in enumerate(case.sizes):
        theirs = upstream.tensors(i)
        for name, tensor in ours.tensors(i).items():
            compared += 1
            count = differing(tensor, theirs[name])
            if count:
                wrong[f"{name}[{i}: {size}]"] = count
    return compared, wrong
