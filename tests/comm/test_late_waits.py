"""Who is late for a collective is told on stderr, once for all that wait."""

from __future__ import annotations

import time

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backend import core_error
from tilework.store.late_notice import LATE_VARIABLE
from tilework.testing import run_ranks


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_one_line_says_who_is_awaited_where_and_what_it_did_last(
    backend: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if backend == "shm" and core_error():
        pytest.skip(str(core_error()))
    monkeypatch.setenv(LATE_VARIABLE, "0.5")
    told: list[str] = []

    def program(rank: int) -> None:
        dist.barrier()
        if rank == 2:  # until the others have told of it
            deadline = time.monotonic() + 10
            while "waits for rank 2" not in "".join(told) and time.monotonic() < deadline:
                time.sleep(0.02)
                told.append(capfd.readouterr().err)
        dist.all_reduce(torch.ones(3))

    run_ranks(3, program, backend=backend)
    lines = [line for line in "".join(told).splitlines() if "waits for rank 2" in line]
    assert len(lines) == 1
    assert "rank 0 waits for rank 2 in all_reduce" in lines[0]
    assert "test_late_waits.py" in lines[0]
    assert "rank 2 last entered #1 barrier" in lines[0]


def test_a_wait_that_is_not_long_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> None:
        time.sleep(0.6 if rank == 1 else 0.0)
        dist.barrier()

    run_ranks(2, program)
    assert "waits for" not in capfd.readouterr().err
