"""Lines of ranks' output, each with the rank in front, and equal lines of several ranks as one."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from tilework.show import run_texts

#: A line longer than this is broken into several.
MAX_LINE_BYTES: Final = 64 << 10

_RESET: Final = b"\x1b[0m"
#: Colours for ranks in turn: readable on dark and light backgrounds.
_COLOURS: Final = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


def prefix_for(rank: int, colour: bool) -> bytes:
    """The prefix of the lines of ``rank``: "[3] "."""
    text = f"[{rank}]".encode()
    if colour:
        text = b"\x1b[%dm%s%s" % (_COLOURS[rank % len(_COLOURS)], text, _RESET)
    return text + b" "


class LineAssembler:
    """Collects bytes and returns full lines, each with the prefix; bytes stay unchanged.

    On a ``terminal`` a colour that a line leaves on ends with the line, and a line rewritten by
    carriage returns is shown in the last state.
    """

    def __init__(self, prefix: bytes, terminal: bool, rank: int = 0) -> None:
        self.prefix = prefix
        self.rank = rank
        self._terminal = terminal
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        head, newline, tail = data.rpartition(b"\n")
        out = b""
        if newline:
            out, self._rest = self._lines(self._rest + head), b""
        self._rest += tail
        if self._terminal and b"\r" in self._rest[:-1]:
            self._rest = _last_state(self._rest)
        while len(self._rest) > MAX_LINE_BYTES:
            cut = _character_border(self._rest, MAX_LINE_BYTES)
            out += self._lines(self._rest[:cut])
            self._rest = self._rest[cut:]
        return out

    def finish(self) -> bytes:
        """The last line, with prefix and newline, if it is incomplete; else empty."""
        rest, self._rest = self._rest, b""
        return self._lines(rest) if rest else b""

    def _lines(self, block: bytes) -> bytes:
        """The lines of ``block``, each with the prefix; adds the last newline, which is missing."""
        if self._terminal and (b"\r" in block or b"\x1b" in block):
            block = b"\n".join(_tidy(line) for line in block.split(b"\n"))
        return self.prefix + block.replace(b"\n", b"\n" + self.prefix) + b"\n"


def _tidy(line: bytes) -> bytes:
    line = _last_state(line)
    return line + _RESET if b"\x1b" in line else line


def _last_state(line: bytes) -> bytes:
    """The part of a line that is visible after a progress bar has rewritten it."""
    body = line.rstrip(b"\r")
    return body.rpartition(b"\r")[2] + line[len(body) :]


def _character_border(data: bytes, at: int) -> int:
    """The nearest place at or before ``at`` that does not cut a UTF-8 character."""
    for back in range(4):
        if data[at - back] & 0xC0 != 0x80:
            return at - back
    return at  # not UTF-8


#: Seconds that a line waits for other ranks' lines.
WAIT_SECONDS: Final = 0.04
#: If ranks write more lines than this at once, they are data, and not compared.
_MOST_LINES: Final = 256
_MOST_WARNINGS: Final = 1024
_WARNING: Final = re.compile(rb"\S.*:\d+: \w*Warning: ")


@dataclass
class _Pending:
    """A line held until ``due``, since other ranks may print it; with their prefixes."""

    text: bytes
    due: float
    number: int
    prefixes: dict[int, bytes] = field(default_factory=dict)


class LineMerger:
    r"""Merges equal lines of several ranks on the way to a screen. Pure: callers give the time.

    Ranks mostly write the same lines at almost the same time, so a line waits a moment for the
    others': ``[0-3] loading``. The order of each rank's own lines stays, and a warning is shown
    once for the job. For a person: separate output to a pipe or file, and logs, stay unchanged.
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
        return self._queue[0].due if self._queue else None

    def feed(self, rank: int, prefix: bytes, data: bytes, now: float) -> bytes:
        """Take whole lines of ``rank``, each with ``prefix``; return the bytes to write now."""
        if self._ranks < 2:
            return data
        lines = data.split(b"\n")[:-1]
        if len(lines) > _MOST_LINES:
            return self.flush() + data
        for line in lines:
            self._add(rank, prefix, line[len(prefix) :], now)
        return self.take(now)

    def take(self, now: float) -> bytes:
        """Remove and return lines that have waited long enough, or that all ranks have printed."""
        out = b""
        while self._queue:
            first = self._queue[0]
            if first.due > now and len(first.prefixes) < self._ranks:
                break
            out += self._pop()
        return out

    def flush(self) -> bytes:
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
        if rank not in self._hiding:
            return False
        self._hiding.discard(rank)
        return text.startswith(b"  ")

    def _hides(self, rank: int, text: bytes) -> bool:
        if not _WARNING.match(text) or len(self._given) >= _MOST_WARNINGS:
            return False
        self._given[rank, text] += 1
        if self._given[rank, text] <= self._shown[text]:
            self._hiding.add(rank)
            return True
        self._shown[text] += 1
        return False

    def _pop(self) -> bytes:
        pending = self._queue.popleft()
        if self._by_text.get(pending.text) is pending:
            del self._by_text[pending.text]
        return _prefix(pending.prefixes) + pending.text + b"\n"


