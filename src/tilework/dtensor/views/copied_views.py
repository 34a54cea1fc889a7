"""Views that had to move elements: they are copies, but behave as if they shared memory.

In torch ``y = x[0]; y.add_(1)`` changes ``x``. A view that is computed on the local tensor shares
its memory, so that the same holds here. Where elements had to be moved first, the view remembers
its base (``base.View``): writes to the view are written to the base too, and the view is computed
anew when it is used after the base was written to.

The base is remembered by its *anchor*: the same local tensor in the layout that the base had, since
``x.t_()`` changes the layout of ``x`` and not that of its memory. Writes are counted by the tensor
that owns the memory, since torch counts neither those to ``x.data`` nor those in inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.base import (
    DTensorBase,
    DTensorT,
    Redo,
    View,
    Write,
    memory_of,
    version_of,
    wrap_as,
)
from tilework.dtensor.provenance.digests import digest_of, follow
from tilework.dtensor.spec import DTensorSpec
from tilework.dtensor.views.memory_layout import full_in_memory_order, replicated_as

#: Marks a tensor as one whose views were handed out, so that it is refreshed before its use.
WATCHED: View = object.__new__(View)


def anchor_of(tensor: DTensorT) -> DTensorT:
    """The tensor that stands for another as the base of views, whatever becomes of that."""
    anchor: Any = tensor._anchor
    if (
        anchor is None
        or anchor._local_tensor is not tensor._local_tensor
        or anchor._spec is not tensor._spec
    ):
        anchor = tensor._anchor = wrap_as(type(tensor), tensor._local_tensor, tensor._spec)
        anchor._made_without_grad = tensor._made_without_grad
        anchor._viewed = (tensor, tensor._spec, None, (), {})
    anchor._view_of = tensor._view_of
    return anchor  # type: ignore[no-any-return]


def mark(
    tensor: Tensor,
    base: DTensorBase,
    redo: Redo,
    write: Write | None = None,
    shares: bool = False,
    apart: str = "",
) -> None:
    """Let ``tensor`` be a view of ``base``. Local.

    Args:
        tensor: A DTensor.
        base: The tensor that it is a view of.
        redo: As for :class:`~tilework.dtensor.base.View`; ``write``, ``shares`` and ``apart`` too.
    """
    assert isinstance(tensor, DTensorBase)
    anchor = anchor_of(base)
    tensor._view_of = View(anchor, tensor._local_tensor, redo, write, shares, apart)
    tensor._viewed = (anchor, anchor._spec, redo, (), {})


def viewed(
    result: Any, copied: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of an operator that makes views, marked if it has to be."""
    if args:
        base = args[0]
    else:
        kwargs = dict(kwargs)
        base = kwargs.pop("input")
        args = (base,)
    if not isinstance(base, DTensorBase):
        return result  # of a plain tensor, which counts as replicated
    if not copied and (base._view_of is None or base._view_of is WATCHED):
        if isinstance(result, DTensorBase):
            result._viewed = (base, base._spec, func, args, kwargs)
            result._view_of = base._view_of
        else:
            for i, item in enumerate(result):
                call = lambda *a, i=i, **k: func(*a, **k)[i]  # noqa: E731
                item._viewed = (base, base._spec, call, args, kwargs)
                item._view_of = base._view_of
        return result
    rest = args[1:]

    def redo(x: Any) -> Any:
        return func(x, *rest, **kwargs)

    if isinstance(result, Tensor):
        mark(result, base, redo, shares=not copied)
        return result
    for i, item in enumerate(result):
        mark(item, base, lambda x, i=i: redo(x)[i], shares=not copied)  # type: ignore[misc]
    return result


def same_memory(
    tensor: DTensorT, local: Tensor, redo: Callable[[DTensorT], DTensorT], apart: str = ""
) -> DTensorT:
    """A further tensor of the same layout, whose local tensor shares the memory of the first's.

    Args:
        tensor: The tensor.
        local: The other's local tensor.
        redo: Makes it of the tensor.
        apart: As for :class:`~tilework.dtensor.base.View`.
    """
    result = wrap_as(type(tensor), local, tensor._spec, digest_of(tensor))
    follow(result, tensor)
    view = tensor._view_of
    if view is None or view is WATCHED:
        result._view_of, result._viewed = view, (tensor, tensor._spec, None, (), {})
    else:
        mark(result, tensor, redo, shares=True, apart=apart)
    return result


def mark_local_copy(tensor: DTensorBase, base: DTensorBase) -> None:
    """Let ``tensor`` be a view of all of ``base``, whose local tensor could not be viewed so.

    Nothing has to be moved between ranks, so that one of them may do so alone.
    """
    spec, shape = tensor._spec, tensor._local_tensor.shape

    def redo(x: DTensorBase) -> DTensorBase:
        return wrap_as(type(x), x._local_tensor.reshape(shape), spec)

    def write(x: DTensorBase, value: DTensorBase) -> None:
        x._local_tensor.copy_(value._local_tensor.reshape(x._local_tensor.shape))
        wrote(x)

    mark(tensor, base, redo, write)


