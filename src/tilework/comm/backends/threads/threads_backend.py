"""The ``threads`` backend: ranks are threads of one process.

Where the core is installed, it runs the operations: as on ``shm``, without the interpreter's lock,
but in memory that all ranks map once, and a rank has left the group when its thread ends.

Without the core, a group is one :class:`_Hub`. Ranks leave references to their tensors there and
meet. The last rank to come compares the headers. For a reduction, the last rank also reduces, and
each rank copies the result. For any other operation, each rank reads the others' tensors, and the
ranks meet once more, so that no tensor changes while another rank reads it.

All ranks share one interpreter. So a rank does a constant amount of work per operation if the data
permits, and does not wake single ranks: the last rank to come wakes all. The waiting rank that
looks first checks the others' threads for all.
"""

from __future__ import annotations

import copy
import math
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.engine_protocol import Abort, Fault, FaultArgs
from tilework.comm.backends.message_matcher import ANY_SOURCE, MessageMatcher, Receive, labels_fit
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.operation_header import Header, disagreement, header_of
from tilework.comm.backends.python_engine import PythonEngine
from tilework.comm.backends.shm.shm_group import ShmEngine, ShmGroup
from tilework.comm.backends.tensor_memory import unseen
from tilework.comm.backends.threads.threads_collectives import copy_flat, run_together
from tilework.comm.contract import ProcessGroup
from tilework.comm.forms import Operation
from tilework.comm.waits import by_rank
from tilework.errors import DistBackendError
from tilework.optional_core import core as _core

#: Seconds between looks of a waiting rank: a constant, plus a share for each rank, since the looks
#: of all ranks share an interpreter.
_LOOK_SECONDS, _LOOK_SECONDS_PER_RANK = 0.1, 0.001
#: Seconds that copying and reducing may take once all ranks have come: a safety net.
_COPY_SECONDS = 60.0
_GONE = "its thread ended or left the group"


class _Meeting:
    """A collective in progress. The last rank to come runs it for all."""

    def __init__(self, size: int, lock: threading.Lock) -> None:
        #: By rank; None: the rank has not come, or has left without waiting for the end.
        self.calls: list[tuple[Operation, Header] | None] = [None] * size
        #: Notified at the end, and by what else ends a wait.
        self.changed = threading.Condition(lock)
        self.is_over = False
        self.error: Exception | None = None

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank, call in enumerate(self.calls) if call is None]

    def is_idle(self) -> bool:
        """True if no rank writes to the others' tensors."""
        return self.is_over or None in self.calls

    def run(self) -> None:
        """Compare the ranks' operations, and run them."""
        calls = [call for call in self.calls if call is not None]
        try:
            at_fault, why = disagreement([header for _, header in calls])
            if at_fault:
                raise Fault("mismatch", at_fault, why)
            run_together([operation for operation, _ in calls])
        except Exception as error:
            self.error = error


@dataclass(slots=True, eq=False)
class _Message:
    """A message that a rank has sent, and that no receive has taken."""

    #: The group rank of the sender.
    source: int
    tag: int
    #: A copy of the sent tensor, since the sender may write to the tensor at once.
    tensor: Tensor
    #: The label of the dtype and shape, to be compared with the receive.
    label: int = 0


