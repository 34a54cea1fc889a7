"""Tracing: predicates for traced calls, and constants of traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilework.comm.functional.async_tensor import AsyncTensor

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_PLAIN = (Tensor, torch.nn.Parameter, AsyncTensor)


def traced(x: Tensor) -> bool:
    """True if a call with ``x`` must go through operators, for a tracer to see or transform it."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or x.__class__ not in _PLAIN
    )


def transformed() -> bool:
    """True inside a transform of torch.func, or inside forward-mode autograd."""
    return (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )


def constant(fn: _Fn) -> _Fn:
    """``fn``, marked so that torch.compile calls it while it traces: the result is a constant."""
    # The same as torch.compiler.assume_constant_result, which takes a second to import.
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
