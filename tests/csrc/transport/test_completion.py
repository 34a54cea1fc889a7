"""Submitted operations: in order, completed by callbacks, failed when they must be."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.csrc.core_ranks import Rank, groups, run_threads
from tilework import _core


def test_submitted_operations_run_in_order() -> None:
    def program(rank: Rank) -> list[float]:
        tensors = [torch.full((3000,), float(i)) for i in range(20)]
        completions = [rank.submit("all_reduce", [t], [t], op="sum") for t in tensors]
        last = torch.tensor([100.0])
        rank.run("all_reduce", [last], [last], op="sum")  # after all of them
        assert all(completion.done() for completion in completions)
        return [t[-1].item() for t in (*tensors, last)]

    expected = [2.0 * i for i in (*range(20), 100)]
    assert run_threads(2, program) == [expected] * 2


def test_the_same_operations_may_be_submitted_or_run() -> None:
    def program(rank: Rank) -> list[float]:
        values = []
        for number in range(50):
            tensor = torch.tensor([float(number)])
            if (number + rank.rank) % 3 == 0:
                assert rank.submit("all_reduce", [tensor], [tensor], op="sum").wait(-1)
            else:
                rank.run("all_reduce", [tensor], [tensor], op="sum")
            values.append(tensor.item())
        return values

    assert run_threads(3, program) == [[3.0 * i for i in range(50)]] * 3


def test_wait_gives_up_and_may_be_repeated() -> None:
    def program(rank: Rank) -> tuple[bool, bool]:
        if rank.rank == 1:
            time.sleep(0.2)
        completion = rank.submit("barrier")
        return completion.wait(0.02), completion.wait(-1)

    assert run_threads(2, program)[0] == (False, True)


def test_callbacks_run_once_done() -> None:
    def program(rank: Rank) -> list[str]:
        heard: list[str] = []
        called = threading.Event()
        if rank.rank == 1:
            time.sleep(0.1)
        completion = rank.submit("barrier")
        completion.add_done_callback(lambda: heard.append(threading.current_thread().name))
        completion.add_done_callback(called.set)
        assert completion.wait(120)  # a wait without a limit would carry the operation itself
        assert called.wait(120)
        completion.add_done_callback(lambda: heard.append("late"))
        return heard

    results = run_threads(2, program)
    assert results[0][0].startswith("Dummy")  # the core's thread
    assert [heard[-1] for heard in results] == ["late", "late"]


def test_a_failure_reaches_completion_and_callback() -> None:
    def program(rank: Rank) -> tuple[str, str]:
        tensor = torch.zeros(1 + rank.rank)
        completion = rank.submit("all_reduce", [tensor], [tensor], op="sum")
        with pytest.raises(_core.Fault) as caught:
            completion.wait(-1)
        fault = completion.fault()
        assert fault is not None
        return caught.value.args[0], fault[0]

    assert run_threads(2, program) == [("mismatch", "mismatch")] * 2


def test_misuse_is_refused_when_it_is_submitted() -> None:
    with groups(1) as (group,), pytest.raises(ValueError, match="1 inputs given, 0 expected"):
        Rank(group, 0, 1).submit("barrier", [torch.zeros(1)])


def test_closing_fails_what_is_pending() -> None:
    with groups(2) as (group, _):
        completions = [Rank(group, 0, 2).submit("barrier") for _ in range(3)]
        completions.append(Rank(group, 0, 2).irecv(1, torch.zeros(1)))
        heard: list[bool] = []
        completions[-1].add_done_callback(lambda: heard.append(True))
        group.close()
        assert [completion.fault() for completion in completions] == [
            ("closed", (0,), "the group was closed on this rank")
        ] * 4
        assert heard == [True]


def test_a_callback_may_close_the_group() -> None:
    with groups(1) as (group,):
        completion = Rank(group, 0, 1).submit("barrier")
        closed = threading.Event()
        completion.add_done_callback(group.close)
        completion.add_done_callback(closed.set)
        assert closed.wait(120)


def test_a_group_may_be_dropped_while_operations_are_pending() -> None:
    with groups(2) as ends:
        completion = Rank(ends[0], 0, 2).submit("barrier")
        ends[0] = ends[1]
        assert completion.done()


def test_a_callback_that_raises_is_reported() -> None:
    def oops() -> None:
        raise KeyError("oops")

    with groups(1) as (group,), pytest.MonkeyPatch.context() as patch:
        heard: list[object] = []
        patch.setattr("sys.unraisablehook", lambda told: heard.append(told.exc_value))
        completion = Rank(group, 0, 1).submit("barrier")
        assert completion.wait(-1)
        completion.add_done_callback(oops)
        assert isinstance(heard[0], KeyError)


def test_threads_of_one_rank_may_all_call() -> None:
    def program(rank: Rank) -> list[float]:
        tensors = [torch.ones(500) for _ in range(4)]

        def call(tensor: torch.Tensor) -> None:
            for _ in range(20):
                rank.run("all_reduce", [tensor], [tensor], op="avg")

        threads = [threading.Thread(target=call, args=(t,)) for t in tensors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [t.sum().item() for t in tensors]

    assert run_threads(2, program) == [[500.0] * 4] * 2


def test_a_callback_must_not_wait_for_what_runs_after_it() -> None:
    armed = threading.Event()

    def program(rank: Rank) -> list[str]:
        heard: list[str] = []
        second: list[_core.Completion] = []

        def wait_inside() -> None:
            for call in (lambda: second[0].wait(-1), lambda: rank.run("barrier")):
                with pytest.raises(RuntimeError, match="callback must not wait"):
                    call()
                heard.append("refused")

        if rank.rank == 1:
            armed.wait(120)
        first = rank.submit("barrier")
        second.append(rank.submit("barrier"))
        if rank.rank == 0:
            first.add_done_callback(wait_inside)
            armed.set()
        assert second[0].wait(120)  # not carried by this thread, as a wait without a limit is
        return heard

    assert run_threads(2, program)[0] == ["refused", "refused"]
