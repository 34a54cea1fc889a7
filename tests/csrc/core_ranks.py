"""Ranks of one group as threads (with torch tensors) and as processes (without torch)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilework import _core

NONCE = b"a nonce of sixteen"
#: Small slots, so that a few KiB take several rounds.
SLOT_BYTES = 4096
WORKER = Path(__file__).with_name("worker.py")
DTYPE_CODES = {getattr(torch, name): code for name, code in _core.DTYPES.items() if name != "bytes"}


def pair(tensor: Tensor) -> tuple[int, int]:
    """What the core calls a buffer."""
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.nbytes


@dataclass
class Rank:
    """One rank's end of a group, speaking tensors."""

    group: _core.Group
    rank: int
    size: int
    #: Buffers must live until their completions are done; this keeps them for the rank's life.
    kept: list[object] = field(default_factory=list)

    def arguments(
        self,
        kind: str,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        *,
        op: str = "none",
        root: int = 0,
        factor: float = 1.0,
        label: int = 5,
        timeout: float = 120.0,
    ) -> tuple[Any, ...]:
        dtype = DTYPE_CODES[next(iter((*inputs, *outputs)), torch.empty(0)).dtype]
        return (
            *(_core.KINDS[kind], dtype, _core.REDUCE_OPS[op], root, factor),
            *([pair(t) for t in inputs], [pair(t) for t in outputs], label, timeout),
        )

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.group.run(*self.arguments(*args, **kwargs))

    def submit(self, *args: Any, **kwargs: Any) -> _core.Completion:
        self.kept.append(args)
        return self.group.submit(*self.arguments(*args, **kwargs))

    def isend(
        self, dst: int, tensor: Tensor, tag: int = 0, timeout: float = 120.0
    ) -> _core.Completion:
        self.kept.append(tensor)
        return self.group.isend(dst, *pair(tensor), DTYPE_CODES[tensor.dtype], tag, timeout)

    def irecv(
        self, src: int, tensor: Tensor, tag: int = 0, timeout: float = 120.0
    ) -> _core.Completion:
        self.kept.append(tensor)
        return self.group.irecv(src, *pair(tensor), DTYPE_CODES[tensor.dtype], tag, timeout)


@contextmanager
def groups(
    size: int, slot_bytes: int = SLOT_BYTES, tunables: Mapping[str, int] | None = None
) -> Iterator[list[_core.Group]]:
    """All ends of a group in this process."""
    fd = _core.create_segment(size, slot_bytes, NONCE, tunables or {})
    try:
        ends = [_core.Group(fd, rank, size, NONCE) for rank in range(size)]
    finally:
        os.close(fd)
    yield ends
    for end in ends:
        end.close()


def run_threads(
    size: int,
    program: Callable[[Rank], Any],
    slot_bytes: int = SLOT_BYTES,
    tunables: Mapping[str, int] | None = None,
) -> list[Any]:
    """``program`` on each rank, a thread each; what each returned, or the Fault it raised."""
    results: list[Any] = [None] * size

    def run(rank: Rank) -> None:
        try:
            results[rank.rank] = program(rank)
        except Exception as error:
            results[rank.rank] = error

    with groups(size, slot_bytes, tunables) as ends:
        ranks = [Rank(end, rank, size) for rank, end in enumerate(ends)]
        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, _core.Fault):
            raise result
    return results


@dataclass
class Worker:
    """A rank in a process of its own; see worker.py for the scenarios."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def says(self) -> Any:
        """The next thing that the scenario reported; fails if it ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"worker ended with {self.process.wait()}"
        return json.loads(line)


@contextmanager
def workers(
    size: int, scenario: str, first: int = 0, tunables: Mapping[str, int] | None = None
) -> Iterator[tuple[int, list[Worker]]]:
    """Ranks ``first`` and up of a group as processes; yields the segment and the workers."""
    fd = _core.create_segment(size, SLOT_BYTES, NONCE, tunables or {})
    command = [sys.executable, str(WORKER), str(_core.__file__), scenario, str(fd)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
        )
        for rank in range(first, size)
    ]
    try:
        yield fd, [Worker(process) for process in processes]
    finally:
        os.close(fd)
        for process in processes:
            process.kill()
            process.communicate()
