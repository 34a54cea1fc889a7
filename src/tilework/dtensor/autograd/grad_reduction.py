"""Partial gradients of parameters, reduced together at the end of the backward pass.

Each parameter's partial gradient is kept when the pass comes to it. At the end of the pass those of
one dtype along the same mesh axes are summed over the ranks in buckets, as few messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import all_reduce
from tilework.comm.per_call.internal import current_recorder
from tilework.dtensor.debug import causes
from tilework.dtensor.provenance.digests import call_counts_of
from tilework.dtensor.provenance.meaning import TensorText, moving
from tilework.dtensor.redistribution.redistribute import axes_group
from tilework.dtensor.spec import DTensorSpec, Ints

#: The most that is reduced in one message; it is also what is held besides the gradients.
_BUCKET_BYTES = 64 << 20
#: Passes that raised leave their gradients behind: of more such passes, all are forgotten.
_MOST_PASSES = 16


@dataclass(eq=False)
class PendingGrad:
    """A partial gradient of a leaf that waits to be reduced at the end of the backward pass."""

    leaf: Tensor
    #: The local gradient, in the layout ``spec``; the sum if several aliases gave gradients.
    grad: Tensor
    #: The gradient's layout, partial along some axes.
    spec: DTensorSpec
    #: The leaf's provenance, which is the same on all ranks.
    digest: int
    #: The alias's, which counts this rank's aliases: orders leaves that came about alike.
    number: int


@dataclass(eq=False)
class PendingGrads:
    """Partial gradients of one rank's leaves, from backward passes under way."""

    #: The number of aliases so far: numbers them alike on every rank.
    aliases: int = 0
    #: By backward pass, then by leaf and axes.
    by_pass: dict[int, dict[tuple[int, Ints], PendingGrad]] = field(default_factory=dict)

    def add(self, grad: PendingGrad) -> None:
        """Keep a gradient until the end of this backward pass: then reduce and accumulate it."""
        task = torch._C._current_graph_task_id()
        pending = self.by_pass.get(task)
        if pending is None:
            if len(self.by_pass) > _MOST_PASSES:
                self.by_pass.clear()
            pending = self.by_pass[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._reduce(self.by_pass.pop(task, {}))
            )
        key = id(grad.leaf), grad.spec.partial_axes
        if key in pending:
            pending[key].grad = pending[key].grad + grad.grad
        else:
            pending[key] = grad

    @torch.no_grad()
    def _reduce(self, pending: dict[tuple[int, Ints], PendingGrad]) -> None:
        """Sum the pending gradients over the ranks, and add them to the leaves. Collective."""
        together: dict[Any, list[PendingGrad]] = {}
        # Digests change with each step; records of two steps are to have one order.
        is_recorded = current_recorder() is not None
        for grad in sorted(
            pending.values(), key=lambda grad: (0 if is_recorded else grad.digest, grad.number)
        ):
            key = grad.spec.mesh, grad.spec.partial_axes, grad.grad.dtype, grad.grad.device
            together.setdefault(key, []).append(grad)
        for (mesh, axes, _, _), grads in together.items():
            group = axes_group(mesh, axes)
            for bucket in _buckets(grads):
                _reduce_bucket(bucket, group)


def _buckets(grads: list[PendingGrad]) -> list[list[PendingGrad]]:
    """Split the list, in order, into buckets of up to ``_BUCKET_BYTES``, or a single gradient."""
    buckets: list[list[PendingGrad]] = [[]]
    size = 0
    for grad in grads:
        if buckets[-1] and size + grad.grad.nbytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(grad)
        size += grad.grad.nbytes
    return buckets


def _reduce_bucket(bucket: list[PendingGrad], group: ProcessGroup) -> None:
    first = bucket[0].grad
    if causes.watchers:
        spec = bucket[0].spec
        causes.record_reduction(spec, spec.partial_axes, [grad.grad for grad in bucket])
    sizes = [grad.grad.numel() for grad in bucket]
    flat = (
        group.empty(sum(sizes), dtype=first.dtype)
        if first.device.type == "cpu"
        else first.new_empty(sum(sizes))
    )
    torch.cat([grad.grad.reshape(-1) for grad in bucket], out=flat)
    counts = call_counts_of(bucket[0].spec.mesh)
    digest = hash((counts.passing, *[grad.digest for grad in bucket]))
    counts.note_gradient(digest)
    count = f"{len(bucket)} gradient{'s' * (len(bucket) != 1)}"
    with moving(digest, f"the reduction of {count}", TensorText(bucket[0].spec, first.dtype)):
        all_reduce(flat, group=group)
    for pending, part in zip(bucket, torch.split(flat, sizes), strict=True):
        grad = part.view(pending.grad.shape).data  # which counts writes to it alone
        if pending.leaf.grad is None:
            pending.leaf.grad = grad
        else:
            pending.leaf.grad += grad
