"""Frames over a stream socket, and the door at which the processes of a job connect.

::

    frame = size:u32 kind:u8 payload      size is the payload's; integers are big-endian
    hello = token number:u32              the first bytes of a connection to a door

A connection that carries anything else is closed. Nothing here is unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Final

from tilework.forks import watch_forks

_log = logging.getLogger(__name__)

HEADER: Final = struct.Struct("!IB")
_NUMBER: Final = struct.Struct("!I")
#: Process, user and group, as the system has them.
_CREDENTIALS: Final = struct.Struct("=iII")
#: The longest payload, unless a reader has another limit.
MAX_FRAME_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
#: The most callers: connections that have not said the hello.
MAX_CALLERS: Final = 256


class GarbageError(Exception):
    """The other side sent bytes that do not follow the protocol."""


class FrameReader:
    """Turns the bytes that arrive on a connection into frames.

    Attributes:
        kinds: The kinds of frames that may arrive: numbers from 0 to 255.
        limit_bytes: The longest payload that is accepted; checked before anything of it is kept.
        kept: The bytes of an incomplete frame.
    """

    def __init__(self, kinds: Iterable[int], limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.kinds, self.limit_bytes = frozenset(kinds), limit_bytes
        self.kept = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that ``data`` completes: kind and payload. Raises GarbageError."""
        pending: bytes | bytearray = data
        if self.kept:
            self.kept += data
            pending = self.kept
        frames: list[tuple[int, bytes]] = []
        begin, end = 0, HEADER.size
        while end <= len(pending):
            size, kind = HEADER.unpack_from(pending, begin)
            if size > self.limit_bytes:
                raise GarbageError(f"a frame of {size} bytes, above the limit {self.limit_bytes}")
            if kind not in self.kinds:
                raise GarbageError(f"a frame of the unknown kind {kind}")
            if end + size > len(pending):
                break
            frames.append((kind, bytes(pending[end : end + size])))
            begin, end = end + size, end + size + HEADER.size
        if pending is self.kept:
            del self.kept[:begin]
        else:
            self.kept += pending[begin:]
        return frames


