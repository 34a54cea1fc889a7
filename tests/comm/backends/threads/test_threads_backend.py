"""Ranks as threads without the core: the work that is done once for all, and who is awaited."""

from __future__ import annotations

import threading

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backends import operation_header
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.threads import reference, threads_backend, threads_collectives
from tilework.comm.waits import by_rank
from tilework.comm.world import get_default_group
from tilework.testing import run_ranks
from tilework.testing.groups.base import failure_of, started

pytestmark = pytest.mark.usefixtures("without_core")


def test_a_reduction_is_made_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    combine = reference.combine

    def counted(parts: list[torch.Tensor], op: str, factors: list[float]) -> torch.Tensor:
        made.append(len(parts))
        return combine(parts, op, factors)

    monkeypatch.setattr(threads_collectives, "combine", counted)

    def program(rank: int) -> float:
        value = torch.ones(2)
        dist.all_reduce(value)
        return value[0].item()

    assert run_ranks(8, program) == [8.0] * 8
    assert made == [8]


def test_headers_are_compared_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    disagreement = operation_header.disagreement

    def counted(headers: list[operation_header.Header]) -> tuple[tuple[int, ...], str]:
        compared.append(len(headers))
        return disagreement(headers)

    monkeypatch.setattr(threads_backend, "disagreement", counted)
    run_ranks(8, lambda rank: dist.barrier())
    assert compared == [8]


def test_a_reduction_that_torch_refuses_raises_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(parts: list[torch.Tensor], op: str, factors: list[float]) -> torch.Tensor:
        raise RuntimeError("not for this dtype")

    monkeypatch.setattr(threads_collectives, "combine", refused)

    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match="not for this dtype"):
            dist.all_reduce(torch.ones(2))

    run_ranks(3, program)


def test_a_waiting_rank_awaits_those_only_that_have_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    awaited: list[object] = []
    is_seen = threading.Event()

    def look(begun: float) -> None:
        group = get_default_group()
        if group.rank() == 0:
            awaited.append(group.waiting())
            is_seen.set()

    def program(rank: int) -> None:
        if rank == 2:
            # Looks go on until both others have come.
            while not awaited or awaited[-1] != (1, [2]):
                assert is_seen.wait(120)
        dist.barrier()

    monkeypatch.setattr(by_rank, "look_if_long", look)
    run_ranks(3, program)
    assert awaited[-1] in ((1, [2]), None)


def test_a_call_during_which_the_group_closes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> str:
        started(dist.barrier(async_op=True)).wait()
        engine = get_default_group().engine  # type: ignore[attr-defined]
        monkeypatch.setattr(engine, "check_open", engine.close)
        return failure_of(lambda: dist.barrier(async_op=True)).text

    assert "closed" in run_ranks(1, program)[0]


def test_operations_of_many_ranks_leave_no_meeting() -> None:
    def program(rank: int) -> int:
        value = torch.zeros(1)
        for _ in range(5):
            dist.all_reduce(value)
            dist.broadcast(value, 0)
        group = get_default_group()
        dist.barrier()
        assert isinstance(group, NativeGroup)
        assert isinstance(group.engine, threads_backend.ThreadsEngine)
        return len(group.engine.hub.meetings)

    assert set(run_ranks(100, program)) == {0}


@pytest.mark.parametrize("sizes", ["alike", "one much longer"])
def test_objects_of_many_ranks_are_gathered(sizes: str) -> None:
    ranks = 64  # where each rank called torch for each other one, these took seconds

    def value(rank: int) -> tuple[int, str]:
        return rank, "x" * (50_000 if rank == 3 and sizes != "alike" else rank)

    def program(rank: int) -> bool:
        everyone: list[object] = [None] * ranks
        dist.all_gather_object(everyone, value(rank))
        return everyone == [value(r) for r in range(ranks)]

    assert all(run_ranks(ranks, program))
