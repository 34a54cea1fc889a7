"""Second derivatives through gradients of partial sums: the gradient counts once, not per rank.

In the graph each rank's term of a partial sum has a gradient of its own, and all these gradients
are equal. Results that depend on them add up over the ranks. A program sees a single gradient,
which is replicated: results that depend on it count once. First derivatives need no difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.redistribution.redistribute import counted_once, redistribute_local
from tilework.dtensor.spec import DTensorSpec


def as_seen(grad: Tensor, spec: DTensorSpec, before: Tensor | None = None) -> Tensor:
    """The local gradient from the graph, in the same memory, to be counted once. Local.

    The gradient is returned as it is if the tensor is no partial sum, or if the gradient is not
    differentiated further.

    Args:
        grad: The local gradient.
        spec: The layout of the tensor.
        before: The gradient that the program saw earlier, if backward passes have only added to
            that since: this term of ``grad`` is counted already. None: there was none.
    """
    if not grad.requires_grad or spec.reduce_op != "sum":
        return grad
    with torch.inference_mode(False), torch.enable_grad():
        if before is None or not before.requires_grad:
            return counted_once(grad, spec.dual, spec.partial_axes)
        seen: Tensor = _Seen.apply(grad, before, spec)  # type: ignore[no-untyped-call]
    return seen


class _Seen(LocalFunction):
    """The identity on a sum, of which the term ``before`` is counted once already.

    The backward pass leaves the gradient of that term alone, and counts that of the others once.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, before: Tensor, spec: DTensorSpec) -> Tensor:
        ctx.spec = spec
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dual = ctx.spec.dual
        counted = redistribute_local(grad, dual, dual.as_partial(ctx.spec.partial_axes))
        return counted, grad - counted, None  # the term is part of the sum, too
