"""Reads of parts of local files, done by the core many at a time.

One call of the core for a list of many short reads is cheaper than a call for each read: between
two calls Python would run, whose memory has left the CPU's caches by then.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.checkpoint.format import Index
from tilework.checkpoint.memory import Runs, address_of
from tilework.checkpoint.saved import Part, SavedTensor
from tilework.errors import CheckpointError

try:
    from tilework import _core
except ImportError:  # installed without the core
    _core = None  # type: ignore[assignment]

#: The bytes read by one call of the core: signals and progress come between calls.
CALL_BYTES = 64 << 20


class CoreRead(NamedTuple):
    """A read of whole chunks of a part, for some wanted bytes.

    Args:
        tensor: The tensor.
        part: The part.
        runs: The wanted bytes of the part, and the places in memory to write them to.
        reach: The bytes of the part to read: from the first chunk's begin to the last chunk's end.
        counted: The bytes to report as progress.
    """

    tensor: SavedTensor
    part: Part
    runs: Runs
    reach: tuple[int, int]
    counted: int = 0


@dataclass
class CoreReads:
    """A list of reads, which the core does at the latest in :meth:`run`.

    Args:
        index: The index of the checkpoint.
        descriptor: Opens a part's file, and returns the file descriptor.
        where: Returns the full name of a file, for messages.
        damaged: Makes the error for a chunk of a part, given the wrong checksum that was found, or
            None if the file ends too early.
        tell: Called with the number of bytes that were read, for progress.
    """

    index: Index
    descriptor: Callable[[Part], int]
    where: Callable[[str], str]
    damaged: Callable[[SavedTensor, Part, int, int | None], CheckpointError]
    tell: Callable[[int], None]
    #: The memory to which shares in checksums are added: uint32.
    shares: memoryview = field(default_factory=lambda: memoryview(b""))

    def __post_init__(self) -> None:
        self._core = _core.FileReader()
        self._checked: list[tuple[int, int, int, Runs, int, int, bytes, bytes]] = []
        self._shared: list[tuple[int, int, int, Runs, int, int, int]] = []
        #: The read of each, and the bytes to report.
        self._of_checked: list[tuple[CoreRead, int]] = []
        self._of_shared: list[tuple[CoreRead, int]] = []
        self._nbytes = 0

    def add_checked(self, read: CoreRead, checked: bytes) -> None:
        """List a read that checks the chunks whose byte in ``checked`` is not 0."""
        part, descriptor = read.part, self.descriptor(read.part)
        sums = array("I", part.crc32).tobytes()
        for at, stop in self._calls(read):
            self._checked.append(
                (descriptor, part.offset, part.nbytes, read.runs, at, stop, sums, checked)
            )
            self._note(self._of_checked, read, at, stop)

    def add_shared(self, read: CoreRead, place: int) -> None:
        """List a read that compares nothing.

        It adds the shares that the wanted bytes have in the part's checksums to ``shares``, from
        the number ``place`` on.
        """
        part, descriptor = read.part, self.descriptor(read.part)
        begin, end = read.reach
        if end - begin <= CALL_BYTES:  # the usual case
            self._shared.append(
                (descriptor, part.offset, part.nbytes, read.runs, begin, end, place)
            )
            self._count(self._of_shared, read, read.counted)
            return
        for at, stop in self._calls(read):
            self._shared.append((descriptor, part.offset, part.nbytes, read.runs, at, stop, place))
            self._note(self._of_shared, read, at, stop)

    def run(self) -> None:
        """Do the listed reads that are not done yet.

        Raises:
            CheckpointError: Bytes are damaged. Reads after them are not done.
            OSError: The system cannot read a file; it names the file.
        """
        checked, of_checked = self._checked, self._of_checked
        shared, of_shared = self._shared, self._of_shared
        self._checked, self._of_checked, self._shared, self._of_shared = [], [], [], []
        self._nbytes = 0
        chunk = self.index.chunk_bytes
        if checked:
            self._finish(self._core.read(checked, chunk), of_checked)
        if shared:
            place, count = address_of(self.shares), len(self.shares)
            self._finish(self._core.read_shares(shared, chunk, place, count), of_shared)

    def _calls(self, read: CoreRead) -> list[tuple[int, int]]:
        """The bytes to read, cut between chunks into a range for each call of the core."""
        begin, end = read.reach
        if end - begin <= CALL_BYTES:
            return [read.reach]
        chunk = self.index.chunk_bytes
        step = max(1, CALL_BYTES // chunk) * chunk
        return [(at, min(at + step, end)) for at in range(begin, end, step)]

    def _note(self, notes: list[tuple[CoreRead, int]], read: CoreRead, at: int, stop: int) -> None:
        nbytes = share_of(read.counted, read.reach, at, stop)
        self._count(notes, read, nbytes, stop - at)

    def _count(
        self, notes: list[tuple[CoreRead, int]], read: CoreRead, nbytes: int, most: int = 0
    ) -> None:
        notes.append((read, nbytes))
        self._nbytes += nbytes or most
        if self._nbytes >= CALL_BYTES:
            self.run()

    def _finish(
        self, wrong: tuple[int, int, int | None, int] | None, notes: list[tuple[CoreRead, int]]
    ) -> None:
        if wrong is None:
            self.tell(sum(nbytes for _, nbytes in notes))
            return
        number, chunk, found, error = wrong
        read = notes[number][0]
        if error:
            raise OSError(error, os.strerror(error), self.where(read.part.file))
        raise self.damaged(read.tensor, read.part, chunk, found)


def share_of(counted: int, reach: tuple[int, int], at: int, stop: int) -> int:
    """The number of ``counted`` bytes in ``at`` to ``stop``, if spread evenly over the reach.

    Example:
        >>> share_of(100, (0, 10), 0, 5), share_of(100, (0, 10), 5, 20)
        (50, 50)
    """
    begin, end = reach
    start, stop, length = max(at, begin), min(stop, end), end - begin
    return counted * (stop - begin) // length - counted * (start - begin) // length
