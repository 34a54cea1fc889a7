"""Large buffers between processes of one host: written once by the sender, mapped by the receiver.

A sender writes them into a memory file without a name (memfd), and sends the number of the file.
The receiver opens it as ``/proc/<pid>/fd/<number>`` and maps it. Files up to a limit are used
again, because memory from the kernel costs more than the copy: a receiver that has dropped the
mapping gives the file back. Nothing remains of a file when the processes that have it are gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from tilework.memory_files import NO_MEMORY_FILE, MemoryFile

_ALIGNMENT: Final = 64
#: Buffers from this size on are worth a file.
LEAST_BYTES: Final = 64 << 10
#: Limits of files that are used again: their number, their bytes, seconds kept unused.
_MOST_FILES: Final = 32
_MOST_BYTES: Final = 128 << 20
_KEPT_SECONDS: Final = 2.0


class _File(NamedTuple):
    fd: int
    size: int


class SharedBufferPool:
    """The memory files that a rank has made: files that other ranks use, and unused files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By file: the rank that has it.
        self._shared: dict[int, int] = {}
        #: Those of them that will be returned.
        self._returning: dict[int, _File] = {}
        #: Those that were returned and when, oldest first.
        self._unused: deque[tuple[float, _File]] = deque()
        #: A file by which other ranks find out whether they can open this rank's files.
        self.probe = NO_MEMORY_FILE
        with contextlib.suppress(OSError):  # the system has no memory files
            self.probe = MemoryFile.create("rpc")

    def share(
        self, rank: int, parts: Sequence[memoryview], offsets: Sequence[int]
    ) -> tuple[int, bool] | None:
        """Copy ``parts`` into a file for ``rank``: the number, and True if it will be returned."""
        size = offsets[-1] + parts[-1].nbytes
        with self._lock:
            again = self._find(size)
            room = again is not None or self._make_room(size)
        fd = _write_file(again and again.fd, parts, offsets)
        if fd is None:
            return None
        with self._lock:
            self._shared[fd] = rank
            if room:
                self._returning[fd] = again or _File(fd, size)
        return fd, room

    def _find(self, size: int) -> _File | None:
        fitting = [each for each in self._unused if size <= each[1].size <= 4 * size]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: each[1].size)
        self._unused.remove(best)
        return best[1]

    def _make_room(self, size: int) -> bool:
        """True if a new file of ``size`` bytes can be kept, once unused files are closed."""
        taken = sum(file.size for file in self._returning.values())
        if len(self._returning) >= _MOST_FILES or taken + size > _MOST_BYTES:
            return False
        while self._unused and (
            len(self._returning) + len(self._unused) >= _MOST_FILES
            or taken + size + sum(file.size for _, file in self._unused) > _MOST_BYTES
        ):
            os.close(self._unused.popleft()[1].fd)
        return True

    def taken(self, fd: int) -> None:
        """Close file ``fd``: the receiver has mapped it or never will, and it is not used again."""
        with self._lock:
            self._returning.pop(fd, None)
            if self._shared.pop(fd, None) is not None:
                os.close(fd)

    def returned(self, fd: int) -> bool:
        """Keep a file for later messages; True if it is the only unused file (see :meth:`tidy`)."""
        with self._lock:
            file = self._returning.pop(fd, None)
            if file is None:
                return False
            del self._shared[fd]
            self._unused.append((time.monotonic(), file))
            return len(self._unused) == 1

    def lost(self, rank: int) -> None:
        with self._lock:
            files = [fd for fd, holder in self._shared.items() if holder == rank]
        for fd in files:
            self.taken(fd)

    def tidy(self) -> float:
        """Close files unused for two seconds; the monotonic time at which to call this again."""
        with self._lock:
            limit = time.monotonic() - _KEPT_SECONDS
            while self._unused and self._unused[0][0] <= limit:
                os.close(self._unused.popleft()[1].fd)
            return self._unused[0][0] + _KEPT_SECONDS if self._unused else float("inf")

    def close(self) -> None:
        with self._lock:
            numbers = [*self._shared, *(file.fd for _, file in self._unused), self.probe.fd]
            self._shared.clear()
            self._returning.clear()
            self._unused.clear()
            self.probe = NO_MEMORY_FILE
        for fd in numbers:
            if fd >= 0:
                os.close(fd)


class _Mapping(weakref.ref[mmap.mmap]):
    """A weak reference to a mapping of another rank's file; says when the file can be returned."""

    __slots__ = ("fd", "forked", "rank")

    def __init__(self, memory: mmap.mmap, ended: Callable[[_Mapping], None]) -> None:
        super().__init__(memory, ended)  # type: ignore[call-arg]
        self.rank, self.fd = -1, -1
        #: True if a forked child has the mapping as well.
        self.forked = False


class MappedBuffers:
    """The mappings on this rank of other ranks' files that must be returned.

    ``wake`` is called when :meth:`released` has something to report; from any thread, at any time.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._mappings: set[_Mapping] = set()
        self._ended: deque[_Mapping] = deque()
        _all_mapped.add(self)

    def map(self, rank: int, pid: int, fd: int, size: int, returning: bool) -> mmap.mmap:
        """Map a file of process ``pid``, ``rank``; ``returning``: to be returned when dropped.

        The mapping is private (copy-on-write), since a tensor must not be shared with children that
        this process may fork.
        """
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(own_fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(own_fd)
        if returning:
            mapping = _Mapping(memory, self._end)
            mapping.rank, mapping.fd = rank, fd
            self._mappings.add(mapping)
        return memory

    def _end(self, mapping: _Mapping) -> None:
        self._ended.append(mapping)
        self._wake()

    def released(self) -> Iterator[tuple[int, int, bool]]:
        """Owner and file of each dropped mapping, once; and True if the file may be used again."""
        while self._ended:
            mapping = self._ended.popleft()
            self._mappings.discard(mapping)
            yield mapping.rank, mapping.fd, not mapping.forked

    def fork(self) -> None:
        """Note that a forked child has all mappings, too: the files must not be used again."""
        for mapping in list(self._mappings):
            mapping.forked = True


_all_mapped: weakref.WeakSet[MappedBuffers] = weakref.WeakSet()


def _fork() -> None:
    for buffers in list(_all_mapped):
        buffers.fork()


if hasattr(os, "register_at_fork"):
    # Twice, since other threads may map something until it really happens.
    os.register_at_fork(before=_fork, after_in_parent=_fork)


def place(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets in a file at which buffers of these sizes follow each other."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets


def _write_file(fd: int | None, parts: Sequence[memoryview], offsets: Sequence[int]) -> int | None:
    try:
        fd = MemoryFile.create("rpc").fd if fd is None else fd
        for part, offset in zip(parts, offsets, strict=True):
            done = 0
            while done < len(part):  # a mapping would be slower: the kernel clears pages first
                done += os.pwrite(fd, part[done:], offset + done)
    except OSError:
        if fd is not None:
            os.close(fd)
        return None
    return fd
