"""Random boxes and tilings, small enough to look at each element."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tilework.layout import (
    Box,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    Tile,
    Tiling,
    chunk_tiling,
    mesh_tiling,
)

Ints = tuple[int, ...]

MOST_RANKS = 6


def examples(count: int = 80) -> settings:
    """So many of them, however long a loaded machine takes."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def points(box: Box) -> Iterator[Ints]:
    """The coordinates of each element."""
    return product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)))


def whole(shape: Ints) -> Box:
    return Box((0,) * len(shape), shape)


def shapes(max_dims: int = 3, max_side: int = 5) -> st.SearchStrategy[Ints]:
    """Scalars, empty ones and others."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Ints) -> Box:
    """Any box within the shape, an empty one now and then."""
    spans = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@st.composite
def boxes_of(draw: st.DrawFn, ndim: int, most: int = 12) -> list[Box]:
    """Boxes with one number of dims, anywhere."""
    return draw(st.lists(boxes_in((6,) * ndim), max_size=most))


@st.composite
def covers(draw: st.DrawFn, shape: Ints, most_cuts: int = 6) -> list[Box]:
    """Boxes that cover the shape: cut again and again, or a spiral that no cut goes through."""
    if 0 in shape and draw(st.booleans()):
        return []
    boxes = [whole(shape)]
    if len(shape) == 2 and min(shape) >= 3 and draw(st.booleans()):
        boxes = spiral(shape)
    for _ in range(draw(st.integers(0, most_cuts)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        size = draw(st.integers(0, box.sizes[dim]))
        boxes += cut(box, dim, size)
    return draw(st.permutations(boxes))


def cut(box: Box, dim: int, size: int) -> list[Box]:
    """The first ``size`` of the box, and the rest."""

    def part(offset: int, length: int) -> Box:
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += offset
        sizes[dim] = length
        return Box(tuple(offsets), tuple(sizes))

    return [part(0, size), part(size, box.sizes[dim] - size)]


def spiral(shape: Ints) -> list[Box]:
    """Four boxes around a fifth."""
    h, w = shape
    return [
        Box((0, 0), (1, w - 1)),
        Box((0, w - 1), (h - 1, 1)),
        Box((h - 1, 1), (1, w - 1)),
        Box((1, 0), (h - 1, 1)),
        Box((1, 1), (h - 2, w - 2)),
    ]


def owners() -> st.SearchStrategy[Ints]:
    """One rank, or several: their tile is replicated."""
    return st.lists(st.integers(0, MOST_RANKS - 1), min_size=1, max_size=3, unique=True).map(tuple)


@st.composite
def free_tilings(draw: st.DrawFn, shape: Ints) -> Tiling:
    """Any boxes with any owners; a rank may have none, one or many."""

    def term() -> tuple[Tile, ...]:
        return tuple(Tile(box, draw(owners())) for box in draw(covers(shape)))

    terms = draw(st.sampled_from([1, 1, 2, 3]))
    op = draw(st.sampled_from(["sum", "avg"])) if terms > 1 else None
    return Tiling(shape, tuple(term() for _ in range(terms)), op)


MESHES: tuple[list[Any], ...] = (
    [0],
    [0, 1, 2],
    [3, 1, 0, 2],
    [[0, 1], [2, 3]],
    [[0, 1, 2], [3, 4, 5]],
    [[5, 3], [4, 0], [2, 1]],
    [[[0, 1], [2, 3]]],
)


def placements(ndim: int) -> st.SearchStrategy[Placement]:
    shards = [Shard(dim, turns=turns) for dim in range(ndim) for turns in (1, 2)]
    return st.sampled_from([*shards, Replicate(), Partial()])


@st.composite
def mesh_tilings(draw: st.DrawFn, shape: Ints, mesh: list[Any] | None = None) -> Tiling:
    """Placements on a small mesh."""
    ranks = draw(st.sampled_from(MESHES)) if mesh is None else mesh
    axes = 0
    level: Any = ranks
    while isinstance(level, list):
        axes, level = axes + 1, level[0]
    return mesh_tiling(shape, ranks, [draw(placements(len(shape))) for _ in range(axes)])


@st.composite
def chunk_tilings(draw: st.DrawFn, shape: Ints) -> Tiling:
    ranks = draw(st.lists(st.integers(0, MOST_RANKS - 1), min_size=1, max_size=6))
    return chunk_tiling(shape, draw(st.integers(-len(shape), len(shape) - 1)), ranks)


def tilings(shape: Ints) -> st.SearchStrategy[Tiling]:
    """Tilings of all kinds."""
    kinds: list[st.SearchStrategy[Tiling]] = [free_tilings(shape), mesh_tilings(shape)]
    if shape:
        kinds.append(chunk_tilings(shape))
    return st.one_of(kinds)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tiling, Tiling]:
    """Two tilings of one shape; often on one mesh, where collectives are to be found."""
    shape = draw(shapes())
    if draw(st.booleans()):
        mesh = draw(st.sampled_from(MESHES))
        return draw(mesh_tilings(shape, mesh)), draw(mesh_tilings(shape, mesh))
    return draw(tilings(shape)), draw(tilings(shape))


@st.composite
def shard_sizes(draw: st.DrawFn, extent: int, length: int) -> Ints:
    marks = sorted(draw(st.lists(st.integers(0, extent), min_size=length - 1, max_size=length - 1)))
    return tuple(b - a for a, b in zip([0, *marks], [*marks, extent], strict=True))


@st.composite
def layouts(draw: st.DrawFn, shape: Ints, lengths: Ints, turns: int = 2) -> Layout:
    """Any layout on a mesh: uneven, dealt, with axes that cut a dim in any order, or partial."""
    op = draw(st.sampled_from(["sum", "sum", "max"]))
    order = draw(st.permutations(range(len(lengths))))
    placements: dict[int, Placement] = {}
    for axis in order:
        one = draw(
            st.one_of(
                st.just(Replicate()),
                st.just(Partial(op)),
                *[st.just(Shard(d, turns=t)) for d in range(len(shape)) for t in {1, turns}],
            )
        )
        first = (
            isinstance(one, Shard)
            and one.turns == 1
            and not any(isinstance(p, Shard) and p.dim == one.dim for p in placements.values())
        )
        if isinstance(one, Shard) and first and draw(st.booleans()):
            one = Shard(one.dim, draw(shard_sizes(shape[one.dim], lengths[axis])))
        placements[axis] = one
    return Layout(tuple(placements[axis] for axis in range(len(lengths))), tuple(order))
