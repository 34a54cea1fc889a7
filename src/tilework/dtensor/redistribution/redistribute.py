"""Redistribution of local tensors from one layout to another, differentiable.

A rank prepares a redistribution at the first use of two layouts and a dtype, and keeps the planned
steps with the source layout. At each run ranks compare both layouts: the digest is in the header of
the collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.contract import Work
from tilework.comm.functional.internal import AT_ONCE_BYTES, AsyncTensor, CopyToGroup, attached, run
from tilework.comm.functional.internal import pull_back as pull_back_reduction
from tilework.comm.per_call.internal import lacks_memory
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.debug import causes
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.provenance.content import content_digest
from tilework.dtensor.provenance.digests import (
    UNKNOWN,
    Moved,
    TensorText,
    call_counts_of,
    carried,
    moving,
)
from tilework.dtensor.redistribution.collective_steps import LOCAL_STEPS, RunStep, prepare_step
from tilework.dtensor.spec import NONLINEAR, DTensorSpec, Ints
from tilework.dtensor.torch_tensors import refuse_torch_dtensor
from tilework.layout import Layout, Partial, Placement, Replicate, Steps, redistribution_steps
from tilework.layout.internal import DEFAULT_COST, placements_in
from tilework.mesh import DeviceMesh, MeshSpec


class Adjoint:
    """The redistribution that turns the gradient of the result, of layout ``target``, into the
    gradient of the tensor.

    The gradient of a partial tensor is, on each rank, the derivative of the loss by the rank's
    partial value. For a sum or a mean it is the same on all ranks. For other reductions it differs
    by rank, and all ranks' gradients add up to the gradient of the reduced value.
    """

    def __init__(self, source: DTensorSpec, target: DTensorSpec) -> None:
        lengths = source.mesh.spec.shape
        changes = [
            (axis, had, gets)
            for axis, (had, gets) in enumerate(
                zip(source.placements, target.placements, strict=True)
            )
            if lengths[axis] > 1
        ]
        #: The axes along which the redistribution reduces, and along which it makes partial values.
        self.reduced: Ints = tuple(
            [axis for axis, had, gets in changes if isinstance(had, Partial) and had != gets]
        )
        self.filled: Ints = tuple(
            [axis for axis, had, gets in changes if isinstance(gets, Partial) and had != gets]
        )
        kept = [axis for axis, had, gets in changes if isinstance(had, Partial) and had == gets]
        self.op = str(source.reduce_op) if self.reduced else ""
        filled_op = str(target.reduce_op) if self.filled else ""
        own = kept if source.reduce_op in NONLINEAR else []
        #: The layouts between which the gradient moves, from ``target`` to ``source``.
        self.target = _of_gradient(target, [*own, *(self.filled if filled_op in NONLINEAR else ())])
        self.source = _of_gradient(source, own)
        copies = math.prod(lengths[axis] for axis in self.filled) if filled_op == "avg" else 1
        addends = math.prod(lengths[axis] for axis in self.reduced) if self.op == "avg" else 1
        #: The factor of the gradient.
        self.factor = copies / addends
        #: True if this rank holds a constant, and only the first rank holds the value.
        self.masked = filled_op == "product" and not target.is_first(self.filled)
        #: True if the adjoint depends on the tensor's values.
        self.nonlinear = self.op in NONLINEAR


def _of_gradient(spec: DTensorSpec, own: Sequence[int]) -> DTensorSpec:
    """The layout of a gradient: partial axes are partial along ``own``, else replicated."""
    placements: list[Placement] = [
        (Partial() if axis in own else Replicate()) if isinstance(placement, Partial) else placement
        for axis, placement in enumerate(spec.placements)
    ]
    return spec.with_placements(placements, spec.order)


class PreparedRedistribution:
    """The steps from one layout to another, ready to run on this rank's tensors of one dtype."""

    __slots__ = ("__dict__", "run_steps", "source", "steps", "target", "text")

    def __init__(self, text: TensorText, steps: Steps, run_steps: list[RunStep]) -> None:
        assert text.target is not None
        self.source, self.target, self.text = text.spec, text.target, text
        self.steps, self.run_steps = steps, run_steps

    def run(self, x: Tensor, of: Moved) -> Tensor:
        """The local tensor after the steps. Collective if a step communicates; blocks."""
        if not self.communicates:
            return _run_all(self.run_steps, x)
        digest = carried(hash((of.digest, self.digest)))
        before = provenance_digest.enter(digest, of.operator, self.text)
        try:
            return _run_all(self.run_steps, x)
        finally:
            provenance_digest.leave(before)

    def start(self, x: Tensor, of: Moved) -> tuple[Tensor, Work | None]:
        """As :meth:`run`, but the last step may still be in flight: then the Work is not None."""
        if x.nbytes <= AT_ONCE_BYTES:
            return self.run(x, of), None
        with moving(hash((of.digest, self.digest)), of.operator, self.text):
            return self.run_steps[-1](_run_all(self.run_steps[:-1], x), True)

    @cached_property
    def communicates(self) -> bool:
        """True if a step moves data between ranks."""
        return any(step.kind not in LOCAL_STEPS for step in self.steps.steps)

    @cached_property
    def digest(self) -> int:
        """A hash of the layouts before and afterwards, the same on all ranks."""
        return hash((self.source.digest, self.target.digest))

    @cached_property
    def adjoint(self) -> Adjoint:
        """The redistribution of gradients in the backward pass."""
        return Adjoint(self.source, self.target)


