"""Operations are events of torch.profiler, by name and with their bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backend import core_error
from tilework.comm.per_call import profiling
from tilework.testing import run_ranks

SHM = pytest.param(
    "processes", marks=pytest.mark.skipif(core_error() is not None, reason="the core is not built")
)


@contextmanager
def profile(record_shapes: bool = False) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, record_shapes=record_shapes) as made:
            yield made


def events(made: Any) -> list[Any]:
    return [event for event in made.events() if event.name.startswith("tilework:")]


@pytest.mark.parametrize("kind", ["threads", SHM])
def test_operations_are_events(kind: Any) -> None:
    def program(rank: int) -> list[str]:
        pair, four = torch.ones(2), torch.zeros(4)
        dist.all_reduce(pair)  # before a profiler runs
        if rank == 1 and kind == "threads":  # a profiler sees its own thread
            run(rank, pair, four)
            return []
        with profile() as made:
            run(rank, pair, four)
        dist.all_reduce(pair)
        return [event.name.removeprefix("tilework:") for event in events(made)]

    def run(rank: int, pair: torch.Tensor, four: torch.Tensor) -> None:
        dist.all_reduce(pair)
        work = dist.all_reduce(pair, async_op=True)
        assert work is not None
        work.wait()
        dist.all_gather_into_tensor(four, pair)
        dist.reduce_scatter_tensor(pair, four)
        dist.broadcast(pair, 0)
        dist.barrier()
        if rank == 0:
            dist.send(pair, 1)
        else:
            dist.recv(pair, 0)

    def whole(rank: int) -> list[str]:
        names = program(rank)
        if rank == 1 and kind == "threads":
            dist.all_reduce(torch.ones(2))
        return names

    assert run_ranks(2, whole, kind=kind)[0] == [
        "all_reduce (8 bytes)",
        "all_reduce (8 bytes)",
        "wait all_reduce (8 bytes)",
        "all_gather_into_tensor (8 bytes)",
        "reduce_scatter_tensor (16 bytes)",
        "broadcast (8 bytes)",
        "barrier",
        "send (8 bytes)",
        "wait send (8 bytes)",
    ]


def test_events_have_their_shapes_bytes_and_group() -> None:
    def program(rank: int) -> tuple[Any, Any]:
        with profile(record_shapes=True) as made:
            dist.all_reduce(torch.ones(3, 5, dtype=torch.float64))
        (event,) = events(made)
        return event.input_shapes, getattr(event, "kwinputs", None)

    shapes, facts = run_ranks(1, program)[0]
    assert shapes == [[3, 5]]
    assert facts == {"bytes": 120, "group": "default", "ranks": 1}


def test_a_failure_ends_the_event() -> None:
    def program(rank: int) -> list[str]:
        if rank == 1:
            return []
        with profile() as made, pytest.raises(dist.PeerLostError):
            dist.all_reduce(torch.ones(2))
        return [event.name for event in events(made)]

    assert run_ranks(2, program)[0] == ["tilework:all_reduce (8 bytes)"]


def test_without_torch_s_quick_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_Fast", None)
    assert not profiling.profiled()

    def program(rank: int) -> list[str]:
        with profile() as made:
            assert profiling.profiled()
            dist.all_reduce(torch.ones(2))
        return [event.name for event in events(made)]

    assert run_ranks(1, program)[0] == ["tilework:all_reduce (8 bytes)"]
