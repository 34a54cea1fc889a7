"""Groups of some of the ranks: operations there, and that groups do not mix."""

from __future__ import annotations

import torch

import tilework.distributed as dist
from tilework.testing.groups.base import GroupSuite, finish, on_ranks, started
from tilework.testing.groups.values import assert_same, pattern

_F32 = torch.float32
_OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


class SubGroupSuite(GroupSuite):
    """new_group and related functions."""

    @on_ranks(4)
    def test_operations_in_a_sub_group(self, rank: int, async_op: bool) -> None:
        members = [1, 3]
        group = dist.new_group(members)
        if rank not in members:
            assert group == _OUTSIDE
            return
        assert group is not None
        assert dist.get_group_rank(group, rank) == members.index(rank)
        tensor = torch.full((2,), float(rank))
        finish(dist.broadcast(tensor, src=3, group=group, async_op=async_op), async_op)
        assert tensor.tolist() == [3.0, 3.0]
        finish(dist.all_reduce(tensor, group=group, async_op=async_op), async_op)
        assert tensor.tolist() == [6.0, 6.0]
        finish(dist.reduce(tensor, dst=1, group=group, async_op=async_op), async_op)
        assert tensor.tolist() == [12.0 if rank == 1 else 6.0] * 2

    @on_ranks(3)
    def test_roots_are_global_ranks(self, rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        outputs = [torch.zeros(2), torch.zeros(2)] if rank == 2 else None
        dist.gather(torch.full((2,), float(rank)), outputs, dst=2, group=group)
        if outputs is not None:
            assert [t.tolist() for t in outputs] == [[1.0] * 2, [2.0] * 2]
        tensor = torch.zeros(1)
        parts = [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 2 else None
        dist.scatter(tensor, parts, src=2, group=group)
        assert tensor.item() == 4.0 + rank

    @on_ranks(4)
    def test_overlapping_groups_at_once(self, rank: int) -> None:
        pairs = [(0, 1), (1, 2), (2, 3), (0, 3)]
        groups = {pair: dist.new_group(list(pair)) for pair in pairs}
        mine = {pair: group for pair, group in groups.items() if rank in pair}
        tensors = {pair: torch.full((100,), float(rank)) for pair in mine}
        works = [
            dist.all_reduce(tensors[pair], group=group, async_op=True)
            for pair, group in mine.items()
        ]
        for work in works:
            started(work).wait()
        for pair, tensor in tensors.items():
            assert set(tensor.tolist()) == {float(sum(pair))}

    @on_ranks(2)
    def test_one_group_need_not_wait_for_another(self, rank: int) -> None:
        first, second = dist.new_group(), dist.new_group()
        tensor, other = torch.ones(1), torch.ones(1)
        # Ranks take the two groups in opposite orders: no order between groups is promised.
        groups = [(first, tensor), (second, other)][:: 1 if rank == 0 else -1]
        works = [dist.all_reduce(t, group=g, async_op=True) for g, t in groups]
        for work in works:
            started(work).wait()
        assert tensor.item() == other.item() == 2.0

    @on_ranks(3)
    def test_a_group_of_one(self, rank: int) -> None:
        groups = [dist.new_group([r]) for r in range(3)]
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, group=groups[rank])
        dist.broadcast(tensor, src=rank, group=groups[rank])
        dist.barrier(group=groups[rank])
        assert tensor.tolist() == [float(rank)] * 2

    @on_ranks(2)
    def test_a_destroyed_group_leaves_the_others(self, rank: int) -> None:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        dist.barrier()
        again = dist.new_group([0, 1])
        tensor = pattern(rank, (3,), _F32)
        dist.broadcast(tensor, src=1, group=again)
        assert_same(tensor, pattern(1, (3,), _F32))

    @on_ranks(3)
    def test_uneven_exchange_within_a_sub_group(self, rank: int) -> None:
        group = dist.new_group([0, 2])
        if rank == 1:
            return
        me = rank // 2
        output = torch.zeros(me + 1 + me + 1)
        mine = torch.full((3,), float(rank))
        dist.all_to_all_single(output, mine, [me + 1, me + 1], [1, 2], group=group)
        assert output.tolist() == [0.0] * (me + 1) + [2.0] * (me + 1)
