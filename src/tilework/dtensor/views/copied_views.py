"""Views that had to move elements: they are copies, but behave as if they shared memory.

In torch ``y = x[0]; y.add_(1)`` changes ``x``. A view that is computed on the local tensor shares
its memory, so that the same holds here. Where elements had to be moved first, the view remembers
its base (``base.View``): writes to the view are written to the base too, and the view is computed
anew when it is used after the base was written to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import agree
from tilework.dtensor.base import DTensorBase, Redo, View, Write


def mark(
    tensor: Tensor, base: DTensorBase, redo: Redo, write: Write | None = None, shares: bool = False
) -> None:
    """Let ``tensor`` be a view of ``base``. Local.

    Args:
        tensor: A DTensor.
        base: The tensor that it is a view of.
        redo: As for :class:`~tilework.dtensor.base.View`; ``write`` and ``shares`` too.
    """
    tensor._view_of = View(base, redo, write, shares)  # type: ignore[attr-defined]


def viewed(
    result: Any,
    copied: bool,
    func: Any,
    may_copy: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of an operator that makes views, marked if it has to be."""
    if args:
        base, rest, named = args[0], args[1:], kwargs
    else:
        named = dict(kwargs)
        base, rest = named.pop("input"), ()
    if not isinstance(base, DTensorBase):
        return result  # of a plain tensor, which counts as replicated
    if base._view_of is None and not copied:
        return result

    def redo(x: Any) -> Any:
        return func(x, *rest, **named)

    if isinstance(result, Tensor):
        mark(result, base, redo, shares=not copied)
        if copied and may_copy:
            result._view_of.base_strides = base.stride()  # type: ignore[attr-defined]
        return result
    for i, item in enumerate(result):
        mark(item, base, lambda x, i=i: redo(x)[i], shares=not copied)  # type: ignore[misc]
    return result


def _is_copy(view: View) -> bool:
    """True if torch's operator gives no view of such a tensor either. Collective if unknown."""
    base, mine = view.base, view.base_strides
    if mine is None:
        return False
    view.base_strides = None
    # Strides of a local tensor that has one row could be in another order.
    definite = min(base._local_tensor.shape, default=2) > 1
    mesh = base._spec.mesh
    every = agree(lambda: (definite, mine), mesh.axes_group(tuple(range(mesh.ndim))))
    strides = next((its for definite, its in every if definite), every[0][1])
    plain = torch.empty_strided(base.shape, strides, device="meta")
    return not view.redo(plain)._is_view()


def refresh(tensor: DTensorBase) -> None:
    """Compute a view anew if its base was written to. Collective in that case."""
    view = tensor._view_of
    assert view is not None
    if view.base._view_of is not None:
        refresh(view.base)
    if view.is_stale:
        if _is_copy(view):
            tensor._view_of = None
            return
        with torch.set_grad_enabled(view.graded):
            anew = view.redo(view.base)
        tensor._local_tensor, tensor._aliases = anew._local_tensor, None
        view.note()


def write_back(tensor: DTensorBase) -> None:
    """Write a view's new value to its base. Collective."""
    view = tensor._view_of
    assert view is not None
    if _is_copy(view):
        tensor._view_of = None
        return
    if view.shares:
        if view.base._view_of is not None:
            write_back(view.base)
    elif view.write is not None:
        view.write(view.base, tensor)
    else:
        _write_gathered(view, tensor)
    view.note()


def _write_gathered(view: View, tensor: DTensorBase) -> None:
    base = view.base
    full = base.full_tensor()
    if full is base._local_tensor:
        full = full.clone()
    view.redo(full).copy_(tensor.full_tensor())
    base.copy_(full)
