"""Gradients that are averaged outside of buckets, when another parameter's gradient is ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import nn

from tilework.comm.contract import ReduceOp
from tilework.comm.operations.internal import all_reduce
from tilework.parallel.data_parallel.leaves import GradLeaf
from tilework.parallel.data_parallel.reducer import Reducer


class DelayedReduction:
    """Averages the gradients of some parameters in one message, outside of buckets.

    It does this when the gradient of another parameter, the trigger, is ready.
    """

    def __init__(self, leaves: Sequence[GradLeaf], trigger: nn.Parameter, reducer: Reducer) -> None:
        self._leaves, self._reducer = list(leaves), reducer
        # A weak reference: Python finds no cycle of references that goes through these hooks.
        reduce: Any = WeakMethod(self._reduce)
        on_grad: Any = trigger.register_post_accumulate_grad_hook
        self._remove = finalize(self, on_grad(lambda _: reduce()()).remove)

    def close(self) -> None:
        """Remove the hook. Idempotent; not collective."""
        self._remove()

    @torch.no_grad()
    def _reduce(self) -> None:
        if self._reducer.accumulating:
            return
        grads = [leaf.tensor.grad for leaf in self._leaves]
        dense = [
            torch.zeros_like(leaf.tensor) if grad is None else grad
            for leaf, grad in zip(self._leaves, grads, strict=True)
        ]
        flat = torch.cat([grad.reshape(-1) for grad in dense])
        with self._reducer.replica.passes.carried():
            all_reduce(flat, ReduceOp.AVG, self._reducer.active)
        for leaf, grad, part in zip(
            self._leaves, dense, torch.split(flat, [g.numel() for g in dense]), strict=True
        ):
            grad.copy_(part.view(grad.shape))
            leaf.tensor.grad = grad
