"""Leaves that are given data in another layout: ``x.data = y``.

torch then leaves the leaf at the same place in the graph. The gradients of earlier and of later
results add up there. Here the local tensor may get other elements, in another shape. The place
therefore keeps the old layout: it is the leaf's *origin*. The local tensor with the new data is
computed from the origin, by a node that redistributes gradients to the old layout. The tensor stays
the same leaf: hooks and ``grad`` are the origin's.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilework.dtensor.autograd.counted_grads import as_seen
from tilework.dtensor.base import DTensorBase, Origin, places_of
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.provenance.meaning import Moved
from tilework.dtensor.redistribution.adjoint import Adjoint
from tilework.dtensor.redistribution.redistribute import (
    gradient_of,
    pull_back,
    redistribute_local,
)
from tilework.dtensor.spec import DTensorSpec
from tilework.dtensor.torch_counts import holders
from tilework.dtensor.views import copied_views


def is_in_graph(tensor: DTensorBase) -> bool:
    """True if a result that was computed from a tensor still waits for a gradient. Local."""
    local = tensor._local_tensor
    if not local.requires_grad or local.is_inference():
        return False
    if not local.is_leaf:
        return True
    before = holders(local)
    with torch.inference_mode(False), torch.enable_grad():
        edge = torch.autograd.graph.get_gradient_edge(local)
    # The tensor's node holds the tensor. A node that is new here adds a holder.
    is_known = holders(local) == before
    del edge
    return is_known


def with_data(tensor: DTensorBase, data: Tensor, spec: DTensorSpec, used: bool) -> Tensor:
    """The local tensor of a tensor that is given other data, at the same place in the graph.

    Collective if the layout is another, and there is a gradient.

    Args:
        tensor: The tensor, with the layout that it has so far.
        data: The new local data.
        spec: The layout of the new data.
        used: True if results of the tensor wait for gradients: see :func:`is_in_graph`.
    """
    local, origin = tensor._local_tensor, origin_of(tensor)
    before = tensor._spec
    if not local.requires_grad or before == spec or before.mesh != spec.mesh:
        local.data = data
        return local
    grad, grad_spec = grad_of(tensor)
    if grad is not None:
        grad = redistribute_local(grad, grad_spec, spec.grad_spec, of=_of(tensor))
    if local.is_leaf:
        local.grad = None
    if not used:
        if grad is not None:  # of another dtype, it may only be there already
            local.data = grad.new_empty(()).expand(grad.shape)
            local.grad = grad
        local.data = data
        return local
    if origin is None:
        origin = places_of(tensor).origin = Origin(local, before)
        _collect_grads(tensor, origin)
    origin.grad = grad
    with torch.inference_mode(False), torch.enable_grad():
        anew: Tensor = _Relaid.apply(  # type: ignore[no-untyped-call]
            origin.local, [data], (origin.spec, spec), _of(tensor)
        )
        anew.data = data
    origin.node = anew.grad_fn
    return anew


def origin_of(tensor: DTensorBase) -> Origin | None:
    """The origin of a tensor (see this module); None if it has none, or was written to since."""
    places = tensor._places
    if places is None or places.origin is None:
        return None
    if tensor._local_tensor.grad_fn is not places.origin.node:
        places.origin = None  # it was written to
    return places.origin


def as_leaf_to_writes(tensor: DTensorBase) -> Tensor:
    """The local tensor of a leaf that has an origin, for an operator that writes to the tensor.

    While gradients are recorded, torch refuses writes to leaves. The result is then a view to which
    torch refuses writes, too.
    """
    local = tensor._local_tensor
    return local.unsqueeze(0).unbind(0)[0] if torch.is_grad_enabled() else local


def place_in_graph(tensor: DTensorBase) -> tuple[Tensor, DTensorSpec]:
    """The local tensor at which a tensor's gradient is complete, and the layout there."""
    origin = origin_of(tensor)
    return (tensor._local_tensor, tensor._spec) if origin is None else (origin.local, origin.spec)


def grad_of(tensor: DTensorBase) -> tuple[Tensor | None, DTensorSpec]:
    """The local tensor of a tensor's gradient, and the gradient's layout."""
    origin, local, spec = origin_of(tensor), tensor._local_tensor, tensor._spec
    if origin is not None:
        return origin.grad, spec.grad_spec
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
    else:
        origin.grad = grad


def leave_graph(tensor: DTensorBase) -> None:
    """Make a leaf that has an origin a leaf that requires no gradient. Local."""
    origin = origin_of(tensor)
    if origin is None:
        return
    origin.local.requires_grad_(False)
    copied_views.replace_local(tensor, tensor._local_tensor.detach())
    places_of(tensor).origin = None
    if origin.grad is not None:
        tensor._local_tensor.grad = origin.grad


def _of(tensor: DTensorBase) -> Moved:
    return Moved(digest_of(tensor), "data")


# -- gradients -------------------------------------------------------------------------------


class _Relaid(LocalFunction):
    """New data of a tensor; the gradient is redistributed to the layout from before."""

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
        grad = redistribute_local(grad, target.grad_spec, source.dual, of=of)
        adjoint = Adjoint(source, source.dual)
        value = ctx.local if adjoint.nonlinear else None
        return pull_back(adjoint, grad, value, of), None, None, None


def _collect_grads(tensor: DTensorBase, origin: Origin) -> None:
    """Register a hook that moves gradients from the origin's local tensor to ``origin.grad``.

    There they add up, in the layout that the tensor has now.
    """
    leaf: Any = origin.local
    known = ref(tensor)  # and no reference to the origin: it holds the leaf, and that the hook

    def collect(leaf: Tensor) -> None:
        tensor = known()
        grad, leaf.grad = leaf.grad, None
        origin = None if tensor is None else places_of(tensor).origin
        if tensor is None or origin is None or origin.local is not leaf or grad is None:
            return
        grad, spec = as_seen(grad, origin.spec), origin.spec.grad_spec
        grad = redistribute_local(grad, spec, tensor._spec.grad_spec, of=_of(tensor))
        if origin.grad is None:
            origin.grad = grad
        elif torch.is_grad_enabled():
            origin.grad = origin.grad + grad
        else:
            origin.grad += grad

    others = dict(leaf._post_accumulate_grad_hooks or {})
    leaf.register_post_accumulate_grad_hook(collect)
    hooks = leaf._post_accumulate_grad_hooks  # which C++ calls in the order of their insertion
    for number, hook in others.items():
        del hooks[number]
        hooks[number] = hook
