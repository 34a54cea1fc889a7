"""The part of the job's store where newcomers, members and the launcher meet.

This module must not import torch: the launcher imports it, too.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tilework.errors import DistError
from tilework.store import PrefixStore, Store

#: Set for a process in the seat of a rank that died: it joins the existing group.
REJOIN_VARIABLE: Final = "TILEWORK_REJOIN"
#: The fewest ranks that the job may continue with.
MIN_RANKS_VARIABLE: Final = "TILEWORK_MIN_RANKS"


_TICKETS: Final = "tickets"
_HANDLED: Final = "handled"
_EVENTS: Final = "events"


@dataclass(frozen=True)
class Ticket:
    """A newcomer's request to be let in: a random token, the seat, and the process's identity."""

    token: str
    seat: int
    identity: str


class TicketStore(PrefixStore):
    """Tickets, answers to tickets, and events, in the job's store."""

    def __init__(self, store: Store) -> None:
        super().__init__("tilework/tickets", store.whole)

    def leave_ticket(self, ticket: Ticket) -> None:
        """Ask the members to let a newcomer in: add the newcomer's ticket to the list."""
        self.append(_TICKETS, f"{ticket.token};{ticket.seat};{ticket.identity}\n")

    def tickets(self) -> list[Ticket]:
        """The tickets that have not been handled, oldest first."""
        lines = self._lines(_TICKETS)
        handled = set(self._lines(_HANDLED)) if lines else set()
        parts = [line.split(";") for line in lines]
        return [Ticket(p[0], int(p[1]), p[2]) for p in parts if p[0] not in handled]

    def handle(self, ticket: Ticket) -> None:
        """Note that a ticket was handled: :meth:`tickets` no longer returns it."""
        self.append(_HANDLED, f"{ticket.token}\n")

    def note(self, event: Mapping[str, Any]) -> None:
        """Inform the launcher of an event."""
        self.append(_EVENTS, f"{json.dumps(event)}\n")

    def events(self) -> list[dict[str, Any]]:
        """All events that :meth:`note` has been called with, oldest first."""
        return [json.loads(line) for line in self._lines(_EVENTS)]

    def _lines(self, key: str) -> list[str]:
        return self.get(key).decode().splitlines() if self.check([key]) else []


def note_event(store: Store, kind: str, **facts: Any) -> None:
    """Report an event to the launcher through the store; do nothing if the store fails. Local."""
    with contextlib.suppress(DistError, ValueError):
        event = {"time": time.time(), "host": socket.gethostname(), "kind": kind}
        TicketStore(store).note({**event, **facts})
