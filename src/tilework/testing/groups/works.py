"""Asynchronous operations: their Work, its future, and the order in which they end."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tilework.errors import CollectiveTimeoutError
from tilework.testing.groups.base import (
    LONG,
    GroupSuite,
    failure_of,
    inside,
    on_ranks,
    started,
    still_works,
)
from tilework.testing.groups.values import assert_same, folded, pattern

_F32 = torch.float32


class WorkSuite(GroupSuite):
    """Work and its future."""

    @on_ranks(2)
    def test_a_started_operation_waits_for_its_peers(self, rank: int) -> None:
        tensor = torch.ones(4)
        if rank == 1:
            time.sleep(0.15)
            assert started(dist.all_reduce(tensor, async_op=True)).wait()
            return
        work = started(dist.all_reduce(tensor, async_op=True))
        assert not work.is_completed()
        assert work.exception() is None
        work.wait(timeout=LONG)
        assert work.is_completed()
        assert work.is_success()
        assert tensor.tolist() == [2.0] * 4

    @on_ranks(2)
    def test_wait_gives_up_but_the_operation_goes_on(self, rank: int) -> None:
        tensor = torch.ones(1)
        store = dist.get_default_store()
        if rank == 1:
            store.wait(["rank 0 has given up"])
            dist.all_reduce(tensor)
            return
        work = started(dist.all_reduce(tensor, async_op=True))
        error = failure_of(lambda: work.wait(timeout=timedelta(milliseconds=50)))
        assert error.kind is CollectiveTimeoutError
        with pytest.raises(TypeError, match="timedelta"):
            work.wait(0.5)  # type: ignore[arg-type]
        store.set("rank 0 has given up", "")
        assert work.wait()
        assert tensor.item() == 2.0

    @on_ranks(2)
    def test_wait_may_be_called_again(self, rank: int) -> None:
        work = started(dist.all_reduce(torch.ones(1), async_op=True))
        assert work.wait()
        assert work.wait()
        assert work.wait(timeout=LONG)

    @on_ranks(2)
    def test_the_future_gives_the_outputs(self, rank: int) -> None:
        tensor = torch.full((3,), float(rank))
        future = started(dist.all_reduce(tensor, async_op=True)).get_future()
        assert [t.tolist() for t in future.wait()] == [[1.0] * 3]
        assert future.done()

    @on_ranks(2)
    def test_futures_chain(self, rank: int) -> None:
        if rank == 1:
            time.sleep(0.05)
        work = started(dist.all_reduce(torch.full((3,), 4.0), async_op=True))
        chained = work.get_future().then(lambda done: done.value()[0] / 2)
        assert chained.wait().tolist() == [4.0] * 3

    @on_ranks(2)
    def test_a_callback_may_wait_for_more_work_of_its_group(self, rank: int) -> None:
        first, second = torch.ones(3), torch.ones(2)

        def more(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            work = started(dist.all_reduce(second, async_op=True))
            return done.value()[0][:2] + work.get_future().wait()[0]

        future = started(dist.all_reduce(first, async_op=True)).get_future()
        assert future.then(more).wait().tolist() == [4.0, 4.0]

    @on_ranks(2)
    def test_result_holds_the_outputs(self, rank: int) -> None:
        tensor = torch.ones(2)
        work = started(dist.broadcast(tensor, src=0, async_op=True))
        work.wait()
        assert [t.data_ptr() for t in work.result()] == [tensor.data_ptr()]

    @on_ranks(3)
    def test_many_operations_in_flight_end_in_order(self, rank: int) -> None:
        time.sleep(0.03 * rank)
        tensors = [pattern(rank + i, (100 * i,), _F32) for i in range(20)]
        works = [started(dist.all_reduce(tensor, async_op=True)) for tensor in tensors]
        works[-1].wait()
        assert all(work.is_completed() for work in works)
        for i, tensor in enumerate(tensors):
            parts = [pattern(r + i, (100 * i,), _F32) for r in range(3)]
            assert_same(tensor, folded("SUM", parts))

    @on_ranks(3)
    def test_different_operations_in_flight(self, rank: int) -> None:
        total, news = torch.ones(3), torch.full((2,), float(rank))
        everyone = [torch.zeros(1) for _ in range(3)]
        works = [
            dist.all_reduce(total, async_op=True),
            dist.broadcast(news, src=2, async_op=True),
            dist.all_gather(everyone, torch.tensor([float(rank)]), async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in reversed(works):
            started(work).wait()
        assert total.tolist() == [3.0] * 3
        assert news.tolist() == [2.0] * 2
        assert [t.item() for t in everyone] == [0.0, 1.0, 2.0]

    @on_ranks(2)
    def test_a_synchronous_operation_comes_after_those_in_flight(self, rank: int) -> None:
        tensor = torch.ones(50_000)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        dist.all_reduce(tensor)
        assert set(tensor.tolist()) == {16.0}
        assert all(started(work).is_completed() for work in works)

    @on_ranks(2)
    def test_inputs_may_be_forgotten_while_under_way(self, rank: int) -> None:
        works = []
        outputs = [torch.zeros(2, 1000) for _ in range(10)]
        for i, output in enumerate(outputs):
            scratch = pattern(rank + i, (1000,), _F32)
            works.append(dist.all_gather_into_tensor(output, scratch, async_op=True))
            del scratch
        for i, (work, output) in enumerate(zip(works, outputs, strict=True)):
            started(work).wait()
            assert_same(output[1], pattern(1 + i, (1000,), _F32))

    @on_ranks(2)
    def test_unwaited_work_is_no_trouble(self, rank: int) -> None:
        for _ in range(10):
            dist.all_reduce(torch.ones(10), async_op=True)
        still_works(2)

    @on_ranks(2)
    def test_sequence_numbers_count_collectives(self, rank: int) -> None:
        group = inside(dist.new_group([0, 1]))
        start = group.get_sequence_number_for_group()
        for i in range(5):
            dist.all_reduce(torch.ones(1), group=group)
            assert group.get_sequence_number_for_group() == start + i + 1
        work = started(dist.all_reduce(torch.ones(1), group=group, async_op=True))
        assert group.get_sequence_number_for_group() == start + 6
        work.wait()


def mine(rank: int, *shape: int) -> torch.Tensor:
    """The tensor that ``rank`` contributes, of ``shape`` or of 4 elements."""
    return pattern(rank, shape or (4,), _F32)


def here() -> dist.ProcessGroup:
    """The default group."""
    return dist.get_default_group()


class MethodSuite(GroupSuite):
    """Every method of ProcessGroup, called with lists of one tensor as backends are."""

    @on_ranks(2)
    def test_it_knows_itself(self, rank: int) -> None:
        group = here()
        assert isinstance(group, dist.ProcessGroup)
        assert (group.rank(), group.size()) == (rank, 2)
        assert group.name() == group.getBackendName() == dist.get_backend()

    @on_ranks(2)
    def test_collectives_by_default(self, rank: int) -> None:
        group, both, tensor = here(), torch.stack([mine(0, 8), mine(1, 8)]), mine(rank, 8)
        total, halves = folded("SUM", list(both)), [each.chunk(2)[rank] for each in both]
        outputs, part, single = torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(8)
        group.allgather([list(outputs)], [tensor]).wait()
        assert_same(outputs, both)
        group.allgather_into_tensor(outputs.zero_(), tensor).wait()
        assert_same(outputs, both)
        group.reduce_scatter([part[0]], [list(tensor.chunk(2))]).wait()
        group.reduce_scatter_tensor(part[1], tensor).wait()
        assert_same(part, torch.stack([total.chunk(2)[rank]] * 2))
        group.alltoall(list(part), list(tensor.chunk(2))).wait()
        assert_same(part, torch.stack(halves))
        for splits in ([], [4, 4]):
            group.alltoall_single(single.zero_(), tensor, splits, splits).wait()
            assert_same(single, torch.cat(halves))
        listed = [[outputs[0], part[0]], [outputs[1], part[1]]]
        group.allgather_coalesced(listed, [tensor, tensor[:4]]).wait()
        assert_same(part, both[:, :4])
        group.allreduce([tensor]).wait()
        assert_same(tensor, total)
        group.allreduce_coalesced([tensor]).wait()
        assert_same(tensor, 2 * total)

    @on_ranks(2)
    def test_collectives_with_options(self, rank: int) -> None:
        group, root = here(), dist.Options(rootRank=1)
        tensor, everyone = mine(rank), [torch.zeros(4), torch.zeros(4)]
        group.gather([everyone] if rank == 1 else [], [tensor], root).wait()
        group.scatter([tensor], [everyone] if rank == 1 else [], root).wait()
        assert_same(tensor, mine(rank))
        group.reduce([tensor], root).wait()
        assert_same(tensor, folded("SUM", [mine(0), mine(1)]) if rank == 1 else mine(0))
        group.broadcast([tensor], root).wait()
        assert_same(tensor, folded("SUM", [mine(0), mine(1)]))
        tensor = mine(rank)
        group.allreduce([tensor], dist.Options(reduceOp=dist.ReduceOp.MAX)).wait()
        assert_same(tensor, folded("MAX", [mine(0), mine(1)]))

    @on_ranks(2)
    def test_messages(self, rank: int) -> None:
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

    @on_ranks(2)
    def test_barriers_are_counted(self, rank: int) -> None:
        here().barrier().wait()
        here().barrier(dist.Options()).wait()
        assert here().get_sequence_number_for_group() == 2

    @on_ranks(2)
    def test_statistics_are_numbers_by_name(self, rank: int) -> None:
        assert isinstance(here().statistics(), dict)

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

    @on_ranks(2)
    def test_close_may_be_called_twice(self, rank: int) -> None:
        group = inside(dist.new_group())
        dist.barrier(group=group)
        dist.barrier()
        group.close()
        group.close()
