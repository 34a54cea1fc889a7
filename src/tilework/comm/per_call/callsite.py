"""The place of a call in the user's program."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Final

#: A place in a program: a code object, and the offset of the instruction. Costs nothing to keep
#: and holds no variables; :func:`format_site` makes text of it.
Site = tuple[CodeType, int]


def _folders() -> tuple[str, ...]:
    """The folders of code that is never the user's: this package, torch, and the interpreter."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    return (*(os.path.join(folder, "") for folder in (own, *(folders or ()))), "<frozen ")


_LIBRARIES = _folders()
#: The suites for backends are in this folder, and count as the user's code.
_TESTING = os.path.join(_LIBRARIES[0], "testing", "")
_BETWEEN = os.path.join(_TESTING, "generators.py")


class _Inside(dict[str, bool]):
    """By file name: True for files of this package (but testing), torch and the interpreter."""

    def __missing__(self, name: str) -> bool:
        testing = name.startswith(_TESTING) and name != _BETWEEN
        inside = name.startswith(_LIBRARIES) and not testing
        self[name] = inside
        return inside


#: A cache by file name. There are few files, so it stays small.
in_library: Final = _Inside()


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, from ``frame`` outwards; None without one."""
    while frame is not None and in_library[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


@lru_cache(4096)
def format_site(site: Site | None) -> str:
    """``file:line in function``; "" for None."""
    if site is None:
        return ""
    code, offset = site
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return f"{code.co_filename}:{next(lines, None) or code.co_firstlineno} in {code.co_name}"


def call_site() -> str:
    """``file:line in function`` of the user's innermost frame; "" if there is none."""
    frame = user_frame(sys._getframe(1))
    return "" if frame is None else format_site((frame.f_code, frame.f_lasti))


_walking = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A fork during a walk would leave the child without garbage collection.
    os.register_at_fork(
        before=_walking.acquire, after_in_parent=_walking.release, after_in_child=_walking.release
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
