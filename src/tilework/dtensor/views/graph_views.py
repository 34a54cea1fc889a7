"""Views in the graph that have to know when their tensor leaves it, or is given other data.

After a write to the base, torch makes a view again, by strides, which forgets the graph of a view
without elements. Such views are therefore made again by the original call. Once the base has left
the graph, torch fails to do this.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tilework.dtensor.base import DTensorBase, anchor_in, memory_of, places_of, version_of
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.views.ungraded_views import note_ungraded

_FEW = 16


def note_view(view: DTensorBase, base: DTensorBase) -> None:
    """Remember a view that requires a gradient in the memory that it shows.

    The first is remembered only if the base is a leaf, or some rank has no elements of the view. A
    view that requires no gradient goes to :func:`note_ungraded` if it was made without gradients.

    Args:
        view: The view.
        base: The tensor that the view was made of.
    """
    if not view._local_tensor.requires_grad:
        if view._made_without_grad:
            note_ungraded(view, base)
        return
    memory = memory_of(base)
    views = memory.graph_views
    if views is None:
        if base._local_tensor.is_leaf or view._spec.has_empty_parts:
            memory.graph_views = [ref(view)]
        return
    if len(views) >= _FEW and not len(views) & (len(views) - 1):
        views[:] = [each for each in views if each() is not None]
    views.append(ref(view))


def before_leaving_graph(tensor: DTensorBase, remains_leaf: bool) -> None:
    """Keep views of ``tensor`` without elements on this rank usable after it leaves the graph.

    Args:
        tensor: The tensor, before ``requires_grad_(False)`` or ``detach_()``.
        remains_leaf: True if it is a leaf, which stops requiring a gradient.

    Raises:
        RuntimeError: It is a leaf, and a view that has no elements on some rank has a hook, or
            retains the gradient.
    """
    if remains_leaf:
        _refuse_seen(tensor)
    if remains_leaf or not version_of(tensor._local_tensor):  # else they show a write to come
        for view in _views_without_elements(tensor):
            before = view._local_tensor
            _move(view, tensor)
            _note_unwritten(view, before)


def _refuse_seen(tensor: DTensorBase) -> None:
    """Raise on all ranks if some rank would lose the hooks of a view without elements there."""
    for view in views_of(tensor):
        local = view._local_tensor
        if view._spec.has_empty_parts and (local._backward_hooks or local.retains_grad):
            raise RuntimeError(
                f"requires_grad_(False) of {tensor!r} is refused: the view {view!r} has a hook or "
                f"retain_grad(), and a rank that has no element of the view would lose it. Use "
                f"detach() of the leaf instead"
            )


def after_leaving_graph(tensor: DTensorBase) -> None:
    """Repair views of ``tensor`` without elements here, after it was written to and left the graph.

    They then require a gradient, which goes nowhere, as in torch.
    """
    for view in _views_without_elements(tensor):
        try:
            _ = view._local_tensor.grad_fn
        except RuntimeError:  # torch made it anew of what requires no gradient
            before = view._local_tensor
            local = view._local_tensor = with_grad_of_nobody(before)
            while version_of(local) < version_of(before):
                increment_version(local)
            if (anchor := anchor_in(view)) is not None:
                anchor._local_tensor = local
            _note_unwritten(view, before)


def _note_unwritten(view: DTensorBase, before: Tensor) -> None:
    """Note that a view has a new local tensor, on this rank alone, although nothing was written.

    Otherwise this rank alone would compute copied views of the view again, which is collective.

    Args:
        view: The view.
        before: The local tensor that it had before.
    """
    if (anchor := anchor_in(view)) is not None:
        places_of(anchor).before = before


def _views_without_elements(tensor: DTensorBase) -> list[DTensorBase]:
    """The remembered views without local elements that torch, too, takes for views of a tensor."""
    local = tensor._local_tensor
    return [
        view
        for view in views_of(tensor)
        if view._local_tensor._base is local and not view._local_tensor.numel()
    ]


def views_of(tensor: DTensorBase) -> list[DTensorBase]:
    """The views that are remembered in a tensor's memory (see :func:`note_view`)."""
    views = [each() for each in memory_of(tensor).graph_views or ()]
    return [view for view in views if view is not None]


def with_grad_of_nobody(local: Tensor) -> Tensor:
    """A new local tensor with the memory of ``local``, whose gradient goes nowhere.

    torch has views of this kind if the base left the graph by ``detach_()``, and was written to.
    """
    with torch.inference_mode(False), torch.enable_grad():
        result: Tensor = _GradOfNobody.apply(local.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return result


class _GradOfNobody(LocalFunction):
    """The identity in forward; in backward the gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def _move(view: DTensorBase, base: DTensorBase) -> None:
    """Make the local tensor of a view again from the base's local tensor, by strides."""
    local, shown = base._local_tensor, view._local_tensor
    with torch.inference_mode(False), torch.enable_grad():
        local = local.as_strided(shown.shape, shown.stride(), shown.storage_offset())
    view._local_tensor = local
    if hasattr(view._view_of, "value"):
        view._view_of.value = local  # type: ignore[union-attr]
    if (anchor := anchor_in(view)) is not None:  # as the base of what is a copy
        anchor._local_tensor = local
