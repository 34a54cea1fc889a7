"""``tilework store``: a job's store as a separate service, at which the launchers of hosts meet.

It outlives every rank and host. Each launcher with ``--nnodes MIN:MAX`` keeps a connection to it,
gets the numbers of its ranks there, and hears who comes and goes. The ranks' store has another
port, and is a new store for each beginning of a job.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from datetime import timedelta
from typing import Any, Final

from tilework.errors import DistError
from tilework.launch.nodes import Kind, Message, NodeLink, open_door, secret_bytes
from tilework.launch.seating import Seating, Seats
from tilework.rendezvous.internal import EndedRanks
from tilework.store import PrefixStore, StoreServer, TCPStore

#: The number of the service among the nodes, the store's prefix for it, and a key there: how many
#: launchers have called.
SERVICE: Final = -1
PREFIX: Final = "tilework/service"
CALLERS: Final = "callers"
#: What launchers must agree on, with the name for people.
_EQUAL: Final = {"nodes": "--nnodes", "version": "their version of tilework"}
#: How many launchers may be on their way at a time.
_CALLERS_AHEAD: Final = 1024
_LOOK_SECONDS: Final = 0.5
_TIMEOUT: Final = timedelta(seconds=5)


def serve_store(host: str, port: int, secret_text: str) -> int:
    """Serve stores at an address of this host, one job after the other, until Ctrl-C or SIGTERM.

    Returns the exit status. Raises NodesError if the secret is not hexadecimal, DistNetworkError if
    the address is in use, or not of this host.
    """
    secret = secret_bytes(secret_text)
    if secret is None:
        _say("TILEWORK_SECRET is not set: whoever reaches this port can read and write the store")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            with contextlib.closing(_Service(host, port, secret)) as service:
                service.run()
    return 0


def _say(text: str) -> None:
    print(f"tilework store: {text}", file=sys.stderr, flush=True)


class _Service(NodeLink):
    """The store of one job, and the connections to its launchers, numbered as they called."""

    _store: TCPStore

    def __init__(self, host: str, port: int, secret: bytes | None) -> None:
        super().__init__(SERVICE, (), ())
        self._host, self._secret = host, secret
        self._stack, self._of_ranks = contextlib.ExitStack(), contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.push(self._of_ranks)
            client = self._serve_at(port, stack)
            door = open_door(PrefixStore(PREFIX, client), "link", host, range(1, _CALLERS_AHEAD))
            self._door, _ = stack.enter_context(door)
            self._stack = stack.pop_all()
        self._seating: Seating | None = None
        #: What the first launcher said, with which others must agree.
        self._agreed: Message = {}
        _say(f"serves a job at {host}:{client.port}")

    def _serve_at(self, port: int, stack: contextlib.ExitStack) -> TCPStore:
        server = stack.enter_context(StoreServer.listen_tcp(self._host, port, self._secret))
        server.start()
        client = TCPStore(self._host, server.port, timeout=_TIMEOUT, secret=self._secret)
        return stack.enter_context(contextlib.closing(client))

    def close(self) -> None:
        super().close()
        self._stack.close()

    def run(self) -> None:
        """Serve until the last launcher of a job has ended."""
        while self._seating is None or not self._seating.is_over:
            self._serve()
        for caller in self._seating.waiting:
            text = "the job ended before this host had a part in it"
            self._answer(caller, Kind.REFUSED, error=text, status=int(not self._seating.finished))
        _say("the job has ended")

    def _serve(self) -> None:
        readers = self.readers()
        door = self._door.fileno()
        ready, _, _ = select.select([door, *readers], [], [], _LOOK_SECONDS)
        for each in ready:
            if each != door:
                readers[each]()
        for caller, peer in self._door.admit(0.0).items() if door in ready else ():
            self.add(caller, peer)
            self._door.awaited.add(caller + _CALLERS_AHEAD)
        self.beat()
        if self._seating is not None:
            begun = self._seating.world_size
            placed = list(self._seating.newly_seated(time.monotonic()))
            if placed and not begun:
                self._of_ranks.close()  # nobody uses the store of an earlier beginning any more
                self._store = self._serve_at(0, self._of_ranks)
            for caller, seats in placed:
                self._place(caller, seats, begun)

    def _hear(self, node: int, message: Message) -> None:
        kind = message["kind"]
        if kind == Kind.JOIN:
            self._join(node, message)
        elif kind == Kind.LOST:
            self._leave(node)
        elif kind == Kind.AGAIN:
            self._begin_again(node)
        else:
            if kind == Kind.FINISHED and self._seating is not None:
                self._seating.finished.add(node)
            self._send({**message, "left": self._left}, but=node)

    def _join(self, caller: int, message: Message) -> None:
        self._agreed = self._agreed if self._seating is not None else message
        for what, name in _EQUAL.items():
            mine, theirs = message[what], self._agreed[what]
            if mine != theirs:
                text = f"this one {mine}, those of {self._agreed['host']} and others {theirs}"
                self._answer(caller, Kind.REFUSED, error=f"the launchers differ in {name}: {text}")
                return
        if self._seating is None:
            least, most = map(int, message["nodes"].split(":"))
            self._seating = Seating(least, most)
        self._seating.arrive(caller, message["ranks"], message["host"], time.monotonic())

    def _begin_again(self, caller: int) -> None:
        """Take all seats back; ``caller`` was the first to know, or is the next to say so."""
        if self._seating is not None and caller in self._seating.seated:
            _say("the ranks cannot meet without lost hosts: all begin again")
            self._seating = self._seating.renewed()
            self._send({"kind": Kind.AGAIN}, but=caller)

    def _place(self, caller: int, seats: Seats, begun: int) -> None:
        assert self._seating is not None
        for rank in seats.numbers if begun else ():
            EndedRanks(self._store).remove(rank)
        facts = {**vars(seats), "left": self._left}
        size = max(self._seating.world_size, seats.first + seats.ranks)
        counts = {"nodes": len(self._seating.seated), "world_size": size, "begun": begun}
        self._answer(caller, Kind.PLACED, **facts, **counts, port=self._store.port)
        self._send({"kind": Kind.JOINED, **facts}, but=caller)
        _say(f"node {seats.node} ({seats.host}) has come: {self.ranks_in_words(seats)}")

    def _leave(self, caller: int) -> None:
        seating = self._seating
        seats = None if seating is None else seating.leave(caller)
        if seats is None or seating is None:
            return
        for rank in seats.numbers:
            EndedRanks(self._store).add(rank)
        enough = len(seating.seated) >= seating.least or bool(seating.finished)
        facts = {**vars(seats), "left": self._left, "enough": enough}
        self._send({"kind": Kind.LOST, **facts}, but=caller)
        _say(f"node {seats.node} ({seats.host}) is gone: {self.ranks_in_words(seats)}")

    def ranks_in_words(self, seats: Seats) -> str:
        """The ranks of a host, for messages."""
        self.note_node(seats.node, seats.host, seats.first, seats.ranks)
        return self.ranks_of(seats.node)

    @property
    def _left(self) -> int:
        """The number of ranks whose launchers neither finished nor left."""
        assert self._seating is not None
        return sum(seats.ranks for seats in self._seating.active.values())

    def _answer(self, caller: int, kind: Kind, **facts: Any) -> None:
        with contextlib.suppress(KeyError, DistError):  # it has gone meanwhile
            self._send_to(caller, {"kind": kind, "node": SERVICE, **facts})
