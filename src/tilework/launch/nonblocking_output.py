"""Output to the launcher's own stdout and stderr that never blocks.

The launcher must notice a dead rank or a Ctrl-C even while the reader of its output (``less``, a
terminal after Ctrl-S) does not read. A non-blocking descriptor would be non-blocking for the shell
as well, since they share it. Instead each write follows a poll and is kept small.
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections import deque
from typing import Final

#: A pipe that polls as writable takes this many bytes without blocking (POSIX's PIPE_BUF).
_PIECE_BYTES: Final = 4096
#: Files never block for long.
_FILE_PIECE_BYTES: Final = 1 << 20


class NonblockingOutput:
    """A queue of bytes that are written to a descriptor in order, without blocking.

    Args:
        fd: The descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending: deque[memoryview] = deque()
        self._pending_bytes = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._piece = _FILE_PIECE_BYTES if stat.S_ISREG(os.fstat(fd).st_mode) else _PIECE_BYTES
        #: The error if the reader is gone or the disk is full. Later writes are dropped.
        self.broken: OSError | None = None

    def fileno(self) -> int:
        """The descriptor, to wait for until :meth:`pump` can go on."""
        return self._fd

    @property
    def pending_bytes(self) -> int:
        """Bytes not written yet."""
        return self._pending_bytes

    def write(self, data: bytes) -> None:
        """Queue ``data`` and write as much as possible now."""
        if data and self.broken is None:
            self._pending.append(memoryview(data))
            self._pending_bytes += len(data)
            self.pump()

    def pump(self) -> None:
        """Write as much as possible without blocking."""
        while self._pending and self._poll.poll(0):
            self._write_piece()

    def flush(self, seconds: float | None) -> None:
        """Block until all queued bytes are written or ``seconds`` have passed.

        After that time the call returns without an error, and the rest stays queued. With None
        there is no limit of time.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poll.poll(None if left is None else left * 1000):
                return
            self._write_piece()

    def _write_piece(self) -> None:
        head = self._pending[0]
        try:
            written = os.write(self._fd, head[: self._piece])
        except BlockingIOError:
            return  # another process made it non-blocking, and it is full
        except OSError as error:
            self.broken = error
            self._pending.clear()
            self._pending_bytes = 0
            return
        self._pending_bytes -= written
        if written == len(head):
            self._pending.popleft()
        else:
            self._pending[0] = head[written:]
