"""Messages between ranks over ZeroMQ, and notice of ranks that are gone.

Each rank has one socket that it receives on, and one per other rank that it sends on, connected
when first used. All are CURVE sockets: the receiving one asks for each connection whether the key
is of the job (ZAP), before it reads anything from the connection. An answer is sent as a call is:
the rank that answers uses the socket on which it sends.

A kernel closes the connections of a process that ends, however it ends. So the sending sockets
are watched, and nobody reconnects.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tilework.errors import DistBackendError
from tilework.store import Store


class Keys:
    """The key pairs of ``size`` ranks that share ``secret``.

    All are derived from the secret: ranks exchange nothing but a random number, and a stranger in
    the middle cannot put in another key.
    """

    def __init__(self, secret: bytes, size: int) -> None:
        self._secret = secret
        self._size = size

    def public(self, rank: int) -> bytes:
        return bytes(zmq.curve_public(self.private(rank)))

    def private(self, rank: int) -> bytes:
        return bytes(z85.encode(self._derived(f"rank {rank}")))

    @cached_property
    def allowed(self) -> dict[bytes, int]:
        return {z85.decode(self.public(rank)): rank for rank in range(self._size)}

    @property
    def proof(self) -> str:
        """A text that is equal on ranks with the same secret, but does not reveal the secret."""
        return self._derived("proof").hex()

    def _derived(self, purpose: str) -> bytes:
        return hmac.new(self._secret, f"tilework rpc {purpose}".encode(), hashlib.sha256).digest()


def agree_on_keys(store: Store, size: int) -> Keys:
    """The keys of all ranks that meet at ``store``. Does not wait for other ranks.

    The keys are derived from a random number in the store, which only the job's ranks can read, and
    from secrets that never travel: the store's own, and TILEWORK_SECRET where it is set.
    """
    if not store.authenticated:
        raise DistBackendError(
            f"RPC runs functions for callers, but {store!r} does not check who connects. Start "
            f"the program with `tilework run`, or set TILEWORK_SECRET to the same random hex "
            f"string on every rank"
        )
    number = store.compare_set("number", "", secrets.token_hex(32))
    settings = os.environ.get("TILEWORK_SECRET", "").encode()
    secret = hmac.new(settings, store.secret or b"", hashlib.sha256).digest()
    return Keys(hmac.new(secret, number, hashlib.sha256).digest(), size)


#: Longer parts of messages are cut. This bounds the memory that a stranger can take from a rank.
MAX_FRAME_BYTES: Final = 16 << 20
_CURVE_EXTRA_BYTES: Final = 1 << 10
_HANDSHAKE_MILLISECONDS: Final = 10_000
#: A host that vanished silently is noticed within half a minute.
_KEEPALIVE: Final = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10}
_KEEPALIVE_RETRIES: Final = {zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 3}
_SELF: Final = "inproc://self"
_LOSSES: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(eq=False)
class _Peer:
    """The connection to another rank: ``socket`` is None before the first message."""

    address: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    socket: zmq.Socket[bytes] | None = None
    gone: bool = False


class Transport:
    """The sockets of a rank: one to receive on, and one for each rank that it sends to."""

    def __init__(self, rank: int, size: int, keys: Keys) -> None:
        self._rank, self._keys = rank, keys
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1024 + 4 * size)
        self._folder: str | None = None
        self._peers: dict[int, _Peer] = {}
        # Before the inbox: with nobody to ask, every key would be let in.
        self._door: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._door.bind("inproc://zeromq.zap.01")
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._set_up_inbox()
        self._poller = zmq.Poller()
        self._monitors: dict[Any, int] = {}
        self._new_monitors: deque[tuple[Any, int]] = deque()
        self._wake_reader, self._waker = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._waker.setblocking(False)
        self._poller.register(self._door, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)

    def _set_up_inbox(self) -> None:
        inbox = self._inbox
        inbox.set(zmq.RCVHWM, 0)
        inbox.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _CURVE_EXTRA_BYTES)
        inbox.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
        inbox.set(zmq.CURVE_SERVER, 1)
        inbox.set(zmq.CURVE_PUBLICKEY, self._keys.public(self._rank))
        inbox.set(zmq.CURVE_SECRETKEY, self._keys.private(self._rank))
        inbox.set(zmq.ZAP_DOMAIN, b"tilework")
        inbox.set(zmq.IPV6, 1)
        for option, value in (_KEEPALIVE | _KEEPALIVE_RETRIES).items():
            inbox.set(option, value)
        inbox.bind(_SELF)

    def listen_here(self) -> str:
        """Listen for ranks of this host; return the address. On Linux a crash leaves no file."""
        name = f"tilework-rpc-{secrets.token_hex(16)}"
        if sys.platform == "linux":
            address = f"ipc://@{name}"
        else:
            self._folder = tempfile.mkdtemp(prefix="tilework-")
            address = f"ipc://{self._folder}/{name[:24]}"
        self._inbox.bind(address)
        return address

    def listen_on(self, host: str) -> str:
        self._inbox.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        bound = self._inbox.get(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0")

    def know(self, addresses: Sequence[str], hello: Callable[[int], bytes]) -> None:
        self._hello = hello
        self._peers = {rank: _Peer(address) for rank, address in enumerate(addresses)}
        self._peers[self._rank].address = _SELF

    # -- sending ---------------------------------------------------------------------------

    def contact(self, rank: int) -> None:
        """Connect to ``rank`` if not connected, so that this rank notices when ``rank`` ends."""
        peer = self._peers[rank]
        if peer.socket is None:
            with peer.lock:
                self._connect(rank, peer)

    def send(self, rank: int, frames: Sequence[bytes | memoryview]) -> bool:
        """Send copies of ``frames`` to ``rank`` as a message; True if ``rank`` may still get it."""
        peer = self._peers[rank]
        with peer.lock:
            self._connect(rank, peer)
            if peer.socket is None:
                return False
            try:
                peer.socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError:  # it has gone
                return False
            return True

    def _connect(self, rank: int, peer: _Peer) -> None:
        if peer.socket is not None or peer.gone:
            return
        sender: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        sender.set(zmq.SNDHWM, 0)
        sender.set(zmq.RECONNECT_IVL, -1)
        if rank != self._rank:
            sender.set(zmq.CURVE_SERVERKEY, self._keys.public(rank))
            sender.set(zmq.CURVE_PUBLICKEY, self._keys.public(self._rank))
            sender.set(zmq.CURVE_SECRETKEY, self._keys.private(self._rank))
            sender.set(zmq.IPV6, 1)
            for option, value in (_KEEPALIVE | _KEEPALIVE_RETRIES).items():
                sender.set(option, value)
            self._new_monitors.append((sender.get_monitor_socket(_LOSSES), rank))
            self.wake()
        sender.connect(peer.address)
        sender.send(self._hello(rank), zmq.NOBLOCK)
        peer.socket = sender

    def give_up(self, rank: int) -> None:
        peer = self._peers[rank]
        with peer.lock:
            peer.gone = True
            sender, peer.socket = peer.socket, None
            if sender is not None:
                sender.close(0)

    # -- receiving -------------------------------------------------------------------------

    def receive(self) -> list[zmq.Frame]:
        return self._inbox.recv_multipart(copy=False)

    def watch(self, seconds: float) -> list[int]:
        """Admit ranks that connect, for ``seconds`` or until woken; return ranks that are gone."""
        limit = None if seconds == math.inf else max(0, math.ceil(seconds * 1000))
        events = dict(self._poller.poll(limit))
        if self._wake_reader.fileno() in events:
            self._wake_reader.recv(4096)
        if self._door in events:
            self._answer_door()
        while self._new_monitors:
            monitor, rank = self._new_monitors.popleft()
            self._monitors[monitor] = rank
            self._poller.register(monitor, zmq.POLLIN)
        lost = [rank for monitor, rank in self._monitors.items() if monitor in events]
        for monitor in [monitor for monitor in self._monitors if monitor in events]:
            recv_monitor_message(monitor)
            self._poller.unregister(monitor)
            del self._monitors[monitor]
            monitor.close(0)
        return lost

    def wake(self) -> None:
        """Make :meth:`watch` return soon. May be called from any thread."""
        with contextlib.suppress(OSError):  # full, so it wakes anyway; or closed
            self._waker.send(b"w")

    def _answer_door(self) -> None:
        """Tell ZeroMQ whether to let a connection in (RFC 27): only if a rank of this job asks."""
        version, request, _domain, _address, _identity, mechanism, *key = (
            self._door.recv_multipart()
        )
        rank = self._keys.allowed.get(key[0]) if mechanism == b"CURVE" and key else None
        status, text = (b"200", b"") if rank is not None else (b"400", b"not of this job")
        user = b"" if rank is None else str(rank).encode()
        self._door.send_multipart([version, request, status, text, user, b""])

    def close(self, linger_seconds: float) -> None:
        """Close all sockets; sent messages have ``linger_seconds`` to leave. Idempotent."""
        for peer in self._peers.values():
            with peer.lock:
                peer.gone = True
                sender, peer.socket = peer.socket, None
                if sender is not None:
                    sender.disable_monitor()
                    sender.close(int(linger_seconds * 1000))
        for monitor in (*self._monitors, *(monitor for monitor, _ in self._new_monitors)):
            monitor.close(0)
        if not self._context.closed:
            self._wake_reader.close()
            self._waker.close()
            self._inbox.close(0)
            self._door.close(0)
            self._context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
