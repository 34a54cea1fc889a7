"""A client's connections to a store's server."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final

from tilework.errors import DistNetworkError, StoreTimeoutError
from tilework.forks import watch_forks
from tilework.framed import GarbageError
from tilework.store import checks, wire
from tilework.store.address import Address
from tilework.store.checks import Deadline, answer_seconds
from tilework.store.late_notice import KeyWait, LateNotice
from tilework.store.wire import Code, WireMessage

#: Seconds to put up with a peer that accepts and hangs up, as a proxy does before the server
#: behind it is up.
_HANG_UP_SECONDS: Final = 10.0
#: Pauses between attempts to connect, first and longest.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5
_READ_BYTES: Final = 64 << 10
_MAX_IDLE: Final = 8


#: Called with what was wrong whenever a server could not be reached yet; may raise.
_while_connecting: ContextVar[Callable[[str], None] | None] = ContextVar(
    "tilework_while_connecting", default=None
)


@contextlib.contextmanager
def while_connecting(act: Callable[[str], None]) -> Iterator[None]:
    """Have ``act`` called after each failed attempt to connect a new store within the block.

    ``act`` gets the reason of the failure as text. An exception from ``act`` ends the wait.
    """
    token = _while_connecting.set(act)
    try:
        yield
    finally:
        _while_connecting.reset(token)


class _HungUpError(Exception):
    """The other side closed the connection."""


class Channel:
    """A client's connection to a store's server, used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox = wire.Inbox()

    def ask(self, request: bytes, wait_seconds: float, lines: KeyWait | None = None) -> WireMessage:
        """Send one message and wait for the answer; ``lines`` reports a long wait on stderr.

        Raises TimeoutError, GarbageError or _HungUpError; the channel is then of no more use.
        """
        deadline = Deadline(wait_seconds)
        try:
            self._sock.settimeout(wait_seconds)
            self._sock.sendall(request)
            while True:
                data = self._receive(deadline, lines)
                if not data:
                    raise _HungUpError
                answer = self._inbox.feed(data)
                if answer is not None:
                    return answer
        except TimeoutError:
            raise
        except OSError as error:
            raise _HungUpError from error

    def _receive(self, deadline: Deadline, lines: KeyWait | None) -> bytes:
        while True:
            left = deadline.left() if lines is None else lines.pause(deadline.left())
            self._sock.settimeout(max(0.001, left))
            try:
                return self._sock.recv(_READ_BYTES)
            except TimeoutError:
                if lines is None or deadline.passed:
                    raise
                lines.look()

    def tell(self, request: bytes) -> None:
        """Send one last message, if the socket takes it at once; wait for no answer."""
        with contextlib.suppress(OSError):
            self._sock.setblocking(False)
            self._sock.send(request)

    def greet(self, secret: bytes | None, wait_seconds: float) -> None:
        """Greet the server; each side proves that it knows ``secret``. Raises DistNetworkError."""
        nonce = os.urandom(wire.NONCE_BYTES)
        answer = self.ask(wire.encode(Code.HELLO, (wire.MAGIC, nonce)), wait_seconds)
        expected = None
        if secret is not None and answer.code == Code.CHALLENGE:
            nonces = (nonce, *answer.fields)
            expected = wire.proof(secret, b"server", nonces)
            own_proof = wire.proof(secret, b"client", nonces)
            answer = self.ask(wire.encode(Code.PROOF, (own_proof,)), wait_seconds)
        _check_welcome(answer, secret is not None, expected)
        self._inbox.greeted()

    def has_ended(self) -> bool:
        """True if the server has closed this connection; does not wait."""
        try:
            self._sock.setblocking(False)
            return not self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def interrupt(self) -> None:
        """Make :meth:`ask` raise in the thread that waits there; called from another thread."""
        with contextlib.suppress(OSError):  # It may be gone already.
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def _check_welcome(answer: WireMessage, have_secret: bool, expected: bytes | None) -> None:
    """Check that a server welcomes this client, and proves that it knows the secret."""
    if answer.code == Code.REFUSED:
        why = b" ".join(answer.fields).decode(errors="replace")
        hint = " Every rank needs the same secret." if "secret" in why else ""
        raise DistNetworkError(f"refused this client: {why}.{hint}")
    if answer.code == Code.CHALLENGE and not have_secret:
        raise DistNetworkError(
            "requires the job's secret, and this client was given none: pass secret=, or set "
            "TILEWORK_SECRET as rank 0 has it"
        )
    if answer.code != Code.WELCOME:
        raise GarbageError(f"an unexpected message, {answer.code}")
    proven = expected is not None and hmac.compare_digest(expected, b"".join(answer.fields))
    if have_secret and not proven:
        raise DistNetworkError(
            "could not prove that it knows the secret: it has none or a wrong secret, or it is "
            "not this job's server"
        )


