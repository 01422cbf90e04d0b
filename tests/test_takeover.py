"""`from_bitsandbytes`: live optimizers of bitsandbytes, with what its GlobalOptimManager says of them."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from interchange_helpers import (
    SETTINGS,
    assert_is_what_bitsandbytes_has,
    every_class,
    hyper,
    parameters,
    params_of,
    raw,
    theirs,
    trained,
    twin,
)
from optimizer_helpers import assert_same, normal, train
from torch import Tensor, nn

import bnb_fsdp
from bnb_fsdp import from_bitsandbytes, rules
from bnb_fsdp.integrations import takeover

FIELDS = ("pid2config", "index2config", "module_weight_config_triple", "uses_config_override")


@pytest.fixture(autouse=True)
def manager() -> Iterator[Any]:
    """bitsandbytes' process-wide manager, empty, and as it was afterwards."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    kept = {field: getattr(manager, field) for field in FIELDS}
    manager.initialize()
    yield manager
    for field, value in kept.items():
        setattr(manager, field, value)


def bits_by_parameter(optimizer: Any) -> list[int]:
    return [8 if optimizer.state[p]["state1"].dtype == torch.uint8 else 32 for p in params_of(optimizer)]


def frozen(optimizer: Any) -> Any:
    """All that `from_bitsandbytes` must leave alone."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    states = [dict(optimizer.state.get(p, {})) for p in params_of(optimizer)]
    values = [p.detach().clone() for p in params_of(optimizer)]
    tables = {key: dict(value) for key, value in list(manager.pid2config.items())}
    places = dict(manager.index2config)
    return copy.deepcopy((groups, states, values, list(tables.values()), list(places.items())))


@every_class
def test_a_live_optimizer_is_taken_over_and_steps_as_the_rule_does(name: str, bits: int) -> None:
    source = trained(name, bits)
    given = {p: raw(name, copy.deepcopy(source.state[p])) for p in params_of(source)}
    before = frozen(source)
    optimizer = from_bitsandbytes(source, backend="torch")
    assert_same(frozen(source), before)
    suffix = type(source).__name__.removeprefix(name)
    assert type(optimizer).__name__ == name + suffix
    assert [id(p) for p in params_of(optimizer)] == [id(p) for p in params_of(source)]
    [group] = optimizer.param_groups
    assert group["lr"] == 1e-2 and group["optim_bits"] == bits
    assert all(group[key] == value for key, value in SETTINGS[name].items())
    assert_is_what_bitsandbytes_has(name, optimizer, source)
    for p in params_of(optimizer):
        mine, old = optimizer.state[p], source.state[p]
        for key in ("state1", "absmax1", "state2", "absmax2"):
            if key in old:
                assert mine[key].data_ptr() == old[key].data_ptr()
    if name in ("LAMB", "LARS"):
        train(optimizer, 1)
        return
    values = [p.detach().clone() for p in params_of(optimizer)]
    train(optimizer, 1, first=9)
    for p, value in zip(params_of(optimizer), values):
        states, scales = given[p]
        flat = tuple(s.flatten() for s in states)
        args = (rules.RULES[optimizer.rule.name], hyper(name), 4, p.grad.flatten(), value.flatten(), flat)
        wanted = rules.step8(*args, scales)[0] if scales else rules.step32(*args)[0]
        assert_same(p.detach().flatten(), wanted)


@every_class
def test_never_stepped_optimizers_get_the_bits_that_bitsandbytes_would_choose(name: str, bits: int) -> None:
    source = theirs(name, bits, parameters(), min_8bit_size=5000)
    optimizer = from_bitsandbytes(source)
    assert len(optimizer.state) == 0
    for each in (optimizer, source):
        train(each, 1)
    assert bits_by_parameter(optimizer) == bits_by_parameter(source)


@pytest.mark.parametrize(
    "name",
    [
        "PagedAdam8bit",
        "PagedAdamW8bit",
        "PagedAdamW32bit",
        "PagedAdamW",
        "PagedLion8bit",
        "PagedAdEMAMix8bit",
    ],
)
def test_paged_classes(name: str) -> None:
    source = getattr(bnb.optim, name)(parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # neither pages on the CPU
        train(source, 2)
        optimizer = from_bitsandbytes(source)
    assert type(optimizer).__name__ == name
    assert_is_what_bitsandbytes_has(
        name.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit"), optimizer, source
    )
    train(optimizer, 1)


def test_optim_bits_decide_where_the_class_leaves_a_choice_or_was_overruled() -> None:
    optimizer = from_bitsandbytes(bnb.optim.Adam(parameters(), optim_bits=8))
    assert type(optimizer) is bnb_fsdp.Adam and optimizer.param_groups[0]["optim_bits"] == 8
    source = bnb.optim.AdamW8bit(parameters())
    source.args.optim_bits = 32
    optimizer = from_bitsandbytes(source)
    assert type(optimizer) is bnb_fsdp.AdamW and optimizer.param_groups[0]["optim_bits"] == 32

    class Mine(bnb.optim.Lion8bit):  # type: ignore[misc]
        pass

    assert type(from_bitsandbytes(Mine(parameters()))) is bnb_fsdp.Lion8bit
    base = bnb.optim.optimizer.Optimizer1State("lion", parameters(), betas=(0.9, 0.99), eps=0.0, optim_bits=8)
    assert type(from_bitsandbytes(base)) is bnb_fsdp.Lion


def test_groups_names_and_other_keys_are_kept() -> None:
    first, second = parameters(), parameters(seed=1)
    source = bnb.optim.AdamW8bit(
        [
            {"params": [(f"a.{i}", p) for i, p in enumerate(first)], "lr": 0.1, "betas": [0.5, 0.6]},
            {"params": [(f"b.{i}", p) for i, p in enumerate(second)], "weight_decay": 0.0},
        ]
    )
    torch.optim.lr_scheduler.LambdaLR(source, lambda step: 0.5)
    optimizer = from_bitsandbytes(source)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 5e-4]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 1e-3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[1]["param_names"] == [f"b.{i}" for i in range(len(second))]
    sgd = bnb.optim.SGD8bit(
        [{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}], lr=1.0, momentum=0.9
    )
    optimizer = from_bitsandbytes(sgd)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9]


# Overrides


def overridden(manager: Any, how: str, optimizer_params: list[nn.Parameter]) -> None:
    config = {"optim_bits": 32}
    if how == "before registering":
        manager.override_config(optimizer_params[0], key_value_dict=config)
        manager.register_parameters(optimizer_params)
    elif how == "after registering":
        manager.register_parameters(optimizer_params)
        manager.override_config(optimizer_params[0], "optim_bits", 32)
    elif how == "by position alone":
        manager.index2config[0, 0] = config
    elif how == "position, then the parameter":
        manager.index2config[0, 0] = {"optim_bits": 8}
        manager.override_config(optimizer_params[0], "optim_bits", 32)
    elif how == "size":
        manager.override_config(optimizer_params[0], "min_8bit_size", 10**6)
    elif how == "smaller size":
        manager.override_config(optimizer_params[2:3], "min_8bit_size", 0)


@pytest.mark.parametrize("stepped", [False, True], ids=["never stepped", "stepped"])
@pytest.mark.parametrize(
    "how",
    [
        "nothing", "before registering", "after registering", "by position alone", "position, then the parameter",
        "size", "smaller size",
    ],
)  # fmt: skip
def test_overrides_of_the_manager(manager: Any, how: str, stepped: bool) -> None:
    source = theirs("AdamW", 8, parameters())
    overridden(manager, how, params_of(source))
    if stepped:
        train(source, 2)
    optimizer = from_bitsandbytes(source)
    assert bool(optimizer.param_groups[0]["overrides"]) is (how != "nothing")
    for each in (optimizer, source):
        train(each, 1)
    found = bits_by_parameter(optimizer)
    assert found == bits_by_parameter(source)
    usual = [8, 8, 32, 8] * 2
    expected = {"nothing": usual, "smaller size": [8, 8, 8, *usual[3:]]}.get(how, [32, *usual[1:]])
    assert found == expected
    # which a checkpoint knows, too
    again = bnb_fsdp.AdamW8bit(twin(params_of(optimizer)))
    again.load_state_dict(optimizer.state_dict())
    assert bits_by_parameter(again) == found


def test_an_override_that_came_after_the_first_step_changes_no_state(manager: Any) -> None:
    source = trained("AdamW", 8)
    manager.override_config(params_of(source)[0], "optim_bits", 32)
    optimizer = from_bitsandbytes(source)
    assert_is_what_bitsandbytes_has("AdamW", optimizer, source)
    for each in (optimizer, source):
        train(each, 1)
    assert bits_by_parameter(optimizer) == bits_by_parameter(source) == [8, 8, 32, 8] * 2


@pytest.mark.parametrize("stepped", [False, True], ids=["never stepped", "stepped"])
@pytest.mark.parametrize("kind", ["StableEmbedding", "Embedding"])
def test_embeddings_of_bitsandbytes_have_32_bit_state(manager: Any, kind: str, stepped: bool) -> None:
    model = nn.Sequential(getattr(bnb.nn, kind)(100, 64), nn.Linear(64, 100))
    # what its first step throws away
    manager.override_config(model[0].weight, "optim_bits", 8)
    source = bnb.optim.AdamW8bit(model.named_parameters())
    if stepped:
        train(source, 1)
    before = frozen(source)
    optimizer = from_bitsandbytes(source)
    assert_same(frozen(source), before)
    for each in (optimizer, source):
        train(each, 1)
    assert bits_by_parameter(optimizer) == bits_by_parameter(source)
    assert bits_by_parameter(optimizer)[0] == 32
    assert bits_by_parameter(optimizer)[optimizer.param_groups[0]["param_names"].index("1.weight")] == 8


# Layout


def test_state_that_is_not_contiguous_is_taken_by_index_on_the_cpu() -> None:
    value = normal(64, 32, 3, 3).to(memory_format=torch.channels_last)
    source = bnb.optim.AdamW8bit([nn.Parameter(value)])
    train(source, 2)
    [(p, old)] = source.state.items()
    assert p.is_contiguous() and not old["state1"].is_contiguous()  # so does bitsandbytes
    optimizer = from_bitsandbytes(source)
    mine = optimizer.state[p]
    assert torch.equal(mine["state1"], old["state1"]) and mine["state1"].is_contiguous()
    assert_same(mine["absmax1"], old["absmax1"])
    train(optimizer, 1)


def test_state_that_was_loaded_before_bitsandbytes_made_its_parameter_contiguous() -> None:
    """Blocks of 256 that lie in another order in memory: all are kept, none in its old place."""
    value = normal(4, 3, 256).permute(1, 0, 2)
    first = bnb.optim.AdamW8bit([nn.Parameter(value.contiguous())], min_8bit_size=0)
    train(first, 2)
    source = bnb.optim.AdamW8bit([nn.Parameter(value)], min_8bit_size=0)
    source.load_state_dict(first.state_dict())
    [(p, old)] = source.state.items()
    optimizer = from_bitsandbytes(source)
    mine = optimizer.state[p]
    assert not p.is_contiguous() and mine["state1"].stride() == p.stride()
    assert torch.equal(mine["state1"], old["state1"])
    by_row = old["absmax1"].view(3, 4)
    assert_same(mine["absmax1"], by_row.t().reshape(-1))
    train(optimizer, 1)


@pytest.mark.parametrize("numel", [4096 + 100, 4096 + 300], ids=["17 blocks", "18 blocks"])
def test_scales_that_bitsandbytes_lets_overlap_are_separate_memory(numel: int) -> None:
    source = theirs("AdEMAMix", 8, [nn.Parameter(normal(numel))])
    train(source, 3)
    [old] = source.state.values()
    blocks = -(-numel // 256)
    slow = old["absmax1"][1].clone()
    flat = old["absmax1"].view(-1)
    flat[blocks:] = 0
    flat[blocks - 1 : -1] = slow
    [mine] = from_bitsandbytes(source).state.values()
    assert_same(mine["absmax3"], slow)
    spans = sorted((mine[k].data_ptr(), mine[k].data_ptr() + 4 * blocks) for k in ("absmax1", "absmax3"))
    assert spans[0][1] <= spans[1][0]
    assert all(mine[k].data_ptr() % 16 == 0 for k in ("state1", "state3", "absmax1", "absmax3"))


# Refusals


def edit_args(**changes: Any) -> Any:
    return lambda optimizer, manager: [setattr(optimizer.args, k, v) for k, v in changes.items()]


def override(**changes: Any) -> Any:
    return lambda optimizer, manager: manager.override_config(params_of(optimizer)[1], key_value_dict=changes)


def edit_state(key: str, change: Any) -> Any:
    def apply(optimizer: Any, manager: Any) -> None:
        state = optimizer.state[params_of(optimizer)[-1]]
        state[key] = change(state[key])

    return apply


def register(**config: Any) -> Any:
    def apply(optimizer: Any, manager: Any) -> None:
        optimizer.initialized = False
        module = types.SimpleNamespace(weight=params_of(optimizer)[0])
        manager.register_module_override(module, "weight", config)

    return apply


def at_position(**config: Any) -> Any:
    return lambda optimizer, manager: manager.index2config.update({(0, 0): config})


REFUSALS: dict[str, tuple[str, Any, str]] = {
    "skip_zeros": ("AdamW", edit_args(skip_zeros=True), "skip_zeros=True"),
    "max_unorm of Adam": ("AdamW", edit_args(max_unorm=1.0), "max_unorm=1.0"),
    "max_unorm of RMSprop": ("RMSprop", edit_args(max_unorm=0.5), "max_unorm=0.5"),
    "percentile clipping": ("AdamW", edit_args(percentile_clipping=5), "percentile_clipping=5"),
    "bits": ("AdamW", edit_args(optim_bits=4), "optim_bits=4"),
    "lr of one parameter": ("AdamW", override(lr=0.5), "overrides lr=0.5"),
    "betas of one parameter": ("AdamW", override(betas=(0.1, 0.2)), r"overrides betas=\(0.1, 0.2\)"),
    "eps of one parameter": ("AdamW", override(eps=0.5), "overrides eps=0.5"),
    "decay of one parameter": ("AdamW", override(weight_decay=0.5), "overrides weight_decay=0.5"),
    "skip_zeros of one parameter": ("AdamW", override(skip_zeros=True), "skip_zeros=True"),
    "max_unorm of one parameter": ("AdamW", override(max_unorm=0.1), "max_unorm=0.1"),
    "max_unorm of one parameter of LARS": ("LARS", override(max_unorm=0.1), "overrides max_unorm=0.1"),
    "bits of one parameter": ("AdamW", override(optim_bits=4), "optim_bits=4"),
    "size of one parameter": ("AdamW", override(min_8bit_size=0.5), "min_8bit_size=0.5"),
    "lr of a module": ("AdamW", register(lr=0.5), "overrides lr=0.5"),
    "lr at a position": ("AdamW", at_position(lr=0.5), "overrides lr=0.5"),
    "dampening": (
        "SGD", lambda o, m: o.param_groups[0].update(betas=(0.9, 0.1)), "group 0 has dampening=0.1",
    ),
    "momentum of RMSprop": (
        "RMSprop", lambda o, m: o.param_groups[0].update(betas=(0.9, 0.1)), "group 0 has momentum=0.1",
    ),
    "another map": ("AdamW", edit_state("qmap1", lambda q: q * 1.1), "another code map"),
    "blocks of 2048": ("AdamW", edit_state("absmax1", lambda s: s[:4].clone()), "before 0.44"),
    "half of AdEMAMix": ("AdEMAMix", edit_state("state1", lambda s: s[0]), "allocates half"),
    "an unknown rule": ("AdamW", lambda o, m: setattr(o, "optimizer_name", "sm3"), "'sm3', which"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_what_ours_does_not_have_is_refused_by_name(manager: Any, case: str) -> None:
    name, change, text = REFUSALS[case]
    source = trained(name, 8)
    change(source, manager)
    before = frozen(source)
    with pytest.raises(ValueError, match=text):
        from_bitsandbytes(source)
    assert_same(frozen(source), before)


def test_an_override_that_says_what_the_group_says_is_none(manager: Any) -> None:
    source = bnb.optim.AdamW8bit(parameters(), betas=[0.9, 0.999])
    manager.override_config(params_of(source), key_value_dict={"lr": 1e-3, "betas": (0.9, 0.999)})
    assert from_bitsandbytes(source).param_groups[0]["overrides"] == []


def test_other_optimizers_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (torch.optim.AdamW(parameters()), bnb_fsdp.AdamW8bit(parameters()), None):
        with pytest.raises(TypeError, match=r"takes an optimizer of bitsandbytes\.optim, got"):
            from_bitsandbytes(other)
    source = trained("AdamW", 8)
    for version in ("0.49.2", "0.51.0", "1.0"):
        monkeypatch.setattr(bnb, "__version__", version)
        with pytest.raises(RuntimeError, match=rf"0\.50\.x, but {version} is installed"):
            from_bitsandbytes(source)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(RuntimeError, match="needs bitsandbytes"):
        takeover.from_bitsandbytes(source)


def test_rmsprop_without_eps_is_known_to_be_rmsprop() -> None:
    source = bnb.optim.RMSprop8bit(parameters(), eps=0.0)
    train(source, 1)
    assert from_bitsandbytes(source).param_groups[0]["eps"] == 0.0


def test_state_on_the_right_device_only(tmp_path: Any) -> None:
    """State that bitsandbytes loaded is as good as its own."""
    source = trained("Lion", 8)
    loaded = theirs("Lion", 8, twin(params_of(source)))
    torch.save(source.state_dict(), tmp_path / "state.pt")
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_is_what_bitsandbytes_has("Lion", from_bitsandbytes(loaded), source)
    assert all(
        isinstance(value, Tensor) for s in from_bitsandbytes(loaded).state.values() for value in s.values()
    )
