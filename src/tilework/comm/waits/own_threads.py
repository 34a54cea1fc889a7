"""Threads that may still call an operation for a rank whose own thread waits in one."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Sequence
from types import FrameType

from tilework.comm.per_call.callsite import in_library
from tilework.comm.per_call.stacks import stacks_of_threads

#: The folder of the standard library.
_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
#: Parts of it that run callbacks later.
_CALLS_LATER = ("asyncio", "sched.py", "multiprocessing")
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\](\w+)")
#: Packages whose threads only show or record something.
_SHOWING = ("tqdm", "tensorboard", "tensorboardX", "torch", "wandb", "execnet", "xdist")


def may_call(bystanders: Collection[threading.Thread]) -> bool:
    """True if a thread besides this one may yet call an operation for this rank.

    Threads that run the program's code, or are about to, count: their next calls are unknown.
    Threads of the library, of the interpreter's own modules, and of packages that show progress do
    not count.

    Args:
        bystanders: Threads that are known to belong to other ranks.
    """
    known = {thread.ident for thread in bystanders} | {threading.get_ident()}
    if any(isinstance(t, threading.Timer) and t.ident not in known for t in threading.enumerate()):
        return True
    return any(
        ident not in known and not _is_harmless(stack)
        for ident, stack in stacks_of_threads().items()
    )


def _is_harmless(stack: Sequence[FrameType]) -> bool:
    files = [frame.f_code.co_filename for frame in stack]
    if not all(map(_is_known, files)):
        return False
    return any(map(in_library.__getitem__, files)) or not any(map(_calls_later, files))


def _is_known(file: str) -> bool:
    if in_library[file]:
        return True
    package = _PACKAGES.match(file)
    return package[1] in _SHOWING if package else file.startswith(_STDLIB)


def _calls_later(file: str) -> bool:
    inside = file.removeprefix(_STDLIB)
    return inside != file and inside.split(os.sep)[0] in _CALLS_LATER
