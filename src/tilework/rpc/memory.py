"""Large buffers between processes of one host: written once, then mapped by who gets them.

A sender writes them into a memory file without a name (memfd), and says its number. The receiver
opens it as ``/proc/<pid>/fd/<number>`` and maps it. Files are used again, because getting memory
from the kernel costs more than the copy: a receiver that has dropped its mapping gives the file
back. There is a limit to that, beyond which the sender lets go of a file as soon as it is mapped.
Nothing remains of a file when the processes that have it are gone, however they ended.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

_ALIGNMENT: Final = 64
#: Buffers from this size on are worth a file.
LEAST_BYTES: Final = 64 << 10
#: Files that are used again: how many, of how many bytes together, kept unused for how long.
_MOST_FILES: Final = 32
_MOST_BYTES: Final = 128 << 20
_KEPT_SECONDS: Final = 2.0


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


class _File(NamedTuple):
    """A memory file that will be used again."""

    fd: int
    size: int


class SharedBufferPool:
    """The memory files of one rank: those that others have, and those that nobody has now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Which rank has each.
        self._lent: dict[int, int] = {}
        #: Those of them that will come back.
        self._returning: dict[int, _File] = {}
        #: Those that came back, oldest first, and when.
        self._unused: deque[tuple[float, _File]] = deque()
        token = secrets.token_hex(16)
        fd = _write_file(None, [memoryview(token.encode())], [0])
        self.probe = Probe(os.getpid(), -1 if fd is None else fd, token)

    def lend(
        self, rank: int, parts: Sequence[memoryview], offsets: Sequence[int]
    ) -> tuple[int, bool] | None:
        """A file with copies of ``parts``, for ``rank``.

        Returns:
            Its number, and whether ``rank`` has to give it back; None if there is no room.
        """
        size = offsets[-1] + parts[-1].nbytes
        with self._lock:
            again = self._find(size)
            room = again is not None or self._make_room(size)
        fd = _write_file(again and again.fd, parts, offsets)
        if fd is None:
            return None
        with self._lock:
            self._lent[fd] = rank
            if room:
                self._returning[fd] = again or _File(fd, size)
        return fd, room

    def _find(self, size: int) -> _File | None:
        """An unused file in which so much fits, and that is not much too large."""
        fitting = [each for each in self._unused if size <= each[1].size <= 4 * size]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: each[1].size)
        self._unused.remove(best)
        return best[1]

    def _make_room(self, size: int) -> bool:
        """Whether a new file of ``size`` is within the limits, perhaps instead of unused ones."""
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
        """It was mapped, or never will be, and is not to be used again."""
        with self._lock:
            self._returning.pop(fd, None)
            if self._lent.pop(fd, None) is not None:
                os.close(fd)

    def returned(self, fd: int) -> bool:
        """Nobody has it any more; whether ``tidy`` has something to look at for the first time."""
        with self._lock:
            file = self._returning.pop(fd, None)
            if file is None:
                return False
            del self._lent[fd]
            self._unused.append((time.monotonic(), file))
            return len(self._unused) == 1

    def lost(self, rank: int) -> None:
        """``rank`` has nothing any more."""
        with self._lock:
            its = [fd for fd, whose in self._lent.items() if whose == rank]
        for fd in its:
            self.taken(fd)

    def tidy(self) -> float:
        """Let go of files that have been unused for long; when to look again (monotonic)."""
        with self._lock:
            limit = time.monotonic() - _KEPT_SECONDS
            while self._unused and self._unused[0][0] <= limit:
                os.close(self._unused.popleft()[1].fd)
            return self._unused[0][0] + _KEPT_SECONDS if self._unused else float("inf")

    def close(self) -> None:
        """Let go of all. Idempotent."""
        with self._lock:
            numbers = [*self._lent, *(file.fd for _, file in self._unused), self.probe.fd]
            self._lent.clear()
            self._returning.clear()
            self._unused.clear()
            self.probe = self.probe._replace(fd=-1)
        for fd in numbers:
            if fd >= 0:
                os.close(fd)


class _Loan(weakref.ref[mmap.mmap]):
    """A mapping of another rank's file, which is to be given back."""

    __slots__ = ("fd", "forked", "rank")

    def __init__(self, mapping: mmap.mmap, ended: Callable[[_Loan], None]) -> None:
        super().__init__(mapping, ended)  # type: ignore[call-arg]
        self.rank, self.fd = -1, -1
        #: Whether a forked child has the mapping as well.
        self.forked = False


class MappedBuffers:
    """One rank's mappings of other ranks' files.

    Args:
        wake: Called when ``given_back`` should be; from any thread, at any time.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._loans: set[_Loan] = set()
        self._ended: deque[_Loan] = deque()
        _borrowers.add(self)

    def borrow(self, rank: int, pid: int, fd: int, size: int, returning: bool) -> mmap.mmap:
        """The first ``size`` bytes of a file of ``rank``, as memory of this one's.

        Private, since a tensor must not be shared with the children that this process may fork.

        Raises:
            OSError: It cannot be opened.
        """
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(mine, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(mine)
        if returning:
            loan = _Loan(mapping, self._end)
            loan.rank, loan.fd = rank, fd
            self._loans.add(loan)
        return mapping

    def _end(self, loan: _Loan) -> None:
        self._ended.append(loan)
        self._wake()

    def given_back(self) -> Iterator[tuple[int, int, bool]]:
        """Rank and number of each file that this rank has dropped; whether it may be used again."""
        while self._ended:
            loan = self._ended.popleft()
            self._loans.discard(loan)
            yield loan.rank, loan.fd, not loan.forked

    def fork(self) -> None:
        """A child has whatever is mapped now, and nobody will know when it drops it."""
        for loan in list(self._loans):
            loan.forked = True


_borrowers: weakref.WeakSet[MappedBuffers] = weakref.WeakSet()


def _fork() -> None:
    for borrower in list(_borrowers):
        borrower.fork()


if hasattr(os, "register_at_fork"):
    # Twice, since other threads may map something until it really happens.
    os.register_at_fork(before=_fork, after_in_parent=_fork)


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


def _write_file(fd: int | None, parts: Sequence[memoryview], offsets: Sequence[int]) -> int | None:
    """Write into the file ``fd``, or a new one; its number, None if that cannot be done."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        if fd is None:
            fd = os.memfd_create("tilework-rpc", os.MFD_CLOEXEC)
        for part, offset in zip(parts, offsets, strict=True):
            _write(fd, part, offset)
    except OSError:
        if fd is not None:
            os.close(fd)
        return None
    return fd


def _write(fd: int, part: memoryview, offset: int) -> None:
    """Written, not copied into a mapping: the kernel need not clear the pages first."""
    done = 0
    while done < len(part):
        done += os.pwrite(fd, part[done:], offset + done)
