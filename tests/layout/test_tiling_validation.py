"""Overlaps and gaps, against counting the boxes over each element."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.layout.random_tilings import boxes_of, covers, examples, points, shapes, whole
from tests.tables import each
from tilework.layout import Box, Tile, Tiling, check_boxes, check_disjoint, find_overlap

SOME_BOXES = st.integers(0, 4).flatmap(boxes_of)
COVERED = shapes().flatmap(lambda shape: st.tuples(st.just(shape), covers(shape)))


def counts(boxes: list[Box]) -> Counter[tuple[int, ...]]:
    """How many boxes have each element."""
    return Counter(at for box in boxes for at in points(box))


def overlap_of(boxes: list[Box]) -> tuple[int, int] | None:
    return find_overlap([box.offsets for box in boxes], [box.sizes for box in boxes])


def named_boxes(message: str) -> list[Box]:
    """The boxes that an error message writes down."""
    found = []
    for text in re.findall(r"\[([\d:, ]*)\]", message):
        spans = [tuple(map(int, span.split(":"))) for span in text.split(", ") if span]
        found.append(Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)))
    return found


@examples(150)
@given(SOME_BOXES)
def test_overlap_is_found_where_an_element_is_in_two(boxes: list[Box]) -> None:
    pair = overlap_of(boxes)
    assert (pair is not None) == any(n > 1 for n in counts(boxes).values())
    if pair is not None:
        i, j = pair
        assert i < j
        assert boxes[i].intersection(boxes[j])


@examples()
@given(COVERED, st.data())
def test_a_cover_without_some_boxes_is_still_disjoint(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    _, boxes = case
    keep = [box for box in boxes if data.draw(st.booleans())]
    check_disjoint(keep)


@each("ndim", [1, 2, 3])
@each("seed", range(5))
def test_one_overlap_among_many_boxes(ndim: int, seed: int) -> None:
    rng = random.Random(seed)
    side = round(600 ** (1 / ndim))
    places = product(range(0, 3 * side, 3), repeat=ndim)
    boxes = [Box(place, tuple(rng.randint(1, 2) for _ in place)) for place in places]
    rng.shuffle(boxes)
    check_disjoint(boxes)
    victim = rng.randrange(len(boxes))
    corner = tuple(end - 1 for end in boxes[victim].ends)
    at = rng.randrange(len(boxes))
    boxes.insert(at, Box(corner, (1,) * ndim))
    pair = overlap_of(boxes)
    assert pair is not None
    assert at in pair


@examples()
@given(COVERED)
def test_covers_are_accepted(case: tuple[tuple[int, ...], list[Box]]) -> None:
    check_boxes(*case)


@examples()
@given(shapes(max_dims=3, max_side=4), st.data())
def test_boxes_are_accepted_if_each_element_is_in_one(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Covers with a box lost, doubled, moved or changed."""
    boxes: list[Box] = data.draw(covers(shape))
    lose, spoil = data.draw(st.booleans()), data.draw(st.booleans())
    if boxes and lose:
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    if spoil:
        offsets = data.draw(st.tuples(*[st.integers(0, n) for n in shape]))
        sizes = data.draw(st.tuples(*[st.integers(0, 2) for _ in shape]))
        boxes.append(Box(offsets, sizes))
    right = counts(boxes) == Counter(points(whole(shape)))
    if right:
        check_boxes(shape, boxes)
    else:
        with pytest.raises(ValueError, match=r"overlap|out of bounds|does not match"):
            check_boxes(shape, boxes)


@examples()
@given(COVERED, st.data())
def test_a_lost_box_is_named(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = case
    assume(any(not box.empty for box in boxes))
    lost = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    assume(not lost.empty)
    with pytest.raises(
        ValueError, match=r"not cover the entire tensor: .* does not match tensor volume"
    ) as raised:
        check_boxes(shape, boxes)
    message = str(raised.value)
    assert str(whole(shape).volume) in message
    assert str(whole(shape).volume - lost.volume) in message
    (gap,) = named_boxes(message)
    assert not gap.empty
    assert lost.contains(gap)


@examples()
@given(COVERED, st.data())
def test_both_boxes_of_an_overlap_are_named(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    assume(any(not box.empty for box in boxes))
    again = data.draw(st.sampled_from(boxes))
    assume(not again.empty)
    boxes.append(again)
    with pytest.raises(ValueError, match="overlap") as raised:
        check_boxes(shape, boxes)
    assert named_boxes(str(raised.value)) == [again] * 3
    assert f"boxes {boxes.index(again)} and {len(boxes) - 1} " in str(raised.value)


def test_a_box_out_of_bounds_is_named() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (2, 5))]
    with pytest.raises(ValueError, match=r"box 1, \[2:4, 0:5\], is out of bounds: dim 1"):
        check_boxes((4, 4), boxes)


def test_an_empty_box_may_be_out_of_bounds() -> None:
    check_boxes((2,), [Box((0,), (2,)), Box((7,), (0,)), Box((1,), (0,))])


def test_another_number_of_dims() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 4\) has 2 dims, but the boxes have 1"):
        check_boxes((4, 4), [Box((0,), (4,))])
    with pytest.raises(ValueError, match="one number of dims"):
        check_disjoint([Box((0,), (4,)), Box((0, 0), (4, 4))])
    with pytest.raises(ValueError, match="as many offsets as sizes"):
        find_overlap([[0]], [[1], [2]])


def test_no_boxes_cover_what_has_no_elements() -> None:
    check_boxes((0, 3), [])
    for shape in ((), (2, 3)):
        with pytest.raises(ValueError, match="does not match tensor volume") as raised:
            check_boxes(shape, [])
        assert named_boxes(str(raised.value)) == [whole(shape)]


def test_scalars() -> None:
    check_boxes((), [Box((), ())])
    with pytest.raises(ValueError, match="overlap"):
        check_boxes((), [Box((), ()), Box((), ())])


def test_overlap_counts_before_a_gap() -> None:
    with pytest.raises(ValueError, match="overlap"):
        check_boxes((10,), [Box((0,), (4,)), Box((3,), (4,))])


def test_numbers_beyond_64_bits() -> None:
    far = 1 << 40
    check_boxes((far, far), [Box((0, 0), (far, far - 1)), Box((0, far - 1), (far, 1))])


def test_a_tiling_checks_each_term() -> None:
    good = (Tile(Box((0,), (2,)), (0,)),)
    with pytest.raises(ValueError, match="does not match tensor volume"):
        Tiling((2,), (good, (Tile(Box((0,), (1,)), (1,)),)), "sum")


def test_many_dims_are_checked_and_a_gap_in_them_named() -> None:
    boxes = [Box(offsets, (1,) * 12) for offsets in product((0, 1), repeat=12)]
    check_boxes((2,) * 12, boxes)
    gap = re.escape("no box covers [1:2, " + "0:1, " * 10 + "1:2]")
    lost = Box((1, *(0,) * 10, 1), (1,) * 12)
    with pytest.raises(ValueError, match=gap):
        check_boxes((2,) * 12, [box for box in boxes if box != lost])
    with pytest.raises(ValueError, match="boxes 0 and 4096 overlap"):
        check_boxes((2,) * 12, [*boxes, boxes[0]])
