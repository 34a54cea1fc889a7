"""The search for two boxes that overlap, in any arrangement, by divide and conquer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

#: The starts and the ends of boxes, in each dim.
Spans = list[tuple[list[int], list[int]]]

#: Up to this number of boxes are compared pair by pair.
FEW = 16


def find_pair(spans: Spans, count: int, few: int = FEW) -> tuple[int, int] | None:
    """The numbers of two boxes that overlap in every dim of ``spans``; None if no two do.

    No box may be empty.

    The boxes are divided at medians until at most ``few`` are left. O(n log n) as long as few boxes
    cross a dividing line; where each line crosses most of them, all pairs are compared.
    """
    if len(spans) == 1:
        return _neighbours(*spans[0])
    parts: list[Sequence[int]] = [range(count)]
    while parts:
        members = parts.pop()
        halves = _divide(spans, members) if len(members) > few else None
        if halves is not None:
            parts += halves
        elif (pair := _compare(spans, members)) is not None:
            return pair
    return None


def _neighbours(starts: list[int], ends: list[int]) -> tuple[int, int] | None:
    """The numbers of two boxes that overlap, where boxes have a single dim; None if no two do.

    If any two overlap, then two neighbours in the order of starts do.
    """
    order = sorted(range(len(starts)), key=starts.__getitem__)
    return next(((i, j) for i, j in pairwise(order) if ends[i] > starts[j]), None)


def _compare(spans: Spans, members: Sequence[int]) -> tuple[int, int] | None:
    for i, j in combinations(members, 2):
        for starts, ends in spans:
            if starts[i] >= ends[j] or starts[j] >= ends[i]:
                break
        else:
            return i, j
    return None


def _divide(spans: Spans, members: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The boxes before a dividing line and the boxes after it; boxes that cross it are in both.

    None if no line leaves clearly fewer boxes on each side.
    """
    count = len(members)
    best, fewest = None, 1.25 * count
    for starts, ends in spans:
        for column in (starts, ends):
            at = sorted([column[i] for i in members])[count // 2]
            before = [i for i in members if starts[i] < at]
            after = [i for i in members if ends[i] > at]
            total = len(before) + len(after)
            if total <= fewest and max(len(before), len(after)) <= 0.9 * count:
                if total <= count + 2 * count**0.5:
                    return before, after
                best, fewest = (before, after), total
    return best
