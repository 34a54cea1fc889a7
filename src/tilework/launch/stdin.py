"""Standard input: rank 0 gets it, the others get nothing.

A pipe or file is simply handed on. A terminal cannot be handed on, as rank 0 is not in the
foreground group: the launcher passes on whole lines, for ``input()`` and ``breakpoint()``.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

#: The interval of checks whether the terminal is ours again.
_RECHECK_SECONDS: Final = 0.5


class StandardInput:
    """The launcher's stdin on its way to rank 0. Owns the descriptors that it makes."""

    def __init__(self) -> None:
        self.nothing = os.open(os.devnull, os.O_RDONLY)
        self._reader, self._writer = -1, -1
        self._not_before = 0.0
        if os.isatty(0):
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)

    def of(self, rank: int) -> int | None:
        """The descriptor for the stdin of ``rank``; None: the launcher's own."""
        if rank > 0:
            return self.nothing
        return self._reader if self._reader >= 0 else None

    def wanted(self) -> bool:
        """True if the launcher should poll the terminal for input to pass on.

        Not without a terminal, after the end of input, or just after another job had the terminal.
        """
        return self._writer >= 0 and time.monotonic() >= self._not_before

    @property
    def look_again_at(self) -> float | None:
        """``time.monotonic()`` when :meth:`wanted` may change by itself; None: it will not."""
        return self._not_before if self._writer >= 0 and not self.wanted() else None

    def pass_on(self) -> None:
        """Pass a line from the terminal, which is readable, on to rank 0. Does not block."""
        if not _in_foreground():
            # The input is for somebody else, and reading it would stop this process.
            self._not_before = time.monotonic() + _RECHECK_SECONDS
            return
        try:
            data = os.read(0, 4096)
        except OSError:
            data = b""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            if data:
                os.write(self._writer, data)
        if not data:  # Ctrl-D
            os.close(self._writer)
            self._writer = -1

    def descriptors(self) -> list[int]:
        return [fd for fd in (self.nothing, self._reader, self._writer) if fd >= 0]

    def close(self) -> None:
        for fd in self.descriptors():
            os.close(fd)
        self.nothing = self._reader = self._writer = -1


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
