"""Cycles of ranks that wait for each other: found where there are any, in linear time."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.wait_graph import cycle_through, cycles

MANY = 4096


class Wait(NamedTuple):
    """A wait with nothing else to it."""

    rank: int
    awaited: tuple[int, ...]


@given(st.integers(2, 9), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=16))
def test_cycles_are_found_where_there_are_any(size: int, pairs: list[tuple[int, int]]) -> None:
    ends = sorted({(a, b) for a, b in pairs if a < size and b < size and a != b})
    found = cycles(Wait(a, (b,)) for a, b in ends)
    for cycle in found:
        ranks = [wait.rank for wait in cycle]
        assert len(set(ranks)) == len(ranks)
        assert [wait.awaited for wait in cycle] == [(rank,) for rank in ranks[1:] + ranks[:1]]
    reach = set(ends)
    for _ in range(size):
        reach |= {(a, d) for a, b in reach for c, d in reach if b == c}
    assert {wait.rank for cycle in found for wait in cycle} == {a for a, b in reach if a == b}


def test_the_shortest_cycle_is_told() -> None:
    waits = [Wait(0, (1, 3)), Wait(1, (2,)), Wait(2, (0,)), Wait(3, (0,))]
    assert [[wait.rank for wait in cycle] for cycle in cycles(waits)] == [[0, 3], [1, 2, 0]]


def test_only_reachable_ranks_are_asked_for() -> None:
    asked: list[int] = []

    def waits_of(rank: int) -> list[Wait]:
        asked.append(rank)
        return [Wait(rank, ((rank + 1) % 3, 7))]

    assert [wait.rank for wait in cycle_through(0, waits_of)] == [0, 1, 2]
    assert asked == [0, 1, 7, 2]


EVEN = tuple(range(0, MANY, 2))
ODD = tuple(range(1, MANY, 2))
LATE = tuple(range(MANY - 8))


@pytest.mark.parametrize(
    ("waits", "lengths"),
    [
        ([Wait(rank, ((rank + 1) % MANY,)) for rank in range(MANY)], [MANY]),
        ([Wait(rank, (rank + 1,)) for rank in range(MANY)], []),
        ([Wait(rank, ODD if rank % 2 == 0 else EVEN) for rank in range(MANY)], [2] * 16),
        ([Wait(rank, (rank ^ 1,)) for rank in range(MANY)], [2] * 16),
        ([Wait(rank, LATE) for rank in range(MANY - 8, MANY)], []),
    ],
    ids=["ring", "chain", "two halves", "pairs", "late ranks"],
)
def test_thousands_of_ranks_take_no_time(waits: list[Wait], lengths: list[int]) -> None:
    began = time.process_time()
    assert [len(cycle) for cycle in cycles(waits)] == lengths
    assert time.process_time() - began < 2.0
