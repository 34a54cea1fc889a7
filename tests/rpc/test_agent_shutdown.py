"""Leaving."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

import tilework.distributed as dist
from tests.faults.forked_ranks import Holdings
from tests.limits import PROMPTLY
from tests.rpc.joined_ranks import (
    LIMIT_SECONDS,
    Gate,
    identity,
    join,
    my_name,
    nothing,
    this_agent,
    together,
    until,
)
from tilework import rpc
from tilework.errors import DistError, PeerLostError, RpcTimeoutError
from tilework.rpc.calls import Calls
from tilework.testing import run_ranks

_gates: dict[str, Gate] = {}
_done: list[str] = []


def _slow(name: str, seconds: float = 0.2) -> None:
    time.sleep(seconds)
    _done.append(name)


def _call_on(depth: int) -> None:
    """Leave a call behind that leaves a call behind …"""
    time.sleep(0.05)
    if depth:
        rpc.rpc_async((rpc.get_worker_info().id + 1) % 3, _call_on, args=(depth - 1,))
    else:
        _done.append("the last")


def test_graceful_waits_for_all_work() -> None:
    _done.clear()

    def program(rank: int) -> None:
        if rank == 0:
            rpc.rpc_async("w1", _slow, args=("a",))
            rpc.remote("w2", _slow, args=("b", 0.3))

    together(3, program)
    assert sorted(_done) == ["a", "b"]


def test_graceful_waits_for_work_that_work_makes() -> None:
    _done.clear()

    def program(rank: int) -> None:
        if rank == 0:
            rpc.rpc_async("w1", _call_on, args=(7,))

    together(3, program)
    assert _done == ["the last"]


def test_graceful_waits_for_what_callbacks_make() -> None:
    _done.clear()

    def then(_: Any) -> None:
        time.sleep(0.1)
        rpc.rpc_sync("w1", _slow, args=("from a callback", 0.01))

    def program(rank: int) -> None:
        if rank == 0:
            rpc.rpc_async("w1", nothing).add_done_callback(then)

    together(2, program)
    assert _done == ["from a callback"]


def test_graceful_serves_until_all_have_come() -> None:
    def program(rank: int) -> Any:
        if rank == 0:
            time.sleep(0.3)
            return rpc.rpc_sync("w1", my_name)
        return None

    assert together(2, program)[0] == "w1"


def test_graceful_within_a_time() -> None:
    def body(rank: int) -> None:
        join(rank)
        if rank == 0:
            with pytest.raises(RpcTimeoutError):
                rpc.shutdown(timeout=0.2)
            assert not rpc.is_initialized()
        dist.barrier()
        if rank == 1:
            with pytest.raises(PeerLostError):
                rpc.shutdown(timeout=timedelta(seconds=120))
            assert not rpc.is_initialized()

    run_ranks(2, body)


def test_at_once_waits_for_nobody() -> None:
    gate = _gates["busy"] = Gate()

    def body(rank: int) -> None:
        join(rank)
        if rank == 0:
            future = rpc.rpc_async("w1", _hold, args=("busy",))
            assert gate.reached.wait(LIMIT_SECONDS)
            begun = time.monotonic()
            rpc.shutdown(graceful=False)
            assert time.monotonic() - begun < PROMPTLY
            with pytest.raises(DistError, match=r"shut down on this rank before _hold"):
                future.wait()
        else:
            assert gate.reached.wait(LIMIT_SECONDS)
            begun = time.monotonic()
            rpc.shutdown(graceful=False)
            assert time.monotonic() - begun < PROMPTLY
            gate.open.set()

    run_ranks(2, body)


def test_a_call_that_begins_after_rpc_began_to_close_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _gates["closing"] = Gate()

    def body(rank: int) -> None:
        join(rank)
        rpc.barrier()
        if rank == 0:
            agent, add = this_agent(), Calls.add

            def late(calls: Calls, call: Any) -> tuple[int, bool]:
                agent._closed = True  # and the calls to end have been listed
                return add(calls, call)

            monkeypatch.setattr(Calls, "add", late)
            with pytest.raises(DistError, match="before _hold"):
                rpc.rpc_sync("w1", _hold, args=("closing",))
            agent._closed = False
            gate.open.set()
        dist.barrier()
        monkeypatch.undo()
        rpc.shutdown(graceful=False)

    run_ranks(2, body)


def _call_until_it_fails() -> None:
    while True:
        rpc.rpc_sync("w1", nothing)


def _hold(name: str) -> None:
    _gates[name].wait()


def test_who_left_is_lost_to_the_others() -> None:
    def body(rank: int) -> None:
        join(rank)
        rpc.barrier()
        if rank == 1:
            rpc.shutdown(graceful=False)
            return
        begun = time.monotonic()
        with pytest.raises(PeerLostError, match=r"worker 'w1' \(rank 1\) died or left") as lost:
            _call_until_it_fails()
        assert lost.value.ranks == (1,)
        assert time.monotonic() - begun < PROMPTLY
        with pytest.raises(PeerLostError, match="ranks \\[1\\] died or left"):
            rpc.all_gather(1)
        rpc.shutdown(graceful=False)

    run_ranks(2, body)


def test_a_world_that_ends_takes_its_rpc_along() -> None:
    def body(rank: int) -> None:
        join(rank)

    run_ranks(2, body)
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("rpc w")])


def test_a_rank_that_raises_fails_the_calls_to_it() -> None:
    def body(rank: int) -> None:
        join(rank)
        rpc.barrier()
        if rank == 1:
            raise KeyError("the cause")
        rpc.rpc_sync("w1", time.sleep, args=(10,))

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(2, body)


def test_from_a_function_that_another_rank_calls() -> None:
    def body(rank: int) -> None:
        join(rank)
        if rank == 0:
            with pytest.raises(PeerLostError):
                rpc.rpc_sync("w1", rpc.shutdown, args=(False,))
            rpc.shutdown(graceful=False)
        else:
            until(lambda: not rpc.is_initialized())

    run_ranks(2, body)


def test_nothing_is_left_behind() -> None:
    def body(rank: int) -> Any:
        def once() -> None:
            join(rank)
            rpc.rpc_sync(1 - rank, identity, args=(bytes(1 << 20),))
            rpc.rpc_sync(1 - rank, identity, args=(bytes(1 << 20),))
            rpc.shutdown()
            gc.collect()

        once()
        before = Holdings.now()
        for _ in range(3):
            once()
        until(lambda: Holdings.now().within(before))
        return os.getpid()

    run_ranks(2, body, kind="processes")
