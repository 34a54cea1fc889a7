"""Reference counts across ranks: a value lives exactly as long as a reference to it.

The owner of a value counts the references of each rank. A reference that the owner itself sends is
counted when it is sent. If another rank sends a reference, that rank keeps a reference (a *pin*)
until the receiver says that it HOLDS a reference. The receiver says that only after it has asked
the owner to ADD a reference, and the owner has answered. Therefore a rank that the owner has
counted holds the value at every moment.

Messages between two ranks arrive in order. Therefore counting sums is enough: a rank that drops all
references that it has reports the number to the owner, and references that are on their way to that
rank remain counted.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tilework.errors import PeerLostError
from tilework.rpc.futures import RpcFuture
from tilework.rpc.message import COUNTED, FIRST_PIN, NEW, MessageKind, Ref, RefId


class Owned:
    """The entry of the owner: the value, once it exists, as long as any rank refers to it."""

    __slots__ = ("__weakref__", "_error", "_value", "holders", "id", "owner", "pending")

    def __init__(self, id: RefId, owner: int) -> None:
        self.id, self.owner = id, owner
        #: By rank: the number of references that it was given and has not dropped.
        self.holders: dict[int, int] = {}
        #: Completes, with None, when the value is there; None once it is.
        self.pending: RpcFuture[None] | None = RpcFuture()
        # Not in the future, into which Python's garbage collector cannot look.
        self._value: Any = None
        self._error: BaseException | None = None

    def complete(self, value: Any) -> None:
        self._value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.set_result(None)

    def get(self) -> Any:
        pending = self.pending
        if pending is not None:
            pending.wait()
        if self._error is not None:
            raise self._error
        return self._value


class HeldReference:
    """The entry on a rank that holds references to a value which another rank owns."""

    __slots__ = ("__weakref__", "confirmed", "error", "id", "owner")

    def __init__(self, id: RefId, owner: int) -> None:
        self.id, self.owner = id, owner
        #: True if the owner is known to have counted this rank.
        self.confirmed = False
        #: Why there is no value, if so.
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error


Entry = Owned | HeldReference


#: Sends one of the messages about references: kind, to, number, the reference if any.
Send = Callable[[MessageKind, int, int, Sequence[Ref]], None]


class _Watch(weakref.ref[HeldReference]):
    """Calls ``gone``, at any time, when this rank has no reference left."""

    __slots__ = ("id", "owner")

    def __init__(self, entry: HeldReference, gone: Callable[[_Watch], None]) -> None:
        super().__init__(entry, gone)  # type: ignore[call-arg]
        self.id, self.owner = entry.id, entry.owner


class References:
    """This rank's references to values of others, and others' references to values of this rank.

    No method waits for other ranks. ``send`` sends a message about references. ``wake`` is called
    when :meth:`flush` has something to send; from any thread, at any time.
    """

    def __init__(self, rank: int, send: Send, wake: Callable[[], None]) -> None:
        self._rank, self._send, self._wake = rank, send, wake
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._pins = itertools.count(FIRST_PIN)
        #: Values of this rank that other ranks, or messages to itself, refer to.
        self._owned: dict[RefId, Owned] = {}
        #: Values of other ranks that this one refers to, and as how many it is counted there.
        self._held: dict[RefId, _Watch] = {}
        self._counts: dict[RefId, int] = {}
        #: Entries that must live until the rank which they are for HOLDS them.
        self._pinned: dict[int, tuple[int, HeldReference]] = {}
        #: By the number of our ADD: the sender of the reference, the pin there, our entry.
        self._asked: dict[int, tuple[int, int, HeldReference]] = {}
        self._questions = itertools.count()
        self._lost: set[int] = set()
        #: Values of this rank that others refer to before the call that makes them has come.
        self._awaited: set[RefId] = set()
        self._dropped: deque[_Watch] = deque()

    def own(self, value: Any) -> Owned:
        entry = Owned(RefId(self._rank, next(self._ids)), self._rank)
        entry.complete(value)
        return entry

    def create(self, owner: int) -> tuple[Entry, Ref]:
        id = RefId(self._rank, next(self._ids))
        if owner == self._rank:
            entry = Owned(id, owner)
            return entry, self.outgoing(entry, owner)
        with self._lock:
            return self._hold(id, owner, more=True), Ref(id, owner, NEW)

    def outgoing(self, entry: Entry, to: int) -> Ref:
        """The reference to ``entry`` for a message to rank ``to``; it is counted or pinned."""
        with self._lock:
            if isinstance(entry, Owned):
                self._owned[entry.id] = entry
                entry.holders[to] = entry.holders.get(to, 0) + 1
                return Ref(entry.id, entry.owner, COUNTED)
            pin = next(self._pins)
            self._pinned[pin] = (to, entry)
            return Ref(entry.id, entry.owner, pin)

    def unsent(self, refs: Sequence[Ref], to: int) -> None:
        for ref in refs:
            if ref.pin >= FIRST_PIN:
                self.holds(ref.pin)
            elif ref.pin == COUNTED:
                self.drop(ref.id, to, 1)
            else:
                with self._lock:
                    self._counts.pop(ref.id, None)  # the owner never heard of it

    # -- what arrives: in the order of the messages, one thread at a time --------------------

    def incoming(self, ref: Ref, sender: int) -> Entry:
        with self._lock:
            if ref.owner == self._rank:
                return self._come_home(ref, sender)
            counted = ref.id in self._counts
            entry = self._hold(ref.id, ref.owner, more=ref.pin == COUNTED or not counted)
            if ref.pin == COUNTED:
                entry.confirmed = True
            elif counted or ref.owner in self._lost:
                self._send(MessageKind.HOLDS, sender, ref.pin, ())
            else:
                question = next(self._questions)
                self._asked[question] = (sender, ref.pin, entry)
                self._send(MessageKind.ADD, ref.owner, question, [ref])
            return entry

    def _come_home(self, ref: Ref, sender: int) -> Owned:
        if ref.pin == NEW:
            self._awaited.discard(ref.id)
            return self._owned.get(ref.id) or self._add_entry(ref.id)
        entry = self._owned_or_awaited(ref.id)
        if entry is None:
            entry = Owned(ref.id, self._rank)
            entry.fail(
                PeerLostError(
                    f"the value of a reference from rank {sender} was freed when a rank was lost"
                )
            )
        if ref.pin >= FIRST_PIN:
            self._send(MessageKind.HOLDS, sender, ref.pin, ())
        elif ref.pin == COUNTED:
            self._uncount(entry, sender, 1)
        return entry

    def add(self, ref: Ref, sender: int, question: int) -> None:
        """Count a further reference of ``sender`` to a value of this rank; answer ``question``."""
        with self._lock:
            entry = self._owned_or_awaited(ref.id)
            if entry is not None:
                entry.holders[sender] = entry.holders.get(sender, 0) + 1
            self._send(MessageKind.ADDED, sender, question, ())

    def added(self, question: int) -> None:
        """The owner has answered an ADD: inform the rank that sent the reference (HOLDS)."""
        with self._lock:
            sender, pin, entry = self._asked.pop(question)
            entry.confirmed = True
            self._send(MessageKind.HOLDS, sender, pin, ())

    def holds(self, pin: int) -> None:
        """Release ``pin``: the rank that the reference was sent to is counted by the owner now."""
        with self._lock:
            self._pinned.pop(pin, None)

    def drop(self, id: RefId, rank: int, count: int) -> Owned | None:
        """Count ``count`` references of ``rank`` less; return the entry if no rank has any left."""
        with self._lock:
            entry = self._owned.get(id)
            return None if entry is None else self._uncount(entry, rank, count)

    def lost(self, rank: int) -> list[Owned]:
        """Drop all references of ``rank``, which is gone; return entries that no rank holds now."""
        with self._lock:
            self._lost.add(rank)
            for pin in [pin for pin, (to, _) in self._pinned.items() if to == rank]:
                self.holds(pin)
            asked = [q for q, (_, _, entry) in self._asked.items() if entry.owner == rank]
            for question in asked:
                self.added(question)
            for id in [id for id in self._awaited if id.creator == rank]:
                self._awaited.discard(id)
                error = PeerLostError(f"rank {rank} was lost before the call for the value came")
                self._owned[id].fail(error)
            held = [entry for entry in self._owned.values() if rank in entry.holders]
            freed = [self._uncount(entry, rank, entry.holders[rank]) for entry in held]
            return [entry for entry in freed if entry is not None]

    # -- what is dropped -------------------------------------------------------------------

    def flush(self) -> None:
        while self._dropped:
            gone = self._dropped.popleft()
            id, owner = gone.id, gone.owner
            with self._lock:
                if self._held.get(id) is not gone:
                    continue  # another one came
                del self._held[id]
                count = self._counts.pop(id, 0)
                if count:
                    self._send(MessageKind.DROP, owner, count, [Ref(id, owner, COUNTED)])

    def _gone(self, watch: _Watch) -> None:
        self._dropped.append(watch)
        self._wake()

    def close(self) -> list[Owned]:
        """Forget all references; return the entries of this rank's values that others held."""
        with self._lock:
            owned = list(self._owned.values())
            for table in (self._owned, self._held, self._counts, self._pinned, self._asked):
                table.clear()
            self._awaited.clear()
            return owned

    @property
    def sizes(self) -> tuple[int, int]:
        """(number of this rank's values that others hold, number of others' values held here)."""
        with self._lock:
            return len(self._owned), len(self._held)

    # -- counting, with the lock ------------------------------------------------------------

    def _owned_or_awaited(self, id: RefId) -> Owned | None:
        """The entry for an owned value, made if need be; None if it was freed."""
        entry = self._owned.get(id)
        if entry is None and not self._lost and id.creator != self._rank:
            self._awaited.add(id)
            entry = self._add_entry(id)
        return entry

    def _add_entry(self, id: RefId) -> Owned:
        entry = self._owned[id] = Owned(id, self._rank)
        entry.holders[id.creator] = 1
        return entry

    def _hold(self, id: RefId, owner: int, more: bool) -> HeldReference:
        self._counts[id] = self._counts.get(id, 0) + more
        known = self._held.get(id)
        entry = known() if known is not None else None
        if entry is None:
            entry = HeldReference(id, owner)
            self._held[id] = _Watch(entry, self._gone)
        return entry

    def _uncount(self, entry: Owned, rank: int, count: int) -> Owned | None:
        left = entry.holders.get(rank, 0) - count
        if left > 0:
            entry.holders[rank] = left
        else:
            entry.holders.pop(rank, None)
        return None if entry.holders else self._owned.pop(entry.id, None)
