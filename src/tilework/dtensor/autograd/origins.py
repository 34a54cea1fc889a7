"""Leaves that are given data in another layout: ``x.data = y``.

torch leaves a leaf at its place in the graph then. What was computed from it before and what will
be computed later add their gradients up there. Here the local tensor may get another shape by it,
or the same shape for other elements. So that place keeps the layout which it had: the leaf's
*origin*. The local tensor with the new data is computed from it, by a node that redistributes
gradients to the layout there. The tensor goes on as the leaf that it was: hooks and ``grad`` are
the origin's.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilework.dtensor.autograd.counted_grads import as_seen
from tilework.dtensor.base import DTensorBase, Origin
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
        _collect_grads(tensor, origin)
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


def as_leaf_to_writes(tensor: DTensorBase) -> Tensor:
    """The local tensor of a leaf that has an origin, as a view that torch lets nobody write to.

    That is, where gradients are recorded: as it does with leaves.
    """
    local = tensor._local_tensor
    return local.unsqueeze(0).unbind(0)[0] if torch.is_grad_enabled() else local


def place_in_graph(tensor: DTensorBase) -> tuple[Tensor, DTensorSpec]:
    """The local tensor at which a tensor's gradient is whole, and its layout."""
    origin = origin_of(tensor)
    return (tensor._local_tensor, tensor._spec) if origin is None else (origin.local, origin.spec)


def grad_of(tensor: DTensorBase) -> tuple[Tensor | None, DTensorSpec]:
    """The local tensor of a tensor's gradient, and its layout."""
    origin, local, spec = origin_of(tensor), tensor._local_tensor, tensor._spec
    if origin is not None:
        return origin.grad, origin.grad_spec or spec.grad_spec
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
        origin.grad, origin.grad_spec = grad, tensor._spec.grad_spec


def leave_graph(tensor: DTensorBase) -> None:
    """Let a leaf that has an origin be one that requires no gradient. Local."""
    origin = origin_of(tensor)
    if origin is None:
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
