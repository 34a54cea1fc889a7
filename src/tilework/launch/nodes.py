"""Several hosts: the launchers of one job meet, number their ranks, and hear of each other's ends.

The launcher of node 0 serves the job's store at the address that all launchers are given. Each
launcher writes there how many ranks it starts, and reads the numbers of the others. Then each keeps
a connection to node 0, whose launcher passes on all messages: which rank has failed, that the user
ended the job, and, when a connection ends, that a launcher is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from importlib import metadata
from typing import Any, Final, NamedTuple

from tilework.errors import DistNetworkError, DistStoreError
from tilework.framed import Door, FramedSocket, knock, token_for, tune_tcp
from tilework.launch.settings import LaunchSettings
from tilework.store import PrefixStore, Store, StoreServer, TCPStore
from tilework.store.internal import TcpAddress

#: The interval at which a launcher says that it is there. A launcher that has said so and then says
#: nothing is lost. Keep-alive is not enough: the system answers for a stopped process.
_BEAT_SECONDS: Final = 2.0
_SILENCE_SECONDS: Final = 20.0


class Kind(str, Enum):
    """Kinds of messages."""

    FAILED = "failed"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    LOST = "lost"
    JOINED = "joined"
    AGAIN = "again"
    #: A launcher's introduction to a ``tilework store``, and the answers to it.
    JOIN = "join"
    PLACED = "placed"
    REFUSED = "refused"


#: Kinds of frames: a message as JSON, and a heartbeat.
_MESSAGE, _ALIVE = 0, 1
Message = dict[str, Any]


class _NodeFacts(NamedTuple):
    """The host of a node, the first rank that it starts, and the number of ranks."""

    host: str
    first: int
    ranks: int


class NodeLink:
    """This launcher's connections: on node 0 to all other launchers, elsewhere to node 0.

    Node 0 relays messages between the others. ``hosts`` are the names of the nodes' hosts,
    ``ranks`` the numbers of ranks that nodes start. ``is_elastic`` says whether the job goes on
    when nodes are lost, ``ranks_elsewhere`` how many ranks of other nodes may then train on.
    """

    def __init__(self, node: int, hosts: Sequence[str], ranks: Sequence[int]) -> None:
        self._node = node
        self._nodes: dict[int, _NodeFacts] = {}
        for number, (host, count) in enumerate(zip(hosts, ranks, strict=True)):
            self.note_node(number, host, sum(ranks[:number]), count)
        self.is_elastic = False
        self._peers: dict[int, FramedSocket] = {}
        self._finished: set[int] = set()
        self._news: list[Message] = []
        self._closed = False
        self._beat_at = 0.0
        #: The time of the last beat of each node that has begun to send beats.
        self._heard: dict[int, float] = {}

    def note_node(self, node: int, host: str, first: int, ranks: int) -> None:
        """Note which ranks a node starts, and where."""
        self._nodes[node] = _NodeFacts(host, first, ranks)

    @property
    def ranks_elsewhere(self) -> int:
        return 0

    @property
    def may_begin_again(self) -> bool:
        """True if hosts were lost, so that ranks that have not met may never meet."""
        return False

    @property
    def awaits_others(self) -> bool:
        """True on node 0 while another node, which needs the store of node 0, has not ended."""
        return bool(self._node == 0 and set(self._peers) - self._finished)

    @property
    def any_finished(self) -> bool:
        """True if another node has ended well."""
        return bool(self._finished)

    @property
    def others_finished(self) -> bool:
        """True if all other nodes have ended well, as far as this node has heard."""
        return self._finished | {self._node} >= set(self._nodes)

    def place_of(self, node: int) -> str:
        """A node in words, for messages: the number, and the name of the host."""
        return f"node {node} ({self._nodes[node].host})"

    def first_rank(self, node: int) -> int:
        """The first rank that a node starts."""
        return self._nodes[node].first

    def ranks_of(self, node: int) -> str:
        """The ranks that a node starts, in words, for messages."""
        _, first, count = self._nodes[node]
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

    def tell(self, kind: Kind, **facts: Any) -> None:
        """Send a message to all other nodes."""
        self._send({"kind": kind, "node": self._node, **facts}, but=self._node)

    def close(self) -> None:
        """End the connections. Idempotent."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _send(self, message: Message, but: int) -> None:
        for node in self._peers:
            if node != but:
                self._send_to(node, message)

    def _send_to(self, node: int, message: Message) -> None:
        self._peers[node].send(_MESSAGE, json.dumps(message).encode())

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
        if message["kind"] == Kind.FINISHED:
            self._finished.add(message["node"])
        self._news.append(message)
        if self._node == 0:
            self._send(message, but=node)

    def _lose(self, node: int) -> None:
        self._peers.pop(node).close()
        if node not in self._finished:
            self._hear(node, {"kind": Kind.LOST, "node": node})


#: The time that launchers wait for each other, unless ``--timeout`` says otherwise.
PATIENCE: Final = timedelta(minutes=10)
#: Seconds until the first line about missing nodes; the interval then doubles.
_FIRST_WORD_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.05
_ANSWER_SECONDS: Final = 30.0
#: The time for other launchers to read why the job does not begin.
_HEARD: Final = timedelta(seconds=2)


