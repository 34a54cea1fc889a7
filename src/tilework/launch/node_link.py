"""Connections between the launchers of a job on several hosts: short messages, and their end."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tilework.framed import FramedSocket, tune_tcp

#: The interval at which a launcher says that it is there. A launcher that has said so and then says
#: nothing is lost. Keep-alive is not enough: the system answers for a stopped process.
_BEAT_SECONDS: Final = 2.0
_SILENCE_SECONDS: Final = 20.0

#: Kinds of messages.
FAILED, INTERRUPTED, FINISHED, LOST = "failed", "interrupted", "finished", "lost"
#: Kinds of frames: a message as JSON, and a heartbeat.
_MESSAGE, _ALIVE = 0, 1
Message = dict[str, Any]


class NodeLink:
    """This launcher's connections: on node 0 to all other launchers, elsewhere to node 0.

    Node 0 relays messages between the others.

    Args:
        node: The number of this node.
        hosts: The name of each node's host.
        ranks: The number of ranks that each node starts.
    """

    def __init__(self, node: int, hosts: Sequence[str], ranks: Sequence[int]) -> None:
        self._node, self._hosts, self._ranks = node, list(hosts), list(ranks)
        self._peers: dict[int, FramedSocket] = {}
        self._finished: set[int] = set()
        self._news: list[Message] = []
        self._closed = False
        self._beat_at = 0.0
        #: The time of the last beat of each node that has begun to send beats.
        self._heard: dict[int, float] = {}

    @property
    def awaits_others(self) -> bool:
        """True on node 0 while another node, which needs the store of node 0, has not ended."""
        return bool(self._node == 0 and set(self._peers) - self._finished)

    @property
    def others_finished(self) -> bool:
        """True if all other nodes have ended well, as far as this node has heard."""
        return self._finished | {self._node} >= set(range(len(self._ranks)))

    def place_of(self, node: int) -> str:
        """A node in words, for messages: the number, and the name of the host."""
        return f"node {node} ({self._hosts[node]})"

    def first_rank(self, node: int) -> int:
        """The first rank that a node starts."""
        return sum(self._ranks[:node])

    def ranks_of(self, node: int) -> str:
        """The ranks that a node starts, in words, for messages."""
        first, count = self.first_rank(node), self._ranks[node]
        return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"

    def add(self, node: int, peer: socket.socket) -> None:
        """Take over ``peer``, a connection to ``node``, in place of an earlier connection."""
        tune_tcp(peer, 5, 2, 4, 13)
        before = self._peers.pop(node, None)
        if before is not None:
            before.close()
        self._peers[node] = FramedSocket(peer, (_MESSAGE, _ALIVE))

    def readers(self) -> dict[int, Callable[[], None]]:
        """Descriptors to read, with the functions to call when they are readable."""
        return {peer.fileno(): partial(self._read, node) for node, peer in self._peers.items()}

    @property
    def beat_due(self) -> float:
        """The time of the next :meth:`beat`, in ``time.monotonic()``."""
        return self._beat_at

    def beat(self) -> None:
        """Send a heartbeat if the time has come, and drop nodes whose heartbeats are missing."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        if now - self._beat_at > _SILENCE_SECONDS / 2:  # this process was stopped itself
            self._heard = dict.fromkeys(self._heard, now)
        self._beat_at = now + _BEAT_SECONDS
        for peer in self._peers.values():
            peer.send(_ALIVE)
        for node in list(self._peers):
            if now - self._heard.get(node, now) > _SILENCE_SECONDS and node not in self._finished:
                self._lose(node)

    def take(self) -> list[Message]:
        """The messages that have come since the last call."""
        news, self._news = self._news, []
        return news

    def tell(self, kind: str, **facts: Any) -> None:
        """Send a message to all other nodes."""
        self._send({"kind": kind, "node": self._node, **facts}, but=self._node)

    def close(self) -> None:
        """End the connections. Idempotent."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _send(self, message: Message, but: int) -> None:
        data = json.dumps(message).encode()
        for node, peer in self._peers.items():
            if node != but:
                peer.send(_MESSAGE, data)

    def _read(self, node: int) -> None:
        frames = self._peers[node].receive()
        for kind, payload in frames or ():
            if kind == _ALIVE:
                self._heard[node] = time.monotonic()
            else:
                self._hear(node, json.loads(payload))
        if frames is None:
            self._lose(node)

    def _hear(self, node: int, message: Message) -> None:
        if message["kind"] == FINISHED:
            self._finished.add(message["node"])
        self._news.append(message)
        if self._node == 0:
            self._send(message, but=node)

    def _lose(self, node: int) -> None:
        self._peers.pop(node).close()
        if node not in self._finished:
            self._hear(node, {"kind": LOST, "node": node})
