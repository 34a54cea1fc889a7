"""The last operations of one rank in one group, kept in bounded memory at next to no cost.

While the program runs, the ring stores only references: a code object and an offset for the place
of the call, shapes and dtypes for the tensors. The ring keeps no tensor alive, and makes text only
when somebody asks.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from tilework.comm.per_call.callsite import Site, format_site, in_library

#: The number of operations that a group keeps on each rank, unless the variable is set.
DEFAULT_CAPACITY: Final = 256
CAPACITY_VARIABLE: Final = "TILEWORK_FLIGHT_ENTRIES"
_MAX_CAPACITY: Final = 65536

RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed: "
#: The peer of a receive from any rank.
ANY_PEER: Final = -1

_getframe, _now = sys._getframe, time.monotonic_ns

Shapes = Sequence[Sequence[int]]
#: The kind of a fault, the group ranks at fault, detail for a person.
FaultArgs = tuple[str, tuple[int, ...], str]


#: An operation, as cheap to make as possible: the title, the tensors' dtype (None without tensors),
#: the shapes of inputs and of outputs (one of them may be left out if they are equal), the
#: reduction or None, and the root or None. :func:`describe` makes text of it.
What = tuple[str, object, Shapes, Shapes, object, "int | None"]


#: Operations whose inputs have the shape of the outputs.
_IN_PLACE: Final = ("all_reduce", "broadcast")


def describe(what: What | str) -> str:
    """Title, dtype, shapes and arguments, as in ``reduce float32 [2, 3] SUM root 0``."""
    if isinstance(what, str):
        return what
    title, dtype, inputs, outputs, reduction, root = what
    words = [title]
    if dtype is not None:
        words.append(str(dtype).removeprefix("torch."))
    sides = {"in": _shapes_text(inputs), "out": _shapes_text(outputs)}
    if title in _IN_PLACE and outputs:
        sides["in"] = ""
    shown = {side: text for side, text in sides.items() if text}
    words.append(", ".join(f"{s} {t}" if len(shown) > 1 else t for s, t in shown.items()))
    if reduction is not None:
        words.append(str(reduction).upper())
    if root is not None:
        words.append(f"root {root}")
    return " ".join(word for word in words if word)


def _shapes_text(shapes: Shapes) -> str:
    texts = [str(list(shape)) for shape in shapes]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} x {texts[0]}"
    return ", ".join(texts)


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation of one rank, for a person or for :mod:`.diagnosis`."""

    #: Counts the group's collectives from 1, in the order of calls; 0 for a message.
    number: int
    #: The name, dtype, shapes and arguments; the name comes first.
    what: str
    #: ``file:line in function`` of the caller.
    site: str
    #: The time of the call, in Unix seconds.
    entered: float
    #: The time of the end; None while it runs, or if nobody waited for the end.
    ended: float | None
    #: "running", "done", or "failed: " and the reason.
    outcome: str
    #: Of a message: the global rank at the other end, or ANY_PEER.
    peer: int | None = None
    #: The tag of a message.
    tag: int = 0


class Pending(Protocol):
    """The state of an operation that may be in flight."""

    def done(self) -> bool:
        """True if the operation has ended. Never blocks."""
        ...

    def fault(self) -> FaultArgs | None:
        """The fault that ended the operation: kind, ranks at fault, a text; or None."""
        ...


#: The handle of an operation between ``begin`` and ``end``; only the ring knows the type.
Slot = Any
#: The type of this ring: the future entry, as a list, which is cheapest to make.
_Slot = list[Any]
_NUMBER, _WHAT, _CODE, _OFFSET, _ENTERED, _ENDED, _OUTCOME, _PEER, _TAG, _PENDING = range(10)
_EMPTY: Final[_Slot] = [-1, "", None, None, 0, 0, "", None, 0, None]

#: The most operations that are kept for the reader of a :class:`Tail`.
MOST_UNREAD: Final = 1 << 16


class Timed(NamedTuple):
    """An operation with exact times: nanoseconds of the monotonic clock, 0 if not known (yet)."""

    #: Tells the operation from others of the ring.
    key: int
    #: As in :class:`Entry`.
    number: int
    what: What | str
    site: str
    peer: int | None
    tag: int
    #: The time of the call.
    entered: int
    #: Of an asynchronous operation: when a thread first had to wait for it.
    waited: int
    #: Of an asynchronous operation: when it was done.
    finished: int
    #: The time when the caller noticed the end.
    ended: int
    #: As in :class:`Entry`.
    outcome: str


class Tail(Protocol):
    """The operations of a ring from some moment on, each of them: none is pushed out."""

    #: The number of operations that came too fast, and are missing.
    lost: int

    def read(self) -> list[Timed]:
        """The operations that began or ended since the last call. For a single thread."""
        ...


def capacity_setting() -> int:
    """The number of operations that a ring keeps: TILEWORK_FLIGHT_ENTRIES if it is valid."""
    text = os.environ.get(CAPACITY_VARIABLE, "")
    return min(int(text), _MAX_CAPACITY) if text.isdecimal() else DEFAULT_CAPACITY


