"""Progress of long saves and loads, on a terminal; nothing elsewhere."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Any

_QUIET_SECONDS = 1.0
#: The lengths of the bar, and of the numbers next to the bar.
_BAR_LETTERS, _NUMBERS_LETTERS = 24, 40


class Progress:
    """A bar that counts bytes of ``what``, drawn when something takes longer than a second.

    Args:
        what: The activity, such as "saving run/step-10".
        total: The bytes to count on this rank. 0: unknown; the attribute may be set later.
        is_shown: False to draw nothing; None: draw if the error output is a terminal.
        afterwards: The cause of the wait after all bytes, such as "the disk".
    """

    def __init__(
        self, what: str, total: int = 0, is_shown: bool | None = None, afterwards: str = ""
    ) -> None:
        #: The bytes to count, and those counted so far.
        self.total, self.done = total, 0
        self._what, self._afterwards = what, afterwards
        self.is_shown = _has_terminal() if is_shown is None else is_shown
        self._begun = time.monotonic()
        self._bar: Any = None

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self.is_shown and time.monotonic() - self._begun >= _QUIET_SECONDS:
            self._draw()

    def _draw(self) -> None:
        shown: dict[str, Any] = {"completed": self.done, "total": self.total or None}
        if self._bar is None:
            self._bar = _bar(self._what, **shown)
            self._bar.start()
        if self._afterwards and self.total and self.done >= self.total:
            shown["description"] = f"waiting for {self._afterwards}"
        self._bar.update(self._bar.task_ids[0], **shown)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(what: str, **shown: Any) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    length = _BAR_LETTERS if console.width >= 100 else _BAR_LETTERS // 2
    bar = Bar(
        TextColumn("{task.description}", markup=False),  # paths are not markup
        BarColumn(length),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        speed_estimate_period=10,
    )
    room = console.width - length - _NUMBERS_LETTERS
    bar.add_task(_shortened(what, room), **shown)
    return bar


def _shortened(what: str, letters: int) -> str:
    """Shorten "saving PATH" to about ``letters`` letters: the verb and the end of the path."""
    verb, _, path = what.partition(" ")
    room = max(letters, 20) - len(verb) - 2
    return what if len(path) <= room else f"{verb} …{path[-room:]}"


def _has_terminal() -> bool:
    """True if stderr is a terminal and this is rank 0, as ranks may share a terminal."""
    if os.environ.get("RANK", "0") != "0":
        return False
    with suppress(AttributeError, ValueError):  # there is no output, or it is closed
        return sys.stderr.isatty()
    return False
