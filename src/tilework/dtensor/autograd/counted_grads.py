"""Gradients of partial sums, as a program sees them, to be differentiated further.

In the graph each rank's value has a separate gradient, though all are the same: what depends on
them adds up over the ranks. A program sees one gradient, which is replicated: what depends on it is
counted once. First-order gradients are the same tensors for both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.redistribution.redistribute import counted_once, redistribute_local
from tilework.dtensor.spec import DTensorSpec


def as_seen(grad: Tensor, spec: DTensorSpec, before: Tensor | None = None) -> Tensor:
    """The local gradient from the graph, as the program sees it; in the same memory. Local.

    It may be seen already, as long as only passes have added to it since.

    Args:
        grad: The local gradient.
        spec: The layout of the tensor.
        before: A term of the gradient that the program has seen, and may have changed.
    """
    if not grad.requires_grad or spec.reduce_op != "sum":
        return grad
    with torch.inference_mode(False), torch.enable_grad():
        if before is None or not before.requires_grad:
            return counted_once(grad, spec.dual, spec.partial_axes)
        seen: Tensor = _Seen.apply(grad, before, spec)  # type: ignore[no-untyped-call]
    return seen


class _Seen(LocalFunction):
    """A sum again: one term keeps the gradient, and the gradient of others is counted once."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, before: Tensor, spec: DTensorSpec) -> Tensor:
        ctx.spec = spec
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dual = ctx.spec.dual
        counted = redistribute_local(grad, dual, dual.as_partial(ctx.spec.partial_axes))
        return counted, grad - counted, None  # the term is part of the sum, too
