"""Lets accelerate use FSDP2 on CPUs, for tests only. Import before TrainingArguments or Accelerator are made.

accelerate (1.15) takes ``DistributedType.FSDP`` for a given FSDP plugin with every multi-device type but
MULTI_CPU: there it keeps the plugin aside and trains plain DDP without a word.
"""

from __future__ import annotations

import functools
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_original = AcceleratorState.__init__


@functools.wraps(_original)
def _init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = _init  # type: ignore[method-assign]
