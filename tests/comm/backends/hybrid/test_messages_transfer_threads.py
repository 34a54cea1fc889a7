"""Waits that are left to themselves when their connection is gone."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.hybrid.messages import PointToPoint, TransferWaits


def never() -> bool:
    return False


def test_returns_and_raises_as_the_wait_does() -> None:
    before = threading.active_count()
    waits, done = TransferWaits(), []
    for i in range(3):
        waits.run(lambda i=i: done.append(i), never)  # type: ignore[misc]

    def fail() -> None:
        raise RuntimeError("as Gloo")

    error = waits.run(fail, never)
    assert str(error) == "as Gloo"
    assert done == [0, 1, 2]
    assert threading.active_count() <= before + 1  # the thread is used again
    waits.close()


def test_a_wait_that_nobody_ends_is_left() -> None:
    waits, end, done = TransferWaits(), threading.Event(), threading.Event()

    def wait() -> None:
        end.wait()
        done.set()

    assert "ended within a message" in str(waits.run(wait, lambda: True))
    assert waits.run(lambda: None, never) is None
    end.set()
    assert done.wait(120)
    waits.close()


def test_several_wait_at_a_time() -> None:
    waits, both = TransferWaits(), threading.Barrier(2)
    thread = threading.Thread(target=waits.run, args=(lambda: both.wait(120), never))
    thread.start()
    waits.run(lambda: both.wait(120), never)
    thread.join(120)
    assert not thread.is_alive()
    waits.close()


def test_errors_hold_nothing_of_the_wait() -> None:
    class Held:
        pass

    waits, held = TransferWaits(), Held()
    seen = weakref.ref(held)

    def fail(held: Held) -> None:
        raise RuntimeError("as Gloo")

    gc.disable()  # a cycle would keep it until the next collection
    try:
        error = waits.run(partial(fail, held), never)
        del held
        waits.run(lambda: None, never)  # the thread has let go of the last one
        assert seen() is None
    finally:
        gc.enable()
    assert error is not None
    waits.close()


def test_a_message_whose_data_is_on_the_way_is_known() -> None:
    """Then the receiver waits for data, for which no other rank has to do anything."""
    on_the_way = PythonCompletion()
    transport: Any = SimpleNamespace(
        rank=0,
        fetch=lambda *args: on_the_way,
        check_open=lambda: None,
        group_fault=lambda moved: None,
        wake=lambda: None,
    )
    ends = PointToPoint(transport)
    announced: list[bytes] = []
    transport.announce = lambda rank, announcement: announced.append(announcement)
    x = torch.ones(2)
    received = ends.receive(x, 1, 0, 60.0)
    assert not ends.arriving
    ends.announce(x, 0, 0)
    ends.on_announcement(1, announced[0])
    assert ends.arriving == {received}
    on_the_way.complete()
    assert not ends.arriving
    assert received.done()
