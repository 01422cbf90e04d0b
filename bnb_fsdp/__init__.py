"""bitsandbytes' 8-bit and 32-bit optimizers for models sharded with FSDP2."""

from . import ops as _ops  # noqa: F401 (registers torch.ops.bnb_fsdp)
from .checkpoint import CheckpointError, LoadReport
from .checkpoint.directory import load_checkpoint, save_checkpoint
from .factory import create_optimizer, optimizer_class, optimizer_names
from .integrations import install as _install_integrations
from .optim import (
    SGD,
    Adagrad,
    Adagrad8bit,
    Adagrad32bit,
    Adam,
    Adam8bit,
    Adam32bit,
    AdamW,
    AdamW8bit,
    AdamW32bit,
    Lion,
    Lion8bit,
    Lion32bit,
    RMSprop,
    RMSprop8bit,
    RMSprop32bit,
    SGD8bit,
    SGD32bit,
)
from .report import describe

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adagrad",
    "Adagrad8bit",
    "Adagrad32bit",
    "Adam",
    "Adam8bit",
    "Adam32bit",
    "AdamW",
    "AdamW8bit",
    "AdamW32bit",
    "CheckpointError",
    "Lion",
    "Lion8bit",
    "Lion32bit",
    "LoadReport",
    "RMSprop",
    "RMSprop8bit",
    "RMSprop32bit",
    "SGD8bit",
    "SGD32bit",
    "create_optimizer",
    "describe",
    "load_checkpoint",
    "optimizer_class",
    "optimizer_names",
    "save_checkpoint",
]

_install_integrations()
