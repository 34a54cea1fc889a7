"""Arrivals at a store: how many stores were made, and which processes ended before closing theirs.

Where each rank makes one store, a rank counts as missing as soon as the process ends, even before
anybody knows the rank's number: once all others have said who they are, one number is left.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from typing import Final, NamedTuple

# Windows has no locks of this kind.
if sys.platform != "win32":
    import fcntl

#: The byte of a store's file from which on each arrival locks one; the file never gets there.
_FIRST_BYTE: Final = 1 << 60
#: The kernel's struct flock on 64-bit systems: type, whence, start, length, process.
_FLOCK: Final = "hhqqi0q"


class Arrivals(NamedTuple):
    """Counts of the store objects that all processes have made on one file or server."""

    #: How many will be made, as the server was informed; all of them by ranks. 0: unknown.
    expected: int
    #: How many were made so far.
    came: int
    #: Ranks whose process ended, or became another program, before it closed the store.
    lost: frozenset[str]
    #: Why whoever serves the store has given up and is about to end it; "" while it has not.
    given_up: str = ""


def hold_byte(descriptor: int, number: int) -> bool:
    """Lock the byte of a store's file that stands for arrival ``number``; False without such locks.

    The lock lasts until ``descriptor`` is closed, also by exec or the end of the process. Every
    process that has the file open, in any namespace, can then see that the byte is free.
    """
    return _ask(descriptor, "F_OFD_SETLK", number) is not None


def is_free(descriptor: int, number: int) -> bool:
    """True if nobody else has locked the byte of arrival ``number``; False if that is not known."""
    answer = _ask(descriptor, "F_OFD_GETLK", number)
    return answer is not None and struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK


def _ask(descriptor: int, command: str, number: int) -> bytes | None:
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, _FIRST_BYTE + number, 1, 0)
    with contextlib.suppress(OSError, AttributeError):
        return bytes(fcntl.fcntl(descriptor, getattr(fcntl, command), wanted))
    return None
