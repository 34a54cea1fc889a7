"""The shipped contract, run over every store and over views of them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch._C._distributed_c10d as c10d
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tests.store.state_machine import store_machine
from tilework.store import FileStore, HashStore, PrefixStore, Store, TCPStore, UnixStore
from tilework.store.torch_bridge import TorchStoreAdapter, as_torch_store
from tilework.testing.stores import Pair, StoreContract

SECRET = b"a secret of this test"


class TestHash(StoreContract):
    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        with HashStore() as store:
            yield store, store


class TestFile(StoreContract):
    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        with FileStore(folder / "s", 2) as first, FileStore(folder / "s", 2) as second:
            yield first, second


class TestTCP(StoreContract):
    secret: bytes | None = None
    host = "127.0.0.1"

    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        with (
            TCPStore(self.host, 0, is_master=True, secret=self.secret) as first,
            TCPStore(self.host, first.port, secret=self.secret) as second,
        ):
            yield first, second


class TestTCPv6WithSecret(TestTCP):
    host = "::1"
    secret = SECRET
    large_values = False


class TestUnixAbstract(StoreContract):
    secret: bytes | None = None

    def address(self, folder: Path) -> str:
        return f"@tilework-test-{uuid.uuid4().hex}"

    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        name = self.address(folder)
        with (
            UnixStore(name, is_master=True, secret=self.secret) as first,
            UnixStore(name, secret=self.secret) as second,
        ):
            yield first, second


class TestUnixPathWithSecret(TestUnixAbstract):
    secret = SECRET
    large_values = False

    def address(self, folder: Path) -> str:
        return str(folder / "socket")


class TestPrefixedHash(StoreContract):
    # A prefix and the longest key are longer than the longest key.
    keys = ("", "a/b")

    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        with HashStore() as store:
            yield PrefixStore("p", store), PrefixStore("p", store)


class TestPrefixedTCP(TestPrefixedHash):
    large_values = False

    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        with TestTCP().open_pair(folder) as (first, second):
            yield PrefixStore("p", PrefixStore("q", first)), PrefixStore("q/p", second)


#: Older ones' stores have none.
TORCH_HAS_QUEUES = hasattr(c10d.Store, "queue_push") and hasattr(c10d.Store, "list_keys")


class TestTorchHash(StoreContract):
    binary_updates = False
    queues = TORCH_HAS_QUEUES

    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        store = c10d.HashStore()
        with TorchStoreAdapter(store) as first, TorchStoreAdapter(store) as second:
            yield first, second


class TestTorchFile(StoreContract):
    """A torch store without append, multi_get, multi_set and queues."""

    binary_updates = False
    queues = False
    large_values = False

    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        stores = [c10d.FileStore(str(folder / "s"), 2) for _ in range(2)]
        yield TorchStoreAdapter(stores[0]), TorchStoreAdapter(stores[1])


@pytest.fixture(scope="module")
def torch_pair() -> tuple[c10d.TCPStore, c10d.TCPStore]:
    # One for all tests: making one takes torch several seconds now and then.
    first = c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return first, c10d.TCPStore("127.0.0.1", first.port, None, False)


class TestTorchTCP(StoreContract):
    keys = ("", "a/b", "é\n ")  # the longest of tilework's is too long for torch
    binary_updates = False
    queues = TORCH_HAS_QUEUES
    large_values = False

    @pytest.fixture(autouse=True)
    def _take(self, torch_pair: tuple[c10d.TCPStore, c10d.TCPStore]) -> None:
        self.stores = torch_pair

    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        prefix = uuid.uuid4().hex
        first, second = (TorchStoreAdapter(store) for store in self.stores)
        yield PrefixStore(prefix, first), PrefixStore(prefix, second)


class TestThereAndBack(StoreContract):
    """A tilework store seen as torch's, seen as tilework's."""

    binary_updates = False  # torch's Python methods take str there.

    @contextmanager
    def open_pair(self, folder: Path) -> Iterator[Pair]:
        with HashStore() as store:
            yield TorchStoreAdapter(as_torch_store(store)), store


NUMBERS = itertools.count()
TEXTS = st.text(max_size=4)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "unix", "prefix", "torch"])
def test_any_sequence_of_operations_is_that_of_a_dictionary(kind: str, tmp_path: Path) -> None:
    def make() -> HashStore | FileStore | PrefixStore | TorchStoreAdapter:
        number = next(NUMBERS)
        if kind == "file":
            return FileStore(tmp_path / f"{number}", 1)
        if kind == "torch":
            return TorchStoreAdapter(c10d.HashStore())
        if kind in ("tcp", "unix"):
            return PrefixStore(f"{number}", servers[kind])
        return PrefixStore("p", HashStore()) if kind == "prefix" else HashStore()

    servers: dict[str, Store] = {}
    if kind == "tcp":
        servers[kind] = TCPStore("127.0.0.1", 0, is_master=True)
    elif kind == "unix":
        servers[kind] = UnixStore(f"@tilework-test-{uuid.uuid4().hex}", is_master=True)
    values = TEXTS if kind == "torch" else st.binary(max_size=8) | TEXTS
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    try:
        run_state_machine_as_test(
            store_machine(make, values),
            settings=settings(
                max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=health
            ),
        )
    finally:
        for store in servers.values():
            store.close()
