"""Saving and loading of optimizer state: see `state_dict`, `layout` and `blocks`."""

from .state_dict import LoadReport

__all__ = ["LoadReport"]
