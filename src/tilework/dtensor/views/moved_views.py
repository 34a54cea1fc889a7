"""Views, and those that had to move elements: these are snapshots that may be written through.

In torch ``y = x[0]; y.add_(1)`` changes ``x``. A view that is computed on the local tensor shares
its memory, so that the same holds here. Where elements had to be moved first, the view has a copy
of them, and keeps the base, the call and the number of writes to the base (``base.Snapshot``). A
write to the view is written to the base at once. Nobody keeps the copy up to date: a view whose
base was written to by another way since raises when it is used.

Writes are counted by ``base.Memory``, since torch counts neither those to ``x.data`` nor those in
inference mode. The local tensors of views are plain copies, with the graph of an ordinary operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilework.dtensor.base import (
    APART,
    DTensorBase,
    DTensorT,
    Memory,
    Redo,
    Snapshot,
    Viewed,
    Write,
    base_in_graph,
    data_of,
    is_moved,
    memory_of,
    own_memory,
    root_in_graph,
    version_of,
    wrap_as,
    writes_to,
)
from tilework.dtensor.provenance.digests import follow, follow_memory
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.tiled import canonical_name


def memory_order(spec: DTensorSpec) -> Ints:
    """The dims, from the largest stride to the smallest."""
    return tuple(sorted(range(spec.ndim), key=lambda dim: (-spec.strides[dim], dim)))


def full_in_memory_order(tensor: DTensorBase) -> Tensor:
    """The full value in new memory, with the same strides if dense. Collective; differentiable."""
    full = tensor.full_tensor()
    order = memory_order(tensor._spec)
    inverse = [order.index(dim) for dim in range(len(order))]
    return full.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def replicated_as(tensor: DTensorT, full: Tensor) -> DTensorT:
    """A full value, the same on all ranks, as a DTensor on the mesh of another."""
    return wrap_as(type(tensor), full, tensor._spec.replicated)


# -- places in memory ------------------------------------------------------------------------


class Window(NamedTuple):
    """A view of a memory: shape, strides and offset, in elements, as for ``torch.as_strided``."""

    size: Ints
    strides: Ints
    offset: int


def window_of(tensor: DTensorBase) -> Window:
    """The window through which a tensor would show memory if it were plain. Local."""
    return Window(tensor._spec.shape, tensor._spec.strides, offset_of(tensor))


def window_after(tensor: DTensorBase, change: Callable[[Tensor], Tensor]) -> Window:
    """The window in memory of the view that ``change`` makes, tried on a meta tensor. Local."""
    with torch.no_grad():
        shown = change(_meta_at(tensor._spec, tensor.dtype, offset_of(tensor)))
    return Window(tuple(shown.shape), tuple(shown.stride()), int(shown.storage_offset()))


def offset_of(tensor: DTensorBase) -> int:
    """The storage offset, in elements, that a tensor would have if it were plain. Local."""
    return _start(tensor._viewed)


def _start(viewed: Viewed | int | None) -> int:
    if viewed is None or isinstance(viewed, int):
        return viewed or 0
    base, spec, func, args, kwargs, before = viewed
    start = _start(before)
    if func is None or func in APART:
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


#: A view that torch's graph has for none.
_unsafe_view = torch.ops.aten._unsafe_view.default
#: How views are cut off a graph, from not at all to entirely.
_APARTNESS = ("", "detach", "data")
#: Of local tensors with a count of their own that were handed out, the oldest are forgotten.
_MOST_COUNTERS = 16


class ViewOfSeveral:
    """A function that makes the view of this number (None: the only one) that an operator such as
    split() returns.

    ``together``: torch's graph has one node for all views; then none may be written to.
    """

    __slots__ = ("func", "number", "together")

    def __init__(self, func: Any, number: int | None, together: bool) -> None:
        self.func, self.number, self.together = func, number, together

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.func(*args, **kwargs)
        return result if self.number is None else result[self.number]


#: Operators whose views torch's graph has one node for; others are composed of slices.
TOGETHER = frozenset({"split", "split_with_sizes", "chunk", "unbind"})


def viewed(
    result: Any,
    copied: bool,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    write: Write | None = None,
) -> Any:
    """Record which tensor the results of an operator are views of, and return the results.

    The operator may be called again to remake the views; the first argument (else ``input``) is the
    base. ``copied``: elements were copied; then ``write`` is as for :func:`mark`.
    """
    if args:
        base = args[0]
    else:
        kwargs = dict(kwargs)
        base = kwargs.pop("input")
        args = (base,)
    if not isinstance(base, DTensorBase):
        return result  # of a plain tensor, which counts as replicated
    rest = args[1:]

    def redo(x: Any) -> Any:
        return func(x, *rest, **kwargs)

    if isinstance(result, DTensorBase):
        if copied:
            mark(result, base, redo, write)
        else:
            note_viewed(result, base, func, args, kwargs)
        return result
    together = canonical_name(func)[0] in TOGETHER
    for i, item in enumerate(result):
        if copied:
            mark(item, base, ViewOfSeveral(redo, i, together))
        else:
            note_viewed(item, base, ViewOfSeveral(func, i, together), args, kwargs)
    return result


def note_viewed(
    view: DTensorBase,
    base: DTensorBase,
    func: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Record that a tensor shares memory with a base, of which it was made by a call. Local.

    ``func`` is called with the base, the arguments after the first, and those by name; None: the
    view shows all of the base.
    """
    view._viewed = (base, base._spec, func, args, kwargs, base._viewed)
    view._memory = memory = own_memory(base)
    follow_memory(base)
    if memory.shows is not None:
        view._view_of = base._view_of
    elif view._local_tensor.requires_grad and view._spec.has_empty_parts:
        view._view_of = ""


