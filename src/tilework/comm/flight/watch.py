"""SIGUSR1: have every rank of this process write its flight record, and continue.

A thread writes the record. Python's own signal handler in C wakes the thread through a pipe. So it
works whatever the main thread is doing, also within native code that ignores signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final

#: The variable with the folder for records; if unset, no records are written.
DIRECTORY_VARIABLE: Final = "TILEWORK_FLIGHT_DIR"
#: The variable with the folder for traces; if unset, ranks are traced only where they ask for it.
TRACE_VARIABLE: Final = "TILEWORK_TRACE_DIR"
#: The variable that has a rank count steps for the launcher; if unset, it counts captured steps.
WATCH_VARIABLE: Final = "TILEWORK_WATCH"
WATCHER_NAME: Final = "tilework-flight"

#: The launcher's signal for records: not SIGUSR1, which a program may use otherwise.
LAUNCHER_SIGNAL: Final[int | None] = (
    int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else None
)
_USER_SIGNAL: Final[int | None] = getattr(signal, "SIGUSR1", None)


@dataclass(slots=True)
class _Watch:
    """The pipe and thread of this process's signals. Signals belong to a process, not a rank."""

    #: The file descriptor of the pipe's write end; -1 until the process first listens.
    writer: int = -1
    #: The thread that writes records after a signal; None while the process does not listen.
    thread: threading.Thread | None = None


_watch = _Watch()


def arm() -> None:
    """Begin to listen for the signals that ask for flight records.

    Does nothing unless TILEWORK_FLIGHT_DIR names a folder; leaves out a signal that has a handler.
    Idempotent. Only the main thread can begin to listen; in other threads this does nothing.
    """
    if _watch.thread is not None or not os.environ.get(DIRECTORY_VARIABLE):
        return
    if _USER_SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return
    free = [n for n in (_USER_SIGNAL, LAUNCHER_SIGNAL) if n and _is_free(n)]
    if not free:
        return
    reader, _watch.writer = os.pipe()
    os.set_blocking(_watch.writer, False)
    for number in free:
        signal.signal(number, _on_signal)
        signal.siginterrupt(number, False)  # do not interrupt the program's system calls
    before = signal.set_wakeup_fd(_watch.writer, warn_on_full_buffer=False)
    if before != -1:  # another wake-up descriptor is set: rely on the handler in Python
        signal.set_wakeup_fd(before)
    _watch.thread = threading.Thread(target=_serve, args=(reader,), name=WATCHER_NAME, daemon=True)
    _watch.thread.start()


@contextlib.contextmanager
def armed() -> Iterator[None]:
    """Listen for the signals, as after :func:`arm`, during a block; afterwards as before."""
    before = _watch.thread
    arm()
    try:
        yield
    finally:
        if _watch.thread is not before:
            _disarm()


def _disarm() -> None:
    thread, _watch.thread = _watch.thread, None
    _stop_listening()
    if thread is not None:  # else this is a forked child
        os.close(_watch.writer)
        thread.join()  # the thread has nothing more to read


def _stop_listening() -> None:
    before = signal.set_wakeup_fd(-1)
    if before not in (-1, _watch.writer):
        signal.set_wakeup_fd(before)
    for number in (_USER_SIGNAL, LAUNCHER_SIGNAL):
        if number is not None and signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)


def _is_free(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Wake the writing thread, where another library has set the wake-up descriptor."""
    with contextlib.suppress(OSError):
        os.write(_watch.writer, bytes([number]))


def _serve(reader: int) -> None:
    """Write the records of all ranks after each signal, until the pipe is closed."""
    while numbers := os.read(reader, 4096):
        # A user's handler also wakes the pipe.
        if any(signal.getsignal(number) is _on_signal for number in set(numbers)):
            dump = sys.modules.get("tilework.comm.flight.dump")
            if dump is not None:
                dump.write_all()
    os.close(reader)


def _forget_in_child() -> None:
    """Reset the watch in a forked child: the thread is gone, and the pipe is the parent's."""
    if _watch.thread is not None:
        _watch.thread = None
        _stop_listening()
        os.close(_watch.writer)  # the parent's thread reads until no process can write
        _watch.writer = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
