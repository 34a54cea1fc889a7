"""Exceptions that cross from one rank to another."""

from __future__ import annotations

import pickle
import traceback
from types import TracebackType
from typing import NamedTuple

from tilework.comm.per_call.internal import in_library
from tilework.errors import RemoteError, text_of
from tilework.rpc.workers import WorkerInfo


class RemoteTraceback(Exception):
    """Another rank's traceback: the cause of an exception that has no message to append it to."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RemoteFailure(NamedTuple):
    """An exception, as it is sent to another rank."""

    pickled: bytes | None
    """The exception; None where it cannot be pickled, or is not for others (an interrupt)."""
    name: str
    """The name of the exception's class."""
    text: str
    """The text of the exception."""
    traceback: str
    """The traceback as text."""

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """The description of ``error`` for the rank that made the call."""
        lines = traceback.format_exception(type(error), error, _users(error.__traceback__))
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        return cls(_pickled(error), name.removeprefix("builtins."), text_of(error), "".join(lines))

    def rebuild(self, where: WorkerInfo) -> BaseException:
        """The exception to raise on the calling rank; ``where`` is the worker that raised it.

        It is a RemoteError if the original exception cannot be rebuilt.
        """
        text = f"On worker {where.name!r} (rank {where.id}):\n{self.traceback}"
        error = _unpickled(self.pickled)
        if error is None:
            error = RemoteError(f"{self.name}: {self.text}\n\n{text}")
        elif len(error.args) == 1 and error.args[0] == text_of(error):
            error.args = (f"{error.args[0]}\n\n{text}",)
        else:
            error.__cause__ = RemoteTraceback(text)
        return error


def _users(frame: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's function on, without this library's frames above that."""
    first = frame
    while frame is not None and in_library[frame.tb_frame.f_code.co_filename]:
        frame = frame.tb_next
    return frame or first


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
    except Exception:
        return None
    return data if _unpickled(data) is not None else None


def _unpickled(data: bytes | None) -> Exception | None:
    """The exception in ``data``; None if there is none, or it cannot be unpickled."""
    try:
        error = None if data is None else pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None
