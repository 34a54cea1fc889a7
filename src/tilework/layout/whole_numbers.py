"""Whole numbers that functions are given: dims, sizes, axes; nothing that could be made one."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from tilework.layout.box import Ints


def whole_number(number: Any, takes: str) -> int:
    """A whole number: no bool, nor a float or a text that could be made one.

    Args:
        number: What was given.
        takes: What is expected, for errors.

    Raises:
        TypeError: It is none.

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
    """Several of them, of any iterable.

    Raises:
        TypeError: It is no iterable, or not all in it are whole numbers.

    Example:
        >>> whole_numbers([2, 3], "shape has a size for each dim")
        (2, 3)
    """
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise TypeError(f"{takes}; got {numbers!r}")
    return tuple([whole_number(number, takes) for number in numbers])
