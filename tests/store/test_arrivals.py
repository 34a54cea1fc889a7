"""A store knows who came to it and has ended since, though nobody said who it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.forked_ranks import ForkedRanks, Say
from tilework.errors import StoreTimeoutError
from tilework.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from tilework.store.arrivals import Arrivals

KINDS = ["file", "tcp"]


def maker(kind: str, folder: Path) -> tuple[Store, Callable[[], Store]]:
    """A first store for three, and how to make the others."""
    if kind == "file":
        return FileStore(folder / "store", 3), lambda: FileStore(folder / "store", 3)
    first = TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    return first, lambda: TCPStore("127.0.0.1", first.port, 3)


def settled(store: Store, lost: int) -> Arrivals:
    """The arrivals once so many are lost, or after some seconds."""
    deadline = time.monotonic() + 60
    while True:
        arrivals = store.arrivals()
        assert arrivals is not None
        if len(arrivals.lost) >= lost or time.monotonic() > deadline:
            return arrivals
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_those_that_end_without_closing_are_lost(kind: str, tmp_path: Path) -> None:
    first, make = maker(kind, tmp_path)

    def story(rank: int, say: Say) -> None:
        store = make()
        say(store.arrival_name)
        if rank == 1:
            os.execvp("sleep", ["sleep", "30"])
        time.sleep(30)

    with first, ForkedRanks(2, story) as ranks:
        names = {rank.hear() for rank in ranks}
        ranks[0].kill(signal.SIGKILL)
        assert settled(first, 2) == Arrivals(3, 3, frozenset(names))
        ranks[1].kill()


@pytest.mark.parametrize("kind", KINDS)
def test_those_that_close_are_not_missed(kind: str, tmp_path: Path) -> None:
    first, make = maker(kind, tmp_path)
    with first:
        with make() as second:
            assert second.arrival_name not in ("", first.arrival_name)
        assert first.arrivals() == Arrivals(3, 2, frozenset())
        assert PrefixStore("view", first).arrivals() == first.arrivals()


def test_how_many_come_may_not_be_known(tmp_path: Path) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        assert store.arrivals() is None
    with FileStore(tmp_path / "store") as file:
        assert file.arrivals() == Arrivals(0, 1, frozenset())
    assert HashStore().arrivals() is None


def test_a_master_that_gives_up_stays_until_its_workers_have_heard() -> None:
    error = StoreTimeoutError("Timeout: 2 came")
    with (
        TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False) as master,
        TCPStore("127.0.0.1", master.port, 3) as worker,
    ):
        leaving = threading.Thread(target=master._give_up, args=(error, 2))
        leaving.start()
        deadline = time.monotonic() + 60
        while (arrivals := worker.arrivals()) and not arrivals.given_up:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert arrivals is not None
        assert arrivals.given_up == "Timeout: 2 came"
        leaving.join()
        assert worker.get("tilework/heard-master").decode().split() == [worker.arrival_name]