def _run_all(run_steps: Sequence[RunStep], x: Tensor) -> Tensor:
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    for run_step in run_steps:
        x, work = run_step(x, False)
        if work is not None:
            work.wait()
    return x


def prepared_from(
    source: DTensorSpec,
) -> dict[tuple[DTensorSpec, torch.dtype], PreparedRedistribution]:
    """The prepared redistributions from a layout, by target and dtype."""
    prepared: dict[tuple[DTensorSpec, torch.dtype], PreparedRedistribution] = source.redistributions
    return prepared


def prepare_redistribution(
    local: Tensor, source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype
) -> PreparedRedistribution:
    """Prepare a redistribution, checked, and keep it. Collective only if groups must be made."""
    if source.mesh != target.mesh or source.shape != target.shape:
        raise ValueError(
            f"a redistribution needs two layouts of the same shape on the same mesh, got {source} "
            f"and {target}"
        )
    steps = plan_steps(source, target, dtype)
    run_steps: list[RunStep] = []
    if source.takes_part:
        check_local(local, source, steps)
        for step in steps.steps:  # making groups is collective, preparing is not
            if step.kind not in LOCAL_STEPS:
                source.mesh.axes_group(step.axes)
        run_steps.extend(_prepare_steps(steps, source, target, dtype))
    redistribution = PreparedRedistribution(TensorText(source, dtype, target), steps, run_steps)
    return prepared_from(source).setdefault((target, dtype), redistribution)


def plan_steps(source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype) -> Steps:
    """The cheapest steps from one layout to another. Local; every rank plans the same."""
    mesh = source.mesh.spec
    before, after = (Layout(spec.placements, spec.order) for spec in (source, target))
    return _planned(source.shape, mesh, before, after, dtype.itemsize)


# Also for another mesh of the same ranks, and for other ranks that are threads of this process.
@lru_cache(maxsize=4096)
def _planned(shape: Ints, mesh: MeshSpec, before: Layout, after: Layout, itemsize: int) -> Steps:
    return redistribution_steps(
        shape,
        mesh.shape,
        before.placements,
        after.placements,
        source_order=before.order,
        target_order=after.order,
        itemsize=itemsize,
        cost=DEFAULT_COST,
        ranks=mesh.ranks,
        names=mesh.names,
    )


def _prepare_steps(
    steps: Steps, source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype
) -> Iterator[RunStep]:
    each = steps.steps
    specs = [source.with_placements(s.source.placements, s.source.order) for s in each] + [target]
    for i, step in enumerate(each):
        # A slice may stay a view if a later step copies it.
        last = all(later.kind == "slice" for later in each[i + 1 :])
        yield prepare_step(step, specs[i], specs[i + 1], dtype, last)


def check_local(local: Tensor, source: DTensorSpec, steps: Steps) -> None:
    """Raise ValueError, on all ranks if ``steps`` communicate, for a tensor of another shape."""
    if local.shape == source.local_shape:
        return
    message = (
        f"this rank's part of {source} has shape {list(source.local_shape)}, got a tensor of "
        f"shape {list(local.shape)}"
    )
    for step in steps.steps:
        if step.kind not in LOCAL_STEPS:
            source.mesh.axes_group(step.axes).abort(f"a redistribution failed: {message}")
    raise ValueError(message)


