"""Operations that move tensors and compute nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.contract import Capability
from tilework.testing.groups.base import GroupSuite, finish, needs, on_ranks, started, still_works
from tilework.testing.groups.values import Case, assert_same, pattern

_F32 = torch.float32


class BroadcastSuite(GroupSuite):
    """broadcast and barrier."""

    @on_ranks()
    def test_broadcast(self, rank: int, n: int, async_op: bool) -> None:
        for turn, case in enumerate(self.cases()):
            root = turn % n
            # The root may send a read-only tensor, as nothing is written there.
            tensor = case.make(root) if rank == root else case.blank()
            finish(dist.broadcast(tensor, src=root, async_op=async_op), async_op)
            assert_same(tensor, case.value(root), case)

    @on_ranks(2)
    def test_strided_output_keeps_what_lies_between(self, rank: int) -> None:
        storage = torch.full((10,), float(rank))
        dist.broadcast(storage[::2], src=1)
        assert storage[::2].tolist() == [1.0] * 5
        assert storage[1::2].tolist() == [float(rank)] * 5

    def test_barrier(self, n: int, async_op: bool) -> None:
        def body(rank: int) -> tuple[float, float]:
            time.sleep(0.02 * rank)
            before = time.monotonic()
            finish(dist.barrier(async_op=async_op), async_op)
            return before, time.monotonic()

        times = self.run(n, body)
        last_to_come = max(before for before, _ in times)
        first_to_leave = min(after for _, after in times)
        assert last_to_come <= first_to_leave

    @on_ranks()
    def test_monitored_barrier(self, rank: int, n: int) -> None:
        for _ in range(3):
            dist.monitored_barrier()
        dist.monitored_barrier(wait_all_ranks=True)

    @on_ranks(2)
    def test_parameters_are_written_without_a_graph(self, rank: int) -> None:
        weight = torch.nn.Parameter(torch.full((3,), float(rank)))
        dist.broadcast(weight, src=1)
        dist.all_reduce(weight)
        assert weight.tolist() == [2.0] * 3
        assert weight.grad_fn is None
        assert weight.requires_grad

    @on_ranks(2)
    def test_inference_mode(self, rank: int) -> None:
        with torch.inference_mode():
            inside = torch.full((3,), float(rank))
            dist.all_reduce(inside)
            gathered = [torch.zeros(3), torch.zeros(3)]
            dist.all_gather(gathered, inside)
            started(dist.broadcast(inside, src=0, async_op=True)).wait()
        assert [t.tolist() for t in gathered] == [[1.0] * 3] * 2
        dist.all_reduce(inside)
        assert inside.tolist() == [2.0] * 3


class GatherSuite(GroupSuite):
    """all_gather, all_gather_into_tensor, gather and their coalesced forms."""

    @on_ranks()
    def test_all_gather(self, rank: int, n: int, async_op: bool) -> None:
        for case in self.cases():
            outputs = [case.blank() for _ in range(n)]
            finish(dist.all_gather(outputs, case.make(rank), async_op=async_op), async_op)
            for source, output in enumerate(outputs):
                assert_same(output, case.value(source), case)

    @needs(Capability.UNEVEN_SIZES)
    @on_ranks()
    def test_all_gather_of_uneven_tensors(self, rank: int, n: int, async_op: bool) -> None:
        shapes = [(source, 2) for source in range(n)]
        for dtype in (torch.float32, torch.bool):
            outputs = [torch.zeros(shape, dtype=dtype) for shape in shapes]
            mine = pattern(rank, shapes[rank], dtype)
            finish(dist.all_gather(outputs, mine, async_op=async_op), async_op)
            for source, output in enumerate(outputs):
                assert_same(output, pattern(source, shapes[source], dtype))

    def test_uneven_tensors_are_refused_where_they_are_lacking(self) -> None:
        if Capability.UNEVEN_SIZES not in self.group_type.lacks:
            pytest.skip("this backend has them")

        def body(rank: int) -> None:
            with pytest.raises(NotImplementedError, match="different sizes"):
                dist.all_gather([torch.zeros(r + 1) for r in range(2)], torch.zeros(rank + 1))
            still_works(2)

        self.run(2, body)

    @on_ranks(3)
    def test_moves_of_many_chunks(self, rank: int) -> None:
        for dtype in (torch.float32, torch.int8):
            rows = torch.stack([pattern(r, (3, self.large), dtype) for r in range(3)])
            outputs = torch.zeros_like(rows[0])
            dist.all_gather(list(outputs), rows[rank, 0])
            assert_same(outputs, rows[:, 0], dtype)
            dist.all_to_all(list(outputs), list(rows[rank]))
            assert_same(outputs, rows[:, rank], dtype)
            dist.scatter(outputs[0], list(rows[1]) if rank == 1 else None, src=1)
            dist.broadcast(outputs[1], src=2)
            assert_same(outputs[:2], torch.stack([rows[1, rank], rows[1, 2]]), dtype)

    @on_ranks()
    def test_all_gather_into_tensor_concatenates(self, rank: int, n: int, async_op: bool) -> None:
        for case in (case for case in self.cases() if case.shape):
            rows, *rest = case.shape
            output = Case((n * rows, *rest), case.dtype, case.layout).blank()
            mine = case.make(rank)
            finish(dist.all_gather_into_tensor(output, mine, async_op=async_op), async_op)
            assert_same(output, torch.cat([case.value(source) for source in range(n)]), case)

    @on_ranks()
    def test_all_gather_into_tensor_stacks(self, rank: int, n: int) -> None:
        for case in self.cases():
            output = Case((n, *case.shape), case.dtype, case.layout).blank()
            dist.all_gather_into_tensor(output, case.make(rank))
            assert_same(output, torch.stack([case.value(source) for source in range(n)]), case)

    @on_ranks()
    def test_all_gather_coalesced(self, rank: int, n: int, async_op: bool) -> None:
        shapes = [(2, 3), (), (0,), (5,)]
        mine = [pattern(rank + i, shape, _F32) for i, shape in enumerate(shapes)]
        outputs = [[torch.zeros(shape) for shape in shapes] for _ in range(n)]
        finish(dist.all_gather_coalesced(outputs, mine, async_op=async_op), async_op)
        for source, tensors in enumerate(outputs):
            for i, tensor in enumerate(tensors):
                assert_same(tensor, pattern(source + i, shapes[i], _F32))

    @on_ranks()
    def test_gather(self, rank: int, n: int, async_op: bool) -> None:
        for turn, case in enumerate(self.cases()):
            root = turn % n
            outputs = [case.blank() for _ in range(n)] if rank == root else None
            work = dist.gather(case.make(rank), outputs, dst=root, async_op=async_op)
            finish(work, async_op)
            for source, output in enumerate(outputs or []):
                assert_same(output, case.value(source), case)

    @needs(Capability.UNEVEN_SIZES)
    @on_ranks()
    def test_gather_of_uneven_tensors(self, rank: int, n: int) -> None:
        outputs = [torch.zeros(source, 3) for source in range(n)] if rank == n - 1 else None
        dist.gather(pattern(rank, (rank, 3), _F32), outputs, dst=n - 1)
        for source, output in enumerate(outputs or []):
            assert_same(output, pattern(source, (source, 3), _F32))

    @on_ranks(2)
    def test_outputs_may_be_views_of_one_tensor(self, rank: int) -> None:
        whole = torch.zeros(4, 6)
        dist.all_gather(list(whole.chunk(2, dim=1)), pattern(rank, (4, 3), _F32))
        assert_same(whole, torch.cat([pattern(r, (4, 3), _F32) for r in range(2)], dim=1))


class ScatterSuite(GroupSuite):
    """scatter."""

    @on_ranks()
    def test_scatter(self, rank: int, n: int, async_op: bool) -> None:
        for turn, case in enumerate(self.cases()):
            root = turn % n
            parts = [case.make(root + dst) for dst in range(n)] if rank == root else None
            output = case.blank()
            finish(dist.scatter(output, parts, src=root, async_op=async_op), async_op)
            assert_same(output, case.value(root + rank), case)

    @needs(Capability.UNEVEN_SIZES)
    @on_ranks()
    def test_scatter_of_uneven_tensors(self, rank: int, n: int) -> None:
        parts = [pattern(dst, (dst, 2), _F32) for dst in range(n)] if rank == 0 else None
        output = torch.zeros(rank, 2)
        dist.scatter(output, parts, src=0)
        assert_same(output, pattern(rank, (rank, 2), _F32))


def parcel(src: int, dst: int) -> int:
    """The number of rows that rank ``src`` sends to rank ``dst``: uneven, sometimes none."""
    return (src + 2 * dst) % 4


def rows(src: int, dst: int, dtype: torch.dtype = _F32) -> torch.Tensor:
    """The rows that ``src`` sends to ``dst``."""
    return pattern(10 * src + dst, (parcel(src, dst), 3), dtype)


class AllToAllSuite(GroupSuite):
    """all_to_all and all_to_all_single."""

    @on_ranks()
    def test_all_to_all(self, rank: int, n: int, async_op: bool) -> None:
        for case in self.cases():
            inputs = [case.make(10 * rank + dst) for dst in range(n)]
            outputs = [case.blank() for _ in range(n)]
            finish(dist.all_to_all(outputs, inputs, async_op=async_op), async_op)
            for src, output in enumerate(outputs):
                assert_same(output, case.value(10 * src + rank), case)

    @on_ranks()
    def test_all_to_all_of_uneven_tensors(self, rank: int, n: int, async_op: bool) -> None:
        for dtype in self.dtypes:
            inputs = [rows(rank, dst, dtype) for dst in range(n)]
            outputs = [torch.empty_like(rows(src, rank, dtype)) for src in range(n)]
            finish(dist.all_to_all(outputs, inputs, async_op=async_op), async_op)
            for src, output in enumerate(outputs):
                assert_same(output, rows(src, rank, dtype))

    @on_ranks(3)
    def test_all_to_all_of_different_shapes_to_each_rank(self, rank: int) -> None:
        shapes = [(2, 2), (), (5,)]
        inputs = [pattern(10 * rank + dst, shapes[dst], _F32) for dst in range(3)]
        outputs = [torch.zeros(shapes[rank]) for _ in range(3)]
        dist.all_to_all(outputs, inputs)
        for src, output in enumerate(outputs):
            assert_same(output, pattern(10 * src + rank, shapes[rank], _F32))

    @on_ranks()
    def test_all_to_all_single_in_equal_parts(self, rank: int, n: int, async_op: bool) -> None:
        for case in (case for case in self.cases() if case.shape):
            whole = Case((2 * n, *case.shape[1:]), case.dtype, case.layout)
            output = whole.blank()
            work = dist.all_to_all_single(output, whole.make(rank), async_op=async_op)
            finish(work, async_op)
            parts = [whole.value(src).narrow(0, 2 * rank, 2) for src in range(n)]
            assert_same(output, torch.cat(parts), case)

    @on_ranks()
    def test_all_to_all_single_with_split_sizes(self, rank: int, n: int, async_op: bool) -> None:
        sent = [parcel(rank, dst) for dst in range(n)]
        received = [parcel(src, rank) for src in range(n)]
        for dtype in self.dtypes:
            mine = torch.cat([rows(rank, dst, dtype) for dst in range(n)])
            output = torch.zeros((sum(received), 3), dtype=dtype)
            work = dist.all_to_all_single(output, mine, received, sent, async_op=async_op)
            finish(work, async_op)
            assert_same(output, torch.cat([rows(src, rank, dtype) for src in range(n)]))

    @on_ranks(3)
    def test_split_sizes_with_tensors_that_do_not_lie_in_one_piece(self, rank: int) -> None:
        sent = [parcel(rank, dst) for dst in range(3)]
        received = [parcel(src, rank) for src in range(3)]
        whole = torch.cat([rows(rank, dst) for dst in range(3)])
        storage = torch.zeros(3, 2 * sum(received))
        dist.all_to_all_single(storage.T[::2], whole.T.contiguous().T, received, sent)
        assert_same(storage.T[::2], torch.cat([rows(src, rank) for src in range(3)]))
        assert not storage.T[1::2].any()
        counts: Any = [torch.tensor(received), torch.tensor(sent)]
        output = torch.zeros(sum(received), 3)
        dist.all_to_all_single(output, whole, *counts)
        assert_same(output, storage.T[::2])

    @on_ranks(2)
    def test_nothing_at_all_can_be_exchanged(self, rank: int) -> None:
        output = torch.zeros(0, 3)
        dist.all_to_all_single(output, torch.zeros(0, 3))
        for splits in (([0, 0], [0, 0]), ([0, 0], None), (None, [0, 0])):
            dist.all_to_all_single(output, torch.zeros(0, 3), *splits)
        still_works(2)
