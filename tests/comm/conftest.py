from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

import tilework.distributed as dist
from tilework.testing import run_ranks

# The suites' asserts then show their values; too late once something has imported them.
for suites in ("tilework.testing.groups", "tests.comm.function_suites"):
    if suites not in sys.modules:
        pytest.register_assert_rewrite(suites)

#: Runs ``fn(rank)`` on ``n`` ranks that have no group yet.
Runner = Callable[[int, Callable[[int], Any]], list[Any]]
Kind = Literal["threads", "processes"]
#: Makes the default group of a rank: ``join(rank, n)``.
Join = Callable[[int, int], None]


@pytest.fixture(params=["threads", "shm", "shm between processes"])
def setting(request: pytest.FixtureRequest) -> tuple[Kind, str]:
    """(kind of ranks, backend)."""
    backend, _, between = request.param.partition(" ")
    return ("processes" if between else "threads"), backend


@pytest.fixture
def backend(setting: tuple[Kind, str]) -> str:
    return setting[1]


@pytest.fixture
def ranks(setting: tuple[Kind, str]) -> Runner:
    def run(n: int, fn: Callable[[int], Any]) -> list[Any]:
        return run_ranks(n, fn, kind=setting[0], timeout=timedelta(seconds=120), init=False)

    return run


@pytest.fixture
def join(tmp_path: Path, backend: str) -> Join:
    """Initialises as the seeds do: with a FileStore that all ranks open."""

    def init(rank: int, n: int) -> None:
        store = dist.FileStore(os.fspath(tmp_path / "store"), n)
        dist.init_process_group(
            backend, world_size=n, rank=rank, store=store, timeout=timedelta(seconds=120)
        )

    return init


@pytest.fixture
def processes() -> Runner:
    """Forked ranks: each has its own environment, warnings and registry of backends."""

    def run(n: int, fn: Callable[[int], Any]) -> list[Any]:
        return run_ranks(n, fn, kind="processes", timeout=timedelta(seconds=120), init=False)

    return run