def mark(tensor: Tensor, base: DTensorBase, redo: Redo, write: Write | None = None) -> None:
    """Record that ``tensor``, which nobody else has yet, is a view of ``base`` with a copy of the
    elements. Local.

    ``redo`` makes the same view of a given tensor, a DTensor or a plain tensor. ``write`` writes
    the view's value to the elements of the base that the view shows; None: the base is gathered for
    this.
    """
    assert isinstance(tensor, DTensorBase)
    tensor._local_tensor = local = _counting(tensor._local_tensor)
    tensor._viewed = (base, base._spec, redo, (), {}, base._viewed)
    follow_memory(base)
    shown = Snapshot(base, local, tensor._spec, redo, write or _write_gathered(redo))
    tensor._view_of, tensor._memory = "", Memory(memory_of(base), shown)
    _note_equal(shown)


def _counting(copy: Tensor) -> Tensor:
    """A moved view's local tensor, such that torch counts writes to it alone."""
    if not copy.is_inference():
        return as_no_view(copy)
    with torch.inference_mode(False):
        return copy.clone()


def as_no_view(local: Tensor) -> Tensor:
    """The local result of a call, as a tensor that is no view in torch's graph.

    After a write, hooks of a view of an intermediate tensor would miss the gradients of views of
    the result. On a rank without elements, and only there, the result may be a view of an input,
    and would count writes to the input.
    """
    matters = local.__class__ is Tensor and (local.requires_grad or not local.numel())
    if matters and local._is_view():
        return _unsafe_view(local, local.shape)  # type: ignore[no-any-return]
    return local


def made_together(views: Sequence[Tensor]) -> None:
    """Note that torch's graph has one node for these views, so none may be written to. Local."""
    for view in views:
        if isinstance(view, DTensorBase) and view._viewed is not None:
            base, spec, func, *rest = view._viewed
            view._viewed = (base, spec, ViewOfSeveral(func, None, True), *rest)


