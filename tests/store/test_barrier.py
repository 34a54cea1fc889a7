"""store_based_barrier, as the ranks of one group use it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

import pytest

from tests.store.client_process import process
from tilework.errors import DistError, DistNetworkError, DistStoreError
from tilework.store import FileStore, HashStore, Store, TCPStore, store_based_barrier
from tilework.store.internal import Barrier
from tilework.testing.stores import Background

TIMED_OUT = "Timed out initializing process group in store based barrier"
LIMIT = timedelta(seconds=0.5)
#: For those that come: not at once on a busy machine.
PATIENT = timedelta(seconds=120)


def three_of_four(store_of: Callable[[int], Store]) -> list[str]:
    """What ranks 0 to 2 of 4 hear."""

    def rank(number: int) -> str | None:
        store = store_of(number)
        try:
            store_based_barrier(number, store, "_", 4, 4 * LIMIT, LIMIT)
        except DistError as error:
            return f"{type(error).__name__}: {error.args[0]}"
        return None

    calls = [Background(lambda n=n: rank(n)) for n in range(3)]  # type: ignore[misc]
    return [error for call in calls if (error := call.result())]


@pytest.mark.parametrize("kind", ["file", "tcp", "hash", "one hash each"])
def test_every_rank_that_came_raises(kind: str, tmp_path: Path) -> None:
    shared = HashStore()
    master = TCPStore("localhost", 0, 4, is_master=True, wait_for_workers=False)

    def store_of(rank: int) -> Store:
        if kind == "file":
            return FileStore(tmp_path / "store")
        if kind == "tcp":
            return TCPStore("localhost", master.port, 4)
        return shared if kind == "hash" else HashStore()

    with master:
        errors = three_of_four(store_of)
    assert len(errors) == 3
    assert all(f"DistStoreError: {TIMED_OUT}" in error for error in errors)
    missing = r"missing rank 3\b" if kind != "one hash each" else "1 of 4 ranks came"
    assert all(re.search(missing, error) for error in errors)


def test_ranks_of_any_numbers_meet() -> None:
    store = HashStore()
    calls = [
        Background(lambda r=r: store_based_barrier(r, store, "g", 2, PATIENT))  # type: ignore[misc]
        for r in (5, 9)
    ]
    assert [call.result() for call in calls] == [None, None]


def test_who_is_missing_of_given_ranks() -> None:
    with pytest.raises(DistStoreError, match=r"missing ranks 7, 9\b"):
        store_based_barrier(5, HashStore(), "g", 3, LIMIT / 5, ranks=[5, 7, 9])


def test_unknown_numbers_are_not_guessed() -> None:
    with pytest.raises(DistStoreError, match=r"1 of 2 ranks came: 5\."):
        store_based_barrier(5, HashStore(), "g", 2, LIMIT / 5)


def test_two_processes_with_one_rank_are_pointed_out() -> None:
    store = HashStore()
    other = Background(lambda: store_based_barrier(0, store, "g", 2, 4 * LIMIT))
    while not store.num_keys():
        time.sleep(0.01)
    with pytest.raises(DistStoreError, match=r"more than once: 0 \(do two processes"):
        store_based_barrier(0, store, "g", 2, LIMIT)
    with pytest.raises(DistStoreError, match=TIMED_OUT):
        other.result()


def test_a_rank_that_was_late_can_try_again() -> None:
    store = HashStore()
    with pytest.raises(DistStoreError, match=TIMED_OUT):
        store_based_barrier(0, store, "g", 2, LIMIT / 10)
    other = Background(lambda: store_based_barrier(1, store, "g", 2, PATIENT))
    store_based_barrier(0, store, "g", 2, PATIENT)
    assert other.result() is None


def test_names_are_apart() -> None:
    store = HashStore()
    store_based_barrier(0, store, "a", 1, PATIENT)
    with pytest.raises(DistStoreError, match="'b'"):
        store_based_barrier(0, store, "b", 2, LIMIT / 10)


def test_who_is_missing_is_logged_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "tilework"),
        pytest.raises(DistStoreError, match=TIMED_OUT),
    ):
        store_based_barrier(0, HashStore(), "g", 3, LIMIT, LIMIT / 5)
    assert "1 of 3 ranks came, missing ranks 1, 2" in caplog.text


def test_many_missing_ranks_are_counted() -> None:
    with pytest.raises(DistStoreError, match=r"missing ranks 1, 2,.*16, … and 83 more"):
        store_based_barrier(0, HashStore(), "g", 100, LIMIT / 10)


def test_the_servers_death_ends_the_wait() -> None:
    program = """
        server = StoreServer.listen_tcp("127.0.0.1", 0)
        server.start()
        print(server.port, flush=True)
        time.sleep(60)
    """
    with process(program) as server, TCPStore("127.0.0.1", int(server.line())) as store:
        call = Background(lambda: store_based_barrier(0, store, "g", 2, timedelta(seconds=120)))
        server.kill()
        with pytest.raises(DistNetworkError, match="is gone"):
            call.result()


def test_who_waits_looks_for_reasons_not_to() -> None:
    def reason(missing: Collection[int]) -> None:
        raise RuntimeError(f"it is of no use to wait for {missing}")

    with pytest.raises(RuntimeError, match=r"of no use to wait for \[1\]"):
        store_based_barrier(0, HashStore(), "g", 2, timedelta(minutes=10), meanwhile=reason)
    store_based_barrier(0, HashStore(), "g", 1, PATIENT, meanwhile=reason)


def test_what_ranks_read_is_linear_in_the_ranks() -> None:
    class Counting(HashStore):
        read = 0

        def get(self, key: str, timeout: timedelta | None = None) -> bytes:
            value = super().get(key, timeout)
            self.read += len(value)
            return value

    def bytes_of(size: int) -> int:
        with Counting() as store:
            calls = [Barrier(store, "g", size) for _ in range(size)]
            came = [call.arrive(rank) and call.complete() for rank, call in enumerate(calls)]
            assert came == [False] * (size - 1) + [True]
            assert all(call.wait(60) for call in calls[:-1])
            return store.read

    assert bytes_of(400) < 3 * bytes_of(200)
