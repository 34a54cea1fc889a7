"""Tensors without dims that stand for whole numbers: ``x.view(torch.tensor(2), -1)``.

torch takes them for sizes, dims and counts, as ``torch.div(a, b, rounding_mode="floor")`` gives
them. Rules take numbers only, and a sharding may not be cached for numbers that it does not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import index
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.pytree import Kwargs

_NUMBERS = frozenset({"int", "SymInt"})
_LISTS = frozenset({"List[int]", "List[SymInt]"})
#: torch's operators of numbers have the same names.
_TENSORS = frozenset({"Tensor", "List[Tensor]"})


def with_numbers(name: str, args: Sequence[Any], kwargs: Kwargs) -> tuple[list[Any], Kwargs] | None:
    """A call's arguments, with numbers for tensors that stand for some; None if none does.

    Collective where one of these is a DTensor whose value lies on other ranks.

    Args:
        name: The operator's.
        args: Its positional arguments.
        kwargs: The others.
    """
    if not any(map(_may_be_number, (*args, *kwargs.values()))):
        return None
    places = _places_of_numbers(name)
    spread = len(args) > 1 and (1, True) in places and not isinstance(args[1], list | tuple)
    numbers = [
        _number(arg) if (spread and at) or at in places or (at, True) in places else arg
        for at, arg in enumerate(args)
    ]
    named = {key: _number(arg) if key in places else arg for key, arg in kwargs.items()}
    is_changed = any(a is not b for a, b in zip(numbers, args, strict=True)) or any(
        named[key] is not arg for key, arg in kwargs.items()
    )
    return (numbers, named) if is_changed else None


def _may_be_number(arg: Any) -> bool:
    """True for a tensor of whole numbers without dims, and a sequence that has one."""
    if isinstance(arg, list | tuple):
        return any(map(_may_be_number, arg))
    if not isinstance(arg, Tensor) or arg.dim():
        return False
    return not (arg.dtype.is_floating_point or arg.dtype.is_complex or arg.dtype is torch.bool)


def _number(arg: Any) -> Any:
    if not _may_be_number(arg):
        return arg
    return [_number(item) for item in arg] if isinstance(arg, list | tuple) else index(arg)


@cache
def _places_of_numbers(name: str) -> frozenset[object]:
    """The positions and the names of arguments that are whole numbers; ``(position, True)`` where
    they are lists of these.
    """
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet else ()
    places: dict[object, str] = {}
    tensors: set[tuple[object, str]] = set()
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
            elif kind in _TENSORS:
                tensors.add((position, argument.name))
    # ``max(dim)`` and ``max(other)``: a tensor there is no number.
    others = {place for place, name in tensors if places.get(place, name) != name}
    return frozenset(places) - others
