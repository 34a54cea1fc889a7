"""Ranks as threads on the core: which engine runs them, and ranks that come or go at a bad time."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.shm.shm_group import ShmEngine
from tilework.comm.backends.threads.threads_backend import ThreadsEngine, create_threads_group
from tilework.comm.world import get_default_group
from tilework.testing import run_ranks

_core = pytest.importorskip("tilework._core")


def engine_of(rank: int) -> type:
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size()
    group = get_default_group()
    assert isinstance(group, NativeGroup)
    assert group.engine.name == dist.get_backend() == "threads"
    return type(group.engine)


def test_groups_that_are_too_large_for_the_core_meet_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert issubclass(run_ranks(2, engine_of)[0], ShmEngine)
    monkeypatch.setattr(_core, "MAX_RANKS", 1)
    assert run_ranks(2, engine_of) == [ThreadsEngine] * 2


def test_a_rank_whose_thread_has_ended_is_named() -> None:
    def program(rank: int) -> None:
        if rank == 1:
            # The group's own thread ends at once; the rank goes on, and keeps the group.
            maker = threading.Thread(target=make, args=(rank,))
            maker.start()
            maker.join()
            done.wait(30)
            return
        make(rank)
        with pytest.raises(dist.DistBackendError, match=r"lost rank 1 \(left the group\)"):
            groups[0].barrier()
        done.set()

    def make(rank: int) -> None:
        groups[rank] = create_threads_group(request_of(store, rank, 60.0), None)

    groups: dict[int, dist.ProcessGroup] = {}
    done = threading.Event()
    with dist.HashStore() as store:
        run_ranks(2, program, init=False)


def test_a_rank_that_comes_too_late_says_so() -> None:
    with dist.HashStore() as store:
        with pytest.raises(dist.DistBackendError, match=r"ranks \[1\] did not join"):
            create_threads_group(request_of(store, 0, 0.1), None)
        with pytest.raises(dist.DistBackendError, match="rank 0 has given up making group 'g'"):
            create_threads_group(request_of(store, 1, 0.1), None)


def request_of(store: dist.Store, rank: int, seconds: float) -> DistributedBackendOptions:
    limit = timedelta(seconds=seconds)
    return DistributedBackendOptions(store, rank, 2, limit, "g", (0, 1))