def same_memory(tensor: DTensorT, local: Tensor, func: Any = None) -> DTensorT:
    """A new DTensor in the layout of ``tensor``, which shares the memory of ``tensor`` through
    ``local``.

    ``func`` is ``Tensor.detach`` or ``data_of``, which cut it off the graph; None: it is not cut
    off.
    """
    result = wrap_as(type(tensor), local, tensor._spec)
    follow(result, tensor)
    note_viewed(result, tensor, func)
    if func is data_of:
        result._memory = Memory(memory_of(tensor), own_memory(tensor).shows)
    if is_moved(tensor) and func is not None:
        assert tensor._view_of is not None
        apart = "data" if func is data_of else "detach"
        result._view_of = max(tensor._view_of, apart, key=_APARTNESS.index)
    return result


def share_memory(tensor: DTensorBase, value: DTensorBase, start: int) -> None:
    """Record that ``tensor`` was given the memory of ``value``, from ``start`` on. Local."""
    follow(tensor, value)
    tensor._view_of = "data" if is_moved(value) else None
    note_start(tensor, start)


def note_start(tensor: DTensorBase, start: int) -> None:
    """Record where a tensor that is no view begins in its memory. Local."""
    if start:
        shown = wrap_as(type(tensor), tensor._local_tensor.detach(), tensor._spec)
        tensor._viewed = (shown, shown._spec, data_of, (), {}, start)


def mark_local_copy(tensor: DTensorBase, base: DTensorBase) -> None:
    """Record that ``tensor`` is a moved view of all of ``base``, maybe on this rank alone."""
    spec, shape, dtype = tensor._spec, tensor._local_tensor.shape, tensor.dtype

    def redo(x: Any) -> Any:
        if not isinstance(x, DTensorBase):
            return _as_bytes_of(x, dtype).reshape(spec.shape)
        return wrap_as(type(x), _as_bytes_of(x._local_tensor, dtype).reshape(shape), spec)

    def write(x: DTensorBase, value: DTensorBase) -> None:
        local = x._local_tensor
        local.copy_(_as_bytes_of(value._local_tensor, local.dtype).reshape(local.shape))
        wrote(x, "a view")

    mark(tensor, base, redo, write)


