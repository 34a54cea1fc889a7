"""The ``threads`` backend: ranks are threads of one process.

A group is one :class:`_Hub`. A collective is two meetings there: ranks leave references to
their tensors and meet; each reads what it needs from the others' tensors; they meet again,
so that no tensor is changed while another rank reads it. Cost: two meetings, no extra copy.
Nothing here is fast; it is exact, deterministic and needs nothing built.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.engine_protocol import Fault, Operation, Parts, op_factor, op_type
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.reference import combine
from tilework.errors import DistBackendError

#: How often a waiting rank looks whether its peers are alive.
_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class _Meeting:
    """One collective: what the ranks brought, and how many have read it."""

    operations: list[Operation | None]
    arrived: int = 0
    left: int = 0


@dataclass(slots=True)
class _Message:
    source: int
    tag: int
    tensor: Tensor


@dataclass(slots=True)
class _Receive:
    source: int
    tag: int
    tensor: Tensor
    ticket: _Ticket


class _Hub:
    """What the ranks of one group share. Everything is guarded by ``changed``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[int, _Meeting] = {}
        self.messages: list[deque[_Message]] = [deque() for _ in range(size)]
        self.receives: list[list[_Receive]] = [[] for _ in range(size)]
        self.owners: list[threading.Thread | None] = [None] * size
        self.closed = [False] * size
        self.words: list[str | None] = [None] * size
        self.entered = ["nothing yet"] * size
        self.abortion: tuple[int, str, str] | None = None

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
                raise Fault("peer_lost", tuple(lost), "its thread ended or left the group")
            left = deadline - time.monotonic()
            if left <= 0:
                waited = time.monotonic() - start
                raise Fault("timeout", tuple(missing()), f"waited {waited:.1f} s")
            self.changed.wait(min(left, _LOOK_SECONDS))


def _is_dead(owner: threading.Thread | None) -> bool:
    return owner is not None and owner.ident is not None and not owner.is_alive()


class _Ticket:
    """Something that a rank waits for: a submitted operation, a send or a receive."""

    def __init__(self, engine: ThreadsEngine, peer: int, timeout: float) -> None:
        self._engine = engine
        self._peer = peer
        self._deadline = time.monotonic() + timeout
        self._done = False
        self._fault: tuple[str, tuple[int, ...], str] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.found_source = -1

    def complete(self, fault: tuple[Any, ...] | None = None) -> None:
        hub = self._engine.hub
        with hub.changed:
            if self._done:
                return
            self._done, self._fault = True, fault
            callbacks, self._callbacks = self._callbacks, []
            hub.changed.notify_all()
        for callback in callbacks:
            callback()

    def done(self) -> bool:
        return self._done

    def fault(self) -> tuple[str, tuple[int, ...], str] | None:
        return self._fault

    def source(self) -> int:
        return self.found_source

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        with self._engine.hub.changed:
            if not self._done:
                self._callbacks.append(fn)
                return
        fn()

    def wait(self, timeout: float) -> bool:
        hub = self._engine.hub
        limit = float("inf") if timeout < 0 else time.monotonic() + timeout
        with hub.changed:
            try:
                hub.wait(lambda: self._done, self._awaited, min(limit, self._deadline))
            except Fault as fault:
                if fault.args[0] == "timeout" and limit < self._deadline:
                    return False
                failure: tuple[Any, ...] | None = fault.args
            else:
                failure = None
        if failure is not None:
            self.complete(failure)
        if self._fault is not None:
            raise Fault(*self._fault)
        return True

    def _awaited(self) -> list[int]:
        """The ranks that this depends on; a submitted operation watches over itself."""
        hub, me = self._engine.hub, self._engine.rank
        if self._peer == _NOBODY:
            return []
        if self._peer >= 0:
            return [self._peer]
        others = [r for r in range(hub.size) if r != me]
        return others if len(hub.lost(others)) == len(others) else []


_NOBODY = -2


