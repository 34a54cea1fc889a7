"""Tensors that are given data in another layout: ``x.data = y``, or ``x.t_()`` of a leaf.

torch leaves a tensor at its place in the graph then. What was computed from it before and what will
be computed later add their gradients up there. Here the local tensor may get another shape by it,
or the same shape for other elements. So that place keeps the layout which it had: the tensor's
*origin*. The local tensor with the new data is computed from it, by a node that redistributes
gradients to the layout there. The tensor goes on as the leaf, or the result, that it was: hooks and
``grad`` are the origin's.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilework.dtensor.autograd.counted_grads import as_seen
from tilework.dtensor.base import DTensorBase, Origin, View, version_of, wrap_as
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.provenance.meaning import Moved
from tilework.dtensor.redistribution.adjoint import Adjoint
from tilework.dtensor.redistribution.redistribute import (
    gradient_of,
    pull_back,
    redistribute_local,
)
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.dtensor.views import copied_views
from tilework.dtensor.views.memory_layout import offset_of

_use_count: Any = torch._C.TensorBase._use_count  # type: ignore[attr-defined]


def is_in_graph(tensor: DTensorBase) -> bool:
    """True if something was computed from a tensor that still waits for its gradient. Local."""
    local = tensor._local_tensor
    if not local.requires_grad or local.is_inference():
        return False
    if not local.is_leaf:
        return True
    before = _use_count(local)
    with torch.inference_mode(False), torch.enable_grad():
        edge = torch.autograd.graph.get_gradient_edge(local)
    # Its node holds the tensor: once more, if there was none.
    is_known: bool = _use_count(local) == before
    del edge
    return is_known


def with_data(tensor: DTensorBase, data: Tensor, spec: DTensorSpec, used: bool) -> Tensor:
    """The local tensor of a tensor whose data become others, at its place in the graph.

    Collective if the layout is another, and there is a gradient.

    Args:
        tensor: The tensor, with the layout that it has so far.
        data: The new data.
        spec: Their layout.
        used: What :func:`is_in_graph` said.
    """
    local, origin = tensor._local_tensor, origin_of(tensor)
    before = tensor._spec
    if not local.requires_grad or before == spec or before.mesh != spec.mesh:
        local.data = data
        return local
    grad, grad_spec = grad_of(tensor)
    if grad is not None and grad_spec.shape == spec.shape:
        grad = redistribute_local(grad, grad_spec, spec.grad_spec, of=_of(tensor))
        grad_spec = spec.grad_spec
    if local.is_leaf:
        local.grad = None
    if not used:
        if origin is None and (grad is None or grad_spec == spec.grad_spec):
            if grad is not None:  # of another dtype, it may only be there already
                local.data = grad.new_empty(()).expand(grad.shape)
                local.grad = grad
            local.data = data
            return local
        local.data = data
    if origin is None:
        origin = tensor._origin = Origin(local, before)
        if local.is_leaf:
            _collect_grads(tensor, origin)
    if origin.local.is_leaf:
        origin.grad, origin.grad_spec = grad, grad_spec
    if not used:
        origin.spec = spec
        return local
    with torch.inference_mode(False), torch.enable_grad():
        anew: Tensor = _Relaid.apply(  # type: ignore[no-untyped-call]
            origin.local, [data], (origin.spec, spec), _of(tensor)
        )
        anew.data = data
    origin.node = anew.grad_fn
    return anew


def origin_of(tensor: DTensorBase) -> Origin | None:
    """The origin of a tensor that is still there in the graph; None if it has none."""
    origin = tensor._origin
    if origin is not None and tensor._local_tensor.grad_fn is not origin.node:
        origin = tensor._origin = None  # it was written to
    return origin


def as_leaf_to_writes(local: Tensor) -> Tensor:
    """The local tensor of a leaf that has an origin, as a view that torch lets nobody write to.

    That is, where gradients are recorded: as it does with leaves.
    """
    return local.unsqueeze(0).unbind(0)[0] if torch.is_grad_enabled() else local


def place_in_graph(tensor: DTensorBase) -> tuple[Tensor, DTensorSpec]:
    """The local tensor at which a tensor's gradient is whole, and its layout."""
    origin = origin_of(tensor)
    return (tensor._local_tensor, tensor._spec) if origin is None else (origin.local, origin.spec)


