"""The shipped contract, run over every way in which ranks and backends come together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from tilework.testing import run_ranks
from tilework.testing.groups import ProcessGroupContract

T = TypeVar("T")

LIMIT = timedelta(seconds=15)


class TestThreads(ProcessGroupContract):
    # Whole tensors are handed over, never chunks.
    large = 200_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="threads", backend="threads", timeout=LIMIT)


class TestShmBetweenThreads(ProcessGroupContract):
    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="threads", backend="shm", timeout=LIMIT)


class TestShmBetweenProcesses(ProcessGroupContract):
    # Starting processes is what takes time here; sizes are covered between threads.
    world_sizes = (3,)
    large = 400_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="processes", backend="shm", timeout=LIMIT)