class NodesError(Exception):
    """The launchers did not find each other, or do not fit together."""

    #: The exit status of the launcher that raises it.
    status = 1


@dataclass(frozen=True)
class NodePlace:
    """The part of a job's ranks that one launcher starts.

    ``begun``: the ranks that the job has begun with, if it has begun without these.
    """

    node: int
    nodes: int
    first_rank: int
    world_size: int
    begun: int = 0

    @classmethod
    def alone(cls, ranks: int) -> NodePlace:
        """The place of the only node, which starts all ``ranks`` ranks."""
        return cls(0, 1, 0, ranks)


@dataclass(frozen=True)
class Nodes:
    """This launcher's place among the others, and the connections, which it owns."""

    #: The part of the job that this launcher starts.
    place: NodePlace
    #: The address of the job's store, as ``TILEWORK_STORE`` has it.
    store_url: str
    #: The secret in hexadecimal; empty if the user has set none.
    secret: str
    #: Host and port for programs that read MASTER_ADDR; None if not requested.
    master: tuple[str, int] | None
    #: The connections to the other launchers.
    link: NodeLink
    _server: StoreServer | None = None

    def close(self) -> None:
        """Close the connections, and on node 0 the store. Idempotent."""
        self.link.close()
        if self._server is not None:
            self._server.close()


def join_nodes(settings: LaunchSettings) -> Nodes:
    """Meet the other launchers; blocks until all are there. Ctrl-C works as the caller has set it.

    Raises NodesError if launchers did not come in time, or differ in settings that must be equal;
    DistNetworkError if this host cannot listen on the address, or nobody serves there.
    """
    return _Meeting(settings).join()


class _Meeting:
    def __init__(self, settings: LaunchSettings) -> None:
        assert settings.rdzv is not None
        self._settings = settings
        self._host, self._port = settings.rdzv
        self._me = settings.node_rank
        self._secret = os.environ.get("TILEWORK_SECRET", "")
        self._patience = settings.timeout or PATIENCE
        self._deadline = time.monotonic() + self._patience.total_seconds()
        self._stack = contextlib.ExitStack()

    def join(self) -> Nodes:
        secret = secret_bytes(self._secret)
        with self._stack:
            server = None
            if self._me == 0:
                server = StoreServer.listen_tcp(self._host, self._port, secret)
                self._stack.callback(server.close)
                server.start()
            else:
                self._say("waits for node 0 (tilework run --node-rank 0) there", after=0.0)
            client = TCPStore(self._host, self._port, timeout=self._patience, secret=secret)
            with contextlib.closing(client):
                nodes = self._meet(PrefixStore("tilework/nodes", client), server)
            self._stack.pop_all()
            return nodes

    def _meet(self, store: Store, server: StoreServer | None) -> Nodes:
        self._introduce(store)
        table = self._gather(store) if self._me == 0 else self._table(store)
        counts: list[int] = table["ranks"]
        place = NodePlace(self._me, len(counts), sum(counts[: self._me]), sum(counts))
        link = NodeLink(place.node, table["hosts"], counts)
        self._stack.callback(link.close)
        if self._me == 0:
            self._listen(store, link, table)
        else:
            link.add(0, call(store, self._host, self._me, "node 0"))
        master = (self._host, table["master"]) if table["master"] else None
        url = TcpAddress(self._host, self._port).url
        return Nodes(place, url, self._secret, master, link, server)

    def _introduce(self, store: Store) -> None:
        """Register this node in the store; raise NodesError if another node has the same number."""
        settings = self._settings
        token = secrets.token_hex(8)
        mine = {
            "token": token,
            "nodes": settings.nnodes,
            "ranks": settings.nprocs,
            "host": socket.gethostname(),
            "version": version(),
        }
        text = store.compare_set(f"node/{self._me}", "", json.dumps(mine))
        first = json.loads(text)
        if first["token"] != token:
            raise NodesError(
                f"two launchers say that they are node {self._me}: this one, and one on "
                f"{first['host']}; give each its own --node-rank, from 0 to "
                f"{settings.nnodes - 1}, and each job its own port"
            )

    def _gather(self, store: Store) -> dict[str, Any]:
        """On node 0: wait for all nodes, and return the data on all of them."""
        keys = [f"node/{node}" for node in range(self._settings.nnodes)]

        def missing() -> list[int]:
            return [node for node, key in enumerate(keys) if not store.check([key])]

        self._wait_until(lambda: not missing(), lambda: f"waits for {_named(missing())}")
        words = [json.loads(store.get(key)) for key in keys]
        # A launcher of an older version sends no version.
        for what, name in (("nodes", "--nnodes"), ("version", "their version of tilework")):
            said = [str(word.get(what, "unknown")) for word in words]
            if len({*said, str(self._settings.nnodes)} if what == "nodes" else {*said}) > 1:
                text = ", ".join(f"node {n} {each}" for n, each in enumerate(said))
                self._refuse(store, f"the launchers differ in {name}: {text}", len(words))
        wants_master = self._settings.master_port is not None
        return {
            "ranks": [word["ranks"] for word in words],
            "hosts": [word["host"] for word in words],
            "master": (self._settings.master_port or free_port(self._host)) if wants_master else 0,
        }

    def _refuse(self, store: Store, error: str, nodes: int) -> None:
        """On node 0: send ``error``, why the job does not begin, to all nodes; then raise it."""
        store.set("table", json.dumps({"error": error}))
        with contextlib.suppress(DistStoreError):  # this node's store goes with this process
            store.wait([f"heard/{node}" for node in range(1, nodes)], _HEARD)
        raise NodesError(error)

    def _table(self, store: Store) -> dict[str, Any]:
        """On other nodes: wait for the data that node 0 has gathered, and return it."""
        waits = "waits for node 0, which waits for other nodes"
        self._wait_until(lambda: store.check(["table"]), lambda: waits)
        table: dict[str, Any] = json.loads(store.get("table"))
        if "error" in table:
            store.set(f"heard/{self._me}", "")
            raise NodesError(table["error"])
        if self._me >= len(table["ranks"]):
            raise NodesError(
                f"node 0 expects only {len(table['ranks'])} nodes, but this is node {self._me}"
            )
        return table

    def _listen(self, store: Store, link: NodeLink, table: dict[str, Any]) -> None:
        """On node 0: publish ``table``, and accept the connections of all other launchers."""
        with open_door(store, "link", self._host, range(1, len(table["ranks"]))) as (door, port):
            store.set("table", json.dumps(table))
            deadline = time.monotonic() + _ANSWER_SECONDS
            while door.awaited and time.monotonic() < deadline:
                for node, peer in door.admit(1.0).items():
                    link.add(node, peer)
        if door.awaited:
            raise NodesError(
                f"{_named(sorted(door.awaited))} came to the store of node 0, but did not connect "
                f"to its port {port} within {_ANSWER_SECONDS:g} s. The ports between the hosts "
                f"must be open, and the launchers there must still run"
            )

    def _wait_until(self, condition: Any, waits: Any) -> None:
        word_at, gap = time.monotonic() + _FIRST_WORD_SECONDS, _FIRST_WORD_SECONDS
        while not condition():
            now = time.monotonic()
            if now >= self._deadline:
                raise NodesError(
                    f"node {self._me} {waits()}, and gives up after "
                    f"{self._patience.total_seconds():g} s (--timeout)"
                )
            if now >= word_at:
                self._say(waits(), after=self._patience.total_seconds())
                word_at, gap = now + 2 * gap, 2 * gap
            time.sleep(_POLL_SECONDS)

    def _say(self, what: str, after: float) -> None:
        if after or not answers(self._host, self._port):
            print(
                f"tilework: node {self._me} at {self._host}:{self._port} {what}",
                file=sys.stderr,
                flush=True,
            )


