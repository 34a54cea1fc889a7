"""Slots of snapshots: stamps, and who keeps whose."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch

import tilework.distributed as dist
from tilework.parallel.resilient.slots import AreaLayout, SharedSlots, kept_by, make_slots
from tilework.testing import run_ranks

LAYOUT = AreaLayout((100, 0, 8192), 64)


@pytest.mark.parametrize("shared", [True, False])
def test_what_was_finished_is_there_with_its_stamp(shared: bool) -> None:
    def program(rank: int) -> None:
        slots = make_slots(LAYOUT, 2, dist.get_default_group(), shared)
        for slot in range(2):
            assert slots.stamp(rank, slot) is None
            slots.begin(slot)
            slots.tensor_bytes(rank, slot).fill_(10 * rank + slot)
            slots.finish(slot, 7 + slot, b"plain%d" % rank)
        dist.barrier()
        for other in range(3):
            assert [slots.stamp(other, slot) for slot in range(2)] == [7, 8]
            assert slots.plain(other, 1) == b"plain%d" % other
            expected = torch.full((LAYOUT.tensor_bytes[other],), 10 * other + 1)
            assert torch.equal(slots.tensor_bytes(other, 1), expected.to(torch.uint8))
        dist.barrier()
        slots.begin(0)
        assert slots.stamp(rank, 0) is None
        slots.close()

    run_ranks(3, program)


def test_one_replica_is_kept_by_one_other() -> None:
    def program(rank: int) -> list[bool]:
        slots = make_slots(LAYOUT, 1, dist.get_default_group(), False)
        return [slots.area(other) is not None for other in range(3)]

    assert run_ranks(3, program) == [[True, False, True], [True, True, False], [False, True, True]]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("replicas", range(1, 5))
def test_each_rank_is_kept_by_as_many_as_asked_for(size: int, replicas: int) -> None:
    keepers = [[k for k in range(size) if r in kept_by(k, size, replicas)] for r in range(size)]
    for rank, others in enumerate(keepers):
        assert len(others) == min(replicas, size - 1)
        assert rank not in others


def slot_files() -> set[str]:
    """The descriptors of this process that are memory files of slots."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "tilework-slots" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_nothing_of_shared_slots_is_left() -> None:
    gc.collect()  # slots of other tests would end during this one
    before = slot_files()

    def program(rank: int) -> bool:
        slots = make_slots(LAYOUT, 1, dist.get_default_group(), True)
        opened = len(slot_files()) > len(before)
        slots.begin(0)
        slots.close()
        slots.close()
        return isinstance(slots, SharedSlots) and opened

    assert all(run_ranks(3, program))
    assert slot_files() <= before
