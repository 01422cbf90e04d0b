"""Models that are not wrapped by FSDP2: FSDP1 is refused, DDP steps as plain tensors do."""

from __future__ import annotations

import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import bnb_fsdp


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(ranks.device())


def loss(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(8, 64, generator=generator).to(ranks.device())
    result: torch.Tensor = net(x).square().mean()
    return result


def fsdp1(original: bool) -> dict[str, str]:
    """Errors of an optimizer made after the wrapping, and of one made before, at its step."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    errors = {}
    net = model()
    early = bnb_fsdp.AdamW8bit(net.named_parameters())
    wrapped = FullyShardedDataParallel(net, use_orig_params=original, device_id=ranks.device())
    try:
        bnb_fsdp.AdamW8bit(wrapped.named_parameters())
    except ValueError as error:
        errors["after"] = str(error)
    if original:  # else the optimizer's parameters are no longer the model's
        for parameter in wrapped.parameters():
            parameter.grad = torch.ones_like(parameter)
        try:
            early.step()
        except ValueError as error:
            errors["before"] = str(error)
        errors["state"] = str(len(early.state_dict()["state"]))
    return errors


@pytest.mark.parametrize("original", [True, False], ids=["original parameters", "flat parameters"])
def test_fsdp1_is_refused_with_what_to_do_instead(original: bool) -> None:
    for errors in ranks.run(2, fsdp1, original):
        for when in ("after", "before") if original else ("after",):
            assert "a parameter of FSDP1" in errors[when] and "fully_shard(model)" in errors[when], errors
        assert errors.get("state", "0") == "0"


def made_too_early(sharded_first: bool) -> list[str]:
    """Warnings of two steps of an optimizer made before or after `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    net = model()
    if sharded_first:
        fully_shard(net)
    optimizer = bnb_fsdp.AdamW8bit(net.named_parameters())
    if not sharded_first:
        fully_shard(net)
    loss(net, 0, dist.get_rank()).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    return [str(warning.message) for warning in caught if "fully_shard" in str(warning.message)]


def test_an_optimizer_made_before_fully_shard_says_so_once() -> None:
    for texts in ranks.run(2, made_too_early, False):
        assert len(texts) == 1
        assert (
            "none of the 4 parameters has a gradient" in texts[0]
            and "make the optimizer after it" in texts[0]
        )
    assert ranks.run(2, made_too_early, True) == [[], []]


def ddp() -> bool:
    """Whether ranks stay equal and end where one process with the mean gradient ends."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net, alone = model(), model()
    wrapped = nn.parallel.DistributedDataParallel(net)
    ours = bnb_fsdp.AdamW8bit(wrapped.parameters(), lr=1e-2)
    twin = bnb_fsdp.AdamW8bit(alone.parameters(), lr=1e-2)
    for step in range(5):
        loss(wrapped, step, rank).backward()
        expected = [torch.zeros_like(p) for p in alone.parameters()]
        for other in range(world):
            alone.zero_grad()
            loss(alone, step, other).backward()
            for total, p in zip(expected, alone.parameters()):
                total += p.grad / world
        for p, q, mean in zip(net.parameters(), alone.parameters(), expected):
            torch.testing.assert_close(p.grad, mean)
            q.grad = p.grad.clone()  # rounding of the reduction is not what is compared
        ours.step()
        twin.step()
        ours.zero_grad()
    same = all(torch.equal(p, q) for p, q in zip(net.parameters(), alone.parameters()))
    for p in net.parameters():
        first = p.detach().clone()
        dist.broadcast(first, 0)
        same = same and torch.equal(first, p.detach())
    return same


def test_ddp_steps_as_plain_tensors() -> None:
    assert ranks.run(2, ddp) == [True, True]
