"""The index of ``x[…]``, as torch reads it.

A list of lists is a tuple of them, and arrays of numpy's are tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_INDEXING = frozenset({"__getitem__", "__setitem__"})
#: As many dims as numpy had: a longer list is one index, whatever is in it.
_MOST_DIMS = 32
#: Arrays of other whole numbers count as int64, and of these as masks.
_MASKS = frozenset({torch.bool, torch.uint8})


def with_tensor_indices(name: str, args: Sequence[Any]) -> list[Any] | None:
    """A call's arguments, with the index as a tuple of what rules know; None if it is so already.

    Args:
        name: The operator's.
        args: Its positional arguments.
    """
    if name not in _INDEXING or len(args) < 2:
        return None
    index = args[1]
    if _counts_as_tuple(index):
        return [args[0], tuple(map(_as_tensor, index)), *args[2:]]
    if isinstance(index, tuple):
        if not any(map(_is_array, index)):
            return None
        return [args[0], tuple(map(_as_tensor, index)), *args[2:]]
    return [args[0], _as_tensor(index), *args[2:]] if _is_array(index) else None


def _counts_as_tuple(index: Any) -> bool:
    """True for a sequence that torch reads as a tuple: it holds more than numbers."""
    if isinstance(index, tuple | Tensor | str | bytes) or not isinstance(index, Sequence):
        return False
    return len(index) < _MOST_DIMS and any(
        item is None
        or item is Ellipsis
        or isinstance(item, slice | Tensor | Sequence)
        or _is_array(item)
        for item in index
    )


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _as_tensor(item: Any) -> Any:
    if not _is_array(item):
        return item
    tensor = torch.as_tensor(item)
    return tensor if tensor.dtype in _MASKS else tensor.long()
