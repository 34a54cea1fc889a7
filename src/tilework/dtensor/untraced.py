"""Functions that Dynamo does not trace, as ``capture/`` records them for torch.compile."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from tilework.comm.operations.internal import leave_function
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.construction.distribute import distribute_tensor
from tilework.dtensor.module import distribute_module
from tilework.dtensor.tensor import DTensor
from tilework.late_names import late_name

NOT_TRACED = (
    "operators on DTensors are not traced, since they communicate; "
    'tilework.dtensor.capture(step, backend="inductor") compiles a whole step with DTensors, and '
    "local_map or to_local() let you compile what is done with local tensors"
)
_METHODS = (*vars(DTensorBase).values(), *vars(DTensor).values())
for _member in (*_METHODS, distribute_tensor, distribute_module):
    _function = inspect.unwrap(getattr(_member, "__func__", getattr(_member, "fget", _member)))
    if inspect.isfunction(_function):
        leave_function(_function, NOT_TRACED)


_original = torch.compile


@functools.wraps(_original)
def _compile(model: Any = None, **settings: Any) -> Any:
    return late_name("dtensor", "compile_model")(_original, model, **settings)


torch.compile = _compile
