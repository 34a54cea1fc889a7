"""The ProcessGroup interface itself, as callers of a backend use it."""

from __future__ import annotations

import torch

import tilework.distributed as dist
from tilework.testing.groups.base import GroupSuite, inside
from tilework.testing.groups.values import assert_same, folded, pattern

_F32 = torch.float32


def mine(rank: int, *shape: int) -> torch.Tensor:
    """The tensor that ``rank`` contributes, of ``shape`` or of 4 elements."""
    return pattern(rank, shape or (4,), _F32)


def here() -> dist.ProcessGroup:
    """The default group."""
    return dist.get_default_group()


class MethodSuite(GroupSuite):
    """Every method of ProcessGroup, called with lists of one tensor as backends are."""

    def test_it_knows_itself(self) -> None:
        def body(rank: int) -> None:
            group = here()
            assert isinstance(group, dist.ProcessGroup)
            assert (group.rank(), group.size()) == (rank, 2)
            assert group.name() == group.getBackendName() == dist.get_backend()

        self.run(2, body)

    def test_allreduce(self) -> None:
        def body(rank: int) -> None:
            tensor = mine(rank)
            here().allreduce([tensor]).wait()
            assert_same(tensor, folded("SUM", [mine(r) for r in range(2)]))
            tensor = mine(rank)
            here().allreduce([tensor], dist.Options(reduceOp=dist.ReduceOp.MAX)).wait()
            assert_same(tensor, folded("MAX", [mine(r) for r in range(2)]))

        self.run(2, body)

    def test_broadcast_and_reduce(self) -> None:
        def body(rank: int) -> None:
            news = mine(rank)
            here().broadcast([news], dist.Options(rootRank=1)).wait()
            assert_same(news, mine(1))
            tensor = mine(rank)
            here().reduce([tensor], dist.Options(rootRank=1)).wait()
            assert_same(tensor, folded("SUM", [mine(0), mine(1)]) if rank == 1 else mine(0))

        self.run(2, body)

    def test_gathering(self) -> None:
        def body(rank: int) -> None:
            outputs = [torch.zeros(4), torch.zeros(4)]
            here().allgather([outputs], [mine(rank)]).wait()
            into = torch.zeros(8)
            here().allgather_into_tensor(into, mine(rank)).wait()
            assert_same(into, torch.cat([mine(0), mine(1)]))
            assert_same(into, torch.cat(outputs))
            opts = dist.Options(rootRank=1)
            at_root = [[torch.zeros(4), torch.zeros(4)]] if rank == 1 else []
            here().gather(at_root, [mine(rank)], opts).wait()
            if rank == 1:
                assert_same(torch.cat(at_root[0]), into)

        self.run(2, body)

    def test_scattering(self) -> None:
        def body(rank: int) -> None:
            tensor = torch.zeros(4)
            opts = dist.Options(rootRank=1)
            here().scatter([tensor], [[mine(5), mine(6)]] if rank == 1 else [], opts).wait()
            assert_same(tensor, mine(5 + rank))
            here().reduce_scatter([tensor], [[mine(rank), mine(rank + 1)]]).wait()
            assert_same(tensor, folded("SUM", [mine(rank), mine(rank + 1)]))
            here().reduce_scatter_tensor(tensor, mine(rank, 8)).wait()
            total = folded("SUM", [mine(r, 8) for r in range(2)])
            assert_same(tensor, total.chunk(2)[rank])

        self.run(2, body)

    def test_exchanging(self) -> None:
        def body(rank: int) -> None:
            outputs = [torch.zeros(4), torch.zeros(4)]
            here().alltoall(outputs, [mine(10 * rank), mine(10 * rank + 1)]).wait()
            assert_same(outputs[1 - rank], mine(10 * (1 - rank) + rank))
            single = torch.zeros(8)
            here().alltoall_single(single, mine(rank, 8), [], []).wait()
            assert_same(single, torch.cat([mine(r, 8).chunk(2)[rank] for r in range(2)]))
            here().alltoall_single(single, mine(rank, 8), [4, 4], [4, 4]).wait()
            assert_same(single, torch.cat([mine(r, 8).chunk(2)[rank] for r in range(2)]))

        self.run(2, body)

    def test_coalesced(self) -> None:
        def body(rank: int) -> None:
            tensors = [mine(rank), mine(rank, 2, 3)]
            here().allreduce_coalesced(tensors).wait()
            assert_same(tensors[1], folded("SUM", [mine(r, 2, 3) for r in range(2)]))
            outputs = [[torch.zeros(4), torch.zeros(2)] for _ in range(2)]
            here().allgather_coalesced(outputs, [mine(rank), mine(rank, 2)]).wait()
            assert_same(outputs[1][1], mine(1, 2))

        self.run(2, body)

    def test_messages(self) -> None:
        def body(rank: int) -> None:
            tensor = mine(rank)
            if rank == 0:
                here().send([tensor], 1, 3).wait()
                here().send([tensor], 1, 4).wait()
            else:
                here().recv([tensor], 0, 3).wait()
                assert_same(tensor, mine(0))
                work = here().recv_anysource([tensor.zero_()], 4)
                work.wait()
                assert work.source_rank() == 0
                assert_same(tensor, mine(0))

        self.run(2, body)

    def test_barriers_are_counted(self) -> None:
        def body(rank: int) -> None:
            here().barrier().wait()
            here().barrier(dist.Options()).wait()
            assert here().get_sequence_number_for_group() == 2

        self.run(2, body)

    def test_statistics_are_numbers_by_name(self) -> None:
        def body(rank: int) -> None:
            assert isinstance(here().statistics(), dict)

        self.run(2, body)

    def test_abort_ends_everyone(self) -> None:
        def body(rank: int) -> str:
            group = inside(dist.new_group())
            try:
                if rank == 0:
                    group.abort("the user said so")
                dist.all_reduce(torch.ones(1), group=group)
            except dist.DistBackendError as error:
                return str(error)
            raise AssertionError("an aborted group went on")

        assert all("the user said so" in text for text in self.run(2, body))

    def test_close_may_be_called_twice(self) -> None:
        def body(rank: int) -> None:
            group = inside(dist.new_group())
            dist.barrier(group=group)
            dist.barrier()
            group.close()
            group.close()

        self.run(2, body)
