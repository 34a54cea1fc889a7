"""Group operations, recorded at the interface that all collectives of the package use.

While a step is recorded its groups have no fast path, and their methods are replaced by methods
that run the operation and record an instruction. Thus a single mechanism makes instructions of
collectives of DTensors, of data parallelism and of the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tilework.capture.program.group_call import GroupCall
from tilework.comm.contract import (
    FORMS,
    NO_FAST_PATH,
    FastPath,
    Operation,
    Options,
    ProcessGroup,
    Work,
)
from tilework.comm.per_call.internal import CallRecorder, recorded, set_recorder
from tilework.comm.world import current_world

#: A group's methods for messages, whose first argument is the tensor in a list.
_MESSAGES = ("send", "recv", "recv_anysource")
#: All further methods that call ``start``, unless a backend has methods of its own for them.
_METHODS = (
    *(form.method for form in FORMS.values()),
    *("allreduce_coalesced", "allgather_coalesced"),
)


@contextmanager
def paused() -> Iterator[CallRecorder | None]:
    """Pause this thread's recording within the block; gives the recorder."""
    before = set_recorder(None)
    try:
        yield before
    finally:
        set_recorder(before)


class RecordedWork(Work):
    """A Work that calls ``note`` once, when the program first waits for it, to record the wait."""

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
                vars(group)["start"] = self._collective(group)
                for method in _METHODS:
                    vars(group)[method] = MethodType(vars(ProcessGroup)[method], group)
                for method in _MESSAGES:
                    vars(group)[method] = self._message(group, method)
                vars(group)["empty"] = recorded(group.empty)

    def _collective(self, group: ProcessGroup) -> Callable[[Operation], Work]:
        of_class = type(group).start

        def start(operation: Operation) -> Work:
            form, opts = operation.form, Options.of(operation)
            args = form.arguments(operation)
            tensors, others = args[: len(form.sides)], args[len(form.sides) :]
            call = GroupCall(group, form.method, opts, others)
            return self._run(call, tensors, tensors[:1], partial(of_class, group, operation))

        return start

    def _message(self, group: ProcessGroup, method: str) -> Callable[..., Work]:
        def call(tensors: list[Tensor], *others: Any) -> Work:
            made = GroupCall(group, method, None, others)
            written = () if method == "send" else (tensors,)
            run = partial(getattr(type(group), method), group, tensors, *others)
            return self._run(made, (tensors,), written, run)

        return call

    def _run(
        self,
        call: GroupCall,
        tensors: tuple[Any, ...],
        written: Sequence[Any],
        run: Callable[[], Work],
    ) -> Work:
        with paused() as recorder:
            if recorder is not None:
                self._keep(tensors, written)
            work = run()
        if recorder is None:  # a comparison of ranks, not part of the program
            return work
        note = self._note(call, tensors, written)
        return RecordedWork(work, note) if call.is_async else work

    def leave(self) -> None:
        """Restore the groups' methods."""
        for group, fast_path in self.groups.items():
            group.fast_path = fast_path
            for method in ("start", *_METHODS, *_MESSAGES, "empty"):
                vars(group).pop(method, None)
