"""State dicts to and from bitsandbytes, torch.optim and lion-pytorch, made by those packages on the CPU.

bitsandbytes' CPU code rounds otherwise than its CUDA kernels, which ours follow. So what is loaded is compared bit for
bit, our next step with `bnb_fsdp.rules` fed with the other package's raw tensors, and a round trip through ours with
the other package's own next step.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from interchange_helpers import (
    RULES,
    SETTINGS,
    assert_is_what_bitsandbytes_has,
    every_class,
    hyper,
    ours,
    parameters,
    params_of,
    raw,
    theirs,
    trained,
    twin,
)
from optimizer_helpers import assert_same, normal, snapshot, train
from state_dict_helpers import LAYOUTS, through_a_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import bnb_fsdp
from bnb_fsdp import cli, rules

try:
    from lion_pytorch import Lion
except ImportError:
    Lion = None

WRAPPED = "__bnb_optimizer_quant_state__"
PLAIN = ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "Adagrad", "AdEMAMix")
HALF_A_GAP = 0.0071
"""Largest error of one quantisation, in parts of a block's scale."""


def unwrapped(state_dict: Any) -> Any:
    """As bitsandbytes before 0.49.2."""
    result = copy.deepcopy(state_dict)
    for values in result["state"].values():
        values.update(values.pop(WRAPPED))
    return result


@pytest.mark.parametrize("flat", [False, True], ids=["wrapped", "flat"])
@every_class
def test_a_bitsandbytes_dict_is_taken_bit_for_bit_and_steps_as_the_rule_does(
    name: str, bits: int, flat: bool
) -> None:
    source = trained(name, bits)
    optimizer = ours(name, bits, twin(params_of(source)), backend="torch")
    state_dict = source.state_dict()
    optimizer.load_state_dict(through_a_file(unwrapped(state_dict) if flat else state_dict))
    assert_is_what_bitsandbytes_has(name, optimizer, source)
    assert optimizer.load_report.requantized == 0
    assert optimizer.load_report.parameters == len(parameters())
    memory = {t.data_ptr() for s in source.state.values() for t in s.values() if isinstance(t, Tensor)}
    assert not memory & {t.data_ptr() for s in optimizer.state.values() for t in s.values()}
    if name in ("LAMB", "LARS"):
        train(optimizer, 1)  # its scales are other tests' matter
        return
    before = [(p.detach().clone(), raw(name, copy.deepcopy(source.state[p]))) for p in params_of(source)]
    train(optimizer, 1, first=9)
    for p, (old, (states, scales)) in zip(params_of(optimizer), before):
        h, rule = hyper(name), RULES[name]
        args = (rule, h, 4, p.grad.flatten(), old.flatten(), tuple(s.flatten() for s in states))
        if scales:
            wanted, codes, absmax = rules.step8(*args, scales)
            assert_same([optimizer.state[p][k.replace("state", "absmax")] for k in rule.states], list(absmax))
        else:
            wanted, codes = rules.step32(*args)
        assert_same(p.detach().flatten(), wanted)
        assert_same([optimizer.state[p][k].flatten() for k in rule.states], list(codes))


@every_class
def test_round_trip_through_ours_continues_bitsandbytes_own_run(name: str, bits: int) -> None:
    source = trained(name, bits)
    between = ours(name, bits, twin(params_of(source)))
    between.load_state_dict(source.state_dict())
    target = theirs(name, bits, twin(params_of(source)), lr=0.7)
    target.load_state_dict(through_a_file(bnb_fsdp.export_state_dict(between, "bitsandbytes")))
    for old, new in zip(source.param_groups, target.param_groups):
        assert {**old, "params": None} == {**new, "params": None}
    if name == "AdEMAMix" and bits == 8:  # where blocks are not full, 8-bit state goes as floats
        for p, q in zip(params_of(source), params_of(target)):
            if p.numel() % 256:
                assert target.state[q]["state1"].dtype == torch.float32
                target.state[q] = copy.deepcopy(source.state[p])
    for optimizer in (source, target):
        train(optimizer, 2, first=5)
    for p, q in zip(params_of(source), params_of(target)):
        assert_same(p.detach(), q.detach())
        old, new = dict(source.state[p]), dict(target.state[q])
        assert set(old) == set(new)
        assert_same({key: old[key] for key in sorted(old)}, {key: new[key] for key in sorted(old)})


