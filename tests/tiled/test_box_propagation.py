"""Factor maps on boxes: tile by tile gives what the operator gives of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilework.tiled.rules  # noqa: F401  # fills the operator table
from tests.layout.random_tilings import covers, examples
from tests.tables import each
from tilework.layout import Box, Tile, Tiling, check_boxes
from tilework.tiled.box_propagation import (
    LocalOp,
    NotLocal,
    Obstacle,
    TileRanges,
    propagate_boxes,
    within,
)
from tilework.tiled.factors import Factor, FactorMap, Pattern, broadcast, dim_factors, factors_of
from tilework.tiled.op_rules import Arg, LocalCall
from tilework.tiled.op_table import entry_of
from tilework.tiled.rules.reshaping import regrouped


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> Tiling:
    """Boxes that cover the shape, one owner each."""
    tiles = [Tile(box, (draw(st.integers(0, 3)),)) for box in draw(covers(shape))]
    return Tiling.of_tiles(shape, tiles)


def shapes(least: int = 0, smallest: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(smallest, 4), min_size=least, max_size=3).map(tuple)


def numbered(shape: Sequence[int], first: int = 0) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, dtype=torch.float64).reshape(tuple(shape))


def check(
    mapped: FactorMap,
    inputs: Sequence[Tiling],
    compute: Callable[..., Tensor],
    local: Callable[..., Tensor] | None = None,
) -> LocalOp | NotLocal:
    """What comes of tiles, put together by their boxes, is what comes of the whole.

    Args:
        mapped: What the operator does to dims.
        inputs: Tilings of its inputs.
        compute: The operator.
        local: What runs on tiles, called with them and the box of the result; None: the operator.
    """
    wholes = [numbered(tiling.shape, 100 * i) for i, tiling in enumerate(inputs)]
    expected = compute(*wholes)
    found = propagate_boxes(mapped, inputs)
    if isinstance(found, NotLocal):
        return found
    boxes = found.boxes(0, tuple(expected.shape))
    check_boxes(tuple(expected.shape), boxes)
    result = torch.full_like(expected, -1)
    for i, box in enumerate(boxes):
        tiles = [w[t.tiles[i].box.slices] for w, t in zip(wholes, inputs, strict=True)]
        if box.empty:
            continue
        part = compute(*tiles) if local is None else local(*tiles, box)
        assert part.shape == box.sizes
        result[box.slices] = part
    assert torch.equal(result, expected)
    return found


def sharded_dims(tiling: Tiling) -> set[int]:
    return {
        dim
        for dim, extent in enumerate(tiling.shape)
        if any(tile.box.sizes[dim] != extent for tile in tiling.tiles)
    }


@examples()
@given(st.data())
def test_elementwise_with_broadcasting(data: st.DataObject) -> None:
    """Operands that lie alike are local; broadcast ones are where their tiles fit."""
    tiling = data.draw(shapes().flatmap(tilings))
    factors, dims = broadcast([tiling.shape, tiling.shape])
    mapped = FactorMap(tuple(dims), (dim_factors(factors),))
    assert isinstance(check(mapped, [tiling, tiling], torch.add), LocalOp)
    other = data.draw(tilings(tiling.shape))
    check(mapped, [tiling, other], torch.add)
    narrow = data.draw(tilings(tuple(data.draw(st.sampled_from([1, n])) for n in tiling.shape)))
    factors, dims = broadcast([tiling.shape, narrow.shape])
    check(FactorMap(tuple(dims), (dim_factors(factors),)), [tiling, narrow], torch.add)


@examples()
@given(st.data())
def test_a_dim_that_is_needed_whole_must_not_be_sharded(data: st.DataObject) -> None:
    tiling = data.draw(shapes(1).flatmap(tilings))
    dim = data.draw(st.integers(0, len(tiling.shape) - 1))
    for kept in (True, False):
        rows = [
            Factor(size, unshardable=at == dim) if kept or at != dim else None
            for at, size in enumerate(tiling.shape)
        ]
        mapped = FactorMap((dim_factors(rows),), (dim_factors(rows),))
        found = check(mapped, [tiling], lambda x: x.flip(dim))
        if dim in sharded_dims(tiling):
            assert found == NotLocal(Obstacle.UNSHARDABLE, dim)
        else:
            assert isinstance(found, LocalOp)


@examples()
@given(st.data())
def test_a_reduced_dim_must_not_be_sharded(data: st.DataObject) -> None:
    tiling = data.draw(shapes(1, 1).flatmap(tilings))
    dim = data.draw(st.integers(0, len(tiling.shape) - 1))
    factors = factors_of(tiling.shape)
    mapped = FactorMap((dim_factors(factors),), (dim_factors(factors[:dim] + factors[dim + 1 :]),))
    found = check(mapped, [tiling], lambda x: x.sum(dim))
    expected = NotLocal(Obstacle.REDUCED, dim) if dim in sharded_dims(tiling) else found
    assert found == expected


@examples()
@given(st.data())
def test_permutations_are_always_local(data: st.DataObject) -> None:
    tiling = data.draw(shapes().flatmap(tilings))
    order = data.draw(st.permutations(range(len(tiling.shape))))
    factors = factors_of(tiling.shape)
    mapped = FactorMap((dim_factors(factors),), (dim_factors([factors[d] for d in order]),))
    assert isinstance(check(mapped, [tiling], lambda x: x.permute(order)), LocalOp)


@examples(200)
@given(st.data())
def test_other_shapes(data: st.DataObject) -> None:
    """Only the first of dims that are split or merged may be sharded, at the others' steps."""
    several = [(24,), (4, 6), (2, 3, 4), (1, 24), (8, 1, 3), (2, 2, 6), (24, 1), (12, 2)]
    shape, size = data.draw(st.sampled_from(several)), data.draw(st.sampled_from(several))
    tiling = data.draw(tilings(shape))
    befores, afters = regrouped(shape, size)
    mapped = FactorMap((tuple(befores),), (tuple(afters),), rearranges=True)
    found = check(mapped, [tiling], lambda x: x.reshape(size), lambda x, box: x.reshape(box.sizes))
    if isinstance(found, NotLocal):
        assert found.obstacle in (Obstacle.UNALIGNED, Obstacle.SCATTERED, Obstacle.UNSHARDABLE)
        assert size != shape


