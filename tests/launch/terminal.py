"""A terminal for a launcher: a pseudo-terminal that it controls, as a shell would set it up."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.launch.conftest import Launch


class OnTerminal:
    """A launcher in the foreground of a terminal; what it shows, and keys to press."""

    def __init__(self, launch: Launch, *arguments: str, columns: int = 80) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        launch.environment["TERM"] = "xterm"
        self.process = launch.start(
            *arguments, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal
        )
        os.close(slave)
        self.shown = b""

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, text: bytes, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} never appeared in {self.shown!r}"
            self._read(0.05)

    def finish(self) -> int:
        """Everything to the end; the exit status."""
        while self.process.poll() is None:
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.process.returncode

    def close(self) -> None:
        os.close(self._master)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # everybody has closed it
            return False
        self.shown += data
        return bool(data)


@contextmanager
def on_terminal(launch: Launch, *arguments: str, columns: int = 80) -> Iterator[OnTerminal]:
    shown = OnTerminal(launch, *arguments, columns=columns)
    try:
        yield shown
    finally:
        shown.close()
