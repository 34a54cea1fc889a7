"""Pictures of boxes: every box is there, in proportion, labelled, within the width."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import each
from tilework.layout import Box
from tilework.show import Picture, Styled

#: The width, the height, the rows and the slices.
Room = tuple[int, int, int, int]
Line = list[Styled]
ROOM = (60, 12, 6, 2)


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes between these cuts of each dim."""
    spans = [list(pairwise([0, *inner, length])) for length, inner in zip(shape, cuts, strict=True)]
    return [
        Box(tuple(a for a, _ in place), tuple(b - a for a, b in place)) for place in product(*spans)
    ]


def lines_of(
    shape: Sequence[int],
    boxes: Sequence[Box],
    room: Room = ROOM,
    labels: Sequence[Sequence[str]] | None = None,
) -> list[Line]:
    labels = labels or [[f"rank:{i}/cpu", f"{i}"] for i in range(len(boxes))]
    colours = [f"{i}" for i in range(len(boxes))]
    return Picture(shape, boxes, labels, colours, *room).lines(100)


def text_of(lines: Sequence[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def areas(lines: Sequence[Line]) -> dict[int, set[tuple[int, int]]]:
    """The characters that lie in each box."""
    found: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for row, line in enumerate(lines):
        column = 0
        for text, style in line:
            if style:
                found[int(style.removeprefix("black on "))] |= {
                    (row, column + i) for i in range(len(text))
                }
            column += len(text)
    return found


def height_width(area: set[tuple[int, int]]) -> tuple[int, int]:
    rows, columns = {row for row, _ in area}, {column for _, column in area}
    assert len(area) == len(rows) * len(columns), "a box is drawn as a rectangle"
    return len(rows), len(columns)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Up to two dims, few enough cuts for all boxes to be drawn."""
    shape = tuple(draw(st.lists(st.integers(1, 200), min_size=1, max_size=2)))
    cuts = [
        sorted(draw(st.sets(st.integers(1, length - 1), max_size=5))) if length > 1 else []
        for length in shape
    ]
    return shape, grid(shape, cuts)


@given(grids(), st.integers(40, 100))
def test_every_box_is_a_labelled_rectangle(
    case: tuple[tuple[int, ...], list[Box]], width: int
) -> None:
    shape, boxes = case
    lines = lines_of(shape, boxes, (width, 12, 6, 2))
    assert max(map(len, text_of(lines))) <= width
    found = areas(lines)
    assert found.keys() == set(range(len(boxes)))
    rows = text_of(lines)
    for number, area in found.items():
        height_width(area)
        inside = "".join(rows[row][column] for row, column in sorted(area))
        assert str(number) in inside


@given(grids())
def test_longer_parts_are_not_drawn_shorter(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    drawn = {number: height_width(area) for number, area in areas(lines_of(shape, boxes)).items()}
    for (i, a), (j, b) in product(enumerate(boxes), repeat=2):
        across = len(shape) - 1
        if a.sizes[across] >= b.sizes[across]:
            assert drawn[i][1] >= drawn[j][1]
        if len(shape) == 2 and a.sizes[0] >= b.sizes[0]:
            assert drawn[i][0] >= drawn[j][0]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes of any sizes, often not in a grid, often more than can be drawn."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 50, 10**6]), max_size=4)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 60))):
        whole = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(whole.sizes) if size > 1]
        boxes += (
            halves(whole, draw(st.sampled_from(dims)), draw(st.floats(0, 1))) if dims else [whole]
        )
    return shape, boxes


def halves(box: Box, dim: int, where: float) -> list[Box]:
    cut = 1 + int(where * (box.sizes[dim] - 2))

    def part(offset: int, size: int) -> Box:
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + offset, size
        return Box(tuple(offsets), tuple(sizes))

    return [part(0, cut), part(cut, box.sizes[dim] - cut)]


@given(tilings(), st.integers(30, 100), st.integers(3, 10), st.integers(1, 3))
def test_any_tiling_fits_into_the_room(
    case: tuple[tuple[int, ...], list[Box]], width: int, parts: int, slices: int
) -> None:
    shape, boxes = case
    _caption, *lines = lines_of(shape, boxes, (width, 12, parts, slices))
    assert max(map(len, text_of(lines))) <= width
    assert len(lines) <= slices * (12 + 2 * parts + 4) + 2
    if len(shape) <= 2:
        for area in areas(lines).values():
            height_width(area)


def test_two_dims() -> None:
    boxes = grid((10, 20), [[5], [10]])
    assert text_of(lines_of((10, 20), boxes, (30, 12, 6, 2))) == [
        "↓ dim 0   → dim 1",
        "   0           10           20",
        " 0 ┌────────────┬────────────┐",
        "   │ rank:0/cpu │ rank:1/cpu │",
        "   │            │            │",
        " 5 ├────────────┼────────────┤",
        "   │ rank:2/cpu │ rank:3/cpu │",
        "   │            │            │",
        "10 └────────────┴────────────┘",
    ]


def test_boxes_that_form_no_grid() -> None:
    pinwheel = [
        Box((0, 0), (2, 1)),
        Box((0, 1), (1, 2)),
        Box((1, 2), (2, 1)),
        Box((2, 0), (1, 2)),
        Box((1, 1), (1, 1)),
    ]
    assert text_of(lines_of((3, 3), pinwheel, (18, 9, 6, 2)))[1:] == [
        "  0    1    2    3",
        "0 ┌────┬─────────┐",
        "  │    │    1    │",
        "  │    │         │",
        "1 │ 0  ├────┬────┤",
        "  │    │ 4  │    │",
        "  │    │    │    │",
        "2 ├────┴────┤ 2  │",
        "  │    3    │    │",
        "  │         │    │",
        "3 └─────────┴────┘",
    ]


def test_a_scalar() -> None:
    assert text_of(lines_of((), [Box((), ())], (14, 9, 6, 2))) == [
        "a scalar",
        "┌────────────┐",
        "│ rank:0/cpu │",
        "└────────────┘",
    ]


@each("shape", [(0,), (0, 4), (4, 0)])
def test_a_tensor_without_elements_has_no_picture(shape: tuple[int, ...]) -> None:
    assert lines_of(shape, [Box((0,) * len(shape), shape)]) == []


def test_empty_boxes_are_not_drawn() -> None:
    boxes = [Box((0,), (4,)), Box((4,), (0,)), Box((8,), (0,))]
    lines = lines_of((4,), boxes)
    assert areas(lines).keys() == {0}
    assert "drawn" not in text_of(lines)[-1]


def test_a_small_box_can_be_seen() -> None:
    boxes = [Box((0, 0), (10**9, 8)), Box((10**9, 0), (1, 8))]
    drawn = areas(lines_of((10**9 + 1, 8), boxes))
    assert height_width(drawn[1])[0] == 1


def test_a_long_label_is_shortened_only_where_it_must_be() -> None:
    labels = [["trainer-number-0/cpu", "trainer-number-0"], ["trainer-number-1"]]
    boxes = grid((2,), [[1]])
    wide, narrow = (
        "".join(text_of(lines_of((2,), boxes, (width, 9, 6, 2), labels))) for width in (45, 24)
    )
    assert "trainer-number-0/cpu" in wide
    assert "trainer-n…" in narrow


# -- many parts, many dims -----------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_of_many_parts_the_middle_is_left_out(dim: int) -> None:
    shape = tuple(1000 if d == dim else 8 for d in range(2))
    cuts = [list(range(1, 1000)) if d == dim else [] for d in range(2)]
    lines = lines_of(shape, grid(shape, cuts))
    drawn = areas(lines).keys()
    assert {0, 1, 999} <= drawn
    assert text_of(lines)[-1] == f"{len(drawn)} of 1,000 shards are drawn"
    assert max(map(len, text_of(lines))) <= ROOM[0]
    assert len(lines) < 20
    assert "…" in "".join(text_of(lines))


def test_a_box_behind_the_part_that_is_left_out_goes_on() -> None:
    """One column is cut into many, the other is whole."""
    boxes = [Box((0, 0), (100, 4)), *(Box((i, 4), (1, 4)) for i in range(100))]
    height, _ = height_width(areas(lines_of((100, 8), boxes))[0])
    assert height == 2 * ROOM[2] - 1


def test_dims_that_are_not_cut_are_named() -> None:
    lines = lines_of((4, 6, 8), grid((4, 6, 8), [[2], [], []]))
    assert text_of(lines)[0] == "↓ dim 0   → dim 2   dim 1 (6) is not cut"
    assert areas(lines).keys() == {0, 1}


def test_slices_where_three_dims_are_cut() -> None:
    lines = lines_of((4, 4, 4), grid((4, 4, 4), [[1, 2, 3], [2], [2]]))
    text = text_of(lines)
    assert text[0] == "↓ dim 1   → dim 2"
    assert [line for line in text if line.startswith("[")] == ["[0:1, :, :]", "[1:2, :, :]"]
    assert text[-2:] == ["… 2 more slices", "8 of 16 shards are drawn"]
    assert areas(lines).keys() == set(range(8))


def test_a_box_in_several_slices_is_drawn_in_each() -> None:
    boxes = [Box((0, 0, 0), (2, 1, 2)), *grid((2, 2, 2), [[1], [1], [1]])]
    boxes = [boxes[0], *(box for box in boxes[1:] if box.offsets[1] == 1)]
    lines = lines_of((2, 2, 2), boxes)
    rows = {row for row, _ in areas(lines)[0]}
    assert any(b - a > 2 for a, b in pairwise(sorted(rows)))
    assert "drawn" not in text_of(lines)[-1]
