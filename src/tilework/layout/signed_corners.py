"""Signed corners of boxes: a test of exact covers in any arrangement of boxes.

Count each corner of a box with a sign by parity: in two dims plus where the box starts in both or
ends in both, minus at the other two. These points are the mixed difference of the box's indicator
function, and a function that is zero far away is determined by its mixed difference. Therefore some
boxes cover another box, each point once, if and only if their signed corners add up to the corners
of that box. No box is compared with another.

A point is a single number: the sum of its coordinates times strides, in the order of coordinates.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import cycle, groupby, repeat
from operator import add, mul

#: The starts of all boxes in one dim, or their ends.
Column = list[int]


def strides_for(lows: list[int], highs: list[int]) -> list[int]:
    """Strides with which all points between ``lows`` and ``highs`` have different numbers."""
    strides = [1]
    for low, high in zip(reversed(lows[1:]), reversed(highs[1:]), strict=True):
        strides.append(strides[-1] * (high - low + 1))
    return strides[: len(lows)][::-1]


def signed_corners(
    starts: list[Column], ends: list[Column], strides: list[int]
) -> tuple[list[int], list[int]]:
    """The corners of all boxes, as numbers: those with sign plus, and those with sign minus.

    In two dims, the first half of the plus corners is where boxes start in both dims. The first
    half of the minus corners is where boxes start in the first dim and end in the second.
    """
    plus: list[int] = []
    minus: list[int] = []
    for start, end, stride in zip(starts, ends, strides, strict=True):
        if stride != 1:
            start, end = list(map(mul, start, repeat(stride))), list(map(mul, end, repeat(stride)))
        if not plus:
            plus, minus = start, end
        else:
            plus, minus = (
                [*map(add, plus, cycle(start)), *map(add, minus, cycle(end))],
                [*map(add, plus, cycle(end)), *map(add, minus, cycle(start))],
            )
    return plus, minus


def left_over_2d(plus: list[int], minus: list[int]) -> dict[int, int] | None:
    """The points in two dims at which signed corners do not cancel, each with the remaining sum.

    None if two boxes have the same corner of one kind, and therefore overlap.
    """
    n = len(plus) // 2
    p, q, r, s = set(plus[:n]), set(plus[n:]), set(minus[:n]), set(minus[n:])
    if not len(p) == len(q) == len(r) == len(s) == n:
        return None
    # Most points cancel here, however the boxes are arranged in their rows.
    p, q, r, s = p - r, q - s, r - p, s - q
    left = dict.fromkeys(p - s, 1)
    for point in q - r:
        left[point] = left.get(point, 0) + 1
    for point in (*(r - q), *(s - p)):
        left[point] = left.get(point, 0) - 1
    return left


def nowhere_two_2d(left: dict[int, int], stride: int, low: int) -> bool:
    """True if no point is in two boxes, decided by the remaining corners.

    Row by row, the differences along a row are updated. The number of boxes is 0 or 1 everywhere in
    the row if and only if the differences alternate between 1 and -1. O(n log n) for n remaining
    points (and moving the entries of a sorted list, which is fast).

    Args:
        left: From :func:`left_over_2d`.
        stride: The stride of the first dim.
        low: The least coordinate in the second dim.
    """
    row: list[int] = []  # the places of differences, ascending
    difference: dict[int, int] = {}
    for _, points in groupby(sorted(left), key=lambda point: (point - low) // stride):
        changed = []
        for point in points:
            at = (point - low) % stride
            difference[at] = difference.get(at, 0) + left[point]
            changed.append(at)
        for at in changed:
            _keep_sorted(row, at, difference[at] != 0)
        if not all(_by_turns(row, difference, bisect_left(row, at)) for at in changed):
            return False
    return True


def _keep_sorted(row: list[int], at: int, present: bool) -> None:
    i = bisect_left(row, at)
    was_present = i < len(row) and row[i] == at
    if present and not was_present:
        row.insert(i, at)
    elif was_present and not present:
        del row[i]


def _by_turns(row: list[int], difference: dict[int, int], i: int) -> bool:
    """True if the differences at an entry and next to it alternate between 1 and -1."""
    first = max(i - 1, 0)
    near = [difference[at] for at in row[first : i + 2]]
    sign = near[0] if near else 1
    return sign in (1, -1) and near == [sign, -sign, sign][: len(near)]