def _as_bytes_of(local: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor, or a copy of its bytes as another dtype; differentiable as torch is."""
    if local.dtype == dtype:
        return local
    local = local.clone(memory_format=torch.contiguous_format)
    if dtype.is_complex and not local.is_complex():
        return torch.view_as_complex(local)
    if local.is_complex() and not dtype.is_complex:
        return torch.view_as_real(local)
    return local.view(dtype)


def is_view(tensor: DTensorBase) -> bool:
    """True if torch counts the tensor as a view, in the graph, of another, not by ``detach()``."""
    base = base_in_graph(tensor)
    while base is not None:
        assert tensor._viewed is not None
        if tensor._viewed[2] is not None:
            return True
        tensor, base = base, base_in_graph(base)
    return False


# -- uses ------------------------------------------------------------------------------------


def check_fresh(tensor: DTensorBase) -> None:
    """Raise if a view may not be used any more. Local.

    Raises:
        RuntimeError: The view had to move elements, and the base was written to since by another
            way than the view, or was given other data or dims; or the view's local tensor was
            written to. Or some rank has no elements of the view, whose base has left the graph:
            torch fails to make the view again there.
    """
    fault = fault_of(tensor)
    if fault:
        raise RuntimeError(f"{tensor!r} {fault}")


def fault_of(tensor: DTensorBase) -> str:
    """The reason why a view may not be used (see :func:`check_fresh`); "" if it may."""
    shown = own_memory(tensor).shows
    if shown is None:
        root = root_in_graph(tensor)
        if root is tensor or root._local_tensor.requires_grad or tensor._view_of is None:
            return ""
        return (
            f"is a view of {root!r}, which has left the graph, and some rank has no element of the "
            f"view: make the view again after requires_grad_(False) or detach_(), or use detach() "
            f"in the place of these"
        )
    base = shown.base
    known = base._spec is shown.base_spec
    if (fault := fault_of(base)) or not known or writes_to(base) != shown.count:
        done = f"was written to since ({memory_of(base).writer or 'its local tensor'})"
        done = fault or (done if known else "has other data or dims now")
        return (
            f"is a view that had to move elements of {base!r}, which {done}: make the view again "
            f"afterwards, or use a clone() of it from before"
        )
    if version_of(shown.local) != shown.own_count:
        return (
            f"is a view that had to move elements of {base!r}, and its local tensor was written to "
            f"(by way of to_local(), or by a backward pass that added to a gradient given in "
            f"another layout): the base does not have these values. Write to the view itself, or "
            f"to a clone() of it"
        )
    return ""


def _note_equal(shown: Snapshot) -> None:
    """Note that a view is up to date with the base."""
    shown.count, shown.own_count = writes_to(shown.base), version_of(shown.local)


def hand_out(tensor: DTensorBase) -> None:
    """Note that the program gets the local tensor, and may write to it uncounted. Local."""
    memory = tensor._memory
    if memory is None or memory.root is None or (is_moved(tensor) and tensor._view_of != "data"):
        return
    local, memory = tensor._local_tensor, memory.root
    if not any(each is local for each in memory.counters):
        forgotten = memory.counters[:-_MOST_COUNTERS]
        memory.counters = (*memory.counters[-_MOST_COUNTERS:], local)
        memory.writes += sum(map(version_of, forgotten)) - version_of(local)


def replace_local(tensor: DTensorBase, local: Tensor) -> None:
    """Set the local tensor of ``tensor`` to ``local``, which has the same memory. Local."""
    shown = None if tensor._memory is None else tensor._memory.shows
    if shown is not None and shown.local is tensor._local_tensor:
        shown.local = local
    tensor._local_tensor = local


# -- writes ----------------------------------------------------------------------------------


def wrote(tensor: DTensorBase, by: str) -> None:
    """Note a write (``by`` in errors); moved elements go to the base, which is collective."""
    memory = memory_of(tensor)
    if tensor._view_of is None or (shown := own_memory(tensor).shows) is None:
        memory.writes += 1
    else:
        _write_back(tensor, shown, tensor._view_of)  # which counts as a write to the base
    memory.writer = by


def _write_back(tensor: DTensorBase, shown: Snapshot, apart: str) -> None:
    """Write the elements of a view, which was written to, to the base. Collective."""
    base, local, graded = shown.base, shown.local, torch.is_grad_enabled() and not apart
    if apart:
        base = base.data if apart == "data" else base.detach()  # type: ignore[assignment]
        local = local.detach()
    with torch.set_grad_enabled(graded):
        shown.write(base, wrap_as(type(tensor), local, shown.spec))
    if graded and shown.local.requires_grad:
        # In torch the view is computed from the base, which was computed from what was written.
        _make_again(tensor)
    else:
        _note_equal(shown)


def _make_again(tensor: DTensorBase) -> bool:
    """Recompute a view from the base's place in the graph; False if its dims changed."""
    assert tensor._viewed is not None
    before, (base, _, func, args, kwargs, _) = own_memory(tensor), tensor._viewed
    if is_moved(base) and own_memory(base) is before:
        if not _make_again(base):
            return False
        made = base if func is None else func(base, *args[1:], **kwargs)
        if made._spec != tensor._spec:
            return False
        tensor._local_tensor, tensor._memory = made._local_tensor, own_memory(base)
        return True
    shown, kept = before.shows, tensor._viewed
    assert shown is not None
    if tensor._spec is not shown.spec:
        return False
    tensor._local_tensor = shown.redo(shown.base)._local_tensor
    mark(tensor, shown.base, shown.redo, shown.write)
    tensor._viewed = kept
    own_memory(tensor).counting_on(before)
    return True


def _write_gathered(redo: Redo) -> Write:
    def write(base: DTensorBase, value: DTensorBase) -> None:
        full = full_in_memory_order(base)
        redo(full).copy_(value.full_tensor())
        base.copy_(replicated_as(base, full))

    return write
