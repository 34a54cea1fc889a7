"""The flight record's notes on a rank, besides its groups' operations."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from tilework.comm.flight.document import MAX_FAULTS, Fault


@dataclass(slots=True)
class Notes:
    """The notes on one rank; part of its World."""

    #: The thread that made its first group: the rank's own.
    thread: threading.Thread | None = None
    #: The first faults: what follows them is rarely the cause.
    faults: deque[Fault] = field(default_factory=deque)
    #: True if it was reported that no record can be written.
    complained: bool = False

    def add(self, fault: Fault) -> None:
        """Keep it, if there is room."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)