def version() -> str:
    """The version of this package, which launchers compare; "unknown" if it is not installed."""
    try:
        return metadata.version("tilework")
    except metadata.PackageNotFoundError:  # a folder on the path
        return "unknown"


@contextlib.contextmanager
def open_door(
    store: Store, key: str, host: str, callers: Iterable[int]
) -> Iterator[tuple[Door, int]]:
    """A door for callers at ``host``, and the port; ``key`` in ``store`` says how to knock."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    nonce = secrets.token_bytes(16)
    with socket.create_server((host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        with contextlib.closing(Door(listener, token_for(nonce, store.secret), callers)) as door:
            store.set(key, json.dumps({"port": port, "nonce": nonce.hex()}))
            yield door, port


def call(store: Store, host: str, number: int, whom: str) -> socket.socket:
    """A connection to the door at "link" in ``store``, as the caller ``number``."""
    port, token = door_at(store, "link")
    try:
        peer = socket.create_connection((host, port), _ANSWER_SECONDS)
        knock(peer, token, number)
    except OSError as error:
        raise DistNetworkError(
            f"cannot connect to {whom} at {host}:{port}: {error.strerror or error}. The ports "
            f"between the hosts must be open"
        ) from error
    return peer


def door_at(store: Store, key: str) -> tuple[int, bytes]:
    """The port of the door that :func:`open_door` has opened, and the token to knock with."""
    where = json.loads(store.get(key))
    return where["port"], token_for(bytes.fromhex(where["nonce"]), store.secret)


def answers(host: str, port: int) -> bool:
    """True if somebody listens there."""
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def _named(nodes: list[int]) -> str:
    numbers = ", ".join(map(str, nodes))
    return f"node{'s' if len(nodes) != 1 else ''} {numbers}"


def free_port(host: str) -> int:
    """A TCP port of ``host`` that is free now; not held, because rank 0 will bind it."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as probe:
        port: int = probe.getsockname()[1]
        return port


def secret_bytes(text: str) -> bytes | None:
    """The secret in TILEWORK_SECRET; None if it is empty. Raises NodesError."""
    try:
        return bytes.fromhex(text) or None
    except ValueError:
        raise NodesError(
            "TILEWORK_SECRET must be an even number of hexadecimal digits, the same on all nodes"
        ) from None
