"""Counts of torch's that only private functions tell: these are called nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase

_base: Any = torch._C.TensorBase
_storage_holders: Any = torch._C._storage_Use_Count
#: The holders of a storage that one tensor has: that, and the object that asks.
_ALONE = 2
#: How many hold a tensor in C++: its object in Python, and nodes of graphs.
holders: Callable[[Tensor], int] = _base._use_count
#: The number that autograd gives the next node of this thread.
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
#: That of nodes without one: a leaf's, and of operators without a derivative.
_NO_NUMBER = 2**64 - 1


def number_of(node: Any) -> int:
    """Autograd's number of a node: later nodes have higher ones; 0: it has none."""
    number = 0 if node is None else int(node._sequence_nr())
    return 0 if number == _NO_NUMBER else number


def is_shown_elsewhere(local: Tensor) -> bool:
    """True if another tensor than this one may have its memory. Local.

    The ranks agree wherever a DTensor has: its local tensors are of that memory on all of them.
    """
    storage: Any = local.untyped_storage()
    return not storage.nbytes() or _storage_holders(storage._cdata) > _ALONE


def living(known: Iterable[ref[DTensorBase]] | None) -> list[DTensorBase]:
    """The tensors of weak references that live, be it in C++ alone."""
    tensors = [tensor for each in known or () if (tensor := each()) is not None]
    for tensor in tensors:
        tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensors


def show_as(tensor: DTensorBase, shown: DTensorBase) -> None:
    """Have C++ see the shape of another tensor in the place of one's own."""
    with torch._C.DisableTorchFunctionSubclass():
        _base.data.__set__(tensor, shown)
