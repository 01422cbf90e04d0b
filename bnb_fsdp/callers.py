"""Warnings that point at the user's line. Knows nothing of torch, so any supported Python can test it alone."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_INSIDE = ("bnb_fsdp", "torch")


def warn_caller(message: str, category: type[Warning]) -> None:
    """`warnings.warn` for the first frame outside this package and torch, the outermost one if there is none.

    How many frames lie between is not known here: torch wraps ``step()`` in hooks, and the first step, `describe` or
    a scheduler's may be what warns. ``skip_file_prefixes`` of `warnings.warn` does this from Python 3.12 on.
    """
    frame = sys._getframe(1)
    while _is_inside(frame) and frame.f_back is not None:
        frame = frame.f_back
    names = frame.f_globals
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno or 1, names.get("__name__", "<unknown>"),
        registry=names.setdefault("__warningregistry__", {}),
    )  # fmt: skip


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE
