"""Boxes: regions of a tensor, by offset and size in each dim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The region of a tensor that starts at ``offsets`` and has ``sizes`` elements in each dim.

    A scalar's box has no dims and one element. A box with a size of 0 is empty.

    Args:
        offsets: The first index in each dim, none negative.
        sizes: The number of elements in each dim, none negative.

    Raises:
        ValueError: The lengths differ, or a number is negative.

    Example:
        >>> box = Box((5, 0), (5, 10))
        >>> str(box), box.volume
        ('[5:10, 0:10]', 50)
    """

    offsets: Ints
    sizes: Ints

    def __post_init__(self) -> None:
        offsets, sizes = tuple(map(int, self.offsets)), tuple(map(int, self.sizes))
        if len(offsets) != len(sizes):
            raise ValueError(
                f"a box needs an offset and a size for each dim, got {len(offsets)} offsets "
                f"{offsets} and {len(sizes)} sizes {sizes}"
            )
        if offsets and (min(offsets) < 0 or min(sizes) < 0):
            raise ValueError(
                f"a box must not have negative offsets or sizes, got offsets {offsets} and sizes "
                f"{sizes}"
            )
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "sizes", sizes)

    @property
    def ends(self) -> Ints:
        """The end in each dim (exclusive)."""
        return tuple([o + s for o, s in zip(self.offsets, self.sizes, strict=True)])

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.sizes)

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def empty(self) -> bool:
        """True if the box has no element."""
        return 0 in self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of the full tensor for this region."""
        return tuple([slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True)])

    def intersection(self, other: Box) -> Box | None:
        """The intersection of both boxes; None if it is empty."""
        offsets, sizes = [], []
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low = a if a > b else b
            size = (a + m if a + m < b + n else b + n) - low
            if size <= 0:
                return None
            offsets.append(low)
            sizes.append(size)
        return trusted_box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """True if every element of ``other`` is in this box; any box contains an empty box."""
        if other.empty:
            return True
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def relative_to(self, other: Box) -> Box:
        """The same box, in coordinates that count from the start of ``other``.

        Raises:
            ValueError: The box starts before ``other``.

        Example:
            >>> str(Box((6, 2), (2, 3)).relative_to(Box((5, 0), (5, 10))))
            '[1:3, 2:5]'
        """
        offsets = tuple([a - b for a, b in zip(self.offsets, other.offsets, strict=True)])
        if offsets and min(offsets) < 0:
            raise ValueError(f"{self} starts before {other}: relative offsets would be negative")
        return trusted_box(offsets, self.sizes)

    def __str__(self) -> str:
        spans = [f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)]
        return f"[{', '.join(spans)}]"


_new = object.__new__
# The descriptor of a slot can write where a frozen dataclass refuses.
_set_offsets = Box.__dict__["offsets"].__set__
_set_sizes = Box.__dict__["sizes"].__set__


def trusted_box(offsets: Ints, sizes: Ints) -> Box:
    """A box made without checks, five times as fast: the tuples must be known to be valid."""
    box = _new(Box)
    _set_offsets(box, offsets)
    _set_sizes(box, sizes)
    return box


def whole_box(shape: Sequence[int]) -> Box:
    """The box of the full tensor.

    Example:
        >>> str(whole_box((10, 4)))
        '[0:10, 0:4]'
    """
    return Box((0,) * len(shape), tuple(shape))


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
