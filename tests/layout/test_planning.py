"""Plans, against a simulation that moves each element."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import MOST_RANKS, Ints, examples, pairs, points
from tilework.layout import (
    Box,
    CostModel,
    Partial,
    Piece,
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

EVERYBODY = range(MOST_RANKS + 1)  # one more than ever holds anything

#: Costs under which boxes are not cut, are cut whenever there are owners, and with hosts.
COSTS = (
    None,
    CostModel(latency=0.0),
    CostModel(hosts={rank: rank % 2 for rank in EVERYBODY}),
    CostModel(latency=0.0, hosts={0: "a", 1: "b", 2: "b"}),
)


def plans_of(source: Tiling, target: Tiling, cost: CostModel | None) -> list[Plan]:
    return [plan(source, target, rank, cost) for rank in EVERYBODY]


def moved(plans: list[Plan]) -> dict[tuple[int, int], list[tuple[int, Ints]]]:
    """What arrives in each (rank, target tile): the (term, coordinates) of each element."""
    arrived: dict[tuple[int, int], list[tuple[int, Ints]]] = defaultdict(list)
    for one in plans:
        for piece in (*one.receives, *one.keeps):
            check_ends(one, piece)
            arrived[piece.dst, piece.dst_tile] += [(piece.term, at) for at in points(piece.box)]
    return arrived


def check_ends(one: Plan, piece: Piece) -> None:
    """The sender has it, as it says, and it belongs where it goes."""
    assert piece.dst == one.rank
    from_tile, to_tile = one.source.tiles[piece.src_tile], one.target.tiles[piece.dst_tile]
    assert piece.src in from_tile.owners
    assert piece.dst in to_tile.owners
    assert from_tile.box.contains(piece.box)
    assert to_tile.box.contains(piece.box)
    assert not piece.box.empty
    assert one.source.term_of(piece.src_tile) == piece.term


def expected_terms(one: Plan, term: int) -> list[int]:
    """The source's terms that an element of a target's term is made from."""
    source, target = one.source, one.target
    terms = list(range(len(source.terms)))
    if len(terms) > 1 and len(terms) == len(target.terms) and source.reduce_op == target.reduce_op:
        return [term]
    return terms if term == 0 or target.reduce_op == "avg" else []


@examples(200)
@given(pairs(), st.sampled_from(COSTS))
def test_each_element_arrives_once_from_each_term(
    pair: tuple[Tiling, Tiling], cost: CostModel | None
) -> None:
    plans = plans_of(*pair, cost)
    arrived = moved(plans)
    for one in plans:
        for d in one.target.of(one.rank):
            box, term = one.target.tiles[d].box, one.target.term_of(d)
            expected = list(product(expected_terms(one, term), points(box)))
            assert sorted(arrived.pop((one.rank, d), [])) == sorted(expected)
            assert (d in one.fills) == (not expected and not box.empty)
    assert not arrived


@examples(100)
@given(pairs(), st.sampled_from(COSTS))
def test_nobody_is_sent_what_it_has(pair: tuple[Tiling, Tiling], cost: CostModel | None) -> None:
    source, _ = pair
    for one in plans_of(*pair, cost):
        for piece in one.receives:
            mine = [
                source.tiles[s].box for s in source.of(one.rank) if source.term_of(s) == piece.term
            ]
            assert all(box.intersection(piece.box) is None for box in mine)


@examples(100)
@given(pairs(), st.sampled_from(COSTS))
def test_both_ends_list_the_same_pieces_in_the_same_order(
    pair: tuple[Tiling, Tiling], cost: CostModel | None
) -> None:
    sent: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    received: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for one in plans_of(*pair, cost):
        for piece in one.sends:
            sent[piece.src, piece.dst].append(piece)
        for piece in one.receives:
            received[piece.src, piece.dst].append(piece)
        assert [p.dst for p in one.sends] == sorted(p.dst for p in one.sends)
        assert [p.src for p in one.receives] == sorted(p.src for p in one.receives)
        assert all(p.src == p.dst == one.rank for p in one.keeps)
        assert one.rank not in {p.dst for p in one.sends} | {p.src for p in one.receives}
    assert sent == received


@examples(100)
@given(pairs(), st.sampled_from([None, CostModel(latency=0.0)]))
def test_owners_of_a_tile_share_its_load(
    pair: tuple[Tiling, Tiling], cost: CostModel | None
) -> None:
    """No owner sends two pieces of a tile more than another."""
    source, _ = pair
    sent: Counter[tuple[int, int]] = Counter()
    for one in plans_of(*pair, cost):
        for piece in one.sends:
            sent[piece.src_tile, piece.src] += 1
    for s, tile in enumerate(source.tiles):
        loads = [sent[s, owner] for owner in tile.owners]
        assert max(loads) - min(loads) <= 1


@examples(100)
@given(pairs())
def test_what_a_host_has_stays_within_it(pair: tuple[Tiling, Tiling]) -> None:
    cost = COSTS[2]
    assert cost is not None
    source, _ = pair
    for one in plans_of(*pair, cost):
        for piece in one.receives:
            owners = source.tiles[piece.src_tile].owners
            near = [owner for owner in owners if cost.near(owner, piece.dst)]
            assert not near or piece.src in near


def test_one_receiver_gets_parts_from_several_owners() -> None:
    everywhere = Tiling.of_tiles((8, 2), [Tile(Box((0, 0), (8, 2)), (0, 1, 2, 3))])
    on_4 = Tiling.of_tiles((8, 2), [Tile(Box((0, 0), (8, 2)), (4,))])
    receives = plan(everywhere, on_4, 4, CostModel(latency=0.0)).receives
    assert [(p.src, str(p.box)) for p in receives] == [
        (src, f"[{2 * src}:{2 * src + 2}, 0:2]") for src in range(4)
    ]


def test_parts_of_several_requests_come_from_all_owners() -> None:
    everywhere = Tiling.of_tiles((8,), [Tile(Box((0,), (8,)), (0, 1, 2, 3))])
    on_two = Tiling.of_tiles((8,), [Tile(Box((0,), (8,)), (4, 5))])
    senders = [
        piece.src
        for rank in (4, 5)
        for piece in plan(everywhere, on_two, rank, CostModel(latency=0.0)).receives
    ]
    assert sorted(senders) == [0, 1, 2, 3]


def test_owners_of_several_tiles_share_their_load() -> None:
    """Each tile is asked for once, and both ranks have all of them."""
    source = Tiling.of_tiles((8,), [Tile(Box((i,), (1,)), (0, 1)) for i in range(8)])
    target = chunk_tiling((8,), 0, range(2, 10))
    assert [len(plan(source, target, rank).sends) for rank in (0, 1)] == [4, 4]


def test_the_odd_request_comes_to_each_owner_in_turn() -> None:
    """Each tile is asked for three times."""
    source = Tiling.of_tiles((8,), [Tile(Box((i,), (1,)), (0, 1)) for i in range(8)])
    target = Tiling.of_tiles((8,), [Tile(Box((0,), (8,)), (2, 3, 4))])
    assert [len(plan(source, target, rank).sends) for rank in (0, 1)] == [12, 12]


def test_a_neighbour_comes_before_ones_own_copy() -> None:
    """Copies are {0, 2} and {1, 3}, hosts {0, 3} and {1, 2}."""
    mesh = [[0, 1], [2, 3]]
    source = mesh_tiling((4, 4), mesh, [Shard(0), Replicate()])
    target = mesh_tiling((4, 4), mesh, [Shard(1), Replicate()])
    hosts = CostModel(hosts={0: "a", 3: "a", 1: "b", 2: "b"})
    assert {p.src for p in plan(source, target, 2).receives} == {0}
    assert {p.src for p in plan(source, target, 2, hosts).receives} == {1}


def test_a_short_message_is_not_cut() -> None:
    everywhere = Tiling.of_tiles((8,), [Tile(Box((0,), (8,)), (0, 1, 2, 3))])
    on_4 = Tiling.of_tiles((8,), [Tile(Box((0,), (8,)), (4,))])
    assert len(plan(everywhere, on_4, 4).receives) == 1


def test_copies_of_a_mesh_keep_to_themselves() -> None:
    """Whichever axis replicates, ranks receive from those with their coordinate on it."""
    for mesh in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]):
        outer = len(mesh) == 2
        placed: list[Placement] = [Replicate(), Shard(0)] if outer else [Shard(0), Replicate()]
        source = mesh_tiling((8, 8), mesh, placed)
        target = mesh_tiling((8, 8), mesh, [p if p == Replicate() else Shard(1) for p in placed])
        for rank in range(8):
            assert {p.src // 4 for p in plan(source, target, rank).receives} == {rank // 4}


def test_bytes() -> None:
    rows, columns = chunk_tiling((4, 6), 0, [0, 1]), chunk_tiling((4, 6), 1, [0, 1])
    one = plan(rows, columns, 0)
    assert (one.bytes_sent(4), one.bytes_received(4)) == (24, 24)
    assert sum(p.box.volume for p in one.keeps) == 6


def test_a_rank_without_a_part_has_an_empty_plan() -> None:
    rows, columns = chunk_tiling((4, 6), 0, [0, 1]), chunk_tiling((4, 6), 1, [0, 1])
    one = plan(rows, columns, 7)
    assert (one.sends, one.receives, one.keeps, one.fills) == ((), (), (), ())


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match=r"\(4,\).*\(5,\)"):
        plan(chunk_tiling((4,), 0, [0]), chunk_tiling((5,), 0, [0]), 0)


def test_terms_meet_unless_the_target_has_them_too() -> None:
    partial = mesh_tiling((4,), [0, 1], [Partial()])
    peak = mesh_tiling((4,), [0, 1], [Partial("max")])
    whole = mesh_tiling((4,), [0, 1], [Replicate()])
    assert plan(partial, whole, 0).reduces
    assert plan(partial, peak, 0).reduces
    assert not plan(partial, partial, 0).reduces
    assert not plan(whole, partial, 0).reduces


def test_a_value_becomes_the_first_term() -> None:
    whole = mesh_tiling((4,), [0, 1], [Replicate()])
    partial = mesh_tiling((4,), [0, 1], [Partial()])
    first, second = (plan(whole, partial, rank) for rank in range(2))
    assert (len(first.keeps), first.fills) == (1, ())
    assert (second.keeps, second.fills) == ((), (1,))


def test_every_term_of_an_average_is_the_value() -> None:
    whole = mesh_tiling((4,), [0, 1], [Replicate()])
    average = mesh_tiling((4,), [0, 1], [Partial("avg")])
    for rank in range(2):
        assert len(plan(whole, average, rank).keeps) == 1
        assert not plan(whole, average, rank).fills


def test_terms_of_a_reduction_without_an_identity_element_are_refused() -> None:
    whole = mesh_tiling((4,), [0, 1], [Replicate()])
    scaled = mesh_tiling((4,), [0, 1], [Partial("premul_sum")])
    with pytest.raises(NotImplementedError, match="identity element"):
        plan(whole, scaled, 0)
    assert plan(scaled, scaled, 0).collective.kind == "none"


def test_a_plan_tells_its_part_in_words() -> None:
    rows = mesh_tiling((6, 4), [0, 1], [Shard(0)])
    columns = mesh_tiling((6, 4), [0, 1], [Shard(1)])
    assert str(plan(rows, columns, 1)) == (
        "all_to_all: rank 1's part\n"
        "  sends 6 elements to rank 0: [3:6, 0:2]\n"
        "  receives 6 elements from rank 0: [0:3, 2:4]\n"
        "  copies 6 local elements"
    )
    first, second = (mesh_tiling((40, 40), list(range(40)), [Shard(dim)]) for dim in (0, 1))
    assert "  receives from 29 more ranks" in str(plan(first, second, 3))
