"""Covers by signed corners, against counting boxes over each element."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import boxes_of, covers, examples, points
from tilework.layout import Box
from tilework.layout.box_columns import BoxColumns, strides_for

IN_ANY = st.integers(1, 3).flatmap(
    lambda ndim: st.one_of(boxes_of(ndim, most=4), covers((4,) * ndim))
)


def counts(boxes: list[Box]) -> Counter[tuple[int, ...]]:
    return Counter(at for box in boxes for at in points(box))


def test_two_boxes_overlap_where_they_share_an_element() -> None:
    spans = [(low, high - low) for low in range(1, 4) for high in range(low + 1, 5)]
    boxes = [Box((y, x), (h, w)) for y, h in spans for x, w in spans]
    for a, b in product(boxes, repeat=2):
        pair = BoxColumns([a.offsets, b.offsets], [a.sizes, b.sizes]).overlap()
        assert (pair is None) == (a.intersection(b) is None)


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