axes_group = DeviceMesh.axes_group
#: The dtypes in which a tensor moves, and in which the gradient moves.
Dtypes = tuple[torch.dtype, torch.dtype]


def redistribute_local(
    local: Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    *,
    async_op: bool = False,
    of: Moved = UNKNOWN,
    dtypes: Dtypes | None = None,
) -> Tensor:
    """The local tensor in layout ``target``, from the local tensor in layout ``source``.

    Collective over the mesh if elements must move; blocks, unless ``async_op``. Runs the cheapest
    steps (:func:`~tilework.layout.redistribution_steps`). The result is ``local`` itself if there
    is nothing to do, and otherwise shares no memory with it. Differentiable, also twice. The
    backward pass is collective too: ``requires_grad`` must be the same on all ranks.

    Args:
        local: The local tensor before. On ranks outside the mesh a placeholder, which is returned.
        source: The layout before.
        target: The layout afterwards, of the same mesh and shape.
        async_op: Return before the last step is done, if that step takes long enough. The first use
            of the result waits for it; the program may write to ``local`` meanwhile.
        of: The tensor that moves: the provenance, which ranks compare, and the reason to move.
        dtypes: The dtype that the tensor is cast to before it moves, which the result keeps, and
            the dtype in which the gradient moves before it is cast back; None: the tensor's dtype.

    Raises:
        ValueError: The local tensor is not of the source's shape, or mesh or shape differ.
        CollectiveMismatchError: Ranks were about to do different things, or with different tensors;
            on every rank.
        DistBackendError: As any collective.
    """
    if source is target:
        return local
    if isinstance(local, AsyncTensor):
        local = local.wait()
    if lacks_memory(local):
        return _on_meta(local if dtypes is None else local.to(dtypes[0]), target)
    dtype = local.dtype if dtypes is None else dtypes[0]
    prepared = prepared_from(source).get((target, dtype))
    if prepared is None:
        prepared = prepare_redistribution(local, source, target, dtype)
    if not prepared.run_steps:
        return local if dtypes is None else local.to(dtype)
    if local.shape != source.local_shape:
        check_local(local, source, prepared.steps)
    if causes.watchers:
        causes.record_steps(source, prepared.steps, dtype)
    if local.requires_grad and torch.is_grad_enabled():
        if prepared.adjoint.nonlinear:
            local = local.clone()  # backward needs the values, and the program may write to local
        call = _Call(prepared, async_op, of, dtypes)
        out: Tensor = _Redistribute.apply(local, call)
        return out if call.work is None else attached(out, call.work)
    if dtypes is not None:
        local = local.to(dtype)
    if not async_op:
        return prepared.run(local, of)
    out, work = prepared.start(local, of)
    return out if work is None else attached(out, work)


def _on_meta(local: Tensor, target: DTensorSpec) -> Tensor:
    if not target.takes_part:
        return local
    out = local.new_empty(target.local_shape)
    return out + local.sum() if local.requires_grad and torch.is_grad_enabled() else out


