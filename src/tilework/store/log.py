"""The file under a :class:`FileStore`: locking, reading the tail, appending, repair.

Writers take an exclusive ``flock``, read what others wrote, drop a torn last record, and append.
Readers take no lock: a record counts once all of it is there with a good checksum. ``flock``
belongs to the open file, so two stores of one process exclude each other too, which POSIX
record locks would not do.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from tilework.errors import DistStoreError, StoreTimeoutError
from tilework.forks import watch_forks
from tilework.framed import GarbageError
from tilework.store import wire
from tilework.store.arrivals import hold_byte, is_free
from tilework.store.checks import Deadline, closed_error
from tilework.store.requests import HANDLERS, LocalClient, StoreState
from tilework.store.wire import Code, WireMessage

# ::
#
#     file    = MAGIC record*
#     MAGIC   = "tilework-store" 0x00 0x02                         16 bytes, the last is the version
#     record  = size:u32 crc(payload):u32 crc(size, crc):u32 payload       integers big-endian
#     payload = a request that has changed the store, as a message of wire; or JOIN, without fields,
#               where a store has opened the file, and LEAVE, with the number of the store
#
# The header's own checksum distinguishes a torn record from a damaged record. Only the last record
# can be torn (the writer was killed, or is still writing): then the header is good, or shorter than
# 12 bytes, and the payload ends beyond the file. Anything else that does not add up is damage.

MAGIC: Final = b"tilework-store\x00\x02"

_HEADER: Final = struct.Struct("!III")
HEADER_BYTES: Final = _HEADER.size
#: Requests that change nothing; nobody has to be locked out to answer them.
_READS: Final = frozenset(
    (Code.GET, Code.CHECK, Code.WAIT, Code.NUM_KEYS, Code.LIST_KEYS, Code.QUEUE_LENGTH)
)


class DamagedLogError(Exception):
    """The file has bytes that no writer of this format leaves behind, not even a killed writer."""


def pack(code: Code, fields: Sequence[bytes]) -> bytes:
    """The record of a request in the file, with header."""
    payload = wire.encode(code, fields)
    sizes = struct.pack("!II", len(payload), zlib.crc32(payload))
    return sizes + struct.pack("!I", zlib.crc32(sizes)) + payload


def record_bytes(header: bytes) -> int:
    """The size in bytes of the record with ``header`` (12 bytes or more), header included."""
    size, _, check = _HEADER.unpack_from(header)
    if zlib.crc32(header[:8]) != check:
        raise DamagedLogError("a record's header fails its checksum")
    return HEADER_BYTES + int(size)


def unpack(data: bytes) -> WireMessage:
    """Decode ``data``, one whole record with header. Raises DamagedLogError."""
    payload = data[HEADER_BYTES:]
    if zlib.crc32(payload) != _HEADER.unpack_from(data)[1]:
        raise DamagedLogError("a record fails its checksum")
    try:
        return wire.decode(payload)
    except GarbageError as error:
        raise DamagedLogError(f"a record makes no sense: {error}") from error


# Windows has no flock; there FileStore says so when it is asked for.
if sys.platform != "win32":
    import fcntl

#: Bytes read at once where a record does not ask for more.
_CHUNK: Final = 64 << 10
#: Seconds to wait for the lock when closing; a holder of more than that is stuck.
_CLOSE_SECONDS: Final = 5.0


class Log:
    """The open file of a FileStore, and the table and queues that the file's records result in."""

    def __init__(self, path: str, world_size: int, wait_seconds: float) -> None:
        self.path = path
        #: Guards everything here against this process's other threads.
        self.mutex = threading.RLock()
        self._world_size = world_size
        # A forked child reads and writes as well, but it did not open and so does not close.
        self._counted = False
        #: Which one of those that opened the file this is; 0 for none of them.
        self.number = 0
        self._fd = -1
        try:
            self._open(wait_seconds)
        except BaseException:
            self._drop_fd()
            raise
        watch_forks(self)

    @property
    def private(self) -> bool:
        """True if the file is this user's, and nobody else may write to it."""
        info = os.fstat(self._fd)
        return info.st_uid == os.geteuid() and info.st_mode & 0o022 == 0

    def refresh(self) -> None:
        """Apply the records that others have appended since. Locks only if one looks damaged."""
        size = os.fstat(self._fd).st_size
        if size == self._offset:
            return
        try:
            self._read(size)
        except DamagedLogError:
            # Perhaps a torn record was replaced while it was read; no writer is busy under a lock.
            with self._flock(fcntl.LOCK_SH, _CLOSE_SECONDS):
                self._read_or_raise()

    def ensure_open(self) -> None:
        """Raise DistStoreError if this store was closed."""
        if self._fd < 0:
            raise closed_error(str(self))

    def answer(self, code: Code, fields: Sequence[bytes], wait_seconds: float) -> WireMessage:
        """The answer to a request, at once. A request that changes the store is appended, or raises
        and changes nothing.
        """
        with self.mutex:
            self.ensure_open()
            if code in _READS or (code == Code.QUEUE_POP and not self._has_value(fields[1])):
                self.refresh()
                return self._handled(code, fields)
            with self._writing(wait_seconds):
                before = self.state.changes
                answer = self._handled(code, fields)
                if self.state.changes != before:
                    self._append(code, fields)
                return answer

    def _has_value(self, queue: bytes) -> bool:
        self.refresh()
        return self.state.queues.length(queue) > 0

    def _handled(self, code: int, fields: Sequence[bytes]) -> WireMessage:
        return LocalClient(self.state, code, fields).end()

    @contextlib.contextmanager
    def _writing(self, wait_seconds: float) -> Iterator[None]:
        """Lock the file within the block, so that nobody else writes, and read all of it."""
        with self.mutex, self._flock(fcntl.LOCK_EX, wait_seconds):
            self._read_or_raise()
            yield

    def _append(self, code: Code, fields: Sequence[bytes] = ()) -> None:
        """Append a request that the state has been changed by; only inside :meth:`_writing`."""
        data = pack(code, fields)
        if self._offset == 0:
            data = MAGIC + data
        try:
            # Whatever is behind the last good record was torn off by a killed writer.
            os.ftruncate(self._fd, self._offset)
            self._write_at_end(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._offset)
            self._forget()
            self._read_or_raise()
            raise DistStoreError(
                f"{self} could not be written: {error.strerror}. Nothing was changed, and what it "
                "holds can still be read. Free some space, or use a path on another disk."
            ) from error
        self._offset += len(data)

    def _forget(self) -> None:
        """Begin to read the file from the start."""
        self.state, self._offset, self.opened, self._finished = StoreState(), 0, 0, 0
        self._closed_in_order: set[int] = set()

    def lost(self) -> list[int]:
        """The numbers of the stores whose processes ended before they closed the file."""
        if self.number == 0:  # there are no such locks here
            return []
        others = set(range(1, self.opened + 1)) - self._closed_in_order - {self.number}
        return [number for number in sorted(others) if is_free(self._fd, number)]

    def close(self) -> None:
        """Note in the file that this store closes; the last of ``world_size`` stores removes it.

        Idempotent.
        """
        with self.mutex:
            if self._fd < 0:
                return
            try:
                if self._counted:
                    self._leave()
            except (OSError, DistStoreError):
                pass  # The file stays where it is, which is all that a failure here can mean.
            finally:
                self._drop_fd()

    def after_fork_in_child(self) -> None:
        """Open the file again: the parent's descriptor would share the parent's locks."""
        self.mutex = threading.RLock()
        self._counted, self.number = False, 0
        inherited, self._fd = self._fd, -1
        if inherited < 0:
            return
        for path in (f"/proc/self/fd/{inherited}", self.path):  # The first also if it was removed.
            with contextlib.suppress(OSError):
                self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                break
        os.close(inherited)

    def __str__(self) -> str:
        return f"FileStore({self.path!r})"

    def _open(self, wait_seconds: float) -> None:
        while True:
            self._forget()
            try:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise DistStoreError(
                    f"{self} could not be opened: {error.strerror}. The path must be a file, or a "
                    "new name, in a directory that every rank can read and write."
                ) from error
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                self._drop_fd()
                raise DistStoreError(
                    f"{self} could not be opened: it is not a plain file (a pipe, or a device). "
                    "The path must be a file or a new name."
                )
            with self._writing(wait_seconds):
                # The last user of an earlier store may have removed the file since it was opened.
                if os.fstat(self._fd).st_nlink:
                    # Locked before anybody can know of it: a free byte means an end.
                    number = self.opened + 1
                    self.number = number if hold_byte(self._fd, number) else 0
                    self._append(Code.JOIN)
                    self.opened = number
                    self._counted = True
                    return
            self._drop_fd()

    def _leave(self) -> None:
        with self._writing(_CLOSE_SECONDS):
            left = b"%d" % self.number
            self._append(Code.LEAVE, [left])
            self._apply(WireMessage(Code.LEAVE, [left]))
            last = self._finished == self.opened and self._finished >= self._world_size
            is_ours = os.path.samestat(os.stat(self.path), os.fstat(self._fd))
            if self._world_size > 0 and last and is_ours:
                os.unlink(self.path)

    def _drop_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def _flock(self, how: int, wait_seconds: float) -> Iterator[None]:
        # Polled, since a blocking flock has no time-out and the holder may have been stopped.
        deadline, pause = Deadline(wait_seconds), 0.0002
        while True:
            try:
                fcntl.flock(self._fd, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed:
                    raise StoreTimeoutError(
                        f"Timeout: waited {wait_seconds:g} s for the lock of {self}, which another "
                        "process holds. Check for a stopped process that uses it (see `lslocks`)."
                    ) from None
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, 0.01)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _read_or_raise(self) -> None:
        try:
            self._read(os.fstat(self._fd).st_size)
        except DamagedLogError as error:
            raise DistStoreError(
                f"{self} cannot be used: {error}. It was written by something else, or damaged; "
                "remove it, or use another path."
            ) from error

    def _read(self, size: int) -> None:
        """Apply all complete records in the first ``size`` bytes, not an incomplete last record."""
        if size < self._offset:
            raise DamagedLogError("the file has become shorter")
        if self._offset == 0 and not self._read_magic():
            return
        data, at, wanted = b"", 0, HEADER_BYTES
        while self._offset + wanted <= size:
            if len(data) - at < wanted:
                data, at = os.pread(self._fd, max(wanted, _CHUNK), self._offset), 0
                if len(data) < wanted:
                    return  # Another process has just cut off a torn record.
            wanted = record_bytes(data[at : at + HEADER_BYTES])
            if len(data) - at >= wanted:
                self._apply(unpack(data[at : at + wanted]))
                self._offset, at, wanted = self._offset + wanted, at + wanted, HEADER_BYTES

    def _read_magic(self) -> bool:
        start = os.pread(self._fd, len(MAGIC), 0)
        if not MAGIC.startswith(start):
            raise DamagedLogError("it does not begin like a tilework store of this version")
        if start == MAGIC:
            self._offset = len(MAGIC)
        return start == MAGIC

    def _write_at_end(self, data: bytes) -> None:
        view, at = memoryview(data), self._offset
        while view:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written

    def _apply(self, record: WireMessage) -> None:
        code, fields = record
        if code == Code.JOIN:
            self.opened += 1
        elif code == Code.LEAVE:
            self._finished += 1
            number = b"".join(fields)
            self._closed_in_order.add(int(number) if number.isdigit() else 0)
        elif code in HANDLERS:
            try:
                self._handled(code, fields)
            except (GarbageError, DistStoreError) as error:
                raise DamagedLogError(f"a record makes no sense: {error}") from error
        else:
            raise DamagedLogError(f"a record of the unknown kind {code}")
