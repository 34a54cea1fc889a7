"""The places of checkpoints: a folder of this machine, or a URL through fsspec.

A file is *absent* until it is complete: it is written under another name, flushed to the disk, and
renamed. A folder is a checkpoint when it has an index, which is written last.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from urllib.request import url2pathname

from tilework.checkpoint.format import INDEX_NAME
from tilework.errors import CheckpointError
from tilework.optional_core import core as _core

#: If more than this wait, the remover closes a file at once.
_MOST_WAITING = 64


class LateClose:
    """Closes removed files in a thread, which runs while there are any to close.

    The system frees a removed file when it is closed: a tenth of a second and more for a large one,
    for which only the next save may have to wait.
    """

    def __init__(self) -> None:
        self._begin()
        if hasattr(os, "register_at_fork"):
            # A forked child has the descriptors, but not the thread.
            os.register_at_fork(after_in_child=self._begin_in_child)

    def _begin(self) -> None:
        self._waiting: deque[int] = deque()
        self._changed = threading.Condition()
        self._is_at_work = False

    def _begin_in_child(self) -> None:
        waiting = self._waiting
        self._begin()
        for descriptor in waiting:
            _close(descriptor)

    def add(self, descriptor: int) -> None:
        """Let the thread close a descriptor; close it here only if many are waiting. Local."""
        with self._changed:
            is_full = len(self._waiting) >= _MOST_WAITING
            if not is_full:
                self._waiting.append(descriptor)
            starts = not is_full and not self._is_at_work
            self._is_at_work |= starts
        if is_full:
            _close(descriptor)
        if starts:
            try:
                threading.Thread(target=self._work, name="late close", daemon=True).start()
            except RuntimeError:  # no more threads
                self._work()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_at_work)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_at_work = False
                    self._changed.notify_all()
                    return
                descriptor = self._waiting.popleft()
            _close(descriptor)


def _close(descriptor: int) -> None:
    with suppress(OSError):  # on a network file system: it is still closed
        os.close(descriptor)


late_close = LateClose()

if sys.platform != "win32":
    import fcntl

#: The end of the name of a file that is being written.
UNFINISHED = ".part"
#: Files are written in pieces that end at multiples of this: the system then keeps them in large
#: pages, which cost nothing to map when the file is read.
_BLOCK_BYTES = 4 << 20
#: The interval, in bytes, of asking the system to write to the disk in the background.
_WRITEBACK_BYTES = 32 << 20
#: Removed files from this size on are closed in the background, as freeing them takes long.
_LARGE_BYTES = 16 << 20
#: The maximum of pieces of memory in one call, guaranteed by POSIX.
_MOST_BUFFERS = 1024 if sys.platform != "win32" else 16
LOCK_NAME = ".lock"


class FileWriter(ABC):
    """A file that is being written, from start to end."""

    @abstractmethod
    def write(self, memory: memoryview | bytes) -> None:
        """Append bytes. They must not change before :meth:`finish`, as they may be read later."""

    @abstractmethod
    def finish(self) -> None:
        """Flush the file to the disk, then give it the final name: now the file exists."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the file if it is not finished. Idempotent; never raises."""

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class FileReader(ABC):
    """A file that is read by position."""

    nbytes: int
    #: The descriptor, where the system has one.
    descriptor: int | None = None

    @abstractmethod
    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill memory with the file's bytes from ``offset`` on; return how many were read."""

    @abstractmethod
    def close(self) -> None:
        """Close the file. Idempotent; never raises, as checksums guard the bytes that were read."""


