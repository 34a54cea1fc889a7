"""Ranks that disagree or are missing: every rank raises, and none hangs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.contract import Capability
from tilework.comm.provenance_digest import carrying
from tilework.errors import CollectiveMismatchError, CollectiveTimeoutError
from tilework.mesh import init_device_mesh
from tilework.testing.groups.base import (
    SHORT,
    GroupSuite,
    OperationFailure,
    brief_group,
    failure_of,
    inside,
    needs,
    on_ranks,
    started,
    still_works,
)

_Call = Callable[[], object]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for _ in range(dist.get_world_size())]


def _at_root(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    return _parts(tensor) if dist.get_rank() == 0 else None


def _long(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((dist.get_world_size() * len(tensor), *tensor.shape[1:]), dtype=tensor.dtype)


def _failure(
    call: Callable[[torch.Tensor, Any], object], tensor: torch.Tensor, group: Any
) -> type[Exception] | None:
    try:
        call(tensor, group)
    except Exception as error:
        return type(error)
    return None


#: Operations on a tensor of one rank's part.
_MOVES: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "all_reduce": lambda t, g: dist.all_reduce(t, group=g),
    "reduce": lambda t, g: dist.reduce(t, 0, group=g),
    "broadcast": lambda t, g: dist.broadcast(t, 0, group=g),
    "all_gather": lambda t, g: dist.all_gather(_parts(t), t, group=g),
    "all_gather_into_tensor": lambda t, g: dist.all_gather_into_tensor(_long(t), t, group=g),
    "gather": lambda t, g: dist.gather(t, _at_root(t), group=g),
    "scatter": lambda t, g: dist.scatter(t, _at_root(t), group=g),
    "reduce_scatter": lambda t, g: dist.reduce_scatter(t, _parts(t), group=g),
    "reduce_scatter_tensor": lambda t, g: dist.reduce_scatter_tensor(t, _long(t), group=g),
    "all_to_all_single": lambda t, g: dist.all_to_all_single(_long(t), _long(t), group=g),
}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
#: Pairs of dtypes with the same number of bytes.
_ODD = {
    "shape": (torch.zeros(2, 3), torch.zeros(6)),
    "float8": (torch.zeros(4, dtype=torch.float8_e5m2), torch.zeros(4, dtype=torch.float8_e4m3fn)),
    "complex": (torch.zeros(3, dtype=torch.complex64), torch.zeros(3, 2)),
}


def _sum(shape: Any, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> _Call:
    return lambda: dist.all_reduce(torch.ones(shape, dtype=dtype), op=op)


def _copy(shape: Any, src: int) -> _Call:
    return lambda: dist.broadcast(torch.ones(shape), src=src)


#: The call of two ranks of three, that of the third, and words of the error.
_DIFFERENT: dict[str, tuple[_Call, _Call, Sequence[str]]] = {
    "operations": (_sum(2), _copy(2, 0), ("all_reduce", "broadcast")),
    "a barrier": (dist.barrier, _sum(2), ("barrier", "all_reduce")),
    "dtypes": (_sum(2), _sum(2, torch.int32), ("float32", "int32")),
    "sizes": (_sum(2), _sum(31), ("2", "31")),
    "shapes of one size": (_copy((17, 3), 0), _copy((3, 17), 0), ("17, 3", "3, 17")),
    "reductions": (_sum(2), _sum(2, op=dist.ReduceOp.MAX), ("SUM", "MAX")),
    "roots": (_copy(2, 0), _copy(2, 1), ("0", "1")),
    "roots of a reduce": (
        lambda: dist.reduce(torch.ones(2), dst=0),
        lambda: dist.reduce(torch.ones(2), dst=2),
        (),
    ),
}


@needs(Capability.COMPARISON)
class MismatchSuite(GroupSuite):
    """Ranks that call different things all raise CollectiveMismatchError, which names the calls."""

    def assert_mismatch(self, common: _Call, odd: _Call, *words: str) -> None:
        """Rank 1 of three calls ``odd``, the others ``common``; all ranks must raise soon."""

        def body(rank: int) -> OperationFailure:
            still_works(3)
            return failure_of(odd if rank == 1 else common)

        for error in self.run(3, body):
            assert error.kind is CollectiveMismatchError, error
            assert error.seconds < 30
            for word in words:
                assert word in error.text, f"{word!r} is missing from: {error.text}"

    @pytest.mark.parametrize("what", _DIFFERENT)
    def test_different_calls(self, what: str) -> None:
        common, odd, words = _DIFFERENT[what]
        self.assert_mismatch(common, odd, *words)

    def test_tensors_that_only_look_alike(self) -> None:
        """Tensors are compared as the caller gave them."""

        def body(rank: int) -> list[str]:
            wrong = []
            for kind, (common, odd) in _ODD.items():
                for name, call in _MOVES.items():
                    if kind != "shape" and name in _REDUCING:
                        continue  # such tensors are not reduced
                    group = dist.new_group()
                    failure = _failure(call, (odd if rank == 1 else common).clone(), group)
                    if failure is not CollectiveMismatchError:
                        wrong.append(f"{kind}, {name}: {failure}")
            return wrong

        assert self.run(3, body) == [[]] * 3

    def test_a_message_that_only_looks_like_what_is_received(self) -> None:
        def body(rank: int) -> list[object]:
            heard: list[object] = []
            for common, odd in _ODD.values():
                group = dist.new_group()
                if rank == 1:
                    heard.append(_failure(lambda t, g: dist.recv(t, 0, group=g), odd, group))
                else:  # a sender may notice while it sends, or not at all
                    _failure(lambda t, g: dist.send(t, 1, group=g), common, group)
            return heard

        assert self.run(2, body)[1] == [CollectiveMismatchError] * len(_ODD)

    def test_different_reduce_scatter_parts(self) -> None:
        def scatter(*sizes: int) -> _Call:
            return lambda: dist.reduce_scatter(
                torch.zeros(sizes[dist.get_rank()]), [torch.ones(size) for size in sizes]
            )

        self.assert_mismatch(scatter(2, 2, 2), scatter(2, 2, 3))

    def test_all_gather_whose_outputs_do_not_fit(self) -> None:
        def gather(size: int) -> _Call:
            # A rank's expectation of itself always fits, or it would be misuse.
            outputs = [torch.zeros(4), torch.zeros(size), torch.zeros(4)]
            return lambda: dist.all_gather(outputs, torch.ones(size))

        self.assert_mismatch(gather(4), gather(5), "4", "5")

    def test_gather_and_scatter_whose_outputs_do_not_fit(self) -> None:
        def move(call: Callable[..., object], size: int) -> _Call:
            return lambda: call(torch.ones(size), _at_root(torch.zeros(4)), 0)

        for call in (dist.gather, dist.scatter):
            self.assert_mismatch(move(call, 4), move(call, 5), "4", "5")

    def test_split_sizes_that_do_not_meet(self) -> None:
        def exchange(*received: int) -> _Call:
            output = torch.zeros(sum(received))
            return lambda: dist.all_to_all_single(output, torch.zeros(6), list(received), [2, 2, 2])

        self.assert_mismatch(exchange(2, 2, 2), exchange(3, 2, 1), "2", "3")

    def test_uneven_lists_that_do_not_meet(self) -> None:
        def exchange(*sizes: int) -> _Call:
            inputs = [torch.zeros(size) for size in sizes]
            return lambda: dist.all_to_all([torch.zeros(2) for _ in range(3)], inputs)

        self.assert_mismatch(exchange(2, 2, 2), exchange(3, 2, 2), "2", "3")

    def test_asynchronous_operations(self) -> None:
        def reduce(size: int) -> object:
            return started(dist.all_reduce(torch.ones(size), async_op=True)).wait()

        self.assert_mismatch(lambda: reduce(2), lambda: reduce(33), "2", "33")

    @on_ranks(2)
    def test_the_work_keeps_the_error(self, rank: int) -> None:
        work = started(dist.all_reduce(torch.ones(2 + rank), async_op=True))
        future = work.get_future()
        failure_of(work.wait)
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), CollectiveMismatchError)
        try:
            future.wait()
        except CollectiveMismatchError:
            return
        raise AssertionError("the future of a failed operation gave a value")

    def test_the_next_call_names_the_call_that_failed(self) -> None:
        def body(rank: int) -> str:
            if rank == 0:
                dist.all_reduce(torch.ones(5), async_op=True)
            else:
                dist.broadcast(torch.ones(5), 0, async_op=True)
            return failure_of(lambda: dist.all_reduce(torch.ones(2))).text

        for text in self.run(2, body):
            assert "rank 0 called all_reduce float32 [5] SUM, rank 1 broadcast float32 [5]" in text
            assert text.count("#1 at ") == 2, text

    def test_the_message_names_rank_group_and_number(self) -> None:
        def body(rank: int) -> str:
            still_works(3)
            op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
            return failure_of(lambda: dist.all_reduce(torch.ones(5, 7), op=op)).text

        for text in self.run(3, body):
            for word in ("rank 1", "group", "5, 7", "float32"):
                assert word in text, f"{word!r} is missing from: {text}"

    def test_a_failed_group_fails_from_then_on(self) -> None:
        def body(rank: int) -> list[OperationFailure]:
            first = failure_of(lambda: dist.all_reduce(torch.ones(2 + rank)))
            later = failure_of(lambda: dist.all_reduce(torch.ones(2)))
            message = failure_of(lambda: dist.recv(torch.ones(2), src=1 - rank))
            return [first, later, message]

        for errors in self.run(2, body):
            assert [error.kind for error in errors] == [CollectiveMismatchError] * 3
            assert all(error.seconds < 30 for error in errors)

    @on_ranks(2)
    def test_a_failed_group_leaves_the_others(self, rank: int) -> None:
        group = dist.new_group()
        failure_of(lambda: dist.all_reduce(torch.ones(2 + rank), group=group))
        still_works(2)
        still_works(2, dist.new_group())


@needs(Capability.PROVENANCE)
class ProvenanceSuite(GroupSuite):
    """Ranks whose collectives mean different tensors all raise, though all else is the same."""

    def assert_parted(self, call: _Call) -> None:
        def body(rank: int) -> OperationFailure:
            with carrying(3 if rank == 1 else 4, "item"):
                return failure_of(call)

        for error in self.run(2, body):
            assert error.kind is CollectiveMismatchError, error
            assert error.seconds < 30
            assert "tilework.dtensor.verify" in error.text

    def test_other_tensors(self) -> None:
        self.assert_parted(lambda: dist.all_reduce(torch.ones(2)))
        self.assert_parted(lambda: dist.all_gather_into_tensor(torch.empty(4, 3), torch.ones(2, 3)))

    def test_other_tensors_of_an_asynchronous_operation(self) -> None:
        def reduce() -> object:
            return started(dist.all_reduce(torch.ones(2), async_op=True)).wait()

        self.assert_parted(reduce)

    def test_the_same_tensors(self) -> None:
        def body(rank: int) -> float:
            total = torch.ones(1)
            for digest in (5, (1 << 64) - 1):
                with carrying(digest):
                    dist.all_reduce(total)
            return float(total)

        assert self.run(2, body) == [4.0, 4.0]

    def test_a_rank_that_calls_nothing_of_the_kind(self) -> None:
        def body(rank: int) -> OperationFailure:
            init_device_mesh("cpu", (2,))
            if rank:
                return failure_of(dist.barrier)
            with carrying(3, "item"):
                return failure_of(lambda: dist.all_reduce(torch.ones(2)))

        for error in self.run(2, body):
            assert error.kind is CollectiveMismatchError, error
            assert error.seconds < 30


class TimeoutSuite(GroupSuite):
    """Operations to which a rank does not come end with CollectiveTimeoutError."""

    def test_a_rank_that_does_not_come(self) -> None:
        def body(rank: int) -> OperationFailure | None:
            group = dist.new_group(timeout=SHORT)
            error = None
            if rank != 2:
                error = failure_of(lambda: dist.all_reduce(torch.ones(5, 7), group=group))
            dist.barrier()
            return error

        for error in self.run(3, body)[:2]:
            assert error is not None
            assert error.kind is CollectiveTimeoutError
            assert error.ranks == (2,)
            assert SHORT.total_seconds() * 0.9 < error.seconds < SHORT.total_seconds() + 1
            for word in ("all_reduce", "5, 7", "rank 2 did not enter the operation within "):
                assert word in error.text, error.text

    @on_ranks(2)
    def test_every_operation_has_a_timeout(self, rank: int) -> None:
        calls: list[Callable[[dist.ProcessGroup], object]] = [
            lambda g: dist.barrier(group=g),
            lambda g: dist.broadcast(torch.ones(1), src=1, group=g),
            lambda g: dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), group=g),
            lambda g: dist.gather(torch.ones(1), [torch.ones(1), torch.ones(1)], dst=0, group=g),
            lambda g: dist.scatter(torch.ones(1), None, src=1, group=g),
            lambda g: dist.reduce(torch.ones(1), dst=0, group=g),
            lambda g: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2), group=g),
            lambda g: dist.all_to_all_single(torch.ones(2), torch.ones(2), group=g),
            lambda g: dist.recv(torch.ones(1), src=1, group=g),
        ]
        for call in calls:
            group = brief_group(timedelta(milliseconds=200))
            if rank == 0:
                error = failure_of(functools.partial(call, inside(group)))
                assert error.kind is CollectiveTimeoutError
                assert error.ranks == (1,)
            dist.barrier()

    @on_ranks(2)
    def test_recv_from_any_has_a_timeout(self, rank: int) -> None:
        group = brief_group(timedelta(milliseconds=200))
        if rank == 0:
            error = failure_of(lambda: dist.recv(torch.ones(1), group=group))
            assert error.kind is CollectiveTimeoutError
        dist.barrier()

    @on_ranks(2)
    def test_asynchronous_operations_time_out_too(self, rank: int) -> None:
        group = brief_group(timedelta(milliseconds=100))
        if rank == 0:
            work = started(dist.all_reduce(torch.ones(1), group=group, async_op=True))
            error = failure_of(work.wait)
            assert error.kind is CollectiveTimeoutError
            assert isinstance(work.exception(), CollectiveTimeoutError)
        dist.barrier()

    def test_latecomers_hear_of_it(self) -> None:
        def body(rank: int) -> OperationFailure:
            group = brief_group(timedelta(milliseconds=100))
            if rank == 1:
                time.sleep(0.25)
            return failure_of(lambda: dist.all_reduce(torch.ones(1), group=group))

        errors = self.run(2, body)
        assert [error.kind for error in errors] == [CollectiveTimeoutError] * 2

    def test_monitored_barrier_names_all_who_are_missing(self) -> None:
        def body(rank: int) -> OperationFailure | None:
            error = None
            if rank in (0, 3):
                error = failure_of(
                    lambda: dist.monitored_barrier(timeout=SHORT, wait_all_ranks=True)
                )
            else:
                time.sleep(2.5 * SHORT.total_seconds())
            return error

        for error in self.run(4, body)[::3]:
            assert error is not None
            assert error.kind is CollectiveTimeoutError
            assert error.ranks == (1, 2)
            assert "1" in error.text
            assert "2" in error.text
