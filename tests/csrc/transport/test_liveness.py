"""Ranks that die, stop, leave, abort or are interrupted: never a hang, always the right name."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from tests.csrc.core_ranks import NONCE, Rank, groups, run_threads, workers
from tests.limits import PROMPTLY
from tilework import _core


def test_processes_agree_on_sums() -> None:
    with workers(3, "sum") as (_, ranks):
        for count in (1, 1000, 100_000):
            assert [rank.says() for rank in ranks] == [[6.0, 6.0, count]] * 3


@pytest.mark.parametrize("scenario", ["loop", "loop_large"])
def test_kill_9_is_noticed_within_a_second(scenario: str) -> None:
    with workers(3, scenario) as (_, ranks):
        assert [rank.says() for rank in ranks] == ["ready"] * 3
        time.sleep(0.05)
        os.kill(ranks[1].pid, signal.SIGKILL)
        died = time.monotonic()
        for survivor in (ranks[0], ranks[2]):
            kind, lost, text, when = survivor.says()
            assert (kind, lost, text) == ("peer_lost", [1], "rank 1 died")
            assert when - died < PROMPTLY


def test_a_receiver_notices_that_its_sender_died() -> None:
    with workers(2, "receive", first=1) as (fd, (receiver,)):
        group = _core.Group(fd, 0, 2, NONCE)
        assert receiver.says() == "ready"
        group.close()
        assert receiver.says()[:3] == ["peer_lost", [0], "rank 0 left the group"]


def test_a_thread_that_ended_has_left() -> None:
    ends: list[_core.Group] = []
    fd = _core.create_segment(2, _core.DEFAULT_SLOT_BYTES, NONCE)
    first = _core.Group(fd, 0, 2, NONCE, of_threads=True)
    os.close(fd)
    other = threading.Thread(target=lambda: ends.append(first.beside(1)))
    other.start()
    begun = time.monotonic()
    with pytest.raises(_core.Fault) as caught:
        first.run(_core.KINDS["barrier"], 0, 0, 0, 1.0, [], [], 0, 60.0)
    assert caught.value.args == ("peer_lost", (1,), "rank 1 left the group")
    assert time.monotonic() - begun < PROMPTLY


def test_a_stopped_rank_is_named_at_the_timeout() -> None:
    with workers(2, "loop_impatient") as (_, ranks):
        assert [rank.says() for rank in ranks] == ["ready"] * 2
        os.kill(ranks[1].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        kind, missing, text, when = ranks[0].says()
        assert (kind, missing) == ("timeout", [1])
        assert "within 0.4 s" in text
        assert 0.3 < when - stopped < 2.0


def test_leaving_is_noticed_at_once() -> None:
    with workers(2, "leave") as (_, ranks):
        assert ranks[0].says() == "left"
        assert ranks[1].says()[:3] == ["peer_lost", [0], "rank 0 left the group"]


def test_ctrl_c_ends_a_wait() -> None:
    with workers(2, "interrupt", first=1) as (_, (rank,)):
        assert rank.says() == "ready"
        time.sleep(0.1)
        os.kill(rank.pid, signal.SIGINT)
        sent = time.monotonic()
        what, when = rank.says()
        assert what == "interrupted"
        assert when - sent < 10
        assert rank.says()[0] == "aborted"  # the rounds are out of step now


def test_ctrl_c_ends_a_wait_behind_another_operation() -> None:
    with workers(2, "interrupt_behind_another", first=1) as (_, (rank,)):
        assert rank.says() == "ready"
        time.sleep(0.1)
        os.kill(rank.pid, signal.SIGINT)
        assert rank.says()[0] == "interrupted"
        assert rank.says() == "aborted"


def test_a_signal_handler_cannot_call_into_what_it_interrupted() -> None:
    with workers(2, "collective_in_a_signal_handler", first=1) as (_, (rank,)):
        assert rank.says() == "ready"
        time.sleep(0.1)
        os.kill(rank.pid, signal.SIGINT)
        assert "a signal handler must not call a collective" in rank.says()


def test_a_process_may_end_while_operations_are_pending() -> None:
    with workers(2, "exit_while_pending", first=1) as (_, (rank,)):
        assert [rank.says(), rank.says()] == ["closed", "closed"]
        assert rank.process.wait(120) == 0


def test_a_forked_child_cannot_use_the_group() -> None:
    with workers(2, "fork") as (_, ranks):
        for rank in ranks:
            kind, text = rank.says()
            assert kind == "closed"
            assert "fork" in text
            assert rank.says() == 2.0


def test_a_rank_that_never_comes() -> None:
    def program(rank: Rank) -> Any:
        if rank.rank != 1:
            rank.run("barrier", timeout=0.1)

    results = run_threads(3, program)
    text = "rank 1 did not enter the operation within 0.1 s"
    assert [results[r].args for r in (0, 2)] == [("timeout", (1,), text)] * 2


def test_abort_wakes_everybody() -> None:
    def program(rank: Rank) -> Any:
        if rank.rank == 0:
            time.sleep(0.1)
            rank.group.abort("peer_lost", "rank 0 had enough")
            rank.group.abort("timeout", "and again")
            return rank.group.aborted()
        start = time.monotonic()
        with pytest.raises(_core.Fault) as caught:
            rank.run("barrier")
        assert time.monotonic() - start < PROMPTLY
        assert rank.group.aborted() == (0, "peer_lost", "rank 0 had enough")
        return caught.value.args

    told, *others = run_threads(3, program)
    assert told == (0, "peer_lost", "rank 0 had enough")
    assert others == [("aborted", (0,), "rank 0 had enough")] * 2


def test_abort_reaches_messages_and_later_operations() -> None:
    def program(rank: Rank) -> list[str]:
        completion = rank.irecv(1 - rank.rank, torch.zeros(1))
        if rank.rank == 0:
            rank.group.abort("timeout", "enough")
        heard = []
        for call in (lambda: completion.wait(-1), lambda: rank.run("barrier")):
            with pytest.raises(_core.Fault) as caught:
                call()
            heard.append(caught.value.args[0])
        return heard

    assert run_threads(2, program) == [["aborted", "aborted"]] * 2


def test_own_cause_comes_before_an_abort() -> None:
    def program(rank: Rank) -> str:
        with pytest.raises(_core.Fault):
            rank.run("all_reduce", [t := torch.zeros(1 + rank.rank)], [t], op="sum")
        rank.group.abort("mismatch", f"by {rank.rank}")
        with pytest.raises(_core.Fault) as caught:
            rank.run("barrier")
        return str(caught.value.args[0])

    assert run_threads(2, program) == ["mismatch"] * 2


def test_last_words() -> None:
    def program(rank: Rank) -> list[str | None]:
        if rank.rank != 2:
            rank.group.report_failure("é" * 1500 if rank.rank else "why")
        else:
            rank.group.close()
            return []
        return rank.group.failure_reports(60.0)

    start = time.monotonic()
    results = run_threads(3, program)
    assert results[:2] == [["why", "é" * 1000, None]] * 2
    assert time.monotonic() - start < PROMPTLY


def test_waiting_for_last_words_ends() -> None:
    with groups(2) as (group, _):
        assert group.failure_reports(0.05) == [None, None]


def test_close_is_idempotent_and_final() -> None:
    with groups(1) as (group,):
        group.close()
        group.close()
        assert group.statistics()["operations"] == 0
        for call in (lambda: Rank(group, 0, 1).run("barrier"), group.headers):
            with pytest.raises(_core.Fault, match="closed on this rank"):
                call()


def test_closing_ends_the_waits_of_other_threads() -> None:
    heard: list[str] = []

    def wait(group: _core.Group) -> None:
        with pytest.raises(_core.Fault) as caught:
            Rank(group, 0, 2).run("barrier")
        heard.append(caught.value.args[0])

    with groups(2) as ends:
        thread = threading.Thread(target=wait, args=(ends[0],))
        thread.start()
        time.sleep(0.1)
        ends[0].close()
        thread.join()
    assert heard == ["closed"]
