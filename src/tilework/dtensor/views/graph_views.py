"""Views in the graph that have to know when their tensor leaves it, or is given other data.

Views without elements are made again as they were made, once something was written: torch's own way
(by strides) forgets their graph. But where the tensor has left the graph, torch fails to.
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
    """Let a memory know of a view, if it is a leaf, or some rank has no elements.

    Args:
        view: The view; if it is in no graph, it may be one that was made without gradients.
        base: What it was made of.
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
    """Let views of a tensor that have no elements on this rank outlast that it leaves the graph.

    Args:
        tensor: The tensor.
        remains_leaf: True if it is a leaf, which takes no gradient any more.

    Raises:
        RuntimeError: It is such a leaf, and the gradient of such a view is to be seen.
    """
    if remains_leaf:
        _refuse_seen(tensor)
    if remains_leaf or not version_of(tensor._local_tensor):  # else they show a write to come
        for view in _views_without_elements(tensor):
            before = view._local_tensor
            _move(view, tensor)
            _note_unwritten(view, before)


def _refuse_seen(tensor: DTensorBase) -> None:
    """Raise, on all ranks, where some rank would lose the hooks of a view without elements."""
    for view in views_of(tensor):
        local = view._local_tensor
        if view._spec.has_empty_parts and (local._backward_hooks or local.retains_grad):
            raise RuntimeError(
                f"requires_grad_(False) of {tensor!r}, of which {view!r} is a view whose gradient "
                f"is to be seen by a hook or retain_grad(), and of which some rank has no element: "
                f"that rank would lose it. Use detach() of the leaf instead"
            )


def after_leaving_graph(tensor: DTensorBase) -> None:
    """Let views without elements, of what was written to, require a gradient that goes nowhere."""
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
    """Have copies of a view that this rank alone has derived anew know that nothing was written.

    Else this rank alone would compute them anew.
    """
    if (anchor := anchor_in(view)) is not None:
        places_of(anchor).before = before


def _views_without_elements(tensor: DTensorBase) -> list[DTensorBase]:
    """The views of a tensor in its graph, whose local tensors have no elements, but others'."""
    local = tensor._local_tensor
    return [
        view
        for view in views_of(tensor)
        if view._local_tensor._base is local and not view._local_tensor.numel()
    ]


def views_of(tensor: DTensorBase) -> list[DTensorBase]:
    """The views that a tensor's memory knows of."""
    views = [each() for each in memory_of(tensor).graph_views or ()]
    return [view for view in views if view is not None]


def with_grad_of_nobody(local: Tensor) -> Tensor:
    """A local tensor that requires a gradient, which goes nowhere.

    So torch has views whose base has left the graph, as by ``detach_()``, and was written to.
    """
    with torch.inference_mode(False), torch.enable_grad():
        result: Tensor = _GradOfNobody.apply(local.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return result


class _GradOfNobody(LocalFunction):
    """The identity, whose gradient ends here."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def _move(view: DTensorBase, base: DTensorBase) -> None:
    """Derive the local tensor of a view from that of its base."""
    local, shown = base._local_tensor, view._local_tensor
    with torch.inference_mode(False), torch.enable_grad():
        local = local.as_strided(shown.shape, shown.stride(), shown.storage_offset())
    view._local_tensor = local
    if hasattr(view._view_of, "value"):
        view._view_of.value = local  # type: ignore[union-attr]
    if (anchor := anchor_in(view)) is not None:  # as the base of what is a copy
        anchor._local_tensor = local
