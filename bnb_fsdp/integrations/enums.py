"""New members for an existing ``(str, Enum)`` class. Imports nothing but the standard library.

Python offers no call for this, so members are made with what the interpreter itself uses while it executes an
enum's class body. The result is checked through the public interface before it is returned.
"""

from __future__ import annotations

import enum
from typing import Any


def extend_str_enum(enum_class: type[enum.Enum], value: str, name: str | None = None) -> enum.Enum:
    """The member of ``enum_class`` with ``value``, added at the end if there is none.

    ``name`` is the attribute's name, by default ``value.upper()``. The member behaves like those of the class
    body: lookup by value and name, iteration, length, ``in``, repr, pickle, copies. It is unknown to other
    processes until they add it too, so a pickle of it loads only there.

    Raises TypeError if ``enum_class`` is not a ``(str, Enum)`` class or ``value`` not a plain string,
    ValueError if the name is taken or no identifier, RuntimeError if the class changes its values or this
    Python's enums work in an unknown way.
    """
    if not (
        isinstance(enum_class, type) and issubclass(enum_class, str) and issubclass(enum_class, enum.Enum)
    ):
        raise TypeError(f"{enum_class!r} must be an enum class that derives from str.")
    if type(value) is not str:
        raise TypeError(f"{enum_class.__name__}: a new value must be a str, got {value!r}.")
    existing = enum_class._value2member_map_.get(value)
    if existing is not None:
        return existing
    name = value.upper() if name is None else name
    if not name.isidentifier() or name.startswith("_"):
        raise ValueError(
            f"{enum_class.__name__}: {name!r} cannot name a member; pass an identifier as name=."
        )
    if name in enum_class._member_map_ or any(name in vars(base) for base in enum_class.__mro__):
        raise ValueError(f"{enum_class.__name__} already has an attribute {name!r}; pass another name=.")
    _add(enum_class, value, name)
    member = enum_class.__members__.get(name)
    if member is None or enum_class._value2member_map_.get(value) is not member or member != value:
        raise RuntimeError(
            f"cannot add {name} = {value!r} to {enum_class.__name__}: its __new__, or this version of "
            f"Python, made {member!r} of it."
        )
    return member


def _add(enum_class: Any, value: str, name: str) -> None:
    """Make one member the way the class body would have."""
    proto: Any = getattr(enum, "_proto_member", None)
    if proto is not None:
        # Python >= 3.11 puts this placeholder into the class namespace and lets type.__new__ call its
        # __set_name__, which takes the placeholder out again and enters the member into every table.
        placeholder = proto(value)
        setattr(enum_class, name, placeholder)
        placeholder.__set_name__(enum_class, name)
        return
    # Python 3.10 has the same steps inline in EnumMeta.__new__.
    new = getattr(enum_class, "__new_member__", None) or str.__new__
    member = new(enum_class, value)
    if not hasattr(member, "_value_"):
        member._value_ = value
    member._name_ = name
    member.__objclass__ = enum_class
    member.__init__(value)
    setattr(enum_class, name, member)
    enum_class._member_names_.append(name)
    enum_class._member_map_[name] = member
    enum_class._value2member_map_[member._value_] = member
