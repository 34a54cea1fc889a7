"""The ``threads`` backend: ranks are threads of one process.

A group is one :class:`_Hub`. A collective is two meetings there: ranks leave references to
their tensors and meet; each reads what it needs from the others' tensors; they meet again,
so that no tensor is changed while another rank reads it. Cost: two meetings, no extra copy.
Nothing here is fast; it is exact, deterministic and needs nothing built.
"""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tilework.comm import long_waits
from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.engine_protocol import Abort, Fault, FaultArgs, Operation
from tilework.comm.backends.message_matcher import (
    ANY_SOURCE,
    MessageMatcher,
    Receive,
    labels_fit,
)
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.operation_header import Header, disagreement, header_of
from tilework.comm.backends.python_engine import PythonEngine
from tilework.comm.backends.threads_collectives import COLLECTIVES, copy
from tilework.errors import DistBackendError

#: Seconds between looks of a waiting rank whether its peers are alive.
_LOOK_SECONDS = 0.1
_GONE = "its thread ended or left the group"


@dataclass(slots=True)
class _Meeting:
    """A collective: each rank's operation, and how many ranks have read the others'."""

    operations: list[tuple[Operation, Header] | None]
    arrived: int = 0
    left: int = 0


@dataclass(slots=True, eq=False)
class _Message:
    source: int
    tag: int
    tensor: Tensor
    label: int = 0


class _Hub:
    """The state that the ranks of one group share, but for messages guarded by ``changed``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[int, _Meeting] = {}
        #: By receiving rank.
        self.messages: list[MessageMatcher[_Message]] = [MessageMatcher() for _ in range(size)]
        self.owners: list[threading.Thread | None] = [None] * size
        self.closed = [False] * size
        self.failures: list[str | None] = [None] * size
        self.entered = ["nothing yet"] * size
        #: By rank: the number of the operation that its own thread has entered.
        self.blocked = [0] * size
        self.abortion: Abort | None = None

    def lost(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that ended or left."""
        return [r for r in ranks if self.closed[r] or _is_dead(self.owners[r])]

    def wait(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], deadline: float
    ) -> None:
        """Wait, holding ``changed``, until ``ready``; raise Fault for whatever prevents it."""
        start = time.monotonic()
        while not ready():
            if self.abortion is not None:
                raise Fault("aborted", (self.abortion[0],), self.abortion[2])
            lost = self.lost(missing())
            if lost:
                raise Fault("peer_lost", tuple(lost), _GONE)
            left = deadline - time.monotonic()
            if left <= 0:
                waited = time.monotonic() - start
                raise Fault("timeout", tuple(missing()), f"waited {waited:.1f} s")
            self.changed.wait(min(left, _LOOK_SECONDS))
            self.changed.release()  # a look may abort this group
            try:
                long_waits.look(start)
            finally:
                self.changed.acquire()

    def wake(self) -> None:
        """Have every rank that waits look at what has changed."""
        with self.changed:
            self.changed.notify_all()
        for rank in range(self.size):
            self.end_receives(rank)

    def end_receives(self, rank: int) -> None:
        """End the receives of ``rank`` that cannot end well."""
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
    """The end of a receive; the rank that waits for it looks after its peer meanwhile."""

    def __init__(self, look: Callable[[], None], deadline: float) -> None:
        super().__init__()
        self._look = look
        self._deadline = deadline

    def wait(self, timeout: float) -> bool:
        begun = time.monotonic()
        limit = math.inf if timeout < 0 else begun + timeout
        until = min(limit, self._deadline)
        while not super().wait(min(_LOOK_SECONDS, max(until - time.monotonic(), 0.0))):
            if time.monotonic() >= limit:
                return False
            self._look()
            if timeout < 0:
                long_waits.look(begun)
        return True