def grad_of(tensor: DTensorBase) -> tuple[Tensor | None, DTensorSpec]:
    """The local tensor of a tensor's gradient, and its layout."""
    origin = origin_of(tensor)
    if origin is None:
        local, spec = tensor._local_tensor, tensor._retained or tensor._spec
    elif not origin.local.is_leaf:
        local, spec = origin.local, origin.spec
    else:
        return origin.grad, origin.grad_spec or tensor._spec.grad_spec
    grad = local.grad if local.is_leaf or local.retains_grad else None
    if grad is None:
        return None, spec.dual  # there may be none in whose layout a gradient could be seen
    if grad.requires_grad:
        known = None if tensor._grad is None else tensor._grad._local_tensor
        if grad is not known:
            grad = local.grad = as_seen(grad, spec, known)
    return grad, spec.grad_spec


def set_grad_of(tensor: DTensorBase, grad: Tensor | None) -> None:
    """Make a local tensor of the gradient's layout the gradient of a tensor."""
    origin = origin_of(tensor)
    if origin is None:
        tensor._local_tensor.grad = grad
    elif not origin.local.is_leaf:
        origin.local.grad = grad
    else:
        origin.grad, origin.grad_spec = grad, tensor._spec.grad_spec


class MovedView:
    """A view in a graph that was given other data, which torch has for a view of its base still.

    Once the view or the base is written to, torch takes its gradient for that of those elements of
    the base which lie where its own do in their memory.

    Args:
        tensor: The view, with its new data.
        base: The tensor that it was made of, by way of others or not.
    """

    __slots__ = ("base", "base_local", "local", "versions")

    def __init__(self, tensor: DTensorBase, base: DTensorBase) -> None:
        self.base = base
        self.note(tensor)

    def note(self, tensor: DTensorBase) -> None:
        """Remember that the view has the place in the graph that it is to have now."""
        self.local, self.base_local = tensor._local_tensor, self.base._local_tensor
        self.versions = version_of(self.local), version_of(self.base_local)

    def follow(self, tensor: DTensorBase) -> None:
        """Give the view its place in the graph. Collective where something was written to."""
        base = self.base
        now = version_of(tensor._local_tensor), version_of(base._local_tensor)
        if now == self.versions and base._local_tensor is self.base_local:
            return
        if not (base.requires_grad and torch.is_grad_enabled()):
            return
        self.note(tensor)
        place: Any = torch.as_strided(base, tensor.shape, tensor._spec.strides, offset_of(tensor))
        local = _relaid(place._local_tensor, tensor._local_tensor.data, place._spec, tensor)
        copied_views.replace_local(tensor, local)
        tensor._aliases = tensor._origin = None
        self.note(tensor)


def _relaid(
    place: Tensor,
    data: Tensor,
    spec: DTensorSpec,
    tensor: DTensorBase,
    function: type[LocalFunction] | None = None,
) -> Tensor:
    """The data of a tensor, whose gradient goes to a place of another layout."""
    with torch.inference_mode(False), torch.enable_grad():
        anew: Tensor = (function or _Relaid).apply(  # type: ignore[no-untyped-call]
            place, [data], (spec, tensor._spec), _of(tensor)
        )
        anew.data = data
    return anew


class Successor:
    """The place in the graph of a tensor that was given other data, now.

    Torch takes views that were made before for views of the tensor still, and gives them a place
    there once it is written to, though they show the memory of then.

    Args:
        tensor: The tensor, with its new data.
    """

    __slots__ = ("local", "moves", "spec")

    def __init__(self, tensor: DTensorBase) -> None:
        self.local, self.spec = tensor._local_tensor, tensor._spec
        #: How many times it was another local tensor.
        self.moves = 0

    def follow(self, tensor: DTensorBase) -> None:
        """Note that the tensor has another local tensor, or layout."""
        self.moves += tensor._local_tensor is not self.local
        self.local, self.spec = tensor._local_tensor, tensor._spec

    @property
    def now(self) -> tuple[int, int]:
        """Numbers of moves and of writes."""
        return self.moves, version_of(self.local)

    def derive(self, view: View, local: Tensor, tensor: DTensorBase) -> Tensor:
        """The local tensor of a copied view, at its place in the graph.

        Collective if the tensor was written to since it was given other data.

        Args:
            view: How the view is made of the tensor's stand-in.
            local: The local tensor that it makes.
            tensor: The view.
        """
        base = view.base
        spec, then = self.spec, base._spec
        if self.now == base._left_at or view.apart or not (local.requires_grad and view.graded):
            return local
        if (spec.shape, spec.strides) != (then.shape, then.strides):
            return local
        if not self.local.requires_grad:
            return local.detach()
        with torch.inference_mode(False), torch.enable_grad():
            place = view.redo(wrap_as(type(base), self.local, spec))
        return _relaid(place._local_tensor, local.detach(), place._spec, tensor, _AtSuccessor)


