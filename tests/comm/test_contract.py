"""The shipped contract, run over every way in which ranks and backends come together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar
from unittest.mock import patch

import torch

from tests.comm.function_suites import ObjectSuite, WholeContract
from tilework.comm.backends.torch.torch_engines import GlooGroup
from tilework.testing import run_ranks
from tilework.testing.groups.disagreement import MismatchSuite, TimeoutSuite
from tilework.testing.groups.messages import AliasSuite, MessageSuite
from tilework.testing.groups.moves import AllToAllSuite, BroadcastSuite, GatherSuite, ScatterSuite
from tilework.testing.groups.reductions import AllReduceSuite, PrecisionSuite, ReduceSuite
from tilework.testing.groups.subgroups import SubGroupSuite
from tilework.testing.groups.works import WorkSuite

T = TypeVar("T")

LIMIT = timedelta(seconds=120)


def test_no_suite_hides_a_test_of_another() -> None:
    names = [name for suite in WholeContract.__mro__ for name in vars(suite)]
    tests = [name for name in names if name.startswith("test_")]
    assert sorted(set(tests)) == sorted(tests)


# First, while this process is small: forking takes longer the more memory there is.
class TestShmBetweenProcesses(
    AllReduceSuite,
    MessageSuite,
    ObjectSuite,
    SubGroupSuite,
    WorkSuite,
    MismatchSuite,
    TimeoutSuite,
):
    """The suites in which memory, death and time differ between processes and threads."""

    # Starting processes is what takes time here; sizes and dtypes are covered between threads,
    # by the same code of the core.
    world_sizes = (3,)
    both_forms = False
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
    large = 400_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="processes", backend="shm", timeout=LIMIT)


class TestThreads(WholeContract):
    """The core between threads."""

    world_sizes = (1, 2, 5)
    # Five of the core's slots, and a bit.
    large = 700_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="threads", backend="threads", timeout=LIMIT)


class TestShmBetweenThreads(BroadcastSuite, AllReduceSuite, MessageSuite, SubGroupSuite):
    """The same, but each rank has a mapping of its own."""

    world_sizes = (3,)
    large = 700_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="threads", backend="shm", timeout=LIMIT)


#: The least messages are read from peers' memory: here by the kernel, above where large, directly.
READING = {
    **{f"single_copy_{name}_bytes": 1 for name in ("all_gather", "all_to_all", "rooted")},
    **{f"single_copy_{name}_bytes": 1 for name in ("all_reduce", "reduce_scatter", "message")},
    "threads_apart": 1,
}


class TestShmSingleCopy(
    BroadcastSuite,
    GatherSuite,
    ScatterSuite,
    AllReduceSuite,
    ReduceSuite,
    PrecisionSuite,
    AllToAllSuite,
    AliasSuite,
    MessageSuite,
    WorkSuite,
    MismatchSuite,
    TimeoutSuite,
):
    """The suites of data on their way; the others are about what happens before."""

    world_sizes = (1, 3)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)
    large = 400_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        with patch("tilework.comm.backends.shm.shm_backend.group_tunables", lambda *_: READING):
            return run_ranks(n, fn, kind="threads", backend="shm", timeout=LIMIT)


class TestThreadsWithoutTheCore(WholeContract):
    world_sizes = (1, 2, 5)
    # Whole tensors are handed over, never chunks.
    large = 200_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        with patch("tilework.comm.backends.threads.threads_backend._core", None):
            return run_ranks(n, fn, kind="threads", backend="threads", timeout=LIMIT)


class TestGlooBetweenThreads(WholeContract):
    group_type = GlooGroup
    world_sizes = (3,)
    large = 50_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="threads", backend="gloo", timeout=LIMIT)


# The same code; what differs is how connections end.
class TestGlooBetweenProcesses(TimeoutSuite, WorkSuite):
    group_type = GlooGroup
    world_sizes = (3,)
    both_forms = False
    large = 50_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="processes", backend="gloo", timeout=LIMIT)
