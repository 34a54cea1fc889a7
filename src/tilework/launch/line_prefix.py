"""From a rank's bytes to whole lines with a prefix."""

from __future__ import annotations

from typing import Final

#: A line longer than this is broken into several.
MAX_LINE_BYTES: Final = 64 << 10

_RESET: Final = b"\x1b[0m"
#: Colours for ranks in turn: readable on dark and light backgrounds.
_COLOURS: Final = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


def prefix_for(rank: int, colour: bool) -> bytes:
    """The prefix of the lines of ``rank``.

    Example:
        >>> prefix_for(3, colour=False)
        b'[3] '
    """
    text = f"[{rank}]".encode()
    if colour:
        text = b"\x1b[%dm%s%s" % (_COLOURS[rank % len(_COLOURS)], text, _RESET)
    return text + b" "


class LineAssembler:
    """Collects bytes and returns full lines, each with the prefix; bytes stay unchanged.

    Args:
        prefix: The text before each line; may be empty.
        terminal: Whether lines go to a terminal: then a colour that a line leaves on ends with the
            line, and a line rewritten by carriage returns is shown in the last state.
        rank: The rank that writes the lines.
    """

    def __init__(self, prefix: bytes, terminal: bool, rank: int = 0) -> None:
        self.prefix = prefix
        self.rank = rank
        self._terminal = terminal
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take ``data``; return the lines that are now complete."""
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
