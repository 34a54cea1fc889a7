"""torch.compile leaves sharded tensors alone: it compiles the code between their operators."""

from __future__ import annotations

import inspect

from tilework.comm.operations.internal import leave_function
from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.tensor import ShardedTensor

_REASON = (
    "operators on sharded tensors are not traced, since they communicate; compile without "
    "fullgraph=True, or compile what is done with the local tensors"
)

for _kind in (ShardedTensorBase, ShardedTensor):
    for _method in vars(_kind).values():
        _function = inspect.unwrap(getattr(_method, "__func__", _method))
        if inspect.isfunction(_function):
            leave_function(_function, _REASON)
