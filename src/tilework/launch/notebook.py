"""Ranks that are started from a notebook's cell: their lines appear below the cell."""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from typing import Any, Final

from tilework.launch.output import RankEnds
from tilework.launch.output_lines import LineAssembler, prefix_for

_CHUNK_BYTES: Final = 64 << 10
#: Seconds to wait, after the ranks' end, for the output of their child processes.
_LAST_SECONDS: Final = 2.0


def in_notebook() -> bool:
    """True if this process prints into a notebook's cell."""
    return type(sys.stdout).__module__.startswith("ipykernel")


class CellOutput:
    """Writes the ranks' output to ``sys.stdout``, as whole lines with the rank in front.

    A notebook shows everything that is written to ``sys.stdout``, but not all that processes write
    to descriptors.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        #: Set while no line is on the way from a pipe to the cell.
        self._idle = threading.Event()
        self._idle.set()

    def open(self, rank: int) -> RankEnds:
        reader, writer = os.pipe()
        assembler = LineAssembler(prefix_for(rank, colour=False), terminal=True)
        self._selector.register(reader, selectors.EVENT_READ, assembler)
        return RankEnds(writer, writer)

    def start(self) -> None:
        """Start a thread that passes lines on. Call this last: no fork may follow."""
        self._thread = threading.Thread(target=self._pass_on, name="tilework cell", daemon=True)
        self._thread.start()

    def forget_in_child(self) -> None:
        """Close descriptors of the notebook's process, in a forked rank."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def settle(self) -> None:
        """Wait, two seconds at most, until the cell shows all that ranks have written so far."""
        deadline = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < deadline and self._thread is not None:
            # In this order: bytes that were read before the first look are shown when idle.
            if not any(map(_has_unread, list(self._selector.get_map() or ()))):
                self._idle.wait(deadline - time.monotonic())
                return
            time.sleep(0.001)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)
            self._thread = None

    def _pass_on(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                self._idle.clear()
                data = os.read(key.fd, _CHUNK_BYTES)
                assembler: LineAssembler = key.data
                lines = assembler.feed(data) if data else assembler.finish()
                if lines:
                    self._stream.write(lines.decode(errors="replace"))
                self._idle.set()
                if not data:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
        self._stream.flush()
        self._selector.close()


def _has_unread(fd: Any) -> bool:
    try:
        return bool(select.select([fd], [], [], 0)[0])
    except OSError:  # the other thread has closed it since
        return False
