"""Ranks that call different things all hear of it, and no two alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.csrc.core_ranks import Rank, run_threads
from tests.tables import each
from tilework import _core


def zeros(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def reduce_of(
    count: int, dtype: torch.dtype = torch.float32, **more: Any
) -> Callable[[Rank], None]:
    def call(rank: Rank) -> None:
        tensor = zeros(count, dtype)
        rank.run("all_reduce", [tensor], [tensor], **{"op": "sum", **more})

    return call


def faults(calls: list[Callable[[Rank], None]]) -> list[tuple[str, tuple[int, ...], str]]:
    results = run_threads(len(calls), lambda rank: calls[rank.rank](rank))
    assert all(isinstance(result, _core.Fault) for result in results), results
    return [result.args for result in results]


@each(
    ("odd", "named"),
    [
        (reduce_of(5), "20 bytes"),
        (reduce_of(4000), "16000 bytes"),
        (reduce_of(4, torch.int32), "int32"),
        (reduce_of(4, op="max"), "max"),
        (reduce_of(4, label=7), "label 7"),
        (lambda rank: rank.run("barrier"), "barrier"),
        (lambda rank: rank.run("broadcast", [], [zeros(4)], root=1), "broadcast"),
        (lambda rank: rank.run("all_gather", [zeros(4)], [zeros(4)] * 3), "all_gather"),
    ],
)
def test_one_rank_calls_something_else(odd: Callable[[Rank], None], named: str) -> None:
    heard = faults([reduce_of(4), odd, reduce_of(4)])
    assert len(set(heard)) == 1
    kind, ranks, text = heard[0]
    assert (kind, ranks) == ("mismatch", (1,))
    assert named in text
    assert "ranks 0, 2 called all_reduce(float32, sum" in text


def test_tensors_that_came_about_differently() -> None:
    def call(rank: Rank) -> None:
        _core.set_provenance(7 + rank.rank)
        try:
            reduce_of(4)(rank)
        finally:
            _core.set_provenance(0)

    heard = faults([call, call])
    assert len(set(heard)) == 1
    kind, ranks, text = heard[0]
    assert (kind, ranks) == ("mismatch", (0, 1))
    assert "of provenance 0000000000000008" in text


def test_of_two_ranks_either_may_be_wrong() -> None:
    heard = faults([reduce_of(4), reduce_of(4, label=1)])
    assert [fault[:2] for fault in heard] == [("mismatch", (0, 1))] * 2


def test_roots_differ() -> None:
    calls = [lambda rank: rank.run("broadcast", [], [zeros(1)], root=rank.rank)] * 3
    assert {fault[:2] for fault in faults(calls)} == {("mismatch", (0, 1, 2))}


def test_a_rank_expects_another_size() -> None:
    def call(rank: Rank) -> None:
        outputs = [zeros(n) for n in ([3, 4, 5] if rank.rank == 2 else [3, 3, 5])]
        outputs[rank.rank] = zeros(3 + (rank.rank == 2) * 2)
        rank.run("all_gather", [outputs[rank.rank]], outputs)

    heard = faults([call] * 3)
    assert len(set(heard)) == 1
    assert heard[0][:2] == ("mismatch", (1, 2))
    assert "rank 1 sends 12 bytes to rank 2, which expects 16" in heard[0][2]


def test_after_a_mismatch_the_group_stays_broken() -> None:
    def program(rank: Rank) -> list[str]:
        heard = []
        for call in (reduce_of(1 + rank.rank), reduce_of(1)):
            with pytest.raises(_core.Fault) as caught:
                call(rank)
            heard.append(caught.value.args[0])
        return heard

    assert run_threads(2, program) == [["mismatch", "mismatch"]] * 2


def test_headers_tell_what_each_rank_entered_last() -> None:
    def program(rank: Rank) -> Any:
        rank.run("barrier")
        reduce_of(4)(rank)
        rank.run("barrier")
        return rank.group.headers(), rank.group.sequence()

    for headers, sequence in run_threads(2, program):
        assert sequence == 3
        assert [header[:3] for header in headers] == [(3, "barrier", "float32")] * 2


def test_headers_before_anything_ran() -> None:
    assert [h[:2] for h in run_threads(2, lambda rank: rank.group.headers())[0]] == [(0, "")] * 2
