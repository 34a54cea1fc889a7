"""Control frames between every two ranks of a group, and notice of ranks that are gone.

A control channel has a TCP connection to every other rank. The connections carry no tensors, only
the facts that ranks need before they move tensors. One thread reads all connections of a rank. The
kernel closes the connections of a process that ends, on any host, so the thread notices at once.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import selectors
import socket
import threading
import time
from typing import Protocol

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.elastic.watched_store import look
from tilework.errors import DistBackendError, DistError
from tilework.framed import Door, FramedSocket, knock, token_for, watch_closely
from tilework.store import Store

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
        """Check operations that wait: after every frame and wake, each 0.05 s while it is True."""
        ...


class ControlChannel:
    """A rank's TCP connections to all other ranks of the group, which carry frames."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._links = {rank: FramedSocket(sock, FrameKind) for rank, sock in sockets.items()}
        self._wake_reader, self._waker = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._ended = False

    def start(self, listener: Listener, name: str) -> None:
        """Start the thread, of this name, that reads all connections and calls ``listener``."""
        self._thread = threading.Thread(target=self._read, args=(listener,), name=name, daemon=True)
        self._thread.start()

    def send(self, rank: int, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame to ``rank``; do nothing if that rank is gone."""
        link = self._links.get(rank)
        if link is not None:
            link.send(kind, payload)

    def send_all(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame to every other rank."""
        for link in self._links.values():
            link.send(kind, payload)

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
        for link in self._links.values():
            link.close()
        self._wake_reader.close()
        self._waker.close()

    def _read(self, listener: Listener) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ, None)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            busy = False
            while not self._ended:
                for key, _ in selector.select(0.05 if busy else None):
                    if key.data is None:
                        self._wake_reader.recv(_CHUNK)
                    elif not self._serve(key.data, listener):
                        selector.unregister(key.fileobj)
                        listener.on_disconnect(key.data)
                busy = listener.on_tick()

    def _serve(self, rank: int, listener: Listener) -> bool:
        """Hand the frames of ``rank`` to ``listener``; False if the connection has ended."""
        frames = self._links[rank].receive()
        for kind, payload in frames or ():
            listener.on_frame(rank, FrameKind(kind), payload)
        return frames is not None


def connect_all(request: DistributedBackendOptions, address: str) -> dict[int, socket.socket]:
    """The connections to all other ranks by group rank, without timeouts. Collective; blocks.

    Only a process that knows the job's secret, and has read the group's nonce in the store, is let
    in. A DistBackendError names ranks that did not come in time, or cannot be reached.
    """
    rank, size, store = request.group_rank, request.group_size, request.store
    deadline = time.monotonic() + request.timeout.total_seconds()
    if rank == 0:
        store.set("control/token", secrets.token_bytes(32).hex())
    sockets: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=size) as listener:
        host, port = listener.getsockname()[:2]
        store.set(f"control/{rank}", f"{port} {host}")
        nonce = bytes.fromhex(store.get("control/token").decode())
        token = token_for(nonce, store.secret)
        try:
            listed = store.multi_get([f"control/{peer}" for peer in range(rank)])
            for peer, where in enumerate(listed):
                sockets[peer] = _call(store, rank, where.decode(), token, deadline)
            with contextlib.closing(Door(listener, token, range(rank + 1, size))) as door:
                while door.awaited:
                    came = door.admit(min(_LOOK_SECONDS, _left(deadline)))
                    sockets.update(came)
                    if not came:
                        look(store)
        except (DistError, OSError) as error:
            for sock in sockets.values():
                sock.close()
            if isinstance(error, DistError):
                raise
            ranks = request.global_ranks_in_group
            missing = [ranks[r] for r in range(size) if r != rank and r not in sockets]
            raise DistBackendError(
                f"rank {ranks[rank]} at {host} is not connected with ranks {missing} of group "
                f"{request.group_id!r}: {error}. Check that they were started, and that no "
                f"firewall is between the hosts",
                ranks=missing,
            ) from error
    for sock in sockets.values():
        watch_closely(sock)
    return sockets


def _call(store: Store, rank: int, where: str, token: bytes, deadline: float) -> socket.socket:
    port, host = where.split(" ", 1)
    while True:
        try:
            sock = socket.create_connection((host, int(port)), min(_CALL_SECONDS, _left(deadline)))
            break
        except TimeoutError:
            look(store)
    knock(sock, token, rank)
    return sock


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no connection came about in time")
    return left
