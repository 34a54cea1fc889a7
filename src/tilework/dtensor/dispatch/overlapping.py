"""Writes to tensors of which several elements are one in memory, as expanded and unfolded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase, memory_of
from tilework.dtensor.propagation.pytree import Args, Kwargs, tensors_in, with_tensors
from tilework.dtensor.propagation.strides import is_dense
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.provenance.meaning import moving
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import copied_views
from tilework.dtensor.views.memory_layout import offset_of
from tilework.tiled.op_table import entry_of

#: torch writes one number, or by index, where elements repeat; else it refuses.
_WRITE_REPEATED = frozenset({"fill", "zero", "masked_fill", "index_fill", "put_at", "index_put"})


def check_writable(name: str, target: Tensor) -> None:
    """Raise, as torch does, if an operator may not write to a tensor. Local.

    One whose elements repeat, on every rank: of local tensors only those of some ranks may have
    several elements. And a view made without gradients, where they are recorded: those of its base
    would lack what is written.
    """
    if not isinstance(target, DTensor):
        return
    if target._viewed is not None and torch.is_grad_enabled() and lacks_a_graph(target):
        raise RuntimeError(
            f"{name} would change a view that was made under no_grad() of a tensor that requires "
            f"a gradient, which would lack the change: make the view where gradients are "
            f"recorded, or change it under no_grad(), too"
        )
    if target._spec.repeats and name not in _WRITE_REPEATED:
        raise RuntimeError(
            f"{name} writes to a tensor of shape {list(target.shape)} and strides "
            f"{list(target._spec.strides)}: more than one element of it refers to a single place "
            f"in memory, as expand() makes them: clone() it first"
        )


def lacks_a_graph(view: DTensorBase) -> bool:
    """True if the graph of what it is a view of would not see a write to it."""
    made_without_grad = False
    while (base := copied_views.base_in_graph(view)) is not None:
        assert view._viewed is not None
        if view._viewed[2] is not None:  # else it is the same tensor, before it was changed
            made_without_grad = made_without_grad or view._made_without_grad
        if made_without_grad and base.requires_grad:
            return True
        view = base
    return False


def check_apart(name: str, target: DTensor, other: DTensor) -> None:
    """Raise, as torch does, if an elementwise operator reads some of what it writes. Local."""
    if memory_of(target) is not memory_of(other):
        return
    if name != "copy" and not entry_of(name).is_elementwise:
        return
    if not (_is_dense(target) and _is_dense(other)) or target.dtype != other.dtype:
        return
    start, its_start = offset_of(target), offset_of(other)
    stop, its_stop = start + target.numel(), its_start + other.numel()
    if (start, stop) == (its_start, its_stop) and _long_dims(target) == _long_dims(other):
        return  # the same elements in the same order
    if max(start, its_start) < min(stop, its_stop):
        raise RuntimeError(
            f"{name} would read some of the memory that it writes to, by way of another view of "
            f"it: clone() the one that is read first"
        )


def _long_dims(tensor: DTensor) -> list[tuple[int, int]]:
    """Size and stride of each dim of several elements."""
    spec = tensor._spec
    return [dim for dim in zip(spec.shape, spec.strides, strict=True) if dim[0] > 1]


def _is_dense(tensor: DTensor) -> bool:
    return is_dense(tensor._spec.shape, tensor._spec.strides)


def is_window(name: str, target: Any, others: Sequence[Any] = ()) -> bool:
    """True if an operator is to write to a view of which several elements are one in memory.

    Its local tensor does not show which, where they had to move or are partial.

    Args:
        name: The operator.
        target: Written to.
        others: The operator's other arguments.

    Raises:
        RuntimeError: The operator may not write to it.
    """
    if target.__class__ is not DTensor:
        return False
    for other in others:
        if other.__class__ is not DTensor or other is target:
            continue
        if target._viewed is not None or other._viewed is not None:
            check_apart(name, target, other)
    overlaps = target._spec.overlaps
    if overlaps or target._viewed is not None:
        check_writable(name, target)
    return overlaps and target._viewed is not None


def write_in_memory(name: str, func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    """The first argument, a view, that an operator has written to. Collective.

    It is written where torch would write, in the full memory, in torch's order.
    """
    target: DTensor = args[0]
    with moving(digest_of(target), name):
        tensors = tensors_in([*args[1:], *kwargs.values()])
        full = [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]
        its_args, its_kwargs = with_tensors(args[1:], kwargs, iter(full))
        copied_views.write_overlapping(target, lambda shown: func(shown, *its_args, **its_kwargs))
    return target
