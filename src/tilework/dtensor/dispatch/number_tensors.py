"""Tensors without dims that stand for numbers: ``x.view(torch.tensor(2), -1)``, ``x.norm(p)``.
And whole numbers of numpy's.

torch takes them for sizes, dims and counts, as ``torch.div(a, b, rounding_mode="floor")`` gives
them, and for exponents, slopes and limits. Rules take numbers only, and a sharding may not be
cached for numbers that it does not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.pytree import Kwargs

_NUMBERS = frozenset({"int", "SymInt"})
_LISTS = frozenset({"List[int]", "List[SymInt]"})
#: Of real numbers, which are whole or not.
_REALS = frozenset({"float", "number"})
#: torch's operators of numbers have the same names.
_TENSORS = frozenset({"Tensor", "List[Tensor]"})


def with_numbers(name: str, args: Sequence[Any], kwargs: Kwargs) -> tuple[list[Any], Kwargs] | None:
    """A call's arguments, with numbers for what stands for some; None if nothing does.

    Collective where one of these is a DTensor whose value lies on other ranks.

    Args:
        name: The operator's.
        args: Its positional arguments.
        kwargs: The others.
    """
    if not any(map(_may_be_number, (*args, *kwargs.values()))):
        return None
    places, reals, either = _places_of_numbers(name)
    spread = len(args) > 1 and (1, True) in places and not isinstance(args[1], list | tuple)

    def number(place: object, arg: Any, is_whole: bool) -> Any:
        if is_whole or place in places:
            return _number(arg)
        if place in reals:
            return _real(arg)
        return arg if place not in either or isinstance(arg, Tensor) else _number(arg)

    numbers = [
        number(at, arg, (spread and at > 0) or (at, True) in places) for at, arg in enumerate(args)
    ]
    named = {key: number(key, arg, False) for key, arg in kwargs.items()}
    is_changed = any(a is not b for a, b in zip(numbers, args, strict=True)) or any(
        named[key] is not arg for key, arg in kwargs.items()
    )
    return (numbers, named) if is_changed else None


def _may_be_number(arg: Any) -> bool:
    """True for a tensor without dims, a whole number of numpy's, and a sequence that has one."""
    if isinstance(arg, list | tuple):
        return any(map(_may_be_number, arg))
    if isinstance(arg, Tensor):
        return not arg.dim() and arg.dtype is not torch.bool
    return not isinstance(arg, int) and isinstance(arg, Integral)


def _is_whole(arg: Any) -> bool:
    """True for what is a whole number but no ``int``, and a sequence that has one."""
    if isinstance(arg, list | tuple):
        return any(map(_is_whole, arg))
    if not isinstance(arg, Tensor):
        return _may_be_number(arg)
    return _may_be_number(arg) and not (arg.dtype.is_floating_point or arg.dtype.is_complex)


def _number(arg: Any) -> Any:
    if not _is_whole(arg):
        return arg
    return [_number(item) for item in arg] if isinstance(arg, list | tuple) else index(arg)


def _real(arg: Any) -> Any:
    """The number that a tensor stands for, of which there is no gradient."""
    if not isinstance(arg, Tensor) or not _may_be_number(arg) or arg.requires_grad:
        return arg
    return arg.item()


@cache
def _places_of_numbers(name: str) -> tuple[frozenset[object], ...]:
    """The positions and the names of arguments that are whole numbers, ``(position, True)`` where
    they are lists of these; of those that are any numbers; and of those that are whole numbers in
    one overload and tensors in another.
    """
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet else ()
    places: dict[object, str] = {}
    reals: set[object] = set()
    tensors: set[tuple[object, str]] = set()
    lists: set[tuple[object, str]] = set()
    for schema in (getattr(packet, overload)._schema for overload in overloads):
        kinds = [str(argument.type) for argument in schema.arguments]
        if not kinds or kinds[0] not in _TENSORS:
            continue
        for position, (argument, kind) in enumerate(zip(schema.arguments, kinds, strict=True)):
            kind = kind.removeprefix("Optional[").removesuffix("]" * kind.startswith("Optional["))
            if kind in _NUMBERS:
                places |= {position: argument.name, argument.name: argument.name}
            elif kind in _LISTS:
                places |= {(position, True): argument.name, argument.name: argument.name}
                lists.add((position, argument.name))
            elif kind in _REALS:
                reals |= {position, argument.name}
            elif kind in _TENSORS:
                tensors.add((position, argument.name))
    # ``max(dim)`` and ``max(other)``: a tensor there is no number.
    others = {place for place, name in tensors if places.get(place, name) != name}
    # Lengths are a list or a tensor, which has any number of dims.
    others |= {place for at, name in lists & tensors for place in ((at, True), name)}
    reals -= {place for pair in tensors for place in pair}
    whole = frozenset(places)
    return whole - others, frozenset(reals), whole & others
