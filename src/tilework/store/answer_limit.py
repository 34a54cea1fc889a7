"""The time by which a store's server has to answer, over all requests of one task.

A single request has the time-out of the request and a little more, as the server has other clients.
Where a task makes one request after the other, a server that has been stopped would use up that
time with each; so the task says how long all of it may take.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Final

from tilework.store import checks

#: Seconds by which an answer, "time is up" say, may be late: the server has other clients.
GRACE_SECONDS: Final = 5.0
#: The same for all requests of a task: a share of the task's time, and these seconds at least.
_GRACE_SHARE, _LEAST_GRACE_SECONDS = 0.5, 1.0
#: Seconds for a request after the task's time is up: the server may well be there.
_LAST_SECONDS: Final = 0.1

#: When the task of this context must have all answers (time.monotonic()).
_end: ContextVar[float | None] = ContextVar("tilework_answer_limit", default=None)


@contextlib.contextmanager
def answers_within(limit: timedelta) -> Iterator[None]:
    """Limit all requests to stores within the block, taken together, to ``limit`` and a bit more.

    Waits for keys end by then, too. In nested blocks the limit that ends first counts.
    """
    seconds = checks.seconds(limit)
    grace = min(GRACE_SECONDS, max(_LEAST_GRACE_SECONDS, _GRACE_SHARE * seconds))
    end, outer = time.monotonic() + seconds + grace, _end.get()
    token = _end.set(end if outer is None else min(end, outer))
    try:
        yield
    finally:
        _end.reset(token)


def left_seconds(seconds: float) -> float:
    """``seconds``, or the time left in the enclosing :func:`answers_within` if that is shorter."""
    end = _end.get()
    return seconds if end is None else min(seconds, max(0.0, end - time.monotonic()))


def answer_seconds(wait_seconds: float) -> float:
    """The seconds to wait for the answer to a request on which the server may wait itself.

    That is ``wait_seconds`` and a bit more, or the time left in :func:`answers_within` if shorter.
    """
    alone = wait_seconds + GRACE_SECONDS
    return min(alone, left_seconds(alone) + _LAST_SECONDS)
