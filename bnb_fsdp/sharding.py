"""DTensor parameters and their local shards.

The only module that imports ``torch.distributed.tensor``. ``to_local()`` costs microseconds and builds an
autograd node, so the per-step path reads ``_local_tensor`` after `check` has gone through ``to_local()``
once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .backends.gather import Sharding

ATTRIBUTES = Sharding(DTensor, "_local_tensor", "_spec", ("device_mesh", "placements", "shape"))
"""For the native look at parameters and gradients: `local` and `same_layout` in attributes."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor (of any placement)."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The plain tensor this rank holds: the local shard of a DTensor, else ``tensor`` itself.

    Shares storage with ``tensor``, runs no operator. A shard whose collective is still in flight is waited for.
    """
    shard: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(shard, AsyncCollectiveTensor):
        return shard.wait()
    return shard


def is_on_mesh(tensor: Tensor) -> bool:
    """Whether this rank has a part of ``tensor``: always, unless that is a DTensor on a mesh of other ranks.

    Such a tensor is known here all the same: torch gives it an empty local tensor, of one dimension.
    """
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def are_on_meta(parameters: Iterable[Tensor]) -> bool:
    """Whether none of them has memory yet."""
    return all(local(parameter).device.type == "meta" for parameter in parameters)


def could_be_exchanged(parameters: Iterable[Tensor]) -> bool:
    """Whether these may be what a model had before `fully_shard`: plain, in a program of several ranks."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and not any(map(is_sharded, parameters))


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether both are plain, or both DTensors of one mesh and placements, so that their shards pair up.

    On other ranks than the mesh's there are none to pair: autograd gives gradients other placements there.
    """
    if not (isinstance(a, DTensor) and isinstance(b, DTensor)):
        return isinstance(a, DTensor) is isinstance(b, DTensor)
    # FSDP2 gives a gradient the very spec object of its parameter: the usual case costs one comparison.
    return a._spec is b._spec or (
        a.device_mesh == b.device_mesh
        and a.shape == b.shape
        and (a.placements == b.placements or not is_on_mesh(a))
    )


def same_order(a: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of ``a`` lie in the order of a tensor of this shape and strides: where a dimension has one
    element its stride does not matter (a convolution's 1 x 1 weight and its gradient often differ there)."""
    own = a.stride()
    return (
        own == strides
        or all(size == 1 or x == y for size, x, y in zip(shape, own, strides))
        or a.numel() <= 1
    )


def has_storage(shard: Tensor) -> bool:
    """False for tensors without memory to point to (freed, wrappers, lazy zeros), except empty and meta ones."""
    return shard.numel() == 0 or shard.device.type == "meta" or shard.data_ptr() != 0


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gap or overlap, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements share memory for certain: a stride of 0, or less memory from first to last than elements."""
    extents = [(size - 1, stride) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]
    span = 1 + sum(steps * stride for steps, stride in extents)
    return span < tensor.numel() or any(stride == 0 for _, stride in extents)


def check(parameter: Tensor, name: str) -> None:
    """Raise ValueError, naming the parameter, if its local shard cannot be updated in place."""
    if getattr(parameter, "_fsdp_flattened", False):  # so FullyShardedDataParallel marks them
        raise ValueError(
            f"{name}: a parameter of FSDP1 (FullyShardedDataParallel), a piece of a flat buffer: bits and blocks would "
            "depend on the wrapping and the number of ranks, and checkpoints would mix them up. Shard the model with "
            "FSDP2: torch.distributed.fsdp.fully_shard(model), with accelerate fsdp_version: 2."
        )
    if isinstance(parameter, DTensor):
        for placement in parameter.placements:
            if placement.is_partial():
                raise ValueError(
                    f"{name}: DTensor with placements {tuple(parameter.placements)} is a partial sum, whose "
                    "local tensors are not the parameter. Redistribute it to Shard or Replicate first, for "
                    "example parameter.redistribute(placements=[Shard(0)])."
                )
        shard = parameter.to_local().detach()
    else:
        shard = parameter
    if shard.layout != torch.strided:
        raise ValueError(f"{name}: layout {shard.layout} is not supported; use a strided (dense) tensor.")
    if shard.is_neg():
        raise ValueError(f"{name}: the tensor is lazily negated; give the optimizer tensor.resolve_neg().")
    if not has_storage(shard):
        raise ValueError(
            f"{name}: a {type(shard).__name__} without storage of its own cannot be updated in place; give the "
            "optimizer a plain tensor (and step while its storage is allocated)."
        )
    if shard.numel() == 0 or _is_dense(shard):
        return
    what = "overlapping storage" if _overlaps_itself(shard) else "gaps in its storage"
    raise ValueError(
        f"{name}: the local tensor has {what} (shape {tuple(shard.shape)}, stride {shard.stride()}). "
        "The optimizer updates storage in place and needs a dense tensor; give it a "
        "contiguous parameter, for example nn.Parameter(parameter.detach().contiguous())."
    )


def check_disjoint(shards: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two of the (name, local tensor) pairs share memory: each would be updated twice."""
    spans = sorted(
        (str(shard.device), shard.data_ptr(), shard.data_ptr() + shard.numel() * shard.element_size(), name)
        for name, shard in shards
        if shard.numel() and shard.device.type != "meta"
    )
    for first, second in itertools.pairwise(spans):
        if first[0] == second[0] and second[1] < first[2]:
            raise ValueError(
                f"{first[3]} and {second[3]} have overlapping storage on {first[0]}, so a step would update "
                "the shared elements twice. Pass one of them only, or give each its own storage."
            )


