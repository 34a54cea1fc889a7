"""Ranks that wait for each other in different groups: an error on all, which says where."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilework.distributed as dist
from tilework.comm.waits import by_rank, cycles
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

Kind = Literal["threads", "processes"]
LONG = timedelta(minutes=3)
KINDS = pytest.mark.parametrize("kind", ["threads", "processes"])


def _errors(program: Callable[[int], Any], ranks: int, kind: Kind = "threads") -> list[str]:
    """The texts of the errors that all ranks raise, while none of them leaves."""

    def attempt(rank: int) -> str:
        with pytest.raises(dist.CollectiveMismatchError) as raised:
            program(rank)
        dist.get_default_store().add("raised", 1)
        while dist.get_default_store().add("raised", 0) < ranks:
            time.sleep(0.01)
        return str(raised.value)

    return run_ranks(ranks, attempt, kind=kind, timeout=LONG)


def _in_order(groups: list[Any], **options: Any) -> None:
    for group in groups:
        work = dist.all_reduce(torch.ones(2), group=group, **options)
        if work is not None:
            work.wait()


@KINDS
def test_two_groups_in_opposite_orders(kind: Kind) -> None:
    def program(rank: int) -> None:
        pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        _in_order(pair if rank == 0 else pair[::-1])

    for text in _errors(program, 2, kind):
        assert "wait for each other in a circle" in text
        assert "rank 0 waits for rank 1 in all_reduce float32 [2] SUM at " in text
        assert "rank 1 waits for rank 0 in all_reduce float32 [2] SUM at " in text
        assert "in one order on every rank" in text


@KINDS
def test_waits_for_asynchronous_operations_count(kind: Kind) -> None:
    def program(rank: int) -> None:
        pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        _in_order(pair if rank == 0 else pair[::-1], async_op=True)

    assert all("in a circle" in text for text in _errors(program, 2, kind))


def test_three_ranks_in_three_groups_and_one_that_waits_for_them() -> None:
    def program(rank: int) -> None:
        groups = [dist.new_group([i, (i + 1) % 3]) for i in range(3)]
        last: Any = dist.new_group([2, 3])
        while rank == 2 and not last.blocked():
            time.sleep(0.01)  # whoever comes later waits for a rank that has raised
        _in_order([groups[rank] if rank < 3 else last])

    for text in _errors(program, 4):
        assert all(f"rank {rank} waits for rank {(rank + 1) % 3}" in text for rank in range(3))


@KINDS
def test_a_loss_that_one_rank_of_a_mesh_asks_for_alone(kind: Kind) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0), Shard(1)])
        rows: Any = x.sum(1)  # a partial sum along tp
        if rank == 0:
            rows.full_tensor()
        dist.barrier()

    for text in _errors(program, 4, kind):
        assert "for full_tensor of a DTensor" in text
        assert "barrier at " in text
        assert "print on one" in text


def test_on_a_hybrid_group() -> None:
    """Groups over several hosts, as far as one machine has them."""

    def program(rank: int) -> None:
        pair = [dist.new_group([0, 1], backend="hybrid") for _ in range(2)]
        _in_order(pair if rank == 0 else pair[::-1])

    assert all("in a circle" in text for text in _errors(program, 2, "processes"))


def _receive_from_each_other(rank: int) -> None:
    if rank < 2:
        dist.recv(torch.zeros(2), 1 - rank)


def _send_large_ones_to_each_other(rank: int) -> None:
    if rank < 2:
        dist.send(torch.zeros(1 << 20), 1 - rank)


def _receive_in_a_ring(rank: int) -> None:
    work = dist.irecv(torch.zeros(2), (rank + 1) % 3)
    assert work is not None
    work.wait()
    dist.send(torch.zeros(2), (rank - 1) % 3)


def _receive_what_comes_after_a_collective(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.zeros(2), 1)
    dist.all_reduce(torch.zeros(2))
    if rank == 1:
        dist.send(torch.zeros(2), 0)


@pytest.mark.parametrize(
    ("program", "ranks", "kind", "words"),
    [
        (_receive_from_each_other, 2, "threads", "rank 0 waits for rank 1 in recv "),
        (_receive_from_each_other, 2, "processes", "rank 1 waits for rank 0 in recv "),
        (_send_large_ones_to_each_other, 2, "processes", "rank 1 waits for rank 0 in send "),
        (_receive_in_a_ring, 3, "threads", "rank 2 waits for rank 0 in recv "),
        (_receive_what_comes_after_a_collective, 3, "threads", "rank 1 waits for rank 0 in all_re"),
        (_receive_what_comes_after_a_collective, 2, "processes", "rank 0 waits for rank 1 in recv"),
    ],
)
def test_messages(program: Callable[[int], None], ranks: int, kind: Kind, words: str) -> None:
    for text in _errors(program, ranks, kind):
        assert words in text
        assert "batch_isend_irecv" in text


# -- what is no fault ----------------------------------------------------------------------


def _run_all(program: Callable[[int], Any], ranks: int, kind: Kind = "threads") -> None:
    assert run_ranks(ranks, program, kind=kind, timeout=LONG) == ["fine"] * ranks


@KINDS
def test_a_rank_that_is_late_is_no_deadlock(kind: Kind) -> None:
    """Rank 1 waits in one group for rank 0, which computes; rank 2 waits for rank 1."""

    def program(rank: int) -> str:
        both: list[Any] = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        if rank == 0:
            while not dist.get_default_store().check(["waits/wait/1"]):  # it looks for a cycle
                time.sleep(0.01)
            time.sleep(0.5)
        _in_order([group for group in both if rank in group.global_ranks])
        return "fine"

    _run_all(program, 3, kind)


@KINDS
def test_another_thread_may_still_call(kind: Kind) -> None:
    """Each rank's own thread waits for the other's second thread, which takes its time."""

    def program(rank: int) -> str:
        pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        mine, theirs = pair if rank == 0 else pair[::-1]

        def later() -> None:
            time.sleep(1.2)
            dist.all_reduce(torch.ones(2), group=theirs)

        thread = threading.Thread(target=copy_context().run, args=(later,))
        thread.start()
        dist.all_reduce(torch.ones(2), group=mine)
        thread.join()
        return "fine"

    _run_all(program, 2, kind)


def test_a_stopped_rank_is_in_no_cycle() -> None:
    """Rank 1 is stopped while it waits for a message, which comes; rank 0 waits for its answer."""

    def program(rank: int) -> str:
        x, store = torch.zeros(2), dist.get_default_store()
        if rank == 1:
            store.set("pid", str(os.getpid()))
            dist.recv(x, 0)
            dist.send(x, 0)
            return "fine"
        while not store.check(["waits/wait/1"]):  # it has told that it waits
            time.sleep(0.01)
        pid = int(store.get("pid"))
        os.kill(pid, signal.SIGSTOP)
        try:
            dist.send(x, 1)
            go_on = f"import os, time; time.sleep(2.5); os.kill({pid}, {int(signal.SIGCONT)})"
            with subprocess.Popen([sys.executable, "-c", go_on]):
                dist.recv(x, 1)
        finally:
            os.kill(pid, signal.SIGCONT)
        return "fine"

    _run_all(program, 2, "processes")


def test_messages_that_are_late() -> None:
    """Both ranks have told of waits for each other, at other times."""

    def program(rank: int) -> str:
        x = torch.zeros(2)
        for turn in range(2):
            if rank == turn:
                dist.recv(x, 1 - rank)
            else:
                key = f"waits/asked/{rank}"
                while not dist.get_default_store().check([key]):
                    time.sleep(0.01)
                time.sleep(0.3)
                dist.send(x, 1 - rank)
        return "fine"

    _run_all(program, 2)


def test_operations_under_way_are_called() -> None:
    """Asynchronous operations in one order, waited for in another."""

    def program(rank: int) -> str:
        pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        late = dist.new_group([0, 1])
        if rank == 1:
            time.sleep(0.7)
        works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in pair]
        for work in works if rank == 0 else works[::-1]:
            assert work is not None
            work.wait()
        _in_order([late])
        return "fine"

    _run_all(program, 2)


@settings(max_examples=5)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_legal_programs_over_overlapping_groups_end(order: list[int], draw: Any) -> None:
    pauses = [[draw.random() * 0.02 for _ in order] for _ in range(3)]

    def program(rank: int) -> str:
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 1, 2])]
        for number, pause in zip(order, pauses[rank], strict=True):
            time.sleep(pause)
            if isinstance(groups[number], dist.ProcessGroup):
                dist.all_reduce(torch.ones(2), group=groups[number])
        return "fine"

    with pytest.MonkeyPatch.context() as patch:
        # Every wait counts as a long one, and is looked at all the time.
        patch.setattr(by_rank, "AFTER_SECONDS", 0.0)
        patch.setattr(cycles, "_PERIOD", 0.0)
        _run_all(program, 3)


@settings(max_examples=5)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_legal_programs_of_messages_end(order: list[tuple[int, int]], draw: Any) -> None:
    """A pair of one rank and itself stands for a collective."""
    pauses = [[draw.random() * 0.02 for _ in order] for _ in range(3)]

    def program(rank: int) -> str:
        x = torch.ones(2)
        for (source, target), pause in zip(order, pauses[rank], strict=True):
            time.sleep(pause)
            if source == target:
                dist.all_reduce(x)
            elif rank == source:
                dist.send(x, target, tag=source)
            elif rank == target:
                dist.recv(x, source, tag=source)
        return "fine"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_rank, "AFTER_SECONDS", 0.0)
        for name in ("_PERIOD", "_MESSAGE_SECONDS", "_ASKED_SECONDS"):
            patch.setattr(cycles, name, 0.0)
        _run_all(program, 3)
