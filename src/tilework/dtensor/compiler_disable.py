"""torch.compile leaves DTensors alone: it compiles what is between their operators."""

from __future__ import annotations

import inspect

from tilework.comm.compiler_disable import leave_function
from tilework.dtensor.construction.distribute import distribute_tensor
from tilework.dtensor.module import distribute_module
from tilework.dtensor.tensor import DTensor

_REASON = (
    "operators on DTensors are not traced, since they communicate; compile without "
    "fullgraph=True, or compile what is done with the local tensors (local_map, to_local)"
)

for _found in (*vars(DTensor).values(), distribute_tensor, distribute_module):
    _function = inspect.unwrap(getattr(_found, "__func__", getattr(_found, "fget", _found)))
    if inspect.isfunction(_function):
        leave_function(_function, _REASON)
