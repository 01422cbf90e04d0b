"""This step's gradient pointers in one native call, if everything is as it was planned: csrc/host/gather.h.

Reads tensors through torch's DLPack C exchange interface, which older versions of torch lack and a major version of
DLPack may change. Where it or anything else is missing there is no `Gatherer`: Python gathers, with the same result.
"""

from __future__ import annotations

import array
import ctypes
import inspect
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import native

_GRADIENT_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PROPERTIES = ("grad", "requires_grad")
_TENSOR_BYTES, _STORAGE_BYTES = 208, 96  # about what they are in torch 2.13: for hints
# Of CPython's headers.
_METH_NOARGS, _TYPE_SLOTS, _TYPE_PROPERTIES, _SLOT_OBJECT = 4, 72, 73, 16

GROUPS, STATE, PARAMETER, STORAGE, FROZEN, GRADIENT = range(1, 7)
"""What `Gatherer.difference` may be: enum bnb_fsdp_gather_difference of csrc/host/gather.h."""


class Sharding(NamedTuple):
    """How sharded tensors are read: their class, and the names of its slots with the local tensor and the spec, and of
    the attributes on which two tensors with different specs must agree."""

    kind: type
    local: str
    spec: str
    layout: tuple[str, str, str]


class Planned(NamedTuple):
    """A parameter as it was planned; ``values`` is its state, None if it is frozen, ``keys`` those of its tensors."""

    parameter: Tensor
    local: Tensor
    sharded: bool
    values: Mapping[str, Any] | None
    keys: Sequence[str] = ()
    gradient_dtype: torch.dtype = torch.float32
    slot: int = -1


class _Getter(ctypes.Structure):
    """``bnb_fsdp_gather_getter``."""

    _fields_ = [("get", ctypes.c_void_p), ("closure", ctypes.c_void_p)]


class _Host(ctypes.Structure):
    """``bnb_fsdp_gather_host``."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("get_attribute", "compare", "list_size", "list_item")],
        *[(name, ctypes.c_void_p) for name in ("dict_item", "dict_next", "release", "clear_error")],
        *[(name, ctypes.c_void_p) for name in ("is_negated", "exchange_api")],
        *[(name, _Getter) for name in ("gradient", "requires_gradient")],
        *[(name, ctypes.c_int64) for name in ("type", "local", "spec")],
        *[(name, ctypes.py_object) for name in ("none", "false", "tensor_type", "sharded_type", "params")],
        ("layout", ctypes.py_object * 3),
    ]


class _PropertyDefinition(ctypes.Structure):
    """PyGetSetDef, of CPython's stable ABI."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        *[(name, ctypes.c_void_p) for name in ("get", "set", "doc", "closure")],
    ]


class _SlotDefinition(ctypes.Structure):
    """PyMemberDef, of CPython's stable ABI."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int),
        ("offset", ctypes.c_ssize_t),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_void_p),
    ]


class _Parameter(ctypes.Structure):
    """``bnb_fsdp_gather_parameter``."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in ("parameter", "local", "values", "keys", "tensors", "probed", "lines")
        ],
        *[(name, ctypes.c_int64) for name in ("count", "line_count", "group", "slot")],
        *[(name, ctypes.c_int32) for name in ("sharded", "gradient_dtype")],
    ]


class _Library:
    """The native functions, and what they are handed over."""

    def __init__(self, path: str, host: _Host) -> None:
        library = ctypes.PyDLL(path)  # holds the GIL, unlike CDLL
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self.host = host

        def function(name: str, restype: Any, *argtypes: Any) -> Any:
            result = getattr(library, name)
            result.restype, result.argtypes = restype, argtypes
            return result

        self.new = function("bnb_fsdp_gather_new", pointer, pointer, count)
        self.add = function("bnb_fsdp_gather_add", ctypes.c_int, pointer, pointer)
        self.order = function("bnb_fsdp_gather_order", None, pointer, pointer, count)
        self.gather = function("bnb_fsdp_gather", count, pointer, ctypes.py_object, ctypes.py_object, pointer)
        self.release = function("bnb_fsdp_gather_release", None, pointer)
        self.delete = function("bnb_fsdp_gather_delete", None, pointer)


