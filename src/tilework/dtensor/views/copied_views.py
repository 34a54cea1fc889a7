"""Views that had to move elements: they are copies, but behave as if they shared memory.

In torch ``y = x[0]; y.add_(1)`` changes ``x``. A view that is computed on the local tensor shares
its memory, so that the same holds here. Where elements had to be moved first, the view remembers
its base (``base.View``): writes to the view are written to the base too, and the view is computed
anew when it is used after the base was written to.

The base is remembered by its *anchor*: the same local tensor in the layout that the base had, since
``x.t_()`` changes the layout of ``x`` and not that of its memory. Writes are counted by
``base.Memory``, since torch counts neither those to ``x.data`` nor those in inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.base import (
    DTensorBase,
    DTensorT,
    Memory,
    Redo,
    View,
    ViewedInPlace,
    Write,
    anchor_in,
    base_in_graph,
    base_then,
    data_of,
    memory_of,
    version_of,
    without_anchor,
    wrap_as,
)
from tilework.dtensor.provenance.digests import follow
from tilework.dtensor.torch_counts import is_shown_elsewhere
from tilework.dtensor.views.graph_views import note_view, with_grad_of_nobody
from tilework.dtensor.views.memory_layout import (
    counts_apart,
    full_in_memory_order,
    full_memory,
    in_dtype,
    replicated_as,
    root_in_memory,
    window_of,
    write_memory,
)
from tilework.dtensor.views.ungraded_views import note_ungraded
from tilework.tiled.op_names import canonical_name

#: Marks a tensor as one whose views were handed out, so that it is refreshed before its use.
WATCHED: View = object.__new__(View)

#: A view that torch's graph has for none.
_unsafe_view = torch.ops.aten._unsafe_view.default


def anchor_of(tensor: DTensorT) -> DTensorT:
    """The stand-in for ``tensor`` as the base of copied views, made at the first call.

    It has the same local tensor and layout, and keeps them when ``tensor`` gets others.
    """
    anchor: Any = anchor_in(tensor)
    if (
        anchor is None
        or anchor._local_tensor is not tensor._local_tensor
        or anchor._spec is not tensor._spec
    ):
        befores = without_anchor(tensor)
        anchor = wrap_as(type(tensor), tensor._local_tensor, tensor._spec)
        tensor._stand_ins = (*befores, anchor)
        anchor._made_without_grad = bool(tensor._made_without_grad)
        anchor._viewed = (tensor, tensor._spec, None, (), {})
    anchor._view_of = tensor._view_of
    return anchor  # type: ignore[no-any-return]


def take_over(anchor: DTensorBase, tensor: DTensorBase) -> None:
    """Make ``anchor`` the owner of the memory of ``tensor``, which is about to get other memory.

    Local. Views that were made of ``tensor`` so far are views of the anchor from then on; see
    ``base_then``.
    """
    befores = without_anchor(tensor)
    anchor._viewed, anchor._view_of = tensor._viewed, tensor._view_of
    view = anchor._view_of
    if view is not None and view is not WATCHED:
        view.value = anchor._local_tensor
    anchor._memory, tensor._memory = tensor._memory, None
    befores = tuple(each for each in befores if is_shown_elsewhere(each))
    tensor._stand_ins = (*befores, anchor)


def mark(
    tensor: Tensor,
    base: DTensorBase,
    redo: Redo,
    write: Write | None = None,
    shares: bool = False,
    apart: str = "",
) -> None:
    """Record that ``tensor`` is a view of ``base``, so that writes to either reach both. Local.

    Args:
        tensor: A DTensor.
        base: The tensor that ``tensor`` is a view of.
        redo: As for :class:`~tilework.dtensor.base.View`; ``write``, ``shares`` and ``apart`` too.
    """
    assert isinstance(tensor, DTensorBase)
    if not shares:
        tensor._local_tensor = _counting(tensor._local_tensor)
    anchor = anchor_of(base)
    tensor._view_of = View(anchor, tensor._local_tensor, redo, write, shares, apart)
    tensor._viewed = (anchor, anchor._spec, redo, (), {})
    if tensor._made_without_grad and not apart:
        note_ungraded(tensor, base)


def _counting(copy: Tensor) -> Tensor:
    """The local tensor of a copied view, in a form in which torch counts writes to it alone.

    Inference tensors count no writes. If torch took the local tensor for a view of an intermediate
    tensor, a write would pass through a node whose gradients of gradients torch drops on ranks
    without elements.
    """
    if not copy.is_inference():
        return as_no_view(copy)
    with torch.inference_mode(False):
        return copy.clone()


def as_no_view(local: Tensor) -> Tensor:
    """The local result of a call, as a tensor that torch's graph does not take for a view.

    After a write, hooks of a view of an intermediate tensor would miss the gradients of views of
    the result. On a rank without elements, and only there, the result may be a view of an input,
    and would count writes to the input.
    """
    matters = local.__class__ is Tensor and (local.requires_grad or not local.numel())
    if matters and local._is_view():
        return _unsafe_view(local, local.shape)  # type: ignore[no-any-return]
    return local


#: How views are cut off a graph, from not at all to entirely.
_APARTNESS = ("", "detach", "data")


class ViewOfSeveral:
    """A function that makes one of the views that an operator such as split() returns.

    Args:
        func: The operator, which returns all the views.
        number: The number of the view in the result; None: the result is a single view.
        together: True if torch's graph has one node for all views: then none may be written to.
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
    result: Any, copied: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record which tensor the results of an operator are views of, and return the results.

    Args:
        result: The view, or several, as DTensors.
        copied: True if elements were copied, so that the views must be kept equal to the base.
        func: The operator, which may be called again to remake the views.
        args: The positional arguments. The first (else ``input``) is the base.
        kwargs: The keyword arguments.
    """
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
            note_view(result, base)
        else:
            spec, view = base._spec, base._view_of
            together = canonical_name(func)[0] in TOGETHER
            for i, item in enumerate(result):
                item._viewed = (base, spec, ViewOfSeveral(func, i, together), args, kwargs)
                if view is not None:
                    item._view_of = view
                note_view(item, base)
        return result
    rest = args[1:]

    def redo(x: Any) -> Any:
        return func(x, *rest, **kwargs)

    if isinstance(result, Tensor):
        mark(result, base, redo, shares=not copied)
        if not copied:
            note_view(result, base)  # type: ignore[arg-type]
        return result
    together = canonical_name(func)[0] in TOGETHER
    for i, item in enumerate(result):
        mark(item, base, ViewOfSeveral(redo, i, together), shares=not copied)
    return result


def made_together(views: Sequence[Tensor]) -> None:
    """Note that torch's graph has one node for these views, so none may be written to. Local."""
    for view in views:
        if isinstance(view, DTensorBase) and view._viewed is not None:
            base, spec, func, args, kwargs = view._viewed
            view._viewed = (base, spec, ViewOfSeveral(func, None, True), args, kwargs)