@dataclass(slots=True)
class _Worker:
    """The thread that runs a rank's asynchronous operations, in order."""

    queue: SimpleQueue[tuple[int, Operation, _Ticket] | None] = field(default_factory=SimpleQueue)
    thread: threading.Thread | None = None


class ThreadsEngine:
    """One rank's end of a hub."""

    fault_type: type[Exception] = Fault
    name = "threads"

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self._entered = 0
        self._queued = 0
        self._worker = _Worker()
        with hub.changed:
            hub.owners[rank] = threading.current_thread()
            hub.changed.notify_all()

    # -- collectives ---------------------------------------------------------------------

    def run(self, operation: Operation) -> None:
        if self._queued:
            self.submit(operation).wait(-1.0)
            return
        self._entered += 1
        self._meet(self._entered, operation)

    def submit(self, operation: Operation) -> _Ticket:
        ticket = _Ticket(self, _NOBODY, float("inf"))
        self._check_open()
        with self.hub.changed:
            self._entered += 1
            self._queued += 1
        if self._worker.thread is None:
            self._worker.thread = threading.Thread(
                target=self._work, name=f"tilework-threads-{self.rank}", daemon=True
            )
            self._worker.thread.start()
        self._worker.queue.put((self._entered, operation, ticket))
        return ticket

    def _work(self) -> None:
        for number, operation, ticket in iter(self._worker.queue.get, None):
            fault: tuple[Any, ...] | None = None
            try:
                self._meet(number, operation)
            except Fault as error:
                fault = error.args
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                fault = ("aborted", (self.rank,), why)
                self.abort("peer_lost", f"{self.rank};{why}")
            with self.hub.changed:
                self._queued -= 1
            ticket.complete(fault)

    def _check_open(self) -> None:
        if self.hub.closed[self.rank]:
            raise Fault("closed", (self.rank,), "")

    def _meet(self, number: int, operation: Operation) -> None:
        hub = self.hub
        deadline = time.monotonic() + operation.timeout
        with hub.changed:
            self._check_open()
            if hub.abortion is not None:
                raise Fault("aborted", (hub.abortion[0],), hub.abortion[2])
            meeting = hub.meetings.setdefault(number, _Meeting([None] * hub.size))
            meeting.operations[self.rank] = operation
            hub.entered[self.rank] = f"#{number} {operation.title or operation.kind}"
            meeting.arrived += 1
            hub.changed.notify_all()
            hub.wait(
                lambda: meeting.arrived == hub.size,
                lambda: self._missing(meeting),
                deadline,
            )
        operations = [op for op in meeting.operations if op is not None]
        at_fault, why = _disagreement(operations)
        if at_fault:
            raise Fault("mismatch", at_fault, why)
        later = _RUN[operation.kind](self.rank, operation, operations)
        with hub.changed:
            meeting.left += 1
            hub.changed.notify_all()
            # Leaving takes no rank longer than its copying: the deadline is a safety net.
            hub.wait(lambda: meeting.left == hub.size, list, deadline + 60)
            hub.meetings.pop(number, None)
        for target, value in later:
            _copy(target, value)

    def _missing(self, meeting: _Meeting) -> list[int]:
        if self.hub.closed[self.rank]:
            # Left meanwhile, with this under way: withdraw, so that nobody counts on this rank.
            meeting.operations[self.rank] = None
            meeting.arrived -= 1
            self._check_open()
        return [r for r, op in enumerate(meeting.operations) if op is None]

    # -- point to point ------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int, timeout: float) -> _Ticket:
        hub = self.hub
        ticket = _Ticket(self, dst, timeout)
        message = _Message(self.rank, tag, tensor.clone())
        with hub.changed:
            self._check_open()
            if hub.abortion is not None:
                raise Fault("aborted", (hub.abortion[0],), hub.abortion[2])
            if hub.lost([dst]):
                raise Fault("peer_lost", (dst,), "its thread ended or left the group")
            hub.messages[dst].append(message)
            done = self._deliver(dst)
        for receive, fault in done:
            receive.ticket.complete(fault)
        ticket.complete()
        return ticket

    def irecv(self, tensor: Tensor, src: int, tag: int, timeout: float) -> _Ticket:
        hub = self.hub
        ticket = _Ticket(self, src, timeout)
        with hub.changed:
            self._check_open()
            hub.receives[self.rank].append(_Receive(src, tag, tensor, ticket))
            done = self._deliver(self.rank)
        for receive, fault in done:
            receive.ticket.complete(fault)
        return ticket

    def _deliver(self, dst: int) -> list[tuple[_Receive, tuple[Any, ...] | None]]:
        """Match the receives of ``dst``, in the order posted, with its messages, in theirs."""
        done: list[tuple[_Receive, tuple[Any, ...] | None]] = []
        messages = self.hub.messages[dst]
        for receive in list(self.hub.receives[dst]):
            message = next((m for m in messages if _fits(m, receive)), None)
            if message is None:
                continue
            messages.remove(message)
            self.hub.receives[dst].remove(receive)
            receive.ticket.found_source = message.source
            done.append((receive, _take(message, receive, dst)))
        return done

    # -- state ---------------------------------------------------------------------------

    def sequence(self) -> int:
        return self._entered

    def last_entered(self) -> list[str]:
        return list(self.hub.entered)

    def say(self, text: str) -> None:
        with self.hub.changed:
            self.hub.words[self.rank] = text
            self.hub.changed.notify_all()

    def heard(self, timeout: float) -> list[str | None]:
        with self.hub.changed:
            self.hub.changed.wait_for(lambda: None not in self.hub.words, timeout)
            return list(self.hub.words)

    def abort(self, kind: str, text: str) -> None:
        with self.hub.changed:
            if self.hub.abortion is None:
                self.hub.abortion = (self.rank, kind, text)
            self.hub.changed.notify_all()

    def aborted(self) -> tuple[int, str, str] | None:
        return self.hub.abortion

    def close(self) -> None:
        hub = self.hub
        with hub.changed:
            if hub.closed[self.rank]:
                return
            hub.closed[self.rank] = True
            hub.changed.notify_all()
        if self._worker.thread is not None:
            self._worker.queue.put(None)
            if self._worker.thread is not threading.current_thread():
                self._worker.thread.join()

    def statistics(self) -> dict[str, int]:
        return {"operations": self._entered}


