"""Progress of long saves and loads, on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

#: What takes less long is not shown.
_QUIET_SECONDS = 1.0
_EVERY_SECONDS = 0.2


class Progress:
    """A bar that counts bytes. Drawn on the first rank, when something takes longer than a second.

    Args:
        what: What goes on, such as "saving run/step-10".
        total: The bytes of this rank.
        is_shown: False to draw nothing; None: if the error output is a terminal.
    """

    def __init__(self, what: str, total: int, is_shown: bool | None = None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._is_shown = sys.stderr.isatty() if is_shown is None else is_shown
        self._begun = self._last = time.monotonic()
        self._bar: Any = None

    def __call__(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self._done += nbytes
        if not self._is_shown:
            return
        now = time.monotonic()
        if now - self._last < _EVERY_SECONDS or now - self._begun < _QUIET_SECONDS:
            return
        self._last = now
        if self._bar is None:
            self._bar = self._started()
        self._bar.update(self._bar.task_ids[0], completed=min(self._done, self._total))

    def _started(self) -> Any:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        bar = Bar(
            "{task.description}",
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.start()
        bar.add_task(self._what, total=self._total)
        return bar

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