@every_class
def test_ours_to_bitsandbytes_dict_to_ours_is_bit_equal(name: str, bits: int) -> None:
    first = ours(name, bits, parameters())
    train(first, 3)
    before = snapshot(first)
    exported = bnb_fsdp.export_state_dict(first, format="bitsandbytes")
    assert_same(snapshot(first), before)
    memory = {t.data_ptr() for s in first.state.values() for t in s.values() if t.numel()}
    inner = [t for s in exported["state"].values() for t in s[WRAPPED].values()]
    assert not memory & {t.data_ptr() for t in inner}
    second = ours(name, bits, twin(params_of(first)))
    second.load_state_dict(through_a_file(exported))
    exact = [not (name == "AdEMAMix" and bits == 8 and p.numel() % 256) for p in params_of(first)]
    for _ in range(2):
        for p, q, same in zip(params_of(first), params_of(second), exact):
            if same:
                assert_same(dict(first.state[p]), dict(second.state[q]))
                assert_same(p.detach(), q.detach())
            elif p.numel() >= 4096:
                assert second.state[q]["state1"].dtype == torch.uint8
        for optimizer in (first, second):
            train(optimizer, 1, first=7)


def values_of(state: Any, key: str, shape: Any, signed: bool = True) -> Tensor:
    """float32 values by bitsandbytes' own dequantisation."""
    if state[key].dtype != torch.uint8:
        return state[key].float()
    absmax = state[key.replace("state", "absmax")]
    code = F.create_dynamic_map(signed)
    return F.dequantize_blockwise(state[key].contiguous(), absmax=absmax, code=code, blocksize=256).view(
        shape
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_blocks_that_lie_elsewhere_in_memory_are_requantised_and_counted(layout: str) -> None:
    value = LAYOUTS[layout]()
    source = bnb.optim.Lion8bit([nn.Parameter(value.contiguous())], lr=1e-2, min_8bit_size=0)
    train(source, 2)
    [given] = source.state.values()
    optimizer = bnb_fsdp.Lion8bit([nn.Parameter(value)], min_8bit_size=0)
    optimizer.load_state_dict(source.state_dict())
    [(p, mine)] = optimizer.state.items()
    place = torch.empty(p.shape, dtype=torch.long).as_strided(p.shape, p.stride())
    place.as_strided((p.numel(),), (1,)).copy_(torch.arange(p.numel()))
    table = F.create_dynamic_map(True)
    found = table[mine["state1"].long()] * mine["absmax1"][place // 256]
    wanted = values_of(given, "state1", p.shape)
    bound = HALF_A_GAP * max([0.0, *given["absmax1"].tolist()]) * 1.02
    assert ((found - wanted).abs() <= bound).all()
    report = optimizer.load_report
    assert report.blocks == -(-p.numel() // 256)
    if p.is_contiguous():
        assert report.requantized == 0 and torch.equal(found, wanted)
    if layout in ("transposed", "channels_last", "permuted"):
        assert report.requantized > 0
    if report.requantized == 0:
        assert torch.equal(found, wanted)
    # and back
    exported = bnb_fsdp.export_state_dict(optimizer)["state"][0][WRAPPED]
    assert exported["state1"].is_contiguous() and exported["state1"].shape == p.shape
    assert ((values_of(exported, "state1", p.shape) - found).abs() <= bound).all()
    if report.requantized == 0:
        assert torch.equal(exported["state1"], given["state1"])
    train(optimizer, 1)


@pytest.mark.parametrize("name", PLAIN)
def test_their_32_bit_state_becomes_8_bit_by_one_quantisation(name: str) -> None:
    source = trained(name, 32)
    optimizer = ours(name, 8, twin(params_of(source)), min_8bit_size=0)
    optimizer.load_state_dict(source.state_dict())
    rule = RULES[name]
    blocks = 0
    for p, q in zip(params_of(source), params_of(optimizer)):
        states, _ = raw(name, source.state[p])
        for key, signed, wanted in zip(rule.states, rule.signed, states):
            mine = optimizer.state[q]
            assert mine[key].dtype == torch.uint8
            padded = nn.functional.pad(wanted.flatten(), (0, -wanted.numel() % 256)).view(-1, 256)
            absmax = mine[key.replace("state", "absmax")]
            assert_same(absmax, padded.abs().amax(1))
            error = (values_of(mine, key, p.shape, signed) - wanted).abs().flatten()
            limit = HALF_A_GAP * absmax.repeat_interleave(256)[: wanted.numel()]
            assert (error <= limit).all()
            blocks += len(absmax)
    assert optimizer.load_report == (len(parameters()), blocks, blocks)
    train(optimizer, 1)


@pytest.mark.parametrize("name", PLAIN)
def test_their_8_bit_state_becomes_32_bit_exactly(name: str) -> None:
    source = trained(name, 8)
    optimizer = ours(name, 32, twin(params_of(source)))
    optimizer.load_state_dict(source.state_dict())
    rule = RULES[name]
    for p, q in zip(params_of(source), params_of(optimizer)):
        states, scales = raw(name, source.state[p])
        for number, (key, signed) in enumerate(zip(rule.states, rule.signed)):
            given = {"state1": states[number], **({"absmax1": scales[number]} if scales else {})}
            wanted = values_of(given, "state1", p.shape, signed)
            assert torch.equal(optimizer.state[q][key], wanted)
    assert optimizer.load_report == (len(parameters()), 0, 0)


# torch.optim

TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-7}),
    "AdamW": (torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"alpha": 0.9, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"eps": 1e-6, "weight_decay": 0.1}),
    "Lion": (Lion, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
}
NAMES = {
    "Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg",), "Adagrad": ("sum",), "Lion": ("exp_avg",),
}  # fmt: skip
every_torch = pytest.mark.parametrize("name", TORCH)


