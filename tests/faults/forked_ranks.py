"""Forked ranks that may be killed, stopped and continued, and that report what they saw."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

#: Sends any picklable thing to the test.
Say = Callable[[Any], None]
Story = Callable[[int, Say], None]


@dataclass
class Rank:
    """A forked process, as the test sees it."""

    pid: int
    pipe: Connection
    status: int | None = None

    def hear(self, seconds: float = 120.0) -> Any:
        """The next thing that it says."""
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"process {self.pid} said nothing for {seconds:g} s")
        said = self.pipe.recv()
        if isinstance(said, Crashed):
            raise AssertionError(f"a rank failed by itself:\n{said.traceback}")
        return said

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send a signal; return when."""
        os.kill(self.pid, number)
        return time.monotonic()

    def reap(self, seconds: float = 120.0) -> int:
        """Wait for its end; return its exit code, or minus the signal that ended it."""
        deadline = time.monotonic() + seconds
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not end within {seconds:g} s")
            else:
                time.sleep(0.002)
        return self.status


@dataclass
class Crashed:
    """Said by a rank whose story raised."""

    traceback: str


@dataclass
class ForkedRanks:
    """``n`` forked ranks running ``story(rank, say)``. None outlives the ``with`` block."""

    n: int
    story: Story
    ranks: list[Rank] = field(default_factory=list)

    def __enter__(self) -> ForkedRanks:
        for rank in range(self.n):
            self.ranks.append(self._fork(rank))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self.ranks:
            if rank.status is None:
                with contextlib.suppress(TimeoutError):
                    rank.reap(0 if kind else 5)
            if rank.status is None:
                rank.kill()
                rank.reap()
            rank.pipe.close()

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    def others(self, victim: int) -> list[Rank]:
        """All but one."""
        return [rank for i, rank in enumerate(self.ranks) if i != victim]

    def replace(self, rank: int) -> None:
        """Fork a rank anew, when its process has ended."""
        self.ranks[rank].reap()
        self.ranks[rank].pipe.close()
        self.ranks[rank] = self._fork(rank)

    def _fork(self, rank: int) -> Rank:
        reader, writer = Pipe(duplex=False)
        parent = os.getpid()
        with warnings.catch_warnings():
            # Newer Pythons warn of forking beside torch's threads, which the child leaves alone.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            writer.close()
            return Rank(pid, reader)
        try:
            # What earlier tests left is not the rank's to free: a destructor that joins a thread
            # waits for ever in a process that has no such thread.
            gc.freeze()
            reader.close()
            _end_with(parent)
            torch.set_num_threads(1)
            self.story(rank, writer.send)
        except BaseException:
            writer.send(Crashed(traceback.format_exc()))
        finally:
            os._exit(0)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class Holdings:
    """What a process holds that a group may have left behind."""

    descriptors: int
    #: Mappings of shared memory.
    segments: int
    threads: int

    def within(self, other: Holdings) -> bool:
        """Whether it is no more than ``other`` of anything."""
        return (
            self.descriptors <= other.descriptors
            and self.segments <= other.segments
            and self.threads <= other.threads
        )

    @staticmethod
    def now() -> Holdings:
        mapped = Path("/proc/self/maps").read_text().splitlines()
        return Holdings(
            descriptors=len(os.listdir("/proc/self/fd")),
            segments=sum("memfd:" in line or "/dev/shm/" in line for line in mapped),
            threads=len(os.listdir("/proc/self/task")),
        )
