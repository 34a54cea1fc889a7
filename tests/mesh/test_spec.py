"""Meshes as values, against index arithmetic done by torch."""

from __future__ import annotations

import math
import pickle
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import each
from tilework.mesh import MeshSpec

NAMES = ("a", "b", "c", "d")


@st.composite
def specs(draw: st.DrawFn) -> MeshSpec:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    ranks = draw(st.permutations(range(math.prod(shape))))
    return MeshSpec(shape, tuple(ranks), NAMES[: len(shape)])


@given(specs())
def test_coordinates_are_those_of_the_grid(spec: MeshSpec) -> None:
    grid = torch.tensor(spec.ranks).reshape(spec.shape)
    for rank in spec.ranks:
        found = spec.coordinate(rank)
        assert found is not None
        assert grid[found].item() == rank == spec.at(found)
    assert MeshSpec.of(grid, spec.names) == spec == MeshSpec.of(spec.nested(), spec.names)


@given(specs(), st.data())
def test_parts_are_slices_of_the_grid(spec: MeshSpec, data: st.DataObject) -> None:
    grid = torch.tensor(spec.ranks).reshape(spec.shape)
    axes = data.draw(st.lists(st.sampled_from(range(spec.ndim)), unique=True, min_size=1))
    rank = data.draw(st.sampled_from(spec.ranks))
    here = spec.coordinate(rank)
    assert here is not None
    part = spec.through([spec.names[axis] if spec.names else axis for axis in axes], rank)
    index = tuple(slice(None) if axis in axes else here[axis] for axis in range(spec.ndim))
    order = [sorted(axes).index(axis) for axis in axes]
    assert part.nested() == grid[index].permute(order).tolist()
    assert part.names == tuple(NAMES[axis] for axis in axes)
    assert part.flattened().ranks == part.ranks


def test_values() -> None:
    spec = MeshSpec.regular((2, 3), ["dp", "tp"])
    assert spec == pickle.loads(pickle.dumps(spec))
    assert hash(spec) == hash(MeshSpec.of([[0, 1, 2], [3, 4, 5]], ("dp", "tp")))
    assert spec != spec.named(None) != spec.named(("x", "y"))
    assert spec.flattened().names == ("dp_tp",)
    assert spec.flattened("all").names == ("all",)
    assert spec.named(None).flattened().names is None
    assert (str(spec), str(spec.named(None))) == ("dp=2 tp=3", "0=2 1=3")
    assert (spec.axis("tp"), spec.axis(-1), spec.axis(0)) == (1, 1, 0)
    assert spec.coordinate(6) is None
    assert MeshSpec.of(5).ranks == (5,)


@each(
    ("make", "error", "text"),
    [
        (lambda: MeshSpec.of([[0, 1], [1, 2]]), ValueError, r"duplicate values: \[1\]"),
        (lambda: MeshSpec.of([[0, 1], [2]]), ValueError, "rows differ in length"),
        (lambda: MeshSpec((2, 2), (0, 1, 2)), ValueError, r"\(2, 2\) has 4 ranks, got 3"),
        (lambda: MeshSpec((0,), ()), ValueError, r"1 or more ranks along each axis, got \(0,\)"),
        (lambda: MeshSpec.regular((-1, -2)), ValueError, r"1 or more ranks .*, got \(-1, -2\)"),
        (lambda: MeshSpec.regular(cast(Any, "2")), TypeError, r"as \(2, 4\); got '2'"),
        (lambda: MeshSpec.regular(cast(Any, (2.0,))), TypeError, r"as \(2, 4\); got 2\.0"),
        (lambda: MeshSpec.of([0, -1]), ValueError, "from 0 on"),
        (lambda: MeshSpec.of(["x"]), TypeError, "nested sequences"),
        (lambda: MeshSpec.of([0, 1], ("a", "b")), ValueError, "each of the mesh's 1 axes"),
        (lambda: MeshSpec.of([[0], [1]], ("a", "a")), ValueError, "must be unique"),
        (lambda: MeshSpec.of([0], ("",)), ValueError, "not empty"),
        (lambda: MeshSpec.of([0], ("a",)).axis("b"), KeyError, "Invalid mesh_dim_name 'b'"),
        (lambda: MeshSpec.of([0]).axis("b"), KeyError, "not named"),
        (lambda: MeshSpec.of([0]).axis(1), IndexError, "axis 1 does not exist in a mesh"),
        (lambda: MeshSpec.of([0]).line(0, 3), ValueError, "rank 3 is not in the mesh"),
        (lambda: MeshSpec.of([[0]]).through([0, -2], 0), ValueError, "taken once"),
    ],
)
def test_what_is_no_mesh(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@given(data=st.data())
def test_what_is_left_has_whole_slices_only(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    mesh = MeshSpec.regular(shape)
    ranks = data.draw(st.permutations(range(mesh.size)))
    mesh = MeshSpec(shape, tuple(ranks))
    axis = data.draw(st.integers(0, len(shape) - 1))
    lost = data.draw(st.sets(st.integers(0, mesh.size - 1)))

    def index(rank: int) -> int:
        place = mesh.coordinate(rank)
        assert place is not None
        return place[axis]

    kept = sorted(set(range(shape[axis])) - {index(rank) for rank in lost})
    if not kept:
        with pytest.raises(ValueError, match="no slice"):
            mesh.without(lost, axis)
        return
    left = mesh.without(lost, axis)
    assert left.shape == (*shape[:axis], len(kept), *shape[axis + 1 :])
    for rank in left.ranks:
        here, before = left.coordinate(rank), mesh.coordinate(rank)
        assert here is not None
        assert before == (*here[:axis], kept[here[axis]], *here[axis + 1 :])


@each("shape", [(0,), (-1,), (-1, -2)])
def test_axes_have_ranks(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="1 or more ranks along each axis"):
        MeshSpec.regular(shape)


@each("shape", ["cpu", "2", (2.0,)])
def test_shapes_are_numbers_of_ranks(shape: Any) -> None:
    with pytest.raises(TypeError, match="the number of ranks along each axis"):
        MeshSpec.regular(shape)


def test_axes_that_descend() -> None:
    assert MeshSpec.regular((2, 2)).descending_axis() is None
    assert MeshSpec.of([[0, 2], [1, 3]]).descending_axis() is None
    assert MeshSpec.of([[1, 0], [2, 3]]).descending_axis() == 1