def torchs(name: str, params: Any, **kwargs: Any) -> Any:
    kind, settings = TORCH[name]
    if kind is None:
        pytest.skip("needs lion-pytorch")
    return kind(params, **{"lr": 1e-2, **settings, **kwargs})


@every_torch
def test_a_torch_dict_is_taken_exactly_into_32_bit_state_and_steps_alike(name: str) -> None:
    source = torchs(name, parameters())
    train(source, 3)
    optimizer = ours(name, 32, twin(params_of(source)))
    optimizer.load_state_dict(through_a_file(source.state_dict()))
    [group] = optimizer.param_groups
    for key, value in TORCH[name][1].items():
        assert group[key] == value
    assert group["lr"] == 1e-2 and group["optim_bits"] == 32
    assert not {"amsgrad", "maximize", "foreach", "nesterov", "centered", "lr_decay"} & set(group)
    for p, q in zip(params_of(source), params_of(optimizer)):
        mine, given = optimizer.state[q], source.state[p]
        assert mine["step"].dtype == torch.float32 and mine["step"] == given.get("step", 1)
        for number, key in enumerate(NAMES[name]):
            assert given[key].dtype == p.dtype  # float32, bfloat16
            assert_same(mine[f"state{number + 1}"], given[key].float())
    for each in (source, optimizer):
        train(each, 1, first=5)
    for p, q in zip(params_of(source), params_of(optimizer)):
        # torch decays before the update, and keeps bfloat16 state
        scale = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[p.dtype]
        torch.testing.assert_close(p, q, rtol=scale, atol=scale)


@every_torch
def test_a_torch_dict_becomes_8_bit_state_by_one_quantisation(name: str) -> None:
    source = torchs(name, parameters())
    train(source, 3)
    optimizer = ours(name, 8, twin(params_of(source)))
    optimizer.load_state_dict(source.state_dict())
    rule = RULES[name]
    blocks = 0
    for p, q in zip(params_of(source), params_of(optimizer)):
        for key, signed, given in zip(rule.states, rule.signed, NAMES[name]):
            mine, wanted = optimizer.state[q], source.state[p][given].float()
            if p.numel() < 4096:
                assert_same(mine[key], wanted)
                continue
            absmax = mine[key.replace("state", "absmax")]
            error = (values_of(mine, key, p.shape, signed) - wanted).abs().flatten()
            assert (error <= HALF_A_GAP * absmax.repeat_interleave(256)[: p.numel()]).all()
            blocks += len(absmax)
    assert optimizer.load_report == (len(parameters()), blocks, blocks)
    train(optimizer, 1)


@every_torch
def test_round_trip_through_ours_continues_torchs_own_run(name: str) -> None:
    source = torchs(name, parameters())
    train(source, 3)
    between = ours(name, 32, twin(params_of(source)))
    between.load_state_dict(source.state_dict())
    if name in ("SGD", "Lion"):
        assert all(values["step"] == 1 for values in between.state.values())
    target = torchs(name, twin(params_of(source)), lr=0.5)
    state_dict = through_a_file(bnb_fsdp.export_state_dict(between, "torch"))
    if name == "Adam":
        assert state_dict["param_groups"][0]["decoupled_weight_decay"] is True
    target.load_state_dict(state_dict)
    for each in (source, target):
        train(each, 2, first=5)
    for p, q in zip(params_of(source), params_of(target)):
        assert_same(p.detach(), q.detach())
        old, new = source.state[p], target.state[q]
        assert_same({key: old[key] for key in sorted(old)}, {key: new[key] for key in sorted(new)})


