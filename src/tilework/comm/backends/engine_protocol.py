"""The interface of a native backend's engine; :mod:`.native` builds a process group on it.

An engine moves bytes (or tensors) between the ranks of one group. An engine knows nothing of
options, global ranks and error classes; it raises :class:`Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from tilework.comm.flight.ring import FaultArgs as FaultArgs
from tilework.comm.forms import Operation

FaultKind = Literal["mismatch", "peer_lost", "timeout", "aborted", "closed"]
#: The group rank that aborted, the kind of fault, the text for the others.
Abort = tuple[int, str, str]


class Fault(Exception):
    """An engine's failure: ``args == (kind, group ranks at fault, detail)``."""

    args: tuple[FaultKind, tuple[int, ...], str]


class Completion(Protocol):
    """A handle on an operation that an engine runs: shows whether it is done, and waits for it."""

    def done(self) -> bool: ...
    def poll(self) -> bool:
        """As :meth:`done`, for a caller that polls: a poll may advance a short operation."""
        ...

    def wait(self, timeout: float) -> bool:
        """Block until it is done; False after ``timeout`` seconds (< 0: no limit), or Fault."""
        ...

    def fault(self) -> FaultArgs | None: ...
    def add_done_callback(self, fn: Callable[[], None], /) -> None: ...
    def source(self) -> int:
        """The group rank that a received message came from."""
        ...


class Engine(Protocol):
    """A rank's end of a native group: the interface of all engines, also of ``_core.pyi``."""

    #: The exception class of failed operations.
    fault_type: type[Exception]
    #: The exceptions that refuse a call before anything is sent.
    refusals: tuple[type[Exception], ...]
    name: str
    #: True if the engine reads tensors' addresses at the call; False if it may read them later.
    takes_addresses: bool
    #: True if a failure of an asynchronous operation ends the group before anybody waits for it.
    watches: bool

    def run(self, operation: Operation) -> None: ...
    def submit(self, operation: Operation) -> Completion: ...
    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> Completion: ...
    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> Completion: ...
    def let_go(self, buffers: object) -> None:
        """Release the buffers of a finished operation."""
        ...

    def sequence(self) -> int: ...
    def last_entered(self) -> list[str]:
        """By group rank: the operation that it entered last, in words for an error."""
        ...

    def report_failure(self, text: str) -> None:
        """Publish ``text``, the reason of this rank's failure, to the other ranks."""
        ...

    def failure_reports(self, timeout: float) -> list[str | None]:
        """By group rank: the text of its failure; None if none came in ``timeout`` seconds."""
        ...

    def abort(self, kind: str, text: str) -> None: ...
    def aborted(self) -> Abort | None: ...
    def blocked(self) -> Sequence[tuple[int, int, str]]:
        """Ranks that wait where this rank has not called: (group rank, number, text) of each."""
        ...

    def waiting(self) -> tuple[int, Sequence[int]] | None:
        """The operation that the calling thread waits in, and the awaited group ranks."""
        ...

    def sees_messages(self) -> bool:
        """True if this rank knows all messages that were sent before the last such question."""
        ...

    def is_owner(self) -> bool:
        """True on the rank's own thread, which made the group."""
        ...

    def departed(self) -> Sequence[int]:
        """The group ranks that the engine knows to have ended or left."""
        ...

    def close(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...
