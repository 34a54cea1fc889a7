"""Writes to tensors whose elements share places in memory, such as expanded or unfolded tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import changed_in_place
from tilework.dtensor.base import DTensorBase, ViewedInPlace, base_in_graph, owner_of
from tilework.dtensor.propagation.pytree import Args, Kwargs, tensors_in, with_tensors
from tilework.dtensor.propagation.strides import is_dense
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.provenance.meaning import moving
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import copied_views
from tilework.dtensor.views.memory_layout import Window, window_of
from tilework.dtensor.views.places import count_write
from tilework.tiled.op_table import entry_of

#: torch writes one number, by index, or one triangle where elements repeat; else it refuses.
_WRITE_REPEATED = frozenset(
    {
        *("fill", "zero", "masked_fill", "index_fill", "put_at", "index_put"),
        *("fill_diagonal", "tril", "triu"),
    }
)


def check_writable(name: str, target: Tensor, others: Sequence[Any] = ()) -> None:
    """Raise, as torch does, if an operator may not write to a tensor. Local.

    A tensor whose elements repeat is refused on every rank, since only some ranks may have several
    elements in the local tensor. If gradients are recorded, some views are refused, too: views made
    without gradients or together with others by one operator, which the base's graph does not see.

    Args:
        name: The operator.
        target: Written to.
        others: The operator's other arguments.
    """
    if not isinstance(target, DTensor):
        return
    check_in_graph(name, target, others)
    if target._spec.repeats and name not in _WRITE_REPEATED:
        raise RuntimeError(
            f"{name} writes to a tensor of shape {list(target.shape)} and strides "
            f"{list(target._spec.strides)}: more than one element of it refers to a single place "
            f"in memory, as expand() makes them: clone() it first"
        )


def check_in_graph(name: str, target: DTensor, others: Sequence[Any] = ()) -> None:
    """Raise, as torch does, if the graph would not see an operator's change of a view. Local.

    Args:
        name: The operator.
        target: What it changes.
        others: The operator's other arguments.
    """
    if target._viewed is None or not torch.is_grad_enabled():
        return
    made = _out_of_graph(target, others)
    if made:
        raise RuntimeError(
            f"{name} cannot change a view that was made {made} while gradients are recorded: the "
            f"gradients would miss the change. Make the change under no_grad(), or change a view "
            f"that was made by another operator"
        )


def _out_of_graph(view: DTensorBase, others: Sequence[Any]) -> str:
    """The way a view was made, if the graph of the base would therefore not see a write to it.

    "" if the graph sees the write, or if neither the base nor an operand requires a gradient.
    """
    made, graded = "", False
    target = view
    while (base := base_in_graph(view)) is not None:
        func = None if view._viewed is None else view._viewed[2]
        if not (
            func is None or view._viewed.__class__ is ViewedInPlace or made
        ):  # else the same, before it was changed
            if view._made_without_grad:
                made = "under no_grad()"
            elif func.__class__ is copied_views.ViewOfSeveral and func.together:
                made = "together with others, as split() and unbind() do"
            graded = bool(made) and _require_grad((target, *others))
        if made and (graded or base.requires_grad):
            return made
        view = base
    if target._local_tensor.requires_grad and view._local_tensor.is_leaf:
        changed_in_place.check_no_leaf(target)  # of a leaf, which may have left the graph since
    return ""


def _require_grad(args: Sequence[Any]) -> bool:
    return any(
        arg._local_tensor.requires_grad if arg.__class__ is DTensor else arg.requires_grad
        for arg in args
        if isinstance(arg, Tensor)
    )


#: Operators that are not elementwise, and read nothing of what they write to.
_READ_APART = frozenset(
    f"{name}{kind}"
    for name, kinds in {
        "index_": ("copy", "add", "reduce"),
        "scatter": ("", "_add", "_reduce"),
        "cat": ("",),
        "stack": ("",),
    }.items()
    for kind in kinds
)
#: Not elementwise either, and their ``out=`` may be nothing that they read.
_OUT_APART = frozenset(
    {
        *("aminmax", "diff", "gather", "index_select", "kthvalue", "masked_select", "mode", "take"),
        *("take_along_dim", "topk"),
    }
)
#: Or all of it, or nothing. Of maxima, those along a dim: torch has two results then.
_OUT_ALIKE = frozenset({"cumprod", "cumsum", "logcumsumexp", "max", "min", "renorm", "sort"})
#: Operators whose tensors without dims are numbers, read before anything is written.
_READ_NUMBERS = frozenset({"fill", "masked_fill", "index_fill"})


def check_apart(name: str, target: DTensor, other: DTensor, out: bool = False) -> None:
    """Raise, as torch does, if an operator reads some of the memory that it writes. Local.

    Args:
        name: The operator.
        target: What it writes.
        other: What it reads.
        out: True if the target is a result that was passed as ``out=``.
    """
    if owner_of(target) is not owner_of(other) or not (target.numel() and other.numel()):
        return
    if name in _READ_NUMBERS and not other.dim():
        return
    entry = entry_of(name)
    apart = name in _READ_APART or (out and name in _OUT_APART)
    alike = name == "copy" or entry.is_elementwise or (out and name in _OUT_ALIKE)
    if (apart or alike) and target.dtype == other.dtype:
        check_windows(name, window_of(target), window_of(other), not apart)


def check_windows(name: str, target: Window, other: Window, same: bool = True) -> None:
    """Raise, as torch does, if two windows of one memory overlap. Local.

    Args:
        name: The operator.
        target: The window that is written.
        other: The window that is read.
        same: True if both windows may be the same elements in the same order.
    """
    if not (is_dense(target.size, target.strides) and is_dense(other.size, other.strides)):
        return
    start, its_start = target.offset, other.offset
    stop, its_stop = start + math.prod(target.size), its_start + math.prod(other.size)
    if same and (start, stop, target.strides) == (its_start, its_stop, other.strides):
        return
    if max(start, its_start) < min(stop, its_stop):
        raise RuntimeError(
            f"{name} would read some of the memory that it writes to, by way of another view of "
            f"it: clone() the one that is read first"
        )


def is_window(name: str, target: Any, others: Sequence[Any] = ()) -> bool:
    """Check and count a write; True if the target is a view whose elements share places in memory.

    The caller then writes with :func:`write_in_memory`: the local tensor does not show which
    elements are the same if elements had to move or are partial.

    Args:
        name: The operator.
        target: Written to.
        others: The operator's other arguments.

    Raises:
        RuntimeError: The operator may not write to it.
    """
    if target.__class__ is not DTensor:
        return False
    count_write(target)
    for other in others:
        if other.__class__ is not DTensor or other is target:
            continue
        if target._viewed is not None or other._viewed is not None:
            check_apart(name, target, other)
    overlaps = target._spec.overlaps
    if overlaps or target._viewed is not None:
        check_writable(name, target, others)
    return overlaps and target._viewed is not None


def write_in_memory(name: str, func: Any, target: DTensor, args: Args, kwargs: Kwargs) -> DTensor:
    """Run an operator that writes to a view, and return the view. Collective.

    The operator writes to the full memory, in torch's order: elements of the view share places.

    Args:
        name: The operator.
        func: The operator's function, which writes to the view, in place or by ``out=``.
        target: The view, among the arguments.
        args: The arguments.
        kwargs: Those by name.
    """
    window = window_of(target)
    with moving(digest_of(target), name):
        tensors = [
            None
            if _is_there(x, target, window)
            else x.full_tensor()
            if isinstance(x, DTensor)
            else x
            for x in tensors_in([*args, *kwargs.values()])
        ]

        def write(shown: Tensor) -> Any:
            values = iter([shown if x is None else x for x in tensors])
            its_args, its_kwargs = with_tensors(args, kwargs, values)
            return func(*its_args, **its_kwargs)

        copied_views.write_overlapping(target, write)
    return target


def reads_itself(target: DTensor, others: Sequence[Any]) -> bool:
    """True if an operator also reads the view that it writes, whose elements share places. Local.

    Args:
        target: The view that is written.
        others: The tensors that are read.
    """
    if not target._spec.overlaps or target._viewed is None:
        return False
    window = window_of(target)
    return any(_is_there(other, target, window) for other in others)


def _is_there(tensor: Any, target: DTensor, window: Window) -> bool:
    """True if a tensor is ``target``, or another view of the same elements of the same memory."""
    return tensor is target or (
        tensor.__class__ is DTensor
        and owner_of(tensor) is owner_of(target)
        and tensor.dtype == target.dtype
        and window_of(tensor) == window
    )
