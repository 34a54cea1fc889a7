"""Views of a tensor that requires a gradient, made while gradients are off.

They are no views for the graph. Like torch, tilework refuses their use after a write to the memory.
"""

from __future__ import annotations

from typing import Any

import torch

from tilework.dtensor.base import DTensorBase, Ungraded, owner_of, root_in_graph

_base: Any = torch._C.TensorBase
_grad_fn_of = _base.grad_fn.__get__


def note_ungraded(view: DTensorBase, base: DTensorBase) -> None:
    """Note that a view was made while gradients are off, if the base requires a gradient. Local.

    Args:
        view: The view.
        base: The tensor that the view was made of.
    """
    local = base._local_tensor
    if local.requires_grad or isinstance(base._made_without_grad, Ungraded):
        if base._viewed is not None:
            local = owner_of(base)._local_tensor
        view._made_without_grad = Ungraded(local, local._version)


def check_ungraded(view: DTensorBase, made: Ungraded) -> None:
    """Raise, as torch does, if a view made without gradients was written to since. Local.

    Args:
        view: The view.
        made: The note of :func:`note_ungraded`.

    Raises:
        RuntimeError: The memory was written to, through this or any other tensor, and the tensor
            that it is a view of requires a gradient.
    """
    local, version = made
    if local._version == version or owner_of(view)._local_tensor is not local:
        return
    with torch._C.DisableTorchFunctionSubclass():
        is_result = _grad_fn_of(view) is not None  # of a user's own Function, in whose graph it is
    if not is_result and root_in_graph(view)._local_tensor.requires_grad:
        raise RuntimeError(
            "A view was created in no_grad mode and its base or another view of its base has been "
            "modified inplace with grad mode enabled. Given that this use case is ambiguous and "
            "error-prone, it is forbidden. Move both the view and the inplace modification inside "
            "the no_grad block, or both outside, or use the view's detach()"
        )