def local_shapes(tensor: Tensor) -> Iterator[tuple[int, ...]]:
    """Shape of the local shard on every rank of the tensor's mesh, computed without communication."""
    if not isinstance(tensor, DTensor):
        yield tuple(tensor.shape)
        return
    # Private, and for descriptions alone: imported where it is used.
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh_shape = tensor.device_mesh.shape
    for coordinate in itertools.product(*(range(size) for size in mesh_shape)):
        shape, _ = _compute_local_shape_and_global_offset(
            tensor.shape, mesh_shape, list(coordinate), tensor.placements
        )
        yield tuple(shape)


def describe(tensor: Tensor) -> str:
    """Short text such as ``DTensor [Shard(dim=0)]`` or ``a plain tensor``."""
    if not isinstance(tensor, DTensor):
        return "a plain tensor"
    return f"DTensor {list(tensor.placements)}"


def cuts(tensor: Tensor) -> list[tuple[int, int]]:
    """(dimension, number of parts) for each mesh dimension that cuts ``tensor``, in mesh order."""
    if not isinstance(tensor, DTensor):
        return []
    return [
        (placement.dim, size)
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape)
        if hasattr(placement, "dim")
    ]


def is_strided(tensor: Tensor) -> bool:
    """Whether a placement of ``tensor`` is a _StridedShard: its mesh dimensions cut from right to left."""
    return isinstance(tensor, DTensor) and any(hasattr(p, "split_factor") for p in tensor.placements)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory, of the global tensor: the same on every rank."""
    strides, shape = tensor.stride(), tensor.shape
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    # Dimensions of size one lie anywhere: their strides mean nothing.
    slowest, *others = sorted(
        (dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim]
    )
    return (slowest, *(dim for dim, size in enumerate(shape) if size == 1), *others)


def local_box(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of this rank's shard as one box of the global tensor, an empty one if it is not on the mesh.

    Raises ValueError if the shard is none: a _StridedShard's rows need not lie together.
    """
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    if not is_on_mesh(tensor):
        return (0,) * tensor.dim(), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local(tensor).shape):
        raise ValueError(
            f"{describe(tensor)}: the local shard of shape {tuple(local(tensor).shape)} is not one box of the global "
            f"tensor (torch computes {tuple(shape)} for this rank), so a checkpoint cannot hold it."
        )
    return tuple(shape), tuple(offset)


class _Reduction(NamedTuple):
    """One mesh: the process groups to add over, one after the other, and which rows of ``buckets``, joined, count.

    ``rows`` are in an order that all ranks share. ``weights`` are 1, or 0 for a shard that another rank of the groups
    holds too and counts.
    """

    device_type: str
    groups: list[Any]
    buckets: list[int]
    rows: list[int]
    weights: list[float]