class Pool:
    """Connections to one server: as many as threads wait at once, reused.

    A forked child drops the inherited connections and opens new ones.
    """

    def __init__(self, where: Address, secret: bytes | None) -> None:
        self.where = where
        self.closed = False
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._all: set[Channel] = set()
        #: Channels without requests, kept open because the server acts when they end; and the last
        #: message to the server if this pool is closed in order.
        self._held: dict[Channel, bytes] = {}
        watch_forks(self)

    def ask(self, request: bytes, wait_seconds: float, waits: KeyWait | None = None) -> WireMessage:
        """Send a request, and return the answer, for which the server may take ``wait_seconds``.

        ``waits`` reports a long wait on stderr. Raises DistNetworkError if the connection fails,
        StoreTimeoutError if no answer came in time.
        """
        channel = self._take(wait_seconds)
        patience = answer_seconds(wait_seconds)
        try:
            answer = channel.ask(request, patience, waits)
        except BaseException as error:
            # Also after KeyboardInterrupt: an answer may still come, to nobody.
            self._drop(channel)
            if self.closed:
                raise checks.closed_error(f"the store at {self.where}") from None
            if isinstance(error, Exception):
                raise self._explain(error, patience) from error
            raise
        self._give_back(channel)
        return answer

    def hold(
        self, first: bytes, last: bytes, wait_seconds: float, on_close: bytes = b""
    ) -> Callable[[], None]:
        """Send the request ``first`` on a connection that is then kept open, and otherwise unused.

        The returned function sends ``last``, and closes the connection. If the pool is closed
        earlier, ``on_close`` is sent instead, unless it is empty. Raises DistNetworkError or
        StoreTimeoutError.
        """
        channel = self._open_more(wait_seconds)
        patience = answer_seconds(wait_seconds)
        try:
            channel.ask(first, patience)
        except (TimeoutError, GarbageError, _HungUpError) as error:
            self._drop(channel)
            raise self._explain(error, patience) from error
        with self._lock:
            self._held[channel] = on_close

        def end() -> None:
            with self._lock:
                known = self._held.pop(channel, None) is not None
            if known:
                channel.tell(last)
                self._drop(channel)

        return end

    def connect(self, wait_seconds: float) -> None:
        """Make the first connection, retrying until the server is there or the time is up."""
        deadline, notice = Deadline(wait_seconds), LateNotice(time.monotonic())
        hang_ups = Deadline(min(wait_seconds, _HANG_UP_SECONDS))
        pause, meanwhile = _FIRST_PAUSE, _while_connecting.get()
        heard: _HungUpError | None = None
        while True:
            try:
                self._give_back(self._open(deadline.left()))
                return
            except (OSError, _HungUpError) as error:
                hung_up = isinstance(error, _HungUpError)
                heard = error if isinstance(error, _HungUpError) else heard
                refused = isinstance(error, PermissionError) or _lacks_means(error)
                hopeless = refused or (hung_up and hang_ups.passed)
                if hopeless or deadline.passed:
                    # The last attempt may have had no time for an answer.
                    telling = heard if heard and isinstance(error, TimeoutError) else error
                    raise self._unreachable(telling, wait_seconds) from error
                reason = _reason(error)
            if meanwhile is not None:
                meanwhile(reason)
            elif notice.due(time.monotonic()):
                notice.tell(f"still trying to connect to the store at {self.where}: {reason}")
            time.sleep(min(pause, deadline.left()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def why_gone(self) -> str:
        """The reason if the server has ended a connection that nobody uses, else ""."""
        with self._lock:
            is_gone = any(each.has_ended() for each in (*self._held, *self._idle))
        return str(self._explain(_HungUpError(), 0.0)) if is_gone else ""

    def close(self) -> None:
        """Close every connection; threads that wait on one raise. Idempotent."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
            held, self._held = self._held, {}
            busy = self._all - set(idle) - set(held)
            self._all.clear()
        for channel, farewell in held.items():
            if farewell:
                channel.tell(farewell)
        for channel in (*idle, *held):
            channel.close()
        for channel in busy:
            channel.interrupt()  # The thread that uses it closes it.

    def after_fork_in_child(self) -> None:
        """Drop the parent's connections, without a word to the server."""
        self._lock = threading.Lock()
        for channel in self._all:
            channel.close()
        self._all, self._idle, self._held = set(), [], {}

    def _take(self, wait_seconds: float) -> Channel:
        with self._lock:
            if self.closed:
                raise checks.closed_error(f"the store at {self.where}")
            if self._idle:
                return self._idle.pop()
        return self._open_more(wait_seconds)

    def _open_more(self, wait_seconds: float) -> Channel:
        """Open one more connection to a server that has answered before; raise if it is gone."""
        patience = answer_seconds(wait_seconds)
        deadline = Deadline(min(wait_seconds, patience))
        while True:
            try:
                return self._open(patience)
            except BlockingIOError as error:
                # A Unix socket's queue is full: the server is there, but busy.
                if deadline.passed:
                    raise self._unreachable(error, wait_seconds) from error
                time.sleep(_FIRST_PAUSE)
            except (OSError, _HungUpError) as error:
                raise self._explain(error, patience) from error

    def _open(self, wait_seconds: float) -> Channel:
        wait_seconds = max(0.001, wait_seconds)
        sock = self.where.connect(wait_seconds)
        channel = Channel(sock)
        try:
            with self._lock:
                self._all.add(channel)
                if self.closed:  # it will not interrupt this channel
                    raise checks.closed_error(f"the store at {self.where}")
            why = self.where.refuses(sock)
            if why:
                raise DistNetworkError(f"cannot be trusted: {why}")
            channel.greet(self._secret, wait_seconds)
        except (DistNetworkError, GarbageError) as error:
            self._drop(channel)
            raise self._explain(error, wait_seconds) from error
        except BaseException:
            self._drop(channel)
            raise
        return channel

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            if not self.closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(channel)
                return
        self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        with self._lock:
            self._all.discard(channel)
        channel.close()

    def _explain(self, error: Exception, patience: float) -> Exception:
        """The error to raise for ``error`` on a connection that was given ``patience`` seconds."""
        server = f"the store server at {self.where}"
        if isinstance(error, TimeoutError):
            return StoreTimeoutError(
                f"Timeout: {server} did not answer within {patience:.3g} s. "
                "Check that the server's process is not stopped or overloaded."
            )
        if isinstance(error, GarbageError):
            return DistNetworkError(
                f"what answers at {self.where} does not speak tilework's store protocol ({error}). "
                "Check that the port is not another service's, such as torch's own store."
            )
        if isinstance(error, DistNetworkError):
            return DistNetworkError(f"{server} {error}")
        return DistNetworkError(
            f"{server} is gone: {_reason(error)}. Its process (`tilework store`, the launcher, or "
            "rank 0) has ended or closed the store; look at its output first."
        )

    def _unreachable(self, error: Exception, wait_seconds: float) -> DistNetworkError:
        if isinstance(error, _HungUpError):
            return DistNetworkError(
                f"what listens at {self.where} hangs up without a greeting, as another service "
                "does (torch's own store, for one). Check the port, or use another."
            )
        if _lacks_means(error):
            return DistNetworkError(
                f"cannot connect to the store at {self.where}: {_reason(error)}. Check this "
                "process's limits on memory and open files (ulimit -a)."
            )
        return DistNetworkError(
            f"Timeout: could not connect to the store at {self.where} within {wait_seconds:g} s "
            f"(last attempt: {_reason(error)}). {self.where.hint}"
        )


def _lacks_means(error: BaseException) -> bool:
    """True if ``error`` says that this process may open no more files, or has no memory left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENOMEM)


def _reason(error: BaseException) -> str:
    if isinstance(error, _HungUpError):
        return _reason(error.__cause__) if error.__cause__ else "it closed the connection"
    if isinstance(error, TimeoutError):
        return "no answer"
    return (getattr(error, "strerror", None) or str(error)).lower()
