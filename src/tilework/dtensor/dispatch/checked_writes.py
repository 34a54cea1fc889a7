"""Checks before a write: what torch refuses, and tensors whose elements share places in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd.gradients import check_no_leaf
from tilework.dtensor.base import DTensorBase, base_in_graph, memory_of, own_memory
from tilework.dtensor.propagation.strides import is_dense
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views.moved_views import ViewOfSeveral, Window, window_of
from tilework.dtensor.views.places import count_write
from tilework.tiled import entry_of


def check_write(name: str, target: Any, others: Sequence[Any] = ()) -> None:
    """Count a write, and raise before anything is written if it is refused. Local."""
    if target.__class__ is not DTensor:
        return
    count_write(target)
    for other in others:
        if other.__class__ is not DTensor or other is target:
            continue
        if target._viewed is not None or other._viewed is not None:
            check_apart(name, target, other)
    if target._viewed is not None or target._spec.overlaps:
        check_writable(name, target, others)


def check_writable(name: str, target: Tensor, others: Sequence[Any] = ()) -> None:
    """Raise on all ranks if a tensor may not be written: shared places, views in the graph."""
    if not isinstance(target, DTensor):
        return
    check_in_graph(name, target, others)
    shown: DTensorBase | None = target
    while shown is not None:
        snapshot = own_memory(shown).shows
        if shown._spec.overlaps or (snapshot is not None and snapshot.spec.overlaps):
            raise RuntimeError(
                f"{name} writes to a tensor of shape {list(shown.shape)} and strides "
                f"{list(shown._spec.strides)}: more than one element of it refers to a single "
                f"place in memory, as expand() and unfold() make them: clone() it first"
            )
        shown = None if snapshot is None else snapshot.base


def check_in_graph(name: str, target: DTensor, others: Sequence[Any] = ()) -> None:
    """Raise, as torch does, if the graph would not see an operator's change of a view. Local."""
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
    """The way a view was made, if the base's graph would miss a write to it; else ""."""
    made, graded = "", False
    target = view
    while (base := base_in_graph(view)) is not None:
        func = None if view._viewed is None else view._viewed[2]
        if func is not None and not made:
            if view._made_without_grad:
                made = "under no_grad()"
            elif func.__class__ is ViewOfSeveral and func.together:
                made = "together with others, as split() and unbind() do"
            graded = bool(made) and _require_grad((target, *others))
        if made and (graded or base.requires_grad):
            return made
        view = base
    if target._local_tensor.requires_grad and view._local_tensor.is_leaf:
        check_no_leaf(target)  # of a leaf, which may have left the graph since
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
    """Raise, as torch does, if an operator reads memory that it writes. Local."""
    if memory_of(target) is not memory_of(other) or not (target.numel() and other.numel()):
        return
    if name in _READ_NUMBERS and not other.dim():
        return
    entry = entry_of(name)
    apart = name in _READ_APART or (out and name in _OUT_APART)
    alike = name == "copy" or entry.is_elementwise or (out and name in _OUT_ALIKE)
    if (apart or alike) and target.dtype == other.dtype:
        check_windows(name, window_of(target), window_of(other), not apart)


def check_windows(name: str, target: Window, other: Window, same: bool = True) -> None:
    """Raise, as torch does, if two windows of one memory overlap. Local."""
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
