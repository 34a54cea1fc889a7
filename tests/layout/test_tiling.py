"""Tilings: what they refuse, what they tell, and that they are values."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import MOST_RANKS, boxes_in, examples, shapes, tilings
from tests.tables import each
from tilework.layout import Box, Partial, Replicate, Shard, Tile, Tiling, mesh_tiling
from tilework.layout.box_columns import FEW_QUERIES, BoxIndex

TILINGS = shapes().flatmap(tilings)
HALVES = (Tile(Box((0,), (2,)), (3,)), Tile(Box((2,), (2,)), (1, 3)))


@examples()
@given(TILINGS)
def test_ranks_hold_the_tiles_that_they_own(tiling: Tiling) -> None:
    for rank in range(MOST_RANKS + 1):
        held = [i for i, tile in enumerate(tiling.tiles) if rank in tile.owners]
        assert tiling.of(rank) == tuple(held)
        assert tiling.boxes_of(rank) == tuple(tiling.tiles[i].box for i in held)
        assert (rank in tiling.ranks) == bool(held)
    assert list(tiling.ranks) == sorted(tiling.ranks)


@examples()
@given(TILINGS)
def test_tiles_are_those_of_the_terms_in_order(tiling: Tiling) -> None:
    terms = [(number, tile) for number, term in enumerate(tiling.terms) for tile in term]
    assert [(tiling.term_of(i), tile) for i, tile in enumerate(tiling.tiles)] == terms


@examples()
@given(st.data())
def test_overlapping_finds_what_looking_at_all_finds(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    tiling = data.draw(tilings(shape))
    box = data.draw(boxes_in(shape))
    for term in range(len(tiling.terms)):
        expected = [
            i
            for i, tile in enumerate(tiling.tiles)
            if tiling.term_of(i) == term and tile.box.intersection(box)
        ]
        assert tiling.overlapping(term, box) == expected


@examples()
@given(st.lists(boxes_in((9, 9, 9)), max_size=60), boxes_in((9, 9, 9)))
def test_an_index_of_any_boxes(boxes: list[Box], box: Box) -> None:
    """The first questions are answered in another way than those that follow."""
    expected = [i for i, other in enumerate(boxes) if other.intersection(box)]
    index = BoxIndex(boxes)
    for _ in range(FEW_QUERIES + 2):
        assert index.overlapping(box) == expected


@examples()
@given(TILINGS)
def test_a_value_like_others(tiling: Tiling) -> None:
    """A copy is made while caches are full, and has none."""
    hash(tiling), tiling.ranks, tiling.digest
    copy = pickle.loads(pickle.dumps(tiling))
    assert vars(copy).keys() == {"shape", "terms", "reduce_op"}
    again = Tiling(tiling.shape, tiling.terms, tiling.reduce_op)
    assert copy == again == tiling
    assert hash(copy) == hash(again) == hash(tiling)
    assert copy.digest == again.digest == tiling.digest < 2**63


@examples()
@given(shapes().flatmap(lambda shape: st.tuples(tilings(shape), tilings(shape))))
def test_different_tilings_differ(two: tuple[Tiling, Tiling]) -> None:
    a, b = two
    same = (a.shape, a.terms, a.reduce_op) == (b.shape, b.terms, b.reduce_op)
    assert (a == b) == same
    assert (a.digest == b.digest) == same


def test_terms_are_told_apart() -> None:
    """The same tiles in the same order, as one and three, and as two and two."""
    empty, full = Tile(Box((0,), (0,)), (0,)), Tile(Box((0,), (1,)), (0,))
    one_three = Tiling((1,), ((full,), (empty, empty, full)), "sum")
    two_two = Tiling((1,), ((full, empty), (empty, full)), "sum")
    assert one_three.tiles == two_two.tiles
    assert one_three != two_two
    assert one_three.digest != two_two.digest


def test_a_tiling_equals_nothing_else() -> None:
    assert Tiling.of_tiles((4,), HALVES) != ((4,), (HALVES,), None)


def test_a_digest_is_the_same_in_every_process() -> None:
    program = (
        "from tilework.layout import *;"
        "print(mesh_tiling((5, 4), [[0, 1], [2, 3]], [Shard(0), Partial('max')]).digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    here = mesh_tiling((5, 4), [[0, 1], [2, 3]], [Shard(0), Partial("max")])
    assert int(done.stdout) == here.digest


@each(
    ("terms", "op", "message"),
    [
        ((), None, "0 terms"),
        ((HALVES,), "sum", "1 terms and reduce_op='sum'"),
        ((HALVES, HALVES), None, "2 terms and reduce_op=None"),
        ((HALVES[:1],), None, r"no box covers \[2:3\]"),
        (((*HALVES, HALVES[0]),), None, "boxes 0 and 2 overlap"),
    ],
)
def test_what_is_no_tiling(terms: Any, op: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiling((4,), terms, op)


@pytest.mark.parametrize("owners", [(), (1, 1)])
def test_a_tile_has_owners_each_once(owners: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one owner, none twice"):
        Tile(Box((0,), (2,)), owners)


def test_layout_needs_no_torch() -> None:
    """The files themselves; the package that they are in is empty."""
    program = (
        "import sys; before = set(sys.modules); import tilework.layout;"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert "tilework" in done.stdout.split()
    assert not {"torch", "numpy", "rich"} & set(done.stdout.split())


def test_a_mesh_of_replicas() -> None:
    tiling = mesh_tiling((4,), [[0, 1], [2, 3]], [Replicate(), Shard(0)])
    assert [tile.owners for tile in tiling.tiles] == [(0, 2), (1, 3)]


def test_a_mesh_of_terms() -> None:
    tiling = mesh_tiling((4,), [[0, 1], [2, 3]], [Partial(), Shard(0)])
    assert [[tile.owners for tile in term] for term in tiling.terms] == [[(0,), (1,)], [(2,), (3,)]]
    assert tiling.reduce_op == "sum"