class _Hub:
    """The shared state of a group's ranks. ``lock`` guards all but messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.look_seconds = _LOOK_SECONDS + _LOOK_SECONDS_PER_RANK * size
        #: The end of rank 0 in the core's group; None: without the core.
        self.first_end: _core.Group | None = None
        self.lock = threading.Lock()
        #: Notified when all ranks have joined, and when all have reported a failure.
        self.changed = threading.Condition(self.lock)
        self.meetings: dict[int, _Meeting] = {}
        #: One matcher for each receiving rank.
        self.messages: list[MessageMatcher[_Message]] = [MessageMatcher() for _ in range(size)]
        self.owners: list[threading.Thread | None] = [None] * size
        self.joined = 0
        self.closed = [False] * size
        self.failures: list[str | None] = [None] * size
        self.entered = ["nothing yet"] * size
        #: By rank: the number of the operation that the rank's own thread has entered.
        self.blocked = [0] * size
        self.abortion: Abort | None = None
        #: The ranks that had ended or left at the last look, and the time of the next look.
        self._gone: list[int] = []
        self._next_look = 0.0

    def join(self, rank: int) -> None:
        """Register the calling thread as the thread of ``rank``."""
        with self.lock:
            self.owners[rank] = threading.current_thread()
            self.joined += 1
            if self.joined == self.size:
                self.changed.notify_all()

    def lost(self, ranks: Iterable[int]) -> list[int]:
        """The members of ``ranks`` that ended or left."""
        return [r for r in ranks if self.closed[r] or _is_dead(self.owners[r])]

    def lost_at_last_look(self) -> list[int]:
        """All ranks that had ended or left at the last look at the ranks' threads. A look that is
        older than 0.1 s is repeated, once for all waiting ranks.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._gone = self.lost(range(self.size))
        return self._gone

    def wake(self) -> None:
        """Wake every waiting rank, to check at once for lost ranks and aborts."""
        with self.lock:
            self._next_look = 0.0
            for meeting in self.meetings.values():
                meeting.changed.notify_all()
        for rank, messages in enumerate(self.messages):
            if messages.has_receives():
                self.end_receives(rank)

    def end_receives(self, rank: int) -> None:
        """End, with a fault, the receives of ``rank`` that cannot succeed."""
        self.messages[rank].end_receives(partial(self._receive_fault, rank))

    def _receive_fault(self, rank: int, receive: Receive) -> FaultArgs | None:
        if self.closed[rank]:
            return ("closed", (rank,), "")
        if self.abortion is not None:
            return ("aborted", (self.abortion[0],), self.abortion[2])
        if receive.source == ANY_SOURCE:
            others = [r for r in range(self.size) if r != rank]
            lost = self.lost(others)
            lost = lost if len(lost) == len(others) else []
        else:
            lost = self.lost([receive.source])
        if lost:
            return ("peer_lost", tuple(lost), _GONE)
        return receive.timeout_fault() if time.monotonic() > receive.deadline else None


def _is_dead(owner: threading.Thread | None) -> bool:
    return owner is not None and owner.ident is not None and not owner.is_alive()


class _ReceiveCompletion(PythonCompletion):
    """The completion of a receive. A thread that waits for it calls ``look`` every ``seconds``,
    which ends receives that cannot succeed.
    """

    def __init__(self, look: Callable[[], None], seconds: float, deadline: float) -> None:
        super().__init__(seconds)
        self._look = look
        self._deadline = deadline

    def wait(self, timeout: float) -> bool:
        begun = time.monotonic()
        limit = math.inf if timeout < 0 else begun + timeout
        until = min(limit, self._deadline)
        while not super().wait(min(self._look_seconds, max(until - time.monotonic(), 0.0))):
            if time.monotonic() >= limit:
                return False
            self._look()
            if timeout < 0:
                by_rank.look_if_long(begun)
        return True


