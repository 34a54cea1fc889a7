"""Tensors that get other memory while an operation goes on, in processes that would crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.workload import join, leave

#: More than the allocator ever keeps for itself: what is freed is not there any more.
_LARGE = (40 << 20) // 4


def grown(tensor: Tensor) -> None:
    tensor.resize_(2 * _LARGE)


def emptied(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def shared(tensor: Tensor) -> None:
    tensor.share_memory_()  # type: ignore[no-untyped-call]


def replaced(tensor: Tensor) -> None:
    tensor.set_()  # type: ignore[call-overload]


def ends(tensor: Tensor) -> list[list[float]]:
    """The first and the last elements of what there was, unless the memory has been given up."""
    if not tensor.untyped_storage().nbytes():
        return []
    return [tensor[:3].tolist(), tensor[_LARGE - 3 : _LARGE].tolist()]


WAYS: tuple[Callable[[Tensor], None], ...] = (grown, emptied, shared, replaced)


def test_an_operation_under_way_keeps_its_memory(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store")
        for way in WAYS:
            x = torch.full((_LARGE,), rank + 1.0)
            if rank == 1:
                store.wait([way.__name__])
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            if rank == 0:
                way(x)
                store.set(way.__name__, "")
            work.wait()
            say(ends(x))
        leave(store)

    with ForkedRanks(2, story) as ranks:
        for way in WAYS:
            assert ranks[1].hear() == [[3.0] * 3] * 2
            expected = [[3.0] * 3] * 2 if way in (grown, shared) else []
            assert ranks[0].hear() == expected, way.__name__


def test_a_message_under_way_keeps_its_memory(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store")
        for way in WAYS:
            sent, received = torch.full((_LARGE,), 5.0 + rank), torch.zeros(_LARGE)
            batch = [dist.P2POp(dist.isend, sent, 1 - rank)]
            batch += [dist.P2POp(dist.irecv, received, 1 - rank)]
            if rank == 1:
                store.wait([way.__name__])
            works = dist.batch_isend_irecv(batch)
            del batch
            if rank == 0:
                way(received)
                way(sent)
                store.set(way.__name__, "")
            for work in works:
                work.wait()
            say(ends(received))
        leave(store)

    with ForkedRanks(2, story) as ranks:
        for way in WAYS:
            assert ranks[1].hear() == [[5.0] * 3] * 2
            expected = [[6.0] * 3] * 2 if way in (grown, shared) else []
            assert ranks[0].hear() == expected, way.__name__


def test_memory_of_dropped_work_is_freed_when_it_is_done(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 2, tmp_path / "store")
        x = torch.full((_LARGE,), 1.0)
        if rank == 1:
            store.wait(["changed"])
        work = dist.all_reduce(x, async_op=True)
        del work
        if rank == 0:
            x.resize_(2 * _LARGE)
            store.set("changed", "")
        dist.barrier()
        del x
        say(resident_bytes() < 40 << 20)
        leave(store)

    def resident_bytes() -> int:
        """Of large private mappings."""
        total, size = 0, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line.startswith("Size:"):
                size = int(line.split()[1]) << 10
            elif line.startswith("Private_Dirty:") and 39 << 20 < size < 100 << 20:
                total += int(line.split()[1]) << 10
        return total

    with ForkedRanks(2, story) as ranks:
        assert ranks[0].hear()
        assert ranks[1].hear()
