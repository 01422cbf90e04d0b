"""Warnings name the user's line, however deep in this package and torch they arise, on every Python found."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import every_python, run_script

import bnb_fsdp
from bnb_fsdp import backends, callers
from bnb_fsdp.backends import native

# Three layers, each a module of its own with a function that calls what it is given.
SCRIPT = """
import importlib.util, sys, types, warnings
spec = importlib.util.spec_from_file_location("bnb_fsdp.callers", sys.argv[1])
callers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(callers)

def layer(name):
    names = {"__name__": name} if name else {}
    exec(compile("def call(inner, *rest):\\n    return inner(*rest)", f"<{name}>", "exec"), names)
    return names["call"]

ours, hooks, torchvision, unnamed = map(layer, ("bnb_fsdp.optim.base", "torch.optim.optimizer", "torchvision.x", None))
warn = callers.warn_caller
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ours(hooks, ours, warn, "deep", UserWarning); line = sys._getframe().f_lineno
    ours(torchvision, ours, warn, "another package", UserWarning)
    warn("no layer", RuntimeWarning)
    hooks(unnamed, ours, warn, "no name", UserWarning)
found = [(str(w.message), w.category.__name__, w.filename, w.lineno) for w in caught]
assert found == [
    ("deep", "UserWarning", __file__, line),
    ("another package", "UserWarning", "<torchvision.x>", 2),
    ("no layer", "RuntimeWarning", __file__, line + 2),
    ("no name", "UserWarning", "<None>", 2),
], found
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")  # once a line
    for _ in range(2): ours(hooks, ours, warn, "again", UserWarning)
    ours(hooks, ours, warn, "again", UserWarning)
assert len(caught) == 2, caught
# Nothing but this package and torch: the outermost frame.
names = {"__name__": "torch.autograd", "call": ours, "warn": warn}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import _thread, time
    _thread.start_new_thread(ours, (hooks, warn, "thread", UserWarning))
    for _ in range(200):
        if caught: break
        time.sleep(0.05)
assert [w.filename for w in caught] == ["<bnb_fsdp.optim.base>"], caught
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        ours(warn, "raised", UserWarning)
    except UserWarning as error:
        assert str(error) == "raised"
    else:
        raise SystemExit("not raised")
"""


@every_python
def test_the_first_frame_outside_is_named(python: str, tmp_path: Path) -> None:
    run_script(python, SCRIPT, tmp_path, str(callers.__file__))


def parameter() -> torch.nn.Parameter:
    result = torch.nn.Parameter(torch.zeros(5000))
    result.grad = torch.ones(5000)
    return result


def by_step() -> int:
    optimizer = bnb_fsdp.AdamW8bit([parameter()])
    optimizer.step(); return sys._getframe().f_lineno  # noqa: E702  # fmt: skip


def by_closure() -> int:
    optimizer = bnb_fsdp.AdamW8bit([parameter()])
    optimizer.step(lambda: torch.tensor(1.0)); return sys._getframe().f_lineno  # noqa: E702  # fmt: skip


def by_scheduled_step() -> int:
    optimizer = bnb_fsdp.AdamW8bit([parameter()])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps step()
    optimizer.step(); return sys._getframe().f_lineno  # noqa: E702  # fmt: skip


def by_describe() -> int:
    optimizer = bnb_fsdp.AdamW8bit([parameter()])
    bnb_fsdp.describe(optimizer); return sys._getframe().f_lineno  # noqa: E702  # fmt: skip


@pytest.mark.parametrize("use", [by_step, by_closure, by_scheduled_step, by_describe])
def test_a_fallback_is_said_at_the_line_that_caused_it(
    use: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(device: torch.device) -> Any:
        raise native.LibraryError("the library is missing.")

    monkeypatch.setattr(backends, "_native", missing)
    monkeypatch.setattr(backends, "_said", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = use()
    found = [
        (warning.filename, warning.lineno)
        for warning in caught
        if "the library is missing" in str(warning.message)
    ]
    assert found == [(__file__, line)]
