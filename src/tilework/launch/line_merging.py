"""Equal lines of several ranks as one line, and the same warning once.

Ranks mostly write the same lines at almost the same time. Therefore a line waits a moment for the
other ranks' equal lines: ``[0-3] loading``. The order of each rank's own lines stays. A warning is
shown once for the job, whenever other ranks give it, too. This serves output that a person reads: a
separate stdout that goes to a pipe or file stays unchanged, and files of ``--log-dir`` have
everything.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

#: Seconds that a line waits for other ranks' lines.
WAIT_SECONDS: Final = 0.04
#: If ranks write more lines than this at once, they are data, and not compared.
_MOST_LINES: Final = 256
_MOST_WARNINGS: Final = 1024
_WARNING: Final = re.compile(rb"\S.*:\d+: \w*Warning: ")


@dataclass
class _Pending:
    """A line that is held back: other ranks may print the same line.

    Attributes:
        text: The line.
        due: The time at which the line is printed at the latest.
        number: The place of the line in the order of arrival.
        prefixes: The prefix of each rank that has printed the line.
    """

    text: bytes
    due: float
    number: int
    prefixes: dict[int, bytes] = field(default_factory=dict)


class LineMerger:
    r"""Merges equal lines of several ranks on the way to a screen. Pure: callers give the time.

    Args:
        ranks: The number of ranks that write here.

    Example:
        >>> merger = LineMerger(2)
        >>> merger.feed(0, b"[0] ", b"[0] hello\n", now=0.0)
        b''
        >>> merger.feed(1, b"[1] ", b"[1] hello\n", now=0.01)
        b'[0-1] hello\n'
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._queue: deque[_Pending] = deque()
        self._by_text: dict[bytes, _Pending] = {}
        self._last_of: dict[int, int] = {}
        self._count = 0
        self._given: Counter[tuple[int, bytes]] = Counter()
        self._shown: Counter[bytes] = Counter()
        #: Ranks whose last line was a hidden warning.
        self._hiding: set[int] = set()

    @property
    def due(self) -> float | None:
        """The time at which the first waiting line must be written; None if no line waits."""
        return self._queue[0].due if self._queue else None

    def feed(self, rank: int, prefix: bytes, data: bytes, now: float) -> bytes:
        """Take whole lines of ``rank``, each with ``prefix``; return the bytes to write now."""
        lines = data.split(b"\n")[:-1]
        if len(lines) > _MOST_LINES:
            return self.flush() + data
        for line in lines:
            self._add(rank, prefix, line[len(prefix) :], now)
        return self.take(now)

    def take(self, now: float) -> bytes:
        """Remove and return lines that have waited long enough, or that all ranks have printed."""
        out = b""
        while self._queue and (self._queue[0].due <= now or self._is_full(self._queue[0])):
            out += self._pop()
        return out

    def flush(self) -> bytes:
        """Remove and return all lines that wait."""
        out = b""
        while self._queue:
            out += self._pop()
        return out

    def _add(self, rank: int, prefix: bytes, text: bytes, now: float) -> None:
        if self._is_source(rank, text):
            return
        known = self._by_text.get(text)
        if known is not None and known.number > self._last_of.get(rank, -1):
            if _WARNING.match(text):
                self._given[rank, text] += 1
            known.prefixes[rank] = prefix
            self._last_of[rank] = known.number
            return
        if self._hides(rank, text):
            return
        if len(self._queue) >= _MOST_LINES:
            self._queue[0].due = now
        self._count += 1
        pending = _Pending(text, now + WAIT_SECONDS, self._count, {rank: prefix})
        self._queue.append(pending)
        self._by_text[text] = pending
        self._last_of[rank] = self._count

    def _is_source(self, rank: int, text: bytes) -> bool:
        """True for the line of source code that follows a warning which was hidden."""
        if rank not in self._hiding:
            return False
        self._hiding.discard(rank)
        return text.startswith(b"  ")

    def _hides(self, rank: int, text: bytes) -> bool:
        """True for a warning that was shown already, when another rank gave it."""
        if not _WARNING.match(text) or len(self._given) >= _MOST_WARNINGS:
            return False
        self._given[rank, text] += 1
        if self._given[rank, text] <= self._shown[text]:
            self._hiding.add(rank)
            return True
        self._shown[text] += 1
        return False

    def _is_full(self, pending: _Pending) -> bool:
        return len(pending.prefixes) == self._ranks

    def _pop(self) -> bytes:
        pending = self._queue.popleft()
        if self._by_text.get(pending.text) is pending:
            del self._by_text[pending.text]
        return _prefix(pending.prefixes) + pending.text + b"\n"


def _prefix(prefixes: dict[int, bytes]) -> bytes:
    if len(prefixes) == 1:
        return next(iter(prefixes.values()))
    return f"[{_ranges(sorted(prefixes))}] ".encode()


def _ranges(ranks: list[int]) -> str:
    """Sorted ranks as text with ranges: ``0-3,6``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
