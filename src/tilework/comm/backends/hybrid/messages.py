"""Messages between two ranks, within a host and across: announced, matched, then moved.

The sender announces a message over the control channel and offers its data: in shared memory, or to
the engine between hosts. The receiver matches announcements with its receives, in order, and
fetches the data under the number that the sender gave it. So a receive from any rank sees all
hosts, and a message that does not fit is found before any byte moves.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from torch import Tensor

from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.engine_protocol import Completion, Fault, FaultArgs
from tilework.comm.backends.message_matcher import MessageMatcher, Receive, labels_fit

# A connection may end in the middle of a message: the other process is killed, the link is cut, or
# the peer closes. Gloo (as of torch 2.13) does not wake the threads that wait then. So the wait
# runs on another thread, which is abandoned once the connection is known to be gone.

#: Seconds between looks whether a connection is gone.
_LOOK_SECONDS = 0.05

_Outcome = SimpleQueue[RuntimeError | None]
#: A wait to run, and the queue for the outcome; None: the thread ends.
_Tasks = SimpleQueue[tuple[Callable[[], object], _Outcome] | None]


class TransferWaits:
    """A pool of threads that run the waits in Gloo, so that a calling thread can give up."""

    def __init__(self) -> None:
        self._idle = [_started()]
        #: The outcomes of the waits that run.
        self.running: set[_Outcome] = set()
        self._is_closed = False

    def run(self, wait: Callable[[], object], is_gone: Callable[[], bool]) -> RuntimeError | None:
        """Block until ``wait()`` has returned, or the connection is gone: ``is_gone``, which may be
        asked at any time.

        ``wait`` must keep alive everything that Gloo uses, also after the caller gave up. Returns
        the error, or an error that the connection is gone; None on success. The error is not
        raised: a traceback would keep torch's objects and Gloo's connections.
        """
        try:
            tasks = self._idle.pop()
        except IndexError:
            tasks = _started()
        outcome: _Outcome = SimpleQueue()
        self.running.add(outcome)
        tasks.put((wait, outcome))
        ended = False
        try:
            while not ended:
                try:
                    error = outcome.get(timeout=_LOOK_SECONDS)
                    ended = True
                except Empty:
                    if is_gone():
                        return RuntimeError("the connection ended within a message")
        finally:
            self.running.discard(outcome)
            if ended and not self._is_closed:
                self._idle.append(tasks)
            else:
                tasks.put(None)  # the thread ends if the wait ever returns
        return error

    def close(self) -> None:
        """End idle threads now, and busy threads when they become idle."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)


def _started() -> _Tasks:
    """Start a thread that runs waits; return the queue from which it takes them."""
    tasks: _Tasks = SimpleQueue()
    thread = threading.Thread(target=_serve, args=(tasks,), name="tilework-transfer", daemon=True)
    thread.start()
    return tasks


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        wait, outcome = task
        error = None
        try:
            wait()
        except RuntimeError as failure:
            error = failure.with_traceback(None)
        del task, wait
        outcome.put(error)
        del outcome, error


#: tag, number, bytes; the dtype's name follows.
_ANNOUNCEMENT = struct.Struct("=qIQQ")
#: The most messages of a rank in flight: the number of tags that every MPI has.
_NUMBERS = 1 << 18


