"""A rank's trace as a file: a line of JSON for each event, written while the rank runs.

The first line is the header. Each other line is a list that begins with the kind of the event:

- ``"t"``, number, text: a text that later lines name by number
- ``"g"``, number, name, backend, description, ranks: a group
- ``"o"``, group, key, number, what, site, peer, tag, entered, waited, finished, ended, outcome,
  bytes: an operation; a later line of the same group and key replaces an earlier
- ``"b"``, thread, time, name: a span begins; ``"e"``, thread, time: the thread's last span ends
- ``"p"``, thread, start, end, name: an event of torch's profiler, whose threads are below zero
- ``"s"``, time: a step is over
- ``"m"``, time, bytes by use: the memory of the rank's tensors
- ``"h"``, thread, name: a thread
- ``"l"``, operations, spans: how many are missing so far
- ``"x"``, time: the file is full; ``"z"``, time: the trace ended in order

Times are nanoseconds of the monotonic clock, after the header's ``began``.
"""

from __future__ import annotations

from typing import Final

#: Increased by every change that an older reader would misunderstand.
VERSION: Final = 1
MARK: Final = "tilework_trace"
#: A rank's file is not made larger.
MOST_BYTES: Final = 256 << 20
#: Of a job's files, no more is read.
MOST_READ_BYTES: Final = 256 << 20
MOST_TEXT_CHARS: Final = 2000
#: The name of the spans of captured steps.
CAPTURED: Final = "captured step"


class TraceError(ValueError):
    """A folder holds no trace that can be read, or the trace cannot be written."""
