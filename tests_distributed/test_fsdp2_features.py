"""What FSDP2 users switch on: policies, accumulation, meta devices, compile, several meshes.

Every step is compared with that of a twin: an optimizer of the same class on plain clones of this rank's shards, with
the same bits and gradients. Parameters and complete state must be equal bit for bit (test_local_shards.py compares
such a step with the rules). LAMB, whose norms are of whole tensors, has a twin on those. Each world is one run of
`everything`, which the test below judges case by case.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import bnb_fsdp

WIDTH, HIDDEN = (
    64,
    97,
)  # matrices of 6,208 elements have 8-bit state, vectors have 32-bit state; 97 rows: uneven
STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW8bit": dict(lr=3e-3, weight_decay=0.1),
    "Lion8bit": dict(lr=1e-3, weight_decay=0.1),
}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


class Checked:
    """An optimizer beside its twin; ``problems`` says what differed."""

    def __init__(self, parameters: Iterable[nn.Parameter], kind: str = "AdamW8bit") -> None:
        self.kind = kind
        self.parameters = list(parameters)
        self.optimizer = getattr(bnb_fsdp, kind)(self.parameters, **SETTINGS[kind])
        self.problems: list[str] = []
        self.twins: list[nn.Parameter] = []
        self.steps = 0

    def begin(self) -> None:
        """Make the twin from the shards as they are: after wrapping and initialisation."""
        self.twins = [
            nn.Parameter(local(p).clone(memory_format=torch.preserve_format)) for p in self.parameters
        ]
        self.start = [twin.detach().clone() for twin in self.twins]
        bits = [8 if p.numel() >= 4096 else 32 for p in self.parameters]
        groups = [
            {"params": [t for t, b in zip(self.twins, bits) if b == wanted], "min_8bit_size": minimum}
            for wanted, minimum in ((8, 0), (32, 2**62))
        ]
        groups = [group for group in groups if group["params"]]
        self.twin_optimizer = getattr(bnb_fsdp, self.kind)(groups, **SETTINGS[self.kind])

    def step(self) -> None:
        if not self.twins:
            self.begin()
        pointers = [local(p).data_ptr() for p in self.parameters]
        for p, twin in zip(self.parameters, self.twins):
            twin.grad = None if p.grad is None else local(p.grad).clone()
        self.optimizer.step()
        self.twin_optimizer.step()
        self.steps += 1
        for index, (p, twin) in enumerate(zip(self.parameters, self.twins)):
            label = f"step {self.steps}, parameter {index}"
            if not same_bits(local(p), twin.detach()):
                self.problems.append(f"{label} differs")
            if local(p).data_ptr() != pointers[index]:
                self.problems.append(f"{label}: storage moved")
            state, expected = self.optimizer.state[p], self.twin_optimizer.state[twin]
            if set(state) != set(expected) or "step" not in state:
                self.problems.append(f"{label}: keys {sorted(state)}, expected {sorted(expected)}")
            for key in set(state) & set(expected):
                if isinstance(state[key], DTensor) or not same_bits(state[key], expected[key]):
                    self.problems.append(f"{label}: {key} differs")
        self.optimizer.zero_grad()

    def report(self, losses: list[float], steps: int = STEPS) -> list[str]:
        """Problems, among them a run that proved nothing or did not train."""
        found = list(self.problems)
        if self.steps != steps:
            found.append(f"{self.steps} steps were compared, not {steps}")
        for index, (p, start) in enumerate(zip(self.parameters, self.start)):
            if start.numel() and torch.equal(local(p), start):
                found.append(f"parameter {index} never moved")
        if not losses[-1] < 0.9 * losses[0]:
            found.append(f"the loss did not fall: {losses}")
        dtypes = {self.optimizer.state[p]["state1"].dtype for p in self.parameters}
        if dtypes != {torch.uint8, torch.float32}:
            found.append(f"state is {dtypes}")
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def blocks(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(ranks.device(), dtype)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Each block a group of its own, the rest another."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def batch(number: int = 0, same_on: int = 1) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets; groups of ``same_on`` ranks get the same."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank() // same_on)
    x = torch.randn(16, WIDTH, generator=generator)
    return x.to(ranks.device()), x.roll(1, 1).to(ranks.device())


def gathered(tensor: Tensor, p: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """The whole of what is placed as the DTensor ``p`` (and has its shape), on the CPU. Under CPUOffloadPolicy, too,
    whose local tensors are there while NCCL gathers on the GPU."""
    whole = torch.empty(p.shape if shape is None else shape, device="meta")
    shard = DTensor.from_local(
        local(tensor).to(ranks.device()),
        p.device_mesh,
        p.placements,
        shape=whole.shape,
        stride=whole.stride(),
        run_check=False,
    )
    return shard.full_tensor().cpu()


class Whole:
    """An optimizer beside the same on whole plain tensors, which are on the CPU if the shards are there."""

    def __init__(
        self, optimizer: Any, kind: str, parameters: Iterable[nn.Parameter], **settings: Any
    ) -> None:
        self.optimizer = optimizer
        self.parameters = list(parameters)
        self.twins = [nn.Parameter(gathered(p, p).to(local(p).device)) for p in self.parameters]
        self.start = [twin.detach().clone() for twin in self.twins]
        self.plain = getattr(bnb_fsdp, kind)(self.twins, **settings)
        self.problems: list[str] = []
        self.steps = 0

    def step(self) -> None:
        """Step both. The moments, which no norm enters, have to be equal; parameters but for sums in another order."""
        for p, twin in zip(self.parameters, self.twins):
            twin.grad = gathered(p.grad, p).to(twin.device)
        self.optimizer.step()
        self.plain.step()
        self.steps += 1
        for index, (p, twin) in enumerate(zip(self.parameters, self.twins)):
            label = f"step {self.steps}, parameter {index} of {tuple(p.shape)}"
            apart = float((gathered(p, p) - twin.detach().cpu()).abs().max())
            if not apart < 1e-6:
                self.problems.append(f"{label} is {apart} from that of whole tensors")
            state, expected = self.optimizer.state[p], self.plain.state[twin]
            if set(state) != set(expected):
                self.problems.append(f"{label}: keys {sorted(state)}, expected {sorted(expected)}")
            for key in ("state1", "state2"):
                if not same_bits(gathered(state[key], p), expected[key].cpu()):
                    self.problems.append(f"{label}: {key} differs")
            # Rows of 256: a scale each. Sorted, since every rank has to gather in the same order.
            for key in sorted({"absmax1", "absmax2"} & set(state)):
                scales = gathered(state[key][:, None], p, (len(p), 1))
                if not same_bits(scales[:, 0], expected[key].cpu()):
                    self.problems.append(f"{label}: {key} differs")
        self.optimizer.zero_grad()

    def report(self, losses: list[float]) -> list[str]:
        found = list(self.problems)
        for index, (twin, start) in enumerate(zip(self.twins, self.start)):
            if torch.equal(twin, start):
                found.append(f"parameter {index} never moved")
        if self.steps < 2 or not losses[-1] < losses[0]:
            found.append(f"the loss did not fall: {losses}")
        return found


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    result: Tensor = (model(data[0]).float() - data[1]).square().mean()
    return result


def train(model: nn.Module, checked: Any, steps: int = STEPS, same_on: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model, batch(same_on=same_on))
        loss.backward()
        losses.append(float(loss))
        checked.step()
    return losses


# Policies


def mixed_precision(stored: torch.dtype, reduce: torch.dtype | None) -> list[str]:
    model = shard(
        blocks(stored), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    )
    computed, gradients = set(), set()
    for block in model.children():
        block.up.register_forward_hook(lambda *args: computed.add(args[2].dtype))
    checked = Checked(model.parameters())
    for p in checked.parameters:
        p.register_post_accumulate_grad_hook(lambda p: gradients.add(p.grad.dtype))
    problems = checked.report(train(model, checked, 12), 12)
    if computed != {torch.bfloat16} or gradients != {stored}:
        problems.append(f"computed in {computed}, gradients of {gradients}")
    return problems


def cpu_offload(mixed: bool) -> list[str]:
    """Parameters, gradients and state on the CPU; without a GPU the same path, though nothing is copied."""
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=ranks.device().type == "cuda")}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(blocks(), **options)
    checked = Checked(model.parameters())
    problems = checked.report(train(model, checked))
    held = [v for p in checked.parameters for v in (local(p), *checked.optimizer.state[p].values())]
    if {tensor.device.type for tensor in held} != {"cpu"}:
        problems.append("parameters or state are not on the CPU")
    return problems


def reshard_after_forward(option: bool | int) -> list[str]:
    """Gathered parameters may outlive the forward; the step updates the shards, and the next forward sees that."""
    model = shard(blocks(), reshard_after_forward=option)
    checked = Checked(model.parameters())
    first = model.get_submodule("0")
    seen, kept = [], []
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, batch())
        weight = first.up.weight
        seen.append(isinstance(weight, DTensor))
        kept.append(weight.device_mesh.size(-1) if isinstance(weight, DTensor) else 1)
        loss.backward()
        losses.append(float(loss))
        checked.step()
    problems = checked.report(losses)
    if seen != [option is True] * STEPS and option in (True, False):
        problems.append(f"sharded after forward: {seen}")
    if type(option) is int and kept != [option] * STEPS:
        problems.append(f"after forward sharded over {kept} ranks, not {option}")
    return problems


def shard_placement() -> list[str]:
    """Shard(1) where it divides evenly, Shard(0) elsewhere, of one model."""

    def place(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.dim() == 2 and p.shape[1] % dist.get_world_size() == 0 else None

    model = shard(blocks(), shard_placement_fn=place)
    checked = Checked(model.parameters())
    problems = checked.report(train(model, checked))
    found = {str(p.placements) for p in checked.parameters}
    if found != {"(Shard(dim=0),)", "(Shard(dim=1),)"}:
        problems.append(f"placements {found}")
    return problems


# Training loops


def accumulation(option: str) -> list[str]:
    """Three micro-batches with one reduction give the gradient of their mean; a step in between changes nothing."""
    model, whole = shard(blocks()), shard(blocks())
    checked, twin = Checked(model.parameters()), Checked(whole.parameters())
    losses, problems = [], []
    for _ in range(STEPS):
        total = 0.0
        for number in range(3):
            last = number == 2
            model.set_requires_gradient_sync(last)
            if option == "without resharding":
                model.set_reshard_after_backward(last)
                model.set_is_last_backward(last)
            loss = loss_of(model, batch(number)) / 3
            loss.backward()
            total += float(loss)
            if not last:
                problems += ["a gradient before the last one"] * any(
                    p.grad is not None for p in checked.parameters
                )
                before = [local(p).clone() for p in checked.parameters]
                checked.optimizer.step()
                if not all(torch.equal(local(p), b) for p, b in zip(checked.parameters, before)):
                    problems.append("a step without gradients changed a parameter")
        data = [batch(number) for number in range(3)]
        loss_of(whole, (torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))).backward()
        for p, q in zip(checked.parameters, twin.parameters):
            if not torch.allclose(local(p.grad), local(q.grad), rtol=1e-3, atol=1e-6):
                problems.append("gradients are not those of the whole batch")
            q.grad = p.grad
        losses.append(total)
        checked.step()
        twin.step()
    if not all(torch.equal(local(p), local(q)) for p, q in zip(checked.parameters, twin.parameters)):
        problems.append("parameters are not those of the whole batch")
    return problems + checked.report(losses)


def meta_device() -> list[str]:
    """Built on meta, sharded, then given memory and values; optimizers made before and after end alike."""
    ends, problems = [], []
    for early in (True, False):
        with torch.device("meta"):
            model = nn.Sequential(Block(), Block())
        shard(model)
        checked = Checked(model.parameters()) if early else None
        model.to_empty(device=ranks.device())
        torch.manual_seed(7)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        checked = checked or Checked(model.parameters())
        if any(p is not q for p, q in zip(checked.parameters, model.parameters())):
            problems.append("the optimizer's parameters are no longer the model's")
        problems += checked.report(train(model, checked))
        ends.append([local(p) for p in model.parameters()])
    if not all(map(torch.equal, *ends)):
        problems.append("the optimizer made on meta parameters ends elsewhere")
    return problems


class Language(nn.Module):
    """A head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 101, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.block(self.embed(tokens)))
        return result


