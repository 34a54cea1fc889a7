"""Inputs that are outputs, views that are more than their memory, a Work without its group."""

from __future__ import annotations

import pytest
import torch

import tilework.distributed as dist
from tilework.errors import DistBackendError
from tilework.testing.groups.base import GroupSuite, inside, refused, started, still_works
from tilework.testing.groups.values import assert_same, folded, pattern

_F32 = torch.float32


class AliasSuite(GroupSuite):
    """Outputs that share memory with inputs: as if the input had been copied first, or refused."""

    def test_all_gather_in_place(self, n: int) -> None:
        def body(rank: int) -> None:
            expected = torch.stack([pattern(r, (50,), _F32) for r in range(n)])
            whole = torch.zeros(n, 50)
            whole[rank] = expected[rank]
            dist.all_gather_into_tensor(whole, whole[rank])
            assert_same(whole, expected)
            parts = [torch.zeros(50) for _ in range(n)]
            parts[rank].copy_(expected[rank])
            dist.all_gather(parts, parts[rank])
            assert_same(torch.stack(parts), expected)

        self.run(n, body)

    def test_reduce_scatter_in_place(self, n: int) -> None:
        def body(rank: int) -> None:
            total = folded("SUM", [pattern(r, (n, 50), _F32) for r in range(n)])
            whole = pattern(rank, (n, 50), _F32)
            dist.reduce_scatter_tensor(whole[rank], whole)
            assert_same(whole[rank], total[rank])
            parts = list(pattern(rank, (n, 50), _F32))
            dist.reduce_scatter(parts[rank], parts)
            assert_same(parts[rank], total[rank])

        self.run(n, body)

    def test_gather_and_scatter_in_place(self, n: int) -> None:
        def body(rank: int) -> None:
            parts = [pattern(r if r == rank else 9, (50,), _F32) for r in range(n)]
            mine = parts[rank]
            dist.gather(mine, parts if rank == 0 else None, dst=0)
            for r, part in enumerate(parts if rank == 0 else []):
                assert_same(part, pattern(r, (50,), _F32))
            dist.scatter(mine, parts if rank == 0 else None, src=0)
            assert_same(mine, pattern(rank, (50,), _F32))

        self.run(n, body)

    def test_all_to_all_in_place(self, n: int) -> None:
        def body(rank: int) -> None:
            for length in (3, self.large // 10):
                whole = pattern(rank, (n, length), _F32)
                parts = list(whole.clone())
                expected = torch.stack([pattern(r, (n, length), _F32)[rank] for r in range(n)])
                dist.all_to_all_single(whole, whole)
                assert_same(whole, expected)
                dist.all_to_all(parts, parts)
                assert_same(torch.stack(parts), expected)

        self.run(n, body)

    def test_inputs_that_overlap_outputs_otherwise_are_refused(self) -> None:
        def body(rank: int) -> None:
            whole = torch.arange(10.0)
            with refused("overlap"):
                dist.all_gather_into_tensor(whole[:6], whole[2:5])
            with refused("overlap"):
                dist.all_to_all_single(whole[:4], whole[1:5])
            with refused("overlap"):
                dist.reduce_scatter_tensor(whole[1:3], whole[:4])
            assert_same(whole, torch.arange(10.0))
            still_works(2)

        self.run(2, body)

    def test_outputs_that_overlap_are_refused(self) -> None:
        def body(rank: int) -> None:
            whole = torch.zeros(4)
            for outputs in ([whole[:3], whole[1:]], [whole[::2]] * 2, [whole[::2], whole[:2]]):
                with refused("overlap"):
                    dist.all_gather(outputs, torch.ones(len(outputs[0])))
            dist.all_gather([whole[::2], whole[1::2]], torch.full((2,), 1.0 + rank))
            assert_same(whole, torch.tensor([1.0, 2.0, 1.0, 2.0]))
            still_works(2)

        self.run(2, body)

    def test_views_that_conjugate_or_negate_lazily(self) -> None:
        def body(rank: int) -> None:
            lazy = torch.tensor([1 + 2j, 3 - 1j]).conj()
            outputs = [torch.zeros(2, dtype=lazy.dtype) for _ in range(2)]
            dist.all_gather(outputs, lazy)
            assert outputs[1 - rank].tolist() == [1 - 2j, 3 + 1j]
            dist.all_reduce(lazy)
            assert lazy.tolist() == [2 - 4j, 6 + 2j]
            negative = lazy.imag
            dist.broadcast(negative, src=0)
            assert negative.tolist() == [-4.0, 2.0]

        self.run(2, body)

    def test_autograd_notices_what_was_overwritten(self) -> None:
        def body(rank: int) -> None:
            weight = torch.ones(3, requires_grad=True)
            square = (weight * weight).sum()
            with torch.no_grad():
                dist.all_reduce(weight)
            with pytest.raises(RuntimeError, match="inplace"):
                square.backward()  # type: ignore[no-untyped-call]

        self.run(2, body)

    def test_work_that_outlives_its_group(self) -> None:
        def body(rank: int) -> None:
            group = inside(dist.new_group())
            works = []
            if rank == 0:
                works.append(started(dist.all_reduce(torch.ones(2), group=group, async_op=True)))
                works.append(started(dist.irecv(torch.ones(2), 1, group=group)))
            dist.barrier()
            dist.destroy_process_group(group)
            for work in works:
                with pytest.raises(DistBackendError):
                    work.wait()
                assert isinstance(work.exception(), DistBackendError)
            dist.barrier()

        self.run(2, body)

    def test_messages_that_nobody_fetched_are_no_trouble(self) -> None:
        def body(rank: int) -> None:
            works = [dist.isend(torch.ones(100), 1 - rank, tag=tag) for tag in range(50)]
            dist.barrier()
            del works
            still_works(2)

        self.run(2, body)
