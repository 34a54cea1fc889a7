"""This host's address that the other hosts can reach."""

from __future__ import annotations

import socket
from typing import Any

from tilework.store import Store


def reachable_address(store: Store) -> str:
    """The best known address of this host for the other ranks that meet at ``store``."""
    return address_towards(store) or _own_address()


def address_towards(store: Store) -> str | None:
    """This host's address on the route to the host that serves the store; None if unknown."""
    store = getattr(store.whole, "torch_store", store.whole)
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not isinstance(host, str) or not isinstance(port, int):
        return None
    for family, where in _resolved(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(where)  # a datagram socket: this only chooses the route
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(family, where) for family, _, _, _, where in infos]


def _own_address() -> str:
    """The address that this host's name resolves to, if this host has it; else 127.0.0.1."""
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return "127.0.0.1"
    return address