def test_an_empty_tile_of_a_dim_of_size_1_stays_empty() -> None:
    tiles = [Tile(Box((0, 0), (1, 4)), (0,)), Tile(Box((1, 0), (0, 4)), (1,))]
    befores, afters = regrouped((1, 4), (4,))
    mapped = FactorMap((tuple(befores),), (tuple(afters),), rearranges=True)
    found = propagate_boxes(mapped, [Tiling.of_tiles((1, 4), tiles)])
    assert isinstance(found, LocalOp)
    assert [box.sizes for box in found.boxes()] == [(4,), (0,)]


@examples()
@given(st.data())
def test_products(data: st.DataObject) -> None:
    """Local where rows or columns are sharded, not where the sum is."""
    rows, inner, columns = (data.draw(st.integers(1, 3)) for _ in range(3))
    mapped = Pattern.parse("i k, k j -> i j").of([(rows, inner), (inner, columns)])
    left, right = data.draw(tilings((rows, inner))), data.draw(tilings((inner, columns)))
    found = check(mapped, [left, right], torch.matmul)
    if 1 in sharded_dims(left):
        assert isinstance(found, NotLocal)


def test_rows_times_columns_are_not_local() -> None:
    """Each rank would have but its diagonal block."""
    row, column = Box((0, 0), (1, 3)), Box((0, 0), (3, 1))
    left = Tiling.of_tiles((2, 3), [Tile(row, (0,)), Tile(Box((1, 0), (1, 3)), (1,))])
    right = Tiling.of_tiles((3, 2), [Tile(column, (0,)), Tile(Box((0, 1), (3, 1)), (1,))])
    mapped = Pattern.parse("i k, k j -> i j").of([(2, 3), (3, 2)])
    assert propagate_boxes(mapped, [left, right]) == NotLocal(Obstacle.MISMATCHED)


def test_outer_product_of_rows() -> None:
    rows = Tiling.of_tiles((4,), [Tile(Box((0,), (3,)), (0,)), Tile(Box((3,), (1,)), (1,))])
    all_of_it = Box((0,), (2,))
    other = Tiling((2,), ((Tile(all_of_it, (0, 1)),),))
    mapped = Pattern.parse("i, j -> i j").of([(4,), (2,)])
    # One tile of the second input is none beside two of the first, though both ranks have it.
    assert propagate_boxes(mapped, [rows, other]) == NotLocal(Obstacle.MISMATCHED)


