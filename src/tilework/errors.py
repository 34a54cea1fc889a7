"""Every error that tilework raises on purpose, as one tree.

Misuse is a plain :class:`ValueError` or :class:`TypeError`: the program is wrong, and the
call moved nothing. What goes wrong at run time is one of these::

    RuntimeError
    └── DistError                      anything between ranks
        ├── RankFailedError            a rank that this process started failed
        ├── DistStoreError             a store: time-out, missing key, refused value, full disk
        │   ├── StoreTimeoutError        nobody set the keys in time
        │   └── QueueEmptyError          a queue has no value now
        ├── DistNetworkError           a connection: refused, closed, garbage, wrong secret
        ├── RpcTimeoutError            a call to another rank took too long
        ├── RemoteError                a call raised what cannot be rebuilt here
        ├── CaptureError               a step that cannot become a program
        ├── PretendError               a pretended rank would need values of a real run
        ├── CheckpointError            files of a checkpoint: damaged, missing, refused, not written
        └── DistBackendError           a process group's backend
            ├── PeerLostError          a rank died or left while others needed it
            ├── CollectiveMismatchError  ranks called different things
            ├── CollectiveTimeoutError   ranks did not come in time
            └── ExcludedError            the other ranks went on without this one

A group whose operation raised one of the ``DistBackendError`` family is *aborted*: every
later operation on it raises the same class at once, on every rank. Continue with those that are
left (``shrink_group``), or destroy it and make a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DistError(RuntimeError):
    """Base of every run-time error between ranks."""


class DistStoreError(DistError):
    """A store could not do what was asked: time-out, bad value, full disk, foreign file."""


class StoreTimeoutError(DistStoreError):
    """The keys that a store was asked to wait for were not set before the timeout.

    Args:
        message: What happened, for a person; it starts with ``Timeout``.
        missing: The keys that were not there when the time was up; empty where unknown.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        #: The keys that were not there when the time was up; empty where unknown.
        self.missing: tuple[str, ...] = tuple(missing)


class QueueEmptyError(DistStoreError):
    """A queue of a store has no value, and the caller did not want to wait."""


class DistNetworkError(DistError):
    """A connection could not be made, was closed, spoke garbage or was refused."""


class RpcTimeoutError(DistError):
    """A function called on another rank did not return within the call's timeout."""


class RemoteError(DistError):
    """A function called on another rank raised something that cannot be rebuilt on this one."""


class CheckpointError(DistError):
    """A checkpoint could not be written, or cannot be read as it is.

    Args:
        message: What happened, for a person, with the file, the tensor and the rank.
        file: The file or folder that the error is about; empty if it is about none.
        tensor: The name in the checkpoint of the tensor that the error is about; empty if it is
            about none.
        ranks: The global ranks that found the error.
    """

    def __init__(
        self, message: str, *, file: str = "", tensor: str = "", ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.file, self.tensor = file, tensor
        #: The global ranks that found it, sorted; empty where there are no ranks.
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_checkpoint_error, (self.args[0], self.file, self.tensor, self.ranks)


def _rebuild_checkpoint_error(
    message: str, file: str, tensor: str, ranks: Sequence[int]
) -> CheckpointError:
    return CheckpointError(message, file=file, tensor=tensor, ranks=ranks)


class RankFailedError(DistError):
    """A rank that this process started raised an exception, exited with an error, or was killed.

    Args:
        message: What happened, with the rank's traceback where there is one.
        rank: The global rank that failed; -1 if unknown.
        exitcode: The rank's exit status, or minus the number of the signal that killed it; None if
            unknown.
    """

    def __init__(self, message: str, rank: int = -1, exitcode: int | None = None) -> None:
        super().__init__(message, rank, exitcode)
        self.rank = rank
        self.exitcode = exitcode

    def __str__(self) -> str:
        return str(self.args[0])


class CaptureError(DistError):
    """A step of a training loop cannot be captured as a program.

    :func:`tilework.dtensor.capture` raises it, on every rank that comes to the line at fault. The
    message names the line, the reason and a way round.
    """


class PretendError(DistError):
    """A pretended rank needs a value that only a real run has. The message names the line.

    :func:`tilework.plan.pretend` runs programs on tensors without elements.
    """


class DistBackendError(DistError):
    """A process group's backend failed.

    Args:
        message: What happened, for a person.
        ranks: Global ranks at fault where known (dead, missing or disagreeing ones).
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        #: Global ranks at fault, sorted; empty where unknown.
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.ranks)


def _rebuild(cls: type[DistBackendError], message: str, ranks: Sequence[int]) -> DistBackendError:
    return cls(message, ranks=ranks)


class PeerLostError(DistBackendError):
    """A rank died, or left the group, while this rank needed it."""


class CollectiveMismatchError(DistBackendError):
    """Ranks entered different operations, or the same one with different arguments."""


class CollectiveTimeoutError(DistBackendError):
    """Some rank did not enter or finish an operation within its timeout."""


class ExcludedError(DistBackendError):
    """The other ranks of a group went on without this rank, which they took for lost.

    This rank was stopped, or came later than the others waited. It cannot get back into the group
    that the others have now: end it, and have it started again (``tilework run --restarts``).
    """


def text_of(error: BaseException) -> str:
    """The message of ``error``; a fixed text if the exception's class fails to give a message.

    Example:
        >>> text_of(ValueError("too large"))
        'too large'
    """
    try:
        return str(error)
    except Exception:  # which must not hide the failure itself
        return "(its message cannot be shown)"
