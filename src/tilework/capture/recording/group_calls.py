"""Group operations, recorded at the interface that all collectives of the package use.

While a step is recorded its groups have no fast path, and their methods are replaced by methods
that run the operation and record an instruction. Thus a single mechanism makes instructions of
collectives of DTensors, of data parallelism and of the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tilework.capture.program.group_call import GroupCall
from tilework.comm.contract import NO_FAST_PATH, FastPath, Options, ProcessGroup, Work
from tilework.comm.per_call.call_recorder import CallRecorder, recorded, set_recorder
from tilework.comm.world import current_world

#: By method: the arguments that are written.
_WRITTEN: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "reduce", "broadcast"), (0,)),
    **dict.fromkeys(("allgather", "allgather_into_tensor", "allgather_coalesced"), (0,)),
    **dict.fromkeys(("gather", "scatter", "reduce_scatter", "reduce_scatter_tensor"), (0,)),
    **dict.fromkeys(("alltoall", "alltoall_single", "recv", "recv_anysource"), (0,)),
    **dict.fromkeys(("send", "barrier"), ()),
}


@contextmanager
def paused() -> Iterator[CallRecorder | None]:
    """Within the block this thread records nothing; gives the thread's recorder."""
    before = set_recorder(None)
    try:
        yield before
    finally:
        set_recorder(before)


class RecordedWork(Work):
    """A Work that notes when the program first waits for it.

    Args:
        work: The Work.
        note: Called once, when the program first waits; records the wait.
    """

    def __init__(self, work: Work, note: Callable[[], None]) -> None:
        self._work, self._note = work, note
        self._noted = False

    def _wait_is_noted(self) -> None:
        if not self._noted:
            self._noted = True
            self._note()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait_is_noted()
        return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        self._wait_is_noted()
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self._wait_is_noted()
        return self._work.get_future()


class RecordedGroups:
    """Records the operations of all groups of this rank until :meth:`leave`.

    Args:
        keep: Called before each operation with the tensors, and with those that are written.
        note: Called with each operation after it ran: the call, the tensors and the written
            tensors. Returns the function to call when the program waits for the operation.
    """

    def __init__(
        self,
        keep: Callable[[tuple[Any, ...], Sequence[Any]], None],
        note: Callable[[GroupCall, tuple[Any, ...], Sequence[Any]], Callable[[], None]],
    ) -> None:
        self._keep, self._note = keep, note
        self.groups: dict[ProcessGroup, FastPath] = {}
        for group in current_world().records:
            if isinstance(group, ProcessGroup):
                self.groups[group] = group.fast_path
                group.fast_path = NO_FAST_PATH
                for method, written in _WRITTEN.items():
                    setattr(group, method, self._recorded(group, method, written))
                vars(group)["empty"] = recorded(group.empty)

    def _recorded(
        self, group: ProcessGroup, method: str, written: tuple[int, ...]
    ) -> Callable[..., Work]:
        run = getattr(type(group), method)

        def call(*args: Any) -> Work:
            rest = args
            opts = None
            if args and isinstance(args[-1], Options):
                rest, opts = args[:-1], args[-1]
            count = max((i + 1 for i, each in enumerate(rest) if _has_tensor(each)), default=0)
            tensors, others = rest[:count], rest[count:]
            targets = [tensors[i] for i in written if i < count]
            with paused() as recorder:
                if recorder is not None:
                    self._keep(tensors, targets)
                work: Work = run(group, *args)
            if recorder is None:  # a comparison of ranks, not part of the program
                return work
            made = GroupCall(group, method, opts, others)
            note = self._note(made, tensors, targets)
            return RecordedWork(work, note) if made.is_async else work

        return call

    def leave(self) -> None:
        """Restore the groups' methods."""
        for group, fast_path in self.groups.items():
            group.fast_path = fast_path
            for method in (*_WRITTEN, "empty"):
                vars(group).pop(method, None)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return isinstance(value, list | tuple) and any(map(_has_tensor, value))