class Storage(ABC):
    """A folder of files. Each name is the plain name of a file directly in the folder.

    Functions of checkpoints take a storage in place of a path. A subclass is complete when it
    passes ``tilework.testing.storages.StorageContract``. Ranks call methods at the same time, each
    on an object of its own or on a shared object.
    """

    location: str
    #: True if other processes of this machine see written files.
    is_local: bool = True
    #: True if rewriting a file may leave it torn for a while, as no rename replaces it.
    writes_in_place: bool = False

    @abstractmethod
    def prepare(self) -> None:
        """Make the folder if it is missing. It survives a crash once :meth:`sync` has returned."""

    @abstractmethod
    def create(self, name: str) -> FileWriter:
        """Begin to write a file, which gets the name when it is finished."""

    @abstractmethod
    def open(self, name: str) -> FileReader:
        """Open a file to read.

        Raises:
            CheckpointError: The file is missing, or not a plain file.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """The names of files and folders directly in it, sorted; empty if there is no folder."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it exists. The disk space may become free a little later."""

    def wait_for_room(self) -> None:
        """Block until the disk space of all removed files is free; here it is at once."""
        return None

    def forget(self, name: str) -> None:
        """Make the system drop the cached pages of a file; here there are none."""
        return None

    def sync(self) -> None:
        """Flush the folder's list of names to the disk; here it survives a crash already."""
        return None

    @abstractmethod
    def inner(self, name: str) -> Storage:
        """The folder ``name`` within this folder."""

    @abstractmethod
    def remove_folder(self) -> None:
        """Remove the folder with all files. The index goes first, and with it the checkpoint."""

    def read_all(self, name: str, most_bytes: int = 1 << 31) -> bytes:
        """All bytes of a file.

        Raises:
            CheckpointError: The file is missing, or too large.
        """
        with closing(self.open(name)) as reader:
            if reader.nbytes > most_bytes:
                where = self.where(name)
                raise CheckpointError(
                    f"{where} has {reader.nbytes:,} bytes, more than the limit of {most_bytes:,}",
                    file=where,
                )
            memory = bytearray(reader.nbytes)
            got = reader.read_into(memoryview(memory), 0)
        return bytes(memory[:got])

    def __str__(self) -> str:
        return self.location

    def where(self, name: str) -> str:
        """A file's full name, for messages."""
        return f"{self.location.rstrip('/')}/{name}"

    def lock(self) -> Callable[[], None]:
        """Keep other writers away until the returned function is called.

        The returned function never raises: closing the file ends the lock, even if the lock file
        cannot be removed.

        Raises:
            CheckpointError: Another writer holds the lock.
        """
        return lambda: None


class FileCalls:
    """The system calls by which files are written, in a place where tests replace them.

    docs/format.md specifies the order of the calls.
    """

    mkdir = staticmethod(os.mkdir)
    open = staticmethod(os.open)
    write = staticmethod(os.writev)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)
    preadv = staticmethod(os.preadv)
    pwrite = staticmethod(os.pwrite)


calls = FileCalls()


class LocalStorage(Storage):
    """A folder of a file system that this machine has mounted; it need not exist."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.location = str(folder)
        #: Folders with a new entry that is not on the disk yet.
        self._changed: list[Path] = []

    def prepare(self) -> None:
        folder = self.folder
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            try:
                calls.mkdir(each, 0o777)
            except FileExistsError:
                if not each.is_dir():
                    raise
                continue
            self._changed.append(each.parent)

    def create(self, name: str) -> FileWriter:
        return _LocalWriter(self.folder / f"{name}{UNFINISHED}", self.folder / name)

    def open(self, name: str) -> FileReader:
        return _LocalReader(self.folder / name, self.where(name))

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(
                f"cannot list {self.location}: {error.strerror}", file=self.location
            ) from None

    def remove(self, name: str) -> None:
        path = self.folder / name
        kept = _opened_if_large(path)
        try:
            with suppress(FileNotFoundError):
                calls.unlink(path)
        finally:
            if kept is not None:
                late_close.add(kept)

    def wait_for_room(self) -> None:
        late_close.wait()

    def forget(self, name: str) -> None:
        if (fd := _opened_if_large(self.folder / name)) is not None:
            with suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            _close_quietly(fd)

    def sync(self) -> None:
        while self._changed:
            _sync_folder(self._changed.pop(0))
        _sync_folder(self.folder)

    def inner(self, name: str) -> Storage:
        return LocalStorage(self.folder / name)

    def remove_folder(self) -> None:
        if self.folder.is_symlink() and self.folder.is_dir():
            calls.unlink(self.folder)  # the link's owner keeps the folder elsewhere
            return
        for name in sorted(self.names(), key=removal_order):
            self.remove(name)
        with suppress(FileNotFoundError):
            calls.rmdir(self.folder)

    def lock(self) -> Callable[[], None]:
        return _locked(self.folder.resolve() / LOCK_NAME, self.location)


class LinkedStorage(LocalStorage):
    """A folder whose files may be links, as in Hugging Face's cache of downloads."""

    def open(self, name: str) -> FileReader:
        return _LocalReader(Path(os.path.realpath(self.folder / name)), self.where(name))


def removal_order(name: str) -> tuple[bool, bool]:
    """The key to sort the files of a folder for removal: the index comes first."""
    return not name.startswith(INDEX_NAME), name == INDEX_NAME


def _close_quietly(fd: int) -> None:
    with suppress(OSError):
        calls.close(fd)


def _opened_if_large(path: Path) -> int | None:
    """Open a large plain file and return the descriptor; None for other files, or off Linux."""
    if sys.platform != "linux":
        return None
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size < _LARGE_BYTES:
            return None
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def _sync_folder(folder: Path) -> None:
    fd = calls.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        calls.fsync(fd)
    except OSError as error:
        # Some network file systems do not support it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        calls.close(fd)


