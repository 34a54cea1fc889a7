"""Rows and divisions: every row once, in the order of one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import each
from tilework.data.sampler import Division, Uneven, epoch_order

lengths, numbers = st.integers(0, 40), st.integers(1, 9)


def parts(length: int, ranks: int, uneven: Uneven, start: int = 0) -> list[list[int]]:
    order = epoch_order(length, shuffle=True, seed=3, epoch=1)
    return [Division(rank, ranks, uneven).part(order, start).tolist() for rank in range(ranks)]


@given(lengths, numbers)
def test_kept_rows_are_dealt_once(length: int, ranks: int) -> None:
    dealt = parts(length, ranks, "keep")
    assert sorted(row for part in dealt for row in part) == list(range(length))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(lengths, numbers, st.data())
def test_the_others_have_as_many_rows_on_each_rank(
    length: int, ranks: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, length))
    padded, dropped = (parts(length, ranks, uneven, start) for uneven in ("pad", "drop"))
    left = set(epoch_order(length, shuffle=True, seed=3, epoch=1)[start:].tolist())
    assert len({len(part) for part in padded}) == len({len(part) for part in dropped}) == 1
    assert left <= {row for part in padded for row in part}
    rows = [row for part in dropped for row in part]
    assert len(rows) == len(set(rows))
    assert set(rows) <= left


@given(lengths, numbers, st.sampled_from(["pad", "drop", "keep"]))
def test_counts_are_those_of_the_parts(length: int, ranks: int, uneven: Uneven) -> None:
    counts = [Division(rank, ranks, uneven).count(length) for rank in range(ranks)]
    assert counts == [len(part) for part in parts(length, ranks, uneven)]


@given(lengths, numbers, numbers, st.integers(1, 4))
def test_going_on_with_other_ranks_takes_each_row_once(
    length: int, before: int, after: int, batch: int
) -> None:
    taken = min(before * batch, length)
    first = [row for part in parts(length, before, "keep") for row in part[:batch]]
    rest = [row for part in parts(length, after, "keep", taken) for row in part]
    assert sorted(first + rest) == list(range(length))


def test_orders_differ_by_epoch_and_seed() -> None:
    orders = {tuple(epoch_order(20, True, seed, epoch)) for seed in (0, 5) for epoch in (0, 1)}
    assert len(orders) == 4


@each(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_must_be_one_of_the_ranks(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {ranks}"):
        Division(rank, ranks)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="'pad', 'drop', 'keep', got 'wrap'"):
        Division(0, 1, "wrap")  # type: ignore[arg-type]
