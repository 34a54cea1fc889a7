"""Engines that compare nothing, compared: blocking engines before data moves, others beside it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import tilework.distributed as dist
from tests.comm.backends.torch.queue_engine import QueueGroup, register
from tests.comm.function_suites import WholeContract
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.workload import join, leave, until_error
from tests.limits import PROMPTLY
from tilework.comm.backends.hybrid.messages import TransferWaits
from tilework.comm.backends.python_engine import PythonEngine
from tilework.comm.provenance_digest import carrying
from tilework.testing import run_ranks
from tilework.testing.groups.base import brief_group, failure_of, inside, started

T = TypeVar("T")
LIMIT = timedelta(seconds=120)
ENGINES = pytest.mark.parametrize("backend", ["gloo", "queue"])

register()


def ranks(n: int, fn: Callable[[int], T], backend: str) -> list[T]:
    return run_ranks(n, fn, kind="threads", backend=backend, timeout=LIMIT)


class TestQueue(WholeContract):
    """The contract on an engine that behaves as NCCL does."""

    group_type = QueueGroup
    world_sizes = (3,)
    large = 50_001

    @pytest.fixture(autouse=True)
    def _skip_what_nccl_lacks(self, request: pytest.FixtureRequest) -> None:
        name = request.node.name
        if "scan" in name:
            pytest.skip("an engine on streams has no scan")
        if "from_any" in name or name.startswith(("test_tags", "test_messages")):
            pytest.skip("NCCL has no tags, and receives from a rank that is named")

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return ranks(n, fn, "queue")


def all_reduces(count: int) -> None:
    for _ in range(count):
        dist.all_reduce(torch.ones(2))


@ENGINES
@pytest.mark.parametrize("number", [1, 2, 1000])
def test_one_dtype_for_another_of_the_same_bytes(backend: str, number: int) -> None:
    def body(rank: int) -> str:
        all_reduces(number - 1)
        odd = torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32)
        return failure_of(lambda: dist.all_reduce(odd)).text

    for text in ranks(2, body, backend):
        assert "rank 0 called all_reduce float32 [2] SUM, rank 1 all_reduce int32 [2]" in text
        assert f"operation #{number}" in text


@ENGINES
def test_a_hundred_calls_in_flight(backend: str) -> None:
    def body(rank: int) -> list[float]:
        tensors = [torch.full((3,), float(number)) for number in range(100)]
        works = [started(dist.all_reduce(tensor, async_op=True)) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        return [tensor[0].item() for tensor in tensors]

    assert ranks(2, body, backend) == [[2.0 * number for number in range(100)]] * 2


def test_an_asynchronous_call_returns_before_others_have_called() -> None:
    def body(rank: int) -> bool:
        if rank == 0:
            dist.send(torch.ones(1), 1)  # rank 1 calls only after rank 0 has returned
        x = torch.ones(2)
        if rank == 1:
            dist.recv(torch.ones(1), 0)
        work = started(dist.all_reduce(x, async_op=True))
        work.wait()
        return x.tolist() == [2.0, 2.0]

    assert ranks(2, body, "queue") == [True, True]


def swap(rank: int) -> dist.Work:
    """Call different things, which does not fail at once."""
    x = torch.ones(2)
    if rank == 0:
        return started(dist.all_reduce(x, async_op=True))
    return started(dist.broadcast(x, 0, async_op=True))


def assert_both_lines(text: str) -> None:
    assert "rank 0 called all_reduce float32 [2] SUM, rank 1 broadcast float32 [2]" in text, text
    assert text.count("test_compared_engine.py:") >= 2, text


@ENGINES
@pytest.mark.parametrize("where", ["wait", "next call", "late call", "exception"])
def test_a_mismatch_in_flight_is_raised(
    backend: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "late call":  # comes between the failure and the abort that explains it
        note = PythonEngine.note_abort

        def late(*abort: Any) -> bool:
            time.sleep(0.3)
            return note(*abort)

        monkeypatch.setattr(PythonEngine, "note_abort", late)

    def body(rank: int) -> str:
        work = swap(rank)
        if where == "next call":
            # Comparing takes a moment, in which calls still go.
            return failure_of(lambda: all_reduces(10_000)).text
        if where == "late call":
            time.sleep(0.1)
            return failure_of(lambda: all_reduces(1)).text
        if where == "exception":
            while not work.is_completed():
                time.sleep(0.01)
            return str(work.exception())
        return failure_of(work.wait).text

    for text in ranks(2, body, backend):
        assert_both_lines(text)


def test_a_receive_that_waits_does_not_delay_what_ranks_report() -> None:
    def body(rank: int) -> str:
        message = started(dist.irecv(torch.ones(2), (rank + 1) % 3))
        text = failure_of(swap(min(rank, 1)).wait).text
        failure_of(message.wait)
        return text

    for text in ranks(3, body, "gloo"):
        assert "ranks 1 and 2 broadcast float32 [2]" in text


def test_a_mismatch_is_raised_at_the_latest_at_the_closing() -> None:
    def body(rank: int) -> str:
        swap(rank)
        return failure_of(dist.destroy_process_group).text

    for text in ranks(2, body, "queue"):
        assert_both_lines(text)


def test_a_wait_for_data_that_never_comes_ends() -> None:
    """The calls before the mismatch agree; those of rank 2 hang behind it on the stream."""

    def body(rank: int) -> float:
        works = [swap(min(rank, 1))]
        works += [started(dist.barrier(async_op=True)) for _ in range(3)]
        return failure_of(works[-1].wait).seconds

    assert max(ranks(3, body, "queue")) < PROMPTLY


@ENGINES
def test_a_late_rank_is_named_though_nobody_waits(backend: str) -> None:
    def body(rank: int) -> tuple[tuple[int, ...], str]:
        group = brief_group(timedelta(milliseconds=300))
        if rank == 0:
            work = started(dist.all_reduce(torch.ones(2), group=group, async_op=True))
            while not work.is_completed():
                time.sleep(0.01)
            assert isinstance(work.exception(), dist.CollectiveTimeoutError)
        else:
            while group.why_aborted() is None:
                time.sleep(0.01)
        error = group.why_aborted()
        assert isinstance(error, dist.CollectiveTimeoutError)
        return error.ranks, str(error)

    for late, text in ranks(2, body, backend):
        assert late == (1,)
        assert "rank 1 was last in: nothing yet" in text


@pytest.mark.parametrize("calls", [True, False], ids=["in calls", "in silence"])
def test_a_death_ends_the_group(calls: bool, tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = join(rank, 3, tmp_path / "store", LIMIT, "gloo_queue")
        group = dist.get_default_group()
        all_reduces(3)
        say("ready")
        if rank == 1:
            signal.pause()
        if calls:
            say(until_error(lambda turn: all_reduces(1)).ranks)
        else:
            while (error := group.why_aborted()) is None:
                time.sleep(0.01)
            say(error.ranks)
        leave(store)

    with ForkedRanks(3, story) as forked:
        for rank in forked:
            assert rank.hear() == "ready"
        forked[1].kill()
        for rank in forked.others(1):
            assert rank.hear() == (1,)


@ENGINES
def test_a_circle_over_two_groups(backend: str) -> None:
    def body(rank: int) -> str:
        first, second = inside(dist.new_group()), inside(dist.new_group())
        mine = first if rank == 0 else second
        return failure_of(lambda: dist.all_reduce(torch.ones(2), group=mine)).text

    for text in ranks(2, body, backend):
        assert "waits for" in text, text


def test_a_circle_of_messages() -> None:
    def body(rank: int) -> str:
        return failure_of(lambda: dist.recv(torch.ones(2), 1 - rank)).text

    for text in ranks(2, body, "gloo"):
        assert "rank 1 waits for rank 0 in recv" in text, text


def test_a_message_that_does_not_fit_names_both_ends() -> None:
    def body(rank: int) -> str:
        if rank == 0:
            dist.isend(torch.ones(2), 1)
            return failure_of(dist.barrier).text
        return failure_of(lambda: dist.recv(torch.ones(2, dtype=torch.int32), 0)).text

    for text in ranks(2, body, "gloo"):
        assert "rank 0 sent 8 bytes of torch.float32, rank 1 receives 8 bytes of" in text, text
        assert "ranks called different things" not in text, text


def test_a_wait_for_a_message_begins_after_the_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    run, over = TransferWaits.run, threading.Event()

    def late(*wait: Any) -> RuntimeError | None:
        time.sleep(0.3)
        return run(*wait)

    monkeypatch.setattr(TransferWaits, "run", late)

    def body(rank: int) -> float:
        if rank == 0:
            seconds = failure_of(lambda: dist.send(torch.ones(3), 1)).seconds
            over.set()
            return seconds
        failed = failure_of(lambda: dist.recv(torch.ones(2), 0))
        over.wait(LIMIT.total_seconds())  # a rank that leaves would end the wait
        return failed.seconds

    assert max(ranks(2, body, "gloo")) < PROMPTLY


def test_ranks_with_other_amounts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> str:
        import os

        if rank == 1:
            os.environ["TILEWORK_COMPARE"] = "off"
        return failure_of(lambda: dist.new_group(backend="gloo")).text

    for text in run_ranks(2, body, kind="processes", backend="shm", timeout=LIMIT):
        assert "rank 0 has all, headers of format 2; rank 1 has off" in text


def test_contents_are_compared_in_the_first_calls_and_then_in_every_hundredth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEWORK_COMPARE", "first")

    def body(rank: int) -> int:
        all_reduces(100)
        for number in range(101, 202):
            try:
                with carrying(rank + 1):
                    dist.all_reduce(torch.ones(2))
            except dist.CollectiveMismatchError:
                return number
        return 0

    assert ranks(2, body, "gloo") == [200, 200]


def test_nothing_is_compared_where_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_COMPARE", "off")

    def body(rank: int) -> list[float]:
        x = torch.ones(2, 2 - rank, dtype=torch.float32).view(-1)[:2]
        with carrying(rank + 1):
            dist.all_reduce(x)
        return x.tolist()

    assert ranks(2, body, "gloo") == [[2.0, 2.0]] * 2
