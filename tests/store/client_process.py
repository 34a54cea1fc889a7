"""Processes that use stores: without torch, so that one starts in a tenth of a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tilework

SOURCES = Path(tilework.__file__ or "").parents[1]


class Process:
    """A Python program that talks to the test by lines."""

    def __init__(self, program: str, *arguments: object) -> None:
        head = "import os, sys, time, signal\nfrom datetime import timedelta\n"
        head += "from tilework.store import *\n"
        self._popen = subprocess.Popen(
            [sys.executable, "-c", head + textwrap.dedent(program), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCES)},
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def line(self) -> str:
        """Its next line of output; empty once it has ended."""
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def say(self, text: str) -> None:
        """Send it a line."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(text + "\n")
        self._popen.stdin.flush()

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._popen.kill()
        self._popen.wait(120)

    def stop(self) -> None:
        """kill -STOP, and wait until it has stopped."""
        self._popen.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def resume(self) -> None:
        """kill -CONT."""
        self._popen.send_signal(signal.SIGCONT)

    def wait(self) -> int:
        """Wait for its end; its exit status."""
        return self._popen.wait(120)

    def close(self) -> None:
        """End it, whatever it does."""
        self.kill()
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def process(program: str, *arguments: object) -> Iterator[Process]:
    """A running ``program``; it is gone afterwards."""
    running = Process(program, *arguments)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def processes(count: int, program: str, *arguments: object) -> Iterator[list[Process]]:
    """Several processes with the same program; each gets its number as the last argument."""
    running = [Process(program, *arguments, number) for number in range(count)]
    try:
        yield running
    finally:
        for one in running:
            one.close()