def _fits(message: _Message, receive: _Receive) -> bool:
    return receive.source in (-1, message.source) and receive.tag == message.tag


def _take(message: _Message, receive: _Receive, dst: int) -> tuple[Any, ...] | None:
    sent, wanted = message.tensor, receive.tensor
    if sent.dtype != wanted.dtype or sent.numel() != wanted.numel():
        why = (
            f"rank {message.source} sent {sent.numel()} x {sent.dtype}, "
            f"rank {dst} receives {wanted.numel()} x {wanted.dtype}"
        )
        return ("mismatch", (message.source, dst), why)
    with torch.inference_mode():
        wanted.view(-1).copy_(sent.view(-1))
    return None


# -- what ranks must agree on ------------------------------------------------------------


def _disagreement(operations: Sequence[Operation]) -> tuple[tuple[int, ...], str]:
    """The ranks at odds with rank 0 (or with each other's sizes), and in what."""
    first = operations[0]
    for field_name, of in _COMPARED.items():
        odd = tuple(r for r, op in enumerate(operations) if of(op) != of(first))
        if odd:
            return (0, *odd), f"they differ in {field_name}"
    for i, j in itertools.product(range(len(operations)), repeat=2):
        sent = _sent(operations[i], i, j, len(operations))
        wanted = _wanted(operations[j], j, i, len(operations))
        if sent != wanted:
            return (i, j), (
                f"they differ in sizes: rank {i} has {sent} elements for rank {j}, "
                f"which expects {wanted}"
            )
    return (), ""


_COMPARED: dict[str, Callable[[Operation], object]] = {
    "operation": lambda op: op.kind,
    "dtype": lambda op: op.dtype,
    "reduction": lambda op: op_type(op.reduce_op),
    "root": lambda op: op.root,
    "shape": lambda op: op.shape,
}


