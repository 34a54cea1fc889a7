"""Names that launchers use. An import loads no torch."""

from tilework.comm.elastic.ticket_store import MIN_RANKS_VARIABLE, REJOIN_VARIABLE, TicketStore
from tilework.comm.flight.diagnosis import Finding, diagnose
from tilework.comm.flight.document import (
    MAX_FILE_BYTES,
    FlightRecordError,
    Record,
    decode,
    printable,
)
from tilework.comm.flight.history import History, named
from tilework.comm.flight.ring import RUNNING, Entry
from tilework.comm.flight.stragglers import blocking
from tilework.comm.flight.watch import (
    DIRECTORY_VARIABLE,
    LAUNCHER_SIGNAL,
    TRACE_VARIABLE,
    WATCH_VARIABLE,
    arm,
    armed,
)
from tilework.comm.making.init_generation import InitGeneration
from tilework.comm.per_call.callsite import in_library
