"""Progress of long saves and loads, on a terminal; nothing elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

from tilework.show import bytes_text

#: The time below which nothing is shown.
_QUIET_SECONDS = 1.0
_EVERY_SECONDS = 0.2
#: The time over which rates are computed.
_RATE_SECONDS = 10.0
#: The lengths of the bar, and of the numbers next to the bar.
_BAR_LETTERS, _NUMBERS_LETTERS = 24, 48


class Progress:
    """A bar that counts bytes, drawn when something takes longer than a second.

    Args:
        what: The activity, such as "saving run/step-10".
        total: The bytes to count on this rank. 0: unknown; the attribute may be set later.
        is_shown: False to draw nothing; None: draw if the error output is a terminal.
        afterwards: The cause of the wait after all bytes, for the bar, such as "the disk".
    """

    def __init__(
        self, what: str, total: int = 0, is_shown: bool | None = None, afterwards: str = ""
    ) -> None:
        self.total, self.done = total, 0
        self._what, self._afterwards = what, afterwards
        self.is_shown = _has_terminal() if is_shown is None else is_shown
        self._begun = self._last = time.monotonic()
        self._seen = deque([(self._begun, 0)])
        self._bar: Any = None

    def begin_at(self, nbytes: int) -> None:
        """Begin with ``nbytes`` bytes that were done earlier, which the shown rate leaves out."""
        self.done = nbytes
        self._seen = deque([(self._begun, nbytes)])

    def __call__(self, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes that are done."""
        self.done += nbytes
        if not self.is_shown:
            return
        now = time.monotonic()
        ends = self._bar is not None and self.done >= self.total
        if now - self._begun >= _QUIET_SECONDS and (ends or now - self._last >= _EVERY_SECONDS):
            self._last = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        if self._bar is None:
            self._bar = _bar(self._what)
        done = min(self.done, self.total) if self.total else self.done
        self._seen.append((now, done))
        while now - self._seen[1][0] > _RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = (done - before) / (now - since)
        self._bar.update(
            self._bar.task_ids[0],
            completed=done,
            total=self.total or None,
            numbers=self._numbers(done, rate),
        )
        self._bar.start()

    def _numbers(self, done: int, rate: float) -> str:
        if not self.total:
            return f"{bytes_text(done)}, {bytes_text(rate)}/s"
        if done >= self.total:
            waiting = f", waiting for {self._afterwards}" if self._afterwards else ""
            return f"{bytes_text(done)}{waiting}"
        left = _clock((self.total - done) / rate) if rate else "?"
        return f"{bytes_text(done)} of {bytes_text(self.total)}, {bytes_text(rate)}/s, {left} left"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(what: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    length = _BAR_LETTERS if console.width >= 100 else _BAR_LETTERS // 2
    bar = Bar(
        # Paths and numbers are not markup.
        TextColumn("{task.description}", markup=False),
        BarColumn(length),
        TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
        transient=True,
    )
    bar.add_task(_shortened(what, console.width - length - _NUMBERS_LETTERS))
    return bar


def _shortened(what: str, letters: int) -> str:
    """Shorten "saving PATH" to about ``letters`` letters: the verb and the end of the path."""
    verb, _, path = what.partition(" ")
    room = max(letters, 20) - len(verb) - 2
    return what if len(path) <= room else f"{verb} …{path[-room:]}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _has_terminal() -> bool:
    """True if stderr is a terminal and this is rank 0, as ranks may share a terminal."""
    if os.environ.get("RANK", "0") != "0":
        return False
    with suppress(AttributeError, ValueError):  # there is no output, or it is closed
        return sys.stderr.isatty()
    return False