class ThreadsEngine(PythonEngine):
    """A rank's end of a group of threads. All ranks of the group share a hub."""

    name = "threads"

    def __init__(self, hub: _Hub, rank: int, global_ranks: Sequence[int]) -> None:
        super().__init__(rank, global_ranks)
        self.hub = hub
        self._performed = 0
        #: The meeting of the operation in flight.
        self._meeting: _Meeting | None = None

    # -- collectives ---------------------------------------------------------------------

    def perform(self, operation: Operation) -> None:
        self._performed += 1
        try:
            error = self._meet(operation)
        finally:
            self._meeting = None
        if error is not None:
            raise copy.copy(error)

    def _meet(self, operation: Operation) -> Exception | None:
        """Bring this rank's operation to the meeting; return the error once all is done."""
        hub, number = self.hub, self._performed
        header = header_of(operation, self.rank, self.size)
        with hub.lock:
            self.check_open()
            meeting = hub.meetings.setdefault(number, _Meeting(hub.size, hub.lock))
            self._meeting = meeting
            meeting.calls[self.rank] = operation, header
            hub.entered[self.rank] = f"#{number} {operation.title or operation.kind}"
            if None in meeting.calls:
                self._await_end(meeting, operation.timeout)
                return meeting.error
        meeting.run()
        with hub.lock:
            meeting.is_over = True
            hub.meetings.pop(number, None)
            meeting.changed.notify_all()
        return meeting.error

    def _await_end(self, meeting: _Meeting, limit: float) -> None:
        """Wait until the meeting is over; the caller holds the hub's lock. Raise Fault if the group
        is aborted or closed, if a rank that has not come is lost, or after ``limit`` seconds.
        """
        hub, start = self.hub, time.monotonic()
        try:
            while not meeting.is_over:
                left = start + limit - time.monotonic()
                awaited = meeting.missing()
                if not awaited:  # the last rank writes to this rank's tensors
                    left += _COPY_SECONDS
                else:
                    self.check_open()
                    self._check_lost(awaited)
                if left <= 0:
                    raise self.late_fault(awaited, limit)
                meeting.changed.wait(min(left, hub.look_seconds))
                hub.lock.release()  # a look may abort this group
                try:
                    by_rank.look_if_long(start)
                finally:
                    hub.lock.acquire()
        except BaseException:
            meeting.changed.wait_for(meeting.is_idle, _COPY_SECONDS)
            meeting.calls[self.rank] = None  # nobody runs this rank's operation any more
            raise

    def _check_lost(self, awaited: Collection[int]) -> None:
        lost = sorted(set(self.hub.lost_at_last_look()).intersection(awaited))
        if lost:
            raise Fault("peer_lost", tuple(lost), _GONE)

    def waiting(self) -> tuple[int, Sequence[int]] | None:
        wait, meeting = super().waiting(), self._meeting
        if wait is None or meeting is None:
            return None
        missing = meeting.missing()
        return (wait[0], missing) if missing else None  # all have come, and are being copied

    # -- point to point ------------------------------------------------------------------

    @unseen
    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        self.check_open()
        if self.hub.lost([dst]):
            raise Fault("peer_lost", (dst,), _GONE)
        message = _Message(self.rank, tag, tensor.clone(), label)
        receive = self.hub.messages[dst].add_message(message)
        if receive is not None:
            _deliver(message, receive, dst)
        completion = PythonCompletion()
        completion.complete()
        return completion

    @unseen
    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        self.check_open()
        hub, deadline = self.hub, time.monotonic() + timeout
        completion = _ReceiveCompletion(
            partial(hub.end_receives, self.rank), hub.look_seconds, deadline
        )
        receive = Receive(src, tag, tensor, timeout, deadline, completion, label)
        message = hub.messages[self.rank].add_receive(receive)
        if message is not None:
            _deliver(message, receive, self.rank)
        return completion

    # -- state ---------------------------------------------------------------------------

    def last_entered(self) -> list[str]:
        return list(self.hub.entered)

    def report_failure(self, text: str) -> None:
        with self.hub.lock:
            self.hub.failures[self.rank] = text
            if None not in self.hub.failures:
                self.hub.changed.notify_all()

    def failure_reports(self, timeout: float) -> list[str | None]:
        with self.hub.changed:
            self.hub.changed.wait_for(lambda: None not in self.hub.failures, timeout)
            return list(self.hub.failures)

    def departed(self) -> Sequence[int]:
        return self.hub.lost(range(self.size))

    def publish_wait(self, number: int, name: str) -> None:
        self.hub.blocked[self.rank] = number

    def blocked(self) -> Sequence[tuple[int, int, str]]:
        hub, called = self.hub, self._entered
        return [
            (rank, number, f"operation {hub.entered[rank]}")
            for rank, number in enumerate(hub.blocked)
            if number > called
        ]

    def aborted(self) -> Abort | None:
        return self.hub.abortion

    def note_abort(self, by: int, kind: str, text: str) -> bool:
        with self.hub.lock:
            if self.hub.abortion is not None:
                return False
            self.hub.abortion = (by, kind, text)
        return True

    def announce_abort(self, kind: str, text: str) -> None:
        """Do nothing: the hub, which all ranks share, has recorded the abort."""

    def interrupt(self) -> None:
        self.hub.wake()

    def close(self) -> None:
        self.hub.closed[self.rank] = True
        super().close()

    def release(self) -> None:
        self.hub.wake()


