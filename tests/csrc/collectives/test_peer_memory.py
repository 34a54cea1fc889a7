"""Ranks that are processes read each other's memory, or cannot: the results are the same."""

from __future__ import annotations

import os

import pytest

from tests.csrc.core_ranks import Worker, workers
from tests.tables import each

pytestmark = pytest.mark.usefixtures("reading_as_tunables_say")

#: All but the smallest messages are read.
OPERATIONS = ("all_gather", "all_to_all", "rooted", "all_reduce", "reduce_scatter", "message")
READING = {f"single_copy_{name}_bytes": 1000 for name in OPERATIONS}
READ = (
    *("send", "broadcast", "all_reduce", "all_gather", "gather"),
    *("scatter", "all_to_all", "reduce_scatter"),
)


@pytest.mark.parametrize("size", [2, 3])
def test_data_is_read_from_peers(size: int) -> None:
    with workers(size, "read", tunables=READING) as (_, ranks):
        for rank in ranks:
            wrong, read, how = rank.says()
            assert wrong == []
            if how.startswith("possible"):
                assert read >= 2 * 24000  # the first two operations show that it is possible
            else:
                assert read == 0


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_SINGLE_COPY", "0")
    with workers(2, "read", tunables=READING) as (_, ranks):
        for rank in ranks:
            assert rank.says() == [[], 0, "turned off, by TILEWORK_SINGLE_COPY=0"]


def none_read(ranks: list[Worker], reason: str, messages: int = 0) -> None:
    """Nothing was read, but for messages of so many bytes between two ranks that may read."""
    reports = [rank.says() for rank in ranks]
    assert [report[0] for report in reports] == [[]] * len(ranks)
    assert all(report[1] in {0, messages} for report in reports)
    assert reports[1][1] == 0
    assert any(report[2].startswith(reason) for report in reports)


def test_a_refusal_is_no_failure() -> None:
    with workers(3, "read_refused", tunables=READING) as (_, ranks):
        none_read(ranks, "refused: process_vm_readv of rank 0's memory: ", messages=192_000)


def test_memory_that_no_process_may_read() -> None:
    with workers(2, "read_unreadable", tunables=READING) as (_, ranks):
        none_read(ranks, "refused: process_vm_readv of rank ")


@each("kind", READ)
def test_a_refusal_in_the_middle(kind: str) -> None:
    with workers(2, f"read_refused_later:{kind}", tunables=READING) as (_, ranks):
        for rank in ranks:
            wrong, _, later = rank.says()
            assert (wrong, later) == ([], [])


def test_unmapped_memory_ends_its_owner_alone() -> None:
    with workers(2, "read_unmapped", tunables=READING) as (_, ranks):
        assert [rank.says()[0] for rank in ranks] == [[], []]
        assert ranks[1].says() == "unmapped"
        assert ranks[0].says() == "ready"
        assert ranks[0].says()[:3] == ["peer_lost", [1], "rank 1 died"]


def test_kill_9_while_memory_is_read() -> None:
    with workers(3, "loop_large", tunables=READING) as (_, ranks):
        assert [rank.says() for rank in ranks] == ["ready"] * 3
        os.kill(ranks[1].pid, 9)
        for survivor in (ranks[0], ranks[2]):
            assert survivor.says()[:3] == ["peer_lost", [1], "rank 1 died"]
