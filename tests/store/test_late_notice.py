"""The line on stderr of who waits for a key that nobody sets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tilework.errors import StoreTimeoutError
from tilework.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from tilework.store.late_notice import LATE_VARIABLE

STORES: dict[str, Callable[[Path], Store]] = {
    "HashStore": lambda folder: HashStore(),
    "FileStore": lambda folder: FileStore(str(folder / "file")),
    "TCPStore": lambda folder: TCPStore("127.0.0.1", 0, is_master=True),
    "prefix": lambda folder: PrefixStore("a", HashStore()),
}
SHORT = timedelta(seconds=0.5)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return STORES[request.param](tmp_path)


def test_a_line_names_the_keys(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LATE_VARIABLE, "0.05")
    with store:
        for wait in (
            lambda: store.get("absent", SHORT),
            lambda: store.wait(["absent", "too"], SHORT),
        ):
            with pytest.raises(StoreTimeoutError, match="absent"):
                wait()
            line = capfd.readouterr().err.splitlines()[0]
            assert "this rank waits for" in line
            assert "absent'" in line


def test_what_comes_late_is_still_got(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LATE_VARIABLE, "0.05")
    with store:
        timer = threading.Timer(0.5, lambda: store.set("key", "value"))
        timer.start()
        assert store.get("key", timedelta(seconds=120)) == b"value"
        timer.join()
    assert "key'" in capfd.readouterr().err


def test_without_a_line(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LATE_VARIABLE, "0")
    with store, pytest.raises(StoreTimeoutError):
        store.get("absent", timedelta(seconds=0.1))
    assert capfd.readouterr().err == ""
