"""Signed corners, against adding them up one by one and counting boxes over each element."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import boxes_of, covers, examples, points
from tilework.layout import Box
from tilework.layout.box_columns import (
    BoxColumns,
    left_over_2d,
    nowhere_two_2d,
    signed_corners,
    strides_for,
)

SIDE = 7
STRIDES = [SIDE + 1, 1]


def filled(boxes: list[Box]) -> list[Box]:
    return [box for box in boxes if not box.empty]


IN_2D = st.one_of(boxes_of(2, most=8), covers((6, 6))).map(filled)
IN_ANY = st.integers(1, 3).flatmap(
    lambda ndim: st.one_of(boxes_of(ndim, most=4), covers((4,) * ndim))
)


def left_of(boxes: list[Box]) -> dict[int, int] | None:
    starts = [[box.offsets[dim] for box in boxes] for dim in range(2)]
    ends = [[box.ends[dim] for box in boxes] for dim in range(2)]
    return left_over_2d(*signed_corners(starts, ends, STRIDES))


def counts(boxes: list[Box]) -> Counter[tuple[int, ...]]:
    return Counter(at for box in boxes for at in points(box))


@examples(120)
@given(IN_2D)
def test_what_is_left_is_the_sum(boxes: list[Box]) -> None:
    total: Counter[int] = Counter()
    for box in boxes:
        sides = [((o, 1), (o + s, -1)) for o, s in zip(box.offsets, box.sizes, strict=True)]
        for (y, sign_y), (x, sign_x) in product(*sides):
            total[y * STRIDES[0] + x] += sign_y * sign_x
    left = left_of(boxes)
    if left is None:
        assert max(counts(boxes).values()) > 1
    else:
        assert left == {point: sign for point, sign in total.items() if sign}


@examples(120)
@given(IN_2D)
def test_a_sweep_sees_each_overlap(boxes: list[Box]) -> None:
    left = left_of(boxes)
    if left is not None:
        most = max(counts(boxes).values(), default=0)
        assert nowhere_two_2d(left, STRIDES[0], low=0) == (most <= 1)


def test_a_sweep_sees_whether_any_two_boxes_overlap() -> None:
    spans = [(low, high - low) for low in range(1, 4) for high in range(low + 1, 5)]
    boxes = [Box((y, x), (h, w)) for y, h in spans for x, w in spans]
    for a, b in product(boxes, repeat=2):
        pair = BoxColumns([a.offsets, b.offsets], [a.sizes, b.sizes]).overlap()
        assert (pair is None) == (a.intersection(b) is None)
        left = left_of([a, b])
        if left is not None:
            assert nowhere_two_2d(left, STRIDES[0], low=1) == (pair is None)


@examples(120)
@given(IN_2D, st.data())
def test_a_sweep_of_a_cover_with_gaps(boxes: list[Box], data: st.DataObject) -> None:
    """Boxes that do not overlap, on coordinates that do not begin at 0."""
    kept: list[Box] = []
    for box in boxes:
        if data.draw(st.booleans()) and not any(box.intersection(other) for other in kept):
            kept.append(box)
    left = left_of([Box((box.offsets[0], box.offsets[1] + 1), box.sizes) for box in kept])
    assert left is not None
    assert nowhere_two_2d(left, STRIDES[0], low=1)


@examples(200)
@given(IN_ANY)
def test_boxes_cover_what_is_around_them(boxes: list[Box]) -> None:
    columns = BoxColumns([box.offsets for box in boxes], [box.sizes for box in boxes])
    found = counts(boxes)
    around = [range(min(column), max(column) + 1) for column in zip(*found, strict=True)]
    expected = bool(found) and found == Counter(product(*around))
    assert columns.cover_their_bounds() == expected


@examples()
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), min_size=1, max_size=3))
def test_strides_tell_points_apart_in_order(spans: list[tuple[int, int]]) -> None:
    lows, highs = [low for low, _ in spans], [low + size for low, size in spans]
    strides = strides_for(lows, highs)
    ordered = product(*(range(low, high + 1) for low, high in zip(lows, highs, strict=True)))
    numbers = [sum(x * stride for x, stride in zip(at, strides, strict=True)) for at in ordered]
    assert numbers == sorted(set(numbers))