def sums_over_shards(
    parameters: Sequence[Sequence[Tensor]], positions: Sequence[Sequence[Any]]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """A function that adds what every rank computed of its shards, for parameters in buckets.

    ``positions`` sort the parameters alike on all ranks, whose buckets may differ (a gradient that is missing on one
    rank leaves its dtype to be guessed there).

    It takes a float32 tensor of (parameters, k) for each bucket, 0 where there is nothing to add, and returns the same
    for whole tensors: bit-equal on all ranks, copies counted once. Each mesh is one all-reduce (of float64, so that the
    order hardly matters) over the whole mesh or its one dimension with shards; several, one a dimension, only if
    several have shards and the mesh is not all of the default process group. Every rank of the mesh has to call it;
    on other ranks the sums of its parameters stay what they are.
    """
    found = [
        (positions[bucket][row], bucket, row, parameter)
        for bucket, members in enumerate(parameters)
        for row, parameter in enumerate(members)
        if isinstance(parameter, DTensor) and is_on_mesh(parameter)
    ]
    by_mesh: dict[Any, list[tuple[int, int, DTensor]]] = {}
    for _, bucket, row, parameter in sorted(found, key=lambda entry: entry[0]):
        by_mesh.setdefault(parameter.device_mesh, []).append((bucket, row, parameter))
    sizes = list(map(len, parameters))
    reductions = [_reduction(mesh, members, sizes) for mesh, members in by_mesh.items()]
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def add(sums: Sequence[Tensor]) -> list[Tensor]:
        result = list(sums)
        for number, (device_type, groups, buckets, rows, weights) in enumerate(reductions):
            if not groups:
                continue
            device = sums[buckets[0]].device
            if device.type != device_type:  # CPUOffloadPolicy: the mesh's backend reduces elsewhere
                device = torch.device(device_type)
            if number not in kept:
                factors = torch.tensor(weights, dtype=torch.float64, device=device)[:, None]
                kept[number] = torch.tensor(rows, device=device), factors
            index, factors = kept[number]
            joined = torch.cat([result[bucket].to(device) for bucket in buckets]).double()
            packed = joined[index] * factors
            for group in groups:
                dist.all_reduce(packed, group=group)
            whole = joined.index_copy_(0, index, packed).float()
            parts = torch.split(whole, [sizes[bucket] for bucket in buckets])
            for bucket, part in zip(buckets, parts):
                result[bucket] = part.to(result[bucket].device)
        return result

    return add


def _reduction(mesh: Any, members: list[tuple[int, int, DTensor]], sizes: Sequence[int]) -> _Reduction:
    """For ``members``: (bucket, row in it, parameter), in the order that all ranks share."""
    cut = [
        dim
        for dim in range(mesh.ndim)
        if mesh.size(dim) > 1 and any(hasattr(p.placements[dim], "dim") for *_, p in members)
    ]
    if len(cut) > 1 and mesh.size() == dist.get_world_size():
        groups, dims = [dist.group.WORLD], list(range(mesh.ndim))
    else:
        groups, dims = [mesh.get_group(dim) for dim in cut], cut
    coordinate = mesh.get_coordinate()
    buckets = sorted({bucket for bucket, *_ in members})
    starts = itertools.accumulate((sizes[bucket] for bucket in buckets), initial=0)
    first = dict(zip(buckets, starts))
    rows, weights = [], []
    for bucket, row, parameter in members:
        rows.append(first[bucket] + row)
        copies = (dim for dim in dims if not hasattr(parameter.placements[dim], "dim"))
        weights.append(float(all(coordinate[dim] == 0 for dim in copies)))
    return _Reduction(mesh.device_type, groups, buckets, rows, weights)


def any_rank(parameters: Iterable[Tensor], flags: Tensor) -> Tensor:
    """``flags`` (float32, ``(n,)``, 0 or 1, on the CPU), 1 where they are on any rank that has to decide alike.

    Those are all ranks that share a mesh with this one, or with one that does, and so on. Every rank of the meshes has
    to call it.
    """
    meshes = dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor) and is_on_mesh(p))
    shared = [mesh for mesh in meshes if mesh.size() > 1]
    if not shared:
        return flags
    whole = [mesh for mesh in shared if mesh.size() == dist.get_world_size()]
    if whole:  # one mesh of all ranks tells all
        return _spread(whole[:1], flags)
    # The last number: whether any of the mesh's ranks is on another mesh too, which may lead to yet others.
    joined = _spread(shared, torch.cat([flags, torch.tensor([float(len(shared) > 1)])]))
    if joined[-1]:
        for _ in range(dist.get_world_size()):  # no way from mesh to mesh is longer
            joined = _spread(shared, joined)
    return joined[:-1]