def _deliver(message: _Message, receive: Receive, rank: int) -> None:
    """Copy a message into the tensor that ``rank`` receives it in, and end the receive."""
    sent, expected = message.tensor, receive.tensor
    receive.completion.source_rank = message.source
    if sent.dtype != expected.dtype or sent.numel() != expected.numel():
        why = (
            f"rank {message.source} sent {sent.numel()} x {sent.dtype}, "
            f"rank {rank} receives {expected.numel()} x {expected.dtype}"
        )
        receive.completion.complete(("mismatch", (message.source, rank), why))
        return
    if not labels_fit(message.label, receive):
        why = f"rank {message.source} sent a tensor of another dtype or shape than is received"
        receive.completion.complete(("mismatch", (message.source, rank), why))
        return
    copy_flat(expected, sent)
    receive.completion.complete()


# -- making groups -----------------------------------------------------------------------

# Hubs by name, while a group is being made: threads that share only a store find the hub that they
# are to share.
_hubs: dict[str, _Hub] = {}
_hubs_lock = threading.Lock()


def create_threads_group(request: DistributedBackendOptions, options: Any) -> NativeGroup:
    """Join the hub that the group's rank 0 makes. Blocks until all ranks joined, or raises a
    DistBackendError.
    """
    store, rank, size = request.store, request.group_rank, request.group_size
    if rank == 0:
        name = f"{os.getpid()}:{uuid.uuid4().hex}"
        with _hubs_lock:
            _hubs[name] = _hub_of(size)
        store.set("threads/hub", name)
    name = store.get("threads/hub").decode()
    hub = _hubs.get(name)
    if hub is None:
        first, process = request.global_ranks_in_group[0], name.partition(":")[0]
        message = (
            f"rank {request.global_ranks_in_group[rank]} is in process {os.getpid()}, but rank "
            f"{first} in process {process}: backend 'threads' joins threads of one process; use "
            f"'shm' for processes of one host"
        )
        if process == str(os.getpid()):
            message = f"rank {first} has given up making group {request.group_id!r}"
        store.set("threads/refused", message)
        raise DistBackendError(message)
    group = _end_of(hub, request)
    try:
        hub.join(rank)
        _await_all(hub, request)
    finally:
        if rank == 0:
            with _hubs_lock:
                _hubs.pop(name, None)
    return group


class _CoreEngine(ShmEngine):
    """The engine of a rank where the core is installed."""

    name = "threads"


class _CoreGroup(ShmGroup):
    """A rank's end of a group where the core is installed."""

    empty = ProcessGroup.empty  # other threads read any memory in place


def _hub_of(size: int) -> _Hub:
    """The hub of a new group, with rank 0's end of the core's group where the core can run it."""
    hub = _Hub(size)
    if _core is not None and size <= _core.MAX_RANKS:
        nonce = secrets.token_bytes(16)
        fd = _core.create_segment(size, _core.DEFAULT_SLOT_BYTES, nonce)
        try:
            hub.first_end = _core.Group(fd, 0, size, nonce, of_threads=True)
        finally:
            os.close(fd)
    return hub


def _end_of(hub: _Hub, request: DistributedBackendOptions) -> NativeGroup:
    """The end of this thread's rank."""
    rank, size = request.group_rank, request.group_size
    first = hub.first_end
    if first is None:
        engine = ThreadsEngine(hub, rank, request.global_ranks_in_group)
        return NativeGroup(engine, rank, size, request.timeout)
    core = _CoreEngine(first if rank == 0 else first.beside(rank), size)
    return _CoreGroup(core, rank, size, request.timeout)


def _await_all(hub: _Hub, request: DistributedBackendOptions) -> None:
    deadline = time.monotonic() + request.timeout.total_seconds()
    while True:
        with hub.changed:
            if hub.changed.wait_for(lambda: hub.joined == hub.size, hub.look_seconds):
                return
            missing = [
                request.global_ranks_in_group[r] for r, t in enumerate(hub.owners) if t is None
            ]
        if request.store.check(["threads/refused"]):
            raise DistBackendError(request.store.get("threads/refused").decode())
        if time.monotonic() > deadline:
            raise DistBackendError(
                f"ranks {missing} did not join group {request.group_id!r} within "
                f"{request.timeout.total_seconds():g} s",
                ranks=missing,
            )
