"""Which collective a plan is recognised as, and that it would move what the plan moves."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given

from tests.layout.random_tilings import MOST_RANKS, examples, pairs, points
from tests.tables import each
from tilework.layout import (
    Box,
    Collective,
    Partial,
    Placement,
    Plan,
    Replicate,
    Shard,
    Tile,
    Tiling,
    chunk_tiling,
    mesh_tiling,
    plan,
)

ROWS = chunk_tiling((4, 4), 0, [0, 1])
MANY_ROWS = chunk_tiling((4, 4), 0, [0, 1, 0, 1])
FOUR_ROWS = chunk_tiling((4, 4), 0, [0, 1, 2, 3])
THREE_ROWS = chunk_tiling((4, 4), 0, [2, 1, 0])
ONE_TWICE = Tiling.of_tiles(
    (4, 4), [Tile(Box((0, 0), (2, 4)), (0, 1)), Tile(Box((2, 0), (2, 4)), (2,))]
)
COLUMNS = chunk_tiling((4, 4), 1, [0, 1])
GRID = [[0, 1], [2, 3]]
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


def everything_on(*ranks: int) -> Tiling:
    return Tiling.of_tiles((4, 4), [Tile(Box((0, 0), (4, 4)), ranks)])


def on_grid(*placed: Placement) -> Tiling:
    return mesh_tiling((4, 4), GRID, placed)


@each(
    ("source", "target", "expected"),
    [
        (ROWS, ROWS, Collective("none", (1,))),
        (everything_on(0, 1), COLUMNS, Collective("none", (1,))),
        (on_grid(R, R), on_grid(P, S0), Collective("none", (1,))),
        (ROWS, everything_on(0, 1), Collective("all_gather", (0, 1))),
        (THREE_ROWS, everything_on(0, 1, 2), Collective("all_gather", (0, 1, 2))),
        (on_grid(S0, S1), on_grid(S0, R), Collective("all_gather", (0, 1))),
        (on_grid(S0, S1), on_grid(R, S1), Collective("all_gather", (1, 3))),
        (on_grid(R, S0), on_grid(R, R), Collective("all_gather", (0, 1))),
        (on_grid(S0, R), on_grid(R, R), Collective("all_gather", (1, 3))),
        (everything_on(0), everything_on(0, 1, 2), Collective("broadcast", (0, 1, 2), 0)),
        (everything_on(2), everything_on(1), Collective("scatter", (1, 2), 2)),
        (everything_on(2), ROWS, Collective("scatter", (0, 1, 2), 2)),
        (everything_on(1), ROWS, Collective("scatter", (0, 1), 1)),
        (ROWS, everything_on(2), Collective("gather", (0, 1, 2), 2)),
        (ROWS, everything_on(1), Collective("gather", (0, 1), 1)),
        (on_grid(P, P), on_grid(R, R), Collective("all_reduce", (0, 1, 2, 3))),
        (on_grid(P, S0), on_grid(R, S0), Collective("all_reduce", (1, 3))),
        (on_grid(P, R), on_grid(R, R), Collective("all_reduce", (1, 3))),
        (on_grid(P, S0), on_grid(S1, S0), Collective("reduce_scatter", (1, 3))),
        (on_grid(P, R), on_grid(S1, R), Collective("reduce_scatter", (1, 3))),
        (ROWS, COLUMNS, Collective("all_to_all", (0, 1))),
        (on_grid(P, S0), on_grid(S0, R), Collective("all_to_all", (0, 1, 2, 3))),
        (on_grid(P, R), FOUR_ROWS, Collective("all_to_all", (0, 1, 2, 3))),
        (on_grid(P, P), everything_on(0), Collective("all_to_all", (0, 1, 2, 3))),
        (ROWS, chunk_tiling((4, 4), 0, [1, 0]), Collective("all_to_all", (0, 1))),
        (ONE_TWICE, everything_on(0, 1, 2), Collective("all_to_all", (0, 1, 2))),
        (MANY_ROWS, everything_on(0, 1), Collective("all_to_all", (0, 1))),
    ],
)
def test_what_rank_1_takes_part_in(source: Tiling, target: Tiling, expected: Collective) -> None:
    assert plan(source, target, 1).collective == expected


def test_more_ranks_than_rows() -> None:
    """Those without a row take part, and bring nothing."""
    rows = chunk_tiling((2, 3), 0, range(4))
    everywhere = mesh_tiling((2, 3), [0, 1, 2, 3], [R])
    for rank in range(4):
        expected = Collective("all_gather", (0, 1, 2, 3))
        assert plan(rows, everywhere, rank).collective == expected


def test_a_stranger_takes_no_part() -> None:
    assert plan(ROWS, everything_on(0, 1), 7).collective == Collective("all_gather", ())


def received(one: Plan) -> Counter[tuple[int, ...]]:
    """How often each element comes from another rank, counting terms."""
    return Counter(at for piece in one.receives for at in points(piece.box))


@examples(200)
@given(pairs())
@example((on_grid(R, S0), on_grid(R, R)))
def test_all_ranks_see_one_collective_that_moves_the_same(pair: tuple[Tiling, Tiling]) -> None:
    source, target = pair
    plans = {rank: plan(source, target, rank) for rank in range(MOST_RANKS)}
    (kind,) = {one.collective.kind for one in plans.values()}
    for rank, one in plans.items():
        group = one.collective.ranks
        assert (rank in group) or not (one.sends or one.receives)
        assert all(plans[other].collective == one.collective for other in group)
        if kind in MOVES and group:
            assert received(one) == MOVES[kind](one)
        elif kind == "none":
            assert not one.receives


def of_others(one: Plan, ranks: tuple[int, ...]) -> Counter[tuple[int, ...]]:
    """What the others of ``ranks`` hold, where this rank wants it."""
    wanted = {at for box in one.target.boxes_of(one.rank) for at in points(box)}
    return Counter(
        at
        for rank in ranks
        if rank != one.rank
        for box in one.source.boxes_of(rank)
        for at in points(box)
        if at in wanted
    )


def from_group(one: Plan) -> Counter[tuple[int, ...]]:
    return of_others(one, one.collective.ranks)


def from_root(one: Plan) -> Counter[tuple[int, ...]]:
    assert one.collective.root in one.collective.ranks
    return of_others(one, (one.collective.root,))


def at_root(one: Plan) -> Counter[tuple[int, ...]]:
    assert one.collective.root in one.collective.ranks
    return from_group(one) if one.rank == one.collective.root else Counter()


#: What a rank gets in its group, by kind of collective.
MOVES = {
    "all_gather": from_group,
    "reduce_scatter": from_group,
    "all_reduce": from_group,
    "broadcast": from_root,
    "scatter": from_root,
    "gather": at_root,
}
