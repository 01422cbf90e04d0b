"""Plug-ins for other frameworks, applied when and if those are imported; none is imported here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import bitsandbytes as bitsandbytes


def install() -> None:
    """Register everything that waits for another package's import."""
    from . import transformers

    transformers.install()


def __getattr__(name: str) -> Any:
    """Imports the plug-in for bitsandbytes when it is asked for: ``bnb_fsdp.integrations.bitsandbytes``."""
    if name == "bitsandbytes":
        return importlib.import_module(".bitsandbytes", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "bitsandbytes"})
