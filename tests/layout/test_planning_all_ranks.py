"""All ranks' plans at once, as numbers and as tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from rich.console import Console

from tests.layout.random_tilings import examples, pairs
from tests.tables import each
from tilework.layout import (
    AllRanksPlan,
    CostModel,
    Replicate,
    Shard,
    Tiling,
    chunk_tiling,
    mesh_tiling,
    plan,
    plan_all_ranks,
)

ROWS = chunk_tiling((4, 6), 0, [0, 1])
COLUMNS = chunk_tiling((4, 6), 1, [0, 1])


@examples()
@given(pairs())
def test_edges_add_up_to_the_plans(pair: tuple[Tiling, Tiling]) -> None:
    source, target = pair
    both = plan_all_ranks(source, target)
    assert [one.rank for one in both.plans] == sorted({*source.ranks, *target.ranks})
    got, given_away = Counter[int](), Counter[int]()
    for (src, dst), nbytes in both.edges(itemsize=8).items():
        assert src != dst
        assert nbytes > 0
        given_away[src] += nbytes
        got[dst] += nbytes
    for one in both.plans:
        assert one == plan(source, target, one.rank)
        assert one.bytes_received(8) == got[one.rank]
        assert one.bytes_sent(8) == given_away[one.rank]


def test_plans_of_some_ranks() -> None:
    assert plan_all_ranks(ROWS, COLUMNS, ranks=[1]).edges(itemsize=2) == {(1, 0): 12}


def test_seconds_are_those_of_the_busiest_rank() -> None:
    cost = CostModel(latency=1.0, seconds_per_byte=0.5)
    on_all = mesh_tiling((4, 6), [0, 1, 2], [Replicate()])
    # Both ranks with rows send 48 bytes to two others; nobody receives more than 96.
    assert plan_all_ranks(ROWS, on_all).seconds(cost, itemsize=4) == 2 * (1.0 + 24.0)
    assert plan_all_ranks(ROWS, ROWS).seconds(cost) == 0.0


def test_messages_between_hosts_take_longer() -> None:
    near = CostModel(hosts={0: "a", 1: "a"})
    far = CostModel(hosts={0: "a", 1: "b"})
    both = plan_all_ranks(ROWS, COLUMNS)
    assert both.seconds(far) > both.seconds(near) == both.seconds(CostModel())


def test_a_table_has_each_edge_and_the_total() -> None:
    text = str(plan_all_ranks(ROWS, COLUMNS, itemsize=4))
    assert text.startswith("all_to_all: 48 bytes between 2 ranks, 48 copied in place, predicted")
    lines = [line.replace("│", " ").split() for line in text.splitlines()]
    assert ["0", "1", "24"] in [line[:3] for line in lines]
    assert ["1", "0", "24"] in [line[:3] for line in lines]


def test_a_long_table_is_abbreviated() -> None:
    rows, columns = (chunk_tiling((64, 64), dim, range(32)) for dim in range(2))
    text = str(plan_all_ranks(rows, columns))
    assert len(text.splitlines()) < 40
    assert "972 more" in text


def test_a_table_of_nothing() -> None:
    text = str(plan_all_ranks(ROWS, ROWS))
    assert text.startswith("none: 0 bytes between 2 ranks, 96 copied in place")
    assert str(AllRanksPlan(())).startswith("none: 0 bytes between 0 ranks")


def test_rich_draws_what_print_shows() -> None:
    both = plan_all_ranks(ROWS, COLUMNS)
    console = Console(width=100, color_system=None)
    with console.capture() as drawn:
        console.print(both)
    assert drawn.get().rstrip() == str(both)


NEGATIVE: list[dict[str, Any]] = [
    {"latency": -1.0},
    {"seconds_per_byte": -1.0},
    {"network_latency": -1.0},
    {"network_seconds_per_byte": -1.0},
]


@each("costs", NEGATIVE)
def test_costs_are_not_negative(costs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        CostModel(**costs)


def test_long_messages_are_cut_into_more_parts() -> None:
    cost = CostModel(latency=1.0, seconds_per_byte=1.0)
    assert [cost.parts(nbytes, most=4) for nbytes in (0, 1, 3, 4, 9, 1000)] == [1, 1, 1, 2, 3, 4]
    assert CostModel(latency=0.0).parts(1, most=7) == 7


def test_a_mesh_plan_names_its_collective() -> None:
    mesh = [[0, 1], [2, 3]]
    source = mesh_tiling((4, 4), mesh, [Shard(0), Shard(1)])
    target = mesh_tiling((4, 4), mesh, [Shard(0), Replicate()])
    assert plan_all_ranks(source, target).kind == "all_gather"
