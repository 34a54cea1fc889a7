"""Events of a job whose ranks come and go: ranks report them to the launcher."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from tilework.comm.elastic.ticket_store import TicketStore
from tilework.errors import DistError
from tilework.store import Store


def note_event(store: Store, kind: str, **facts: Any) -> None:
    """Report an event to the launcher through the store; do nothing if the store fails. Local."""
    with contextlib.suppress(DistError, ValueError):
        TicketStore(store).note({"time": time.time(), "kind": kind, **facts})
