"""A rank of a job that is pretended: no other rank runs, and what it would send is written down.

``tilework.plan`` runs a program once for each kind of rank, one after the other, in one process.
Groups of such a rank are made on the backend ``pretend``, at once, without a meeting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Sizes = int | tuple[int, ...] | None


class PretendedCall(NamedTuple):
    """A call of a pretended rank: a collective, or a message."""

    #: The name of the group, and the global ranks in it.
    group: str
    ranks: tuple[int, ...]
    #: The public function, with dtype and shapes.
    text: str
    #: The values that must be equal on all ranks of the group, or at both ends of a message.
    facts: tuple[Any, ...]
    #: The bytes that this rank sends or receives, whichever is more.
    nbytes: int
    #: ``file:line in function`` of the program.
    site: str
    #: Of a message: the global rank at the other end; -1: any rank. None: a collective.
    peer: int | None = None
    #: True for an operation that returns before it is done.
    is_async: bool = False
    #: True for a call by which ranks only compare what they are about to do.
    is_check: bool = False
    #: Of a wait: the place in the rank's calls of the operation that is waited for.
    waits_for: int | None = None
    #: The elements for each rank of the group, and from each: a number if they are equal; None: no.
    sizes: tuple[Sizes, Sizes] = (None, None)

    @property
    def kind(self) -> str:
        """The kind of the collective; "send" or "recv" for a message."""
        return str(self.facts[0])


class MeetingCost(NamedTuple):
    """The cost of one meeting of ``ranks``, in which nobody waits long enough to look around:
    all requests to the store, the ``most`` of a rank, and the connections that are opened.
    """

    ranks: tuple[int, ...]
    requests: int
    most: int
    connections: int


@dataclass(eq=False)
class JobValues:
    """The values that pretended ranks of one job have sent, for the ranks that run later."""

    #: By group, number of the call and, of a message, both ends and the tag.
    sent: dict[tuple[Any, ...], list[Tensor]] = field(default_factory=dict)
    #: By group and number of the call: what each rank has given, now and in the last pass.
    given: dict[tuple[Any, ...], dict[int, Any]] = field(default_factory=dict)
    known: dict[tuple[Any, ...], dict[int, Any]] = field(default_factory=dict)
    #: The calls to which ranks have not given the same in the last two passes.
    changed: set[tuple[Any, ...]] = field(default_factory=set)
    #: Equal calls of all ranks are kept once.
    calls: dict[PretendedCall, PretendedCall] = field(default_factory=dict)
    #: What meetings of some numbers of ranks cost, which is the same for all ranks.
    meetings: dict[tuple[int, ...], MeetingCost] = field(default_factory=dict)

    def exchange(self, key: tuple[Any, ...], rank: int, value: Any) -> dict[int, Any]:
        """Give a plain value; return what others gave in the last pass, by rank in the group."""
        self.given.setdefault(key, {})[rank] = value
        return {other: theirs for other, theirs in self.known.get(key, {}).items() if other != rank}

    def begin_pass(self) -> bool:
        """Begin to run all ranks again, each with what the others have given.

        Returns:
            False, and nothing has changed, if the ranks would get what they have got, but for
            values that change without another cause, such as times.
        """
        changed = {key for key in self.given if self._differ(key)}
        if not changed or changed == self.changed:
            return False
        self.changed = changed
        self.known, self.given, self.sent = self.given, {}, {}
        return True

    def _differ(self, key: tuple[Any, ...]) -> bool:
        """True if a rank took something else for what a peer has given."""
        given, known = self.given[key], self.known.get(key)
        if known is None:
            first = next(iter(given.values()))
            return any(value != first for value in given.values())
        return any(rank not in known or value != known[rank] for rank, value in given.items())


@dataclass(eq=False)
class Pretence:
    """The state of one pretended rank."""

    rank: int
    ranks: int
    #: The number of ranks on the host of each rank is equal but for one.
    hosts: int = 1
    #: The kind of device that tensors are on.
    device: str = "cpu"
    job: JobValues = field(default_factory=JobValues)
    #: All calls and waits, in order.
    calls: list[PretendedCall] = field(default_factory=list)
    #: By place: the bytes of checkpoints that the rank would have written there.
    saved: Counter[str] = field(default_factory=Counter)
    #: What is assumed of values that only a real run has.
    assumed: set[str] = field(default_factory=set)
    #: True once the default group was made for a program that may make it again.
    is_early: bool = False
    #: Told of each call.
    listeners: list[Any] = field(default_factory=list)
    #: The sizes of the meetings in which this rank has made groups, in order.
    meetings: list[tuple[int, ...]] = field(default_factory=list)
    _lost: _Storages = field(default_factory=dict)
    _absent: _Storages = field(default_factory=dict)

    def meet(self, sizes: tuple[int, ...], count: Callable[[], MeetingCost]) -> None:
        """Note a meeting of ranks, counted once for all of the same sizes."""
        if sizes not in self.job.meetings:
            self.job.meetings[sizes] = count()
        self.meetings.append(sizes)

    def note(self, call: PretendedCall) -> int:
        """Write down a call; return the place in :attr:`calls`."""
        self.calls.append(self.job.calls.setdefault(call, call))
        for listener in self.listeners:
            listener(call)
        return len(self.calls) - 1

    def has_values(self, tensor: Tensor) -> bool:
        """True if the elements are those that the program would compute."""
        if tensor.is_meta:
            return not tensor.numel()
        return not _holds(self._lost, tensor)

    def lose(self, tensor: Tensor) -> None:
        """Note that the elements are unknown from now on."""
        if not tensor.is_meta:
            _add(self._lost, tensor)

    def is_absent(self, tensor: Tensor) -> bool:
        """True for a tensor that would be on meta in a real run, too."""
        return tensor.is_meta and _holds(self._absent, tensor)

    def note_absent(self, tensor: Tensor) -> None:
        """Note that the program has put a tensor on meta."""
        if tensor.is_meta:
            _add(self._absent, tensor)


#: Storages that live, by identity.
_Storages = dict[int, StorageWeakRef]


def _holds(storages: _Storages, tensor: Tensor) -> bool:
    known = storages.get(tensor.untyped_storage()._cdata) if storages else None
    return known is not None and not known.expired()  # type: ignore[no-untyped-call]


def _add(storages: _Storages, tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


_pretence: ContextVar[Pretence | None] = ContextVar("tilework_pretence", default=None)


def current_pretence() -> Pretence | None:
    """The pretended rank that the calling thread runs; None if ranks are real."""
    return _pretence.get()


@contextmanager
def pretending(pretence: Pretence) -> Iterator[Pretence]:
    """Within the block, this thread is the rank of ``pretence``."""
    token = _pretence.set(pretence)
    try:
        yield pretence
    finally:
        _pretence.reset(token)
