"""``trace``: write what this rank does, and read what all ranks did."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tilework.comm.world import current_world
from tilework.inspect.format import MOST_BYTES, TraceError
from tilework.inspect.judging import Summary, summarize
from tilework.inspect.timeline import Timeline, read_timeline
from tilework.inspect.writer import Writer

#: Seconds to wait for the files of ranks that are about to end their traces.
_PATIENCE: Final = 5.0


class Seen:
    """The trace of a job in ``folder``, while it is written and after."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def timeline(self) -> Timeline:
        """The events of all ranks so far; waits some seconds for ranks that are about to end.

        Raises:
            TraceError: There is no trace, or there are traces of several jobs.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            timeline = read_timeline(self.folder)
            ranks = {trace.rank for trace in timeline.ranks if trace.complete}
            asked = {
                rank
                for trace in timeline.ranks
                for group in trace.groups.values()
                for rank in group.ranks
            }
            if asked <= ranks or time.monotonic() > deadline:
                return timeline
            time.sleep(0.05)

    def summary(self) -> Summary:
        """A judgement: who was waited for, where, how long. Prints as sentences.

        Not collective: any rank may ask.
        """
        return summarize(self.timeline())


@contextmanager
def trace(folder: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> Iterator[Seen]:
    """Write what this rank does in the ``with`` block into a folder, which all ranks share.

    Each rank writes a separate file, some times a second: what was written stays if the rank is
    killed. Operations of all groups are written, also those of the fast path and of captured steps,
    and the spans that :func:`tilework.distributed.span` names.

    Args:
        folder: The folder; made if missing. The files of an earlier job in it are replaced.
        most_bytes: The rank's file is not made larger.

    Raises:
        TraceError: The rank is traced already, or the folder cannot be made.

    Example::

        with trace("trace/") as seen:
            train()
        print(seen.summary())
    """
    if most_bytes < 1:
        raise TraceError(f"most_bytes must be at least 1, got {most_bytes}")
    writer = Writer(Path(folder), current_world(), most_bytes)
    writer.start()
    try:
        yield Seen(Path(folder))
    finally:
        writer.stop()
