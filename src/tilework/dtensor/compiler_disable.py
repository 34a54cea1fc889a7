"""torch.compile leaves DTensors alone: it compiles the code between their operators."""

from __future__ import annotations

import inspect

from tilework.comm.compiler_disable import leave_function
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.construction.distribute import distribute_tensor
from tilework.dtensor.module import distribute_module
from tilework.dtensor.tensor import DTensor

_REASON = (
    "operators on DTensors are not traced, since they communicate; compile without "
    "fullgraph=True, or compile what is done with the local tensors (local_map, to_local)"
)

_METHODS = (*vars(DTensorBase).values(), *vars(DTensor).values())
for _member in (*_METHODS, distribute_tensor, distribute_module):
    _function = inspect.unwrap(getattr(_member, "__func__", getattr(_member, "fget", _member)))
    if inspect.isfunction(_function):
        leave_function(_function, _REASON)
