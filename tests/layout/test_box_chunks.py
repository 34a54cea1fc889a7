"""Chunks are those of torch.chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import examples
from tests.tables import each
from tilework.layout import (
    Box,
    chunk_offsets,
    chunk_size,
    chunk_sizes,
    chunk_tiling,
    infer_chunking,
    offsets_of,
)


@examples()
@given(st.integers(0, 50), st.integers(1, 60))
def test_sizes_are_those_of_torch(extent: int, n: int) -> None:
    theirs = [len(part) for part in torch.empty(extent).chunk(n)]
    ours = chunk_sizes(extent, n)
    assert len(ours) == n
    assert sum(ours) == extent
    # torch has no empty chunks, but for one of an empty tensor.
    assert [size for size in ours if size] == [size for size in theirs if size]


@examples()
@given(st.integers(0, 50), st.integers(1, 60))
def test_chunks_with_elements_start_where_the_one_before_ends(extent: int, n: int) -> None:
    sizes = chunk_sizes(extent, n)
    for size, start, expected in zip(
        sizes, chunk_offsets(extent, n), offsets_of(sizes), strict=True
    ):
        assert start == expected or size == 0


def test_empty_chunks_lie_past_the_end() -> None:
    assert chunk_offsets(2, 4) == [0, 1, 2, 3]
    assert chunk_sizes(2, 4) == [1, 1, 0, 0]


@each(("extent", "n"), [(5, 0), (-1, 2), (5, -3)])
def test_what_cannot_be_cut(extent: int, n: int) -> None:
    for function in (chunk_size, chunk_sizes, chunk_offsets):
        with pytest.raises(ValueError, match=f"extent {extent}, {n} chunks"):
            function(extent, n)


@examples()
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    st.integers(1, 6),
    st.data(),
)
def test_chunks_are_recognised(shape: tuple[int, ...], n: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    boxes = [tile.box for tile in chunk_tiling(shape, dim, range(n)).tiles]
    found = infer_chunking(shape, boxes)
    assert found is not None
    assert [tile.box for tile in chunk_tiling(shape, found, range(n)).tiles] == boxes


@each(
    "boxes",
    [
        [],
        [Box((0, 0), (4, 5))],  # not all of it
        [Box((0, 0), (1, 4)), Box((1, 0), (3, 4))],  # uneven
        [Box((2, 0), (2, 4)), Box((0, 0), (2, 4))],  # another order
        [Box((i, j), (2, 2)) for i in (0, 2) for j in (0, 2)],  # a grid
        [Box((0,), (2,)), Box((2,), (2,))],  # another number of dims
    ],
)
def test_other_boxes_are_not_chunks(boxes: list[Box]) -> None:
    assert infer_chunking((4, 4), boxes) is None


def test_chunks_of_a_shape_with_one_chunk() -> None:
    assert infer_chunking((4, 4), [Box((0, 0), (4, 4))]) == 0


def test_a_rank_may_own_several_chunks() -> None:
    tiling = chunk_tiling((5, 2), -2, [1, 0, 1])
    assert [str(box) for box in tiling.boxes_of(1)] == ["[0:2, 0:2]", "[4:5, 0:2]"]
    assert tiling.of(0) == (1,)


def test_a_dim_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"shape \(5, 2\) has no dim 2"):
        chunk_tiling((5, 2), 2, [0, 1])
