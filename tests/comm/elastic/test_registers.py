"""Registers: whoever writes first decides, also where writers die."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tilework.comm.elastic.registers import (
    RECORD_BYTES,
    MemoryRegisters,
    Registers,
    StoreRegisters,
    left_key,
)
from tilework.store import HashStore

LINUX = sys.platform.startswith("linux")


@pytest.fixture(params=["store", "memory"])
def registers(request: pytest.FixtureRequest) -> Iterator[Registers]:
    if request.param == "store":
        yield StoreRegisters(HashStore())
        return
    if not LINUX:
        pytest.skip("memory files are Linux's")
    made = MemoryRegisters(MemoryRegisters.create())
    yield made
    made.close()


def test_the_first_value_stays(registers: Registers) -> None:
    assert registers.read("k") is None
    assert registers.write("k", "first") == "first"
    assert registers.write("k", "second") == "first"
    assert registers.read("k") == "first"


def test_empty_values_are_values(registers: Registers) -> None:
    assert registers.write("k", "") == ""
    assert registers.write("k", "x") == ""
    assert registers.read("k") == ""


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_all_who_write_at_once_get_one_value() -> None:
    fd = MemoryRegisters.create()
    ends = [MemoryRegisters(os.dup(fd)) for _ in range(8)]
    values = [""] * 8

    def write(number: int) -> None:
        for key in range(50):
            values[number] += ends[number].write(str(key), str(number))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(values)) == 1
    for each in ends:
        each.close()
    os.close(fd)


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_garbage_and_torn_records_are_passed_over() -> None:
    fd = MemoryRegisters.create()
    registers = MemoryRegisters(fd)
    os.write(fd, b"\xff" * RECORD_BYTES)
    registers.write("k", "v")
    os.write(fd, b"torn")
    assert MemoryRegisters(fd).read("k") == "v"
    registers.close()


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_a_rank_that_leaves_is_known_to_have_left() -> None:
    fd = MemoryRegisters.create()
    other = MemoryRegisters(os.dup(fd))
    MemoryRegisters(fd).leave(3)
    assert other.read(left_key(3)) == ""
    other.close()


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_what_does_not_fit_is_refused() -> None:
    registers = MemoryRegisters(MemoryRegisters.create())
    with pytest.raises(ValueError, match="1016 bytes at most"):
        registers.write("k", "x" * RECORD_BYTES)
    registers.close()


@pytest.mark.skipif(not LINUX, reason="memory files are Linux's")
def test_threads_that_read_at_once_pass_over_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    registers, pread = MemoryRegisters(MemoryRegisters.create()), os.pread
    writer = MemoryRegisters(os.dup(registers._fd))
    for number in range(20):
        writer.write(str(number), "x")

    def slowly(fd: int, count: int, offset: int) -> bytes:
        record = pread(fd, count, offset)
        time.sleep(0.001)  # without Python's lock, as on a busy machine
        return record

    monkeypatch.setattr(os, "pread", slowly)
    threads = [threading.Thread(target=registers.read, args=("none",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(20, 24):
        writer.write(str(number), "x")
    assert [number for number in range(24) if registers.read(str(number)) != "x"] == []
    registers.close()
    writer.close()