class FramedSocket:
    """A connection that carries frames: any threads send, and one thread receives.

    A forked child closes its copy, which would hide the end of this process from the other side.

    Args:
        connection: A connected stream socket, which the object owns.
        kinds: The kinds of frames that may arrive.
        send_seconds: The longest time to send a frame, which takes time only if the other side is
            stopped and the kernel's buffers are full.
    """

    def __init__(
        self, connection: socket.socket, kinds: Iterable[int], send_seconds: float = 5.0
    ) -> None:
        connection.settimeout(send_seconds)
        self._socket, self._reader = connection, FrameReader(kinds)
        self._lock = threading.Lock()
        watch_forks(self)

    def fileno(self) -> int:
        """The number of the socket's descriptor, to wait for data."""
        return self._socket.fileno()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Send a frame. If that fails, the frame may be cut off, so the connection ends, which
        :meth:`receive` reports. Raises ValueError if the payload is too long.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame takes at most {MAX_FRAME_BYTES} bytes, got {len(payload)}")
        with self._lock, contextlib.suppress(OSError):
            try:
                self._socket.sendall(HEADER.pack(len(payload), kind) + payload)
            except OSError:
                self._socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[tuple[int, bytes]] | None:
        """The frames that have arrived: kind and payload. Call it when the socket is readable.

        None if the connection has ended, or carries anything but frames of the given kinds.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
            return self._reader.feed(data) if data else None
        except TimeoutError:  # the socket was not readable
            return []
        except OSError:
            return None
        except GarbageError as error:
            _log.warning("a connection has ended because the other side sent %s", error)
            return None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    after_fork_in_child = close


class Door:
    """Lets the processes of a job in: those that say the job's token, and an awaited number.

    Connections of strangers are closed, and silent ones are ignored: they hold nobody up. At a Unix
    socket only processes of the same user are let in, where the system knows whose they are.

    Args:
        listener: A listening socket, which stays the caller's.
        token: The secret of the job.
        awaited: The numbers that are let in, each once.

    Attributes:
        awaited: The numbers that have not come yet.
    """

    def __init__(self, listener: socket.socket, token: bytes, awaited: Iterable[int]) -> None:
        listener.setblocking(False)
        self.awaited = set(awaited)
        self._listener, self._token = listener, token
        #: The bytes so far of callers, the oldest first.
        self._callers: dict[socket.socket, bytearray] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`admit` has something to do. Not on Windows."""
        return self._selector.fileno()

    def admit(self, seconds: float) -> dict[int, socket.socket]:
        """The connections that come in, by number; they do not block.

        Waits up to ``seconds``, and returns earlier, perhaps with none, when any connection acts.
        Raises OSError if this process has no descriptors left.
        """
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        came: dict[int, socket.socket] = {}
        if self._listener in ready:
            self._accept(came)
        for sock in [*self._callers] if ready else ():
            self._hear(sock, came)
        return came

    def _accept(self, came: dict[int, socket.socket]) -> None:
        """Accept all waiting connections: if some stayed in the queue, strangers could fill it."""
        for _ in range(MAX_CALLERS):
            try:
                sock, _peer = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                return  # nobody is there
            if other_user_of(sock) is not None:
                sock.close()
                continue
            sock.setblocking(False)
            self._callers[sock] = bytearray()
            self._selector.register(sock, selectors.EVENT_READ)
            if len(self._callers) > MAX_CALLERS:
                # A process of the job says the hello at once: the oldest is the least likely.
                oldest = next(iter(self._callers))
                self._hear(oldest, came)
                if oldest in self._callers:
                    self._forget(oldest).close()

    def _hear(self, sock: socket.socket, came: dict[int, socket.socket]) -> None:
        """Read what a caller says; it comes in, is closed, or may say more later."""
        hello, size = self._callers[sock], len(self._token) + _NUMBER.size
        try:
            data = sock.recv(size - len(hello))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        hello += data
        if data and len(hello) < size and sock.type == socket.SOCK_STREAM:
            return  # more may come; a packet is whole
        self._forget(sock)
        number = int.from_bytes(hello[len(self._token) :], "big")
        known = hmac.compare_digest(hello[: len(self._token)], self._token)
        if known and len(hello) == size and number in self.awaited:
            self.awaited.remove(number)
            came[number] = sock
        else:
            sock.close()

    def _forget(self, sock: socket.socket) -> socket.socket:
        del self._callers[sock]
        self._selector.unregister(sock)
        return sock

    def close(self) -> None:
        """Close the connections that were not let in. Idempotent."""
        self._selector.close()
        while self._callers:
            self._callers.popitem()[0].close()


def knock(sock: socket.socket, token: bytes, number: int) -> None:
    """Say the hello on a socket that is connected to a :class:`Door`. Raises OSError."""
    sock.sendall(token + _NUMBER.pack(number))


def token_for(nonce: bytes, secret: bytes | None) -> bytes:
    """The token of a door whose ``nonce`` is in a store: the job's secret goes into it, unsaid.

    So who reads the store's traffic cannot come in.
    """
    return hmac.digest(secret or b"", nonce, "sha256")


def other_user_of(peer: socket.socket) -> int | None:
    """The user of the process at the other end of a Unix socket, if it is not this process's user.

    None also for other sockets, and where the system does not know.
    """
    if peer.family != getattr(socket, "AF_UNIX", None) or not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = int(_CREDENTIALS.unpack(credentials)[1])
    return None if user == os.geteuid() else user


def tune_tcp(sock: socket.socket, idle: int, every: int, count: int, limit: float = 0) -> None:
    """Have a TCP socket send small messages at once, and end when the other host is gone.

    After ``idle`` seconds of silence the system asks ``count`` times, ``every`` so many seconds.
    Sent data may stay unanswered for ``limit`` seconds, if that is not 0. Other sockets stay as
    they are.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": count}
    if limit:
        options["TCP_USER_TIMEOUT"] = int(limit * 1000)
    for name, value in options.items():
        if hasattr(socket, name):  # names differ between systems
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def watch_closely(sock: socket.socket) -> None:
    """Have a TCP socket end a few seconds after the other host, or the link to it, is gone."""
    tune_tcp(sock, 1, 1, 3, 3.5)
