"""Partial gradients of parameters, reduced together at the end of the backward pass.

Each parameter's partial gradient is kept when the pass comes to it. At the end of the pass those of
one dtype along the same mesh axes are summed over the ranks in buckets, as few messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import agree_equal
from tilework.comm.collectives import all_reduce
from tilework.comm.contract import ProcessGroup
from tilework.dtensor.debug import explain
from tilework.dtensor.redistribution.redistribute import axes_group
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.errors import CollectiveMismatchError

#: The most that is reduced in one message; it is also what is held besides the gradients.
_BUCKET_BYTES = 64 << 20
#: Passes that raised leave their gradients behind: of more such passes, all are forgotten.
_MOST_PASSES = 16
_MOST_AGREED = 4096


@dataclass(eq=False)
class _PendingGrad:
    leaf: Tensor
    grad: Tensor
    #: The gradient's layout, partial along some axes.
    spec: DTensorSpec
    #: The alias's, which is the same on all ranks.
    number: int


@dataclass(eq=False)
class PendingGrads:
    """Partial gradients of one rank's leaves, from backward passes under way."""

    #: The number of aliases so far: numbers them alike on every rank.
    aliases: int = 0
    #: By backward pass, then by leaf and axes.
    by_pass: dict[int, dict[tuple[int, Ints], _PendingGrad]] = field(default_factory=dict)
    #: The numbers of buckets that all ranks have agreed upon.
    agreed: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, leaf: Tensor, grad: Tensor, spec: DTensorSpec, number: int) -> None:
        """Reduce ``grad`` at the end of this backward pass, and accumulate it into the leaf."""
        task = torch._C._current_graph_task_id()
        pending = self.by_pass.get(task)
        if pending is None:
            if len(self.by_pass) > _MOST_PASSES:
                self.by_pass.clear()
            pending = self.by_pass[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._reduce(self.by_pass.pop(task, {}))
            )
        key = id(leaf), spec.partial_axes
        if key in pending:
            pending[key].grad = pending[key].grad + grad
        else:
            pending[key] = _PendingGrad(leaf, grad, spec, number)

    @torch.no_grad()
    def _reduce(self, pending: dict[tuple[int, Ints], _PendingGrad]) -> None:
        """Sum all gradients over the ranks. Collective."""
        together: dict[Any, list[_PendingGrad]] = {}
        for grad in sorted(pending.values(), key=lambda grad: grad.number):
            key = grad.spec.mesh, grad.spec.partial_axes, grad.grad.dtype, grad.grad.device
            together.setdefault(key, []).append(grad)
        for (mesh, axes, _, _), grads in together.items():
            group = axes_group(mesh, axes)
            for bucket in _buckets(grads):
                self._check_same(bucket, group)
                _reduce_bucket(bucket, group)

    def _check_same(self, bucket: list[_PendingGrad], group: ProcessGroup) -> None:
        """Raise if ranks are about to reduce gradients of different leaves."""
        numbers = tuple(grad.number for grad in bucket)
        if numbers in self.agreed:
            return
        if len(self.agreed) > _MOST_AGREED:
            self.agreed.clear()
        agree_equal(
            lambda: {
                "count": len(bucket),
                "shapes": [tuple(grad.grad.shape) for grad in bucket],
                "numbers": numbers,
            },
            group,
            "a backward pass came to gradients of different replicated tensors:",
            hint="; all ranks of the mesh must compute with the same tensors",
            error=CollectiveMismatchError,
        )
        self.agreed.add(numbers)


def _buckets(grads: list[_PendingGrad]) -> list[list[_PendingGrad]]:
    """Neighbours together, up to the size of a bucket."""
    buckets: list[list[_PendingGrad]] = [[]]
    size = 0
    for grad in grads:
        if buckets[-1] and size + grad.grad.nbytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(grad)
        size += grad.grad.nbytes
    return buckets


def _reduce_bucket(bucket: list[_PendingGrad], group: ProcessGroup) -> None:
    first = bucket[0].grad
    if explain.watchers:
        spec = bucket[0].spec
        explain.record_reduction(spec, spec.partial_axes, [grad.grad for grad in bucket])
    sizes = [grad.grad.numel() for grad in bucket]
    flat = (
        group.empty(sum(sizes), dtype=first.dtype)
        if first.device.type == "cpu"
        else first.new_empty(sum(sizes))
    )
    torch.cat([grad.grad.reshape(-1) for grad in bucket], out=flat)
    all_reduce(flat, group=group)
    for pending, part in zip(bucket, torch.split(flat, sizes), strict=True):
        grad = part.view(pending.grad.shape)
        if pending.leaf.grad is None:
            pending.leaf.grad = grad
        else:
            pending.leaf.grad += grad