#: What cuts a tensor that shares memory off the graph.
_APART: dict[str, Callable[[Any], Any]] = {"detach": Tensor.detach, "data": data_of}


def same_memory(tensor: DTensorT, local: Tensor, redo: Redo, apart: str = "") -> DTensorT:
    """A new DTensor in the layout of ``tensor``, which shares the memory of ``tensor``.

    Args:
        tensor: The tensor whose memory is shared.
        local: The local tensor of the new DTensor, which shares memory with that of ``tensor``.
        redo: Makes the new DTensor again from ``tensor``.
        apart: As for :class:`~tilework.dtensor.base.View`.
    """
    result = wrap_as(type(tensor), local, tensor._spec)
    follow(result, tensor)
    view = tensor._view_of
    if view is None or view is WATCHED:
        result._view_of = view
        result._viewed = (tensor, tensor._spec, _APART.get(apart), (), {})
    else:
        mark(result, tensor, redo, shares=True, apart=apart)
    return result


def share_memory(tensor: DTensorBase, value: DTensorBase) -> None:
    """Record that ``tensor`` has the memory of ``value``: writes to either reach both. Local."""
    follow(tensor, value)
    view = value._view_of
    if view is None or view is WATCHED:
        tensor._view_of, base = view, _shown_in_full(value)
        tensor._viewed = (base, base._spec, data_of, (), {})
    else:
        mark(tensor, value, data_of, shares=True, apart="data")


