"""Paged state: kept in page-locked host memory and streamed to the device chunk by chunk, or kept on the device.

`Residency` decides where the state of each parameter lives and moves it there; `chunks` cuts what is in host memory
into chunks; the pipeline of a device (`bnb_fsdp.backends.cuda_pipeline`) moves them while others are updated.
"""

from .memory import HostMemoryError
from .policy import POLICIES, Policy
from .residency import Residency

__all__ = ["POLICIES", "HostMemoryError", "Policy", "Residency"]
