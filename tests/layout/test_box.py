"""Boxes, against the sets of their elements."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import boxes_in, examples, points
from tests.tables import each
from tilework.layout import Box

TWO = st.integers(0, 3).flatmap(lambda ndim: st.tuples(*[boxes_in((4,) * ndim)] * 2))
ONE = TWO.map(lambda two: two[0])


@examples()
@given(ONE)
def test_volume_counts_its_elements(box: Box) -> None:
    assert box.volume == len(list(points(box)))
    assert box.empty == (box.volume == 0)


@examples()
@given(TWO)
def test_intersection_is_what_both_have(two: tuple[Box, Box]) -> None:
    a, b = two
    shared = a.intersection(b)
    assert (set(points(shared)) if shared else set()) == set(points(a)) & set(points(b))
    assert shared == b.intersection(a)


@examples()
@given(TWO)
def test_contains_every_element(two: tuple[Box, Box]) -> None:
    a, b = two
    assert a.contains(b) == (set(points(b)) <= set(points(a)))


@examples()
@given(TWO)
def test_relative_coordinates_find_the_same_elements(two: tuple[Box, Box]) -> None:
    a, b = two
    shared = a.intersection(b)
    if shared is None:
        return
    inside = shared.relative_to(a)
    assert inside.sizes == shared.sizes
    moved = {tuple(x + o for x, o in zip(at, a.offsets, strict=True)) for at in points(inside)}
    assert moved == set(points(shared))


def test_what_is_before_has_no_relative_place() -> None:
    with pytest.raises(ValueError, match=r"\[1:3\] starts before \[2:4\]"):
        Box((1,), (2,)).relative_to(Box((2,), (2,)))


def test_other_dims_do_not_compare() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (2,)).intersection(Box((0, 0), (2, 2)))


def test_a_scalar_has_one_element() -> None:
    scalar = Box((), ())
    assert (scalar.ndim, scalar.volume, scalar.empty, scalar.slices) == (0, 1, False, ())
    assert scalar.intersection(scalar) == scalar
    assert str(scalar) == "[]"


def test_how_it_is_written() -> None:
    box = Box((0, 2), (5, 10))
    assert str(box) == "[0:5, 2:12]"
    assert (box.ends, box.slices) == ((5, 12), (slice(0, 5), slice(2, 12)))


@examples()
@given(ONE)
def test_a_value_like_others(box: Box) -> None:
    again = Box(list(box.offsets), list(box.sizes))  # type: ignore[arg-type]
    assert again == box
    assert hash(again) == hash(box)
    assert pickle.loads(pickle.dumps(box)) == copy.deepcopy(box) == box


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Box((0,), (1,)).sizes = (2,)  # type: ignore[misc]


@each(
    ("offsets", "sizes", "message"),
    [
        ((0,), (1, 2), "1 offsets"),
        ((-1,), (1,), "negative"),
        ((0, 0), (1, -2), "negative"),
    ],
)
def test_what_is_no_box(offsets: tuple[int, ...], sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Box(offsets, sizes)
