"""Asynchronous saving: a copy in memory, which a thread writes, on a separate group."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilework.checkpoint.describing import local_view
from tilework.checkpoint.format import CHUNK_BYTES
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.ranks import Ranks, before_end
from tilework.checkpoint.save_planning import PlacedBox
from tilework.checkpoint.saving import Save, SaveOptions, prepare_save, write_and_commit
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.tensor_bytes import copy_all, lasting_bytes
from tilework.comm.operations.internal import span
from tilework.comm.per_call.internal import current_pretence
from tilework.comm.world import current_world
from tilework.errors import CheckpointError

#: Boxes begin at multiples of this in the copy.
_ALIGNMENT = 64
#: The interval of showing progress during a wait.
_SHOWN_SECONDS = 0.2


class PendingSave:
    """A save in the background. Made by :func:`~tilework.checkpoint.async_save`."""

    def __init__(self, path: str, total: int = 0, is_first: bool = True) -> None:
        self.path = path
        self._total, self._written, self._is_first = total, 0, is_first
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._is_seen = False

    def done(self) -> bool:
        """True if the save has ended, well or not. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is complete on all ranks. Not collective.

        Args:
            timeout: Seconds after which to give up waiting; the save continues.

        Raises:
            TimeoutError: The time is up.
            CheckpointError: The save has failed; on all ranks.
            PeerLostError: A rank died meanwhile.
        """
        if not self._has_ended(timeout):
            raise TimeoutError(
                f"the save to {self.path} has not ended after {timeout} s: it continues in the "
                f"background, and wait() can be called again"
            )
        if self._error is not None:
            self._is_seen = True
            raise self._error

    #: The name in futures.
    result = wait

    def _has_ended(self, timeout: float | None) -> bool:
        """Wait for the end of the save; the first rank shows progress. False if the time is up."""
        shown = None if self._is_first else False
        with Progress(f"saving {self.path}", self._total, shown, "the disk") as progress:
            if not progress.is_shown:
                return self._done.wait(timeout)
            progress.done = self._written
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            while (left := deadline - time.monotonic()) > 0:
                if self._done.wait(min(left, _SHOWN_SECONDS)):
                    break
                progress(self._written - progress.done)
            return self._done.is_set()

    def _count(self, nbytes: int) -> None:
        self._written += nbytes

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()


@dataclass
class _Background:
    """The last background save of this rank, and the memory of the copy, for reuse."""

    last: PendingSave | None = None
    copy: Tensor | None = None
    #: True while :meth:`finish` is registered to be called as this rank ends.
    is_closed_with_rank: bool = False

    def close_with_rank(self) -> None:
        if not self.is_closed_with_rank:
            self.is_closed_with_rank = True
            before_end(self.finish)

    def finish(self) -> None:
        self.is_closed_with_rank = False
        last, self.last, self.copy = self.last, None, None
        if last is None:
            return
        last._has_ended(None)
        if last._error is not None and not last._is_seen:
            print(f"the save to {last.path} has failed: {last._error}", file=sys.stderr)


def raise_pending() -> None:
    """Wait for this rank's running save; raise an error that no call has raised yet. Local."""
    background = current_world().states.get(_Background)
    last = None if background is None else background.last
    if background is None or last is None:
        return
    last._has_ended(None)
    background.last = None
    if last._error is not None and not last._is_seen:
        raise CheckpointError(f"the save to {last.path} before this one has failed: {last._error}")


def start(storage: Storage, state: Any, ranks: Ranks, options: SaveOptions) -> PendingSave:
    """Copy this rank's part, and start a thread that writes the copy. Collective."""
    background = current_world().state(_Background)
    background.close_with_rank()
    save = prepare_save(storage, state, ranks, options, raise_pending)
    pending = PendingSave(storage.location, save.nbytes, ranks.is_first)
    begins = Future[bool]()

    def begin() -> None:
        copies, pretence = _copied(save, background), current_pretence()
        if pretence is not None:  # there is nothing to write
            pretence.saved[storage.location] += save.nbytes
            save.release()
            pending._end(None)
            return

        def run() -> None:
            if not begins.result():
                return
            failure: BaseException | None = None
            try:
                with span("save a checkpoint"):
                    write_and_commit(save, copies.elements_of, ranks, pending._count)
            except BaseException as error:
                failure = error
            pending._end(failure)

        # Not a daemon: the interpreter waits for it before it ends.
        context = copy_context()
        threading.Thread(target=context.run, args=(run,), name="checkpoint", daemon=False).start()

    # A rank without memory for the copy, or without a thread, informs the others before.
    try:
        ranks.gather(begin)
    except BaseException:
        begins.set_result(False)
        save.release()
        raise
    save.leaves = {}  # the copy is enough
    background.last = pending
    begins.set_result(True)
    return pending


@dataclass(frozen=True)
class _Copies:
    """Copies of boxes in one memory, each from the byte in ``starts`` on."""

    memory: Tensor
    starts: Mapping[PlacedBox, int]

    def elements_of(self, placed: PlacedBox) -> Iterator[Tensor]:
        start = self.starts[placed]
        for at in range(start, start + placed.nbytes, CHUNK_BYTES):
            yield self.memory[at : min(at + CHUNK_BYTES, start + placed.nbytes)]


def _copied(save: Save, background: _Background) -> _Copies:
    starts: dict[PlacedBox, int] = {}
    sources: list[tuple[int, Tensor]] = []
    total = 0
    for each in (box for plan in save.files for box in plan.boxes):
        path, _ = save.merged.sources[each.tensor]
        sources.append((total, local_view(save.leaves[path], each.box, save.ranks.here)))
        starts[each] = total
        total += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = background.copy
    if memory is None or not total <= memory.numel() <= 2 * total + (1 << 20):
        background.copy = memory = None
        try:
            background.copy = memory = lasting_bytes(total)
        except (OSError, MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"there is no memory for the copy of {total:,} bytes that async_save makes "
                f"({error}): free memory, or call save(), which makes no copy"
            ) from error
    copy_all(sources, memory)
    return _Copies(memory, starts)
