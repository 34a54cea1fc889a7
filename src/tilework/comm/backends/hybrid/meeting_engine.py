"""The base of engines whose ranks meet before data moves: headers, liveness, messages.

The ranks of each host gather their headers in shared memory, the first rank of each host (the
leader) exchanges them with the other hosts over a socket, and all compare them. Deaths, aborts and
announcements of messages come over the control channel. Subclasses move the data.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.completion import PythonCompletion, TorchCompletion
from tilework.comm.backends.control_channel import ControlChannel, FrameKind, connect_all
from tilework.comm.backends.engine_protocol import Completion, Fault, FaultArgs
from tilework.comm.backends.hybrid.host_ranks import Hosts
from tilework.comm.backends.hybrid.hosts import part_of
from tilework.comm.backends.hybrid.messages import PointToPoint, TransferWaits
from tilework.comm.backends.network_interfaces import reachable_address
from tilework.comm.backends.operation_header import called_kinds, compare_calls
from tilework.comm.backends.python_engine import PythonEngine, poll
from tilework.comm.backends.shm.shm_group import ShmEngine
from tilework.comm.backends.tensor_memory import as_bytes
from tilework.comm.backends.torch.movers import Mover
from tilework.comm.backends.torch.torch_calls import said_by
from tilework.comm.forms import Operation
from tilework.comm.waits import by_rank

#: Seconds between looks of a rank that waits for another host.
LOOK_SECONDS = 0.05
#: Seconds that a failing rank waits for other hosts to report causes, or missing ranks.
ASK_SECONDS = 0.3
_MISSING_SECONDS = 0.15
#: Seconds that explaining a failure takes at most.
EXPLAIN_SECONDS = 2.0
#: Seconds that a transfer has to end by itself after its connection was ended.
_GRACE_SECONDS = 0.2
#: Extra seconds of a rank whose leader waits for other hosts: the leader gives up first.
_LEADER_SECONDS = 1.5
#: The link's tag for collectives; messages use the following tags, one each.
COLLECTIVES = 0


@dataclass(frozen=True)
class Connections:
    """The connections of a rank to the other ranks."""

    hosts: Hosts
    global_ranks: Sequence[int]
    #: Carries messages about operations to all ranks, also of other hosts.
    control: ControlChannel
    #: On the first rank of a host: connections to the other hosts' first ranks, by host.
    leaders: dict[int, socket.socket]
    #: Moves the elements of tensors, of messages at least.
    link: Mover
    #: The engine of this host's ranks in shared memory; None if each rank is alone.
    shared: ShmEngine | None


class MeetingEngine(PythonEngine):
    """A rank's end of a group whose ranks compare headers before data moves."""

    #: False if the link ignores the tags of messages.
    matches_tags = True

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections.hosts.me, connections.global_ranks)
        self.hosts = connections.hosts
        self._shm = connections.shared
        self._control = connections.control
        self._leaders = connections.leaders
        self._link = connections.link
        self._messages = PointToPoint(self, self.matches_tags)
        self._changed = threading.Condition()
        self._performed = 0
        self._deadline = self._limit = 0.0
        self._sent_bytes = 0
        #: The last headers of all ranks, and the number of the operation.
        self._met = (0, b"")
        #: Held while connections of Gloo are ended: two threads at once may leave some open.
        self._ending = threading.Lock()
        #: The time of the first end of connections.
        self._ended_at: float | None = None
        self._waits = TransferWaits()
        self._left: set[int] = set()
        self._died: dict[int, float] = {}
        #: The number and the name of the last operation that the rank's own thread waited in.
        self._current = (0, "")
        #: By rank: the operation that the rank waits in, by its own answer.
        self._answers: dict[int, tuple[int, str]] = {}
        #: The number of questions so far, and of the last about messages; by rank: of the last that
        #: was answered, after all messages that the rank had announced before.
        self._asked = self._asked_of_messages = 0
        self._answered: dict[int, int] = {}
        self._failures: list[str | None] = [None] * self.size
        #: By host: the missing ranks there, as reported by ranks of that host.
        self._missing: dict[int, list[int]] = {}
        self._control.start(self, f"tilework-control-{self.rank}")

    # -- the meeting ---------------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """Start the clock of ``operation``. Raise Fault unless the group is open."""
        self.check_open()
        self._limit = operation.timeout
        self._deadline = time.monotonic() + self._limit
        self._performed += 1

    def meet(self, operation: Operation) -> None:
        """Compare headers of the operation with all other ranks; raise Fault unless all agree."""
        carried = provenance_digest.set_digest(0)  # only the header carries it
        try:
            at_fault, why = compare_calls(operation, self.rank, self.size, self._gathered)
        finally:
            provenance_digest.set_digest(carried)
        if at_fault:
            raise Fault("mismatch", at_fault, why)

    def _gathered(self, own: bytes) -> bytes:
        """The records of all ranks, which have the same length, in the order of the ranks."""
        try:
            everyone = self._exchanged(own)
        except Fault as fault:
            if fault.args[0] == "peer_lost":  # an abort that says why a rank left may be on the way
                poll(lambda: self.closed or self.aborted() is not None, ASK_SECONDS)
                self.check_open()
            raise
        self._met = self._performed, everyone
        return everyone

    def _exchanged(self, own: bytes) -> bytes:
        hosts, count = self.hosts, len(own)
        here = own
        if self._shm is not None:
            try:
                with self.local_faults():
                    here = self._shm.gather_bytes(own, self.left_seconds())
            except Fault as fault:
                if fault.args[0] == "timeout" and hosts.others:
                    raise self.late_fault(self._absent(fault.args[1]), self._limit) from None
                raise
        if not hosts.others:
            return here
        everyone = bytearray(count * self.size)
        if hosts.local_rank:
            self._deadline += _LEADER_SECONDS
        else:
            _place(everyone, count, hosts.local, here)
            self._exchange(here, everyone, count)
        if self._shm is not None:
            with self.local_faults():
                self._shm.spread_bytes(everyone, self.left_seconds())
        return bytes(everyone)

    def _exchange(self, own: bytes, everyone: bytearray, count: int) -> None:
        """Exchange this host's records ``own`` with other hosts' leaders. Runs on leaders only."""
        for host in self.hosts.others:
            with contextlib.suppress(OSError):  # the wait below notices a lost rank
                self._leaders[host].sendall(own)
        for host in self.hosts.others:
            ranks = self.hosts.ranks[host]
            theirs = bytearray(count * len(ranks))
            self._await_headers(host, memoryview(theirs))
            _place(everyone, count, ranks, theirs)

    def _await_headers(self, host: int, memory: memoryview) -> None:
        """Fill ``memory`` with the headers of ``host``; raise Fault if a rank is lost or late."""
        line = self._leaders[host]
        lost_at: float | None = None
        begun = time.monotonic()
        while memory:
            self.check_open()
            by_rank.look_if_long(begun)
            lost = self._lost(self.hosts.ranks[host][0])
            if lost and lost_at is None:
                lost_at = time.monotonic()
            count = _read(line, memory)
            memory = memory[count or 0 :]
            now = time.monotonic()
            # The leader's last headers may arrive after the news of the loss, which
            # took another connection. Read to the end; a cut connection has no end, so
            # read for a while.
            if lost_at is not None and (
                count is None or (not count and now - lost_at > ASK_SECONDS)
            ):
                self.check_open()  # if the group ended first, raises that
                raise Fault("peer_lost", tuple(lost), "its process ended or left the group")
            if memory and now > self._deadline:
                raise self.late_fault(self._absent(()), self._limit)

    def _lost(self, leader: int) -> list[int]:
        """The ranks whose loss ends the wait for ``leader``: it, or ranks that died before."""
        if leader in self._left or leader in self._died:
            return [leader]
        now = time.monotonic()
        # Another rank that died may have finished before.
        return [rank for rank, when in [*self._died.items()] if now - when > ASK_SECONDS]

    def _absent(self, here: Sequence[int]) -> tuple[int, ...]:
        """All missing ranks: ``here``, those that other hosts report, all of silent hosts."""
        others = self.hosts.others
        self._control.send_all(FrameKind.MISSING, json.dumps(list(here)).encode())
        poll(
            lambda: self.aborted() is not None or len(self._missing) == len(others),
            _MISSING_SECONDS,
        )
        self.check_open()
        missing = set(here)
        for host in others:
            missing.update(self._missing.get(host, self.hosts.ranks[host]))
        return tuple(sorted(missing))

    @contextlib.contextmanager
    def local_faults(self) -> Iterator[None]:
        """Within the block, faults of this host's shm group raise as faults of the group."""
        assert self._shm is not None
        try:
            yield
        except self._shm.fault_type as fault:
            raise Fault(*self._from_local(fault.args)) from None

    def _from_local(self, fault: tuple[Any, ...]) -> FaultArgs:
        """A fault of this host's shm group, with the ranks of the whole group."""
        kind, ranks, detail = fault
        if self.closed or kind == "closed":
            return ("closed", (self.rank,), "")
        on_host = None if self._shm is None else self._shm.aborted()
        if on_host is not None:
            by, _, text = on_host[2].partition(":")
            self.note_abort(int(by), on_host[1], text)
        abortion = self.aborted()
        if abortion is not None:
            return ("aborted", (abortion[0],), abortion[2])
        return (kind, tuple(self.hosts.local[r] for r in ranks), detail)

    def start_transfer(self, way: str, memory: Tensor, rank: int, tag: int) -> Any:
        """Begin to "send" or "recv" bytes to or from ``rank`` over the link; return the Work."""
        self._sent_bytes += memory.nbytes if way == "send" else 0
        backend = self._link.backend
        if backend is None:
            raise RuntimeError("closed")
        return getattr(backend, way)([memory], rank, tag)

    def left_seconds(self) -> float:
        """The seconds until the running operation times out, at least 0.1."""
        return max(self._deadline - time.monotonic(), 0.1)

    def attempt(self, act: Callable[[], object], peer: int) -> FaultArgs | None:
        """Run ``act``, a call into the link for ``peer``; return the fault, or None."""
        try:
            act()
        except RuntimeError as error:
            return self._why(error, peer)
        return None

    def await_transfer(self, wait: Callable[[], object], peer: int) -> FaultArgs | None:
        """Run ``wait``, for a transfer with ``peer``; return the fault, or None."""
        error = self._waits.run(wait, partial(self._is_gone, peer))
        return None if error is None else self._why(error, peer)

    def _is_gone(self, peer: int) -> bool:
        """True if ``peer`` died, or the link was ended, longer ago than a wait needs to end."""
        is_open = self._link.backend is not None and self.aborted() is None
        if self._ended_at is None and not is_open:
            self.interrupt()  # the wait began after the end of the group
        now, died = time.monotonic(), self._died.get(peer)
        if died is not None and now - died > 2 * ASK_SECONDS:
            return True
        return self._ended_at is not None and now - self._ended_at > _GRACE_SECONDS

    def _why(self, error: RuntimeError, peer: int) -> FaultArgs:
        poll(lambda: self.closed or self.aborted() is not None, 2 * ASK_SECONDS)
        try:
            self.check_open()
        except Fault as fault:
            return fault.args
        detail = said_by(str(error))
        ranks = tuple(self._died or self._left) or ((peer,) if peer >= 0 else ())
        late = "timed out" in str(error).lower() and not self._died
        return ("timeout" if late else "peer_lost", ranks, f"{self._link.name}: {detail}")

    # -- messages ------------------------------------------------------------------------

    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        return self._messages.send(tensor, dst, tag, timeout, label)

    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        return self._messages.receive(tensor, src, tag, timeout, label)

    def announce(self, rank: int, announcement: bytes) -> None:
        self._control.send(rank, FrameKind.ANNOUNCEMENT, announcement)

    def offer(self, tensor: Tensor, rank: int, number: int, timeout: float) -> Completion:
        return self._message("send", tensor, rank, number, timeout)

    def fetch(self, tensor: Tensor, rank: int, number: int, timeout: float) -> Completion:
        return self._message("recv", tensor, rank, number, timeout)

    def _message(
        self, way: str, tensor: Tensor, rank: int, number: int, timeout: float
    ) -> Completion:
        memory = as_bytes(tensor)
        try:
            work = self.start_transfer(way, memory, rank, COLLECTIVES + 1 + number)
        except RuntimeError as error:  # explained by who waits: this may be the control thread
            work = _FailedWork(error.with_traceback(None))
        return TorchCompletion(work, memory, timeout, partial(self.await_transfer, peer=rank))

    def group_fault(self, completion: Completion) -> FaultArgs | None:
        fault = completion.fault()
        if fault is None or isinstance(completion, PythonCompletion):
            return fault
        return self._from_local(fault)

    def unreachable(self, source: int) -> list[int]:
        gone = self._left | set(self._died)
        if source >= 0:
            return [source] if source in gone else []
        return sorted(gone) if len(gone) == self.size - 1 else []

    def wake(self) -> None:
        self._control.wake()

    def left_ranks(self) -> Sequence[int]:
        """The ranks that left the group in good order."""
        return [*self._left]

    def departed(self) -> Sequence[int]:
        return [*self._left, *self._died]

    def publish_wait(self, number: int, name: str) -> None:
        self._current = number, name

    def _ask(self) -> None:
        self._asked += 1
        self._control.send_all(FrameKind.QUESTION, str(self._asked).encode())

    def sees_messages(self) -> bool:
        if self._messages.arriving:
            return False
        others = {*range(self.size)} - {self.rank, *self.departed()}
        if any(self._answered.get(rank, 0) < self._asked_of_messages for rank in others):
            return False
        self._ask()
        self._asked_of_messages = self._asked
        return True

    def blocked(self) -> Sequence[tuple[int, int, str]]:
        self._ask()  # answers arrive before the next look
        return [
            (rank, number, f"operation #{number} {name}")
            for rank, (number, name) in sorted(self._answers.items())
            if number > self._entered
        ]

    def silent_ranks(self) -> tuple[int, ...]:
        """The other ranks that do not answer now: their processes are stopped, or cut off."""
        self._answers.clear()
        self._ask()
        others = {*range(self.size)} - {self.rank}
        poll(lambda: self.aborted() is not None or others <= {*self._answers}, ASK_SECONDS)
        return tuple(sorted(others - {*self._answers}))

    # -- frames of the control channel ---------------------------------------------------

    def on_frame(self, source: int, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.ANNOUNCEMENT:
            self._messages.on_announcement(source, payload)
            return
        if kind is FrameKind.QUESTION:
            answer = json.dumps([*self._current, int(payload)]).encode()
            self._control.send(source, FrameKind.ANSWER, answer)
        if kind is FrameKind.ABORT:
            abort = source, *json.loads(payload)
            if self.note_abort(*abort):
                self._abort_locally(*abort)
                self.interrupt()
        with self._changed:
            if kind is FrameKind.FAILURE_REPORT:
                self._failures[source] = payload.decode()
            elif kind is FrameKind.MISSING:
                self._missing[self.hosts.host_of(source)] = json.loads(payload)
            elif kind is FrameKind.ANSWER:
                number, name, self._answered[source] = json.loads(payload)
                self._answers[source] = number, name
            elif kind is FrameKind.GOODBYE:
                self._left.add(source)
            self._changed.notify_all()

    def on_disconnect(self, source: int) -> None:
        with self._changed:
            if source not in self._left:
                self._died[source] = time.monotonic()
                timer = threading.Timer(2 * ASK_SECONDS, self._give_up, [self._performed])
                timer.daemon = True
                timer.start()
            self._changed.notify_all()

    def is_moving(self) -> bool:
        """True while an operation's data may be on the way."""
        return False

    def _give_up(self, number: int) -> None:
        """End the link if operation ``number`` still waits: Gloo does not notice a cut link."""
        if self._performed == number and self.is_moving() and not self.closed:
            self.interrupt()

    def on_tick(self) -> bool:
        # The abort that follows a failure wakes this thread, which its explanation needs.
        return self._is_explained() and self._messages.end_receives()

    # -- the end -------------------------------------------------------------------------

    def check_open(self) -> None:
        if self._failed is not None:
            poll(self._is_explained, EXPLAIN_SECONDS)
        super().check_open()

    def _is_explained(self) -> bool:
        """False after a failure, until the abort that says more follows."""
        return self._failed is None or self.closed or self.aborted() is not None

    def last_entered(self) -> list[str]:
        number, records = self._met
        if not number:
            return ["nothing yet"] * self.size
        return [f"#{number} {kind}" for kind in called_kinds(records, self.size)]

    def report_failure(self, text: str) -> None:
        with self._changed:
            self._failures[self.rank] = text
        self._control.send_all(FrameKind.FAILURE_REPORT, text.encode())

    def failure_reports(self, timeout: float) -> list[str | None]:
        with self._changed:
            self._changed.wait_for(lambda: None not in self._failures, timeout)
            return list(self._failures)

    def announce_abort(self, kind: str, text: str) -> None:
        self._abort_locally(self.rank, kind, text)
        self._control.send_all(FrameKind.ABORT, json.dumps([kind, text]).encode())

    def _abort_locally(self, by: int, kind: str, text: str) -> None:
        if self._shm is not None:
            with contextlib.suppress(self._shm.fault_type):  # another thread closed it
                self._shm.abort(kind, f"{by}:{text}")

    def interrupt(self) -> None:
        self._control.wake()
        if self.may_wait():
            with self._ending:
                self._link.interrupt()
            if self._ended_at is None:
                self._ended_at = time.monotonic()

    def may_wait(self) -> bool:
        """True if there may be waits on the link, which takes a moment to end."""
        return True

    def release(self) -> None:
        self._control.send_all(FrameKind.GOODBYE)
        self.interrupt()
        if self._shm is not None:
            self._shm.close()
        self._messages.end_receives()
        self._waits.close()
        self._control.close()
        for line in self._leaders.values():
            line.close()
        self._link.release()


class _FailedWork:
    """The Work of a transfer that could not begin."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, limit: object) -> None:
        raise self._error


def _read(line: socket.socket, memory: memoryview) -> int | None:
    """The bytes read from ``line``; 0: none came soon; None: the connection has ended."""
    try:
        count = line.recv_into(memory)
    except TimeoutError:
        return 0
    except OSError:
        count = 0
    if not count:  # the other end is gone, which the control channel notices
        time.sleep(LOOK_SECONDS)
    return count or None


def connect_hosts(
    request: DistributedBackendOptions,
    hosts: Hosts,
    shared: ShmEngine | None,
    make_link: Callable[[str], Mover],
) -> Connections:
    """Connect all ranks, the first ranks of hosts, and a link at this host's address. Blocks."""
    address = "127.0.0.1" if not hosts.others else reachable_address(request.store)
    with contextlib.ExitStack() as undo:
        control = ControlChannel(connect_all(request, address))
        undo.callback(control.close)
        leaders = _connect_leaders(request, hosts, address)
        for leader in leaders.values():
            undo.callback(leader.close)
        link = make_link(address)
        undo.pop_all()
    return Connections(hosts, request.global_ranks_in_group, control, leaders, link, shared)


def _connect_leaders(
    request: DistributedBackendOptions, hosts: Hosts, address: str
) -> dict[int, socket.socket]:
    """On the first rank of each host connections to those of the other hosts, by host."""
    if not hosts.others or hosts.local_rank:
        return {}
    among_leaders = part_of(request, [ranks[0] for ranks in hosts.ranks], "leaders")
    leaders = connect_all(among_leaders, address)
    for leader in leaders.values():
        leader.settimeout(LOOK_SECONDS)
    return leaders


def _place(
    everyone: bytearray, count: int, ranks: Sequence[int], records: bytes | bytearray
) -> None:
    for place, rank in enumerate(ranks):
        everyone[count * rank : count * (rank + 1)] = records[count * place : count * (place + 1)]
