"""Vaults: slots, stamps, and who keeps whose."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch

import tilework.distributed as dist
from tilework.parallel.resilient.slots import AreaLayout, SharedVault, kept_by, make_vault
from tilework.testing import run_ranks

LAYOUT = AreaLayout((100, 0, 8192), 64)


@pytest.mark.parametrize("shared", [True, False])
def test_what_was_finished_is_there_with_its_stamp(shared: bool) -> None:
    def program(rank: int) -> None:
        vault = make_vault(LAYOUT, 2, dist.get_default_group(), shared)
        for slot in range(2):
            assert vault.stamp(rank, slot) is None
            vault.begin(slot)
            vault.tensor_bytes(rank, slot).fill_(10 * rank + slot)
            vault.finish(slot, 7 + slot, b"plain%d" % rank)
        dist.barrier()
        for other in range(3):
            assert [vault.stamp(other, slot) for slot in range(2)] == [7, 8]
            assert vault.plain(other, 1) == b"plain%d" % other
            expected = torch.full((LAYOUT.tensor_bytes[other],), 10 * other + 1)
            assert torch.equal(vault.tensor_bytes(other, 1), expected.to(torch.uint8))
        dist.barrier()
        vault.begin(0)
        assert vault.stamp(rank, 0) is None
        vault.close()

    run_ranks(3, program)


def test_one_replica_is_kept_by_one_other() -> None:
    def program(rank: int) -> list[bool]:
        vault = make_vault(LAYOUT, 1, dist.get_default_group(), False)
        return [vault.area(other) is not None for other in range(3)]

    assert run_ranks(3, program) == [[True, False, True], [True, True, False], [False, True, True]]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("replicas", range(1, 5))
def test_each_rank_is_kept_by_as_many_as_asked_for(size: int, replicas: int) -> None:
    keepers = [[k for k in range(size) if r in kept_by(k, size, replicas)] for r in range(size)]
    for rank, others in enumerate(keepers):
        assert len(others) == min(replicas, size - 1)
        assert rank not in others


def vault_files() -> set[str]:
    """The descriptors of this process that are memory files of vaults."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "tilework-vault" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_nothing_of_a_shared_vault_is_left() -> None:
    gc.collect()  # vaults of other tests would end during this one
    before = vault_files()

    def program(rank: int) -> bool:
        vault = make_vault(LAYOUT, 1, dist.get_default_group(), True)
        opened = len(vault_files()) > len(before)
        vault.begin(0)
        vault.close()
        vault.close()
        return isinstance(vault, SharedVault) and opened

    assert all(run_ranks(3, program))
    assert vault_files() <= before
