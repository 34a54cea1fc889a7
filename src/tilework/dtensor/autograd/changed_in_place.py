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
    has_left,
    places_of,
    without_anchor,
    wrap_as,
)
from tilework.dtensor.propagation.strides import storage_of
from tilework.dtensor.provenance.digests import digest_of, note_write
from tilework.dtensor.torch_counts import show_as
from tilework.dtensor.views import copied_views


def check_gradient_is_whole(tensor: DTensorBase) -> None:
    """Raise if a tensor's gradient would miss views made before an in-place change of the dims."""
    if tensor._viewed.__class__ is not ViewedInPlace:
        return
    before = tensor._viewed[0]._local_tensor
    is_copy = tensor._view_of is not None and tensor._view_of is not copied_views.WATCHED
    if before.requires_grad and (is_copy or tensor._local_tensor._base is before):
        raise RuntimeError(
            f"the dims of {tensor!r} were changed in place: gradients with respect to this tensor "
            f"would lack the gradients of views that were made before the change. Write "
            f"x = x.t() instead of x.t_()"
        )


def check_no_leaf(tensor: DTensorBase) -> None:
    """Raise if a tensor may not change in place: a leaf that requires a gradient, or a view of it.

    Without gradients (``no_grad``) nothing is refused, as in torch.
    """
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
    """Give ``tensor`` the local tensor, shape and layout of ``value``, an in-place result."""
    check_no_leaf(tensor)
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec.copy()
    tensor._grad, tensor._stand_ins = None, without_anchor(tensor)
    refuse_views_of_before(tensor)
    note_write(tensor, digest_of(value))
    show_shape(tensor)
    return tensor


def refuse_views_of_before(tensor: DTensorBase) -> None:
    """Have views that were made before a tensor was given other data refuse gradients. Local."""
    for before in tensor._stand_ins:
        if has_left(before):
            places_of(before).refuses = True


def show_shape(tensor: DTensorBase) -> None:
    """Give the wrapper that torch's C++ code sees the shape that the tensor has now."""
    with torch.inference_mode(False):
        show_as(tensor, wrap_as(type(tensor), tensor._local_tensor.detach(), tensor._spec))


def become_view(
    tensor: DTensorT,
    anchor: DTensorT,
    result: DTensorT,
) -> DTensorT:
    """Make ``tensor`` a view of ``anchor``, which takes over the tensor's memory.

    Args:
        tensor: The tensor.
        anchor: Stands for the tensor as it was, as the base of copied views; see
            :func:`~tilework.dtensor.views.copied_views.anchor_of`.
        result: A view of the anchor, whose shape and layout the tensor gets.
    """
    view, shown = result._view_of, result._viewed
    copied_views.take_over(anchor, tensor)
    if shown is None or result is anchor:
        shown = (anchor, anchor._spec, None, (), {})
    tensor._view_of, tensor._viewed = view, ViewedInPlace(shown)
    return become(tensor, result)


def may_change_local(tensor: DTensorBase, result: DTensorBase) -> bool:
    """True if an in-place change of the local tensor's dims may turn ``tensor`` into ``result``."""
    local, shown = tensor._local_tensor, result._local_tensor
    return (
        (tensor._view_of is None or tensor._view_of is copied_views.WATCHED)
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
    """Change the dims of the anchor's local tensor in place, and give that tensor to ``result``.

    torch then derives local views of the memory again, as for plain tensors. The anchor gets a new
    local tensor: a view of the same memory with the dims from before.

    Args:
        anchor: Stands for the changed tensor as it was before.
        result: The view of the anchor that the changed tensor becomes.
        in_place: Makes the change of dims in a plain tensor, in place.
        change: Makes the same change of dims as a view of a plain tensor.
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