def leave_graph(tensor: DTensorBase) -> None:
    """Let a leaf that has an origin be one that requires no gradient. Local."""
    origin = origin_of(tensor)
    if origin is None or not origin.local.is_leaf:
        return
    origin.local.requires_grad_(False)
    copied_views.replace_local(tensor, tensor._local_tensor.detach())
    tensor._origin = None
    if origin.grad is not None and origin.grad.shape == tensor._local_tensor.shape:
        tensor._local_tensor.grad = origin.grad


def _of(tensor: DTensorBase) -> Moved:
    return Moved(digest_of(tensor), "data")


# -- gradients -------------------------------------------------------------------------------


class _Relaid(LocalFunction):
    """New data for a tensor, whose gradient is one of what the tensor was before."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        data: list[Tensor],
        layouts: tuple[DTensorSpec, DTensorSpec],
        of: Moved,
    ) -> Tensor:
        ctx.source, ctx.target = layouts
        ctx.of, ctx.local = of, local.detach()
        return data[0].new_empty(()).expand(data[0].shape).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        source, target = ctx.source, ctx.target
        grad = as_seen(grad, target)
        of = gradient_of(ctx.of, target.grad_spec, grad)
        grad = redistribute_local(grad, target.grad_spec, target.dual, of=of)
        grad = _summed_to(grad, target.dual, source.dual, of)
        adjoint = Adjoint(source, source.dual)
        value = ctx.local if adjoint.nonlinear else None
        return pull_back(adjoint, grad, value, of), None, None, None


class _AtSuccessor(_Relaid):
    """The same, of a view that is derived from its base whenever that is written to."""


def _summed_to(grad: Tensor, source: DTensorSpec, target: DTensorSpec, of: Moved) -> Tensor:
    """A gradient in the layout of what has another shape, as torch's graph passes it on."""
    if source.shape == target.shape:
        return redistribute_local(grad, source, target, of=of)
    if not _expands(target.shape, source.shape):
        raise RuntimeError(
            f"a tensor of shape {list(target.shape)} that was used was given data of shape "
            f"{list(source.shape)}, and then used again: gradients of both cannot be added up. "
            f"Call detach_().requires_grad_() on it before you set its data"
        )
    full = redistribute_local(grad, source, source.replicated, of=of).sum_to_size(target.shape)
    return redistribute_local(full, target.replicated, target, of=of)


def _expanded_to(grad: Tensor, source: DTensorSpec, target: DTensorSpec, of: Moved) -> Tensor:
    """A gradient in the layout of one that it is added to."""
    if source.shape == target.shape:
        return redistribute_local(grad, source, target, of=of)
    full = redistribute_local(grad, source, source.replicated, of=of).expand(target.shape)
    return redistribute_local(full.contiguous(), target.replicated, target, of=of)


def _expands(shape: Ints, to: Ints) -> bool:
    """True if torch expands one shape to another."""
    if len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(size in (1, its) for size, its in pairs)


def _collect_grads(tensor: DTensorBase, origin: Origin) -> None:
    """Have the gradient of a leaf that has an origin added up in the layout of its data."""
    leaf: Any = origin.local
    known = ref(tensor)

    def collect(leaf: Tensor) -> None:
        tensor = known()
        grad, leaf.grad = leaf.grad, None
        if tensor is None or grad is None:
            return
        grad = as_seen(grad, origin.spec)
        spec, of = origin.spec.grad_spec, _of(tensor)
        if origin.grad is None:
            origin.grad_spec = _like_torch(spec, tensor._spec)
            origin.grad = _expanded_to(grad, spec, origin.grad_spec, of)
            return
        assert origin.grad_spec is not None
        grad = _expanded_to(grad, spec, origin.grad_spec, of)
        if torch.is_grad_enabled():
            origin.grad = origin.grad + grad
        else:
            origin.grad += grad

    others = dict(leaf._post_accumulate_grad_hooks or {})
    leaf.register_post_accumulate_grad_hook(collect)
    hooks = leaf._post_accumulate_grad_hooks  # which C++ calls in the order of their insertion
    for number, hook in others.items():
        del hooks[number]
        hooks[number] = hook


def _like_torch(spec: DTensorSpec, now: DTensorSpec) -> DTensorSpec:
    """The layout of the first gradient of a leaf: that of its data, if torch copies it for them.

    torch keeps a gradient of another shape as it is where its strides fit.
    """
    if spec.shape != now.shape and all(
        size == 1 or (dim < now.ndim and spec.strides[dim] == now.strides[dim])
        for dim, size in enumerate(spec.shape)
    ):
        return spec
    return spec_of(now.mesh, now.grad_spec.placements, now.shape, now.order)