@every_torch
@pytest.mark.parametrize(
    "layout", ["vector", "transposed", "channels_last", "permuted, whole blocks", "scalar"]
)
def test_8_bit_state_goes_to_torch_as_the_values_bitsandbytes_sees(name: str, layout: str) -> None:
    value = LAYOUTS[layout]()
    optimizer = ours(name, 8, [nn.Parameter(value)], min_8bit_size=0)
    train(optimizer, 3)
    [(p, mine)] = optimizer.state.items()
    entry = bnb_fsdp.export_state_dict(optimizer, "torch")["state"][0]
    place = torch.empty(p.shape, dtype=torch.long).as_strided(p.shape, p.stride())
    place.as_strided((p.numel(),), (1,)).copy_(torch.arange(p.numel()))
    rule = RULES[name]
    for key, signed, given in zip(rule.states, rule.signed, NAMES[name]):
        absmax = mine[key.replace("state", "absmax")]
        wanted = F.create_dynamic_map(signed)[mine[key].long()] * absmax[place // 256]
        assert entry[given].dtype == torch.float32 and entry[given].is_contiguous()
        assert torch.equal(entry[given], wanted)
    target = torchs(name, [nn.Parameter(value.clone())])
    target.load_state_dict(bnb_fsdp.export_state_dict(optimizer, "torch"))
    train(target, 1, first=5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 64), nn.Linear(64, 96)


def test_dicts_keyed_by_name_load_by_name() -> None:
    model = Model()
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(source, 2)
    state_dict = get_optimizer_state_dict(model, source, options=StateDictOptions(full_state_dict=True))
    assert "first.weight" in state_dict["state"]
    for names in (True, False):
        other = Model()
        given = other.named_parameters() if names else other.parameters()
        optimizer = bnb_fsdp.AdamW8bit(given)
        optimizer.load_state_dict(copy.deepcopy(state_dict))
        for p, q in zip(model.parameters(), other.parameters()):
            assert optimizer.state[q]["state1"].shape == p.shape and optimizer.state[q]["step"] == 2
            if p.numel() < 4096:
                assert_same(optimizer.state[q]["state1"], source.state[p]["exp_avg"])
    reordered = Model()
    backwards = list(reordered.named_parameters())[::-1]
    optimizer = bnb_fsdp.AdamW32bit(backwards)
    optimizer.load_state_dict(copy.deepcopy(state_dict))
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in backwards]
    for p, q in zip(model.parameters(), reordered.parameters()):
        assert_same(optimizer.state[q]["state2"], source.state[p]["exp_avg_sq"])
    of_bitsandbytes = bnb.optim.AdamW8bit(model.parameters(), lr=1e-2)
    train(of_bitsandbytes, 2)
    state_dict = get_optimizer_state_dict(model, of_bitsandbytes)
    assert "first.weight" in state_dict["state"]
    optimizer = bnb_fsdp.AdamW8bit(backwards)
    optimizer.load_state_dict(copy.deepcopy(state_dict))
    for p, q in zip(model.parameters(), reordered.parameters()):
        for key in ("state1", "state2"):
            assert_same(optimizer.state[q][key], of_bitsandbytes.state[p][key])
    # torch.optim keeps names beside numbers
    named = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    named.load_state_dict(source.state_dict())
    optimizer = bnb_fsdp.AdamW32bit(backwards)
    optimizer.load_state_dict(named.state_dict())
    for p, q in zip(model.parameters(), reordered.parameters()):
        assert_same(optimizer.state[q]["state1"], source.state[p]["exp_avg"])


