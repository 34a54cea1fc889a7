"""Groups of the ranks that are left: values, numbers, stores, meshes, errors."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import tilework.distributed as dist
from tests.tables import each
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks


def summed(group: dist.ProcessGroup | None = None) -> float:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return x[0].item()


def lose_rank(rank: int, victim: int) -> bool:
    """True on the rank that is to end; on the others once they have lost it."""
    if rank == victim:
        return True
    with pytest.raises(dist.PeerLostError):
        dist.barrier()
    return False


@each("victim", range(3))
def test_ranks_are_numbered_anew_and_the_group_works(victim: int) -> None:
    def program(rank: int) -> object:
        if lose_rank(rank, victim):
            return None
        group = dist.shrink_group()
        assert group is dist.get_default_group()
        assert group.origins == tuple(r for r in range(3) if r != victim)
        assert group.origins is not None
        assert group.origins[dist.get_rank()] == rank
        return dist.get_rank(), dist.get_world_size(), summed()

    results = run_ranks(3, program)
    assert results.pop(victim) is None
    assert results == [(0, 2, 2.0), (1, 2, 2.0)]


def test_groups_meshes_and_the_store_work_afterwards() -> None:
    def program(rank: int) -> object:
        init_device_mesh("cpu", (4,))
        if lose_rank(rank, 1):
            return None
        dist.shrink_group()
        dist.get_default_store().set(f"here/{dist.get_rank()}", "yes")
        dist.get_default_store().wait(["here/0", "here/1", "here/2"], timedelta(seconds=120))
        pair = dist.new_group([0, 2])
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        assert mesh.get_group() is dist.get_default_group()
        column = DeviceMesh("cpu", [[0], [1], [2]], mesh_dim_names=("dp", "tp"))
        assert column["dp"].size() == 3
        return summed(pair) if isinstance(pair, dist.ProcessGroup) else None

    assert run_ranks(4, program) == [2.0, None, None, 2.0]


def test_it_can_be_done_again_until_one_is_left() -> None:
    def program(rank: int) -> int:
        for victim in range(3):
            if lose_rank(rank, victim):
                break
            dist.shrink_group()
        return dist.get_world_size()

    assert run_ranks(4, program) == [4, 3, 2, 1]


def test_ranks_that_wait_in_another_group_come_too() -> None:
    """Rank 2 waits for rank 1 in a group that has lost nobody."""

    def program(rank: int) -> object:
        left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
        if rank == 0:
            return None
        with pytest.raises(dist.PeerLostError):
            dist.barrier(left if rank == 1 else right)
        return dist.shrink_group().size()

    assert run_ranks(3, program) == [None, 2, 2]


def test_a_subgroup_shrinks_by_itself() -> None:
    def program(rank: int) -> object:
        some = dist.new_group([0, 2, 3])
        if rank == 3:
            return None
        if rank == 1:
            return dist.get_world_size()
        with pytest.raises(dist.PeerLostError):
            dist.barrier(some)
        assert isinstance(some, dist.ProcessGroup)
        smaller = some.shrink()
        assert dist.get_process_group_ranks(smaller) == [0, 2]
        return summed(smaller)

    assert run_ranks(4, program) == [2.0, 4, 2.0, None]


def test_ranks_can_be_left_out_on_purpose() -> None:
    def program(rank: int) -> object:
        store = dist.get_default_store()
        if rank == 1:
            with pytest.raises(dist.PeerLostError, match="shrinks"):
                dist.barrier()
            store.wait(["shrunk"])  # else all might agree that it stays
            with pytest.raises(dist.ExcludedError, match="rank 1 is out"):
                dist.shrink_group(timeout=timedelta(seconds=120))
            return None
        size = dist.shrink_group([1]).size()
        store.set("shrunk", "")
        return size

    assert run_ranks(3, program) == [2, None, 2]


def test_a_rank_that_comes_too_late_is_told_that_it_is_out() -> None:
    def program(rank: int) -> object:
        store = dist.get_default_store()
        if rank == 1:
            store.wait(["shrunk"])
            with pytest.raises(dist.ExcludedError, match=r"\[0, 2\].*went on") as caught:
                dist.shrink_group()
            return caught.value.ranks
        dist.shrink_group(timeout=timedelta(seconds=1.5))  # for two on a busy machine
        store.set("shrunk", "")
        return summed()

    assert run_ranks(3, program) == [2.0, (1,), 2.0]


def test_wrong_arguments_move_nothing() -> None:
    def program(rank: int) -> float:
        with pytest.raises(ValueError, match=r"ranks \[7\], which are not in group 'default'"):
            dist.shrink_group([7])
        with pytest.raises(ValueError, match="call shrink_group on the ranks that stay"):
            dist.shrink_group([rank])
        with pytest.raises(ValueError, match="not in"):
            dist.shrink_group(group=dist.GroupMember.NON_GROUP_MEMBER)
        return summed()

    assert run_ranks(2, program) == [2.0, 2.0]
