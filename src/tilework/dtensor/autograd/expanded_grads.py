"""Gradients of expanded tensors that are then sharded: summed, instead of gathered and summed.

``cls.expand(rows, -1, -1)`` of a replicated tensor gives all ranks equal rows. An operator that
needs sharded rows takes a part of them on each rank. The gradient would be gathered, and ``expand``
would sum all rows on each rank. Here each rank sums the local rows, and only the sums are reduced:
the bytes of one row.

``expand`` gets the whole sum in the first row, and nothing in others. So this is done only while
nobody looks at the gradient of the expanded tensor itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilework.comm.world import current_world
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.provenance.digests import Moved, digest_of
from tilework.dtensor.redistribution.redistribute import gradient_of, redistribute_local
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.layout import Replicate, Shard


@dataclass(eq=False)
class WatchedGrads:
    """The local tensors whose gradients a rank's running backward passes were asked for."""

    tensors: list[Tensor] = field(default_factory=list)

    @contextmanager
    def watching(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """In this context, compute the gradients of ``tensors`` exactly, without the shortcut."""
        before = len(self.tensors)
        self.tensors += tensors
        try:
            yield
        finally:
            del self.tensors[before:]


def watching(tensors: Sequence[Tensor]) -> Any:
    """A context for a backward pass: gradients of these local tensors are exact, row by row."""
    return current_world().state(WatchedGrads).watching(tensors)


def expanded_dims(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Ints:
    """The dims that ``expand`` has made, if ``target`` shards them, and changes nothing else."""
    node: Any = local.grad_fn
    if node is None or node.name() != "ExpandBackward0" or source.order != target.order:
        return ()
    sizes = node._saved_self_sym_sizes
    lead = local.dim() - len(sizes)
    dims = []
    for had, gets in zip(source.placements, target.placements, strict=True):
        if had == gets:
            continue
        if not (isinstance(had, Replicate) and isinstance(gets, Shard)):
            return ()
        dim = gets.dim
        if source.axes_of(dim) or not (dim < lead or sizes[dim - lead] == 1):
            return ()
        dims.append(dim)
    return tuple(dict.fromkeys(dims))


def shard_expanded(
    tensor: DTensorBase, target: DTensorSpec, axes: Ints, dims: Ints, operator: str
) -> Tensor:
    """The shard in ``target`` of an expanded tensor; its gradient is partial along ``axes``."""
    of = Moved(digest_of(tensor), operator)
    result: Tensor = _ShardExpanded.apply(
        tensor._local_tensor, (tensor._spec, target), axes, dims, of
    )
    return result


class _ShardExpanded(LocalFunction):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        layouts: tuple[DTensorSpec, DTensorSpec],
        axes: Ints,
        dims: Ints,
        of: Moved,
    ) -> Tensor:
        ctx.source, ctx.target = source, target = layouts
        ctx.axes, ctx.dims, ctx.of = axes, dims, of
        ctx.local, ctx.watched = weakref.ref(local), current_world().state(WatchedGrads)
        return redistribute_local(local, source, target, of=of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        source, target = ctx.source.dual, ctx.target.dual.as_partial(ctx.axes)
        if torch.is_grad_enabled() or _is_watched(ctx.local(), ctx.watched):
            of = gradient_of(ctx.of, target, grad)
            return redistribute_local(grad, target, source, of=of), None, None, None, None
        shape = [1 if dim in ctx.dims else size for dim, size in enumerate(source.shape)]
        row = spec_of(source.mesh, source.placements, shape, source.order)
        summed = [
            axis
            for axis, (had, has) in enumerate(
                zip(source.placements, target.placements, strict=True)
            )
            if had != has
        ]
        sums, partial = grad.sum(ctx.dims, keepdim=True), row.as_partial(tuple(summed))
        sums = redistribute_local(sums, partial, row, of=gradient_of(ctx.of, partial, sums))
        rows = sums.new_zeros(source.local_shape)
        rows[tuple(slice(1) if dim in ctx.dims else slice(None) for dim in range(rows.dim()))] = (
            sums
        )
        return rows, None, None, None, None


def _is_watched(local: Any, watched: WatchedGrads) -> bool:
    """True if the program may see the gradient of a local tensor: kept, hooked or asked for."""
    if local is None:
        return False
    if local.retains_grad or local._backward_hooks:
        return True
    return any(local is tensor for tensor in watched.tensors)
