"""How a native group's work ends when its group has ended before."""

from __future__ import annotations

import time

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backends.native_work import NativeWork
from tilework.testing import run_ranks


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_a_failure_asked_for_after_the_group_was_closed(backend: str) -> None:
    def program(rank: int) -> str:
        group = dist.new_group()
        if rank == 1:
            dist.destroy_process_group(group)
            dist.barrier()
            return ""
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        assert isinstance(work, NativeWork)
        while not work._completion.done():  # is_completed() would already explain the failure
            time.sleep(0.001)
        dist.destroy_process_group(group)
        with pytest.raises(dist.PeerLostError, match="all_reduce") as caught:
            work.wait()
        dist.barrier()
        return str(caught.value)

    told = run_ranks(2, program, backend=backend)[0]
    assert "rank 0" in told


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_a_closed_group_is_not_aborted_for_others(backend: str) -> None:
    """A thread that found a cycle of waits aborts groups, which the rank may close meanwhile."""

    def program(rank: int) -> None:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        dist.destroy_process_group(group)
        group.abort_for("mismatch", [rank], "a cycle")

    run_ranks(2, program, backend=backend)
