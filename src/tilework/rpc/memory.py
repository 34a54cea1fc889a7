"""Large buffers between processes of one host: written once, then mapped by who gets them.

A sender writes them into a memory file without a name (memfd), and says its number. The receiver
opens it as ``/proc/<pid>/fd/<number>``, maps it, and says so; then the sender lets go of it. What
is left is the receiver's mapping. So nothing remains of it after either is killed.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

_ALIGNMENT: Final = 64
#: Buffers from this size on are worth a file.
LEAST_BYTES: Final = 64 << 10


class Probe(NamedTuple):
    """A memory file by which others find out whether they can open this process's."""

    pid: int
    fd: int
    token: str

    def readable(self) -> bool:
        """Whether this process can open that one's files."""
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return os.pread(fd, len(self.token) + 1, 0) == self.token.encode()
        finally:
            os.close(fd)


class Lender:
    """The memory files of one rank that others have not opened yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Which rank each is for.
        self._lent: dict[int, int] = {}
        self.probe = self._make_probe()

    def _make_probe(self) -> Probe:
        token = secrets.token_hex(16)
        fd = _memory_file([token.encode()], [0])
        return Probe(os.getpid(), -1 if fd is None else fd, token)

    def lend(self, rank: int, parts: Sequence[memoryview], offsets: Sequence[int]) -> int | None:
        """A file with copies of ``parts``, for ``rank``; None where the system has no room."""
        fd = _memory_file(parts, offsets)
        if fd is not None:
            with self._lock:
                self._lent[fd] = rank
        return fd

    def taken(self, fd: int) -> None:
        """It was opened, or never will be."""
        with self._lock:
            known = self._lent.pop(fd, None)
        if known is not None:
            os.close(fd)

    def lost(self, rank: int) -> None:
        """``rank`` will open nothing any more."""
        with self._lock:
            its = [fd for fd, whose in self._lent.items() if whose == rank]
        for fd in its:
            self.taken(fd)

    def close(self) -> None:
        """Let go of all. Idempotent."""
        with self._lock:
            rest = list(self._lent)
        for fd in rest:
            self.taken(fd)
        if self.probe.fd >= 0:
            os.close(self.probe.fd)
            self.probe = self.probe._replace(fd=-1)


def place(sizes: Sequence[int]) -> list[int]:
    """Offsets in a file at which buffers of these sizes follow each other, aligned.

    Example:
        >>> place([100, 64, 1])
        [0, 128, 192]
    """
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets


def take(pid: int, fd: int, size: int) -> mmap.mmap:
    """The first ``size`` bytes of that process's file, as memory of this one's.

    Private, since a tensor must not be shared with the children that this process may fork.

    Raises:
        OSError: It cannot be opened.
    """
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(mine, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(mine)


def _memory_file(parts: Sequence[memoryview | bytes], offsets: Sequence[int]) -> int | None:
    if not hasattr(os, "memfd_create"):
        return None
    fd = -1
    try:
        fd = os.memfd_create("tilework-rpc", os.MFD_CLOEXEC)
        for part, offset in zip(parts, offsets, strict=True):
            _write(fd, memoryview(part), offset)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    return fd


def _write(fd: int, part: memoryview, offset: int) -> None:
    """Written, not copied into a mapping: the kernel need not clear the pages first."""
    done = 0
    while done < len(part):
        done += os.pwrite(fd, part[done:], offset + done)