def test_what_else_a_group_has_comes_along_and_what_belongs_to_the_run_stays() -> None:
    params = parameters()
    source = torch.optim.AdamW(
        [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.2, "betas": [0.5, 0.6]}]
    )
    torch.optim.lr_scheduler.LambdaLR(source, lambda step: 0.5)
    train(source, 1)
    mine = twin(params)
    optimizer = bnb_fsdp.AdamW8bit(
        [{"params": mine[:3]}, {"params": mine[3:]}],
        min_8bit_size=5000,
        overrides={mine[3]: {"optim_bits": 32}},
    )
    optimizer.load_state_dict(source.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert all(group["min_8bit_size"] == 5000 for group in optimizer.param_groups)
    assert optimizer.state[mine[3]]["state1"].dtype == torch.float32
    assert optimizer.state[mine[0]]["state1"].dtype == torch.uint8


@pytest.mark.parametrize(("name", "bits"), [("AdamW", 8), ("Lion", 32), ("SGD", 8)])
def test_never_stepped_optimizers_and_parameters_without_gradients(name: str, bits: int) -> None:
    for source in (theirs(name, bits, parameters()), torchs(name, parameters(), weight_decay=0.1)):
        optimizer = ours(name, bits, parameters())
        train(optimizer, 2)
        optimizer.load_state_dict(source.state_dict())
        assert len(optimizer.state) == 0
        [group] = optimizer.param_groups
        assert group["lr"] == 1e-2 and group["weight_decay"] in (0.1, 0.3)
        params_of(source)[1].requires_grad_(False)
        train(source, 1)
        optimizer.load_state_dict(source.state_dict())
        assert len(optimizer.state) == len(parameters()) - 1
    exported = bnb_fsdp.export_state_dict(ours(name, bits, parameters()))
    assert exported["state"] == {}
    theirs(name, bits, parameters()).load_state_dict(exported)


def test_a_dict_of_sgd_whose_buffers_are_none_gives_no_state() -> None:
    source = torchs("SGD", parameters())
    train(source, 1)
    state_dict = copy.deepcopy(source.state_dict())
    state_dict["state"][0]["momentum_buffer"] = None
    optimizer = ours("SGD", 8, parameters())
    optimizer.load_state_dict(state_dict)
    assert len(optimizer.state) == len(parameters()) - 1


def test_the_first_step_of_sgd_after_loading_uses_the_momentum() -> None:
    source = torchs("SGD", [nn.Parameter(torch.zeros(5000))], weight_decay=0.0)
    train(source, 1)
    optimizer = ours("SGD", 32, [nn.Parameter(torch.zeros(5000))])
    optimizer.load_state_dict(source.state_dict())
    [(p, mine)] = optimizer.state.items()
    old = mine["state1"].clone()
    p.grad = torch.zeros(5000)
    optimizer.step()
    torch.testing.assert_close(mine["state1"], 0.8 * old, rtol=1e-6, atol=0)


def test_maps_that_differ_by_rounding_keep_the_codes() -> None:
    source = trained("AdamW", 8)
    state_dict = copy.deepcopy(source.state_dict())
    for values in state_dict["state"].values():
        if "qmap1" in values[WRAPPED]:
            qmap = values[WRAPPED]["qmap1"]
            values[WRAPPED]["qmap1"] = torch.nextafter(qmap, qmap * 2)
    optimizer = ours("AdamW", 8, twin(params_of(source)))
    optimizer.load_state_dict(state_dict)
    assert_is_what_bitsandbytes_has("AdamW", optimizer, source)


def test_zero_blocks_are_taken_as_they_are() -> None:
    source = trained("AdamW", 8)
    p = params_of(source)[0]
    for code in (0, 127, 255):
        source.state[p]["state1"][0] = code
        source.state[p]["absmax1"][0] = 0.0
        optimizer = ours("AdamW", 8, twin(params_of(source)))
        optimizer.load_state_dict(source.state_dict())
        assert_is_what_bitsandbytes_has("AdamW", optimizer, source)


@pytest.mark.parametrize("numel", [4096 + 300, 4096 + 256])
def test_ademamix_scales_of_cuda_are_read_where_cuda_reads_them(numel: int) -> None:
    source = theirs("AdEMAMix", 8, [nn.Parameter(normal(numel))])
    train(source, 3)
    [given] = source.state.values()
    blocks = -(-numel // 256)
    fast, slow = given["absmax1"].clone()
    state_dict = copy.deepcopy(source.state_dict())
    flat = torch.zeros(2 * blocks)
    flat[:blocks] = fast
    flat[numel // 256 : numel // 256 + blocks] = slow  # csrc/kernels.cu: absmax1[(n + i) / 256]
    state_dict["state"][0][WRAPPED]["absmax1"] = flat.view(2, blocks)
    optimizer = ours("AdEMAMix", 8, [nn.Parameter(normal(numel))])
    optimizer.load_state_dict(state_dict)
    [mine] = optimizer.state.values()
    assert_same(mine["absmax3"], slow)
    assert_same(mine["absmax1"][:-1], fast[:-1])
    assert mine["absmax1"][-1] == (slow[0] if numel % 256 else fast[-1])


# Refusals


def first_state(state_dict: Any) -> Any:
    return state_dict["state"][0][WRAPPED]


def edit_states(**changes: Any) -> Any:
    """A change of the first parameter's wrapped state: a value, or a function of the old one; None removes it."""

    def apply(state_dict: Any) -> None:
        state = first_state(state_dict)
        for key, change in changes.items():
            if change is None:
                del state[key]
            else:
                state[key] = change(state.get(key)) if callable(change) else change

    return apply


def edit_group(**changes: Any) -> Any:
    return lambda state_dict: state_dict["param_groups"][0].update(changes)


def drop(*path: Any) -> Any:
    def apply(state_dict: Any) -> None:
        for key in path[:-1]:
            state_dict = state_dict[key]
        del state_dict[path[-1]]

    return apply


def set_step(value: Any) -> Any:
    return lambda state_dict: state_dict["state"][0].update(step=value)


def scales(count: int) -> Tensor:
    return torch.ones(count)


BITSANDBYTES_REFUSALS: dict[str, tuple[str, Any, str]] = {
    "blocks of 2048": ("AdamW", edit_states(absmax1=scales(3), absmax2=scales(3)), "before 0.44"),
    "another block size": ("AdamW", edit_states(absmax1=scales(94)), r"absmax1 .* \(94,\), expected .* \(24,\)"),
    "without blocks": ("AdamW", edit_states(max1=scales(1), new_max1=scales(1)), "without blocks"),
    "percentile clipping": ("AdamW", edit_states(gnorm_vec=scales(100)), "percentile clipping"),
    "another map": ("AdamW", edit_states(qmap1=lambda q: q * 1.001), "another code map"),
    "the map of the other state": ("AdamW", edit_states(qmap2=lambda q: q.flip(0)), "qmap2 .* another code map"),
    "a map of another size": ("AdamW", edit_states(qmap2=lambda q: q[:16]), "qmap2"),
    "no map": ("AdamW", edit_states(qmap1=None), r"has keys .*'qmap1'"),
    "no scales": ("AdamW", edit_states(absmax2=None), r"has keys .*'absmax2'"),
    "no second state": ("AdamW", edit_states(state2=None, qmap2=None, absmax2=None), "has keys"),
    "an unknown key": ("AdamW", edit_states(state9=scales(1)), "state9"),
    "no step": ("AdamW", drop("state", 0, "step"), r"has keys .* has \[.*'step'\]"),
    "half a step": ("AdamW", set_step(1.5), "count of steps"),
    "a step that is text": ("AdamW", set_step("two"), "count of steps"),
    "another shape": ("AdamW", edit_states(state1=lambda s: s.t().contiguous()), r"state1 .* \(300, 20\)"),
    "mixed bits": ("AdamW", edit_states(state2=lambda s: s.float()), "state2 .*float32"),
    "16-bit scales": ("AdamW", edit_states(absmax1=lambda s: s.bfloat16()), "absmax1 .*bfloat16"),
    "not a tensor": ("AdamW", edit_states(state2=lambda s: s.tolist()), "expected"),
    "strides": ("AdamW", edit_states(state1=lambda s: s.t().contiguous().t()), "another order on CUDA"),
    "an update norm": ("AdamW", edit_states(unorm_vec=scales(1)), "unorm_vec.*max_unorm"),
    "groups": ("AdamW", lambda d: d["param_groups"].append(dict(d["param_groups"][0])), "parameter groups of"),
    "a group's size": ("AdamW", lambda d: d["param_groups"][0]["params"].pop(), "parameter groups of"),
    "an unknown parameter": ("AdamW", lambda d: d["state"].update({99: d["state"][0]}), "unknown parameter 99"),
    "a group without betas": ("AdamW", drop("param_groups", 0, "betas"), r"lacks \['betas'\]"),
    "a rate that is none": ("AdamW", edit_group(lr=-1.0), "lr=-1.0"),
    "betas out of range": ("AdamW", edit_group(betas=(0.9, 1.5)), "betas"),
    "AdEMAMix' weight": ("AdamW", edit_group(alpha=2.0), "alpha=2.0: AdEMAMix"),
    "SGD's dampening": ("SGD", edit_group(betas=(0.9, 0.1)), "dampening=0.1"),
    "RMSprop's momentum": ("RMSprop", edit_group(betas=(0.9, 0.1)), "momentum=0.1"),
    "AdEMAMix' half state": (
        "AdEMAMix", edit_states(state1=lambda s: s[0], absmax1=lambda s: s), "allocates half",
    ),
}  # fmt: skip


def assert_refused(optimizer: Any, state_dict: Any, text: str) -> None:
    """Also nothing of the optimizer changed, nor of the dict."""
    train(optimizer, 2)
    before, given = snapshot(optimizer), copy.deepcopy(state_dict)
    report = optimizer.load_report
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(state_dict)
    assert_same(snapshot(optimizer), before)
    assert optimizer.load_report is report
    assert_same(state_dict, given)


@pytest.mark.parametrize("case", BITSANDBYTES_REFUSALS, ids=str)
def test_bitsandbytes_dicts_that_do_not_fit_are_refused_whole(case: str) -> None:
    name, edit, text = BITSANDBYTES_REFUSALS[case]
    source = trained(name, 8)
    state_dict = copy.deepcopy(source.state_dict())
    edit(state_dict)
    assert_refused(ours(name, 8, parameters()), state_dict, text)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (saved, loaded)
        for saved, loaded in itertools.permutations(SETTINGS, 2)
        if {saved, loaded} != {"Adam", "AdamW"}
    ],
    ids=str,
)
def test_dicts_of_another_algorithm_of_bitsandbytes_are_refused(saved: str, loaded: str, bits: int) -> None:
    optimizer = ours(loaded, bits, [nn.Parameter(normal(20, 300))])
    source = theirs(saved, bits, [nn.Parameter(normal(20, 300))])
    train(source, 1)
    assert_refused(optimizer, source.state_dict(), "another algorithm|has keys|unorm_vec|AdEMAMix")


ALIKE = ({"Adam", "AdamW", "LAMB"}, {"SGD", "LARS"})
"""Whose groups are alike in bitsandbytes: only state tells them apart."""


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (saved, loaded)
        for saved, loaded in itertools.permutations(SETTINGS, 2)
        if not any({saved, loaded} <= kinds for kinds in ALIKE)
    ],
    ids=str,
)
def test_groups_of_another_algorithm_of_bitsandbytes_are_refused_without_state(
    saved: str, loaded: str
) -> None:
    state_dict = theirs(saved, 8, [nn.Parameter(normal(20, 300))]).state_dict()
    optimizer = ours(loaded, 8, [nn.Parameter(normal(20, 300))])
    assert_refused(optimizer, state_dict, "another algorithm|with one state")


