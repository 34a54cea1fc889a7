"""all_to_all in its list form and on one tensor."""

from __future__ import annotations

from typing import Any

import torch

import tilework.distributed as dist
from tilework.testing.groups.base import GroupSuite, finish, refused, still_works
from tilework.testing.groups.values import Case, assert_same, pattern

_F32 = torch.float32


def parcel(src: int, dst: int) -> int:
    """The number of rows that rank ``src`` sends to rank ``dst``: uneven, sometimes none."""
    return (src + 2 * dst) % 4


def rows(src: int, dst: int, dtype: torch.dtype = _F32) -> torch.Tensor:
    """The rows that ``src`` sends to ``dst``."""
    return pattern(10 * src + dst, (parcel(src, dst), 3), dtype)


class AllToAllSuite(GroupSuite):
    """all_to_all and all_to_all_single."""

    def test_all_to_all(self, n: int, async_op: bool) -> None:
        def body(rank: int) -> None:
            for case in self.cases():
                inputs = [case.make(10 * rank + dst) for dst in range(n)]
                outputs = [case.blank() for _ in range(n)]
                finish(dist.all_to_all(outputs, inputs, async_op=async_op), async_op)
                for src, output in enumerate(outputs):
                    assert_same(output, case.value(10 * src + rank), case)

        self.run(n, body)

    def test_all_to_all_of_uneven_tensors(self, n: int, async_op: bool) -> None:
        def body(rank: int) -> None:
            for dtype in self.dtypes:
                inputs = [rows(rank, dst, dtype) for dst in range(n)]
                outputs = [torch.empty_like(rows(src, rank, dtype)) for src in range(n)]
                finish(dist.all_to_all(outputs, inputs, async_op=async_op), async_op)
                for src, output in enumerate(outputs):
                    assert_same(output, rows(src, rank, dtype))

        self.run(n, body)

    def test_all_to_all_of_different_shapes_to_each_rank(self) -> None:
        shapes = [(2, 2), (), (5,)]

        def body(rank: int) -> None:
            inputs = [pattern(10 * rank + dst, shapes[dst], _F32) for dst in range(3)]
            outputs = [torch.zeros(shapes[rank]) for _ in range(3)]
            dist.all_to_all(outputs, inputs)
            for src, output in enumerate(outputs):
                assert_same(output, pattern(10 * src + rank, shapes[rank], _F32))

        self.run(3, body)

    def test_all_to_all_single_in_equal_parts(self, n: int, async_op: bool) -> None:
        def body(rank: int) -> None:
            for case in (case for case in self.cases() if case.shape):
                whole = Case((2 * n, *case.shape[1:]), case.dtype, case.layout)
                output = whole.blank()
                work = dist.all_to_all_single(output, whole.make(rank), async_op=async_op)
                finish(work, async_op)
                parts = [whole.value(src).narrow(0, 2 * rank, 2) for src in range(n)]
                assert_same(output, torch.cat(parts), case)

        self.run(n, body)

    def test_all_to_all_single_with_split_sizes(self, n: int, async_op: bool) -> None:
        def body(rank: int) -> None:
            sent = [parcel(rank, dst) for dst in range(n)]
            received = [parcel(src, rank) for src in range(n)]
            for dtype in self.dtypes:
                mine = torch.cat([rows(rank, dst, dtype) for dst in range(n)])
                output = torch.zeros((sum(received), 3), dtype=dtype)
                work = dist.all_to_all_single(output, mine, received, sent, async_op=async_op)
                finish(work, async_op)
                assert_same(output, torch.cat([rows(src, rank, dtype) for src in range(n)]))

        self.run(n, body)

    def test_split_sizes_with_tensors_that_do_not_lie_in_one_piece(self) -> None:
        def body(rank: int) -> None:
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

        self.run(3, body)

    def test_nothing_at_all_can_be_exchanged(self) -> None:
        def body(rank: int) -> None:
            output = torch.zeros(0, 3)
            dist.all_to_all_single(output, torch.zeros(0, 3))
            for splits in (([0, 0], [0, 0]), ([0, 0], None), (None, [0, 0])):
                dist.all_to_all_single(output, torch.zeros(0, 3), *splits)
            still_works(2)

        self.run(2, body)

    def test_all_to_all_of_many_chunks(self) -> None:
        def body(rank: int) -> None:
            inputs = [pattern(10 * rank + dst, (self.large,), _F32) for dst in range(2)]
            outputs = [torch.zeros(self.large) for _ in range(2)]
            dist.all_to_all(outputs, inputs)
            for src, output in enumerate(outputs):
                assert_same(output, pattern(10 * src + rank, (self.large,), _F32))

        self.run(2, body)

    def test_wrong_split_sizes_are_refused(self) -> None:
        def body(rank: int) -> None:
            output, whole = torch.zeros(4), torch.zeros(4)
            for wrong in ([1, 2], [4], [1, 1, 2], [5, -1]):
                with refused():
                    dist.all_to_all_single(output, whole, wrong, [2, 2])
                with refused():
                    dist.all_to_all_single(output, whole, [2, 2], wrong)
            with refused():
                dist.all_to_all_single(torch.zeros(3), torch.zeros(3))
            with refused():  # half a row for each rank
                dist.all_to_all_single(torch.zeros(3, 2), torch.zeros(3, 2))
            with refused():
                dist.all_to_all_single(torch.zeros(3, 2), torch.zeros(6), None, [3, 3])
            still_works(2)

        self.run(2, body)
