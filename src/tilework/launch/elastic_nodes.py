"""A launcher's part in a job whose hosts come and go: it takes seats at a ``tilework store``."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Final

from tilework.errors import DistStoreError, StoreTimeoutError
from tilework.launch.nodes import (
    PATIENCE,
    Kind,
    Message,
    NodeLink,
    NodePlace,
    Nodes,
    NodesError,
    answers,
    call,
    secret_bytes,
    version,
)
from tilework.launch.settings import LaunchSettings
from tilework.launch.store_service import CALLERS, PREFIX, SERVICE
from tilework.store import PrefixStore, TCPStore
from tilework.store.internal import TcpAddress

#: The number of a launcher that has no place yet.
_NO_NODE: Final = -2
#: Seconds until the line that this launcher waits.
_WORD_SECONDS: Final = 3.0


class ServiceLink(NodeLink):
    """A launcher's connection to a ``tilework store``, which tells it of all others."""

    awaits_others = False  # the service stays for them

    def __init__(self, peer: socket.socket, where: str) -> None:
        super().__init__(_NO_NODE, (), ())
        self._where = where
        self.note_node(SERVICE, f"tilework store at {where}", 0, 0)
        self.add(SERVICE, peer)
        self._own = self._left = 0
        self._has_lost = False
        self.is_elastic = True

    def join(self, settings: LaunchSettings) -> tuple[NodePlace, int]:
        """This launcher's place, and the port of the ranks' store; blocks until there is one."""
        assert settings.elastic_nodes is not None
        nodes = ":".join(map(str, settings.elastic_nodes))
        mine = {"nodes": nodes, "ranks": settings.nprocs, "version": version()}
        self.tell(Kind.JOIN, **mine, host=socket.gethostname())
        placed = self._answer((settings.timeout or PATIENCE).total_seconds())
        self._node, self._own, self._left = placed["node"], placed["ranks"], placed["left"]
        self._has_lost, self._finished = bool(placed["begun"]), set()
        names = ("node", "nodes", "first", "world_size", "begun")
        return NodePlace(*(placed[name] for name in names)), placed["port"]

    @property
    def may_begin_again(self) -> bool:
        return self._has_lost and not self.any_finished

    @property
    def ranks_elsewhere(self) -> int:
        return max(0, self._left - self._own)

    @property
    def others_finished(self) -> bool:
        return self.any_finished and not self.ranks_elsewhere

    def place_of(self, node: int) -> str:
        return f"the {self._nodes[SERVICE].host}" if node == SERVICE else super().place_of(node)

    def ranks_of(self, node: int) -> str:
        return "all ranks" if node == SERVICE else super().ranks_of(node)

    def _hear(self, node: int, message: Message) -> None:
        self._left = message.get("left", self._left)
        self._has_lost |= message["kind"] == Kind.LOST
        if "first" in message:
            names = ("node", "host", "first", "ranks")
            self.note_node(*(message[name] for name in names))
        super()._hear(node, message)

    def _answer(self, seconds: float) -> Message:
        begun, has_said = time.monotonic(), False
        while (now := time.monotonic()) - begun < seconds:
            readers = self.readers()
            for each in select.select(list(readers), [], [], 0.5)[0]:
                readers[each]()
            self.beat()
            for message in self.take():
                if message["kind"] == Kind.PLACED:
                    return message
                if message["kind"] == Kind.REFUSED:
                    refused = NodesError(message["error"])
                    refused.status = message.get("status", 1)
                    raise refused
            if not self.readers():
                raise DistStoreError(f"the tilework store at {self._where} is gone")
            if now - begun > _WORD_SECONDS and not has_said:
                has_said = True
                text = f"tilework: waits at {self._where} for other hosts or a place"
                print(text, file=sys.stderr, flush=True)
        raise NodesError(f"no place at {self._where} within {seconds:g} s (--timeout)")


def join_service(settings: LaunchSettings) -> Nodes:
    """Take seats at the ``tilework store`` of ``settings.rdzv``; blocks until there are some.

    Raises NodesError if the time was up, or this launcher does not fit to the others;
    DistNetworkError if nobody serves at that address.
    """
    assert settings.rdzv is not None
    host, port = settings.rdzv
    where = f"{host}:{port}"
    text = os.environ.get("TILEWORK_SECRET", "")
    patience = settings.timeout or PATIENCE
    if not answers(host, port):
        print(f"tilework: waits for a `tilework store` at {where}", file=sys.stderr, flush=True)
    client = TCPStore(host, port, timeout=patience, secret=secret_bytes(text))
    with contextlib.closing(client), contextlib.ExitStack() as stack:
        store = PrefixStore(PREFIX, client)
        try:  # the service sets the key a moment after the port opens
            store.wait(["link"], timedelta(seconds=_WORD_SECONDS))
        except StoreTimeoutError:
            raise NodesError(
                f"the store at {where} is no `tilework store`, which --nnodes MIN:MAX needs"
            ) from None
        number = store.add(CALLERS, 1)
        link = ServiceLink(call(store, host, number, "the tilework store"), where)
        stack.callback(link.close)
        place, port_of_ranks = link.join(settings)
        stack.pop_all()
    return Nodes(place, TcpAddress(host, port_of_ranks).url, text, None, link)


def join_again(nodes: Nodes, settings: LaunchSettings) -> Nodes:
    """Take seats again, once this host's ranks have ended; blocks until there are some.

    Raises NodesError, as :func:`join_service`; DistStoreError if the service is gone.
    """
    assert isinstance(nodes.link, ServiceLink)
    assert settings.rdzv is not None
    place, port = nodes.link.join(settings)
    return replace(nodes, place=place, store_url=TcpAddress(settings.rdzv[0], port).url)