class Ring:
    """The last operations of one rank in one group. May be used from any thread.

    ``capacity`` operations are kept (None: TILEWORK_FLIGHT_ENTRIES, or 256), and as many older
    operations that still run.
    """

    __slots__ = ("_late", "_numbers", "_slots", "_tail")

    def __init__(self, capacity: int | None = None) -> None:
        size = max(1, capacity_setting() if capacity is None else capacity)
        # Full from the start, which saves a check for every operation.
        self._slots: deque[_Slot] = deque([_EMPTY] * size, maxlen=size)
        #: Operations that were pushed out while they ran, such as a receive without a sender.
        self._late: deque[_Slot] = deque(maxlen=size)
        self._numbers = itertools.count(1)
        self._tail: _Tail | None = None

    def begin(
        self, what: What | str, peer: int | None = None, tag: int = 0, depth: int = 1
    ) -> Slot:
        """Note that an operation was called; hand the result to :meth:`end`.

        Args:
            what: The operation; must hold no tensor.
            peer: For a message, the global rank at the other end, or ANY_PEER. None: a collective,
                which gets the next number.
            tag: The tag of a message.
            depth: How many frames up to begin looking for the user's frame.
        """
        try:
            frame = _getframe(depth)
            while in_library[frame.f_code.co_filename]:
                frame = frame.f_back  # type: ignore[assignment]
            code, offset = frame.f_code, frame.f_lasti
        except (ValueError, AttributeError):  # not called from the user's code
            code = offset = None  # type: ignore[assignment]
        number = 0 if peer is not None else next(self._numbers)
        slot = [number, what, code, offset, _now(), None, None, peer, tag, None]
        slots = self._slots
        if slots[0][_ENDED] is None:
            self._late.append(slots[0])
        slots.append(slot)
        if self._tail is not None:
            self._tail.add(slot)
        return slot

    def end(self, slot: Slot, failure: str = "") -> None:
        """Note that the operation of ``slot`` has ended; ``failure``: the reason, if it failed."""
        slot[_OUTCOME] = failure
        slot[_ENDED] = _now()

    def follow(self, slot: Slot, pending: Pending) -> None:
        """Let :meth:`entries` ask ``pending``, which holds no tensors, until the end."""
        slot[_PENDING] = pending

    def tail(self) -> Tail:
        """The operations from now on, for a single reader; an earlier tail gets no more."""
        self._tail = _Tail()
        return self._tail

    def cut(self) -> None:
        """Keep nothing more for the reader of the tail."""
        self._tail = None

    def entries(self) -> list[Entry]:
        """The operations, oldest first. Takes no lock, so any thread may ask at any time."""
        ahead = _anchor.ahead()
        return [_entry(slot, ahead) for slot in self._kept()]

    def first_failed(self, fault: FaultArgs) -> Entry | None:
        """The first collective in flight that ended with ``fault``. Never blocks."""
        for slot in self._kept():
            if slot[_ENDED] is None and slot[_PEER] is None and has_failed(slot[_PENDING], fault):
                return _entry(slot, 0.0)
        return None

    def _kept(self) -> list[_Slot]:
        late = [slot for slot in _copied(self._late) if slot[_ENDED] is None]
        return [slot for slot in (*late, *_copied(self._slots)) if slot is not _EMPTY]


class _Tail:
    """The tail of a :class:`Ring`."""

    def __init__(self) -> None:
        self.lost = 0
        self._new: deque[_Slot] = deque()
        #: Operations without an end; True: done, but nobody has noticed.
        self._running: dict[int, tuple[_Slot, bool]] = {}
        self._keys = itertools.count()

    def add(self, slot: _Slot) -> None:
        """Keep an operation that has begun."""
        if len(self._new) < MOST_UNREAD:
            self._new.append(slot)
        else:
            self.lost += 1

    def read(self) -> list[Timed]:
        known = self._running
        new = {next(self._keys): self._new.popleft() for _ in range(len(self._new))}
        slots = {key: slot for key, (slot, _) in known.items()} | new
        self._running = {
            key: (slot, getattr(slot[_PENDING], "finished_ns", 0) > 0)
            for key, slot in slots.items()
            if slot[_ENDED] is None
        }
        return [
            _timed(key, slot)
            for key, slot in slots.items()
            if key in new or known[key] != self._running.get(key)
        ]


def _timed(key: int, slot: _Slot) -> Timed:
    number, what, code, offset, entered, ended, result, peer, tag, pending = slot
    site = format_site(None if code is None else (code, offset))
    waited, finished = (getattr(pending, name, 0) for name in ("waited_ns", "finished_ns"))
    told = outcome(ended, pending if ended is None else result)
    return Timed(key, number, what, site, peer, tag, entered, waited, finished, ended or 0, told)


class _Anchor:
    """The wall clock's seconds less those of the monotonic clock, the same for all groups."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def ahead(self) -> float:
        """The seconds; taken again only after the wall clock was set, or the machine has slept."""
        now = time.time() - time.monotonic()
        if abs(now - self._ahead) > 1.0:
            self._ahead = now
        return self._ahead


_anchor = _Anchor()


def _copied(slots: deque[_Slot]) -> list[_Slot]:
    while True:
        try:
            return list(slots)
        except RuntimeError:  # another thread added an entry
            continue


def _entry(slot: _Slot, ahead: float) -> Entry:
    """``ahead``: the wall clock's seconds less those of the monotonic clock."""
    number, what, code, offset, entered, ended, result, peer, tag, pending = slot
    site: Site | None = None if code is None else (code, offset)
    text = outcome(ended, pending if ended is None else result)
    times = entered / 1e9 + ahead, None if ended is None else ended / 1e9 + ahead
    return Entry(number, describe(what), format_site(site), *times, text, peer, tag)


def has_failed(pending: Pending | None, fault: FaultArgs) -> bool:
    """True if the operation ``pending`` has ended with ``fault``."""
    return pending is not None and pending.fault() == fault


def outcome(ended: float | None, result: str | Pending | None) -> str:
    """The outcome as text: "running", "done", or "failed: " and the reason. ``ended`` is a time or
    None; ``result`` a reason ("": none), or an object that is asked.
    """
    if isinstance(result, str) or ended is not None:
        return f"{FAILED}{result}" if result else DONE
    if result is None or not result.done():
        return RUNNING
    fault = result.fault()
    return DONE if fault is None else f"{FAILED}{fault[0]} {fault[2]}".rstrip()
