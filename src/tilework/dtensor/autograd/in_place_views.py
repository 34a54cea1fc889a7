"""Tensors whose dims an operator in place changes: they become views of what they were before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.base import (
    DTensorBase,
    DTensorT,
    ViewedInPlace,
    base_in_graph,
    owner_of,
    wrap_as,
)
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.propagation.strides import storage_of
from tilework.dtensor.provenance.digests import digest_of, note_write
from tilework.dtensor.views import copied_views

_WithoutInterception = torch._C.DisableTorchFunctionSubclass
_base: Any = torch._C.TensorBase


def before_changes(tensor: DTensorBase) -> DTensorBase:
    """A tensor as it was before operators in place changed its dims alone, if it was in a graph.

    The gradient is whole there: views that were made before pass theirs to that place.
    """
    while tensor._became is not None and tensor._became[0]._local_tensor.requires_grad:
        tensor = tensor._became[0]
    return tensor


def changed_grad(tensor: DTensorBase, grad: Any) -> Any:
    """The gradient of a tensor, from that of what it was before its dims were changed."""
    if tensor._became is None or before_changes(tensor) is tensor:
        return grad
    before, change = tensor._became
    return change(changed_grad(before, grad))


def grad_before_changes(tensor: DTensorBase) -> DTensorBase | None:
    """The gradient of a tensor that is whole at what it was before; the same one each time."""
    grad: Any = before_changes(tensor).grad
    known = tensor._grad
    if grad is None:
        tensor._grad = None
    elif known is None or owner_of(known) is not owner_of(grad):
        tensor._grad = changed_grad(tensor, grad)
    return tensor._grad


def changed_hook(
    hook: Callable[[Tensor], Tensor | None], change: Callable[[Any], Any]
) -> Callable[[Tensor], Tensor | None]:
    """A hook for what a tensor was before an operator in place that only changed its dims.

    torch orphans what was registered on a view once its base is written to.
    """

    def called(grad: Tensor) -> Tensor | None:
        result = hook(change(grad))
        if result is None:
            return None
        return undo_change(grad, change, result)

    return called


def undo_change(like: Tensor, change: Callable[[Any], Any], value: Tensor) -> Tensor:
    """The tensor that becomes a value by an operator that only changes dims."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and value.requires_grad):
        before = torch.empty_like(like)
        change(before).copy_(value)
    return before


def check_no_leaf(tensor: DTensorBase) -> None:
    """Raise if a tensor is a leaf of a graph, or a view of one: it may not be changed in place."""
    if not torch.is_grad_enabled():
        return
    graded = tensor.requires_grad
    base: DTensorBase | None = tensor
    while base is not None:
        if base.is_leaf and (base.requires_grad or (graded and base is not tensor)):
            which = "a leaf" if base is tensor else "a view of a leaf"
            raise RuntimeError(
                f"{which} Variable that requires grad is being used in an in-place operation."
            )
        base = base_in_graph(base)


def become(tensor: DTensorT, value: DTensorBase) -> DTensorT:
    """Make ``tensor`` the value of an operator in place, of whatever shape and layout."""
    check_no_leaf(tensor)
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec.copy()
    tensor._aliases = tensor._grad = tensor._anchor = None
    for before in tensor._befores:
        if before._left is not None:  # views of it count this as a write
            before._left = before._left._replace(version=-1)
    note_write(tensor, digest_of(value))
    show_shape(tensor)
    return tensor


def show_shape(tensor: DTensorBase) -> None:
    """Have C++ see the shape that a tensor has by now."""
    with torch.inference_mode(False):
        shown = wrap_as(type(tensor), tensor._local_tensor.detach(), tensor._spec)
    with _WithoutInterception():
        _base.data.__set__(tensor, shown)


def begin_anew(tensor: DTensorBase) -> None:
    """Give a tensor a place of its own in the graph, as an operator in place does.

    Hooks that follow get the gradient of what is computed from now on.
    """
    local = tensor._local_tensor
    if local.requires_grad and not local._is_view() and not local.is_leaf:
        _Anew.apply(local)  # type: ignore[no-untyped-call]


class _Anew(LocalFunction):
    """The identity, in place."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        ctx.mark_dirty(local)
        return local

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def become_view(
    tensor: DTensorT,
    anchor: DTensorT,
    result: DTensorT,
    change: Callable[[Any], Any] | None,
) -> DTensorT:
    """Make ``tensor`` a view of its own anchor, which takes over its memory.

    Args:
        tensor: The tensor.
        anchor: Its anchor; see :func:`~tilework.dtensor.views.copied_views.anchor_of`.
        result: The view.
        change: Makes the view of the anchor; None: the local tensor itself was changed.
    """
    anchor._became = tensor._became
    base = anchor._local_tensor
    is_place = anchor._became is not None or not base._is_view()
    tensor._became = (anchor, change) if change and is_place else None
    view, shown = result._view_of, result._viewed
    copied_views.take_over(anchor, tensor)
    if shown is None or result is anchor:
        shown = (anchor, anchor._spec, None, (), {})
    tensor._view_of, tensor._viewed = view, ViewedInPlace(shown)
    return become(tensor, result)


def may_change_local(tensor: DTensorBase, result: DTensorBase) -> bool:
    """True if a tensor's local tensor may become that of a view of it by changing its dims."""
    local, shown = tensor._local_tensor, result._local_tensor
    return (
        (tensor._view_of is None or tensor._view_of is copied_views.WATCHED)
        and tensor._origin is None
        and tensor._became is None
        and not local.is_inference()
        and storage_of(shown) == storage_of(local)
        and not (local._is_view() and not copied_views.is_view(tensor))
        # torch makes those of no elements anew as they were made: see ``OnLocals.replays``.
        and not tensor._spec.has_empty_parts
    )


def change_local(
    anchor: DTensorBase,
    result: DTensorBase,
    in_place: Callable[[Tensor], Any],
    change: Callable[[Tensor], Any],
) -> None:
    """Change the dims of an anchor's local tensor to the result's, whose local tensor it becomes.

    So torch derives local views of its memory anew as it does of plain tensors. The anchor gets a
    view with the dims from before.

    Args:
        anchor: The anchor.
        result: The view that the tensor becomes.
        in_place: Changes a plain tensor so in place.
        change: Makes such a view of a plain tensor.
    """
    local, window = anchor._local_tensor, _window_of(result._local_tensor)
    before = _window_of(local)
    try:
        alike = _window_of(change(local.detach())) == window
    except (RuntimeError, IndexError):  # a local tensor has another number of elements
        alike = False
    if alike:  # of elements that overlap, too
        in_place(local)
    else:
        local.as_strided_(*window)
    result._local_tensor = local
    with torch.inference_mode(False), torch.enable_grad():
        anchor._local_tensor = local.as_strided(*before)


def _window_of(local: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return local.shape, local.stride(), int(local.storage_offset())
