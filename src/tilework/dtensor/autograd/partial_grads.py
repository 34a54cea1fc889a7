"""Gradients that come in terms, and when those are reduced.

The graph is that of the local tensors. A rank that computes with a replicated tensor and its own
part of something else gets only a term of the tensor's gradient. So such an operator takes the
local tensor through an *alias*: the same memory at a place in the graph whose backward reduces the
terms. All uses of a tensor share one alias, so that its gradient is reduced once. Terms for
leaves (parameters) are kept until the end of the backward pass and reduced together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import agree_equal
from tilework.comm.collectives import all_reduce
from tilework.comm.contract import ProcessGroup
from tilework.comm.world import current_world
from tilework.dtensor.autograd.local_graph import local_of
from tilework.dtensor.base import Alias, DTensorBase
from tilework.dtensor.debug import explain
from tilework.dtensor.redistribution.redistribute import axes_group, redistribute_local
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.errors import CollectiveMismatchError
from tilework.layout import Partial, Placement

#: The most that is reduced in one message; it is also what is held besides the gradients.
_BUCKET_BYTES = 64 << 20


def alias(tensor: DTensorBase, axes: Ints) -> Tensor:
    """This rank's part, for an operator that gives each rank along ``axes`` a term of its gradient.

    All uses until the tensor is written to share it.
    """
    local = local_of(tensor)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return local
    known = None if tensor._aliases is None else tensor._aliases.get(axes)
    if (
        known is None
        or known.local is not local
        or known.grad_fn is not local.grad_fn
        or known.tensor.data_ptr() != local.data_ptr()
    ):
        made = alias_local(local, as_partial(tensor._spec.dual, axes), tensor._spec.dual)
        known = Alias(made, local, local.grad_fn)
        if tensor._aliases is None:
            tensor._aliases = {}
        tensor._aliases[axes] = known
    return known.tensor


def alias_local(local: Tensor, terms: DTensorSpec, whole: DTensorSpec) -> Tensor:
    """A local tensor again, whose gradient lies as ``terms`` and is led back as ``whole``."""
    account = current_world().state(Account)
    account.made += 1
    made: Tensor = _InTerms.apply(  # type: ignore[no-untyped-call]
        local, terms, whole, account if local.is_leaf else None, account.made
    )
    return made


def as_partial(spec: DTensorSpec, axes: Ints) -> DTensorSpec:
    """The layout of a gradient that is still to be summed along ``axes``."""
    placements: list[Placement] = list(spec.placements)
    for axis in axes:
        placements[axis] = Partial()
    return spec.with_placements(placements, spec.order)


def moved(tensor: DTensorBase, target: DTensorSpec, axes: Ints) -> Tensor:
    """This rank's part in another layout, whose gradient comes in terms along ``axes``.

    The gradient goes straight from there to the tensor's layout.
    """
    source, local = tensor._spec, local_of(tensor)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return redistribute_local(local, source, target)
    if source.partial_axes:
        return alias_local(
            redistribute_local(local, source, target), as_partial(target.dual, axes), target.dual
        )
    if target.dual == source:  # one rank's term is the value: its gradient may wait for others'
        return redistribute_local(alias(tensor, axes), source, target)
    found: Tensor = _MovedInTerms.apply(  # type: ignore[no-untyped-call]
        local, source, target, as_partial(target.dual, axes)
    )
    return found


def lead_terms_back(result: DTensorBase, tensor: DTensorBase, axes: Ints) -> None:
    """Let terms of the gradient of ``result`` go straight to ``tensor``, as :func:`moved` does.

    ``tensor`` was redistributed to ``result``. Of operators that take ``result`` and give each rank
    along ``axes`` a term of its gradient, all terms are reduced into the layout of ``tensor``,
    instead of to whole sums of which each rank then takes its part.
    """
    local, source = local_of(result), tensor._spec
    if not (local.requires_grad and torch.is_grad_enabled()) or source.partial_axes:
        return
    terms = as_partial(result._spec.dual, axes)
    made = _MovedInTerms.apply(  # type: ignore[no-untyped-call]
        local_of(tensor), source, result._spec, terms, local.detach()
    )
    result._aliases = {axes: Alias(made, local, local.grad_fn)}


class _MovedInTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        source: DTensorSpec,
        target: DTensorSpec,
        terms: DTensorSpec,
        done: Tensor | None = None,
    ) -> Tensor:
        ctx.terms, ctx.source = terms, source.dual
        found = redistribute_local(local, source, target) if done is None else done
        return found.detach() if found is local or found is done else found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return redistribute_local(grad, ctx.terms, ctx.source), None, None, None, None


class _InTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        terms: DTensorSpec,
        whole: DTensorSpec,
        account: Account | None,
        number: int,
    ) -> Tensor:
        ctx.terms, ctx.whole, ctx.account, ctx.number = terms, whole, account, number
        ctx.leaf = None
        if account is not None:
            with torch.enable_grad():
                ctx.leaf = torch.autograd.graph.get_gradient_edge(local).node
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.leaf is not None and _may_wait(ctx.leaf):
            ctx.account.keep(ctx.leaf.variable, grad, ctx.terms, ctx.number)
            return None, None, None, None, None
        return redistribute_local(grad, ctx.terms, ctx.whole), None, None, None, None


def _may_wait(leaf: Any) -> bool:
    """Whether nobody asks for the gradient of a leaf before the end of the backward pass."""
    if torch.is_grad_enabled():  # gradients are differentiated themselves
        return False
    variable = leaf.variable
    if variable._backward_hooks or variable._post_accumulate_grad_hooks:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad takes the gradient, and accumulates nothing
        return False


@dataclass(eq=False)
class _Kept:
    leaf: Tensor
    grad: Tensor
    terms: DTensorSpec
    number: int


@dataclass(eq=False)
class Account:
    """Terms of one rank's leaves that backward passes under way have come to."""

    #: How many aliases were made: numbers them alike on every rank.
    made: int = 0
    #: By backward pass, then by leaf and axes.
    kept: dict[int, dict[tuple[int, Ints], _Kept]] = field(default_factory=dict)
    #: Which leaves were reduced together; all ranks have agreed that they are these.
    known: set[tuple[int, ...]] = field(default_factory=set)

    def keep(self, leaf: Tensor, grad: Tensor, terms: DTensorSpec, number: int) -> None:
        """Reduce ``grad`` at the end of this backward pass, and accumulate it into the leaf."""
        task = torch._C._current_graph_task_id()
        kept = self.kept.get(task)
        if kept is None:
            if len(self.kept) > 16:  # what is left of passes that raised
                self.kept.clear()
            kept = self.kept[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self.reduce(self.kept.pop(task, {}))
            )
        key = id(leaf), terms.partial_axes
        if key in kept:
            kept[key].grad = kept[key].grad + grad
        else:
            kept[key] = _Kept(leaf, grad, terms, number)

    @torch.no_grad()
    def reduce(self, kept: dict[tuple[int, Ints], _Kept]) -> None:
        """Sum all terms over the ranks, in few messages. Collective."""
        together: dict[Any, list[_Kept]] = {}
        for one in sorted(kept.values(), key=lambda one: one.number):
            mesh, axes = one.terms.mesh, one.terms.partial_axes
            key = mesh, axes, one.grad.dtype, one.grad.device
            together.setdefault(key, []).append(one)
        for (mesh, axes, _, _), all_of_them in together.items():
            group = axes_group(mesh, axes)
            for bucket in _buckets(all_of_them):
                self._check_same(bucket, group)
                _reduce_bucket(bucket, group)

    def _check_same(self, bucket: list[_Kept], group: ProcessGroup) -> None:
        """That all ranks are about to reduce gradients of the same leaves."""
        numbers = tuple(one.number for one in bucket)
        if numbers in self.known:
            return
        if len(self.known) > 4096:
            self.known.clear()
        agree_equal(
            lambda: {
                "count": len(bucket),
                "shapes": [tuple(one.grad.shape) for one in bucket],
                "numbers": numbers,
            },
            group,
            "a backward pass came to gradients of different replicated tensors:",
            hint="; all ranks of the mesh must compute with the same tensors",
            error=CollectiveMismatchError,
        )
        self.known.add(numbers)


def _buckets(all_of_them: list[_Kept]) -> list[list[_Kept]]:
    buckets: list[list[_Kept]] = [[]]
    size = 0
    for one in all_of_them:
        if buckets[-1] and size + one.grad.nbytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(one)
        size += one.grad.nbytes
    return buckets


def _reduce_bucket(bucket: list[_Kept], group: ProcessGroup) -> None:
    first = bucket[0].grad
    if explain.watchers:
        terms = bucket[0].terms
        explain.reduced(terms, terms.partial_axes, [one.grad for one in bucket])
    sizes = [one.grad.numel() for one in bucket]
    flat = (
        group.empty(sum(sizes), dtype=first.dtype)
        if first.device.type == "cpu"
        else first.new_empty(sum(sizes))
    )
    torch.cat([one.grad.reshape(-1) for one in bucket], out=flat)
    all_reduce(flat, group=group)
    for one, part in zip(bucket, torch.split(flat, sizes), strict=True):
        grad = part.view(one.grad.shape)
        if one.leaf.grad is None:
            one.leaf.grad = grad
        else:
            one.leaf.grad += grad
