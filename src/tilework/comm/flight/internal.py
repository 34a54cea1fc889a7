"""Names that the other packages of tilework use."""

from tilework.comm.flight.diagnosis import Finding, diagnose
from tilework.comm.flight.document import (
    MAX_FILE_BYTES,
    FlightRecordError,
    Record,
    decode,
    printable,
)
from tilework.comm.flight.history import named
from tilework.comm.flight.ring import RUNNING
from tilework.comm.flight.stragglers import Straggler
from tilework.comm.flight.watch import DIRECTORY_VARIABLE, LAUNCHER_SIGNAL, arm, armed
from tilework.comm.waits.by_rank import AFTER_SECONDS
