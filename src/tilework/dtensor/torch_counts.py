"""Counts that torch keeps private. No other module calls the private functions for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase

_base: Any = torch._C.TensorBase
_storage_holders: Any = torch._C._storage_Use_Count
#: The count of a storage's holders if a single tensor has it: the tensor, and the asking object.
_ALONE = 2
#: The number of holders of a tensor in C++: the Python object, and nodes of graphs.
holders: Callable[[Tensor], int] = _base._use_count
#: The number that autograd gives the next node of this thread.
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
#: torch's answer for nodes without a number: leaves, and operators without a derivative.
_NO_NUMBER = 2**64 - 1


def number_of(node: Any) -> int:
    """Autograd's number of a node, higher for later nodes; 0 for a node without a number."""
    number = 0 if node is None else int(node._sequence_nr())
    return 0 if number == _NO_NUMBER else number


def is_shown_elsewhere(tensor: DTensorBase) -> bool:
    """True if another tensor shares the memory of a tensor's local tensor. Local."""
    storage: Any = tensor._local_tensor.untyped_storage()
    return not storage.nbytes() or _storage_holders(storage._cdata) > _ALONE


def living(known: Iterable[ref[DTensorBase]] | None) -> list[DTensorBase]:
    """The tensors of weak references that still live, even those that only C++ holds."""
    tensors = [tensor for each in known or () if (tensor := each()) is not None]
    for tensor in tensors:
        tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensors


def show_as(tensor: DTensorBase, shown: DTensorBase) -> None:
    """Give the wrapper of ``tensor``, which torch's C++ code reads, the shape of ``shown``."""
    with torch._C.DisableTorchFunctionSubclass():
        _base.data.__set__(tensor, shown)
