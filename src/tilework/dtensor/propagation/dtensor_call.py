"""A call of an operator, the input of sharding propagation."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.provenance.content import hash_of
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.layout import Replicate
from tilework.mesh import DeviceMesh

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def with_tensors(args: Args, kwargs: Kwargs, tensors: Iterator[Any]) -> tuple[list[Any], Kwargs]:
    """The arguments of a call with the tensors replaced by ``tensors``, in order."""
    return (
        [_substituted(arg, tensors) for arg in args],
        {name: _substituted(arg, tensors) for name, arg in kwargs.items()},
    )


def _substituted(value: Any, tensors: Iterator[Any]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    kind = value.__class__
    if kind is list or kind is tuple:
        return kind([_substituted(item, tensors) for item in value])
    if kind is dict:
        return {name: _substituted(item, tensors) for name, item in value.items()}
    return value


def tensors_in(result: Any) -> list[Tensor]:
    """All tensors in a result or in arguments, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in tensors_in(item)]
    return tensors_in([*result.values()]) if isinstance(result, dict) else []


def rebuilt(result: Any, tensors: Iterator[Any]) -> Any:
    """A result with the tensors replaced by ``tensors``, in order."""
    if isinstance(result, Tensor):
        return next(tensors)
    if isinstance(result, list):
        return [rebuilt(item, tensors) for item in result]
    if isinstance(result, tuple):
        items = [rebuilt(item, tensors) for item in result]
        if type(result) is tuple:
            return tuple(items)
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result


def replicated_spec(tensor: Tensor, mesh: DeviceMesh) -> DTensorSpec:
    """The layout of a plain tensor that counts as replicated on the mesh."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return spec_of(mesh, (Replicate(),) * mesh.ndim, tuple(tensor.shape), None, strides)


def content_hash(tensor: Tensor) -> str:
    """A hash of the elements, as text; "" for a tensor without memory or without strides."""
    digest = hash_of(tensor)
    return f"{digest:016x}" if digest else ""


def unseen() -> AbstractContextManager[Any]:
    """A context for trial runs of an operator, in which the program's dispatch modes are off.

    Trials come before the first call of a signature. With the modes on, a selective checkpoint
    would store the results of trials, and miss them in the recomputation. Only the modes of a
    tracer stay active.
    """
    if not torch._C._len_torch_dispatch_stack() or any(map(_infra_mode, _INFRA)):
        return nullcontext()
    return _disable_current_modes()


_infra_mode = torch._C._get_dispatch_mode
_INFRA = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


class DTensorCall(NamedTuple):
    """A call of an operator with DTensors."""

    #: The torch function that was called.
    func: Callable[..., Any]
    #: The positional arguments.
    args: Args
    #: The keyword arguments.
    kwargs: Kwargs
    #: The tensors among the arguments, in order: DTensors and plain tensors.
    tensors: Sequence[Tensor]
    #: The mesh of the DTensors among the arguments.
    mesh: DeviceMesh
    #: The provenance digest of the result.
    digest: int = 0

    @property
    def specs(self) -> list[DTensorSpec]:
        """The layouts of the DTensors among the arguments."""
        return [tensor._spec for tensor in self.tensors if isinstance(tensor, DTensorBase)]

    def on_meta(self) -> Any:
        """The result of the call with a meta tensor in place of each tensor."""
        return self.on_tensors(
            [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in self.tensors]
        )

    def on_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The result of the call with ``tensors`` in place of the tensors, without gradients."""
        args, kwargs = with_tensors(self.args, self.kwargs, iter(tensors))
        with torch.no_grad():
            return self.func(*args, **kwargs)


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*_: Any) -> bool:
    return False


class _TorchWithoutChecks:
    """The module ``torch``, whose override checks are always False."""

    overrides = types.SimpleNamespace(**dict.fromkeys(_CHECKS, _never))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def _globals_of(module: str) -> dict[str, Any]:
    return {**vars(sys.modules[module]), **dict.fromkeys(_CHECKS, _never)}


@cache
def without_override_checks(func: Any) -> Callable[..., Any] | None:
    """The same Python function without override checks; None if the function has no checks."""
    if not isinstance(func, types.FunctionType):
        return None
    if not set(_CHECKS) & set(func.__code__.co_names):
        return None
    scope = _globals_of(func.__module__) if func.__module__ in sys.modules else None
    if scope is None or func.__globals__.get("__name__") != func.__module__:
        scope = {**func.__globals__, **dict.fromkeys(_CHECKS, _never)}
    if "overrides" in func.__code__.co_names:
        scope = {**scope, "torch": _TorchWithoutChecks()}
    unchecked = types.FunctionType(
        func.__code__, scope, func.__name__, func.__defaults__, func.__closure__
    )
    unchecked.__kwdefaults__ = func.__kwdefaults__
    return unchecked
