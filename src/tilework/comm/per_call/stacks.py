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

    Garbage collection stands still meanwhile: Python 3.11 makes the object of another thread's
    frame when it is asked for, and reads the frame again after that. A collection in between lets
    the other thread run, which may end the frame: the process crashes, or the "frame" is any object
    that came to its place.
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
