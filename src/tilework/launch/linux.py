"""Linux's system calls, as functions that do nothing elsewhere, and say so by the result."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

from tilework.rendezvous.internal import status_of

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when ``parent`` ends; exit now if it has ended already.

    Only on Linux; elsewhere the guardian (:mod:`tilework.launch.orphans`) does it. The kernel
    watches the *thread* that started this process: that thread must live as long as the job.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans(on: bool = True) -> bool:
    """Become the parent of descendants whose parent dies; with ``on`` False, stop that.

    True if it worked: only on Linux.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def child_pids() -> list[int]:
    """Process ids of this process's children, zombies included; empty elsewhere."""
    me, names = os.getpid(), os.listdir("/proc") if os.path.isdir("/proc") else ()
    statuses = {pid: status_of(pid) for pid in map(int, filter(str.isdigit, names))}
    return [pid for pid, status in statuses.items() if status is not None and status.parent == me]


def catches(pid: int, number: int) -> bool:
    """True if process ``pid`` has a handler for a signal, instead of ignoring it or dying of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "")
    return bool(int(caught.partition(":")[2] or "0", 16) >> (number - 1) & 1)


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal; a debugger's stop does not count."""
    status = status_of(pid)
    return status is not None and status.state == "T"


def command_of(pid: int) -> str:
    """The name of a process for a message; empty where unknown."""
    status = status_of(pid)
    return "" if status is None else status.name


def _prctl(option: int, argument: int) -> bool:
    if sys.platform != "linux":
        return False
    zero = ctypes.c_ulong(0)
    result: int = ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), zero, zero, zero)
    return result == 0
