"""Ledgers: whoever writes first decides, also where writers die."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tilework.comm.elastic.registers import (
    RECORD_BYTES,
    Ledger,
    MemoryLedger,
    StoreLedger,
    left_key,
)
from tilework.store import HashStore

LINUX = sys.platform.startswith("linux")


@pytest.fixture(params=["store", "memory"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    if request.param == "store":
        yield StoreLedger(HashStore())
        return
    if not LINUX:
        pytest.skip("memory files are Linux's")
    made = MemoryLedger(MemoryLedger.create())
    yield made
    made.close()


def test_the_first_value_stays(ledger: Ledger) -> None:
    assert ledger.read("k") is None
    assert ledger.write("k", "first") == "first"
    assert ledger.write("k", "second") == "first"
    assert ledger.read("k") == "first"


def test_empty_values_are_values(ledger: Ledger) -> None:
    assert ledger.write("k", "") == ""
    assert ledger.write("k", "x") == ""
    assert ledger.read("k") == ""


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_all_who_write_at_once_get_one_value() -> None:
    fd = MemoryLedger.create()
    ledgers = [MemoryLedger(os.dup(fd)) for _ in range(8)]
    values = [""] * 8

    def write(number: int) -> None:
        for key in range(50):
            values[number] += ledgers[number].write(str(key), str(number))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(values)) == 1
    for each in ledgers:
        each.close()
    os.close(fd)


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_garbage_and_torn_records_are_passed_over() -> None:
    fd = MemoryLedger.create()
    ledger = MemoryLedger(fd)
    os.write(fd, b"\xff" * RECORD_BYTES)
    ledger.write("k", "v")
    os.write(fd, b"torn")
    assert MemoryLedger(fd).read("k") == "v"
    ledger.close()


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_a_rank_that_leaves_is_known_to_have_left() -> None:
    fd = MemoryLedger.create()
    other = MemoryLedger(os.dup(fd))
    MemoryLedger(fd).leave(3)
    assert other.read(left_key(3)) == ""
    other.close()


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_what_does_not_fit_is_refused() -> None:
    ledger = MemoryLedger(MemoryLedger.create())
    with pytest.raises(ValueError, match="1016 bytes at most"):
        ledger.write("k", "x" * RECORD_BYTES)
    ledger.close()


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_threads_that_read_at_once_pass_over_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, pread = MemoryLedger(MemoryLedger.create()), os.pread
    writer = MemoryLedger(os.dup(ledger._fd))
    for number in range(20):
        writer.write(str(number), "x")

    def slowly(fd: int, count: int, offset: int) -> bytes:
        record = pread(fd, count, offset)
        time.sleep(0.001)  # without Python's lock, as on a busy machine
        return record

    monkeypatch.setattr(os, "pread", slowly)
    threads = [threading.Thread(target=ledger.read, args=("none",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(20, 24):
        writer.write(str(number), "x")
    assert [number for number in range(24) if ledger.read(str(number)) != "x"] == []
    ledger.close()
    writer.close()
