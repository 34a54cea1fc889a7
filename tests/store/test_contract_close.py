"""Closing a store that others use, and views of it."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from tilework.errors import DistStoreError
from tilework.store import FileStore, HashStore, PrefixStore, Store, TCPStore, UnixStore
from tilework.store.address import TcpAddress
from tilework.store.pool import Pool
from tilework.store.wire import Code, encode
from tilework.testing.stores import Background


def make(kind: str, folder: Path) -> Store:
    if kind == "file":
        return FileStore(folder / "store")
    if kind == "tcp":
        return TCPStore("127.0.0.1", 0, is_master=True)
    if kind == "unix":
        return UnixStore(f"@tilework-test-{uuid.uuid4().hex}", is_master=True)
    return HashStore()


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "unix"])
def test_close_wakes_who_waits(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    calls = [Background(lambda: store.get("k")) for _ in range(3)]
    time.sleep(0.05)
    store.close()
    for call in calls:
        with pytest.raises(DistStoreError, match="is closed"):
            call.result()


def test_close_ends_a_request_that_connects_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = TcpAddress.connect

    def late(address: TcpAddress, seconds: float) -> socket.socket:
        sock = connect(address, seconds)
        pool.close()
        return sock

    with TCPStore("127.0.0.1", 0, is_master=True) as server:
        pool = Pool(TcpAddress("127.0.0.1", server.port), None)
        monkeypatch.setattr(TcpAddress, "connect", late)
        with pytest.raises(DistStoreError, match="is closed"):
            pool.ask(encode(Code.NUM_KEYS), 60.0)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "unix"])
def test_no_thread_is_left(kind: str, tmp_path: Path) -> None:
    before = threading.active_count()
    with make(kind, tmp_path) as store:
        store.set("k", "v")
    assert threading.active_count() == before


def test_closing_a_view_leaves_the_store() -> None:
    with HashStore() as store:
        view = PrefixStore("p", store)
        view.close()
        with pytest.raises(DistStoreError, match="is closed"):
            view.set("k", "v")
        store.set("k", "v")


def test_a_view_has_a_timeout_of_its_own() -> None:
    store = HashStore(timedelta(seconds=20))
    view = PrefixStore("p", store)
    assert view.timeout == store.timeout
    view.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(DistStoreError, match=r"^Timeout.*0\.05 s for key \['p/k'\]"):
        view.get("k")
    assert store.timeout == timedelta(seconds=20)


def test_a_view_shows_what_it_is_of() -> None:
    store = HashStore()
    view = PrefixStore("p", store)
    assert view.underlying_store is store
    assert repr(view) == "PrefixStore('p', HashStore())"


def test_a_view_needs_a_store() -> None:
    with pytest.raises(TypeError, match="needs a tilework store, got dict"):
        PrefixStore("p", {})  # type: ignore[arg-type]
