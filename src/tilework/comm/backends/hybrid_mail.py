"""Messages between two ranks, within a host and across: announced, matched, then moved.

The sender announces a message over a wire and offers its data: in shared memory, or to the
engine between hosts. The receiver matches announcements with its receives, in order, and fetches
the data under the number that the sender gave it. So a receive from any rank sees all hosts,
and a message that does not fit is found before a byte of it has moved.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tilework.comm.backends.engine_protocol import Fault, Ticket
from tilework.comm.backends.ordered import Errand, FaultArgs

#: tag, number, bytes; the dtype's name follows.
_ANNOUNCEMENT = struct.Struct("=qIQ")
_NUMBERS = 1 << 30


class Post(Protocol):
    """How data is moved once both sides know of it, and what is known of other ranks."""

    rank: int

    def announce(self, rank: int, announcement: bytes) -> None: ...
    def offer(self, tensor: Tensor, rank: int, number: int, timeout: float) -> Ticket: ...
    def fetch(self, tensor: Tensor, rank: int, number: int, timeout: float) -> Ticket: ...
    def settled(self, ticket: Ticket) -> FaultArgs | None: ...
    def check_open(self) -> None: ...
    def unreachable(self, source: int) -> list[int]:
        """The lost ranks without which a receive from ``source`` (-1: any) cannot end."""
        ...

    def wake(self) -> None: ...


@dataclass(slots=True)
class _Announced:
    source: int
    tag: int
    number: int
    nbytes: int
    dtype: str


@dataclass(slots=True)
class _Receive:
    source: int
    tag: int
    tensor: Tensor
    timeout: float
    deadline: float
    errand: Errand


class Mailbox:
    """One rank's messages."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._announced: list[_Announced] = []
        self._receives: list[_Receive] = []

    def send(self, tensor: Tensor, dst: int, tag: int, timeout: float) -> Errand:
        """Announce ``tensor``; the errand ends when it may be reused."""
        self._post.check_open()
        number = next(self._numbers) % _NUMBERS
        errand = Errand()
        if tensor.nbytes:
            self._follow(self._post.offer(tensor, dst, number, timeout), errand)
        else:
            errand.complete()
        head = _ANNOUNCEMENT.pack(tag, number, tensor.nbytes)
        self._post.announce(dst, head + str(tensor.dtype).encode())
        return errand

    def receive(self, tensor: Tensor, src: int, tag: int, timeout: float) -> Errand:
        """Receive from ``src``, or from any rank for -1."""
        self._post.check_open()
        errand = Errand()
        receive = _Receive(src, tag, tensor, timeout, time.monotonic() + timeout, errand)
        with self._lock:
            self._receives.append(receive)
        self._match()
        self._post.wake()
        return errand

    def hear(self, source: int, announcement: bytes) -> None:
        """A message from ``source`` was announced."""
        tag, number, nbytes = _ANNOUNCEMENT.unpack_from(announcement)
        dtype = announcement[_ANNOUNCEMENT.size :].decode()
        with self._lock:
            self._announced.append(_Announced(source, tag, number, nbytes, dtype))
        self._match()

    def sweep(self) -> bool:
        """End receives that cannot end well; return whether any is left."""
        now = time.monotonic()
        with self._lock:
            waiting = list(self._receives)
        for receive in waiting:
            fault = self._hopeless(receive, now)
            if fault is not None:
                with self._lock:
                    if receive not in self._receives:
                        continue
                    self._receives.remove(receive)
                receive.errand.complete(fault)
        return bool(self._receives)

    def _hopeless(self, receive: _Receive, now: float) -> FaultArgs | None:
        try:
            self._post.check_open()
        except Fault as fault:
            return fault.args
        lost = self._post.unreachable(receive.source)
        if lost:
            return ("peer_lost", tuple(lost), "its process ended or left the group")
        if now > receive.deadline:
            awaited = () if receive.source < 0 else (receive.source,)
            return ("timeout", awaited, f"waited {receive.timeout:.1f} s for a message")
        return None

    def _match(self) -> None:
        """Pair receives, in the order posted, with messages, in the order announced."""
        pairs = []
        with self._lock:
            for receive in list(self._receives):
                message = next((m for m in self._announced if _fits(m, receive)), None)
                if message is not None:
                    self._announced.remove(message)
                    self._receives.remove(receive)
                    pairs.append((receive, message))
        for receive, message in pairs:
            self._fetch(receive, message)

    def _fetch(self, receive: _Receive, message: _Announced) -> None:
        errand, wanted = receive.errand, receive.tensor
        errand.found_source = message.source
        if (message.nbytes, message.dtype) != (wanted.nbytes, str(wanted.dtype)):
            why = (
                f"rank {message.source} sent {message.nbytes} bytes of {message.dtype}, rank "
                f"{self._post.rank} receives {wanted.nbytes} bytes of {wanted.dtype}"
            )
            errand.complete(("mismatch", (message.source, self._post.rank), why))
        elif not message.nbytes:
            errand.complete()
        else:
            try:
                ticket = self._post.fetch(wanted, message.source, message.number, receive.timeout)
            except Fault as fault:
                errand.complete(fault.args)
            else:
                self._follow(ticket, errand)

    def _follow(self, ticket: Ticket, errand: Errand) -> None:
        ticket.add_done_callback(lambda: errand.complete(self._post.settled(ticket)))


def _fits(message: _Announced, receive: _Receive) -> bool:
    return receive.source in (-1, message.source) and receive.tag == message.tag
