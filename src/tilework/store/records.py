"""The format of a :class:`FileStore`'s file: an append-only log of checksummed records.

::

    file    = MAGIC record*
    MAGIC   = "tilework-store" 0x00 0x01                         16 bytes, the last is the version
    record  = size:u32 crc(payload):u32 crc(size, crc):u32 payload       integers big-endian
    payload = kind:u8 key_size:u32 key value

The header's own checksum distinguishes a torn record from a damaged record. Only the last record
can be torn (the writer was killed, or is still writing): then the header is good, or shorter than
12 bytes, and the payload ends beyond the file. Anything else that does not add up is damage.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Final, NamedTuple

MAGIC: Final = b"tilework-store\x00\x01"

_HEADER: Final = struct.Struct("!III")
_PAYLOAD: Final = struct.Struct("!BI")
HEADER_BYTES: Final = _HEADER.size


class RecordKind(IntEnum):
    """The kind of a record."""

    SET = 1
    APPEND = 2
    DELETE = 3
    #: A store object opened the file, or closed it; they count who still uses it.
    OPEN = 4
    CLOSE = 5
    #: A value was pushed to a queue, or the oldest was taken.
    PUSH = 6
    POP = 7


class LogRecord(NamedTuple):
    """A change of a store, as the file holds it.

    Attributes:
        kind: The kind of change.
        key: The key that changes.
        value: The new value, or what the kind of change needs.
    """

    kind: RecordKind
    key: bytes = b""
    value: bytes = b""


class DamagedLogError(Exception):
    """The file has bytes that no writer of this format leaves behind, not even a killed writer."""


def pack(record: LogRecord) -> bytes:
    """The bytes of ``record`` in the file, with header."""
    payload = _PAYLOAD.pack(record.kind, len(record.key)) + record.key + record.value
    sizes = struct.pack("!II", len(payload), zlib.crc32(payload))
    return sizes + struct.pack("!I", zlib.crc32(sizes)) + payload


def record_bytes(header: bytes) -> int:
    """The size in bytes of the record with ``header`` (12 bytes or more), header included."""
    size, _, check = _HEADER.unpack_from(header)
    if zlib.crc32(header[:8]) != check:
        raise DamagedLogError("a record's header fails its checksum")
    return HEADER_BYTES + int(size)


def unpack(data: bytes) -> LogRecord:
    """Decode ``data``, one whole record with header. Raises DamagedLogError."""
    payload = data[HEADER_BYTES:]
    if zlib.crc32(payload) != _HEADER.unpack_from(data)[1]:
        raise DamagedLogError("a record fails its checksum")
    try:
        kind, key_bytes = _PAYLOAD.unpack_from(payload)
        key_end = _PAYLOAD.size + key_bytes
        if key_end > len(payload):
            raise DamagedLogError("a record's key is longer than the record")
        return LogRecord(RecordKind(kind), payload[_PAYLOAD.size : key_end], payload[key_end:])
    except (struct.error, ValueError) as error:
        raise DamagedLogError(f"a record makes no sense: {error}") from error