def plan_redistribution(
    tensor: DTensorBase | DTensorSpec,
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Steps:
    """The steps that a redistribution would take, for printing. Local; moves nothing.

    Args:
        tensor: The tensor, or its layout.
        placements: The placements afterwards.
        order: The axes in the order in which they shard; None: from the first to the last.
        dtype: None: the tensor's, or torch.float32.

    Raises:
        ValueError: Placements or order do not fit the mesh or the shape.

    Example:
        >>> from tilework.dtensor import Shard, init_device_mesh, zeros
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x = zeros(8, 8, device_mesh=mesh, placements=[Shard(0)])
        ...     return str(plan_redistribution(x, [Shard(1)]))
        >>> print(run_ranks(2, program)[0])
        [8, 8] from tp=S0 to tp=S1: 1 step, 64 bytes per rank, predicted 2.0 us
        ...
    """
    if isinstance(tensor, DTensorSpec):
        source, tensor_dtype = tensor, torch.float32
    else:
        refuse_torch_dtensor(tensor, "plan_redistribution")
        source, tensor_dtype = tensor._spec, tensor.dtype
    target = source.with_placements(placements_in(placements), order)
    return plan_steps(source, target, dtype or tensor_dtype)


# -- gradients -------------------------------------------------------------------------------


class _Call:
    """A call of a differentiable redistribution."""

    __slots__ = ("async_op", "dtypes", "of", "prepared", "work")

    def __init__(
        self, prepared: PreparedRedistribution, async_op: bool, of: Moved, dtypes: Dtypes | None
    ) -> None:
        self.prepared, self.async_op, self.of, self.dtypes = prepared, async_op, of, dtypes
        #: The work that the result must wait for.
        self.work: Work | None = None


class _Redistribute(LocalFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, call: _Call) -> Tensor:
        ctx.adjoint = adjoint = call.prepared.adjoint
        ctx.of = call.of
        ctx.dtypes = None
        if adjoint.nonlinear:
            ctx.save_for_backward(local)
        if call.dtypes is not None:
            forward_dtype, backward_dtype = call.dtypes
            ctx.dtypes = local.dtype, backward_dtype
            local = local.to(forward_dtype)
        if not call.async_op:
            return call.prepared.run(local, call.of)
        out, call.work = call.prepared.start(local, call.of)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0] if ctx.adjoint.nonlinear else None
        if ctx.dtypes is None:
            return pull_back(ctx.adjoint, grad, x, ctx.of), None
        own, dtype = ctx.dtypes
        grad, x = grad.to(dtype), None if x is None else x.to(dtype)
        return pull_back(ctx.adjoint, grad, x, ctx.of).to(own), None


def pull_back(adjoint: Adjoint, grad: Tensor, x: Tensor | None, of: Moved) -> Tensor:
    """The gradient before the step, from that after it. Collective; differentiable."""
    of = gradient_of(of, adjoint.target, grad)
    twice = torch.is_grad_enabled() and grad.requires_grad
    if twice and adjoint.filled and not adjoint.masked:
        grad = counted_once(grad, adjoint.target, adjoint.filled)
    if adjoint.masked:  # zeros keep a place in the graph, as on the other ranks
        grad = grad.masked_fill(grad.new_ones((), dtype=torch.bool), 0)
    grad = redistribute_local(grad, adjoint.target, adjoint.source, of=of)
    if adjoint.factor != 1:
        grad = grad * adjoint.factor
    if x is None and not (twice and adjoint.reduced):
        return grad
    group = axes_group(adjoint.source.mesh, adjoint.reduced)
    # Each rank's value gets a share of the gradient, and of the gradient's own gradient.
    total = run(CopyToGroup, grad, group)
    return total if x is None else pull_back_reduction(adjoint.op, x, total, group)


def gradient_of(of: Moved, spec: DTensorSpec, grad: Tensor) -> Moved:
    """The gradient of a tensor, of layout ``spec``, described as a tensor that moves in a backward
    pass.

    If the gradient is replicated, and the program may have computed it from plain tensors, ranks
    compare the contents.
    """
    counts = call_counts_of(spec.mesh)
    gradient = of.as_gradient(counts.passing)
    if of.handed_out and spec.is_replicated:
        gradient.digest = hash((gradient.digest, content_digest(grad)))
    counts.note_gradient(gradient.digest)
    return gradient


def counted_once(grad: Tensor, spec: DTensorSpec, axes: Ints) -> Tensor:
    """The gradient of a partial tensor, equal along ``axes``: double backward counts it once."""
    if not (torch.is_grad_enabled() and grad.requires_grad):
        return grad
    return with_redistributed_grad(grad, spec, spec.as_partial(axes))


def with_redistributed_grad(local: Tensor, incoming: DTensorSpec, outgoing: DTensorSpec) -> Tensor:
    """The local tensor, whose gradient is redistributed from one layout to another."""
    result: Tensor = _RedistributedGrad.apply(local, incoming, outgoing)
    return result


class _RedistributedGrad(LocalFunction):
    """The identity, whose gradient is redistributed."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, incoming: DTensorSpec, outgoing: DTensorSpec) -> Tensor:
        ctx.incoming, ctx.outgoing = incoming, outgoing
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return redistribute_local(grad, ctx.incoming, ctx.outgoing), None, None
