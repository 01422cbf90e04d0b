"""The optimizer classes."""

from .adam import Adam, Adam8bit, Adam32bit, AdamW, AdamW8bit, AdamW32bit
from .base import BlockwiseOptimizer
from .lion import Lion, Lion8bit, Lion32bit

__all__ = [
    "Adam",
    "Adam8bit",
    "Adam32bit",
    "AdamW",
    "AdamW8bit",
    "AdamW32bit",
    "BlockwiseOptimizer",
    "Lion",
    "Lion8bit",
    "Lion32bit",
]
