"""The event-loop side of a store's server: connections, greeting, requests, parked requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from tilework.errors import DistStoreError
from tilework.framed import GarbageError, tune_tcp, watch_closely
from tilework.store import wire
from tilework.store.address import SILENCE, Address
from tilework.store.checks import LONGEST_WAIT_SECONDS
from tilework.store.requests import HANDLERS, StoreState
from tilework.store.wire import Code

# Windows has no limits of this kind.
if sys.platform != "win32":
    import resource

_log = logging.getLogger(__name__)

#: Seconds that a new connection may take over the greeting.
_GREETING_SECONDS: Final = 30.0
#: Seconds without accepting when the process is out of file descriptors.
_ACCEPT_PAUSE_SECONDS: Final = 0.2
#: Connections accepted per turn, so that a flood does not starve those that are there.
_ACCEPTS_PER_TURN: Final = 64
_READ_BYTES: Final = 64 << 10
#: The share of this process's descriptors for connections that have not greeted.
_STRANGERS_SHARE: Final = 1 / 4

_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Service:
    """A store's contents, and the connections of all clients; runs in the event loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        where: Address,
        secret: bytes | None,
    ) -> None:
        self.loop = loop
        self.secret = secret
        self.state = StoreState()
        self._where = where
        self._listener = listener
        self._connections: set[Connection] = set()
        self._logged_refusals: set[str] = set()
        #: Those that have not greeted yet, the oldest first.
        self._strangers: dict[Connection, None] = {}
        self._most_strangers = max(1, int(_descriptor_limit() * _STRANGERS_SHARE))

    def open(self) -> None:
        """Start accepting connections."""
        self._listener.setblocking(False)
        self.loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting connections, and close every connection."""
        if self._listener.fileno() >= 0:
            self.loop.remove_reader(self._listener.fileno())
        for connection in list(self._connections):
            connection.close()

    def drop_sockets(self) -> None:
        """Close this process's descriptors only: for a forked child, where no loop runs."""
        for connection in self._connections:
            connection.sock.close()

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection from the list of connections."""
        self._connections.discard(connection)
        self._strangers.pop(connection, None)

    def greeted(self, connection: Connection) -> None:
        """Note that ``connection`` has greeted, and no longer counts as a stranger."""
        self._strangers.pop(connection, None)

    def log_refusal(self, why: str) -> None:
        """Log that a client was refused: as a warning, and for a repeated reason as info."""
        level = logging.INFO if why in self._logged_refusals else logging.WARNING
        self._logged_refusals.add(why)
        _log.log(level, "the store server at %s refused a client: %s", self._where, why)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._accept_failed(error)
                return
            self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            why = self._where.refuses(sock)
            tune_tcp(sock, *SILENCE)
        except OSError:
            sock.close()  # It has gone again.
            return
        connection = Connection(self, sock, why)
        self._connections.add(connection)
        self._strangers[connection] = None
        if len(self._strangers) > self._most_strangers:
            # A client greets within milliseconds: the oldest is the least likely to be one.
            next(iter(self._strangers)).close()

    def _accept_failed(self, error: OSError) -> None:
        """Stop accepting for a moment after ``error``; keep serving the connected clients."""
        if error.errno not in _OUT_OF_DESCRIPTORS:
            _log.error("the store server at %s cannot accept: %s", self._where, error)
        self.loop.remove_reader(self._listener.fileno())
        self.loop.call_later(_ACCEPT_PAUSE_SECONDS, self.open)


def _descriptor_limit() -> int:
    """The number of file descriptors that this process may have."""
    if sys.platform == "win32":
        return 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Connection:
    """A client's connection: bytes in and out, the greeting, and the request being answered."""

    def __init__(self, service: Service, sock: socket.socket, why_not: str) -> None:
        self.sock = sock
        self._service = service
        self._loop = service.loop
        self._fd = sock.fileno()
        self._inbox = wire.Inbox()
        self._unsent = memoryview(b"")
        self._closing = False
        self._why_not = why_not
        self._nonces: tuple[bytes, bytes] | None = None
        self._on_message = self._hello
        #: Key and value to append when this connection closes.
        self._last_append: tuple[bytes, bytes] | None = None
        #: Undoes the waiting of a parked request; None while none is parked.
        self._unpark: Callable[[], None] | None = None
        self._deadline: asyncio.TimerHandle | None = self._loop.call_later(
            _GREETING_SECONDS, self.close
        )
        self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        """Close the socket, and drop the parked request. Idempotent.

        The value that was noted by :meth:`append_on_disconnect` is appended now.
        """
        if self._fd < 0:
            return
        self._end_waiting()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._fd = -1
        self.sock.close()
        self._service.forget(self)
        record, self._last_append = self._last_append, None
        if record is not None:
            with contextlib.suppress(DistStoreError):  # the value there has become too long
                self._service.state.table.append(*record)

    def send(self, code: Code, fields: Sequence[bytes] = ()) -> None:
        """Send an answer; bytes that the socket does not take now follow when it is writable."""
        data = memoryview(wire.encode(code, fields))
        try:
            sent = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._loop.add_writer(self._fd, self._writable)
        elif self._closing:
            self.close()

    def park(
        self, milliseconds: int, expired: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Leave the request unanswered until :meth:`answer_parked` is called.

        After ``milliseconds`` ``expired`` is called, which is to answer. ``undo`` is called when
        the wait ends in any way.
        """
        after = min(max(0, milliseconds) / 1000, LONGEST_WAIT_SECONDS)
        self._unpark = undo
        self._deadline = self._loop.call_later(after, self._expire, expired)

    def append_on_disconnect(self, record: tuple[bytes, bytes] | None) -> None:
        """Note a key and a value to append when this connection closes; None revokes this."""
        self._last_append = record
        watch_closely(self.sock)

    def answer_parked(self, code: Code, fields: Sequence[bytes]) -> None:
        """Answer the parked request."""
        self._end_waiting()
        self.send(code, fields)

    def _expire(self, expired: Callable[[], None]) -> None:
        self._end_waiting()
        expired()

    def _end_waiting(self) -> None:
        undo, self._unpark = self._unpark, None
        if undo is not None:
            undo()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _readable(self) -> None:
        try:
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data or self._closing:
            self.close()
            return
        try:
            self._take(data)
        except GarbageError as error:
            _log.info("closed a connection that sent garbage: %s", error)
            self.close()
        except Exception:
            # Our bug, but one client's request must not take the others down.
            _log.exception("closed a connection whose request failed")
            self.close()

    def _take(self, data: bytes) -> None:
        if self._unpark is not None or self._unsent:
            raise GarbageError("a request before the last one was answered")
        message = self._inbox.feed(data)
        if message is not None:
            self._on_message(message)

    def _writable(self) -> None:
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not self._unsent:
            self._loop.remove_writer(self._fd)
            if self._closing:
                self.close()

    # The greeting.

    def _hello(self, message: wire.WireMessage) -> None:
        code, fields = message
        if code != Code.HELLO or len(fields) != 2 or len(fields[1]) != wire.NONCE_BYTES:
            raise GarbageError("no greeting")
        if fields[0] != wire.MAGIC:
            self._refuse("it speaks another version of the protocol")
        elif self._why_not:
            self._refuse(self._why_not)
        elif self._service.secret is None:
            self._welcome(())
        else:
            self._nonces = (fields[1], os.urandom(wire.NONCE_BYTES))
            self._on_message = self._proof
            self.send(Code.CHALLENGE, self._nonces[1:])

    def _proof(self, message: wire.WireMessage) -> None:
        secret, nonces = self._service.secret, self._nonces
        assert secret is not None
        assert nonces is not None
        if message.code != Code.PROOF or len(message.fields) != 1:
            raise GarbageError("no proof")
        if hmac.compare_digest(wire.proof(secret, b"client", nonces), message.fields[0]):
            self._welcome((wire.proof(secret, b"server", nonces),))
        else:
            self._refuse("its secret is wrong")

    def _refuse(self, why: str) -> None:
        self._closing = True
        self._service.log_refusal(why)
        self.send(Code.REFUSED, (why.encode(),))

    def _welcome(self, fields: Sequence[bytes]) -> None:
        self._end_waiting()
        self._service.greeted(self)
        self._inbox.greeted()
        self._on_message = self._request
        self.send(Code.WELCOME, fields)

    # Requests.

    def _request(self, message: wire.WireMessage) -> None:
        handle = HANDLERS.get(message.code)
        if handle is None:
            raise GarbageError(f"an unknown request, {message.code}")
        try:
            handle(self, self._service.state, message.fields)
        except DistStoreError as error:
            self.send(Code.ERROR, (str(error).encode(),))

    def ok(self, *fields: bytes) -> None:
        """Answer a request that succeeded."""
        self.send(Code.OK, fields)
