from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, Launcher
from tilework.comm.backend import core_error


@pytest.fixture
def ranks(tmp_path: Path) -> Launcher:
    """Runs ``fn(Rank, *args)`` on ``n`` ranks; returns their results."""
    if core_error() is not None:
        pytest.skip(core_error() or "")

    def run(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        with Job(tmp_path, n, fn, args) as job:
            return [job.hear(number) for number in range(n)]

    return run


@pytest.fixture(autouse=True)
def flight_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that fail on purpose leave theirs with the test's other files."""
    monkeypatch.setenv("TILEWORK_FLIGHT_DIR", str(tmp_path / "flight"))
