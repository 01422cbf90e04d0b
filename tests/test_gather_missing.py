"""Where the native look is not to be had, Python gathers."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gather_helpers import (
    optimizer_of,
    plain,
    tensor,
    train,
)
from optimizer_helpers import assert_like
from torch import Tensor

import bnb_fsdp
from bnb_fsdp.backends import gather, native


class WithMajorVersion2(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("others", ctypes.c_void_p * 6)]


@pytest.fixture
def without_cached_library() -> Iterator[None]:
    gather._library.cache_clear()
    yield
    gather._library.cache_clear()


class NoLibrary:
    LibraryError = native.LibraryError

    @staticmethod
    def load(name: str) -> Any:
        raise native.LibraryError("missing")


OTHER = WithMajorVersion2(major=2)
MISSING: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "older torch": lambda patch: patch.delattr(Tensor, "__dlpack_c_exchange_api__"),
    "torch with a number": lambda patch: patch.setattr(Tensor, "__dlpack_c_exchange_api__", 12345),
    "another capsule": lambda patch: patch.setattr(
        Tensor, "__dlpack_c_exchange_api__", __import__("datetime").datetime_CAPI
    ),
    "another major version": lambda patch: patch.setattr(
        gather, "_exchange_api", lambda: ctypes.addressof(OTHER)
    ),
    "is_neg in Python": lambda patch: patch.setattr(Tensor, "is_neg", lambda self: False),
    "other slots": lambda patch: patch.setattr(gather, "_TYPE_SLOTS", gather._TYPE_PROPERTIES),
    "slots of another type": lambda patch: patch.setattr(gather, "_SLOT_OBJECT", 0),
    "another property": lambda patch: patch.setattr(gather, "_PROPERTIES", ("grad", "no_such_property")),
    "no library": lambda patch: patch.setattr(gather, "native", NoLibrary),
    "no GIL": lambda patch: patch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False),
}


@pytest.mark.parametrize("case", MISSING)
def test_without_it_python_gathers(
    case: str, monkeypatch: pytest.MonkeyPatch, without_cached_library: None
) -> None:
    fast, slow = optimizer_of(plain()), optimizer_of(plain())
    train(fast, steps=4)
    gather._library.cache_clear()
    MISSING[case](monkeypatch)
    train(slow, steps=4)
    assert slow._plan._gatherer is None
    assert_like(fast, slow)


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_class_with_torch_functions_of_its_own_is_left_to_python() -> None:
    p = tensor(16).as_subclass(Loud).requires_grad_()
    optimizer = bnb_fsdp.AdamW8bit([p], min_8bit_size=0)
    for _ in range(3):
        p.grad = tensor(16)
        optimizer.step()
    assert optimizer._plan._gatherer is None
    assert int(optimizer.state[p]["step"]) == 3


class Own(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def grad(self) -> Tensor:
        return tensor(16)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        pass


def test_a_tensor_class_with_properties_of_its_own_is_left_to_python() -> None:
    p = tensor(16).as_subclass(Own).requires_grad_()
    optimizer = bnb_fsdp.AdamW8bit([p], min_8bit_size=0)
    for _ in range(3):
        optimizer.step()
    assert optimizer._plan._gatherer is None
    assert int(optimizer.state[p]["step"]) == 3


def test_numbers_are_those_of_the_header() -> None:
    header = Path(__file__).parent.parent / "bnb_fsdp/csrc/host/gather.h"
    names = ("GROUPS", "STATE", "PARAMETER", "STORAGE", "FROZEN", "GRADIENT")
    for name in names:
        assert f"BNB_FSDP_GATHER_{name} = {getattr(gather, name)}" in header.read_text()