def _shown_in_full(tensor: DTensorBase) -> DTensorBase:
    """The last base that a tensor shows in full, by ``data`` and ``detach()``; or the tensor.

    A program that swaps the data of two tensors again and again, as for an average of weights,
    would else make a chain of views that grows with each swap. Local.
    """
    while (viewed := tensor._viewed) is not None:
        base = base_then(tensor) if viewed[2] is data_of or viewed[2] is Tensor.detach else None
        if base is None or base._spec != tensor._spec:
            break
        tensor = base
    return tensor


def mark_local_copy(tensor: DTensorBase, base: DTensorBase) -> None:
    """Record that ``tensor`` is a copied view of all of ``base``, made from local elements.

    The local tensor of ``base`` could not be viewed without a copy. Keeping both equal moves
    nothing between ranks, so that some ranks may have a copy while others share memory.
    """
    spec, shape, dtype = tensor._spec, tensor._local_tensor.shape, tensor.dtype

    def redo(x: Any) -> Any:
        if not isinstance(x, DTensorBase):
            return _as_bytes_of(x, dtype).reshape(spec.shape)
        return wrap_as(type(x), _as_bytes_of(x._local_tensor, dtype).reshape(shape), spec)

    def write(x: DTensorBase, value: DTensorBase) -> None:
        local = x._local_tensor
        local.copy_(_as_bytes_of(value._local_tensor, local.dtype).reshape(local.shape))
        wrote(x)

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


def refresh(tensor: DTensorBase) -> None:
    """Compute a copied view again if the base was written to since. Collective in that case."""
    _write_back_handed_out(memory_of(tensor))
    view = tensor._view_of
    if view is None or view is WATCHED:
        return
    base = view.base
    if base._view_of is not None:
        refresh(base)
    if view.is_stale:
        _compute_anew(tensor, view)
    elif view.joined:
        if not view.base_requires_grad:
            view.value._base.requires_grad_(False)  # type: ignore[union-attr]
            view.joined = view.required = False
    elif view.base_joined_graph and not view.value.requires_grad:
        view.value = _joined(view.value)
        view.joined = view.required = True
    if tensor._local_tensor is not view.value:
        tensor._local_tensor = view.value


def refresh_in_graph(tensor: DTensorBase) -> None:
    """Check and :func:`refresh` a view that an operator is about to take as an argument.

    Raises:
        RuntimeError: Gradients are recorded, and the base was given other data (``x.data = y``): in
            torch the view may have another place in the graph.
    """
    if torch.is_grad_enabled() and tensor._local_tensor.requires_grad:
        _check_left(tensor)
    refresh(tensor)


def _check_left(view: DTensorBase) -> None:
    base: DTensorBase | None = view
    while base is not None and base._viewed is not None and base_in_graph(base) is not None:
        base = base_then(base)
        if base is not None and base._places is not None and base._places.refuses:
            raise RuntimeError(
                f"{view!r} is a view of a tensor that was given other data since (x.data = y): "
                f"gradients of the view would belong to the new data, whose elements the view does "
                f"not show. Make the view again after x.data = y, or use view.detach()"
            )