def _counts(parts: Parts, size: int) -> list[int]:
    if isinstance(parts, Tensor):
        return [parts.numel() // size] * size
    return [part.numel() for part in parts]


def _sent(op: Operation, me: int, peer: int, size: int) -> int | None:
    """How many elements ``me`` has for ``peer``; None where kinds compare shapes instead."""
    if op.kind in ("all_gather", "gather"):
        return _counts(op.inputs, 1)[0] if op.kind == "all_gather" or peer == op.root else None
    if op.kind in ("reduce_scatter", "all_to_all") or (op.kind == "scatter" and me == op.root):
        return _counts(op.inputs, size)[peer]
    return None


def _wanted(op: Operation, me: int, peer: int, size: int) -> int | None:
    if op.kind in ("reduce_scatter", "scatter"):
        return _counts(op.outputs, 1)[0] if op.kind == "reduce_scatter" or peer == op.root else None
    if op.kind in ("all_gather", "all_to_all") or (op.kind == "gather" and me == op.root):
        return _counts(op.outputs, size)[peer]
    return None


# -- the collectives: copy now what nobody changes, return what is to be written after ----

_Later = list[tuple[Tensor, Tensor]]


def _split(parts: Parts, size: int) -> Sequence[Tensor]:
    return (
        parts.view(-1).chunk(size)
        if isinstance(parts, Tensor) and parts.numel()
        else ([parts] * size if isinstance(parts, Tensor) else parts)
    )


def _copy(target: Tensor, value: Tensor) -> None:
    with torch.inference_mode():
        target.view(-1).copy_(value.view(-1))


def _barrier(rank: int, mine: Operation, all_of: Sequence[Operation]) -> _Later:
    return []


def _broadcast(rank: int, mine: Operation, all_of: Sequence[Operation]) -> _Later:
    if rank != mine.root:
        _copy(mine.outputs[0], all_of[mine.root].outputs[0])
    return []


def _all_reduce(rank: int, mine: Operation, all_of: Sequence[Operation]) -> _Later:
    if not len(mine.outputs):
        return []
    total = _combined([op.inputs[0] for op in all_of], all_of)
    return [(mine.outputs[0], total)]


def _combined(parts: Sequence[Tensor], all_of: Sequence[Operation]) -> Tensor:
    with torch.inference_mode():
        factors = [op_factor(op.reduce_op) for op in all_of]
        return combine(parts, op_type(all_of[0].reduce_op), factors)


def _gather(rank: int, mine: Operation, all_of: Sequence[Operation]) -> _Later:
    if mine.kind == "all_gather" or rank == mine.root:
        for target, op in zip(_split(mine.outputs, len(all_of)), all_of, strict=True):
            _copy(target, op.inputs[0])
    return []


def _scatter(rank: int, mine: Operation, all_of: Sequence[Operation]) -> _Later:
    _copy(mine.outputs[0], all_of[mine.root].inputs[rank])
    return []


def _reduce_scatter(rank: int, mine: Operation, all_of: Sequence[Operation]) -> _Later:
    size = len(all_of)
    parts = [_split(op.inputs, size)[rank].reshape(mine.outputs[0].shape) for op in all_of]
    return [(mine.outputs[0], _combined(parts, all_of))]


def _all_to_all(rank: int, mine: Operation, all_of: Sequence[Operation]) -> _Later:
    size = len(all_of)
    targets = _split(mine.outputs, size)
    values = [_split(op.inputs, size)[rank] for op in all_of]
    # In place, this rank's outputs are inputs that others may still have to read.
    own = {part.data_ptr() for part in _split(mine.inputs, size) if part.numel()}
    if any(target.data_ptr() in own for target in targets if target.numel()):
        return [(target, value.clone()) for target, value in zip(targets, values, strict=True)]
    for target, value in zip(targets, values, strict=True):
        _copy(target, value)
    return []


_RUN: dict[str, Callable[[int, Operation, Sequence[Operation]], _Later]] = {
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "all_gather": _gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}

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
    engine = ThreadsEngine(hub, rank)
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
