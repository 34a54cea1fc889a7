"""Ends every process that bears the mark of a job: ``python sweep.py MARK``. Linux.

The guardian runs it as a separate program when the launcher is gone. It imports nothing from this
library, and does not need anything that the job needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import time

#: The environment variable that marks the processes of a job.
MARK_VARIABLE = "TILEWORK_JOB"
#: The prefix of the mark in the name of a mapping that a rank's forks inherit.
MAPPING = "tilework-job-"
#: A process just being forked may be missed: repeat until two rounds find nothing.
_QUIET_LOOKS = 2
_PAUSE_SECONDS = 0.02
_LONGEST_SECONDS = 30.0


def marked(mark: str) -> list[int]:
    """The process ids of all processes that bear ``mark``, but not of this process."""
    in_environment = f"{MARK_VARIABLE}={mark}".encode()
    in_mappings = f"{MAPPING}{mark}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        if int(name) == os.getpid():
            continue
        if in_environment in _read(f"/proc/{name}/environ").split(b"\0") or in_mappings in _read(
            f"/proc/{name}/maps"
        ):
            found.append(int(name))
    return found


def map_mark(mark: str) -> bool:
    """Map a page that has the mark in the name, in this process and in later forks of it.

    True if that worked: only on Linux. The page stays mapped. Python's own mmap would also keep a
    descriptor, which forks inherit.
    """
    try:
        fd = os.memfd_create(f"{MAPPING}{mark}", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return False
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        map_page = ctypes.CDLL(None).mmap
        map_page.restype = ctypes.c_void_p
        map_page.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        found = map_page(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        return found not in (None, ctypes.c_void_p(-1).value)
    finally:
        os.close(fd)


def sweep(mark: str) -> None:
    """Kill all processes that bear ``mark``, and those that they start meanwhile."""
    quiet, deadline = 0, time.monotonic() + _LONGEST_SECONDS
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        found = marked(mark)
        for pid in found:
            # It may have ended, or now belong to another user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        time.sleep(_PAUSE_SECONDS)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended, or belongs to another user
        return b""


if __name__ == "__main__":
    sweep(sys.argv[1])
