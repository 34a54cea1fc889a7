"""Ranks that would part, or wait forever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tilework.distributed as dist
from tilework import rpc
from tilework.errors import PretendError
from tilework.parallel import DistributedDataParallel
from tilework.plan import Mismatch, pretend


def found(program: Callable[[], object], ranks: int, everyone: bool = True) -> list[Mismatch]:
    with pretend(ranks=ranks) as job:
        return list(job.run(program, everyone=everyone).mismatches)


def test_one_rank_that_reduces_another_way() -> None:
    def program() -> None:
        op = dist.ReduceOp.MAX if dist.get_rank() == 3071 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(2), op)

    (mismatch,) = found(program, 3072)
    assert mismatch.ranks == (0, 3071)
    assert "they differ in reduction" in str(mismatch)
    assert str(mismatch).count("test_mismatches.py") == 2


def test_a_rank_that_ranks_choose_together_is_the_same_on_all() -> None:
    def program() -> None:
        best = torch.tensor([dist.get_rank()])
        dist.all_reduce(best, dist.ReduceOp.MAX)
        dist.broadcast(torch.ones(2), int(best.item()))

    assert not found(program, 4)


def is_odd() -> int:
    return int(dist.get_rank() == 1)


UNEVEN: dict[str, Callable[[], object]] = {
    "all_to_all_single": lambda: dist.all_to_all_single(
        torch.empty(3), torch.ones(3 + is_odd()), [1, 1, 1], [1 + is_odd(), 1, 1]
    ),
    "reduce_scatter": lambda: dist.reduce_scatter(
        torch.empty(2 + is_odd()), [torch.ones(2 + is_odd()) for _ in range(3)]
    ),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
        torch.empty(6 + 3 * is_odd()), torch.ones(2 + is_odd())
    ),
    "scatter": lambda: dist.scatter(
        torch.empty(2 + is_odd()),
        None if dist.get_rank() else [torch.ones(2)] * 3,
        src=0,
    ),
    "broadcast": lambda: dist.broadcast(torch.ones(2 + is_odd(), 3 - is_odd()), src=0),
    "new_group": lambda: dist.new_group([0, 1 + is_odd()]),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_with_other_sizes(name: str) -> None:
    (mismatch,) = found(UNEVEN[name], 3)
    assert name in mismatch.text
    assert 1 in mismatch.ranks


def test_a_collective_does_not_meet_a_message_of_another_tag() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1, tag=1)
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0, tag=2)
        dist.barrier()

    (mismatch,) = found(program, 3)
    assert "in a circle" in mismatch.text


def test_rpc_is_refused() -> None:
    with pytest.raises(PretendError, match="no other rank runs in a plan"):
        found(lambda: rpc.init_rpc("worker"), 2)


def test_uneven_inputs_are_refused() -> None:
    def program() -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        with ddp.join():
            for _ in range(2 + dist.get_rank() % 2):
                ddp(torch.ones(1, 2)).sum().backward()

    with pytest.raises(PretendError, match=r"only ranks \[1\] of 2 have another batch"):
        found(program, 2)


def test_a_circle_of_two_groups() -> None:
    def program() -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([1, 0], sort_ranks=False)
        order = [first, second] if dist.get_rank() == 0 else [second, first]
        for group in order:
            dist.all_reduce(torch.ones(1), group=group)

    (mismatch,) = found(program, 2)
    assert "in a circle" in mismatch.text
    assert sorted(mismatch.ranks) == [0, 1]


def test_a_receive_without_a_send() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.ones(3), 1)
        else:
            dist.all_gather_object(
                [None], 1, group=dist.new_group([1], use_local_synchronization=True)
            )

    (mismatch,) = found(program, 2)
    assert "sends no such message" in mismatch.text
    assert mismatch.ranks == (0, 1)


def test_messages_of_other_sizes() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(4), 0)

    (mismatch,) = found(program, 2)
    assert "message 1" in mismatch.text


def test_a_ring_of_messages_is_no_circle() -> None:
    def program() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        into = torch.ones(2)
        receive = dist.P2POp(dist.irecv, into, (rank - 1) % size)
        send = dist.P2POp(dist.isend, into.clone(), (rank + 1) % size)
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()

    assert not found(program, 4)


def test_receives_before_sends_are_a_circle() -> None:
    def program() -> None:
        other = 1 - dist.get_rank()
        dist.recv(torch.ones(2), other)
        dist.send(torch.ones(2), other)

    (mismatch,) = found(program, 2)
    assert "in a circle" in mismatch.text


def test_a_rank_that_leaves_out_a_collective() -> None:
    def program() -> None:
        dist.barrier()
        if dist.get_rank() != 2:
            dist.barrier()

    (mismatch,) = found(program, 3)
    assert "does not call it" in mismatch.text
    assert 2 in mismatch.ranks


def test_a_rank_alone_in_a_collective_of_another_kind() -> None:
    def program() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            dist.barrier()

    (mismatch,) = found(program, 3)
    assert mismatch.ranks == (0, 1)
    assert "rank 0 waits in barrier" in mismatch.text
