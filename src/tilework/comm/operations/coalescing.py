"""Collectives that start one after the other, with one wait for all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from tilework.comm.contract import FastPath, ProcessGroup, SeveralWorks, Work
from tilework.comm.per_call.callsite import in_library
from tilework.comm.world import AnyGroup, current_world

#: The modules between a call of a collective and this module.
_COLLECTIVES = (__name__, "tilework.comm.operations.collectives")

_works: ContextVar[list[Work] | None] = ContextVar("tilework_coalesced", default=None)


class CoalescedWork(SeveralWorks):
    """The Work that stands for all operations of a :func:`coalescing_manager` block."""

    works: list[Work]

    def __init__(self) -> None:
        super().__init__([])


@contextmanager
def coalescing_manager(
    group: AnyGroup = None, device: Any = None, async_ops: bool = False
) -> Iterator[CoalescedWork]:
    """Start the collectives of the block one after the other, and wait for all at the end.

    Inside, collectives on tensors return None, and results must not be used. Functional
    collectives, collectives on objects and other calls of the library work as outside.

    Args:
        group: Accepted for torch's sake; each operation names a group.
        device: Accepted for torch's sake.
        async_ops: Do not wait at the end; call ``wait()`` on the block's ``CoalescedWork``.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> def program(rank):
        ...     a, b = torch.ones(2), torch.ones(3)
        ...     with dist.coalescing_manager():
        ...         dist.all_reduce(a)
        ...         dist.all_reduce(b)
        ...     return a.tolist() + b.tolist()
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, program)[0]
        [2.0, 2.0, 2.0, 2.0, 2.0]
    """
    block = CoalescedWork()
    token = _works.set(block.works)
    try:
        with current_world().state(_FastPaths).coalescing():
            yield block
    finally:
        _works.reset(token)
    if not async_ops:
        block.wait()


@contextmanager
def uncoalesced() -> Iterator[None]:
    """Within the block, collectives wait, also where a :func:`coalescing_manager` block is open."""
    token = _works.set(None)
    try:
        yield
    finally:
        _works.reset(token)


class _CoalescingPath(FastPath):
    """The fast path within a coalescing block, which waits at the end of the block."""

    def __init__(self, path: FastPath) -> None:
        self.path = path
        self.send, self.recv = path.send, path.recv  # type: ignore[method-assign]
        self.isend, self.irecv = path.isend, path.irecv  # type: ignore[method-assign]

    def run(self, *args: Any) -> bool:
        works = _open_block()
        if works is None:
            return self.path.run(*args)
        work = self.path.post(*args)
        if work is None:
            return False
        works.append(work)
        return True


def _open_block() -> list[Work] | None:
    """The works of the open block; None in the library, which uses results at once."""
    works = _works.get()
    if works is None:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _COLLECTIVES:
        frame = frame.f_back
    return None if frame is None or in_library[frame.f_code.co_filename] else works


class _FastPaths:
    """Exchanges the fast paths of this rank's groups while a block is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._replaced: list[tuple[ProcessGroup, _CoalescingPath]] = []

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """Give each group of this rank a :class:`_CoalescingPath` while the block is open."""
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                for group in current_world().records:
                    path = _CoalescingPath(group.fast_path)
                    self._replaced.append((group, path))
                    group.fast_path = path
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0:
                    self._restore()

    def _restore(self) -> None:
        for group, path in self._replaced:
            if group.fast_path is path:  # else the group has got another fast path
                group.fast_path = path.path
        self._replaced.clear()


def is_async(async_op: bool) -> bool:
    """True if a collective does not wait: if the caller says so, or within a block."""
    return async_op or _open_block() is not None


def finish(work: Work, async_op: bool) -> Work | None:
    """Wait for ``work`` if the collective blocks; return the value that the collective returns.

    This is ``work`` if ``async_op`` is true, else None. Within :func:`coalescing_manager` it is
    None, and the block waits at the end.
    """
    works = _open_block()
    if works is not None:
        works.append(work)
        return None
    if async_op:
        return work
    work.wait()
    return None
