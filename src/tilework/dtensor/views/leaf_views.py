"""Views of leaves, which torch gives another place in the graph where a leaf's dims are changed.

``w.t_()`` without gradients leaves the leaf at its place. Views of its memory that were made before
are derived anew when they are next used: their gradients go to the same elements of memory, which
are others of the leaf by now. What was computed before passes on gradients as it did.
"""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase, data_of, memory_of
from tilework.dtensor.views.places import keep_place

_FEW = 16


def note_view(view: DTensorBase, base: DTensorBase) -> None:
    """Let the owner of a leaf's memory know of a view. Local.

    Args:
        view: The view; nothing is done if it is in no leaf's graph.
        base: What it was made of.
    """
    if not view._local_tensor.requires_grad:
        return
    owner = memory_of(base)
    views = owner._leaf_views
    if views is None:
        if base._local_tensor.is_leaf:
            owner._leaf_views = [ref(view)]
        return
    if len(views) >= _FEW and not len(views) & (len(views) - 1):
        views[:] = [each for each in views if each() is not None]
    views.append(ref(view))


def derive_anew(tensor: DTensorBase, before: Tensor) -> None:
    """Derive views of a leaf, and its anchors, from what it is now. Local.

    Args:
        tensor: The leaf, whose dims were changed in place: a view of its anchor.
        before: The local tensor that it had.
    """
    views = memory_of(tensor)._leaf_views or ()
    for view in [each() for each in views]:
        if view is not None and view._local_tensor._base is before:
            keep_place(view, written=True)
            _move(view, tensor)
            view._aliases = None
    viewed = tensor._viewed
    while viewed is not None and viewed[2] is not data_of:
        _move(viewed[0], tensor)
        viewed = viewed[0]._viewed


def _move(view: DTensorBase, leaf: DTensorBase) -> None:
    """Derive the local tensor of a view from that of a leaf."""
    local, shown = leaf._local_tensor, view._local_tensor
    with torch.inference_mode(False), torch.enable_grad():
        local = local.as_strided(shown.shape, shown.stride(), shown.storage_offset())
    view._local_tensor = local
    if hasattr(view._view_of, "value"):
        view._view_of.value = local  # type: ignore[union-attr]
    if view._anchor is not None:  # as the base of what is a copy
        view._anchor._local_tensor = local
