"""Spans: named parts of a program, written while the rank is traced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

from tilework.comm.flight.notes import Sink
from tilework.comm.world import current_world

_NOT_TRACED: Final = nullcontext()


def span(name: str) -> AbstractContextManager[None]:
    """Name the part of the program in the ``with`` block, for the timeline of all ranks.

    Does nothing unless the rank is traced (:func:`tilework.inspect.trace`). Spans may nest.

    Args:
        name: The name, such as "forward"; the same name for the same part.

    Example:
        >>> import tilework.distributed as dist
        >>> with dist.span("forward"):
        ...     loss = 2 + 2
    """
    sink = current_world().sink
    return _NOT_TRACED if sink is None else _Span(sink, name)


class _Span(AbstractContextManager[None]):
    def __init__(self, sink: Sink, name: str) -> None:
        self._sink, self._name = sink, name

    def __enter__(self) -> None:
        self._sink.begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._sink.end()
