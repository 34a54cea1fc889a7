"""Reads of parts of local files, done by the core many at a time.

Between two calls of the core Python runs, whose memory has left the caches by then: many short
reads are cheaper as a list.
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
        runs: The wanted bytes, and their places.
        reach: The begin of the first chunk in the part, and the end of the last.
        counted: The bytes to report as progress.
    """

    tensor: SavedTensor
    part: Part
    runs: Runs
    reach: tuple[int, int]
    counted: int = 0


@dataclass
class CoreReads:
    """Reads for the core; :meth:`run` does the remaining ones.

    Args:
        index: The index of the checkpoint.
        descriptor: Opens a part's file.
        where: The full name of a file.
        damaged: The error for a chunk with another checksum, None where the file ends.
        tell: Called for bytes that are read.
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
        """Read, and compare the checksums of chunks whose byte in ``checked`` is not 0."""
        part, descriptor = read.part, self.descriptor(read.part)
        sums = array("I", part.crc32).tobytes()
        for at, stop in self._calls(read):
            self._checked.append(
                (descriptor, part.offset, part.nbytes, read.runs, at, stop, sums, checked)
            )
            self._note(self._of_checked, read, at, stop)

    def add_shared(self, read: CoreRead, place: int) -> None:
        """Read wanted bytes, and add their shares in the part's checksums from ``place`` on."""
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
        """Do the remaining reads.

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
        """The ranges of chunks to read at once."""
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
    """The share of ``counted`` bytes, spread evenly over a reach, in ``at`` to ``stop``.

    Example:
        >>> share_of(100, (0, 10), 0, 5), share_of(100, (0, 10), 5, 20)
        (50, 50)
    """
    begin, end = reach
    start, stop, length = max(at, begin), min(stop, end), end - begin
    return counted * (stop - begin) // length - counted * (start - begin) // length
