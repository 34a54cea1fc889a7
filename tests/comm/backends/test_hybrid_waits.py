"""Waits that are left to themselves when their connection is gone."""

from __future__ import annotations

import threading

import pytest

from tilework.comm.backends.hybrid_waits import TransferWaits


def never() -> bool:
    return False


def test_returns_and_raises_as_the_wait_does() -> None:
    waits, done, before = TransferWaits(), [], threading.active_count()
    for i in range(3):
        waits.run(lambda i=i: done.append(i), never)  # type: ignore[misc]

    def fail() -> None:
        raise RuntimeError("as Gloo")

    with pytest.raises(RuntimeError, match="as Gloo"):
        waits.run(fail, never)
    assert done == [0, 1, 2]
    assert threading.active_count() <= before + 1  # the thread is used again
    waits.close()


def test_a_wait_that_nobody_ends_is_left() -> None:
    waits, end, done = TransferWaits(), threading.Event(), threading.Event()

    def wait() -> None:
        end.wait()
        done.set()

    with pytest.raises(RuntimeError, match="ended within a message"):
        waits.run(wait, lambda: True)
    waits.run(lambda: None, never)
    end.set()
    assert done.wait(30)
    waits.close()


def test_several_wait_at_a_time() -> None:
    waits, both = TransferWaits(), threading.Barrier(2)
    thread = threading.Thread(target=waits.run, args=(lambda: both.wait(30), never))
    thread.start()
    waits.run(lambda: both.wait(30), never)
    thread.join(30)
    assert not thread.is_alive()
    waits.close()
