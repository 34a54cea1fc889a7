"""Partial gradients, and where in the graph they are reduced.

The graph consists of the local tensors. A rank that computes with a replicated tensor and a shard
of another gets a partial gradient of the replicated tensor: all ranks' must be summed. Such an
operator takes the local tensor through an *alias*: the same memory at a place in the graph whose
backward reduces the gradient. All uses of a tensor share one alias, and the gradient is reduced
once. Gradients of leaves (parameters) wait for the end of the pass, and are reduced together
(:class:`PendingGrads`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import all_reduce
from tilework.comm.per_call.internal import address_of, current_recorder
from tilework.comm.world import current_world
from tilework.dtensor.autograd.local_graph import local_of
from tilework.dtensor.base import Alias, DTensorBase, grads_of
from tilework.dtensor.debug import causes
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.provenance.digests import (
    UNKNOWN,
    Moved,
    TensorText,
    call_counts_of,
    digest_of,
    moving,
)
from tilework.dtensor.redistribution.redistribute import gradient_of, redistribute_local
from tilework.dtensor.spec import DTensorSpec, Ints

#: The most that is reduced in one message; it is also what is held besides the gradients.
_BUCKET_BYTES = 64 << 20
_flatten: Any = torch._C._nn.flatten_dense_tensors
_unflatten: Any = torch._C._nn.unflatten_dense_tensors
#: So many elements are not worth memory of the group's.
_FEW_ELEMENTS = 1 << 14
#: Passes that raised leave their gradients behind: of more such passes, all are forgotten.
_MOST_PASSES = 16


@dataclass(eq=False, slots=True)
class PendingGrad:
    """A partial gradient of a leaf that waits to be reduced at the end of the backward pass."""

    leaf: Tensor
    #: The local gradient, in the layout ``spec``; the sum if several aliases gave gradients.
    grad: Tensor
    #: The gradient's layout, partial along some axes.
    spec: DTensorSpec
    #: The leaf's provenance, which is the same on all ranks.
    digest: int
    #: The alias's, which counts this rank's aliases: orders leaves with equal digests.
    number: int


@dataclass(eq=False)
class PendingGrads:
    """Partial gradients of one rank's leaves, from backward passes under way."""

    #: The number of aliases so far: numbers them equally on every rank.
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
        together: dict[tuple[ProcessGroup, Any, Any], list[PendingGrad]] = {}
        # Digests change with each step; records of two steps are to have one order.
        is_recorded = current_recorder() is not None
        for grad in sorted(
            pending.values(), key=lambda grad: (0 if is_recorded else grad.digest, grad.number)
        ):
            key = grad.spec.partial_group, grad.grad.dtype, grad.grad.device
            together.setdefault(key, []).append(grad)
        for (group, _, _), grads in together.items():
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
    grads = [pending.grad for pending in bucket]
    first = grads[0]
    if causes.watchers:
        spec = bucket[0].spec
        causes.record_reduction(spec, spec.partial_axes, grads)
    numel = sum([grad.numel() for grad in grads])
    if numel <= _FEW_ELEMENTS or not first.is_cpu:
        flat = _flatten(grads)
    else:
        flat = group.empty(numel, dtype=first.dtype)
        torch.cat([grad.reshape(-1) for grad in grads], out=flat)
    counts = call_counts_of(bucket[0].spec.mesh)
    digest = hash((counts.passing, *[grad.digest for grad in bucket]))
    counts.note_gradient(digest)
    count = f"{len(bucket)} gradient{'s' * (len(bucket) != 1)}"
    with moving(digest, f"the reduction of {count}", TensorText(bucket[0].spec, first.dtype)):
        all_reduce(flat, group=group)
    for pending, part in zip(bucket, _unflatten(flat, grads), strict=True):
        grad = part.data  # which counts writes to it alone
        if pending.leaf.grad is None:
            pending.leaf.grad = grad
        else:
            pending.leaf.grad += grad


def alias(tensor: DTensorBase, axes: Ints) -> Tensor:
    """The local tensor whose gradient is partial along ``axes``, for all uses until a write."""
    local = local_of(tensor)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return local
    aliases = grads_of(tensor).aliases
    known = aliases.get(axes)
    if (
        known is None
        or known.local is not local
        or known.grad_fn is not local.grad_fn
        or address_of(known.tensor) != address_of(local)
    ):
        spec = tensor._spec.dual
        of = Moved(digest_of(tensor))
        owner = tensor if local.is_leaf else None
        known = Alias(
            alias_local(local, spec.as_partial(axes), spec, of, owner), local, local.grad_fn
        )
        if not local.is_inference():  # of which each operator takes a copy
            aliases[axes] = known
    return known.tensor


