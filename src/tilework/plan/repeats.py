"""Results of operators on tensors without memory, made again without asking torch.

torch computes their sizes in Python, which takes most of the time of a plan.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

#: By operator and arguments: sizes, strides and dtypes of results; None for one written in place.
_known: dict[Any, Any] = {}
_MOST = 1 << 16


def key_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Facts that decide the sizes of a result that is new, or the first argument; else None."""
    kind = _kind(func)
    if not kind:
        return None

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.stride(), value.dtype
        if isinstance(value, list | tuple):
            return tuple(map(part, value))
        if isinstance(value, int | float):  # 1, 1.0 and True are equal, and give other dtypes
            return (type(value), value) if kind == "new" else type(value)
        return value

    named = ((name, part(value)) for name, value in kwargs.items())
    return (func, torch.get_default_dtype(), *map(part, args), *named)


@cache
def _kind(func: Any) -> str:
    """Of an operator whose results depend on sizes alone, and of those that compute elementwise,
    on no number either.
    """
    schema = func._schema
    written = [each for each in schema.arguments if each.alias_info is not None]
    if torch.Tag.pointwise in func.tags and written == schema.arguments[:1]:
        return "in place"
    if written or any(each.alias_info is not None for each in schema.returns):
        return ""
    return "elementwise" if torch.Tag.pointwise in func.tags else "new"


def repeated(key: Any, args: Any) -> Any:
    """The result, if such a call was kept; else None."""
    how = _known.get(key)
    if how is None:
        return None
    if how == "first":
        return args[0]
    made = [torch.empty_strided(*size, dtype=dtype, device="meta") for *size, dtype in how]
    return made[0] if len(made) == 1 else tuple(made)


def keep(key: Any, args: Any, result: Any) -> None:
    """Keep how a call makes the result, if that is the first argument or has separate memory."""
    if len(_known) >= _MOST:
        _known.clear()
    if _kind(key[0]) == "in place":
        _known[key] = "first"
        return
    made = result if isinstance(result, tuple) else (result,)
    if all(isinstance(each, Tensor) for each in made):
        how = tuple((each.shape, each.stride(), each.dtype) for each in made)
        again = [_nbytes(*each) for each in how]
        memory = {each.untyped_storage()._cdata for each in made}
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
        whole = [each.untyped_storage().nbytes() for each in made]
        if whole == again and len(memory) == len(made) and not memory & given:
            _known[key] = how


def _nbytes(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of the memory of a new tensor."""
    if 0 in shape:
        return 0
    return dtype.itemsize * (
        1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    )
