"""The server behind :class:`TCPStore` and :class:`UnixStore`: one thread, any number of clients."""

from __future__ import annotations

# Costs nothing extra beside torch, which imports it too.
import asyncio
import contextlib
import socket
import sys
import threading
import weakref

from tilework.errors import DistStoreError, text_of
from tilework.forks import watch_forks
from tilework.store.address import Address, TcpAddress, UnixAddress
from tilework.store.service import Service

# Windows has no limits of this kind.
if sys.platform != "win32":
    import resource

#: Seconds that closing waits for the server's thread.
_JOIN_SECONDS = 5.0


class StoreServer:
    """Serves one store to clients of :class:`TCPStore` or :class:`UnixStore`.

    Listening and serving are two steps, so that a launcher can bind, fork ranks, and only then
    start the thread; clients that connect in between wait. A forked child drops the inherited
    sockets: it neither serves nor keeps the address alive. ``close`` is idempotent, and also runs
    when the object is dropped and at exit.

    Example:
        >>> from tilework.store import TCPStore
        >>> with StoreServer.listen_tcp("127.0.0.1", 0) as server:
        ...     server.start()
        ...     with TCPStore("127.0.0.1", server.port) as store:
        ...         store.add("counter", 2)
        2
    """

    def __init__(self, where: Address, secret: bytes | None = None) -> None:
        """Listen at ``where``; see :meth:`listen_tcp` and :meth:`listen_unix`."""
        check_secret(secret)
        self._listener = where.listen()
        self._where = where.bound(self._listener)
        self._running = _Running(self._listener, self._where, secret)
        self._finalizer = weakref.finalize(self, self._running.close)

    @classmethod
    def listen_tcp(cls, host: str, port: int, secret: bytes | None = None) -> StoreServer:
        """Listen on exactly the address ``host``; a ``port`` of 0 picks a free port.

        Raises DistNetworkError if the address is in use or not this machine's.
        """
        return cls(TcpAddress(host, port), secret)

    @classmethod
    def listen_unix(cls, address: str, secret: bytes | None = None) -> StoreServer:
        """Listen on a Unix socket for this user's processes: ``@name`` (abstract) or a path.

        Raises DistNetworkError if the address is in use.
        """
        return cls(UnixAddress(address), secret)

    @property
    def address(self) -> str:
        """``host:port``, ``@name`` or the path, as clients need it."""
        return str(self._where)

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        return self._where.port if isinstance(self._where, TcpAddress) else 0

    def start(self) -> None:
        """Start serving, in a daemon thread. Does nothing if it serves already."""
        self._running.start()

    def close(self) -> None:
        """Stop serving, close every connection and release the address. Idempotent."""
        self._finalizer()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StoreServer({self.address!r})"


def check_secret(secret: bytes | None) -> None:
    """Raise TypeError or ValueError unless ``secret`` is None or bytes that are not empty."""
    if secret is not None and not isinstance(secret, bytes):
        raise TypeError(f"a store's secret must be bytes or None, got {type(secret).__name__}")
    if secret == b"":
        raise ValueError("a store's secret cannot be empty: use None for no secret")


class _Running:
    """The socket, thread and loop of a StoreServer, which a finalizer can close without it."""

    def __init__(self, listener: socket.socket, where: Address, secret: bytes | None) -> None:
        self._listener = listener
        self._where = where
        self._secret = secret
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: Service | None = None
        self._inherited = False
        watch_forks(self)

    def start(self) -> None:
        with self._lock:
            if self._listener.fileno() < 0:
                raise DistStoreError(f"the store server at {self._where} is closed")
            if self._thread is not None:
                return
            _raise_descriptor_limit()
            try:
                self._start()
            except (OSError, MemoryError, RuntimeError) as error:
                if self._loop is not None:
                    self._loop.close()
                    self._loop = None
                raise DistStoreError(
                    f"the store server at {self._where} cannot serve: {text_of(error)}. Check this "
                    "process's limits on memory, threads and open files (ulimit -a)."
                ) from error

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._service = Service(self._loop, self._listener, self._where, self._secret)
        thread = threading.Thread(
            target=_serve, args=(self._loop, self._service), name="tilework-store", daemon=True
        )
        thread.start()
        self._thread = thread

    def close(self) -> None:
        with self._lock:
            if self._inherited:
                return
            if self._loop is not None and self._thread is not None:
                # It is closed already if the thread ended, which only an error there can do.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._loop.stop)
                if self._thread is not threading.current_thread():
                    self._thread.join(_JOIN_SECONDS)
            self._listener.close()
            self._where.released()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._inherited = True
        self._listener.close()
        if self._service is not None:
            self._service.drop_sockets()


def _serve(loop: asyncio.AbstractEventLoop, service: Service) -> None:
    service.open()
    try:
        loop.run_forever()
    finally:
        service.close()
        loop.close()


def _raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to the most that the system allows."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
