"""Saving and loading of optimizer state: `state_dict`, `layout`, `blocks`; whole checkpoints: `directory`."""

from .files import NoCheckpointError
from .manifest import CheckpointError
from .state_dict import LoadReport

__all__ = ["CheckpointError", "LoadReport", "NoCheckpointError"]