def tied_weights() -> list[str]:
    torch.manual_seed(0)
    model = shard(Language().to(ranks.device()))
    checked = Checked(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(101, (32,), generator=generator).to(ranks.device())
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        losses.append(float(loss))
        checked.step()
    problems = checked.report(losses)
    if model.head.weight is not model.embed.weight or len(checked.parameters) != 7:
        problems.append("the weights are no longer tied")
    return problems


def compiled(backend: str) -> list[str]:
    """Blocks compiled before they are sharded, and the whole model wrapped; the optimizer has the wrapper's names."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of this process: another case may have compiled
    plain = shard(blocks())
    model = blocks()
    for block in model:
        block.compile(backend=backend)
    wrapper = torch.compile(shard(model), backend=backend)
    checked, twin = Checked(wrapper.parameters()), Checked(plain.parameters())
    names = [name for name, _ in wrapper.named_parameters()]
    optimizer = bnb_fsdp.AdamW8bit(wrapper.named_parameters())
    losses = train(wrapper, checked)
    expected = train(plain, twin)
    problems = checked.report(losses)
    if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4):
        problems.append(f"losses {losses}, without compile {expected}")
    if optimizer.param_groups[0]["param_names"] != names:
        problems.append("names are not the model's")
    counters = torch._dynamo.utils.counters["stats"]
    if not counters["unique_graphs"]:
        problems.append("nothing was compiled")
    return problems


class Sometimes(nn.Module):
    """Its second block is skipped at will."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = Block(), Block()
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return x if self.skip else self.sometimes(x)


def without_gradient() -> list[str]:
    torch.manual_seed(0)
    model = shard(Sometimes().to(ranks.device()))
    checked = Checked(model.parameters())
    losses, problems = [], []
    for step in range(6):
        model.skip = step in (0, 3, 4)
        loss = loss_of(model, batch())
        loss.backward()
        losses.append(float(loss))
        missing = [p.grad is None for p in model.sometimes.parameters()]
        if missing != [model.skip] * 6:
            problems.append(f"step {step}: gradients that are missing: {missing}")
        checked.step()
    counts = [
        {int(checked.optimizer.state[p]["step"]) for p in m.parameters()}
        for m in (model.always, model.sometimes)
    ]
    if counts != [{6}, {3}]:
        problems.append(f"step counts {counts}")
    return problems + checked.report(losses, 6)


def clip(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """As `clip_grad_norm_`, which refuses parameters of several meshes: a norm for each mesh, and that of the norms.

    Plain parameters are a group of their own; their gradients have to be the same on every rank.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    norms = []
    for those in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in those if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = nn.utils.get_total_norm(norms)
    for those in by_mesh.values():
        nn.utils.clip_grads_with_norm_(those, max_norm, total)
    return total


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def clipping(meshes: int) -> list[str]:
    """The norm is that of the whole gradient, and the step is that of the clipped one."""
    model, problems = blocks(), []
    plain: list[nn.Parameter] = []
    if meshes == 2:
        square = init_device_mesh(ranks.device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model[0], mesh=square)
        plain = [nn.Parameter(torch.full((5000,), 0.005, device=ranks.device()))]
    else:
        fully_shard(model[0])
    fully_shard(model[1])
    checked = Checked([*fully_shard(model).parameters(), *plain])
    unused = nn.Parameter(torch.ones(7, device=ranks.device()))
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, batch())
        loss.backward()
        for p in plain:
            p.square().sum().backward()
        losses.append(float(loss))
        gradients = [whole(p.grad) for p in checked.parameters]
        wanted = torch.cat([g.flatten() for g in gradients]).double().norm().float()
        if meshes == 1:
            total = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.05).full_tensor()
        else:
            total = clip([*checked.parameters, unused], 0.05)
        if isinstance(total, DTensor) or not torch.allclose(total, wanted, rtol=1e-5):
            problems.append(f"norm {float(total)}, expected {float(wanted)}")
        factor = 0.05 / (float(wanted) + 1e-6)
        for p, g in zip(checked.parameters, gradients):
            if not torch.allclose(whole(p.grad), g * factor, rtol=1e-4, atol=1e-8):
                problems.append("a gradient was not clipped")
        if factor >= 1:
            problems.append("there was nothing to clip")
        checked.step()
    found = {p.device_mesh if isinstance(p, DTensor) else None for p in checked.parameters}
    if len(found) != meshes + len(plain):
        problems.append("meshes are not as many as meant")
    return problems + checked.report(losses)


# Meshes


def replicas_stay_equal(kind: str) -> list[str]:
    """HSDP: parameters and state of both replicas after each of 50 steps."""
    mesh = init_device_mesh(ranks.device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(blocks(), mesh=mesh)
    checked = Checked(model.parameters(), kind)
    losses, problems = [], []
    for step in range(50):
        losses += train(model, checked, 1)
        held = [v for p in checked.parameters for v in (local(p), *checked.optimizer.state[p].values())]
        mine = torch.cat(
            [value.to(ranks.device()).contiguous().flatten().view(torch.uint8) for value in held]
        )
        first = mine.clone()
        dist.broadcast(first, group=mesh.get_group("replicate"), group_src=0)
        if not torch.equal(mine, first):
            problems.append(f"step {step}: replicas differ")
    if {p.placements for p in checked.parameters} != {(Replicate(), Shard(0))}:
        problems.append("this is not HSDP")
    return problems + checked.report(losses, 50)


class Mixture(nn.Module):
    """A block that all ranks share, and experts of which each column of the mesh has its own."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.block, self.experts = Block(), experts

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.experts(self.block(x))
        return result


class Experts(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x + torch.einsum("bi,eio->bo", x, weight) + self.bias


def mixture(as_dtensor: bool) -> nn.Module:
    """The block over all four ranks, experts over {0, 2} and {1, 3}: expert-parallel by DTensor, or by hand."""
    device = ranks.device()
    line = init_device_mesh(device.type, (4,))
    square = init_device_mesh(device.type, (2, 2), mesh_dim_names=("shard", "expert"))
    torch.manual_seed(0)
    column = square.get_local_rank("expert")
    weight, bias = (0.02 * torch.randn(6, WIDTH, WIDTH)).to(device), (0.02 * torch.randn(WIDTH)).to(device)
    weight[3:] *= 4  # or a norm over both columns would hardly differ
    bias *= 4**column  # each column's own in both cases: the weight's mesh by DTensor is all ranks
    if as_dtensor:
        experts = Experts(distribute_tensor(weight, square["expert"], [Shard(0)]), bias)
    else:
        experts = Experts(weight.chunk(2)[column].clone(), bias)
    model = Mixture(experts).to(device)
    fully_shard(model.experts, mesh=square["shard"])
    fully_shard(model.block, mesh=line)
    return fully_shard(model, mesh=line)


def experts_on_another_mesh(kind: str, as_dtensor: bool) -> list[str]:
    model = mixture(as_dtensor)
    checked = Checked(model.parameters(), kind)
    problems = checked.report(train(model, checked))
    sizes = sorted(mesh.size() for mesh in {p.device_mesh for p in checked.parameters})
    if sizes != ([2, 4, 4] if as_dtensor else [2, 4]):
        problems.append(f"meshes of {sizes} ranks")
    rows = [2, 1][dist.get_rank() // 2]  # three experts a column, on two ranks
    if local(model.experts.weight).shape != (rows, WIDTH, WIDTH):
        problems.append(f"local experts {local(model.experts.weight).shape}")
    return problems


def norms_on_another_mesh(as_dtensor: bool) -> list[str]:
    """LAMB takes each norm over its parameter's own mesh: beside a twin on the tensors that mesh holds, gathered."""
    model = mixture(as_dtensor)
    parameters = list(model.parameters())
    settings = dict(lr=1e-2, weight_decay=0.1, max_unorm=0.5)
    whole = Whole(bnb_fsdp.LAMB32bit(parameters, **settings), "LAMB32bit", parameters, **settings)
    return whole.report(train(model, whole))


def tensor_parallel(kind: str, data_parallel: int) -> list[str]:
    """Column- and row-parallel layers, alone on two ranks or under fully_shard; all ranks hold parts of one model."""
    mesh = init_device_mesh(ranks.device().type, (data_parallel, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 130), nn.ReLU(), nn.Linear(130, WIDTH)).to(ranks.device())
    twin = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wanted = {"(Shard(dim=0),)", "(Shard(dim=1),)", "(Replicate(),)"}
    if data_parallel > 1:
        fully_shard(model, mesh=mesh["dp"])
        wanted = {
            "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
            "(Shard(dim=0), Shard(dim=1))",
            "(Shard(dim=0), Replicate())",
        }
    checked = Checked(model.parameters(), kind)
    before = loss_of(twin, batch(same_on=2)).detach()
    losses = train(model, checked, 12, same_on=2)
    problems = checked.report(losses, 12)
    if abs(losses[0] - float(before)) > 1e-4:
        problems.append(f"first loss {losses[0]}, of the whole model {float(before)}")
    found = {str(p.placements) for p in checked.parameters}
    if found != wanted:
        problems.append(f"placements {found}")
    return problems


def sequence_parallel(remedy: str) -> list[str]:
    """A norm over rows that are shared out: its gradient is a partial sum, refused until it is added up."""
    mesh = init_device_mesh(ranks.device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 130), nn.ReLU(), nn.Linear(130, WIDTH))
    twin = copy.deepcopy(model.to(ranks.device()))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh["tp"], plan)
    if remedy == "fully_shard over one rank":
        fully_shard(model, mesh=mesh["dp"])
    checked = Checked(model.parameters())
    x, y = batch(same_on=2)
    rows = (x.chunk(2)[dist.get_rank()], y.chunk(2)[dist.get_rank()])
    losses, problems = [], []
    for step in range(12):
        loss = loss_of(model, rows) / 2
        loss.backward()
        if remedy == "gradients redistributed":
            partial = [p for p in checked.parameters if p.grad.placements != p.placements]
            if len(partial) != 2 or not all(g.is_partial() for p in partial for g in p.grad.placements):
                problems.append(f"step {step}: {len(partial)} gradients of other placements")
            try:
                checked.optimizer.step()
                problems.append(f"step {step}: a partial gradient was accepted")
            except ValueError as error:
                if "the gradient is DTensor [Partial(sum)], the parameter DTensor [Replicate()]" not in str(
                    error
                ):
                    problems.append(str(error))
            for p in partial:
                p.grad = p.grad.redistribute(placements=p.placements)
        if step == 0:
            loss_of(twin, (x, y)).backward()
            for p, q in zip(checked.parameters, twin.parameters()):
                if not torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-6):
                    problems.append("gradients are not those of the whole model")
        losses.append(float(loss))
        checked.step()
    return problems + checked.report(losses, 12)


Case = tuple[Callable[..., list[str]], tuple[Any, ...]]
F32, BF16 = torch.float32, torch.bfloat16
CASES: dict[int, dict[str, Case]] = {
    2: {
        "bf16 compute, fp32 reduce": (mixed_precision, (F32, F32)),
        "bf16 compute, bf16 reduce": (mixed_precision, (F32, BF16)),
        "bf16 parameters, fp32 reduce": (mixed_precision, (BF16, F32)),
        "bf16 parameters, bf16 reduce": (mixed_precision, (BF16, BF16)),
        "CPU offload": (cpu_offload, (False,)),
        "CPU offload, bf16 compute": (cpu_offload, (True,)),
        "reshard after forward": (reshard_after_forward, (True,)),
        "no reshard after forward": (reshard_after_forward, (False,)),
        "Shard(1) by shard_placement_fn": (shard_placement, ()),
        "accumulation without sync": (accumulation, ("with resharding",)),
        "accumulation without sync and resharding": (accumulation, ("without resharding",)),
        "meta device": (meta_device, ()),
        "tied weights": (tied_weights, ()),
        "compile eager": (compiled, ("eager",)),
        "compile aot_eager": (compiled, ("aot_eager",)),
        "compile inductor": (compiled, ("inductor",)),
        "no gradient on some steps": (without_gradient, ()),
        "clip_grad_norm_": (clipping, (1,)),
        "tensor parallel alone, AdamW8bit": (tensor_parallel, ("AdamW8bit", 1)),
        "sequence parallel, gradients redistributed": (sequence_parallel, ("gradients redistributed",)),
        "sequence parallel, fully_shard over one rank": (sequence_parallel, ("fully_shard over one rank",)),
    },
    4: {
        "clipping over two meshes": (clipping, (2,)),
        "reshard to two ranks": (reshard_after_forward, (2,)),
        "HSDP, AdamW8bit": (replicas_stay_equal, ("AdamW8bit",)),
        "HSDP, Lion8bit": (replicas_stay_equal, ("Lion8bit",)),
        "experts by DTensor, AdamW8bit": (experts_on_another_mesh, ("AdamW8bit", True)),
        "experts by hand, Lion8bit": (experts_on_another_mesh, ("Lion8bit", False)),
        "norms of experts by DTensor, LAMB32bit": (norms_on_another_mesh, (True,)),
        "norms of experts by hand, LAMB32bit": (norms_on_another_mesh, (False,)),
        "tensor parallel, AdamW8bit": (tensor_parallel, ("AdamW8bit", 2)),
        "tensor parallel, Lion8bit": (tensor_parallel, ("Lion8bit", 2)),
    },
}


def everything(world: int) -> dict[str, list[str]]:
    return ranks.each(CASES[world])


@pytest.fixture(scope="module")
def results() -> Callable[[int], list[dict[str, list[str]]]]:
    """What every rank found at a number of ranks, which are run when a test first asks."""
    return functools.cache(lambda world: ranks.run(world, everything, world))


@pytest.mark.parametrize(
    "world, case",
    [pytest.param(world, case, id=case) for world, cases in CASES.items() for case in cases],
)
def test_a_step_is_that_of_the_plain_local_tensor(
    results: Callable[[int], list[dict[str, list[str]]]], world: int, case: str
) -> None:
    for rank, result in enumerate(results(world)):
        assert result[case] == [], f"rank {rank}"
