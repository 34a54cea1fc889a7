"""Tensors whose memory is part of the segment: right in every operation, given back in the end."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilework.distributed as dist
from tilework.comm.backends.threads import threads_backend
from tilework.errors import DistBackendError
from tilework.testing import run_ranks

MIB = 1 << 20
LIMIT = timedelta(seconds=120)
#: Elements: within an outbox, one more round than an outbox, and some rounds.
COUNTS = st.sampled_from([5, 1000, 200_001, 600_000])


def used_bytes() -> int:
    pg = dist.get_default_group()
    return int(pg.engine.group.arena().used_bytes())  # type: ignore[attr-defined]


def shared_bytes() -> int:
    """What the kernel counts as this process's shared memory."""
    status = Path("/proc/self/smaps_rollup").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines()[1:])
    return int(lines["Pss_Shmem"].split()[0]) * 1024


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 3),
    count=COUNTS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    plain=st.integers(0, 7),
    offset=st.integers(0, 3),
)
def test_operations_give_what_they_give_on_plain_tensors(
    size: int, count: int, dtype: torch.dtype, plain: int, offset: int
) -> None:
    """``plain`` says for each rank, as a bit, whether its tensors are plain ones."""

    def tensors(rank: int, *sizes: int) -> list[Tensor]:
        pg = dist.get_default_group()
        make: Callable[..., Tensor] = torch.empty if plain >> rank & 1 else pg.empty
        return [make(n + offset, dtype=dtype)[offset:] for n in sizes]

    def source(rank: int, n: int) -> Tensor:
        return ((torch.arange(n) + 3 * rank) % 5).to(dtype)

    def program(rank: int) -> list[Tensor]:
        x, whole, part, other = tensors(rank, count, count * size, count, count * size)
        results = []
        x.copy_(source(rank, count))
        dist.all_gather_into_tensor(whole, x)
        results.append(whole.clone())
        dist.reduce_scatter_tensor(part, whole)
        results.append(part.clone())
        dist.all_to_all_single(other, whole)
        results.append(other.clone())
        dist.all_reduce(x)
        results.append(x.clone())
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        results.append(x.clone())
        dist.broadcast(whole.fill_(rank), size - 1)
        results.append(whole.clone())
        dist.scatter(part, list(other.chunk(size)) if rank == 0 else None, src=0)
        results.append(part.clone())
        dist.gather(part, list(whole.chunk(size)) if rank == 0 else None, dst=0)
        results.append(whole.clone())
        return results

    mine = run_ranks(size, program, kind="threads", backend="shm", timeout=LIMIT)
    with patch.object(threads_backend, "_core", None):
        truth = run_ranks(size, program, kind="threads", backend="threads", timeout=LIMIT)
    for found, expected in zip(mine, truth, strict=True):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_between_processes_and_with_other_work_in_between() -> None:
    def program(rank: int) -> bool:
        pg = dist.get_default_group()
        right = True
        for turn in range(20):
            x = pg.empty(300_000).fill_(rank + turn)
            dist.all_reduce(x)
            y = torch.full((300_000,), float(rank))
            dist.all_reduce(y)
            right &= bool((x == 1 + 2 * turn).all()) and bool((y == 1).all())
        return right

    assert run_ranks(2, program, kind="processes", backend="shm", timeout=LIMIT) == [True, True]


def test_shapes_dtypes_and_wrong_sizes() -> None:
    def program(rank: int) -> None:
        pg = dist.get_default_group()
        assert pg.empty().shape == ()
        assert pg.empty(0, 3).shape == (0, 3)
        assert pg.empty((2, 3), dtype=torch.bool).dtype == torch.bool
        assert pg.empty(2, 3).data_ptr() % 64 == 0
        with pytest.raises(RuntimeError, match="negative"):
            pg.empty(-1)

    run_ranks(1, program, backend="shm", timeout=LIMIT)


def test_a_closed_group_gives_no_memory() -> None:
    def program(rank: int) -> None:
        pg = dist.get_default_group()
        dist.destroy_process_group()
        with pytest.raises(DistBackendError, match="the group was closed on this rank: empty"):
            pg.empty(4)

    run_ranks(2, program, backend="shm")


def test_memory_comes_back_when_tensors_go() -> None:
    def program(rank: int) -> tuple[int, int, int]:
        pg = dist.get_default_group()
        before = shared_bytes()
        x = pg.empty(256 * MIB, dtype=torch.uint8).fill_(1)
        view = x[:10]
        del x
        held = shared_bytes() - before
        assert used_bytes() == 256 * MIB
        del view
        gc.collect()
        assert used_bytes() == 0
        return before, held, shared_bytes()

    ((before, held, after),) = run_ranks(1, program, kind="processes", backend="shm", timeout=LIMIT)
    assert held >= 256 * MIB
    assert after < before + 80 * MIB


def test_tensors_outlive_their_group() -> None:
    def program(rank: int) -> float:
        x = dist.get_default_group().empty(1000).fill_(2.0)
        dist.destroy_process_group()
        return x.sum().item()

    assert run_ranks(2, program, kind="processes", backend="shm", timeout=LIMIT) == [2000.0] * 2


def test_a_forked_child_cannot_free_what_its_parent_uses() -> None:
    def program(rank: int) -> float:
        x = dist.get_default_group().empty(100 * MIB, dtype=torch.uint8).fill_(1)
        child = os.fork()
        if child == 0:
            del x
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        return x.sum().item()

    (total,) = run_ranks(1, program, kind="processes", backend="shm", timeout=LIMIT)
    assert total == 100 * MIB


def test_without_room_there_is_plain_memory() -> None:
    def program(rank: int) -> tuple[bool, int]:
        pg = dist.get_default_group()
        share = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        huge = pg.empty(share * 3 // 4, dtype=torch.uint8)  # all ranks together have that much
        return huge.numel() == share * 3 // 4, used_bytes()

    assert run_ranks(2, program, kind="processes", backend="shm", timeout=LIMIT) == [(True, 0)] * 2