class ThreadsEngine(PythonEngine):
    """A rank's end of a hub."""

    name = "threads"
    sees_messages = True

    def __init__(self, hub: _Hub, rank: int, global_ranks: Sequence[int]) -> None:
        super().__init__(rank, global_ranks)
        self.hub = hub
        self._performed = 0
        with hub.changed:
            hub.owners[rank] = threading.current_thread()
            hub.changed.notify_all()

    # -- collectives ---------------------------------------------------------------------

    def perform(self, operation: Operation) -> None:
        hub = self.hub
        deadline = time.monotonic() + operation.timeout
        self._performed += 1
        number = self._performed
        header = header_of(operation, self.rank, self.size)
        with hub.changed:
            self.check_open()
            meeting = hub.meetings.setdefault(number, _Meeting([None] * hub.size))
            meeting.operations[self.rank] = operation, header
            hub.entered[self.rank] = f"#{number} {operation.title or operation.kind}"
            meeting.arrived += 1
            hub.changed.notify_all()
            hub.wait(lambda: meeting.arrived == hub.size, lambda: self._missing(meeting), deadline)
        arrived = [each for each in meeting.operations if each is not None]
        at_fault, why = disagreement([header for _, header in arrived])
        if at_fault:
            raise Fault("mismatch", at_fault, why)
        writes = COLLECTIVES[operation.kind](self.rank, operation, [op for op, _ in arrived])
        with hub.changed:
            meeting.left += 1
            hub.changed.notify_all()
            # Leaving takes no rank longer than its copying: the deadline is a safety net.
            hub.wait(lambda: meeting.left == hub.size, list, deadline + 60)
            hub.meetings.pop(number, None)
        for target, value in writes:
            copy(target, value)

    def _missing(self, meeting: _Meeting) -> list[int]:
        if self.closed:
            # Left meanwhile, with this in flight: withdraw, so that nobody counts on this rank.
            meeting.operations[self.rank] = None
            meeting.arrived -= 1
            self.check_open()
        return [rank for rank, arrived in enumerate(meeting.operations) if arrived is None]

    # -- point to point ------------------------------------------------------------------

    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        self.check_open()
        if self.hub.lost([dst]):
            raise Fault("peer_lost", (dst,), _GONE)
        message = _Message(self.rank, tag, tensor.clone(), label)
        for receive, matched in self.hub.messages[dst].add_message(message):
            _deliver(matched, receive, dst)
        completion = PythonCompletion()
        completion.complete()
        return completion

    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        self.check_open()
        hub, deadline = self.hub, time.monotonic() + timeout
        completion = _ReceiveCompletion(partial(hub.end_receives, self.rank), deadline)
        receive = Receive(src, tag, tensor, timeout, deadline, completion, label)
        for matched, message in hub.messages[self.rank].add_receive(receive):
            _deliver(message, matched, self.rank)
        return completion

    # -- state ---------------------------------------------------------------------------

    def last_entered(self) -> list[str]:
        return list(self.hub.entered)

    def report_failure(self, text: str) -> None:
        with self.hub.changed:
            self.hub.failures[self.rank] = text
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
        with self.hub.changed:
            if self.hub.abortion is not None:
                return False
            self.hub.abortion = (by, kind, text)
        return True

    def announce_abort(self, kind: str, text: str) -> None:
        """Nothing: it is the hub that knows."""

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
    copy(expected, sent)
    receive.completion.complete()


# -- making groups -----------------------------------------------------------------------

# Hubs by name, for the time that a group is being made: how threads that share only a store
# find the object that they are to share.
_hubs: dict[str, _Hub] = {}
_hubs_lock = threading.Lock()


def create_threads_group(request: DistributedBackendOptions, options: Any) -> NativeGroup:
    """Join the hub that the group's rank 0 makes. Blocks until all ranks joined.

    Raises:
        DistBackendError: Some rank is in another process, or did not come in time.
    """
    store, rank, size = request.store, request.group_rank, request.group_size
    if rank == 0:
        name = f"{os.getpid()}:{uuid.uuid4().hex}"
        with _hubs_lock:
            _hubs[name] = _Hub(size)
        store.set("threads/hub", name)
    name = store.get("threads/hub").decode()
    hub = _hubs.get(name)
    if hub is None:
        message = (
            f"rank {request.global_ranks_in_group[rank]} is in process {os.getpid()}, but rank "
            f"{request.global_ranks_in_group[0]} in process {name.partition(':')[0]}: backend "
            f"'threads' joins threads of one process; use 'shm' for processes of one host"
        )
        store.set("threads/refused", message)
        raise DistBackendError(message)
    engine = ThreadsEngine(hub, rank, request.global_ranks_in_group)
    _await_all(hub, request)
    if rank == 0:
        with _hubs_lock:
            _hubs.pop(name, None)
    return NativeGroup(engine, rank, size, request.timeout)


def _await_all(hub: _Hub, request: DistributedBackendOptions) -> None:
    deadline = time.monotonic() + request.timeout.total_seconds()
    while True:
        with hub.changed:
            if hub.changed.wait_for(lambda: None not in hub.owners, _LOOK_SECONDS):
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