def _compute_anew(tensor: DTensorBase, view: View) -> None:
    """Set a view to the elements that the base holds now, at the same place in the graph.

    Collective.
    """
    base, memory = view.base, memory_of(tensor)
    kept = view.value.requires_grad and view.only_values_changed
    with torch.inference_mode(False), torch.set_grad_enabled(view.graded):
        anew = view.redo(base)._local_tensor
        anew = anew if view.shares else _counting(anew)
    in_graph = view.apart or (anew.requires_grad and view.base_requires_grad)
    if view.value.requires_grad and not in_graph:
        anew = with_grad_of_nobody(anew)
    if kept:
        view.value.data = anew.detach()
    elif _has_own_graph(view):
        view.value.data = anew.detach()
        torch.autograd.graph.increment_version(view.value)
        _note_own_write(view)
        if memory.handed_out is not None:  # local tensors may count that as theirs
            with _renewing(memory):
                pass
    else:
        go_on_keeping_grad(view.value, anew)
        view.value, view.joined = anew, False
    view.note()


def replace_local(tensor: DTensorBase, local: Tensor) -> None:
    """Set the local tensor of ``tensor`` to ``local``, which has the same memory. Local."""
    view, tensor._local_tensor = tensor._view_of, local
    if view is not None and view is not WATCHED:
        view.value = local


def _joined(value: Tensor) -> Tensor:
    """The new local tensor of a copied view whose base requires a gradient only since then.

    Nothing was written to the base. As torch's view in this case, the result requires a gradient,
    is a leaf, and never gets a gradient.
    """
    base = value.detach()
    with torch.inference_mode(False), torch.enable_grad():
        shown = base.view_as(base)
    base.requires_grad_()
    return shown


def go_on_keeping_grad(before: Tensor, now: Tensor) -> None:
    """If local tensor ``before`` retains a gradient, let ``now``, which replaces it, do the same.

    The gradient so far is handed over. Local.
    """
    if before.retains_grad and now.requires_grad and not now.is_leaf:
        grad = before.grad
        now.retain_grad()
        if grad is None or grad.shape == now.shape:
            now.grad = grad


def _note_own_write(view: View) -> None:
    """Mark a view, and the views among the bases, as up to date.

    Computing the view again counts as a write, and they may share the count of writes.

    Args:
        view: The view, which was computed again from the base.
    """
    its: View | None = view
    while its is not None and its is not WATCHED:
        its.note()
        its = its.base._view_of


#: Nodes of tensors that were given other data, and of results of a user's own Function.
_OWN_NODES = ("_RelaidBackward", "_LinkBackward")


def _has_own_graph(view: View) -> bool:
    """True if a view has a place in the graph that it did not get from the base.

    It keeps this place when it is computed again. Such a view requires a gradient, and is a leaf,
    was given other data, came from a user's Function, or is cut off the base's graph.
    """
    value = view.value
    if not value.requires_grad or view.joined:
        return False
    if view.apart:
        return True
    try:
        return value.is_leaf or value.grad_fn.name() in _OWN_NODES  # type: ignore[union-attr]
    except RuntimeError:  # a view that was made without gradients, of what has them since
        return False


def is_view(tensor: DTensorBase) -> bool:
    """True if torch would count the tensor as a view, in the graph, of a part or form of another.

    Results of ``detach()`` and tensors whose dims were changed in place do not count.
    """
    base = base_in_graph(tensor)
    while base is not None:
        assert tensor._viewed is not None
        if tensor._viewed[2] is not None and tensor._viewed.__class__ is not ViewedInPlace:
            return True
        tensor, base = base, base_in_graph(base)
    return False


def wrote(tensor: DTensorBase) -> None:
    """Note that ``tensor`` was written to. If it is a view, write the new elements to the base.

    Collective for a copied view.
    """
    memory = memory_of(tensor)
    memory.writes += 1
    if memory.handed_out is not None:
        # It may count this write as its own, while it shows what was there before.
        with _renewing(memory):
            write_back(tensor)
    elif tensor._view_of is not None:
        write_back(tensor)