def alias_local(
    local: Tensor,
    partial: DTensorSpec,
    reduced: DTensorSpec,
    of: Moved = UNKNOWN,
    leaf: DTensorBase | None = None,
) -> Tensor:
    """An alias of a local tensor: the gradient arrives as ``partial`` and leaves as ``reduced``.

    ``of`` is the tensor's provenance. ``leaf`` is the tensor, if it is a leaf: it may be written to
    before the gradient comes.
    """
    pending = current_world().state(PendingGrads)
    pending.aliases += 1
    result: Tensor = _ReduceGrad.apply(
        local,
        (partial, reduced),
        pending if local.is_leaf else None,
        pending.aliases,
        of if leaf is None else ref(leaf),
    )
    return result


def redistribute_with_partial_grad(
    tensor: DTensorBase, target: DTensorSpec, axes: Ints, operator: str
) -> Tensor:
    """The local tensor in another layout; gradients partial along ``axes`` go straight back."""
    source, local = tensor._spec, local_of(tensor)
    of = Moved(digest_of(tensor), operator)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return redistribute_local(local, source, target, of=of)
    if source.partial_axes or target.reduce_op not in (None, "sum"):
        moved = redistribute_local(local, source, target, of=of)
        return alias_local(moved, target.dual.as_partial(axes), target.dual, of)
    if target.dual == source:  # the first rank's partial value is the value: grads may wait
        return redistribute_local(alias(tensor, axes), source, target, of=of)
    result: Tensor = _RedistributeGrad.apply(
        local, (source, target, target.dual.as_partial(axes)), of
    )
    return result


def route_partial_grads(result: DTensorBase, tensor: DTensorBase, axes: Ints) -> None:
    """Let gradients of ``result``, the redistributed ``tensor``, go straight to ``tensor``.

    Those that are partial along ``axes`` are reduced into that layout, not to full sums first.
    """
    local, source = local_of(result), tensor._spec
    if not (local.requires_grad and torch.is_grad_enabled()) or source.partial_axes:
        return
    if result._spec.reduce_op not in (None, "sum"):
        return
    partial = result._spec.dual.as_partial(axes)
    shortcut = _RedistributeGrad.apply(
        local_of(tensor), (source, result._spec, partial), Moved(digest_of(tensor)), local.detach()
    )
    grads_of(result).aliases[axes] = Alias(shortcut, local, local.grad_fn)


def redistribute_with_gradient(
    local: Tensor, source: DTensorSpec, target: DTensorSpec, partial: DTensorSpec, of: Moved
) -> Tensor:
    """The local tensor in another layout, whose gradient comes in as ``partial``. Collective."""
    result: Tensor = _RedistributeGrad.apply(local, (source, target, partial), of)
    return result


class _RedistributeGrad(LocalFunction):
    """A redistribution whose gradient comes in partial and is redistributed in one go."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        layouts: tuple[DTensorSpec, DTensorSpec, DTensorSpec],
        of: Moved,
        done: Tensor | None = None,
    ) -> Tensor:
        source, target, ctx.partial = layouts
        ctx.source, ctx.of = source.dual, of
        result = redistribute_local(local, source, target, of=of) if done is None else done
        return result.detach() if result is local or result is done else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _reduced(grad, ctx.partial, ctx.source, ctx.of), None, None, None


class _ReduceGrad(LocalFunction):
    """The identity, whose partial gradient is reduced: here, or at the end of the pass."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        layouts: tuple[DTensorSpec, DTensorSpec],
        pending: PendingGrads | None,
        number: int,
        of: Moved | ref[DTensorBase],
    ) -> Tensor:
        ctx.layouts, ctx.of, ctx.leaf = layouts, of, None
        if pending is not None:
            ctx.pending, ctx.number = pending, number
            with torch.enable_grad():
                ctx.leaf = torch.autograd.graph.get_gradient_edge(local).node
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (partial, reduced), leaf, nothing = ctx.layouts, ctx.leaf, (None,) * 5
        if leaf is not None:
            variable = leaf.variable
            if not variable.requires_grad:  # frozen since
                return nothing
            if _may_wait(leaf, variable):
                digest = _now(ctx.of).digest
                ctx.pending.add(PendingGrad(variable, grad, partial, digest, ctx.number))
                return nothing
        return _reduced(grad, partial, reduced, _now(ctx.of)), *nothing[1:]


def _now(of: Moved | ref[DTensorBase]) -> Moved:
    """The provenance as given, or a leaf's as it is now; unknown if the leaf is gone."""
    if isinstance(of, Moved):
        return of
    tensor = of()
    return UNKNOWN if tensor is None else Moved(digest_of(tensor))


def _reduced(grad: Tensor, partial: DTensorSpec, reduced: DTensorSpec, of: Moved) -> Tensor:
    """A gradient of layout ``partial``, redistributed to the layout ``reduced``. Collective."""
    return redistribute_local(grad, partial, reduced, of=gradient_of(of, partial, grad))


def _may_wait(leaf: Any, variable: Tensor) -> bool:
    """True if nobody asks for the gradient of a leaf before the end of the backward pass."""
    if torch.is_grad_enabled():  # gradients are differentiated themselves
        return False
    if variable._backward_hooks or variable._post_accumulate_grad_hooks:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad takes the gradient, and accumulates nothing
        return False
