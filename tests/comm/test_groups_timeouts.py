"""The c10d document's TimeoutTest and AbstractTimeoutTest."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import tilework.distributed as dist
from tests.comm.conftest import Runner


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_default_store_timeout(scheme: str, processes: Runner, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"

    def body(rank: int) -> float:
        dist.init_process_group(
            "shm", init_method=url, world_size=1, rank=0, timeout=timedelta(seconds=0.5)
        )
        store = dist.get_default_store()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="Timeout"):
            store.get("nonexistent key")
        seconds = time.monotonic() - start
        dist.destroy_process_group()
        return seconds

    [seconds] = processes(1, body)
    assert 0.45 < seconds < 20


def _stores(kind: str, path: Path, n: int) -> Callable[[int], dist.Store]:
    port, shared = free_port(), dist.HashStore()
    makers: dict[str, Callable[[int], dist.Store]] = {
        "file": lambda rank: dist.FileStore(os.fspath(path / "store"), n),
        "tcp": lambda rank: dist.TCPStore(
            "localhost", port, n, is_master=rank == 0, wait_for_workers=False
        ),
        "hash": lambda rank: shared,
    }
    return makers[kind]


@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_store_based_barrier_names_who_is_missing(kind: str, tmp_path: Path) -> None:
    n, timeout = 4, timedelta(seconds=0.4)
    make = _stores(kind, tmp_path, n)
    stores: list[dist.Store] = []
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        store = make(rank)
        stores.append(store)
        try:
            dist.store_based_barrier(rank, store, "_", n, timeout, timeout / 2)
        except dist.DistError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert len(errors) == n - 1
    for error in errors:
        assert isinstance(error, dist.DistStoreError)
        assert "Timed out initializing process group in store based barrier" in str(error)
        assert "3" in str(error)


def test_store_based_barrier_lets_everyone_through() -> None:
    store, passed = dist.HashStore(), []

    def work(rank: int) -> None:
        dist.store_based_barrier(rank, store, "_", 3, timedelta(seconds=120))
        passed.append(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(passed) == [0, 1, 2]