class MessageTransport(Protocol):
    """The means by which messages are announced and moved. It also knows which ranks are lost."""

    rank: int

    def announce(self, rank: int, announcement: bytes) -> None: ...
    def offer(self, tensor: Tensor, rank: int, number: int, timeout: float) -> Completion: ...
    def fetch(self, tensor: Tensor, rank: int, number: int, timeout: float) -> Completion: ...
    def group_fault(self, completion: Completion) -> FaultArgs | None:
        """The fault of what ``offer`` or ``fetch`` gave, with ranks of the group; or None."""
        ...

    def check_open(self) -> None: ...
    def unreachable(self, source: int) -> list[int]:
        """The lost ranks because of which a receive from ``source`` (-1: any) must fail."""
        ...

    def wake(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Announcement:
    """A message that group rank ``source`` has offered, and no receive has taken."""

    source: int
    tag: int
    number: int
    nbytes: int
    label: int
    dtype: str


class PointToPoint:
    """Sends and receives the messages of a rank."""

    def __init__(self, transport: MessageTransport, by_tag: bool = True) -> None:
        self._transport = transport
        self._numbers = itertools.count()
        self._matcher: MessageMatcher[_Announcement] = MessageMatcher(by_tag)
        #: The receives whose data is on the way.
        self.arriving: set[PythonCompletion] = set()

    def send(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        """Announce ``tensor`` to ``dst``, and offer the data."""
        self._transport.check_open()
        number = next(self._numbers) % _NUMBERS
        completion = PythonCompletion()
        if tensor.nbytes:
            self._follow(self._transport.offer(tensor, dst, number, timeout), completion)
        else:
            completion.complete()
        self.announce(tensor, dst, tag, label, number)
        return completion

    def announce(self, tensor: Tensor, dst: int, tag: int, label: int = 0, number: int = 0) -> None:
        """Announce ``tensor``, whose data is offered under ``number``, to ``dst``."""
        head = _ANNOUNCEMENT.pack(tag, number, tensor.nbytes, label)
        self._transport.announce(dst, head + str(tensor.dtype).encode())

    def receive(
        self,
        tensor: Tensor,
        src: int,
        tag: int,
        timeout: float,
        label: int = 0,
        completion: PythonCompletion | None = None,
    ) -> PythonCompletion:
        """Begin to receive a message from ``src`` (-1: any rank) into ``tensor``."""
        self._transport.check_open()
        completion = completion or PythonCompletion()
        deadline = time.monotonic() + timeout
        receive = Receive(src, tag, tensor, timeout, deadline, completion, label)
        message = self._matcher.add_receive(receive)
        if message is not None:
            self._fetch(receive, message)
        self._transport.wake()
        return completion

    def on_announcement(self, source: int, announcement: bytes) -> None:
        """Note a message to this rank, and fetch it if a receive waits for it."""
        tag, number, nbytes, label = _ANNOUNCEMENT.unpack_from(announcement)
        dtype = announcement[_ANNOUNCEMENT.size :].decode()
        message = _Announcement(source, tag, number, nbytes, label, dtype)
        receive = self._matcher.add_message(message)
        if receive is not None:
            self._fetch(receive, message)

    def end_receives(self) -> bool:
        """End receives that cannot succeed; True if other receives are left."""
        return self._matcher.end_receives(self._fault_of)

    def _fault_of(self, receive: Receive) -> FaultArgs | None:
        try:
            self._transport.check_open()
        except Fault as fault:
            return fault.args
        lost = self._transport.unreachable(receive.source)
        if lost:
            return ("peer_lost", tuple(lost), "its process ended or left the group")
        return receive.timeout_fault() if time.monotonic() > receive.deadline else None

    def _fetch(self, receive: Receive, message: _Announcement) -> None:
        completion, expected = receive.completion, receive.tensor
        completion.source_rank = message.source
        if (message.nbytes, message.dtype) != (expected.nbytes, str(expected.dtype)):
            why = (
                f"rank {message.source} sent {message.nbytes} bytes of {message.dtype}, rank "
                f"{self._transport.rank} receives {expected.nbytes} bytes of {expected.dtype}"
            )
            completion.complete(("mismatch", (message.source, self._transport.rank), why))
        elif message.tag != receive.tag:
            why = f"rank {message.source} sent tag {message.tag}, tag {receive.tag} is received"
            completion.complete(("mismatch", (message.source, self._transport.rank), why))
        elif not labels_fit(message.label, receive):
            why = f"rank {message.source} sent a tensor of another dtype or shape than is received"
            completion.complete(("mismatch", (message.source, self._transport.rank), why))
        elif not message.nbytes:
            completion.complete()
        else:
            self.arriving.add(completion)
            completion.add_done_callback(partial(self.arriving.discard, completion))
            try:
                fetched = self._transport.fetch(
                    expected, message.source, message.number, receive.timeout
                )
            except Fault as fault:
                completion.complete(fault.args)
            else:
                self._follow(fetched, completion)

    def _follow(self, moved: Completion, completion: PythonCompletion) -> None:
        """End ``completion`` when ``moved`` ends, with the same outcome."""
        transport = self._transport
        moved.add_done_callback(lambda: completion.complete(transport.group_fault(moved)))
