"""Ends every process that bears the mark of a job: ``python sweep.py MARK``. Linux.

Run by the guardian when the launcher is gone, as a program of its own: it imports nothing of this
library, and it does not need what the job needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import time

#: The variable by which the processes of a job are known.
MARK_VARIABLE = "TILEWORK_JOB"
#: In the name of a mapping that a rank's forks inherit, before the mark.
MAPPING = "tilework-job-"
#: A process that is just being forked may be missed: so look until nothing was found twice.
_QUIET_LOOKS = 2
_PAUSE_SECONDS = 0.02
_LONGEST_SECONDS = 30.0


def marked(mark: str) -> list[int]:
    """The processes that bear a mark, this one not among them."""
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
    """True if this process has a page whose name has the mark, as its forks will; Linux alone.

    It stays mapped. Python's own mmap would keep a descriptor beside it, for forks to inherit.
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
    """Kill all of them, and what they start meanwhile."""
    quiet, deadline = 0, time.monotonic() + _LONGEST_SECONDS
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        found = marked(mark)
        for pid in found:
            # It may have ended, or be another user's by now.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        time.sleep(_PAUSE_SECONDS)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended, or is another user's
        return b""


if __name__ == "__main__":
    sweep(sys.argv[1])
