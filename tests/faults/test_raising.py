"""A rank whose program raises takes its groups with it, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import tilework.distributed as dist
from tests.limits import PROMPTLY
from tilework.errors import DistBackendError, PeerLostError, RankFailedError
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)
Kind = Literal["threads", "processes"]

everywhere = pytest.mark.parametrize(
    ("kind", "backend"), [("threads", "threads"), ("threads", "shm"), ("processes", "shm")]
)


def outcomes(kind: Kind, backend: str, fn: Any) -> list[Any]:
    return run_ranks(3, fn, kind=kind, backend=backend, timeout=LIMIT, return_exceptions=True)


@everywhere
def test_the_others_raise_at_once(kind: Kind, backend: str) -> None:
    def body(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            raise LookupError("the data is gone")
        dist.all_reduce(torch.ones(5, 7))

    start = time.monotonic()
    first, culprit, last = outcomes(kind, backend, body)
    assert time.monotonic() - start < PROMPTLY
    assert isinstance(culprit, LookupError)
    for error in (first, last):
        assert isinstance(error, DistBackendError)
        assert error.ranks == (1,)
        for word in ("rank 1", "all_reduce", "5, 7", "group 'default'", "#2"):
            assert word in str(error), error


@everywhere
def test_the_cause_comes_first(kind: Kind, backend: str) -> None:
    def body(rank: int) -> None:
        if rank == 2:
            raise LookupError("the data is gone")
        dist.all_reduce(torch.ones(5, 7))

    with pytest.raises(LookupError, match="the data is gone"):
        run_ranks(3, body, kind=kind, backend=backend, timeout=LIMIT)


def test_an_exit_is_a_lost_peer() -> None:
    def body(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            os._exit(3)
        dist.all_reduce(torch.ones(5, 7))

    first, culprit, last = outcomes("processes", "shm", body)
    assert isinstance(culprit, RankFailedError)
    for error in (first, last):
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)


PROGRAM = """
    import sys, datetime, torch, tilework.distributed as dist
    rank = int(sys.argv[1])
    dist.init_process_group(
        "shm", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    dist.barrier()
    if rank == 1:
        raise LookupError("the data is gone")
    try:
        dist.all_reduce(torch.ones(5, 7))
    except dist.PeerLostError as error:
        print("heard:", error)
"""


def test_a_plain_python_program_that_raises(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(rank), f"{tmp_path}/store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        survivor, victim = (process.communicate(timeout=180) for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 1], (survivor, victim)
    assert "LookupError: the data is gone" in victim[1]
    assert survivor[0].startswith("heard:")
    assert "rank 1" in survivor[0]
