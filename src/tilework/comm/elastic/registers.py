"""Write-once registers: each key keeps the first value written, which outlives the writer.

Agreement needs nothing but registers: the first writer of a key has decided the value, for everyone
and for good. There are no locks, so a rank that dies or is stopped holds nothing.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from abc import ABC, abstractmethod
from typing import Final

from tilework.errors import DistStoreError
from tilework.memory_files import MemoryFile
from tilework.store import Store

if sys.platform != "win32":
    import fcntl

#: A record never crosses a page of the file, so the kernel writes it whole or not at all.
RECORD_BYTES: Final = 1024
_HEADER = struct.Struct("=4sHH")
_MAGIC: Final = b"TWL1"
_MOST_BYTES: Final = RECORD_BYTES - _HEADER.size


class Registers(ABC):
    """Write-once registers: each key keeps the first value. For any thread; waits for no rank."""

    @abstractmethod
    def write(self, key: str, value: str) -> str:
        """Write ``value`` unless ``key`` has one; return the value that ``key`` has from now on."""

    @abstractmethod
    def read(self, key: str) -> str | None:
        """The value of ``key``; None if nobody has written it."""

    @abstractmethod
    def leave(self, rank: int) -> None:
        """Write that ``rank`` has left, if possible without waiting; release the registers."""


class StoreRegisters(Registers):
    """Registers in a store. They end with the store: a rank that may be lost must not serve it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, key: str, value: str) -> str:
        # compare_set takes an empty value for a missing value.
        return self._store.compare_set(key, "", f"={value}").decode()[1:]

    def leave(self, rank: int) -> None:
        """Do nothing: the store may be gone already."""

    def read(self, key: str) -> str | None:
        return self._store.get(key).decode()[1:] if self._store.check([key]) else None


class MemoryRegisters(Registers):
    """Registers in a memory file that the ranks of one host share; they own the file's descriptor.

    Each write appends a record, and the order in the file decides. The file is in append mode,
    which all descriptors share, and lives as long as one of the descriptors.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        #: Two threads that read the same record would both count it, and skip the next record.
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._values: dict[str, str] = {}

    @staticmethod
    def create() -> int:
        """The descriptor of a new, empty file; Linux only."""
        fd = MemoryFile.create("registers").fd
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        return fd

    def write(self, key: str, value: str) -> str:
        known = self.read(key)
        if known is not None:
            return known
        record = _packed(key, value)
        written = os.write(self._fd, record)
        if written != len(record):
            raise DistStoreError(
                f"there is no memory for a record of {len(record)} bytes, by which the ranks of a "
                f"host agree"
            )
        known = self.read(key)
        assert known is not None
        return known

    def read(self, key: str) -> str | None:
        with self._lock:
            size = os.fstat(self._fd).st_size
            while self._read_bytes + RECORD_BYTES <= size:
                record = os.pread(self._fd, RECORD_BYTES, self._read_bytes)
                unpacked = _unpacked(record)
                if unpacked is not None:
                    self._values.setdefault(*unpacked)
                self._read_bytes += RECORD_BYTES
            return self._values.get(key)

    def leave(self, rank: int) -> None:
        with contextlib.suppress(OSError, DistStoreError):
            os.write(self._fd, _packed(left_key(rank), ""))
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def left_key(rank: int) -> str:
    """The key of the register that is written when ``rank`` leaves the group."""
    return f"left/{rank}"


def identity_key(rank: int) -> str:
    """The register with the identity of ``rank``, which shows others whether it has ended."""
    return f"who/{rank}"


def _packed(key: str, value: str) -> bytes:
    name, data = key.encode(), value.encode()
    if len(name) + len(data) > _MOST_BYTES:
        raise ValueError(
            f"a register's key and value take {_MOST_BYTES} bytes at most, got "
            f"{len(name)} and {len(data)}"
        )
    return (_HEADER.pack(_MAGIC, len(name), len(data)) + name + data).ljust(RECORD_BYTES, b"\0")


def _unpacked(record: bytes) -> tuple[str, str] | None:
    """The key and value in a record of the file; None if the bytes are no valid record."""
    if len(record) < RECORD_BYTES:
        return None
    magic, name, data = _HEADER.unpack_from(record)
    if magic != _MAGIC or name + data > _MOST_BYTES:
        return None
    start = _HEADER.size
    try:
        key = record[start : start + name].decode()
        return key, record[start + name : start + name + data].decode()
    except UnicodeDecodeError:
        return None
