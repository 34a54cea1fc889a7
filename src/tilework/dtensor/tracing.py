"""Traces and scripts of DTensors: scripted functions gather them, and traces refuse them.

A trace has no collectives. It would record only torch's operators on this rank's local tensors, and
silently replay them with values of this rank alone, or with constants. While C++ traces, it does
not call ``__torch_function__`` of classes, and modes below autograd see only local tensors. Python
modes are still called. Therefore each function that starts a trace is replaced by a function that
traces within such a mode.

Methods of scripted modules do call ``__torch_function__``, and run on gathered tensors. Scripted
functions do not, and fail in C++ without a reason. This module makes them call it, too.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NoReturn

import torch
import torch.fx.experimental.proxy_tensor
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._pytree import tree_leaves

from tilework.comm.operations.internal import leave_function
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.construction.distribute import distribute_tensor
from tilework.dtensor.module import distribute_module
from tilework.dtensor.tensor import DTensor
from tilework.late_names import late_name

#: Functions that start a trace: for ``torch.jit.trace``, ``trace_module`` and ``torch.onnx``; for
#: ``make_fx``.
_STARTERS: tuple[tuple[Any, str, str], ...] = (
    (torch._C, "_create_function_from_trace", "torch.jit.trace"),
    (torch._C, "_create_function_from_trace_with_dict", "torch.jit.trace"),
    (torch._C, "_create_graph_by_tracing", "torch.jit.trace"),
    (torch._C.ScriptModule, "_create_method_from_trace", "torch.jit.trace"),
    (torch._C.ScriptModule, "_create_method_from_trace_with_dict", "torch.jit.trace"),
    (torch.fx.experimental.proxy_tensor._MakefxTracer, "trace", "make_fx"),
)


class _Refusing(TorchFunctionMode):
    def __init__(self, tracer: str) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensorBase) for kind in types):
            _refuse(self._tracer)
        return func(*args, **(kwargs or {}))


def _refuse(tracer: str) -> NoReturn:
    # A TypeError would not reach the program: for operators such as * Python raises its own.
    raise RuntimeError(
        f"{tracer} takes no DTensors, nor functions that compute with them: a trace has no "
        f"collectives. Trace a function of plain tensors, from full_tensor() or to_local()"
    )


def refusing(original: Any, tracer: str) -> Any:
    """Wrap a function that starts a trace by ``tracer``: DTensors and operators on them raise."""

    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, DTensorBase) for each in tree_leaves((args, kwargs))):
            _refuse(tracer)
        with _Refusing(tracer):
            return original(*args, **kwargs)

    return start


def without_dtensors(original: Any) -> Any:
    """Wrap torch's function that makes a scripted or traced module: modules with DTensors raise."""

    @functools.wraps(original)
    def create(module: nn.Module, *args: Any, is_tracing: bool = False, **kwargs: Any) -> Any:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if isinstance(tensor, DTensorBase):
                if is_tracing:
                    _refuse("torch.jit.trace")
                raise RuntimeError(
                    f"torch.jit.script takes no modules with DTensors, and {name} of this "
                    f"{type(module).__name__} is {tensor!r}: its interpreter runs torch's "
                    f"operators on plain tensors. Script a plain copy of the model, whose "
                    f"parameters are those of full_tensor()"
                )
        return original(module, *args, is_tracing=is_tracing, **kwargs)

    return create


def asking(original: Any) -> Any:
    """Wrap the call of a scripted function: calls with DTensors go to ``__torch_function__``."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, DTensorBase)]
        if given:
            return handle_torch_function(self, given, *args, **kwargs)
        return original(self, *args, **kwargs)

    return call


_function: Any = torch._C.ScriptFunction
_function.__call__ = asking(_function.__call__)
_scripts: Any = torch.jit._recursive
_scripts.create_script_module = without_dtensors(_scripts.create_script_module)
for _place, _name, _tracer in _STARTERS:
    if hasattr(_place, _name):
        setattr(_place, _name, refusing(getattr(_place, _name), _tracer))


# -- functions that Dynamo does not trace, as ``capture/`` records them for torch.compile ---------

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