def write_back(tensor: DTensorBase, apart: str = "") -> None:
    """Write the elements of a view, which was written to, to the base. Collective.

    Args:
        tensor: The view.
        apart: How the tensor that was written to is cut off the view's graph: "" (not at all),
            "detach" or "data".
    """
    view = tensor._view_of
    if view is None or view is WATCHED:
        return
    apart = max(apart, view.apart, key=_APARTNESS.index)
    base = view.base
    shown = base._local_tensor
    if base._spec.overlaps:
        with torch.no_grad() if apart else nullcontext():
            full = wrap_as(type(tensor), tensor._local_tensor, tensor._spec).full_tensor()
        write_overlapping(tensor, lambda shown: _copy_once(shown, full), apart)
    elif view.shares:
        if base._view_of is not None:
            write_back(base, apart)
    else:
        local = tensor._local_tensor
        if apart:
            base = _apart(base, apart)
            local = local.detach()
        # By itself, for it would be computed anew as what it was written to.
        value = wrap_as(type(tensor), local, tensor._spec)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not apart):
            (view.write or _write_gathered(view.redo))(base, value)
    in_graph = torch.is_grad_enabled() and not apart and tensor._local_tensor.requires_grad
    # False where the base was computed anew meanwhile, or its graph was, or it has left the graph:
    # the view is and does, too.
    kept = not (view.shares and base._local_tensor is not shown)
    kept = kept and (bool(view.apart) or not view.required or view.base_requires_grad)
    # A write that torch counts gives the view another place in the graph.
    kept = kept and (bool(view.apart) or apart == "data" or not tensor._local_tensor.requires_grad)
    if tensor._local_tensor is view.value and kept and not in_graph:
        view.note()


def _apart(base: DTensorBase, apart: str) -> DTensorBase:
    return base.data if apart == "data" else base.detach()  # type: ignore[return-value]


def shown_of(tensor: DTensorBase) -> tuple[DTensorBase, str]:
    """The nearest base of a view that does not overlap, and is no view of an overlapping tensor.

    A tensor overlaps if elements share a place in memory. The view itself may be the result.

    Returns:
        The base; and how the view is cut off the base's graph: "" (not at all), "detach" or "data".
    """
    base, apart, found = tensor, "", (tensor, "")
    while (viewed := base._viewed) is not None:
        view = base._view_of
        if view is not None and view is not WATCHED:
            apart = max(apart, view.apart, key=_APARTNESS.index)
        elif viewed[2] is Tensor.detach or viewed[2] is data_of:
            apart = "data" if viewed[2] is data_of else apart or "detach"
        overlaps, then = base._spec.overlaps, base_then(base)
        if then is None:
            break
        base = then
        if overlaps:
            found = base, apart
    return found


def write_overlapping(tensor: DTensorBase, write: Callable[[Tensor], Any], apart: str = "") -> None:
    """Write to a view whose elements, or whose base's, share places in memory. Collective.

    Args:
        tensor: The view.
        write: Called with the full view, a plain tensor whose elements share places likewise.
        apart: As for :func:`write_back`.
    """
    base, its = shown_of(tensor)
    apart = max(apart, its, key=_APARTNESS.index)
    base = _apart(base, apart) if apart else root_in_memory(base)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not apart):
        memory = full_memory(base)
        memory = memory.clone() if memory.requires_grad else memory
        write(window_of(tensor).of(in_dtype(memory, tensor.dtype)))
        write_memory(base, memory)


def _write_gathered(redo: Redo) -> Write:
    def write(base: DTensorBase, value: DTensorBase) -> None:
        full = full_in_memory_order(base)
        redo(full).copy_(value.full_tensor())
        base.copy_(replicated_as(base, full))

    return write


# -- local tensors that were handed out ------------------------------------------------------


