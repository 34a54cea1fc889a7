"""The recorder of a thread, by which a captured program sees calls that torch hides.

Torch's dispatcher shows a recorder every operator, but neither the core's work on memory
(collectives, random numbers, memory of a segment) nor comparisons between ranks. Functions of the
first kind are :func:`recorded`: a program calls them again when it runs. Functions of the second
kind are :func:`unrecorded`: a program leaves them out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from tilework.errors import CaptureError

P = ParamSpec("P")
T = TypeVar("T")


class CallRecorder(Protocol):
    """A recorder of the calls of one thread."""

    def call(self, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        """Call ``function``; record one instruction of the program; return the result."""
        ...


class _Recording(threading.local):
    recorder: CallRecorder | None = None
    #: True within a function that is :func:`unrecorded`.
    hidden = False


_recording = _Recording()


def set_recorder(recorder: CallRecorder | None) -> CallRecorder | None:
    """Set this thread's recorder; return the old recorder. None: record nothing."""
    before, _recording.recorder = _recording.recorder, recorder
    return before


def current_recorder() -> CallRecorder | None:
    """The recorder of this thread; None if nothing is recorded."""
    return _recording.recorder


def recorded(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function``: a recorder sees each call as one instruction, and no calls inside."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        recorder = _recording.recorder
        if recorder is None:
            return function(*args, **kwargs)
        return recorder.call(function, args, kwargs)

    return call


def unrecorded(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function``, which compares or prepares: a recorder sees no calls, nor calls inside."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        before, hidden = set_recorder(None), _recording.hidden
        _recording.hidden = True
        try:
            return function(*args, **kwargs)
        finally:
            _recording.hidden = hidden
            set_recorder(before)

    return call


def is_hidden() -> bool:
    """True within a function that is :func:`unrecorded`."""
    return _recording.hidden


def refuse_count(name: str) -> None:
    """Raise CaptureError if this thread records: ``name``, which counts, differs by step."""
    if _recording.recorder is not None:
        raise CaptureError(
            f"{name} counts steps, and does not do the same in each step, but a captured program "
            f"would repeat this step. Leave {name} out of the captured step, or run the step "
            f"without capture()"
        )
