"""TorchScript and DTensors: scripted functions gather them, and traces refuse them.

A trace has no collectives. It would record torch's operators on this rank's local tensors alone,
and run those later: values that each rank has for itself, without a word. C++ asks no class while
it traces, but Python's modes are asked: what starts a trace is replaced by a function that does so
in one.

Scripted modules ask classes about their methods, and run on gathered tensors; scripted functions
ask nobody, and fail in C++ without a reason. Here they ask, too.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._pytree import tree_leaves

from tilework.dtensor.base import DTensorBase

#: What starts a trace, for ``torch.jit.trace``, ``trace_module`` and ``torch.onnx``.
_STARTERS = (
    "_create_function_from_trace",
    "_create_function_from_trace_with_dict",
    "_create_method_from_trace",
    "_create_method_from_trace_with_dict",
    "_create_graph_by_tracing",
)


class _Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensorBase) for kind in types):
            _refuse()
        return func(*args, **(kwargs or {}))


def _refuse() -> NoReturn:
    # A TypeError would not reach the program: of operators such as * Python makes another.
    raise RuntimeError(
        "torch.jit.trace takes no DTensors, nor functions that compute with them: a trace has no "
        "collectives. Trace a function of plain tensors, from full_tensor() or to_local()"
    )


def refusing(original: Any) -> Any:
    """A function that starts a trace, which DTensors end with an error."""

    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, DTensorBase) for each in tree_leaves((args, kwargs))):
            _refuse()
        with _Refusing():
            return original(*args, **kwargs)

    return start


def asking(original: Any) -> Any:
    """The call of a scripted function, which asks the classes of its arguments first."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, DTensorBase)]
        if given:
            return handle_torch_function(self, given, *args, **kwargs)
        return original(self, *args, **kwargs)

    return call


_function: Any = torch._C.ScriptFunction
_function.__call__ = asking(_function.__call__)
for _name in _STARTERS:
    if hasattr(torch._C, _name):
        setattr(torch._C, _name, refusing(getattr(torch._C, _name)))
