"""The c10d document's LocalRankTest."""

from __future__ import annotations

import os

import pytest

import tilework.distributed as dist
from tests.comm.conftest import Runner


def test_without_environment(processes: Runner) -> None:
    def body(rank: int) -> None:
        os.environ.pop("LOCAL_RANK", None)
        with pytest.raises(RuntimeError, match="LOCAL_RANK"):
            dist.get_node_local_rank()

    processes(4, body)


def test_without_environment_but_with_a_fallback(processes: Runner) -> None:
    def body(rank: int) -> int:
        os.environ.pop("LOCAL_RANK", None)
        return dist.get_node_local_rank(fallback_rank=2)

    assert processes(4, body) == [2] * 4


def test_the_environment_beats_the_fallback(processes: Runner) -> None:
    def body(rank: int) -> int:
        os.environ["LOCAL_RANK"] = str(rank)
        return dist.get_node_local_rank(fallback_rank=123)

    assert processes(4, body) == [0, 1, 2, 3]


def test_the_environment(processes: Runner) -> None:
    def body(rank: int) -> int:
        os.environ["LOCAL_RANK"] = str(rank)
        return dist.get_node_local_rank()

    assert processes(4, body) == [0, 1, 2, 3]
