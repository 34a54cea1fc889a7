"""Meshes with placements, against cutting with torch rank by rank."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.layout.random_tilings import MESHES, Ints, examples, mesh_tilings, placements, shapes
from tests.tables import each
from tilework.layout import Partial, Placement, Replicate, Shard, Tiling, mesh_tiling
from tilework.layout.internal import packed, placements_in


def part_of(rank: int, whole: Tensor, mesh: Tensor, placed: list[Placement]) -> Tensor:
    """What a rank holds: each axis cuts what the axes before it left."""
    (coordinate,) = (mesh == rank).nonzero().tolist()
    for at, length, placement in zip(coordinate, mesh.shape, placed, strict=True):
        if isinstance(placement, Shard):
            parts = whole.chunk(length * placement.turns, placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            numbers = [at, 2 * length - 1 - at][: placement.turns]
            mine = [parts[i] if i < len(parts) else empty for i in numbers]
            whole = torch.cat(mine, placement.dim)
    return whole


@examples()
@given(st.data())
def test_each_rank_holds_what_torch_cuts(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    mesh = data.draw(st.sampled_from(MESHES))
    ranks = torch.tensor(mesh)
    placed = [data.draw(placements(len(shape))) for _ in ranks.shape]
    tiling = mesh_tiling(shape, mesh, placed)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for rank in ranks.flatten().tolist():
        boxes, part = tiling.boxes_of(rank), part_of(rank, whole, ranks, placed)
        for box, place in zip(boxes, packed(boxes), strict=True):
            assert torch.equal(whole[box.slices], part[place.slices])
        assert sum(box.volume for box in boxes) == part.numel()
    assert len(tiling.terms) == partial_ranks(ranks, placed)


def partial_ranks(mesh: Tensor, placed: list[Placement]) -> int:
    """How many ranks each element is the reduction of."""
    terms = 1
    for length, placement in zip(mesh.shape, placed, strict=True):
        terms *= length if isinstance(placement, Partial) else 1
    return terms


@examples()
@given(shapes().flatmap(mesh_tilings))
def test_it_is_a_tiling(tiling: Tiling) -> None:
    """Made unchecked, and right."""
    assert Tiling(tiling.shape, tiling.terms, tiling.reduce_op) == tiling


def test_sizes_of_ones_own() -> None:
    tiling = mesh_tiling((10, 2), [4, 5, 6], [Shard(-2, sizes=(7, 0, 3))])
    assert [str(tile.box) for tile in tiling.tiles] == ["[0:7, 0:2]", "[7:7, 0:2]", "[7:10, 0:2]"]


def test_axes_cut_in_the_order_that_is_asked_for() -> None:
    mesh = [[0, 1], [2, 3]]
    first = mesh_tiling((8,), mesh, [Shard(0), Shard(0)])
    last = mesh_tiling((8,), mesh, [Shard(0), Shard(0)], order=[1, 0])
    ranks = range(4)
    assert [first.boxes_of(rank)[0].offsets for rank in ranks] == [(0,), (2,), (4,), (6,)]
    assert [last.boxes_of(rank)[0].offsets for rank in ranks] == [(0,), (4,), (2,), (6,)]


def test_one_rank_along_a_partial_axis_is_a_whole_value() -> None:
    tiling = mesh_tiling((4,), [[0, 1]], [Partial("max"), Shard(0)])
    assert (len(tiling.terms), tiling.reduce_op) == (1, None)


@each(
    ("mesh", "placed", "message"),
    [
        ([0, 1], [], "takes 1, got"),
        ([[0, 1], [2]], [Shard(0), Shard(1)], "rows differ in length"),
        ([[0, 1], 2], [Shard(0), Shard(1)], "rows differ in length"),
        ([0, 1, 0], [Shard(0)], "none twice"),
        ([], [Shard(0)], "one or more ranks"),
        ([0, 1], [Shard(2)], r"\(4, 6\) has no dim 2"),
        ([0, 1], [Shard(-3)], "no dim -3"),
        ([0, 1], [Shard(0, sizes=(1, 1))], "does not split an extent of 4 into 2 shards"),
        ([0, 1], [Shard(0, sizes=(1, 1, 2))], "does not split an extent of 4 into 2 shards"),
        ([[0, 1], [2, 3]], [Partial("sum"), Partial("max")], "one reduction"),
    ],
)
def test_what_makes_no_tiling(mesh: Any, placed: list[Placement], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_tiling((4, 6), mesh, placed)


@each("order", [[0], [0, 0], [1, 2]])
def test_an_order_names_each_axis(order: list[int]) -> None:
    with pytest.raises(ValueError, match="each of the mesh's 2 axes once"):
        mesh_tiling((4, 6), [[0, 1], [2, 3]], [Shard(0), Shard(0)], order=order)


@pytest.mark.parametrize("sizes", [(), (1, -1)])
def test_sizes_are_some_and_not_negative(sizes: Ints) -> None:
    with pytest.raises(ValueError, match="one or more sizes, none negative"):
        Shard(0, sizes=sizes)


@each("dim", [0.7, "1", True, None])
def test_a_dim_is_a_whole_number(dim: Any) -> None:
    assert Shard(np.int64(1)).dim == 1  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"Shard takes a dim, .*got {dim!r}"):
        Shard(dim)
    with pytest.raises(TypeError, match=rf"Shard takes sizes, .*got {dim!r}"):
        Shard(0, (2, dim))


@pytest.mark.parametrize("sizes", [4, "12"])
def test_sizes_are_a_sequence(sizes: Any) -> None:
    with pytest.raises(TypeError, match=rf"as \(3, 5\); got {sizes!r}"):
        Shard(0, sizes)


def test_placements_are_values() -> None:
    assert Shard(1) == Shard(1) != Shard(0)
    assert {Replicate(), Replicate(), Partial(), Partial("sum")} == {Partial(), Replicate()}


@pytest.mark.parametrize("nested", [[Shard(0)], {0: Shard(0)}, {Shard(0)}])
def test_a_nested_placement_is_refused(nested: Any) -> None:
    with pytest.raises(TypeError, match=r"got .* in .*: pass one for each axis"):
        placements_in([nested])


def test_a_partial_placement_names_a_reduction() -> None:
    assert Partial("max").reduce_op == "max"
    with pytest.raises(ValueError, match=r"one of sum, avg, .*; got 'mean'"):
        Partial("mean")


def test_a_tensor_of_one_number_is_a_dim() -> None:
    assert Shard(cast(Any, torch.tensor(1)), [2, 3]) == Shard(1, (2, 3))  # type: ignore[arg-type]
