"""What functions do above a backend, in the way of the contract: run on each of tilework's own.

A backend of a user cannot break these: they hold before a backend is called, or are made of calls
that the contract tests. The suites that a backend has to pass are in ``tilework.testing.groups``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch

import tilework.distributed as dist
from tilework.testing.groups import ProcessGroupContract
from tilework.testing.groups.base import GroupSuite, on_ranks, still_works
from tilework.testing.groups.values import REDUCE_OPS, assert_same, defined, pattern, reduce_op

_F32 = torch.float32


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expect a ValueError or TypeError whose message holds all ``words``."""
    try:
        yield
    except (ValueError, TypeError) as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{missing} missing from the message: {error}") from error
    else:
        raise AssertionError(f"misuse was accepted (expected a message with {words})")


def refuse_each(*calls: Callable[[], object], words: Sequence[str] = ()) -> None:
    """Expect each call to raise, as in :func:`refused`."""
    for call in calls:
        with refused(*words):
            call()


class GroupFunctionSuite(GroupSuite):
    """Making groups, and naming ranks of them."""

    @on_ranks(3)
    def test_roots_may_be_given_as_group_ranks(self, rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, group=group, group_src=1)
        assert tensor.item() == 2.0
        dist.reduce(tensor, group=group, group_dst=0)
        assert tensor.item() == (4.0 if rank == 1 else 2.0)
        with refused():
            dist.broadcast(tensor, src=1, group=group, group_src=0)

    @on_ranks(3)
    def test_messages_name_global_ranks(self, rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 2:
            dist.send(torch.tensor([7.0]), dst=1, group=group)
            dist.send(torch.tensor([8.0]), dst=1, group=group)
        elif rank == 1:
            tensor = torch.zeros(1)
            assert dist.recv(tensor, src=2, group=group) == 2
            assert tensor.item() == 7.0
            assert dist.recv(tensor, group=group) == 2
            assert tensor.item() == 8.0

    @on_ranks(3)
    def test_a_root_outside_the_group_is_refused(self, rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        with refused("0"):
            dist.broadcast(torch.ones(1), src=0, group=group)
        dist.barrier(group=group)

    @on_ranks(2)
    def test_the_same_ranks_again_make_another_group(self, rank: int) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        for i, group in enumerate(groups):
            tensor = torch.tensor([float(rank + i)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2 * i + 1
        assert len({id(group) for group in groups}) == 3

    @on_ranks(3)
    def test_ranks_are_sorted(self, rank: int) -> None:
        group = dist.new_group([2, 0, 1])
        assert dist.get_process_group_ranks(group) == [0, 1, 2]
        assert dist.get_rank(group) == rank

    @on_ranks(2)
    def test_impossible_groups_are_refused(self, rank: int) -> None:
        for ranks in ([0, 2], [-1, 0], [0, 0], [0, 1, 1]):
            with refused():
                dist.new_group(ranks)
        dist.barrier()

    @on_ranks(4)
    def test_local_synchronization_needs_members_only(self, rank: int) -> None:
        if rank == 3:
            return
        members = [0, 2]
        if rank == 1:
            assert dist.new_group(members, use_local_synchronization=True) is None
            return
        group = dist.new_group(members, use_local_synchronization=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2.0

    @on_ranks(4)
    def test_new_subgroups_of_a_size(self, rank: int) -> None:
        mine, everyone = dist.new_subgroups(group_size=2)
        assert len(everyone) == 2
        base = rank // 2 * 2
        assert dist.get_process_group_ranks(mine) == [base, base + 1]
        outputs = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(outputs, torch.tensor([float(rank)]), group=mine)
        assert [t.item() for t in outputs] == [base, base + 1]
        with refused():
            dist.new_subgroups(group_size=3)

    @on_ranks(4)
    def test_new_subgroups_by_enumeration(self, rank: int) -> None:
        mine, everyone = dist.new_subgroups_by_enumeration([[0, 2], [3, 1]])
        assert len(everyone) == 2
        assert mine is not None
        members = [0, 2] if rank in (0, 2) else [1, 3]
        assert dist.get_process_group_ranks(mine) == members
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mine)
        assert tensor.item() == sum(members)
        with refused():
            dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])


def thing(rank: int) -> Any:
    """The object of ``rank``: of another type and size than the neighbours' objects."""
    things: list[Any] = [
        None,
        {"rank": rank, "nested": [1, (2, {"x": b"y" * rank})]},
        "z" * 300_000,
        {"tensor": torch.full((3, 2), float(rank))},
        [],
    ]
    return things[rank % len(things)]


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare objects that may hold tensors."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict) and "tensor" in expected:
        assert_same(actual["tensor"], expected["tensor"])
    else:
        assert actual == expected


class ObjectSuite(GroupSuite):
    """The operations on objects."""

    @on_ranks()
    def test_all_gather_object(self, rank: int, n: int) -> None:
        everyone: list[Any] = ["?"] * n
        dist.all_gather_object(everyone, thing(rank))
        for source, got in enumerate(everyone):
            assert_equal(got, thing(source))

    @on_ranks()
    def test_gather_object(self, rank: int, n: int) -> None:
        for root in range(n):
            everyone: list[Any] | None = ["?"] * n if rank == root else None
            dist.gather_object(thing(rank), everyone, dst=root)
            for source, got in enumerate(everyone or []):
                assert_equal(got, thing(source))

    @on_ranks()
    def test_broadcast_object_list(self, rank: int, n: int) -> None:
        for root in range(n):
            mine = [thing(i) for i in range(5)] if rank == root else ["?"] * 5
            dist.broadcast_object_list(mine, src=root)
            for i, got in enumerate(mine):
                assert_equal(got, thing(i))

    @on_ranks()
    def test_scatter_object_list(self, rank: int, n: int) -> None:
        for root in range(n):
            output: list[Any] = ["?"]
            inputs = [thing(dst + root) for dst in range(n)] if rank == root else None
            dist.scatter_object_list(output, inputs, src=root)
            assert_equal(output[0], thing(rank + root))

    @on_ranks(2)
    def test_send_and_recv_object_list(self, rank: int) -> None:
        objects = [thing(i) for i in range(5)]
        if rank == 0:
            dist.send_object_list(objects, dst=1)
        elif rank == 1:
            received: list[Any] = [None] * 5
            assert dist.recv_object_list(received, src=0) == 0
            for got, sent in zip(received, objects, strict=True):
                assert_equal(got, sent)

    @on_ranks(3)
    def test_recv_object_list_from_any(self, rank: int) -> None:
        if rank == 2:
            dist.send_object_list(["from two", None], dst=0)
        elif rank == 0:
            received: list[Any] = [0, 0]
            assert dist.recv_object_list(received) == 2
            assert received == ["from two", None]

    @on_ranks(3)
    def test_in_a_sub_group_roots_are_global_ranks(self, rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        mine = ["news"] if rank == 2 else [None]
        dist.broadcast_object_list(mine, src=2, group=group)
        assert mine == ["news"]
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, rank, group=group)
        assert everyone == [1, 2]

    @on_ranks(2)
    def test_an_object_that_cannot_be_pickled_moves_nothing(self, rank: int) -> None:
        with pytest.raises(Exception, match=r"(?i)pickle|lambda"):
            dist.all_gather_object([None, None], lambda: rank)
        still_works(2)

    @on_ranks(2)
    def test_lists_of_the_wrong_length_are_refused(self, rank: int) -> None:
        with refused():
            dist.all_gather_object([None], 1)
        with refused():
            dist.gather_object(1, [None] if rank == 0 else [None, None], dst=0)
        with refused():
            dist.scatter_object_list([], [1, 2] if rank == 0 else None, src=0)
        still_works(2)


class MisuseSuite(GroupSuite):
    """Wrong arguments of a call raise ValueError or TypeError; nothing moves, the group lives."""

    @on_ranks(2)
    def test_wrong_list_lengths(self, rank: int) -> None:
        one = [torch.ones(2)]
        refuse_each(
            lambda: dist.all_gather(one, torch.ones(2)),
            lambda: dist.reduce_scatter(torch.ones(2), one),
            lambda: dist.all_to_all(one, one * 2),
            lambda: dist.all_to_all(one * 2, one),
            lambda: dist.gather(torch.ones(2), one, dst=rank),
            lambda: dist.scatter(torch.ones(2), one, src=rank),
        )
        still_works(2)

    @on_ranks(2)
    def test_lists_where_they_do_not_belong(self, rank: int) -> None:
        two = [torch.ones(2), torch.ones(2)]
        refuse_each(
            lambda: dist.gather(torch.ones(2), None, dst=rank),
            lambda: dist.gather(torch.ones(2), two, dst=1 - rank),
            lambda: dist.scatter(torch.ones(2), None, src=rank),
            lambda: dist.scatter(torch.ones(2), two, src=1 - rank),
        )
        still_works(2)

    @on_ranks(2)
    def test_different_dtypes_within_a_call(self, rank: int) -> None:
        single, half = torch.ones(2), torch.ones(2).half()
        refuse_each(
            lambda: dist.all_gather([single, half], single),
            lambda: dist.all_gather_into_tensor(torch.ones(4), half),
            lambda: dist.reduce_scatter(single, [single, half]),
            lambda: dist.reduce_scatter_tensor(half, torch.ones(4)),
            lambda: dist.all_to_all([single, single], [half, single]),
            lambda: dist.all_reduce_coalesced([single, half]),
            words=("tensors with different dtypes",),
        )
        still_works(2)

    @on_ranks(2)
    def test_sizes_that_do_not_fit_within_a_call(self, rank: int) -> None:
        mine = [torch.ones(2 + (part == rank)) for part in range(2)]
        refuse_each(
            lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2)),
            lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5)),
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(4)),
            lambda: dist.reduce_scatter(torch.ones(2), mine),
        )
        still_works(2)

    @on_ranks(2)
    def test_what_is_not_a_tensor(self, rank: int) -> None:
        tensor, ops = torch.ones(2), cast("Any", dist)  # a type checker would refuse these calls
        refuse_each(
            lambda: ops.all_reduce([1.0, 2.0]),
            lambda: ops.broadcast(3, src=0),
            lambda: ops.all_gather(torch.ones(2, 2), tensor),
            lambda: ops.all_gather([1, 2], tensor),
            *(lambda op=op: ops.all_reduce(tensor, op=op) for op in ("sum", 1, None)),
        )
        still_works(2)

    @on_ranks(2)
    def test_tensors_that_cannot_be_read_or_written_here(self, rank: int) -> None:
        meta, single = torch.ones(2, device="meta"), torch.ones(1).expand(4)
        refuse_each(lambda: dist.all_reduce(meta), words=("meta",))
        refuse_each(
            lambda: dist.all_gather([torch.ones(2), meta], torch.ones(2)),
            lambda: dist.all_reduce(torch.eye(2).to_sparse()),
            lambda: dist.all_reduce(single),
            lambda: dist.all_gather_into_tensor(single, torch.ones(2)),
        )
        still_works(2)

    @on_ranks(2)
    def test_ranks_that_do_not_exist(self, rank: int) -> None:
        calls: list[Callable[[int], object]] = [
            lambda nobody: dist.broadcast(torch.ones(1), src=nobody),
            lambda nobody: dist.reduce(torch.ones(1), dst=nobody),
            lambda nobody: dist.send(torch.ones(1), dst=nobody),
        ]
        refuse_each(*(functools.partial(call, nobody) for nobody in (2, -1) for call in calls))
        still_works(2)

    @on_ranks(3)
    def test_misuse_on_one_rank_is_that_ranks_business(self, rank: int) -> None:
        if rank == 1:
            with refused():
                dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)
            with refused("write timedelta(seconds=5)"):
                dist.barrier(timeout=5)  # type: ignore[arg-type]
        still_works(3)

    @on_ranks()
    def test_batch_isend_irecv(self, rank: int, n: int) -> None:
        right, left = (rank + 1) % n, (rank - 1) % n
        if n == 1:
            return
        tensor = torch.zeros(4)
        ops = [
            dist.P2POp(dist.isend, pattern(rank, (4,), _F32), right),
            dist.P2POp(dist.irecv, tensor, left),
        ]
        for work in dist.batch_isend_irecv(op for op in ops):
            work.wait()
        assert_same(tensor, pattern(left, (4,), _F32))

    @on_ranks(2)
    def test_nobody_writes_to_themselves(self, rank: int) -> None:
        with refused():
            dist.send(torch.ones(1), dst=rank)
        with refused():
            dist.recv(torch.ones(1), src=rank)
        still_works(2)

    @on_ranks(2)
    def test_wrong_batches_are_refused(self, rank: int) -> None:
        with refused():
            dist.batch_isend_irecv([])
        with refused():
            dist.P2POp(dist.broadcast, torch.ones(1), 1 - rank)
        with refused("this rank itself"):  # before messages of the batch are sent
            dist.P2POp(dist.irecv, torch.ones(1), rank)
        with refused():
            dist.batch_isend_irecv(["not an operation"])  # type: ignore[list-item]
        still_works(2)

    @on_ranks(2)
    def test_inputs_that_overlap_outputs_otherwise_are_refused(self, rank: int) -> None:
        whole = torch.arange(10.0)
        with refused("overlap"):
            dist.all_gather_into_tensor(whole[:6], whole[2:5])
        with refused("overlap"):
            dist.all_to_all_single(whole[:4], whole[1:5])
        with refused("overlap"):
            dist.reduce_scatter_tensor(whole[1:3], whole[:4])
        assert_same(whole, torch.arange(10.0))
        still_works(2)

    @on_ranks(2)
    def test_outputs_that_overlap_are_refused(self, rank: int) -> None:
        whole = torch.zeros(4)
        for outputs in ([whole[:3], whole[1:]], [whole[::2]] * 2, [whole[::2], whole[:2]]):
            with refused("overlap"):
                dist.all_gather(outputs, torch.ones(len(outputs[0])))
        dist.all_gather([whole[::2], whole[1::2]], torch.full((2,), 1.0 + rank))
        assert_same(whole, torch.tensor([1.0, 2.0, 1.0, 2.0]))
        still_works(2)

    @on_ranks(2)
    def test_wrong_split_sizes_are_refused(self, rank: int) -> None:
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

    @on_ranks(2)
    def test_wrapped_reductions_mean_the_same(self, rank: int) -> None:
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, op=dist.ReduceOp(dist.ReduceOp.MAX))
        assert tensor.item() == 1.0

    @on_ranks(2)
    def test_undefined_reductions_are_refused(self, rank: int) -> None:
        for op in REDUCE_OPS:
            for dtype in (dtype for dtype in self.dtypes if not defined(op, dtype)):
                before = pattern(rank, (4,), dtype)
                tensor = before.clone()
                with refused(op, str(dtype)):
                    dist.all_reduce(tensor, op=reduce_op(op))
                assert_same(tensor, before)
        still_works(2)


class WholeContract(ProcessGroupContract, GroupFunctionSuite, ObjectSuite, MisuseSuite):
    """The shipped contract, and all of this."""
