"""Calls that this rank has made and that are not answered yet."""

from __future__ import annotations

import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilework.comm.per_call.internal import Site, format_site
from tilework.errors import PeerLostError, RpcTimeoutError
from tilework.rpc.futures import RpcFuture
from tilework.rpc.references import Entry, HeldReference
from tilework.rpc.workers import WorkerInfo


class InFlight:
    """A counter of things that have begun and not ended, such as calls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0
        #: The number that ever began.
        self.total = 0

    def begin(self) -> None:
        with self._changed:
            self._now += 1
            self.total += 1

    def end(self) -> None:
        with self._changed:
            self._now -= 1
            if not self._now:
                self._changed.notify_all()

    def wait_none(self, deadline: float) -> bool:
        """Wait until none is left; True if that came before ``deadline`` (time.monotonic())."""
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        with self._changed:
            return self._changed.wait_for(lambda: not self._now, left)


#: The end of a call: returns the result, or raises.
Outcome = Callable[[], Any]
Task = Callable[[], None]


@dataclass(eq=False, kw_only=True)
class RemoteCall(ABC):
    """A call of this rank to another rank."""

    to: WorkerInfo
    #: The name of the called function, for messages.
    what: str
    #: The place of the call in the user's program; None: no code of the user has made the call.
    site: Site | None
    timeout: float
    inner: bool = False
    #: The time of ``time.monotonic`` at which the call is late; set at construction.
    deadline: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout

    @abstractmethod
    def finish(self, outcome: Outcome) -> Task | None:
        """End the call by ``outcome``; never blocks. Returns work that may block, or None."""

    def lost(self) -> PeerLostError:
        return PeerLostError(
            f"{self.to_where()} died or left before {self.what} returned{self._called()}",
            ranks=[self.to.id],
        )

    def late(self) -> RpcTimeoutError:
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({self.timeout:g} s): {self.what} on "
            f"{self.to_where()}{self._called()}. Pass a longer timeout if the call may take longer"
        )

    def to_where(self) -> str:
        return f"worker {self.to.name!r} (rank {self.to.id})"

    def _called(self) -> str:
        site = format_site(self.site)
        return f", called at {site}" if site else ""


@dataclass(eq=False, kw_only=True)
class BlockingCall(RemoteCall):
    """A call whose caller blocks in :meth:`wait` until the call has ended."""

    _ended: threading.Lock = field(default_factory=threading.Lock)
    _outcome: Outcome | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ended.acquire()

    def finish(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._ended.release()

    def wait(self) -> Any:
        self._ended.acquire()
        outcome, self._outcome = self._outcome, None  # which knows the call
        assert outcome is not None
        return outcome()


@dataclass(eq=False, kw_only=True)
class FutureCall(RemoteCall):
    """A call whose outcome completes :attr:`future`."""

    future: RpcFuture[Any] = field(default_factory=RpcFuture)

    def finish(self, outcome: Outcome) -> Task:
        return lambda: self._complete(outcome)

    def _complete(self, outcome: Outcome) -> None:
        try:
            result = outcome()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


@dataclass(eq=False, kw_only=True)
class CreatingCall(RemoteCall):
    """A call whose result stays on the called rank, which becomes the owner of the value."""

    #: The entry for the value on this rank; an :class:`Owned` if the rank has called itself.
    entry: Entry

    def finish(self, outcome: Outcome) -> Task:
        return lambda: self._note(outcome)

    def _note(self, outcome: Outcome) -> None:
        try:
            outcome()
        except Exception as error:
            self.entry.fail(error)
        else:
            if isinstance(self.entry, HeldReference):
                self.entry.confirmed = True


class Calls:
    """The calls of this rank that have not been answered, by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, RemoteCall] = {}
        self._awake_at = math.inf
        #: Those that have not ended, with whatever their end sets off; RPC's own ones aside.
        self.work = InFlight()

    def add(self, call: RemoteCall) -> tuple[int, bool]:
        """Add ``call``; return the number, and True if the watching thread must wake earlier."""
        if not call.inner:
            self.work.begin()
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = call
            return number, call.deadline < self._awake_at

    def pop(self, number: int) -> RemoteCall | None:
        """Remove and return a call, which the caller must end; None if it was removed before."""
        with self._lock:
            return self._calls.pop(number, None)

    def ended(self, call: RemoteCall) -> None:
        """Note that ``call``, and all work that the end sets off, is over."""
        if not call.inner:
            self.work.end()

    def numbers(self, where: Callable[[RemoteCall], bool]) -> list[int]:
        with self._lock:
            return [number for number, call in self._calls.items() if where(call)]

    def late(self, now: float) -> list[int]:
        return self.numbers(lambda call: call.deadline <= now)

    def sleep_until(self, at_most: float) -> float:
        with self._lock:
            soonest = min((call.deadline for call in self._calls.values()), default=math.inf)
            self._awake_at = min(soonest, at_most)
            return self._awake_at
