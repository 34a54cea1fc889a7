"""Ranks in processes that start at once and have never run autograd: torch's engine, once used,
does not survive a fork, and other tests of this process use it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tilework.torch_backend

CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, by the server that all ranks are forked from: the slow imports of modules of tests,
# and those of first collectives and checkpoints. The last module hides all objects from the ranks'
# garbage collection, which would copy most of the memory that the ranks share.
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "rich.progress",
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.tensor.parallel",
        "tilework.capture",
        "tilework.checkpoint",
        "tilework.comm.backends.shm.shm_backend",
        "tilework.data",
        "tilework.dtensor",
        "tilework.launch.command",
        "tilework.parallel",
        "tilework.rpc",
        "tilework.sharded",
        "tilework.testing",
        "tilework.torch_backend",
        "tests.frozen",
    ]
)

BACKENDS = ("gloo", tilework.torch_backend.BACKEND_NAME)
LIMIT = timedelta(seconds=120)


@dataclass
class Rank:
    """What a rank's function is given."""

    number: int
    size: int
    folder: Path
    say: Connection
    groups: int = 0

    @contextlib.contextmanager
    def joined(self, backend: str = BACKENDS[1], timeout: timedelta = LIMIT) -> Iterator[None]:
        """With torch's default group of all ranks meanwhile."""
        self.groups += 1
        dist.init_process_group(
            backend,
            init_method=f"file://{self.folder}/store{self.groups}",
            rank=self.number,
            world_size=self.size,
            timeout=timeout,
        )
        yield
        dist.destroy_process_group()

    def on_both(self, fn: Callable[[Rank], Any]) -> dict[str, Any]:
        """What ``fn`` returns on Gloo and on tilework, from the same random numbers."""
        found = {}
        for backend in BACKENDS:
            torch.manual_seed(0)
            with self.joined(backend):
                found[backend] = fn(self)
        return found


@dataclass
class Failure:
    """Sent by a rank whose function raised."""

    trace: str


@dataclass
class Job:
    """``n`` ranks running ``fn(Rank, *args)``. None outlives the ``with`` block."""

    folder: Path
    n: int
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def __enter__(self) -> Job:
        for number in range(self.n):
            reader, writer = CONTEXT.Pipe(duplex=False)
            rank = Rank(number, self.n, self.folder, writer)
            process = CONTEXT.Process(target=_run, args=(rank, self.fn, self.args), daemon=True)
            process.start()
            writer.close()
            self.pipes.append(reader)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(0 if process.exitcode is not None else 5)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
            pipe.close()

    def hear(self, number: int, seconds: float = 180.0) -> Any:
        """The next thing that a rank says: with ``rank.say``, at the end what it returns."""
        if not self.pipes[number].poll(seconds):
            raise TimeoutError(f"rank {number} said nothing for {seconds:g} s")
        said = self.pipes[number].recv()
        if isinstance(said, Failure):
            raise AssertionError(f"rank {number} failed:\n{said.trace}")
        return said

    def kill(self, number: int) -> float:
        """End a rank without a chance to say so; return when."""
        os.kill(self.processes[number].pid, signal.SIGKILL)
        return time.monotonic()


def _run(rank: Rank, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        said = fn(rank, *args)
    except BaseException:
        said = Failure(traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        rank.say.send(said)


Launcher = Callable[..., list[Any]]
