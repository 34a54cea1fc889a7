"""Checks of integer arguments (dims, sizes, axes), without conversions."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from tilework.layout.box import Ints


def whole_number(number: Any, takes: str) -> int:
    """The number, if it is an integer: not a bool, a float or a text.

    Args:
        number: The argument.
        takes: The start of the error message, which says what is expected.

    Raises:
        TypeError: The argument is not an integer.

    Example:
        >>> whole_number("1", "Shard takes a dim, a whole number")
        Traceback (most recent call last):
        TypeError: Shard takes a dim, a whole number; got '1'
    """
    if number.__class__ is int:
        return number
    try:
        if isinstance(number, bool):
            raise TypeError
        return index(number)
    except TypeError:
        raise TypeError(f"{takes}; got {number!r}") from None


def whole_numbers(numbers: Any, takes: str) -> Ints:
    """The numbers of any iterable, if all are integers.

    Raises:
        TypeError: The argument is not an iterable, or has items that are not integers.

    Example:
        >>> whole_numbers([2, 3], "shape has a size for each dim")
        (2, 3)
    """
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise TypeError(f"{takes}; got {numbers!r}")
    return tuple([whole_number(number, takes) for number in numbers])
