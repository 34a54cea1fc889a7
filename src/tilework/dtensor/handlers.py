"""The handler of each torch function that met a DTensor: the cache of lookups in the table."""

from __future__ import annotations

from typing import Any

from tilework.tiled import Handler, packet_of

#: What runs each function on DTensors; filled when a function is first met.
HANDLERS: dict[Any, Handler] = {}


def forget_handler(func: Any) -> None:
    """Look up a function's handler again at the next call."""
    packet = packet_of(func)
    for known in list(HANDLERS):
        if known is func or packet_of(known) is packet:
            del HANDLERS[known]
