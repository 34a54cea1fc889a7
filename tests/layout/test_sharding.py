"""Sharding of dims by mesh axes, against splitting an extent axis by axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import Ints, examples, layouts, shard_sizes
from tilework.layout import Layout, Shard, chunk_sizes, mesh_tiling
from tilework.layout.box import (
    Splits,
    axes_of,
    boxes_at,
    combination_index,
    infer_splits,
    shard_at,
    shard_extents,
    shards,
)
from tilework.layout.sharding import normal_layout, splits_of

LENGTHS: tuple[Ints, ...] = ((1,), (3,), (2, 2), (3, 2), (2, 1, 2))


@st.composite
def sharded_extents(draw: st.DrawFn) -> tuple[int, Ints, Splits]:
    """An extent, a mesh, and splits that fit; only the outermost has sizes of its own."""
    lengths = draw(st.sampled_from(LENGTHS))
    extent = draw(st.integers(0, 12))
    axes = draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    splits: list[tuple[int, Ints | None]] = [(axis, None) for axis in axes]
    explicit = draw(st.booleans())
    if axes and explicit:
        splits[0] = (axes[0], draw(shard_sizes(extent, lengths[axes[0]])))
    return extent, lengths, tuple(splits)


def split(extent: int, lengths: Ints, splits: Splits, coordinate: Sequence[int]) -> range:
    """The elements of the shard at a coordinate: each axis splits what those before left."""
    elements = range(extent)
    for axis, sizes in splits:
        assert not isinstance(sizes, int)  # no blocks that are dealt in turns
        parts = chunk_sizes(len(elements), lengths[axis]) if sizes is None else list(sizes)
        start = sum(parts[: coordinate[axis]])
        elements = elements[start : start + parts[coordinate[axis]]]
    return elements


@examples()
@given(sharded_extents())
def test_each_shard_is_what_axis_by_axis_leaves(task: tuple[int, Ints, Splits]) -> None:
    extent, lengths, splits = task
    for coordinate in product(*map(range, lengths)):
        expected = split(extent, lengths, splits, coordinate)
        offset, size = shard_at(extent, lengths, splits, coordinate)
        assert size == len(expected)
        assert size == 0 or offset == expected.start


@examples()
@given(sharded_extents())
def test_all_shards_are_those_at_each_coordinate_in_order(task: tuple[int, Ints, Splits]) -> None:
    extent, lengths, splits = task
    offsets, sizes = shards(extent, lengths, splits)
    axes = axes_of(splits)
    for number, places in enumerate(product(*[range(lengths[axis]) for axis in axes])):
        coordinate = [0] * len(lengths)
        for axis, place in zip(axes, places, strict=True):
            coordinate[axis] = place
        at = shard_at(extent, lengths, splits, coordinate)
        assert at == (offsets[number], sizes[number])
    assert list(offsets) == sorted(offsets)
    assert sum(sizes) == extent
    assert shard_extents(extent, lengths, splits) == tuple(sorted(set(sizes)))


@examples()
@given(sharded_extents())
def test_sizes_of_shards_tell_the_splits(task: tuple[int, Ints, Splits]) -> None:
    extent, lengths, splits = task
    _, sizes = shards(extent, lengths, splits)
    axes = axes_of(splits)
    inferred = infer_splits(sizes, [lengths[axis] for axis in axes])
    assert inferred is not None
    again = tuple(zip(axes, inferred, strict=True))
    assert shards(extent, lengths, again)[1] == sizes


def test_shards_that_no_placement_has() -> None:
    assert infer_splits((3, 2, 1, 2), (2, 2)) is None
    assert infer_splits((5, 3), (2,)) == ((5, 3),)
    assert infer_splits((7,), ()) == ()


def test_sizes_that_do_not_fit_have_no_shards() -> None:
    assert shards(8, (2, 2), ((0, None), (1, (1, 2)))) == ((), ())
    assert shard_extents(8, (2, 2), ((0, None), (1, (1, 2)))) == ()


@examples()
@given(st.data())
def test_normal_layouts_are_equal_where_tilings_are_made_alike(data: st.DataObject) -> None:
    lengths = data.draw(st.sampled_from(LENGTHS))
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    layout = data.draw(layouts(shape, lengths))
    splits = splits_of(shape, lengths, layout)
    normal = normal_layout(layout, splits)
    assert splits_of(shape, lengths, normal) == splits
    assert normal_layout(normal, splits) == normal
    mesh = nested(lengths)
    tiling = mesh_tiling(shape, mesh, layout.placements, order=layout.order)
    again = mesh_tiling(shape, mesh, normal.placements, order=normal.order)
    for number, coordinate in enumerate(product(*map(range, lengths))):
        boxes = boxes_at(shape, lengths, splits, coordinate)
        assert tiling.boxes_of(number) == again.boxes_of(number) == boxes


def nested(lengths: Ints) -> list[object]:
    """The ranks from 0 on, in a mesh of these lengths."""
    ranks: list[object] = list(range(len(list(product(*map(range, lengths))))))
    for length in reversed(lengths[1:]):
        ranks = [ranks[at : at + length] for at in range(0, len(ranks), length)]
    return ranks


def test_a_layout_in_normal_form() -> None:
    layout = Layout((Shard(-2, (1, 1)), Shard(1), Shard(0)), (2, 1, 0))
    splits = splits_of((4, 2), (2, 1, 2), layout)
    assert splits == (((2, None), (0, None)), ((1, None),))
    assert normal_layout(layout, splits) == Layout((Shard(0), Shard(1), Shard(0)), (2, 1, 0))


def test_combinations_are_numbered_with_the_last_axis_fastest() -> None:
    assert combination_index((0, 1), (0, 1), (2, 3)) == [0, 1, 2, 3, 4, 5]
    assert combination_index((0, 1), (1, 0), (2, 3)) == [0, 2, 4, 1, 3, 5]
    assert combination_index((0, 1), (), (2, 3)) == [0] * 6