TORCH_REFUSALS: dict[str, tuple[str, Any, str]] = {
    "amsgrad": ("AdamW", torchs("AdamW", parameters(), amsgrad=True), "amsgrad=True"),
    "maximize": ("AdamW", torchs("AdamW", parameters(), maximize=True), "maximize=True"),
    "differentiable": ("SGD", edit_group(differentiable=True), "differentiable=True"),
    "coupled decay": ("AdamW", torchs("Adam", parameters(), weight_decay=0.1), "decoupled_weight_decay=False"),
    "decay of an old version": (
        "AdamW", drop("param_groups", 0, "decoupled_weight_decay"), r"Adam's or AdamW's",
    ),
    "dampening": ("SGD", torchs("SGD", parameters(), dampening=0.1), "dampening=0.1"),
    "nesterov": ("SGD", torchs("SGD", parameters(), nesterov=True), "nesterov=True"),
    "no momentum": ("SGD", torchs("SGD", parameters(), momentum=0.0), "momentum=0.0"),
    "centered": ("RMSprop", torchs("RMSprop", parameters(), centered=True), "centered=True"),
    "momentum of RMSprop": ("RMSprop", torchs("RMSprop", parameters(), momentum=0.1), "momentum=0.1"),
    "lr_decay": ("Adagrad", torchs("Adagrad", parameters(), lr_decay=0.1), "lr_decay=0.1"),
    "initial value": (
        "Adagrad", torchs("Adagrad", parameters(), initial_accumulator_value=0.1), "initial_accumulator_value=0.1",
    ),
    "RAdam": ("AdamW", torch.optim.RAdam(parameters()), "those of no optimizer that can be loaded"),
    "NAdam": ("AdamW", torch.optim.NAdam(parameters()), "those of no optimizer that can be loaded"),
    "Adamax": ("AdamW", torch.optim.Adamax(parameters()), "those of no optimizer that can be loaded"),
    "Adadelta": ("RMSprop", torch.optim.Adadelta(parameters()), "those of no optimizer that can be loaded"),
    "no second moment": ("AdamW", drop("state", 0, "exp_avg_sq"), "has keys"),
    "no step": ("AdamW", drop("state", 0, "step"), "has keys"),
    "no lr": ("Adagrad", drop("param_groups", 0, "eps"), "lacks 'eps'"),
    "another shape": (
        "AdamW", lambda d: d["state"][0].update(exp_avg=torch.zeros(300, 20)), r"exp_avg .* \(300, 20\)",
    ),
    "another dtype": (
        "AdamW", lambda d: d["state"][0].update(exp_avg=torch.zeros(20, 300).int()), "exp_avg .*int32",
    ),
    "an unknown parameter": ("AdamW", lambda d: d["state"].update(x=d["state"][0]), "unknown parameter 'x'"),
    "a group's size": ("AdamW", lambda d: d["param_groups"][0]["params"].pop(), "parameter groups of"),
}  # fmt: skip


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("case", TORCH_REFUSALS, ids=str)
def test_torch_dicts_that_ours_cannot_express_are_refused_by_name(case: str, bits: int) -> None:
    name, source, text = TORCH_REFUSALS[case]
    if isinstance(source, torch.optim.Optimizer):
        for p in params_of(source):
            p.grad = torch.zeros_like(p)
        source.step()
        state_dict = source.state_dict()
    else:
        optimizer = torchs(name, parameters())
        train(optimizer, 1)
        state_dict = copy.deepcopy(optimizer.state_dict())
        source(state_dict)
    assert_refused(ours(name, bits, parameters()), state_dict, text)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (saved, loaded)
        for saved, loaded in itertools.product(TORCH, SETTINGS)
        if saved != loaded and {saved, loaded} != {"Adam", "AdamW"}
    ],
    ids=str,
)
def test_dicts_of_another_algorithm_of_torch_are_refused(saved: str, loaded: str) -> None:
    source = torchs(saved, parameters())
    train(source, 1)
    assert_refused(ours(loaded, 8, parameters()), source.state_dict(), "another algorithm")