def _exchange_api() -> int | None:
    """Address of torch's DLPackExchangeAPI."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if type(capsule).__name__ != "PyCapsule":
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        address: int | None = pointer(capsule, b"dlpack_exchange_api")
    except ValueError:
        return None
    return address


def _is_negated() -> int | None:
    """Address of the C function behind ``Tensor.is_neg()``: called without the method it costs 10 ns less."""
    method: Any = torch.empty(0).is_neg
    flags, function = ctypes.pythonapi.PyCFunction_GetFlags, ctypes.pythonapi.PyCFunction_GetFunction
    flags.restype, flags.argtypes = ctypes.c_int, (ctypes.py_object,)
    function.restype, function.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    try:
        return int(function(method)) if flags(method) == _METH_NOARGS else None
    except SystemError:  # not a C function
        return None


def _definitions(kind: type, slot: int, layout: Any) -> dict[str, Any]:
    """What a type's C table of properties or slots says, by name."""
    get_slot = ctypes.pythonapi.PyType_GetSlot
    get_slot.restype, get_slot.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    definitions: dict[str, Any] = {}
    address = get_slot(kind, slot)
    while address and (definition := layout.from_address(address)).name:
        definitions[definition.name.decode()] = definition
        address += ctypes.sizeof(layout)
    return definitions


def _getter(name: str) -> _Getter:
    definition = _definitions(torch._C.TensorBase, _TYPE_PROPERTIES, _PropertyDefinition)[name]
    return _Getter(definition.get, definition.closure)


def _offset(kind: type, name: str) -> int:
    definition = _definitions(kind, _TYPE_SLOTS, _SlotDefinition)[name]
    if definition.type != _SLOT_OBJECT:
        raise LookupError(name)
    return int(definition.offset)


def _host(sharding: Sharding) -> _Host | None:
    exchange_api = _exchange_api()
    is_negated = _is_negated() if exchange_api else None
    if not exchange_api or not is_negated:
        return None
    # An object begins with its reference count and its type.
    type_offset = object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p)
    if ctypes.c_void_p.from_address(id(sharding) + type_offset).value != id(Sharding):
        return None
    names = (
        "PyObject_GetAttr", "PyObject_RichCompareBool", "PyList_Size", "PyList_GetItem",
        "PyDict_GetItem", "PyDict_Next", "Py_DecRef", "PyErr_Clear",
    )  # fmt: skip
    functions = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in names]
    try:
        getters = [_getter(name) for name in _PROPERTIES]
        slots = [_offset(sharding.kind, name) for name in (sharding.local, sharding.spec)]
    except (LookupError, SystemError):
        return None
    names_of_layout: list[Any] = list(map(sys.intern, sharding.layout))
    layout = (ctypes.py_object * 3)(*names_of_layout)
    objects = (None, False, Tensor, sharding.kind, sys.intern("params"))
    return _Host(*functions, is_negated, exchange_api, *getters, type_offset, *slots, *objects, layout)


