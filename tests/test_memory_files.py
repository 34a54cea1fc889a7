"""Memory files that other processes open, and take for no others."""

from __future__ import annotations

import os

import pytest

from tilework.memory_files import NO_MEMORY_FILE, MemoryFile

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has memory files")


def test_a_file_is_opened_by_what_is_told_of_it() -> None:
    made = MemoryFile.create("test")
    opened = MemoryFile(*made).open(os.O_RDWR)
    os.pwrite(opened, b"here", 0)
    assert os.pread(made.fd, 4, 0) == b"here"
    assert made.is_reachable()
    os.close(made.fd)
    assert not made.is_reachable()
    os.close(opened)


def test_another_file_of_the_number_is_not_taken_for_it() -> None:
    made = MemoryFile.create("test")
    before = len(os.listdir("/proc/self/fd"))
    assert made._replace(name=made.name[:-1] + "x").open(os.O_RDONLY) == -1
    assert NO_MEMORY_FILE.open(os.O_RDONLY) == -1
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(made.fd)