def test_what_is_nobodys_dict_is_refused_as_before() -> None:
    optimizer = ours("AdamW", 8, parameters())
    state_dict = copy.deepcopy(optimizer.state_dict())
    for group in state_dict["param_groups"]:
        del group["format"]
    assert_refused(optimizer, state_dict, "not saved by an optimizer of bnb_fsdp")


def test_exports_are_refused_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match="choose from 'bitsandbytes', 'torch'"):
        bnb_fsdp.export_state_dict(ours("AdamW", 8, parameters()), "safetensors")
    with pytest.raises(TypeError, match="got AdamW"):
        bnb_fsdp.export_state_dict(torch.optim.AdamW(parameters()))  # type: ignore[arg-type]
    for name in ("AdEMAMix", "LAMB", "LARS"):
        with pytest.raises(ValueError, match="no counterpart of"):
            bnb_fsdp.export_state_dict(ours(name, 8, parameters()), "torch")
    published = bnb_fsdp.LAMB8bit(parameters(), trust_ratio="published")
    with pytest.raises(ValueError, match="published"):
        bnb_fsdp.export_state_dict(published)


# Offline, from a checkpoint directory


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, p in enumerate(parameters()[:4]):
            setattr(self, f"p{number}", p)


@pytest.mark.parametrize("to", ["bitsandbytes", "torch"])
@every_class
def test_convert_writes_what_export_gives(name: str, bits: int, to: str, tmp_path: Path) -> None:
    model = Few()
    optimizer = ours(name, bits, model.parameters())
    train(optimizer, 3)
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-3", model, optimizer)
    out = tmp_path / "out.pt"
    status = cli.main(["checkpoint", "convert", str(path), str(out), "--to", to])
    if to == "torch" and name in ("AdEMAMix", "LAMB", "LARS"):
        assert status != 0 and not out.exists()
        return
    assert status == 0
    converted = torch.load(out, weights_only=True)
    exported = bnb_fsdp.export_state_dict(optimizer, to)
    assert list(converted["state"]) == list(exported["state"])
    for number, wanted in exported["state"].items():
        found = converted["state"][number]
        if to == "bitsandbytes":
            assert found["step"] == wanted["step"] == 3
            found, wanted = found[WRAPPED], wanted[WRAPPED]
        assert set(found) == set(wanted)
        assert_same({key: found[key] for key in sorted(found)}, {key: wanted[key] for key in sorted(wanted)})
    for found, wanted in zip(converted["param_groups"], exported["param_groups"]):
        assert {key: found.get(key) for key in wanted} == wanted
    target = (theirs if to == "bitsandbytes" else lambda n, b, p: torchs(n, p))(
        name, bits, Few().parameters()
    )
    target.load_state_dict(converted)
    train(target, 1)
    again = ours(name, bits, Few().parameters())
    again.load_state_dict(converted)


def test_convert_refuses_published_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Few()
    optimizer = bnb_fsdp.LARS8bit(model.parameters(), lr=0.1, momentum=0.9, trust_ratio="published")
    train(optimizer, 1)
    path = bnb_fsdp.save_checkpoint(tmp_path / "step-1", model, optimizer)
    arguments = ["checkpoint", "convert", str(path), str(tmp_path / "out.pt"), "--to", "bitsandbytes"]
    assert cli.main(arguments) != 0
    captured = capsys.readouterr()
    assert "published" in captured.out + captured.err and not (tmp_path / "out.pt").exists()