def refresh(tensor: DTensorBase) -> None:
    """Compute a view anew if its base was written to. Collective in that case."""
    owner = memory_of(tensor)
    if owner._handed_out is not None:
        _write_back_handed_out(owner)
    view = tensor._view_of
    if view is None or view is WATCHED:
        return
    base = view.base
    if base._view_of is not None:
        refresh(base)
    if view.is_stale:
        with torch.inference_mode(view.inference), torch.set_grad_enabled(view.graded):
            anew = view.redo(base)._local_tensor
        if view.value.requires_grad and view.value.is_leaf:  # it stays the leaf
            view.value.data = anew.detach()
        else:
            view.value = anew
        view.note()
    if tensor._local_tensor is not view.value:
        tensor._local_tensor, tensor._aliases = view.value, None


def wrote(tensor: DTensorBase) -> None:
    """Note that a tensor was written to, and write it to what it is a view of.

    Collective if it is a copied view.
    """
    owner = memory_of(tensor)
    owner._writes += 1
    if tensor._view_of is not None:
        write_back(tensor)
        if owner._handed_out is not None:
            entries, owner._handed_out = owner._handed_out, None
            try:
                _renew(entries)
            finally:
                owner._handed_out = entries


def write_back(tensor: DTensorBase, apart: str = "") -> None:
    """Write a view's new value to its base. Collective.

    Args:
        tensor: The view.
        apart: How what was written to is cut off the view's graph.
    """
    view = tensor._view_of
    if view is None or view is WATCHED:
        return
    apart = max(apart, view.apart, key=len)
    base = view.base
    if view.shares:
        if base._view_of is not None:
            write_back(base, apart)
    else:
        local = tensor._local_tensor
        if apart:
            base = base.data if apart == "data" else base.detach()  # type: ignore[assignment]
            local = local.detach()
        # By itself, for it would be computed anew as what it was written to.
        value = wrap_as(type(tensor), local, tensor._spec)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not apart):
            (view.write or _write_gathered(view.redo))(base, value)
    if tensor._local_tensor is view.value:
        view.note()


def _write_gathered(redo: Redo) -> Write:
    def write(base: DTensorBase, value: DTensorBase) -> None:
        full = full_in_memory_order(base)
        redo(full).copy_(value.full_tensor())
        base.copy_(replicated_as(base, full))

    return write


# -- local tensors that were handed out ------------------------------------------------------


def hand_out(tensor: DTensorBase) -> None:
    """Note that a copied view's local tensor is handed out, to be written to by others. Local."""
    view = tensor._view_of
    if view is None or view is WATCHED:
        return
    owner, local = memory_of(tensor), tensor._local_tensor
    known = owner._handed_out or []
    if any(held._local_tensor is local for held, *_ in known):
        return

    def write(base: DTensorBase, value: DTensorBase) -> None:
        view.redo(base).copy_(value)

    held = wrap_as(type(tensor), local, tensor._spec)
    held._viewed = tensor._viewed
    kept = write if view.shares else view.write
    held._view_of = View(view.base, local, view.redo, kept, apart=view.apart)
    owner._handed_out = [*known, _noted(held)][-_MOST_HANDED_OUT:]
    base: DTensorBase | None = tensor
    while base is not None:
        if base._view_of is None:
            base._view_of = WATCHED
        base = None if base._viewed is None else base._viewed[0]


#: Of more local tensors of one tensor's views the oldest are forgotten.
_MOST_HANDED_OUT = 64


#: A view whose local tensor was handed out, the number of writes to that, and its node then.
_HandedOut = tuple[DTensorBase, int, Any]


def _noted(held: DTensorBase) -> _HandedOut:
    return held, version_of(held._local_tensor), held._local_tensor.grad_fn


def _write_back_handed_out(owner: DTensorBase) -> None:
    """Write what others wrote to local tensors of views to their bases."""
    entries, owner._handed_out = owner._handed_out, None  # while tensors are refreshed for it
    assert entries is not None
    try:
        for at, (held, version, grad_fn) in enumerate(entries):
            if version_of(held._local_tensor) != version:
                # In the graph, if the write was.
                with torch.set_grad_enabled(held._local_tensor.grad_fn is not grad_fn):
                    wrote(held)
                _renew(entries[:at] + entries[at + 1 :])
                entries[at] = _noted(held)
    finally:
        owner._handed_out = entries


def _renew(entries: Sequence[_HandedOut]) -> None:
    """Give local tensors that were handed out what their bases hold now."""
    for held, *_ in entries:
        view = held._view_of
        assert view is not None
        if view.base._view_of is not None:
            refresh(view.base)
        if view.is_stale:
            with torch.no_grad():
                held._local_tensor.data.copy_(view.redo(view.base.detach())._local_tensor)
            view.note()


# -- memory ----------------------------------------------------------------------------------


def offset_of(tensor: DTensorBase) -> int:
    """The place in memory, in elements, at which a tensor begins, were it plain. Local."""
    if tensor._viewed is None:
        return 0
    base, spec, func, args, kwargs = tensor._viewed
    start = offset_of(base)
    if func is None:
        return start
    with torch.no_grad():
        shown = func(_meta_at(spec, base.dtype, start), *args[1:], **kwargs)
    return int(shown.storage_offset())


def _meta_at(spec: DTensorSpec, dtype: torch.dtype, start: int) -> Tensor:
    extent = (
        start
        + 1
        + sum(
            (size - 1) * stride
            for size, stride in zip(spec.shape, spec.strides, strict=True)
            if size
        )
    )
    memory = torch.empty(max(extent, 0), dtype=dtype, device="meta")
    return memory.as_strided(spec.shape, spec.strides, start)
