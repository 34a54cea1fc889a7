"""The flight record's notes on a rank, besides the operations of groups."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilework.comm.flight.document import MAX_FAULTS, RecordedFault


class Sink(Protocol):
    """The place where a rank's events are written while the rank is traced; part of its World."""

    def see(self, record: Any) -> None:
        """Write the operations of the group of a new record of the rank's World."""
        ...

    def begin(self, name: str) -> None:
        """A span of the calling thread begins."""
        ...

    def end(self) -> None:
        """The span of the calling thread that began last is over."""
        ...


@dataclass(slots=True)
class Notes:
    """Facts about one rank for the flight record, besides operations; part of the rank's World."""

    #: The rank's own thread, which made the first group.
    thread: threading.Thread | None = None
    #: The first faults: later faults are rarely the cause.
    faults: deque[RecordedFault] = field(default_factory=deque)
    #: True after the report that no record can be written.
    complained: bool = False
    #: Steps so far: counted of captured steps, and of optimizers where the launcher watches.
    steps: int = 0

    def add(self, fault: RecordedFault) -> None:
        """Keep a fault, unless as many faults are kept as a record may have."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)