@examples()
@given(st.data())
def test_putting_together_along_a_dim_that_is_whole(data: st.DataObject) -> None:
    tiling = data.draw(shapes(1, 1).flatmap(tilings))
    dim = data.draw(st.integers(0, len(tiling.shape) - 1))
    inputs = [Factor(n, unshardable=at == dim) for at, n in enumerate(tiling.shape)]
    out = list(inputs)
    out[dim] = Factor(2 * tiling.shape[dim], unshardable=True)
    mapped = FactorMap(
        (dim_factors(inputs), dim_factors(inputs)), (dim_factors(out),), rearranges=True
    )
    found = check(mapped, [tiling, tiling], lambda *x: torch.cat(x, dim))
    assert isinstance(found, NotLocal) == (dim in sharded_dims(tiling))


def test_tiles_on_other_ranks_do_not_fit() -> None:
    box = Box((0,), (2,))
    here, there = (Tiling.of_tiles((2,), [Tile(box, (rank,))]) for rank in (0, 1))
    factor = Factor(2)
    mapped = FactorMap((((factor,),),) * 2, (((factor,),),))
    assert propagate_boxes(mapped, [here, there]) == NotLocal(Obstacle.MISMATCHED)


_RULED: dict[str, tuple[Any, ...]] = {
    "permute": ((2, 0, 1),),
    "transpose": (0, 2),
    "reshape": ((6, -1),),
    "flatten": (0, 1),
    "unflatten": (2, (2, 2)),
    "expand": ((2, 2, 3, 4),),
    "unsqueeze": (1,),
    "squeeze": (1,),
    "repeat": ((1, 2, 1),),
    "flip": ((1,),),
    "cumsum": (1,),
    "sum": (1,),
    "mean": ((0, 2),),
    "tril": (),
    "relu": (),
}


@examples(200)
@given(st.data())
def test_rules_of_the_operator_table(data: st.DataObject) -> None:
    """A rule's factor map, and what it runs on a tile, for operators of one tensor."""
    name = data.draw(st.sampled_from(sorted(_RULED)))
    shape = (2, 3, 4)
    tiling = data.draw(tilings(shape))
    input, operator = Arg(0, shape, torch.float64, frozenset()), getattr(Tensor, name)
    call = cast("Any", entry_of(name).rule)(input, *_RULED[name])
    assert isinstance(call, LocalCall)
    tiles = iter(range(len(tiling.tiles)))
    op = propagate_boxes(call.map, [tiling])

    def local(tile: Tensor, box: Box) -> Tensor:
        assert isinstance(op, LocalOp)
        number = next(n for n in tiles if not op.boxes(0, expected)[n].empty)
        run = None if call.run is None else call.run(TileRanges(op, number))
        return operator(tile, *_RULED[name]) if run is None else run(tile)  # type: ignore[no-any-return]

    expected = tuple(operator(torch.empty(shape), *_RULED[name]).shape)
    found = check(call.map, [tiling], lambda x: operator(x, *_RULED[name]), local)
    if len(tiling.tiles) == 1:
        assert isinstance(found, LocalOp)


def test_the_ranges_of_a_tile() -> None:
    row, column = Factor(4), Factor(3)
    mapped = FactorMap((((row,), (column,)),), (((row, column),),), rearranges=True)
    upper, lower = Tile(Box((0, 0), (1, 3)), (0,)), Tile(Box((1, 0), (3, 3)), (1,))
    op = propagate_boxes(mapped, [Tiling.of_tiles((4, 3), [upper, lower])])
    assert isinstance(op, LocalOp)
    ranges = TileRanges(op, 1)
    assert (ranges.local_range(row), ranges.local_range(column)) == ((1, 3), (0, 3))
    assert ranges.local_size((row, column)) == 9
    assert (ranges.is_sharded(row), ranges.is_sharded(column)) == (True, False)
    assert not ranges.has_empty_shards
    assert [(x.shape, x.local_shape) for x in ranges.inputs] == [((4, 3), (3, 3))]
    assert [(x.shape, x.local_shape) for x in ranges.outputs] == [((12,), (9,))]


@each(
    ("box", "start", "length", "expected"),
    [
        (Box((2,), (3,)), 0, 9, (2, 3)),
        (Box((2,), (3,)), 3, 1, (0, 1)),
        (Box((2,), (3,)), 4, 5, (0, 1)),
        (Box((2,), (3,)), 0, 2, (2, 0)),
        (Box((2,), (3,)), 7, 2, (0, 0)),
    ],
)
def test_the_part_in_a_range(box: Box, start: int, length: int, expected: tuple[int, int]) -> None:
    assert within(box, 0, start, length) == expected