def hand_out(tensor: DTensorBase) -> None:
    """Note that the program gets the local tensor of ``tensor``, and may write to it. Local.

    Such writes are then found before the memory is used. Noted only for copied views, and for
    tensors whose writes torch counts apart from those of the base; others need no note.
    """
    view = tensor._view_of
    if view is WATCHED:
        view = None
    if view is None and not counts_apart(tensor):
        return
    memory, local = memory_of(tensor), tensor._local_tensor
    known = memory.handed_out or []
    if any(held._local_tensor is local for held, *_ in known):
        return

    held = wrap_as(type(tensor), local, tensor._spec)
    held._viewed = tensor._viewed and (*tensor._viewed,)
    memory.handed_out = [*known, _noted(held)][-_MOST_HANDED_OUT:]
    if view is None:
        return
    redo = view.redo

    def write(base: DTensorBase, value: DTensorBase) -> None:
        redo(base).copy_(value)

    kept = write if view.shares else view.write
    held._view_of = View(view.base, local, redo, kept, apart=view.apart)
    base: DTensorBase | None = tensor
    while base is not None:
        if base._view_of is None:
            base._view_of = WATCHED
        base = None if base._viewed is None else base_then(base)


def forget_handed_out(tensor: DTensorBase) -> None:
    """Drop the notes about the local tensor of ``tensor``, which is about to get other memory.

    They would keep the base, and a program that gives a tensor other data in every step would keep
    the memory of every step. Collective for a copied view whose local tensor was written to.
    """
    memory, local = memory_of(tensor), tensor._local_tensor
    if memory.handed_out is not None:
        _write_back_handed_out(memory)
        kept = [entry for entry in memory.handed_out if entry[0]._local_tensor is not local]
        memory.handed_out = kept or None
    if memory.content is not None and memory.content[0] is local:
        memory.content = None


#: Of more local tensors of one tensor's views the oldest are forgotten.
_MOST_HANDED_OUT = 64


#: A view whose local tensor was handed out, the number of writes to that, and its node then.
_HandedOut = tuple[DTensorBase, int, Any]


def _noted(held: DTensorBase) -> _HandedOut:
    return held, version_of(held._local_tensor), _node_of(held._local_tensor)


def _node_of(local: Tensor) -> Any:
    """The autograd node that changes if a write to ``local`` is recorded in the graph.

    The node of ``local``, or of the base if ``local`` is a view for torch.
    """
    return (local if local._base is None else local._base).grad_fn


def _write_back_handed_out(memory: Memory) -> None:
    """Write to the bases of views what the program wrote to local tensors that it was given."""
    handed_out = memory.handed_out or ()
    written = [entry for entry in handed_out if version_of(entry[0]._local_tensor) != entry[1]]
    if not written:
        return
    with _renewing(memory):  # all of them, before one is given what another has shown so far
        for held, _, grad_fn in written:
            # In the graph, if the write was.
            with torch.set_grad_enabled(_node_of(held._local_tensor) is not grad_fn):
                wrote(held)


@contextmanager
def _renewing(memory: Memory) -> Iterator[None]:
    """A context, after which local tensors that were handed out have what their bases hold then.

    Collective. Within the block, nobody looks for writes to these local tensors.

    Args:
        memory: The memory that the local tensors show.
    """
    entries, memory.handed_out = memory.handed_out, None
    assert entries is not None
    try:
        yield
        _renew(entries)
        entries[:] = [_noted(held) for held, *_ in entries]
    finally:
        memory.handed_out = entries


def _renew(entries: Sequence[_HandedOut]) -> None:
    """Copy to local tensors that were handed out what their bases hold now, if it has changed."""
    for held, *_ in entries:
        view = held._view_of
        if view is None:
            continue
        if view.base._view_of is not None:
            refresh(view.base)
        if view.is_stale:
            with torch.no_grad():
                _copy_once(held._local_tensor.data, view.redo(view.base.detach())._local_tensor)
            view.note()


def _copy_once(target: Tensor, value: Tensor) -> None:
    """Copy ``value`` to ``target``. If ``target`` is expanded, write each place in memory once."""
    for dim, stride in enumerate(target.stride()):
        if not stride and target.shape[dim] > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)
