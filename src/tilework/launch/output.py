"""Ranks' output: through the launcher to the launcher's stdout and stderr, and to files.

Each rank writes into pipes of the launcher. Where the launcher writes to a terminal, rank 0 writes
into a pseudo-terminal. This module connects ranks to destinations; bytes become prefixed lines in
:mod:`tilework.launch.output_lines`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tilework.launch.output_lines import LineAssembler, LineMerger, LiveDisplay, prefix_for
from tilework.launch.settings import LaunchSettings

#: A pipe that polls as writable takes this many bytes without blocking (POSIX's PIPE_BUF).
_PIECE_BYTES: Final = 4096
#: Files never block for long.
_FILE_PIECE_BYTES: Final = 1 << 20


class NonblockingOutput:
    """A queue of bytes that are written to a descriptor in order, without blocking.

    The launcher must notice a dead rank or a Ctrl-C even while the reader of its output (``less``,
    a terminal after Ctrl-S) does not read. A non-blocking descriptor would be so for the shell as
    well, which shares it: instead each write follows a poll and is kept small.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending: deque[memoryview] = deque()
        #: Bytes not written yet.
        self.pending_bytes = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._piece = _FILE_PIECE_BYTES if stat.S_ISREG(os.fstat(fd).st_mode) else _PIECE_BYTES
        #: The error if the reader is gone or the disk is full. Later writes are dropped.
        self.broken: OSError | None = None

    def fileno(self) -> int:
        """The descriptor, to wait for until :meth:`pump` can continue."""
        return self._fd

    def write(self, data: bytes) -> None:
        if data and self.broken is None:
            self._pending.append(memoryview(data))
            self.pending_bytes += len(data)
            self.pump()

    def pump(self) -> None:
        """Write as much as possible without blocking."""
        while self._pending and self._poll.poll(0):
            self._write_piece()

    def flush(self, seconds: float | None) -> None:
        """Block until all queued bytes are written, or ``seconds`` (None: no limit) have passed;
        then the rest stays queued.
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
            self.pending_bytes = 0
            return
        self.pending_bytes -= written
        if written == len(head):
            self._pending.popleft()
        else:
            self._pending[0] = head[written:]


# Windows has no terminals of this kind; there the launcher refuses to run, see command.py.
if sys.platform != "win32":
    import fcntl
    import termios

_CHUNK_BYTES: Final = 64 << 10
#: If more bytes than this wait to be written, ranks wait, as they would without a launcher.
_MAX_PENDING_BYTES: Final = 1 << 20


class Screen:
    """A destination: the launcher's stdout or stderr, or both if they are the same.

    ``live_prefix`` is the prefix of rank 0's lines, if rank 0 is shown live here; equal lines of
    ``merged_ranks`` ranks are merged (0: each line stays).
    """

    def __init__(self, fd: int, live_prefix: bytes = b"", merged_ranks: int = 0) -> None:
        self.output = NonblockingOutput(fd)
        self._merger = LineMerger(merged_ranks)
        self.is_terminal = os.isatty(fd)
        self._live = LiveDisplay(live_prefix) if self.is_terminal else None

    def lines_of(self, rank: int, prefix: bytes, data: bytes) -> None:
        """Write whole lines of ``rank``, each with ``prefix``; they may wait for equal lines."""
        if data:
            self._write(self._merger.feed(rank, prefix, data, time.monotonic()))

    @property
    def due(self) -> float | None:
        return self._merger.due

    def write_due(self) -> None:
        self._write(self._merger.take(time.monotonic()))

    def lines(self, data: bytes) -> None:
        """Write all lines that wait, then the whole lines in ``data``."""
        self._write(self._merger.flush() + data)

    def _write(self, data: bytes) -> None:
        if data:
            self.output.write(data if self._live is None else self._live.above(data))

    def live(self, data: bytes) -> None:
        if self._live is not None:
            self.output.write(self._live.feed(data))

    def settle(self) -> None:
        """Write the lines that wait and end rank 0's display, before anything else is written."""
        self.lines(b"")
        if self._live is not None:
            self.output.write(self._live.settle())

    @property
    def congested(self) -> bool:
        """True if ranks should wait before they write more."""
        return self.output.pending_bytes > _MAX_PENDING_BYTES


class RankStream:
    """The launcher's end of one rank's stdout or stderr (or both); owns the descriptor ``fd``.

    ``assembler`` makes lines of the bytes (None: rank 0's live terminal).
    """

    def __init__(
        self, fd: int, screen: Screen, assembler: LineAssembler | None, log: LogFile | None
    ) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._log = log
        self.screen = screen
        self._assembler = assembler

    def read(self) -> bool:
        """Read a chunk and pass it on; False if there is none now or any more. Does not block."""
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:  # from a pseudo-terminal that nobody has open
                raise
            data = b""
        if data:
            self._pass_on(data)
        else:
            self.close()
        return bool(data)

    def finish(self) -> None:
        """Read the rest, write the last line even if it is incomplete, and close."""
        while self.read():
            pass
        if self._assembler is not None:
            self._show(self._assembler, self._assembler.finish())
        self.close()

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _pass_on(self, data: bytes) -> None:
        if self._log is not None:
            self._log.write(data)
        if self._assembler is None:
            self.screen.live(data)
        else:
            self._show(self._assembler, self._assembler.feed(data))

    def _show(self, assembler: LineAssembler, lines: bytes) -> None:
        self.screen.lines_of(assembler.rank, assembler.prefix, lines)


