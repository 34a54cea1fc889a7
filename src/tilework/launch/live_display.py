"""Rank 0's output on a terminal, which may be a live display.

Rank 0 writes to a pseudo-terminal: programs see a terminal, and their output is passed on at once,
not only in complete lines. Two things are done to it:

* Each line gets the prefix, also when the cursor comes back to rewrite it. The pseudo-terminal is
  narrower by the prefix, so that nothing wraps.
* Lines of other ranks appear *above* a display that is being rewritten in place. For this the
  display's current frame is remembered: erase it, write the line, write the frame again. A frame
  is found from the way such displays work: a single line is rewritten after a carriage return; a
  larger display hides the cursor, and moves it up before each new frame.
"""

from __future__ import annotations

import re
from typing import Final

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
    """Turns rank 0's bytes, and other ranks' lines, into bytes for one terminal.

    Args:
        prefix: The text before rank 0's lines; may be empty.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._prefix_due = True
        self._partial = b""
        self._frame = bytearray()
        self._hidden = False
        self._alternate = False

    def feed(self, data: bytes) -> bytes:
        """The bytes to write to the terminal when rank 0 has written ``data``."""
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
        """The bytes that show whole ``lines`` of other ranks above rank 0's display."""
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
        """True if the frame ends at ``token``: it is final, or the next frame overwrites it."""
        if token == b"\n":
            return not self._hidden
        one_line = b"\n" not in self._frame
        return _UP.match(token) is not None or (token in _TO_LINE_START and one_line)
