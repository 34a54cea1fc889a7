"""Ends processes that ranks have started and left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from typing import Final

from tilework.launch import linux

#: Seconds for processes that a program leaves running on purpose (a compressor, an upload).
PATIENCE_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.01


def reap_orphans(but: Collection[int]) -> None:
    """Reap children of this process that have ended, except those in ``but``.

    All other children are adopted: ranks have started them and left them behind.
    """
    for pid in linux.child_pids():
        if pid not in but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_orphans(seconds: float, but: Collection[int]) -> list[str]:
    """Wait ``seconds`` for adopted processes (children not in ``but``) to end, then kill the rest.

    Returns:
        The killed processes, as "1234 (name)".
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        reap_orphans(but)
        if not _others(but):
            return []
        time.sleep(_POLL_SECONDS)
    killed: dict[int, str] = {}
    # We may adopt the children of each killed process: look again until there are none.
    while orphans := _others(but):
        for pid in orphans:
            killed.setdefault(pid, f"{pid} ({linux.command_of(pid)})")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        reap_orphans(but)
    return list(killed.values())


def _others(but: Collection[int]) -> list[int]:
    return [pid for pid in linux.child_pids() if pid not in but]