class _LocalWriter(FileWriter):
    def __init__(self, unfinished: Path, final: Path) -> None:
        self._unfinished, self._final = unfinished, final
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = calls.open(unfinished, flags, 0o666)
        #: The bytes not written yet, and the number of bytes to the next boundary.
        self._waiting: list[memoryview] = []
        self._room = _BLOCK_BYTES
        #: The number of bytes written, and of bytes whose write-back was requested.
        self._written = self._told = 0

    def write(self, memory: memoryview | bytes) -> None:
        memory = memoryview(memory)
        while memory.nbytes:
            piece, memory = memory[: self._room], memory[self._room :]
            self._waiting.append(piece)
            self._room -= piece.nbytes
            if not self._room or len(self._waiting) == _MOST_BUFFERS:
                self._write_waiting()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._room = self._room or _BLOCK_BYTES
        while waiting:
            try:
                done = calls.write(self._fd, waiting)
            except OSError as error:  # such as a full disk: the system does not name the file
                error.filename = str(self._final)
                raise
            self._written += done
            while waiting and done >= waiting[0].nbytes:
                done -= waiting.pop(0).nbytes
            if done:
                waiting[0] = waiting[0][done:]
        # The disk then works while more is written, and the flush at the end is shorter.
        if _core is not None and self._written - self._told >= _WRITEBACK_BYTES:
            _core.start_writeback(self._fd, self._told, self._written - self._told)
            self._told = self._written

    def finish(self) -> None:
        self._write_waiting()
        calls.fsync(self._fd)
        fd, self._fd = self._fd, -1
        calls.close(fd)
        calls.rename(self._unfinished, self._final)

    def discard(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        _close_quietly(fd)
        with suppress(OSError):  # the earlier error of the file says more
            calls.unlink(self._unfinished)


class _LocalReader(FileReader):
    def __init__(self, path: Path, where: str) -> None:
        try:
            # Not through links, and without waiting for the writer of a pipe.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            problem = "is a symlink" if error.errno == errno.ELOOP else error.strerror
            raise CheckpointError(f"cannot open {where}: {problem}", file=where) from None
        self._where = where
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{where} is not a plain file", file=where)
        self.nbytes = status.st_size
        self.descriptor = self._fd

    def read_into(self, memory: memoryview, offset: int) -> int:
        total = 0
        while total < memory.nbytes:
            try:
                count = calls.preadv(self._fd, [memory[total:]], offset + total)
            except OSError as error:  # the system does not name the file
                error.filename = self._where
                raise
            if count == 0:
                break
            total += count
        return total

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _close_quietly(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


# -- locks -----------------------------------------------------------------------------------

#: The locks of this process, which the operating system does not distinguish.
_held: set[str] = set()


def _locked(path: Path, location: str) -> Callable[[], None]:
    """Take the lock of a lock file, until the process ends or the returned function is called."""
    key = str(path)
    if key in _held:
        raise _busy(location, "this process")
    fd = _open_locked(path, location)
    _held.add(key)

    def release() -> None:
        if key in _held:
            _held.discard(key)
            if fd >= 0:
                with suppress(OSError):  # the folder may be gone, or the disk read-only by now
                    calls.unlink(path)
                _close_quietly(fd)

    return release


def _open_locked(path: Path, location: str) -> int:
    """Open and lock a file, and return the descriptor; -1 if the system has no file locks."""
    if sys.platform == "win32":
        return -1
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # A lock of the process, not of the open file: forked children do not hold it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _busy(location, "another process") from None
            if error.errno in (errno.ENOLCK, errno.ENOTSUP):
                return -1  # a file system without locks
            raise
        os.close(fd)  # the former holder has removed the file since


def _busy(location: str, who: str) -> CheckpointError:
    return CheckpointError(
        f"{who} is writing to {location} already: wait() for it, or save to another path",
        file=location,
    )


# -- URLs ------------------------------------------------------------------------------------

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|[A-Za-z0-9]+::")
#: URLs of files of this machine, in fsspec's form.
_LOCAL_URL = re.compile(r"(?:file|local)://(?P<path>.*)", re.DOTALL)


def is_url(path: str | os.PathLike[str]) -> bool:
    """True if a path is a URL for fsspec. A ``file://`` URL is a path of this machine."""
    if not isinstance(path, str) or _LOCAL_URL.match(path):
        return False
    return _URL.match(path) is not None


def plain_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path that a ``file://`` or ``local://`` URL names; other paths unchanged."""
    match = _LOCAL_URL.match(path) if isinstance(path, str) else None
    if match is None:
        return path
    if not match["path"].startswith("/"):
        raise ValueError(
            f"{path} has the host {match['path'].partition('/')[0]!r}: a file of this machine has "
            f"three slashes, as in file:///data/run"
        )
    return url2pathname(match["path"])
