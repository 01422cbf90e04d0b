"""Plug-ins for other frameworks, applied when and if those are imported; none is imported here."""

from __future__ import annotations


def install() -> None:
    """Register everything that waits for another package's import."""
    from . import transformers

    transformers.install()