class LogFile:
    """A new file that gets a rank's bytes unchanged. A full disk ends the log, not the job.

    Raises OSError if ``path`` cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = open(path, "wb", buffering=0)  # noqa: SIM115
        #: A message for the user, shown once: this log is incomplete.
        self.problem = ""

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and self._file is not None:
                view = view[self._file.write(view) or 0 :]
        except OSError as error:
            self.problem = f"{self._path} is incomplete from here on: {error.strerror}"
            self.close()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


@dataclass(frozen=True)
class RankEnds:
    """The write ends of a rank's output, which may be the same descriptor.

    The launcher closes them once the rank has started.
    """

    stdout: int
    stderr: int

    def close(self) -> None:
        for fd in {self.stdout, self.stderr}:
            os.close(fd)


class Output:
    """The output of one job. Owns every descriptor but the launcher's 1 and 2.

    Raises OSError if the folder for logs cannot be made or written.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._log_dir = settings.log_dir
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        # A shared pipe keeps a rank's output in order; separate files need separate pipes.
        self._merged = os.path.sameopenfile(1, 2)
        self.stdout = self._screen(1)
        self.stderr = self.stdout if self._merged else self._screen(2)
        self.streams: list[RankStream] = []
        self._logs: dict[tuple[int, str], LogFile] = {}
        #: Rank 0's pseudo-terminals: our end, the terminal shown on, and the prefix's width.
        self._masters: list[tuple[int, int, int]] = []

    def open(self, rank: int) -> RankEnds:
        """Make the pipes for the output of ``rank``; return the ends that the rank writes to."""
        stdout = self._connect(rank, "stdout", self.stdout)
        if self._merged and self._log_dir is None:
            return RankEnds(stdout, stdout)
        return RankEnds(stdout, self._connect(rank, "stderr", self.stderr))

    @property
    def screens(self) -> list[Screen]:
        return [self.stdout] if self._merged else [self.stdout, self.stderr]

    def write_notice(self, text: str) -> None:
        """Write the launcher's own messages, in full lines, to stderr."""
        self.stderr.lines(text.encode(errors="backslashreplace"))

    def report(self, text: str) -> None:
        """Write a notice at the end of the job, when rank 0's display is over."""
        for screen in self.screens:
            screen.settle()
        self.write_notice(text)

    def log_failure(self, rank: int, text: str) -> None:
        """Put a traceback, which did not go through stderr, into the rank's log of stderr."""
        log = self._logs.get((rank, "stderr"))
        if log is not None:
            log.write(text.encode(errors="backslashreplace"))

    def resize(self) -> None:
        """Give rank 0's pseudo-terminals the terminal's size, less the prefix."""
        for master, fd, margin in self._masters:
            with contextlib.suppress(OSError):
                rows, columns, x, y = struct.unpack(
                    "HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))
                )
                size = struct.pack("HHHH", rows, max(1, columns - margin), x, y)
                fcntl.ioctl(master, termios.TIOCSWINSZ, size)

    def take_problems(self) -> list[str]:
        problems = [log.problem for log in self._logs.values() if log.problem]
        for log in self._logs.values():
            log.problem = ""
        return problems

    def close(self) -> None:
        """Close every pipe and log; the screens stay. Idempotent; also for forked children."""
        for stream in self.streams:
            stream.close()
        for log in self._logs.values():
            log.close()

    def drain(self) -> None:
        for stream in self.streams:
            stream.finish()

    def flush(self, seconds: float | None) -> None:
        """Block until the screens have taken everything, at most ``seconds`` if given."""
        for screen in self.screens:
            screen.settle()
            screen.output.flush(seconds)

    def _screen(self, fd: int) -> Screen:
        # A person reads messages; a separate stdout may be data for a program.
        is_read = fd == 2 or self._merged or os.isatty(fd)
        has_prefix = bool(self._prefix(0, False))  # else lines would not name their rank
        merged_ranks = self._settings.nprocs if is_read and has_prefix else 0
        if os.isatty(fd) and self._settings.node_rank == 0:
            merged_ranks -= 1  # rank 0 is shown live
        return Screen(fd, self._prefix(0, wants_colour(fd)), merged_ranks)

    def _connect(self, rank: int, name: str, screen: Screen) -> int:
        """Connect stream ``name`` of ``rank`` to ``screen``; return the end for the rank."""
        prefix = self._prefix(rank, screen.is_terminal and wants_colour(screen.output.fileno()))
        log = None
        if self._log_dir is not None:
            log = self._logs.get((rank, name))  # if the rank was started before
            if log is None:
                path = self._log_dir / f"rank-{rank}.{name}"
                log = self._logs[rank, name] = LogFile(path)
        if rank == 0 and screen.is_terminal:
            reader, writer = os.openpty()
            _make_raw(writer)
            margin = len(self._prefix(0, False))
            self._masters.append((reader, screen.output.fileno(), margin))
            self.resize()
            assembler = None
        else:
            reader, writer = os.pipe()
            assembler = LineAssembler(prefix, screen.is_terminal, rank)
        self.streams.append(RankStream(reader, screen, assembler, log))
        return writer

    def _prefix(self, rank: int, colour: bool) -> bytes:
        mode = self._settings.prefix
        if mode == "auto":
            mode = "all" if self._settings.nprocs * self._settings.nnodes > 1 else "none"
        wanted = mode == "all" or (mode == "others" and rank > 0)
        return prefix_for(rank, colour) if wanted else b""


def wants_colour(fd: int) -> bool:
    """True if ``fd`` is a terminal with colours, and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.isatty(fd) and os.environ.get("TERM") != "dumb"


def _make_raw(fd: int) -> None:
    """Make the pseudo-terminal ``fd`` pass bytes unchanged: the real terminal processes them."""
    attributes = termios.tcgetattr(fd)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(fd, termios.TCSANOW, attributes)
