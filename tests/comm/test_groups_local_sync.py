"""The c10d document's AbstractLargeCommTest: groups that only their members make."""

from __future__ import annotations

import pytest
import torch

import tilework.distributed as dist
from tests.comm.conftest import Join, Runner
from tilework.testing import run_ranks


def assert_pair_gathers(group: object, rank: int) -> None:
    assert isinstance(group, dist.ProcessGroup)
    pair, low = rank // 2, rank // 2 * 2
    outputs = [torch.tensor([-1, -1]) for _ in range(group.size())]
    dist.all_gather(outputs, torch.tensor([pair, rank]), group=group)
    assert [output.tolist() for output in outputs] == [[pair, low], [pair, low + 1]]


def test_members_only(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 4)
        inside = [rank, (rank + 2) % 4]
        outside = [r for r in range(4) if r not in inside]
        assert dist.new_group(ranks=outside, use_local_synchronization=True) is None
        group = dist.new_group(ranks=inside, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        # [3, 1] makes the same group as [1, 3].
        inside.sort()
        assert dist.get_group_rank(group, rank) == inside.index(rank)
        assert dist.get_process_group_ranks(group) == inside

    ranks(4, body)


def test_such_a_group_works(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 4)
        low = rank // 2 * 2
        group = dist.new_group(ranks=[low, low + 1], use_local_synchronization=True)
        assert_pair_gathers(group, rank)

    ranks(4, body)


def test_duplicates_do_not_conflict(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 4)
        low = rank // 2 * 2
        groups = [
            dist.new_group(ranks=[low, low + 1], use_local_synchronization=True) for _ in range(2)
        ]
        for group in groups:
            assert_pair_gathers(group, rank)

    ranks(4, body)


def test_a_group_that_is_awaited_ends_with_the_default_group() -> None:
    """Rank 2 is lost; rank 1 notices, and never comes to the group that rank 0 makes with it."""

    def program(rank: int) -> object:
        if rank == 2:
            return None
        if rank == 1:
            with pytest.raises(dist.PeerLostError):
                dist.barrier()
        else:
            with pytest.raises(dist.PeerLostError):
                dist.new_group([0, 1], use_local_synchronization=True)
        group = dist.shrink_group()
        again = dist.new_group([0, 1], use_local_synchronization=True)
        return group.size(), dist.get_world_size(again)

    assert run_ranks(3, program) == [(2, 2), (2, 2), None]
