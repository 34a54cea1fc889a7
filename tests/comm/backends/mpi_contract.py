"""The contract on ``backend="mpi"``, and on hybrid over MPI: run by every rank of an mpirun.

test_mpi.py starts it. Each rank runs the same tests in the same order, and they meet for each.
"""

from __future__ import annotations

import importlib
import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

import tilework.distributed as dist
from tests.comm.function_suites import WholeContract
from tilework.comm.backends.hybrid import hosts
from tilework.comm.backends.hybrid.hybrid_backend import HybridGroup
from tilework.comm.backends.mpi import MpiGroup
from tilework.store import FileStore
from tilework.testing.groups.messages import MessageSuite
from tilework.testing.groups.moves import GatherSuite
from tilework.testing.groups.reductions import AllReduceSuite

MPI: Any = importlib.import_module("mpi4py.MPI")
T = TypeVar("T")
LIMIT = timedelta(seconds=120)
_runs = itertools.count()


def on_ranks(n: int, fn: Callable[[int], T], backend: str) -> list[T]:
    """Run ``fn`` on the first ranks of the job; all get the results, or the first error."""
    world = MPI.COMM_WORLD
    if n > world.size:
        pytest.skip(f"{n} ranks, of which mpirun started {world.size}")
    outcome: Any = None
    error: Exception | None = None
    rank, number = world.rank, next(_runs)
    if rank < n:
        store = FileStore(str(Path(os.environ["MPI_TEST_FOLDER"]) / f"store_{number}"))
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=LIMIT)
            outcome = fn(rank)
        except Exception as raised:
            error = raised
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    come = world.Ibarrier()  # MPI's own waits take a core, which the others need
    while not come.Test():
        time.sleep(0.001)
    reports = world.allgather((repr(error) if error else None, outcome))
    if error is not None:
        raise error
    failed = [text for text, _ in reports if text]
    assert not failed, failed
    return [result for _, result in reports[:n]]


class TestMpi(WholeContract):
    group_type = MpiGroup
    world_sizes = (3,)
    large = 50_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return on_ranks(n, fn, "mpi")


class TestHybridOverMpi(AllReduceSuite, GatherSuite, MessageSuite):
    group_type = HybridGroup
    world_sizes = (3,)
    large = 50_001

    @pytest.fixture(autouse=True)
    def _two_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def identity(request: dist.DistributedBackendOptions) -> str:
            return str(request.global_ranks_in_group[request.group_rank] % 2)

        monkeypatch.setenv("TILEWORK_LINK", "mpi")
        monkeypatch.setattr(hosts, "host_identity", identity)

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return on_ranks(n, fn, "hybrid")
