"""The normal form of a call's arguments, as torch's schemas say.

torch's parser accepts more than the schemas say: names from numpy and from aliases; for numbers
also tensors without dims and numpy's integers, as ``torch.div(a, b, rounding_mode="floor")`` gives
them for sizes; lists of lists and arrays as the index of ``x[…]``. Rules expect the form of the
schemas, and a sharding must not be cached for numbers that the cache key does not contain.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Integral
from operator import index
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.op_table import canonical_name, schemas_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: Aliases that torch's parser accepts for names in a signature.
_OTHERS = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}
#: The kinds of arguments, by their types in schemas.
_KINDS = {
    **dict.fromkeys(("int", "SymInt"), "whole"),
    **dict.fromkeys(("List[int]", "List[SymInt]"), "list"),
    **dict.fromkeys(("float", "number"), "real"),
    **dict.fromkeys(("Tensor", "List[Tensor]"), "tensor"),
}
#: The key of all positional arguments from the second on, where torch accepts a list's items.
_SPREAD = "*"
_INDEXING = frozenset({"__getitem__", "__setitem__"})
#: The former maximum of dims in numpy: a longer list is one index, whatever its items.
_MOST_DIMS = 32
#: Arrays of other integers count as int64, arrays of these types as masks.
_MASKS = frozenset({torch.bool, torch.uint8})


# -- names ------------------------------------------------------------------------------------


def torch_arguments(func: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of a call, named by torch's own names, the first tensor by position."""
    if not isinstance(func, BuiltinFunctionType | MethodDescriptorType):  # torch's parser is C++
        return args, kwargs
    if args and _OTHERS.keys().isdisjoint(kwargs):
        return args, kwargs
    own, first = _own_names(func.__name__, canonical_name(func)[0])
    kwargs = {
        name if name in own else _OTHERS.get(name, name): value for name, value in kwargs.items()
    }
    if not args and first in kwargs:
        args = (kwargs.pop(first),)
    return args, kwargs


@cache
def _own_names(*names: str) -> tuple[frozenset[str], str]:
    # Schemas without tensors are TorchScript's own.
    schemas = [
        schema
        for name in names
        for schema in schemas_of(name)
        if any("Tensor" in str(each.type) for each in schema.arguments)
    ]
    every = frozenset(each.name for schema in schemas for each in schema.arguments)
    firsts = {schema.arguments[0].name for schema in schemas}
    first = firsts.pop() if len(firsts) == 1 else ""
    return every, "input" if first == "self" else first


# -- numbers and indices ----------------------------------------------------------------------


def normalized(name: str, args: Args, kwargs: Kwargs) -> tuple[list[Any], Kwargs] | None:
    """The arguments with numbers and indices in the rules' form; None if they already are.

    Collective where a DTensor stands for a number, and the value lies on other ranks.
    """
    read, named = list(args), kwargs
    if any(map(_may_be_number, (*args, *kwargs.values()))):
        readers = _readers(name)
        sizes = len(args) > 1 and not isinstance(args[1], list | tuple)
        spread = readers.get(_SPREAD) if sizes else None
        read = [
            (spread if spread and at else readers.get(at, _as_it_is))(arg)
            for at, arg in enumerate(args)
        ]
        named = {key: readers.get(key, _as_it_is)(arg) for key, arg in kwargs.items()}
    if name in _INDEXING and len(args) > 1:
        read[1] = _index(read[1])
    is_changed = any(a is not b for a, b in zip(read, args, strict=True)) or any(
        named[key] is not arg for key, arg in kwargs.items()
    )
    return (read, named) if is_changed else None


@cache
def _readers(name: str) -> dict[int | str, Callable[[Any], Any]]:
    """Functions that read the numbers among an operator's arguments, by position and by name."""
    takes: dict[int | str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for schema in schemas_of(name):
        kinds = [_kind(argument) for argument in schema.arguments]
        if kinds[:1] != ["tensor"]:  # TorchScript's operators on numbers have the same names
            continue
        for position, (argument, kind) in enumerate(zip(schema.arguments, kinds, strict=True)):
            for place in (position, argument.name):
                takes[place][kind].add(argument.name)
    readers: dict[int | str, Callable[[Any], Any]] = {}
    for place, names in takes.items():
        if whole := names["whole"] | names["list"]:
            # ``max(dim)`` and ``max(other)``: a tensor there is not a number. Nor is it where
            # lengths are a list, or a tensor of any number of dims.
            is_either = names["tensor"] - whole or names["list"] & names["tensor"]
            readers[place] = _whole_unless_tensor if is_either else _whole
        elif names["real"] and not names["tensor"]:
            readers[place] = _real
    if takes[1]["list"] and readers.get(1) is _whole:  # x.view(2, 3)
        readers[_SPREAD] = _whole
    return readers


def _kind(argument: Any) -> str:
    type_ = str(argument.type)
    return _KINDS.get(type_[9:-1] if type_.startswith("Optional[") else type_, "")


def _may_be_number(arg: Any) -> bool:
    """True for a tensor without dims, an integer of numpy, and a sequence with either."""
    if isinstance(arg, list | tuple):
        return any(map(_may_be_number, arg))
    if isinstance(arg, Tensor):
        return not arg.dim() and arg.dtype is not torch.bool
    return not isinstance(arg, int) and isinstance(arg, Integral)


def _as_it_is(arg: Any) -> Any:
    return arg


def _whole(arg: Any) -> Any:
    if not _may_be_number(arg):
        return arg
    if isinstance(arg, list | tuple):
        return [_whole(item) for item in arg]
    is_real = isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex())
    return arg if is_real else index(arg)


def _whole_unless_tensor(arg: Any) -> Any:
    return arg if isinstance(arg, Tensor) else _whole(arg)


def _real(arg: Any) -> Any:
    if not isinstance(arg, Tensor) or not _may_be_number(arg) or arg.requires_grad:
        return arg
    return arg.item()


def _index(index: Any) -> Any:
    """The index of ``x[…]`` as torch reads it: lists of lists as tuples, arrays as tensors."""
    if _counts_as_tuple(index) or (isinstance(index, tuple) and any(map(_is_array, index))):
        return tuple(map(_as_tensor, index))
    return _as_tensor(index)


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
