"""From one layout to another: this rank's part of a tensor, and the gradient on its way back.

docs/algorithms/redistribution.md says which gradient comes in and which goes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import agree_equal
from tilework.comm.contract import Work
from tilework.comm.functional import kinds
from tilework.comm.functional.running import AT_ONCE_BYTES, run
from tilework.comm.functional.waiting import AsyncTensor, attached
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.debug import explain
from tilework.dtensor.redistribution.collective_steps import FREE, Move, is_first, prepared
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.errors import CollectiveMismatchError
from tilework.layout import (
    Partial,
    Placement,
    Replicate,
    Steps,
    redistribution_steps,
)
from tilework.layout.cost import DEFAULT_COST
from tilework.mesh import DeviceMesh

axes_group = DeviceMesh.axes_group

#: Reductions whose terms' gradients are not those of the result.
_NONLINEAR = ("min", "max", "product")


def redistribute_local(
    local: Tensor, source: DTensorSpec, target: DTensorSpec, *, async_op: bool = False
) -> Tensor:
    """This rank's part of a tensor laid out as ``source``, when it is laid out as ``target``.

    Collective over the mesh, as far as something is to be moved; blocks, unless ``async_op``. Runs
    the cheapest steps (:func:`~tilework.layout.redistribution_steps`). The result is ``local``
    itself if nothing is to be done, else a tensor of its own. Differentiable, also twice: the
    backward pass is collective too, so ``requires_grad`` must agree between the ranks.

    Args:
        local: This rank's part before; on ranks outside the mesh whatever stands for it, which is
            returned.
        source: How the tensor lies.
        target: How it is to lie; of the same mesh and shape.
        async_op: Return before the last step is done, where that is long enough. The result waits
            by itself when it is first used; ``local`` may be written to meanwhile.

    Raises:
        ValueError: The part is not of the source's shape, or mesh or shape differ.
        CollectiveMismatchError: Ranks were about to do different things; on every rank. Layouts
            and dtypes are compared the first time that they are met, amounts each time.
        DistBackendError: As any collective.
    """
    if source is target:
        return local
    if isinstance(local, AsyncTensor):
        local = local.wait()
    if local.is_meta:
        return _on_meta(local, target)
    route = _routes(source).get((target, local.dtype))
    if route is None:
        route = _route(local, source, target)
    if not route.moves:
        return local
    if local.shape != source.local_shape:
        _check_part(local, source)
    if explain.watchers:
        explain.ran(source, route.steps, local.dtype)
    if local.requires_grad and torch.is_grad_enabled():
        call = _Call(route, async_op)
        out: Tensor = _Redistribute.apply(local, call)  # type: ignore[no-untyped-call]
        return out if call.work is None else attached(out, call.work)
    if not async_op:
        return route.run(local)
    out, work = route.start(local)
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
    """What redistributing a tensor would do: to be printed. Local; moves nothing.

    Args:
        tensor: The tensor, or how it lies.
        placements: How it is to lie.
        order: The axes in the order in which they cut; None: from the first to the last.
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
        source, of = tensor, torch.float32
    else:
        source, of = tensor._spec, tensor.dtype
    return _steps(source, source.with_placements(placements, order), dtype or of)


def _steps(source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype) -> Steps:
    spec = source.mesh.spec
    return redistribution_steps(
        source.shape,
        spec.shape,
        source.placements,
        target.placements,
        source_order=source.order,
        target_order=target.order,
        itemsize=dtype.itemsize,
        cost=DEFAULT_COST,
        ranks=spec.ranks,
        names=spec.names,
    )


# -- routes ----------------------------------------------------------------------------------


class Route:
    """The steps from one layout to another, prepared for this rank and one dtype."""

    __slots__ = ("__dict__", "moves", "source", "steps", "target")

    def __init__(
        self, source: DTensorSpec, target: DTensorSpec, steps: Steps, moves: list[Move]
    ) -> None:
        self.source, self.target, self.steps, self.moves = source, target, steps, moves

    def run(self, x: Tensor) -> Tensor:
        """The part afterwards."""
        return _through(self.moves, x)

    def start(self, x: Tensor) -> tuple[Tensor, Work | None]:
        """The same, of which the last step may still be under way."""
        if x.nbytes <= AT_ONCE_BYTES:
            return self.run(x), None
        return self.moves[-1](_through(self.moves[:-1], x), True)

    @cached_property
    def adjoint(self) -> Adjoint:
        """How gradients go the other way."""
        return Adjoint(self.source, self.target)


def _through(moves: Sequence[Move], x: Tensor) -> Tensor:
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    for move in moves:
        x, work = move(x, False)
        if work is not None:
            work.wait()
    return x


def _routes(source: DTensorSpec) -> dict[tuple[DTensorSpec, torch.dtype], Route]:
    found: dict[tuple[DTensorSpec, torch.dtype], Route] = source.routes
    return found


