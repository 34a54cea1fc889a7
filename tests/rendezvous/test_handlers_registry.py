"""URLs: what they may say, how they are served, who registers schemes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.tables import each
from tilework.errors import DistNetworkError, DistStoreError
from tilework.rendezvous import handlers, register_rendezvous_handler, rendezvous
from tilework.store import FileStore, HashStore, Store, StoreServer, TCPStore, UnixStore
from tilework.testing.stores import Background

Meeting = tuple[Store, int, int]
SHORT = timedelta(seconds=0.3)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_SECRET", raising=False)


@pytest.fixture
def free_port() -> int:
    with StoreServer.listen_tcp("127.0.0.1", 0) as server:
        return server.port


def meet(url: str, **arguments: Any) -> list[Meeting]:
    """Both of two ranks at ``url``."""
    calls = [
        Background(lambda rank=rank: next(rendezvous(url, rank, 2, **arguments)))  # type: ignore[misc]
        for rank in range(2)
    ]
    meetings: list[Meeting] = [call.result() for call in calls]
    return meetings


def check_and_close(meetings: list[Meeting], kind: type[Store]) -> None:
    """They are ranks 0 and 1 of 2, and their stores are one."""
    assert [(rank, size) for _, rank, size in meetings] == [(0, 2), (1, 2)]
    assert all(isinstance(store, kind) for store, _, _ in meetings)
    meetings[0][0].set("k", "v")
    assert meetings[1][0].get("k") == b"v"
    for store, _, _ in reversed(meetings):
        store.close()


def test_tcp(free_port: int) -> None:
    check_and_close(meet(f"tcp://127.0.0.1:{free_port}"), TCPStore)


def test_tcp_over_ipv6() -> None:
    with StoreServer.listen_tcp("::1", 0) as server:
        port = server.port
    check_and_close(meet(f"tcp://[::1]:{port}"), TCPStore)


def test_tcp_with_a_secret(free_port: int) -> None:
    meetings = meet(f"tcp://127.0.0.1:{free_port}", secret=b"secret")
    with pytest.raises(DistNetworkError, match="requires the job's secret"):
        next(rendezvous(f"tcp://127.0.0.1:{free_port}", 1, 2))
    check_and_close(meetings, TCPStore)


def test_the_secret_is_taken_from_the_environment(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWORK_SECRET", "00ff" * 8)
    meetings = meet(f"tcp://127.0.0.1:{free_port}")
    assert all(store.authenticated for store, _, _ in meetings)
    check_and_close(meetings, TCPStore)


def test_unix(tmp_path: Path) -> None:
    check_and_close(meet(f"unix:@tilework-test-{uuid.uuid4().hex}"), UnixStore)
    check_and_close(meet(f"unix:{tmp_path}/socket"), UnixStore)


def test_file(tmp_path: Path) -> None:
    check_and_close(meet(f"file://{tmp_path}/a%20store"), FileStore)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_empty_file(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    check_and_close(meet(f"file://{tmp_path}/store"), FileStore)


def test_rank_and_world_size_may_be_in_the_url(free_port: int) -> None:
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{free_port}?rank=0&world_size=1"))
    assert (rank, size) == (0, 1)
    store.close()


def test_the_timeout_is_the_stores(tmp_path: Path) -> None:
    store, _, _ = next(rendezvous(f"file://{tmp_path}/store", 0, 1, timeout=SHORT))
    with store, pytest.raises(DistStoreError, match=r"^Timeout.*0\.3 s"):
        store.get("absent")


def test_nobody_serves(free_port: int) -> None:
    with pytest.raises(DistNetworkError, match=rf"^Timeout.*{free_port}.*0\.3 s"):
        next(rendezvous(f"tcp://127.0.0.1:{free_port}", 1, 2, timeout=SHORT))


def test_there_is_one_meeting_per_rendezvous(tmp_path: Path) -> None:
    meetings = list(rendezvous(f"file://{tmp_path}/store", 0, 1))
    assert len(meetings) == 1
    meetings[0][0].close()


@each(
    ("url", "arguments", "match"),
    [
        ("tcp://127.0.0.1", {"rank": 0, "world_size": 1}, "expected tcp://host:port"),
        ("tcp://:29500", {"rank": 0, "world_size": 1}, "expected tcp://host:port"),
        ("tcp://127.0.0.1:99999", {"rank": 0, "world_size": 1}, "expected tcp://host:port"),
        ("tcp://127.0.0.1:x", {"rank": 0, "world_size": 1}, "expected tcp://host:port"),
        ("tcp://127.0.0.1:1/path", {"rank": 0, "world_size": 1}, "expected tcp://host:port"),
        ("tcp://127.0.0.1:1", {"world_size": 1}, "needs a rank: pass rank="),
        ("tcp://127.0.0.1:1", {"rank": 0}, "needs a world_size: pass world_size="),
        ("file://host/path", {"rank": 0, "world_size": 1}, "three slashes"),
        ("file:", {"rank": 0, "world_size": 1}, "three slashes"),
        ("file:///path", {"rank": 0}, "needs a world_size"),
        ("unix:name", {"rank": 0, "world_size": 1}, "expected unix:@name or unix:/path"),
        ("env://host", {}, "nothing but a query"),
        ("tcp://h:1?rank=0", {"rank": 1}, "says rank=0, the argument says rank=1"),
        ("tcp://h:1?world_size=3", {"world_size": 2}, "says world_size=3, the argument"),
        ("tcp://h:1?rank=0&rank=0", {}, "gives rank twice"),
        ("tcp://h:1?rank=x", {}, "rank in .* must be an integer, got 'x'"),
        ("tcp://h:1?rank=-3", {}, "rank must be at least 0, got -3"),
        ("tcp://h:1?rank", {}, "must look like"),
        ("tcp://h:1?color=red", {}, "unknown arguments color"),
        ("tcp://h:1", {"rank": 2, "world_size": 2}, "less than world_size, got rank 2 of 2"),
        ("tcp://h:1", {"rank": -2, "world_size": 2}, "rank must be at least 0, got -2"),
        ("tcp://h:1", {"rank": 0, "world_size": 0}, "world_size must be at least 1, got 0"),
        ("nowhere://x", {}, r"nowhere://.*known are env://, file://, tcp://, unix://"),
        ("no url", {}, "has no scheme"),
        ("tcp://[::1", {}, "is not a URL"),
        ("env://", {"timeout": timedelta(0)}, "timeout must be positive"),
    ],
)
def test_wrong_urls_and_arguments(url: str, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        next(rendezvous(url, **arguments))


@each(
    ("arguments", "match"),
    [
        ({"url": 1}, "URL must be a str, got int"),
        ({"url": "env://", "rank": "0"}, "rank must be an integer, got '0'"),
        ({"url": "env://", "world_size": 1.0}, "world_size must be an integer"),
        ({"url": "env://", "timeout": 5}, "timedelta"),
        ({"url": "env://", "unknown": 5}, "unexpected keyword argument 'unknown'"),
    ],
)
def test_wrong_types(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        next(rendezvous(**arguments))


# Schemes of one's own.


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(handlers, "_handlers", dict(handlers._handlers))
    return "mine"


def test_a_handler_gets_what_was_given(scheme: str) -> None:
    heard = []

    def handler(url: str, timeout: timedelta, **rest: Any) -> Iterator[Meeting]:
        heard.append((url, timeout, rest))
        yield HashStore(), 3, 5

    register_rendezvous_handler(scheme, handler)
    _, rank, size = next(rendezvous("mine://place?color=red", 3, 5, SHORT, extra=1))
    assert (rank, size) == (3, 5)
    assert heard == [("mine://place?color=red&rank=3&world_size=5", SHORT, {"extra": 1})]


def test_a_bare_url_reaches_the_handler_as_it_is(scheme: str) -> None:
    heard = []

    def handler(url: str, **_: Any) -> Iterator[Meeting]:
        heard.append(url)
        yield HashStore(), 0, 1

    register_rendezvous_handler(scheme.upper(), handler)
    next(rendezvous("mine://"))
    assert heard == ["mine://"]


def test_a_scheme_has_one_handler(scheme: str) -> None:
    with pytest.raises(ValueError, match="env:// is registered already"):
        register_rendezvous_handler("env", lambda url: iter(()))


@pytest.mark.parametrize("name", ["", "a://", "1a", "a b", "é"])
def test_what_is_no_scheme(scheme: str, name: str) -> None:
    with pytest.raises(ValueError, match="scheme must be"):
        register_rendezvous_handler(name, lambda url: iter(()))


def test_a_handler_is_callable(scheme: str) -> None:
    bad: Callable[..., Iterator[Meeting]] = "handler"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="callable"):
        register_rendezvous_handler(scheme, bad)
