"""Control frames between every two ranks of a group, and notice of ranks that are gone.

A control channel has a TCP connection to every other rank. The connections carry no tensors, only
the facts that ranks need before they move tensors. One thread reads all connections of a rank. The
kernel closes the connections of a process that ends, on any host, so the thread notices at once.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from typing import Protocol

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.elastic.watched_store import look
from tilework.errors import DistBackendError, DistError
from tilework.store import Store
from tilework.store.internal import watch_closely, watch_forks

_FRAME = struct.Struct("=IB")
_HELLO = struct.Struct("=32sI")
#: The limit of a write, which only waits if the reader is stopped and the kernel's buffers are
#: full.
SEND_SECONDS = 5.0
_CHUNK = 1 << 16
#: Seconds between looks whether an awaited rank has ended, while this rank listens for calls;
#: and seconds of one attempt to call another rank.
_LOOK_SECONDS, _CALL_SECONDS = 0.2, 2.0


class FrameKind(enum.IntEnum):
    """The kinds of frames, the short messages that ranks send each other about operations."""

    ANNOUNCEMENT = 1
    ABORT = 2
    FAILURE_REPORT = 3
    MISSING = 4
    GOODBYE = 5
    #: "Which operation do you wait in?", and the answer.
    QUESTION = 6
    ANSWER = 7


class Listener(Protocol):
    """An object that handles what a control channel reads. Called on the channel's thread."""

    def on_frame(self, source: int, kind: FrameKind, payload: bytes) -> None: ...
    def on_disconnect(self, source: int) -> None: ...
    def on_tick(self) -> bool:
        """Check operations that wait. Called after every frame and :meth:`ControlChannel.wake`, and
        every 0.05 s while the result is True.
        """
        ...


class ControlChannel:
    """A rank's TCP connections to all other ranks of the group, which carry frames."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        self._locks = {rank: threading.Lock() for rank in sockets}
        self._wake_reader, self._waker = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._ended = False
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Close the connections: while a child had them open, the other ranks would not notice the
        end of this rank.
        """
        for sock in self._sockets.values():
            sock.close()

    def start(self, listener: Listener, name: str) -> None:
        """Start the thread that reads all connections and calls ``listener``; ``name`` is the
        thread's name.
        """
        self._thread = threading.Thread(target=self._read, args=(listener,), name=name, daemon=True)
        self._thread.start()

    def send(self, rank: int, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame to ``rank``; do nothing if that rank is gone."""
        sock = self._sockets.get(rank)
        if sock is None:
            return
        with self._locks[rank], contextlib.suppress(OSError):
            sock.sendall(_FRAME.pack(len(payload), kind) + payload)

    def send_all(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame to every other rank."""
        for rank in self._sockets:
            self.send(rank, kind, payload)

    def wake(self) -> None:
        """Have the listener's ``on_tick`` called soon."""
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    def close(self) -> None:
        """Close the connections, and end the reading thread."""
        self._ended = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for sock in (*self._sockets.values(), self._wake_reader, self._waker):
            sock.close()

    def _read(self, listener: Listener) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ, None)
            for rank, sock in self._sockets.items():
                selector.register(sock, selectors.EVENT_READ, (rank, bytearray()))
            busy = False
            while not self._ended:
                for key, _ in selector.select(0.05 if busy else None):
                    if key.data is None:
                        self._wake_reader.recv(_CHUNK)
                    elif not self._serve(key.fileobj, key.data[0], key.data[1], listener):
                        selector.unregister(key.fileobj)
                        listener.on_disconnect(key.data[0])
                busy = listener.on_tick()

    def _serve(self, sock: object, rank: int, pending: bytearray, listener: Listener) -> bool:
        """Read data that ``rank`` has sent, and hand complete frames to ``listener``. False if the
        connection has ended.
        """
        assert isinstance(sock, socket.socket)
        try:
            data = sock.recv(_CHUNK)
        except OSError:
            data = b""
        pending += data
        while len(pending) >= _FRAME.size:
            length, kind = _FRAME.unpack_from(pending)
            if len(pending) < _FRAME.size + length:
                break
            payload = bytes(pending[_FRAME.size : _FRAME.size + length])
            del pending[: _FRAME.size + length]
            listener.on_frame(rank, FrameKind(kind), payload)
        return bool(data)


def connect_all(request: DistributedBackendOptions, address: str) -> dict[int, socket.socket]:
    """Connect this rank to all other ranks; return the connections by group rank.

    Collective; blocks until all ranks came. Only a process that read the group's token in the store
    is let in.

    Raises:
        DistBackendError: Some ranks did not come in time, or cannot be reached.
    """
    rank, size, store = request.group_rank, request.group_size, request.store
    deadline = time.monotonic() + request.timeout.total_seconds()
    if rank == 0:
        store.set("control/token", secrets.token_bytes(32).hex())
    sockets: dict[int, socket.socket] = {}
    with _listen(address, size) as listener:
        host, port = listener.getsockname()[:2]
        store.set(f"control/{rank}", f"{port} {host}")
        token = bytes.fromhex(store.get("control/token").decode())
        try:
            for peer in range(rank):
                sockets[peer] = _call(store, rank, peer, token, deadline)
            _accept(listener, sockets, size - rank - 1, token, deadline, store)
        except DistError:
            _close(sockets)
            raise
        except OSError as error:
            _close(sockets)
            ranks = request.global_ranks_in_group
            missing = [ranks[r] for r in range(size) if r != rank and r not in sockets]
            raise DistBackendError(
                f"rank {ranks[rank]} at {host} is not connected with ranks {missing} of group "
                f"{request.group_id!r}: {error}. Check that they were started, and that no "
                f"firewall is between the hosts",
                ranks=missing,
            ) from error
    for sock in sockets.values():
        sock.settimeout(SEND_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_closely(sock)
    return sockets


def _close(sockets: dict[int, socket.socket]) -> None:
    for sock in sockets.values():
        sock.close()


def _listen(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def _call(store: Store, rank: int, peer: int, token: bytes, deadline: float) -> socket.socket:
    port, host = store.get(f"control/{peer}").decode().split(" ", 1)
    while True:
        try:
            sock = socket.create_connection((host, int(port)), min(_CALL_SECONDS, _left(deadline)))
            break
        except TimeoutError:
            look(store)
    sock.sendall(_HELLO.pack(token, rank))
    return sock


def _accept(
    listener: socket.socket,
    sockets: dict[int, socket.socket],
    count: int,
    token: bytes,
    deadline: float,
    store: Store,
) -> None:
    """Accept connections until ``count`` more ranks are in ``sockets``; close connections that do
    not begin with ``token``.
    """
    expected = len(sockets) + count
    while len(sockets) < expected:
        listener.settimeout(min(_LOOK_SECONDS, _left(deadline)))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            look(store)
            continue
        sock.settimeout(min(SEND_SECONDS, _left(deadline)))
        try:
            hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            hello = b""
        presented, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
        if hmac.compare_digest(presented, token) and rank not in sockets:
            sockets[rank] = sock
        else:
            sock.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no connection came about in time")
    return left
