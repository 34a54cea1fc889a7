"""Redistributions prepared for this rank: the planned steps, ready to run on local tensors.

A rank prepares a redistribution at the first use of two layouts and a dtype, and keeps it with the
source layout. At each run ranks compare both layouts: the digest is in the header of the
collectives. This module does not handle gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.contract import Work
from tilework.comm.functional.internal import AT_ONCE_BYTES
from tilework.dtensor.provenance.meaning import Moved, TensorText, carried, moving
from tilework.dtensor.redistribution.collective_steps import LOCAL_STEPS, RunStep, prepare_step
from tilework.dtensor.spec import NONLINEAR, DTensorSpec, Ints
from tilework.layout import Layout, Partial, Placement, Replicate, Steps, redistribution_steps
from tilework.layout.internal import DEFAULT_COST
from tilework.mesh import MeshSpec


class Adjoint:
    """The redistribution that turns the result's gradient into the gradient of the tensor.

    The gradient of a partial tensor is, on each rank, the derivative of the loss by the rank's
    partial value. For a sum or a mean it is the same on all ranks. For other reductions it differs
    by rank, and all ranks' gradients add up to the gradient of the reduced value.

    Args:
        source: The layout of the tensor.
        target: The layout of the result.
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
        """Run the steps on a local tensor, and return the local tensor afterwards.

        Collective if a step communicates; blocks.
        """
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
    """Prepare a redistribution, and keep it. Collective only if groups must be made.

    Raises:
        ValueError: Meshes or shapes differ, or the local tensor is not of the source's shape.
    """
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
    """Raise unless a tensor has the shape of this rank's local tensor.

    Raises:
        ValueError: It has another shape. If ``steps`` communicate, the other ranks cannot continue,
        and raise too.
    """
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