@cache
def _library(sharding: Sharding) -> _Library | None:
    """None where the library, the exchange interface or the GIL that guards the objects is missing."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        host = _host(sharding)
        return None if host is None else _Library(str(native.load("cpu").path), host)
    except (native.LibraryError, AttributeError, OSError):
        return None


def _addresses(objects: Sequence[object]) -> Any:
    return (ctypes.c_void_p * len(objects))(*map(id, objects))


def _is_known(kind: Any, slots: Mapping[str, type]) -> bool:
    """Whether a class of tensors has no ``__torch_function__`` of its own, nor what is read of a tensor here."""
    owners = {**dict.fromkeys(_PROPERTIES, torch._C.TensorBase), **slots}
    inherited = all(
        inspect.getattr_static(kind, name) is owner.__dict__[name] for name, owner in owners.items()
    )
    function = kind.__torch_function__
    return inherited and (kind is Tensor or function is torch._C._disabled_torch_function_impl)


def _probed(keys: Sequence[str], values: Mapping[str, Any]) -> Any:
    """The state tensor whose storage is looked at: the first but ``step``, which may live on another device, unless
    all others are empty and have no storage that could change."""
    states = [values[key] for key in keys if key != "step"]
    return next((tensor for tensor in states if tensor.numel() > 0), values["step"])


def _lines(tensors: Sequence[Tensor], storages: Sequence[Any]) -> list[int]:
    """The cache lines of tensors and storages: of the Python objects, and of those in C++."""
    sizes = [(id(tensor), type(tensor).__basicsize__) for tensor in tensors]
    sizes += [(tensor._cdata, _TENSOR_BYTES) for tensor in tensors]
    sizes += [(storage._cdata, _STORAGE_BYTES) for storage in storages]
    lines = [line for begin, size in sizes for line in range(begin // 64, (begin + size - 1) // 64 + 1)]
    return [64 * line for line in dict.fromkeys(lines)]


class Gatherer:
    """The planned parameters of an optimizer, by group, and the table of them on the native side.

    Holds what the table points to, as the garbage collector cannot see it there: not the gradients, apart from those
    of a step between `gather` and `release`. Use `make`.

    Of a parameter's state every tensor is checked to be the one that was planned, but only one (`_probed`) to have the
    storage it had: whoever moves state with ``tensor.data = other`` moves all of it. All the storages that were planned
    are held, so that none is freed under a pointer and no new one is taken for the old at the same address; the step
    that finds state moved lets go of them. That does not help where a storage itself is resized
    (``untyped_storage().resize_()``): it is seen if the probed one then lies elsewhere.
    """

    def __init__(self, library: _Library, table: int) -> None:
        self._library = library
        self._table = table
        self._kept: list[Any] = []
        self._pointers = array.array("Q")
        self.difference = 0
        weakref.finalize(self, library.delete, table)

    @classmethod
    def make(
        cls, sharding: Sharding, rows: Sequence[Sequence[Planned]], state: Mapping[Tensor, Any]
    ) -> Gatherer | None:
        """None where this torch or this build cannot do it, or a tensor is of a kind left to Python."""
        library = _library(sharding)
        table = library and library.new(ctypes.addressof(library.host), len(rows))
        if library is None or not table:
            return None
        self = cls(library, table)
        slots = dict.fromkeys((sharding.local, sharding.spec), sharding.kind)
        kinds = {(type(planned.parameter), planned.sharded) for row in rows for planned in row}
        known = all(_is_known(kind, slots if sharded else {}) for kind, sharded in kinds)
        return self if known and self._fill(rows, state) else None

    def _fill(self, rows: Sequence[Sequence[Planned]], state: Mapping[Tensor, Any]) -> bool:
        added = [planned for row in rows for planned in row]
        for group, row in enumerate(rows):
            if not all(self._add(group, planned) for planned in row):
                return False
        index = {id(planned.parameter): i for i, planned in enumerate(added) if planned.values is not None}
        order = array.array("q", [index[id(key)] for key in state if id(key) in index])
        self._library.order(self._table, order.buffer_info()[0], len(order))
        self._pointers = array.array("Q", bytes(8 * (1 + max((p.slot for p in added), default=-1))))
        return len(order) == len(index)

    def _add(self, group: int, planned: Planned) -> bool:
        values = planned.values or {}
        keys = [key for key in values if key in planned.keys]
        tensors = [values[key] for key in keys]
        self._kept.append((planned, keys, tensors, [tensor.untyped_storage() for tensor in tensors]))
        key_table, tensor_table = _addresses(keys), _addresses(tensors)
        probed, lines = None, []
        if values:
            probed = _probed(planned.keys, values)
            read = [planned.local, probed]
            lines = _lines([planned.parameter, *read], [tensor.untyped_storage() for tensor in read])
        line_table = (ctypes.c_void_p * len(lines))(*lines)
        entry = _Parameter(
            parameter=id(planned.parameter),
            local=id(planned.local),
            values=None if planned.values is None else id(planned.values),
            keys=ctypes.addressof(key_table),
            tensors=ctypes.addressof(tensor_table),
            probed=None if probed is None else id(probed),
            lines=ctypes.addressof(line_table),
            count=len(keys),
            line_count=len(lines),
            group=group,
            slot=planned.slot,
            sharded=planned.sharded,
            gradient_dtype=_GRADIENT_DTYPES[planned.gradient_dtype],
        )
        return bool(self._library.add(self._table, ctypes.addressof(entry)) == 0)

    def gather(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> int | None:
        """The number of gradients, which `pointer` then points to; None, with `difference` saying where to look, if
        anything is not as planned. Changes nothing. The gradients live until `release`.
        """
        # Without the search for a DTensor's __torch_function__ (it has none).
        with torch._C.DisableTorchFunction():
            found: int = self._library.gather(self._table, groups, state, self.pointer(0))
        self.difference = max(0, -found)
        return None if found < 0 else found

    def pointer(self, slot: int) -> int:
        """Address of the uint64 that holds a slot's gradient's address: 0 without a gradient, 1 if it is empty."""
        return self._pointers.buffer_info()[0] + 8 * slot

    def has_gradient(self) -> Sequence[int]:
        """By slot: 0 if not."""
        return self._pointers

    def release(self) -> None:
        """Let go of the gradients."""
        self._library.release(self._table)
