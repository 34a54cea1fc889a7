"""Queues: who gets a value, and what they refuse."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta

import pytest

from tilework.errors import DistError, DistStoreError
from tilework.store import HashStore, TCPStore, table
from tilework.store.table import Queues


def test_a_value_goes_to_who_has_waited_the_longest() -> None:
    queues, got = Queues(), []
    for name in ("first", "second"):
        queues.park(b"q", lambda value, name=name: got.append((name, value)))  # type: ignore[misc]
    queues.push(b"q", b"1")
    queues.push(b"q", b"2")
    assert got == [("first", b"1"), ("second", b"2")]


def test_a_queue_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_QUEUE_BYTES", 4)
    queues = Queues()
    queues.push(b"q", b"1234")
    with pytest.raises(DistStoreError, match="pop some first"):
        queues.push(b"q", b"1")
    queues.pop(b"q")
    queues.push(b"q", b"1")


def test_a_client_that_gave_up_gets_no_value() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as served:
        waiting = TCPStore("127.0.0.1", served.port)

        def pop() -> None:
            with contextlib.suppress(DistError):
                waiting.queue_pop("q")

        thread = threading.Thread(target=pop)
        thread.start()
        waiting.close()
        thread.join()
        served.set("k", "v")  # the server has read that the client is gone
        served.queue_push("q", "1")
        assert served.queue_pop("q", timeout=timedelta(seconds=60)) == b"1"


def test_closing_wakes_who_waits_for_a_value() -> None:
    store, errors = HashStore(), []

    def pop() -> None:
        try:
            store.queue_pop("q")
        except DistStoreError as error:
            errors.append(str(error))

    thread = threading.Thread(target=pop)
    thread.start()
    store.close()
    thread.join()
    assert "closed" in errors[0]
