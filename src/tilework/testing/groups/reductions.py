"""Operations that combine: values, order and precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tilework.comm.contract import Capability
from tilework.testing.groups.base import GroupSuite, finish, needs, on_ranks, still_works
from tilework.testing.groups.values import (
    FLOATS,
    REDUCE_OPS,
    Case,
    assert_near,
    assert_same,
    bits,
    defined,
    folded,
    pattern,
    reduce_op,
)

_F32 = torch.float32


def noise(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of very different size, so that every order of summing rounds differently."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10 ** (4 * torch.rand(shape, generator=generator, dtype=torch.float64) - 2)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


class AllReduceSuite(GroupSuite):
    """all_reduce, all_reduce_coalesced, scan and exscan."""

    @on_ranks()
    def test_all_reduce(self, rank: int, n: int, async_op: bool) -> None:
        for case in map(Case.writable, self.sums()):
            tensor = case.make(rank)
            finish(dist.all_reduce(tensor, async_op=async_op), async_op)
            assert_same(tensor, folded("SUM", [case.value(r) for r in range(n)]), case)

    @on_ranks()
    def test_every_reduction_of_every_dtype(self, rank: int, n: int) -> None:
        for op, dtype in self.reductions():
            # A mean may be a product with 1/n: just as good, but with other bits.
            check = assert_near if op == "AVG" else assert_same
            expected = folded(op, [pattern(r, (n, 9), dtype) for r in range(n)])
            mine, at_root, part = (pattern(rank, (n, 9), dtype) for _ in range(3))
            dist.reduce_scatter(part[0], list(mine), op=reduce_op(op))
            dist.reduce(at_root, dst=n - 1, op=reduce_op(op))
            dist.all_reduce(mine, op=reduce_op(op))
            check(mine, expected, f"{op} of {dtype}")
            check(part[0], expected[rank], f"{op} of {dtype}")
            if rank == n - 1:
                check(at_root, expected, f"{op} of {dtype}")

    @on_ranks(3)
    def test_each_rank_has_its_own_premultiplier(self, rank: int) -> None:
        for dtype in (dtype for dtype in FLOATS if dtype in self.dtypes):
            if not self.reduces("PREMUL_SUM", dtype):
                continue
            for factor in (0.5 + rank, torch.tensor(0.5 + rank)):
                tensor = torch.full((5,), 2.0, dtype=dtype)
                dist.all_reduce(tensor, op=dist.make_premul_sum(factor))
                assert tensor.tolist() == [2 * (0.5 + 1.5 + 2.5)] * 5
        dist.barrier()  # where all is left out, no rank leaves while others still connect

    @on_ranks()
    def test_all_reduce_coalesced(self, rank: int, n: int, async_op: bool) -> None:
        shapes = [(3, 2), (), (0,), (65,)]
        tensors = [pattern(rank + i, shape, _F32) for i, shape in enumerate(shapes)]
        finish(dist.all_reduce_coalesced(tensors, async_op=async_op), async_op)
        for i, tensor in enumerate(tensors):
            parts = [pattern(r + i, shapes[i], _F32) for r in range(n)]
            assert_same(tensor, folded("SUM", parts))

    @on_ranks(3)
    def test_reductions_of_many_chunks(self, rank: int) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            mine, at_root = (pattern(rank, (3 * self.large,), dtype) for _ in range(2))
            part = torch.zeros(self.large, dtype=dtype)
            dist.reduce_scatter_tensor(part, mine)
            dist.reduce(at_root, dst=1)
            kept = mine.clone()
            dist.all_reduce(mine)
            total = folded("SUM", [pattern(r, (3 * self.large,), dtype) for r in range(3)])
            assert_same(mine, total, dtype)
            assert_same(at_root, total if rank == 1 else kept, dtype)
            assert_same(part, total.chunk(3)[rank], dtype)

    @on_ranks()
    def test_scan(self, rank: int, n: int, async_op: bool) -> None:
        for i, case in enumerate(map(Case.writable, self.sums())):
            tensor, reverse = case.make(rank), bool(i % 2)
            finish(dist.scan(tensor, async_op=async_op, reverse=reverse), async_op)
            counted = range(rank, n) if reverse else range(rank + 1)
            assert_same(tensor, folded("SUM", [case.value(r) for r in counted]), case)

    @on_ranks()
    def test_exscan_by_every_reduction_of_every_dtype(self, rank: int, n: int) -> None:
        for op, dtype in self.reductions():
            if op == "AVG":
                continue
            mine = [pattern(r, (9,), dtype) for r in range(rank + 1)]
            tensor = mine[rank].clone()
            dist.exscan(tensor, op=reduce_op(op))
            before = mine[:rank] or [tensor]  # nothing before it changes nothing
            assert_same(tensor, folded(op, before), f"{op} of {dtype}")
            if dtype is not torch.uint64:  # folded() counts in int64
                assert_same(folded(op, [tensor, mine[rank]]), folded(op, mine), dtype)

    @on_ranks(3)
    def test_scan_of_many_chunks_with_each_ranks_own_factor(self, rank: int) -> None:
        for dtype in (torch.float32, torch.int8):
            tensor = pattern(rank, (self.large,), dtype)
            dist.scan(tensor)
            parts = [pattern(r, (self.large,), dtype) for r in range(rank + 1)]
            assert_same(tensor, folded("SUM", parts), dtype)
        for dtype in (each for each in FLOATS if self.reduces("PREMUL_SUM", each)):
            tensor = torch.full((5,), 2.0, dtype=dtype)
            dist.exscan(tensor, op=dist.make_premul_sum(0.5 + rank), reverse=True)
            assert tensor.tolist() == [sum(1.0 + 2 * r for r in range(rank + 1, 3))] * 5
        dist.barrier()

    @on_ranks(1)
    def test_one_rank_alone_keeps_its_many_chunks(self, rank: int) -> None:
        mine = pattern(3, (self.large,), torch.float64)
        tensor, output = mine.clone(), torch.empty_like(mine)
        dist.all_reduce(tensor)
        dist.reduce(tensor, dst=0)
        dist.reduce_scatter_tensor(output, tensor)
        assert_same(output, mine)

    @on_ranks(2)
    def test_strided_tensor_keeps_what_lies_between(self, rank: int) -> None:
        storage = torch.full((6, 4), float(rank + 1))
        dist.all_reduce(storage[:, 1])
        assert storage[:, 1].tolist() == [3.0] * 6
        rest = storage[:, [0, 2, 3]]
        assert torch.equal(rest, torch.full_like(rest, rank + 1.0))

    @on_ranks(2)
    def test_reductions_that_the_backend_lacks_are_refused(self, rank: int) -> None:
        for op in REDUCE_OPS:
            for dtype in (dtype for dtype in self.dtypes if defined(op, dtype)):
                if not self.reduces(op, dtype):
                    with pytest.raises(NotImplementedError, match=op):
                        dist.all_reduce(pattern(rank, (4,), dtype), op=reduce_op(op))
        still_works(2)


class ReduceSuite(GroupSuite):
    """reduce, reduce_scatter and reduce_scatter_tensor."""

    @on_ranks()
    def test_reduce_to_every_root(self, rank: int, n: int, async_op: bool) -> None:
        for turn, case in enumerate(map(Case.writable, self.sums())):
            root = turn % n
            tensor = case.make(rank)
            finish(dist.reduce(tensor, dst=root, async_op=async_op), async_op)
            total = folded("SUM", [case.value(r) for r in range(n)])
            # The tensors of other ranks keep their contribution, without partial sums.
            assert_same(tensor, total if rank == root else case.value(rank), case)

    @on_ranks()
    def test_reduce_scatter(self, rank: int, n: int, async_op: bool) -> None:
        for case in self.sums():
            inputs = [case.make(rank + part) for part in range(n)]
            output = case.blank()
            finish(dist.reduce_scatter(output, inputs, async_op=async_op), async_op)
            assert_same(output, folded("SUM", [case.value(r + rank) for r in range(n)]), case)

    @needs(Capability.UNEVEN_SIZES)
    @on_ranks()
    def test_reduce_scatter_of_uneven_tensors(self, rank: int, n: int) -> None:
        inputs = [pattern(rank + part, (part, 2), _F32) for part in range(n)]
        output = torch.zeros(rank, 2)
        dist.reduce_scatter(output, inputs)
        parts = [pattern(r + rank, (rank, 2), _F32) for r in range(n)]
        assert_same(output, folded("SUM", parts))

    @on_ranks()
    def test_reduce_scatter_tensor(self, rank: int, n: int, async_op: bool) -> None:
        for case in (case for case in self.sums() if case.shape):
            rows, *rest = case.shape
            whole = Case((n * rows, *rest), case.dtype, case.layout)
            output = case.blank()
            work = dist.reduce_scatter_tensor(output, whole.make(rank), async_op=async_op)
            finish(work, async_op)
            total = folded("SUM", [whole.value(r) for r in range(n)])
            assert_same(output, total.narrow(0, rank * rows, rows), case)

    @on_ranks()
    def test_reduce_scatter_tensor_of_a_stack(self, rank: int, n: int) -> None:
        for shape in ((), (0,), (3, 2)):
            output = torch.zeros(shape)
            dist.reduce_scatter_tensor(output, pattern(rank, (n, *shape), _F32))
            total = folded("SUM", [pattern(r, (n, *shape), _F32) for r in range(n)])
            assert_same(output, total[rank])


class PrecisionSuite(GroupSuite):
    """Reductions give the same bits on every rank and in every run.

    Unless the backend lacks the promise, sums go in rank order, and 16-bit floats are added in
    float32.
    """

    def test_same_bits_on_every_rank_and_run(self) -> None:
        def body(rank: int) -> list[list[int]]:
            results = []
            for dtype in FLOATS:
                tensor = noise(rank, (4097,), dtype)
                dist.all_reduce(tensor)
                results.append(bits(tensor).tolist())
            return results

        first, *others = self.run(4, body) + self.run(4, body)
        assert all(other == first for other in others)

    @needs(Capability.RANK_ORDER)
    @on_ranks(4)
    def test_sums_are_taken_in_rank_order(self, rank: int) -> None:
        for dtype in (torch.float32, torch.float64, torch.complex64):
            tensor = noise(rank, (1000,), dtype)
            dist.all_reduce(tensor)
            expected = folded("SUM", [noise(r, (1000,), dtype) for r in range(4)])
            assert_same(tensor, expected, dtype)

    @needs(Capability.WIDE_SUMS)
    @on_ranks(5)
    def test_short_floats_accumulate_in_float32(self, rank: int) -> None:
        for dtype in (torch.float16, torch.bfloat16):
            tensor = noise(rank, (1000,), dtype)
            dist.all_reduce(tensor)
            expected = folded("SUM", [noise(r, (1000,), dtype) for r in range(5)])
            assert_same(tensor, expected, dtype)

    @needs(Capability.WIDE_SUMS)
    @on_ranks(3)
    def test_short_float_sums_do_not_overflow_on_the_way(self, rank: int) -> None:
        tensor = torch.tensor([60000.0 if rank < 2 else -60000.0], dtype=torch.float16)
        dist.all_reduce(tensor)
        assert tensor.item() == 60000.0

    @needs(Capability.WIDE_SUMS)
    @on_ranks(3)
    def test_mean_of_short_floats_is_rounded_once(self, rank: int) -> None:
        tensor = noise(rank, (1000,), torch.bfloat16)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        wide = [noise(r, (1000,), torch.bfloat16).float() for r in range(3)]
        assert_near(tensor, folded("AVG", wide))

    @needs(Capability.SAME_BITS)
    @on_ranks(3)
    def test_every_reducing_operation_gives_the_same_bits(self, rank: int) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            mine = noise(rank, (6, 101), dtype)
            everywhere, at_root, part = mine.clone(), mine.clone(), mine[:2].clone()
            dist.all_reduce(everywhere)
            dist.reduce(at_root, dst=2)
            dist.reduce_scatter_tensor(part, mine)
            assert_same(part, everywhere.chunk(3)[rank], dtype)
            if rank == 2:
                assert_same(at_root, everywhere, dtype)

    @needs(Capability.SAME_BITS)
    @on_ranks(3)
    def test_bits_do_not_depend_on_what_else_is_in_the_tensor(self, rank: int) -> None:
        whole = noise(rank, (300_003,), _F32)
        pieces = [whole[:1].clone(), whole[7:1000].clone(), whole[-33:].clone()]
        dist.all_reduce(whole)
        for piece, where in zip(pieces, (whole[:1], whole[7:1000], whole[-33:]), strict=True):
            dist.all_reduce(piece)
            assert_same(piece, where)

    @needs(Capability.NAN)
    @on_ranks(3)
    def test_minimum_and_maximum_hand_on_nan(self, rank: int) -> None:
        for dtype in FLOATS:
            for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
                for culprit in range(3):
                    value = float("nan") if rank == culprit else float(rank)
                    tensor = torch.full((19,), value, dtype=dtype)
                    dist.all_reduce(tensor, op=op)
                    assert tensor.isnan().all(), (dtype, op, culprit)

    @on_ranks(2)
    def test_infinities_and_nan_survive_a_sum(self, rank: int) -> None:
        for dtype in FLOATS:
            inf, nan = float("inf"), float("nan")
            mine = [inf, inf, -inf] if rank == 0 else [1.0, -inf, -inf]
            tensor = torch.tensor([*mine, nan if rank else 0.0], dtype=dtype)
            dist.all_reduce(tensor)
            assert tensor[[0, 2]].tolist() == [inf, -inf]
            assert tensor[[1, 3]].isnan().all()

    @on_ranks(2)
    def test_integers_wrap(self, rank: int) -> None:
        small = torch.tensor([100, -100], dtype=torch.int8)
        dist.all_reduce(small)
        assert small.tolist() == [-56, 56]
        byte = torch.tensor([200], dtype=torch.uint8)
        dist.all_reduce(byte)
        assert byte.tolist() == [144]

    @on_ranks(2)
    def test_unsigned_integers_have_no_sign(self, rank: int) -> None:
        unsigned = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
        for dtype in (dtype for dtype in unsigned if self.reduces("MIN", dtype)):
            top = torch.iinfo(dtype).max
            for op, expected in ((dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, top)):
                tensor = torch.tensor([top if rank else 1] * 37, dtype=dtype)
                dist.all_reduce(tensor, op=op)
                assert tensor.tolist() == [expected] * 37

    @on_ranks(5)
    def test_bytes_of_a_bool_stay_zero_or_one(self, rank: int) -> None:
        for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            tensor = pattern(rank, (50,), torch.bool)
            dist.all_reduce(tensor, op=reduce_op(op))
            assert int(bits(tensor).max()) <= 1, op