def _route(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Route:
    """Prepare a route and remember it. Collective over the ranks among which something moves."""
    if source.mesh != target.mesh or source.shape != target.shape:
        raise ValueError(
            f"a redistribution goes from one layout of a tensor on a mesh to another on the same "
            f"mesh, got {source} and {target}"
        )
    dtype = local.dtype
    moves: list[Move] = []
    found = _steps(source, target, dtype)
    if source.takes_part:
        axes = {axis for step in found.steps if step.kind not in FREE for axis in step.axes}
        for step in found.steps:  # making groups is collective, preparing is not
            if step.kind not in FREE:
                axes_group(source.mesh, step.axes)

        def prepare() -> str:
            _check_part(local, source)
            moves.extend(_moves(found, source, target, dtype))
            return f"{str(dtype).removeprefix('torch.')} {found.route}"

        if axes:
            group = axes_group(source.mesh, axes)
            agree_equal(
                lambda: {"route": prepare()},
                group,
                f"rank {group.global_ranks[group.rank()]}, group {group.group_name!r}: ranks "
                f"redistribute different things:",
                hint=". Nothing has moved.",
                error=CollectiveMismatchError,
            )
        else:
            prepare()
    return _routes(source).setdefault((target, dtype), Route(source, target, found, moves))


def _moves(
    found: Steps, source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype
) -> Iterator[Move]:
    steps = found.steps
    ends = [source.with_placements(one.source.placements, one.source.order) for one in steps]
    for i, step in enumerate(steps):
        # A slice may stay a view if another step makes a tensor of it.
        last = all(later.kind == "slice" for later in steps[i + 1 :])
        yield prepared(step, ends[i], [*ends, target][i + 1], dtype, last)


def _check_part(local: Tensor, source: DTensorSpec) -> None:
    if local.shape != source.local_shape:
        raise ValueError(
            f"this rank's part of {source} has shape {list(source.local_shape)}, got a tensor of "
            f"shape {list(local.shape)}"
        )


# -- gradients -------------------------------------------------------------------------------


class Adjoint:
    """How the gradient of a redistribution's result becomes that of what it was given.

    A term's gradient is the derivative of the loss by what its rank holds. Those of a sum or a mean
    are the same on all ranks; those of other reductions are the ranks' own, which are summed to
    that of a value that all ranks hold.
    """

    def __init__(self, source: DTensorSpec, target: DTensorSpec) -> None:
        had, gets = source.placements, target.placements
        lengths = source.mesh.shape
        long = [axis for axis, length in enumerate(lengths) if length > 1]
        self.reduced: Ints = tuple(
            [a for a in long if isinstance(had[a], Partial) and had[a] != gets[a]]
        )
        self.filled: Ints = tuple(
            [a for a in long if isinstance(gets[a], Partial) and had[a] != gets[a]]
        )
        kept = [a for a in long if isinstance(had[a], Partial) and had[a] == gets[a]]
        self.op = str(source.reduce_op) if self.reduced else ""
        filled_op = str(target.reduce_op) if self.filled else ""
        own = kept if source.reduce_op in _NONLINEAR else []
        #: The layouts between which the gradient moves.
        self.target = _of_gradient(
            target, [*own, *(self.filled if filled_op in _NONLINEAR else ())]
        )
        self.source = _of_gradient(source, own)
        count = {"avg": math.prod(lengths[a] for a in self.filled)}.get(filled_op, 1)
        terms = {"avg": math.prod(lengths[a] for a in self.reduced)}.get(self.op, 1)
        self.factor = count / terms
        #: Whether only the first rank's term was the value, and the others' were constants.
        self.masked = filled_op == "product" and not is_first(target, self.filled)
        self.nonlinear = self.op in _NONLINEAR

    def __call__(self, grad: Tensor, x: Tensor | None) -> Tensor:
        """The gradient for ``x``, which is needed if the adjoint is nonlinear."""
        twice = torch.is_grad_enabled() and grad.requires_grad
        if twice and self.filled and not self.masked:
            grad = out_of_terms(grad, self.target, self.filled)
        if self.masked:  # with a place in the graph, as on the other ranks
            grad = grad.masked_fill(grad.new_ones((), dtype=torch.bool), 0)
        grad = redistribute_local(grad, self.target, self.source)
        if self.factor != 1:
            grad = grad * self.factor
        if x is None and not (twice and self.reduced):
            return grad
        group = axes_group(self.source.mesh, self.reduced)
        # Each rank's term gets its own share of one gradient: of that gradient's gradient too.
        total = run(kinds.CopyToGroup, grad, group)
        return total if x is None else kinds.pull_back(self.op, x, total, group)


def out_of_terms(grad: Tensor, spec: DTensorSpec, axes: Ints) -> Tensor:
    """A term's gradient, the same on all ranks along ``axes``, as that of a replicated tensor.

    All ranks' terms have one gradient. So what depends on it is counted once, on the first rank.
    """
    if not (torch.is_grad_enabled() and grad.requires_grad):
        return grad
    placements: list[Placement] = list(spec.placements)
    for axis in axes:
        placements[axis] = Partial()
    found: Tensor = _OutOfTerms.apply(  # type: ignore[no-untyped-call]
        grad, spec, spec.with_placements(placements, spec.order)
    )
    return found


class _OutOfTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, whole: DTensorSpec, terms: DTensorSpec) -> Tensor:
        ctx.whole, ctx.terms = whole, terms
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return redistribute_local(grad, ctx.whole, ctx.terms), None, None


def _of_gradient(spec: DTensorSpec, own: Sequence[int]) -> DTensorSpec:
    """How a gradient lies: as its tensor, but replicated or, along ``own`` axes, in terms."""
    placements: list[Placement] = [
        (Partial() if axis in own else Replicate()) if isinstance(one, Partial) else one
        for axis, one in enumerate(spec.placements)
    ]
    return spec.with_placements(placements, spec.order)


class _Call:
    """One differentiable redistribution."""

    __slots__ = ("async_op", "route", "work")

    def __init__(self, route: Route, async_op: bool) -> None:
        self.route, self.async_op = route, async_op
        #: What the result is to wait for.
        self.work: Work | None = None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, call: _Call) -> Tensor:
        ctx.adjoint = adjoint = call.route.adjoint
        if adjoint.nonlinear:
            ctx.save_for_backward(local)
        if not call.async_op:
            return call.route.run(local)
        out, call.work = call.route.start(local)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0] if ctx.adjoint.nonlinear else None
        return ctx.adjoint(grad, x), None