def _spread(meshes: Iterable[Any], flags: Tensor) -> Tensor:
    """``flags``, as large as on any rank of the meshes, one mesh after the other; may change them in place."""
    for mesh in meshes:
        flags = flags.to(mesh.device_type)
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return flags.cpu()


def like(
    parameter: Tensor, shard: Tensor, shape: Sequence[int], dims: Sequence[int | None] | None = None
) -> Tensor:
    """``shard`` as this rank's part of a tensor of global ``shape``, on the mesh of ``parameter``; shares storage.

    Cut as the parameter is: along dimension ``dims[d]`` where the parameter is cut along ``d`` (whole if that is None;
    the same dimensions without ``dims``). For a plain parameter it is ``shard`` itself. Runs no operator and, unlike
    `DTensor.from_local`, leaves the shard on its device, which under CPUOffloadPolicy is not the mesh's.
    """
    if not isinstance(parameter, DTensor):
        return shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size(shape)
    if tuple(shape) == tuple(parameter.shape):
        stride = parameter.stride()
    else:
        stride = tuple(_contiguous_stride(shape))
    meta = TensorMeta(shape, stride, shard.dtype)
    spec = parameter._spec
    if dims is None or list(dims) == list(range(len(dims))):
        spec = dataclasses.replace(spec, tensor_meta=meta)
    else:
        spec = DTensorSpec(
            spec.mesh, tuple(_moved(placement, dims) for placement in spec.placements), tensor_meta=meta
        )
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def nothing_of(
    parameter: Tensor, shape: Sequence[int], dims: Sequence[int | None] | None, dtype: torch.dtype
) -> Tensor:
    """What `like` gives on a rank that is not on the parameter's mesh, where torch has empty local tensors."""
    return like(parameter, local(parameter).detach().new_empty(0, dtype=dtype), shape, dims)


def part(parameter: Tensor, value: Tensor, dims: Sequence[int | None] | None = None) -> Tensor:
    """This rank's part of ``value``, a tensor like ``parameter`` or one whose dimensions `like` moved to ``dims``.

    ``value`` may be a DTensor, whose shard it is, or the whole plain tensor. Raises ValueError for a DTensor that is
    cut in another way than ``parameter``.
    """
    if not isinstance(parameter, DTensor):
        return value
    if not is_on_mesh(parameter):
        return value.new_empty(0) if not isinstance(value, DTensor) else local(value)
    spec = parameter._spec
    placements = tuple(
        placement if dims is None else _moved(placement, dims) for placement in spec.placements
    )
    if isinstance(value, DTensor):
        if value.device_mesh != spec.mesh or value.placements != placements:
            raise ValueError(
                f"the state dict has a {describe(value)} on {value.device_mesh}, the parameter needs "
                f"{list(placements)} on {spec.mesh}."
            )
        return local(value)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(value.shape, spec.mesh, placements)
    return value[tuple(slice(start, start + size) for start, size in zip(offset, shape))]


def _contiguous_stride(shape: Sequence[int]) -> list[int]:
    stride, result = 1, []
    for size in reversed(shape):
        result.append(stride)
        stride *= max(size, 1)
    return result[::-1]


def new_like(
    parameter: Tensor, shape: Sequence[int], dims: Sequence[int | None], dtype: torch.dtype
) -> Tensor:
    """A zero tensor of global ``shape``, cut as `like` says, on the parameter's device."""
    device = local(parameter).device
    if not isinstance(parameter, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = tuple(_moved(placement, dims) for placement in parameter.placements)
    size, _ = compute_local_shape_and_global_offset(tuple(shape), parameter.device_mesh, placements)
    return like(parameter, torch.zeros(size, dtype=dtype, device=device), shape, dims)


def placed(tensor: Tensor) -> dict[str, Any]:
    """``mesh`` (its shape) and ``placements`` of a DTensor, as JSON; None of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return {"mesh": None, "placements": None}
    return {"mesh": list(tensor.device_mesh.shape), "placements": [str(p) for p in tensor.placements]}


def _moved(placement: Any, dims: Sequence[int | None]) -> Any:
    """``placement`` on dimension ``dims[d]`` instead of ``d``."""
    if not hasattr(placement, "dim"):
        return placement
    dim = dims[placement.dim]
    if dim is None:
        return Replicate()
    if isinstance(placement, Shard) and not hasattr(placement, "split_factor"):
        return Shard(dim)
    return type(placement)(dim, split_factor=placement.split_factor)
