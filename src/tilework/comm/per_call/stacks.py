"""The stacks of this process's threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_walking = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A fork during a walk would leave the child without garbage collection.
    os.register_at_fork(
        before=_walking.acquire,
        after_in_parent=_walking.release,
        after_in_child=_walking.release,
    )


def stacks_of_threads() -> dict[int, list[FrameType]]:
    """The frames of each thread by the thread's identifier, innermost first.

    Garbage is not collected during the walk. Python 3.11 makes the object of a frame on demand, and
    reads the frame again after the allocation. If the allocation collects garbage, another thread
    may run and end the frame; the process then crashes, or gets an unrelated object for the frame.
    """
    with _walking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return {ident: [*_outwards(frame)] for ident, frame in sys._current_frames().items()}
        finally:
            if collects:
                gc.enable()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
