"""Ranks that stay between calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import tilework.distributed as dist
from tests.launch import rank_functions
from tests.launch.conftest import alive, wait_until
from tilework.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from tilework.errors import RankFailedError
from tilework.launch import RankPool, ranks


def begin(rank: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group()


def total(rank: int, value: float) -> float:
    tensor = torch.tensor([value + rank])
    dist.all_reduce(tensor)
    return float(tensor)


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("bad rows")
    dist.barrier()


def fail_to_connect(rank: int) -> None:
    if rank == 1:
        raise ConnectionRefusedError("nobody listens")
    time.sleep(60)


def wait_long(rank: int, parent: int) -> None:
    if rank == 0:
        os.kill(parent, signal.SIGINT)
    time.sleep(60)


@pytest.fixture(scope="module")
def shared() -> Iterator[RankPool]:
    with ranks(2) as made:
        yield made


@pytest.fixture
def pool(shared: RankPool) -> RankPool:
    shared.run(begin)
    return shared


def test_results_come_in_the_order_of_ranks(pool: RankPool) -> None:
    assert pool.run(total, 1.0) == [3.0, 3.0]
    assert pool.run(max, 1) == [1, 1]


def test_an_error_names_its_rank_and_the_pool_stays(pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 failed.*ValueError: bad rows") as caught:
        pool.run(fail)
    assert 'raise ValueError("bad rows")' in str(caught.value)
    with pytest.raises(RankFailedError, match="aborted"):  # rank 0 waited: its group is over
        pool.run(total, 1.0)
    pool.run(begin)
    assert pool.run(total, 2.0) == [5.0, 5.0]


def test_a_rank_that_only_waited_is_not_blamed(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilework.launch.pool._PATIENCE_SECONDS", 0.1)
    with pytest.raises(RankFailedError, match=r"rank 1 failed.*: nobody listens"):
        pool.run(fail_to_connect)


@pytest.mark.parametrize("result", [threading.Lock, lambda rank: threading.Lock()])
def test_what_cannot_be_pickled_is_refused(pool: RankPool, result: object) -> None:
    with pytest.raises((TypeError, RankFailedError), match=r"must be picklable|TypeError"):
        pool.run(result)  # type: ignore[arg-type]
    assert pool.run(max, 1) == [1, 1]


def distributed(rank: int) -> DTensor:
    if not dist.is_initialized():
        dist.init_process_group()
    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])


def test_a_tensor_of_several_ranks_is_refused_with_a_hint(pool: RankPool) -> None:
    with pytest.raises(TypeError, match=r"result of rank 0 .* full_tensor\(\)"):
        pool.run(distributed)
    assert pool.run(abs) == [0, 1]


def test_an_interrupt_reaches_the_ranks(pool: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pool.run(wait_long, os.getpid())
    assert time.monotonic() - began < 50
    pool.run(begin)
    assert pool.run(total, 1.0) == [3.0, 3.0]


def test_a_ranks_death_ends_the_pool() -> None:
    pool = ranks(2)
    pids = pool.pids
    with pytest.raises(RankFailedError, match="rank 1 failed: exit code 3\nthe pool"):
        pool.run(rank_functions.leave_at, 1)
    wait_until(lambda: not any(map(alive, pids)))
    with pytest.raises(ValueError, match="closed"):
        pool.run(max, 1)