def _prefix(prefixes: dict[int, bytes]) -> bytes:
    if len(prefixes) == 1:
        return next(iter(prefixes.values()))
    return f"[{','.join(run_texts(sorted(prefixes)))}] ".encode()


# Rank 0 writes to a pseudo-terminal: programs see a terminal, and their output is passed on at
# once, not only in complete lines. Two things are done to it:
#
# * Each line gets the prefix, also when the cursor comes back to rewrite it. The pseudo-terminal is
#   narrower by the prefix, so that nothing wraps.
# * Lines of other ranks appear *above* a display that is being rewritten in place. For this the
#   display's current frame is remembered: erase it, write the line, write the frame again. A frame
#   is found from the way such displays work: a single line is rewritten after a carriage return; a
#   larger display hides the cursor, and moves it up before each new frame.

_TOKEN: Final = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor, erasing
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links
    rb"|\x1b[^\[\]]"
    rb"|[\r\n]"
    rb"|[^\x1b\r\n]+"
)
_PARTIAL: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?)?\Z")
_UP: Final = re.compile(rb"\x1b\[\d*A")
_TO_LINE_START: Final = (b"\r", b"\x1b[1G", b"\x1b[G")
_HIDE, _SHOW = b"\x1b[?25l", b"\x1b[?25h"
_ALTERNATE_ON, _ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"
_ERASE_LINE, _UP_AND_ERASE = b"\r\x1b[2K", b"\x1b[1A\x1b[2K"

#: The maximum length of an escape sequence.
_MAX_PARTIAL_BYTES: Final = 4096
#: The maximum of a frame, more than any screen holds; beyond it is output without newlines.
_MAX_FRAME_BYTES: Final = 64 << 10


class LiveDisplay:
    """Turns rank 0's bytes, and other ranks' lines, into bytes for one terminal."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._prefix_due = True
        self._partial = b""
        self._frame = bytearray()
        self._hidden = False
        self._alternate = False

    def feed(self, data: bytes) -> bytes:
        data = self._partial + data
        cut = _PARTIAL.search(data)
        keep = cut is not None and len(data) - cut.start() <= _MAX_PARTIAL_BYTES
        self._partial = data[cut.start() :] if cut is not None and keep else b""
        if self._partial:
            data = data[: -len(self._partial)]
        out = bytearray()
        for token in _TOKEN.findall(data):
            out += self._token(token)
        return bytes(out)

    def above(self, lines: bytes) -> bytes:
        if not self._frame or self._alternate:
            return lines
        frame = bytes(self._frame)
        if len(frame) >= _MAX_FRAME_BYTES:
            self._frame.clear()
            self._prefix_due = True
            return b"\n" + lines
        erase = _ERASE_LINE + _UP_AND_ERASE * frame.count(b"\n")
        return erase + lines + frame

    def settle(self) -> bytes:
        """The bytes that leave the terminal usable: cursor shown, colours off, on a new line."""
        out = (_SHOW if self._hidden else b"") + (_ALTERNATE_OFF if self._alternate else b"")
        if self._frame:
            out += b"\x1b[0m\n"
        self._frame.clear()
        self._hidden = self._alternate = False
        self._prefix_due = True
        return out

    def _token(self, token: bytes) -> bytes:
        """The bytes to write for ``token``, a piece of rank 0's output; also updates the frame."""
        if token in (_ALTERNATE_ON, _ALTERNATE_OFF):
            self._alternate = token == _ALTERNATE_ON
        if self._alternate:  # a full-screen program addresses the screen by itself
            return token
        control = token[:1] in b"\x1b\r"
        out = token
        if self._prefix_due and not control:
            out, self._prefix_due = self._prefix + token, False
        self._note(token, out)
        if token == b"\n" or token in _TO_LINE_START:
            self._prefix_due = True
        return out

    def _note(self, token: bytes, out: bytes) -> None:
        """Update the frame, the bytes that redraw the display, by ``token``, shown as ``out``."""
        if token in (_HIDE, _SHOW):
            self._hidden = token == _HIDE
            if not self._hidden:  # all but an unfinished line is final now
                self._frame[: self._frame.rfind(b"\n") + 1] = b""
        elif self._ends_frame(token):
            self._frame.clear()
        elif len(self._frame) < _MAX_FRAME_BYTES:
            self._frame += out

    def _ends_frame(self, token: bytes) -> bool:
        if token == b"\n":
            return not self._hidden
        one_line = b"\n" not in self._frame
        return _UP.match(token) is not None or (token in _TO_LINE_START and one_line)
