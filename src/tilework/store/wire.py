"""The protocol between the server and the clients of a store.

A connection carries messages, in turn: the client sends one and waits for the answer; anything
beyond that is garbage, and either side closes the connection on garbage. Integers are
big-endian::

    message = size:u32 code:u8 body          size is the body's, at most MAX_MESSAGE_BYTES
    body    = field*                          at most MAX_FIELDS
    field   = size:u32 bytes

A connection begins with a greeting, in messages of at most MAX_GREETING_BYTES::

    client  HELLO      magic, client's nonce
    server  WELCOME                                            if the server has no secret
    server  CHALLENGE  server's nonce                          if it has one
    client  PROOF      HMAC-SHA256(secret, "client" + both nonces)
    server  WELCOME    HMAC-SHA256(secret, "server" + both nonces)
    server  REFUSED    why                                     at any point; then it closes

So each side proves that it knows the secret, and the secret never travels. The rest is
neither encrypted nor signed: a stranger on the path could read or alter it. Then requests
(:class:`Code` lists their fields) until the client closes. A number is 8 bytes, signed; a
time is a number of milliseconds. The server keeps a request that waits until the keys exist
or the time is up. Nothing here is ever unpickled or evaluated.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from tilework.framed import HEADER, FrameReader, GarbageError

MAGIC: Final = b"tilework-store/1"
NONCE_BYTES: Final = 32

MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_GREETING_BYTES: Final = 1024
MAX_FIELDS: Final = 1 << 16

# Left for keys and values in a request, which may begin with a few numbers.
_ROOM_BYTES: Final = MAX_MESSAGE_BYTES - 256
_ROOM_FIELDS: Final = MAX_FIELDS - 8

_FIELD: Final = struct.Struct("!I")
_NUMBER: Final = struct.Struct("!q")


class Code(IntEnum):
    """The kind of a message."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5

    #: key, value
    SET = 16
    #: milliseconds, key…; answered by the values
    GET = 17
    #: key, number; answered by the sum
    ADD = 18
    #: key, expected, desired; answered by the value afterwards
    COMPARE_SET = 19
    #: key, value
    APPEND = 20
    #: key…; answered by 0 or 1
    CHECK = 21
    #: milliseconds, key…
    WAIT = 22
    #: key; answered by 0 or 1
    DELETE = 23
    #: nothing; answered by the number
    NUM_KEYS = 24
    #: key, value, key, value…
    MULTI_SET = 25
    #: the client's own random name: one more worker has come
    JOIN = 26
    #: milliseconds, number of workers; answered by how many have come
    WAIT_WORKERS = 27
    #: key, value: appended when this connection closes; nothing: no longer
    APPEND_ON_DISCONNECT = 28
    #: nothing; answered by the keys
    LIST_KEYS = 29
    #: queue, value
    QUEUE_PUSH = 30
    #: milliseconds, queue: negative not to wait; answered by the value
    QUEUE_POP = 31
    #: queue; answered by the number of values
    QUEUE_LENGTH = 32
    #: Only in files: a store was closed.
    LEAVE = 33

    #: Success, with the fields named above.
    OK = 64
    #: The time is up; the keys that are missing.
    TIMEOUT = 65
    #: The operation is refused; why.
    ERROR = 66
    #: The answer would be longer than a message.
    TOO_LONG = 67


class WireMessage(NamedTuple):
    """A decoded message between a client and a store server: a request, or an answer of
    some kind.
    """

    code: int
    fields: list[bytes]


def encode(code: Code, fields: Sequence[bytes] = ()) -> bytes:
    """The bytes of a message on the wire. Raises ValueError if it would be too long."""
    size = sum(map(len, fields)) + _FIELD.size * len(fields)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message takes at most {MAX_MESSAGE_BYTES} bytes, got {size}")
    parts = [HEADER.pack(size, code)]
    for field in fields:
        parts += (_FIELD.pack(len(field)), field)
    return b"".join(parts)


def encode_number(number: int) -> bytes:
    """A field that holds ``number``."""
    return _NUMBER.pack(number)


def decode_number(field: bytes) -> int:
    """The number in ``field``. Raises GarbageError."""
    if len(field) != _NUMBER.size:
        raise GarbageError(f"expected a number of {_NUMBER.size} bytes, got {len(field)}")
    return int(_NUMBER.unpack(field)[0])


def decode_fields(body: bytes) -> list[bytes]:
    """The fields of a message's body. Raises GarbageError."""
    fields: list[bytes] = []
    at, end = 0, len(body)
    while at < end:
        start = at + _FIELD.size
        if start > end or len(fields) == MAX_FIELDS:
            raise GarbageError("a body's fields do not add up")
        at = start + int(_FIELD.unpack_from(body, at)[0])
        fields.append(body[start:at])
    if at != end:
        raise GarbageError("a field is longer than the message")
    return fields


def decode(data: bytes) -> WireMessage:
    """The message that :func:`encode` has made ``data`` of. Raises GarbageError."""
    if len(data) < HEADER.size or HEADER.unpack_from(data)[0] != len(data) - HEADER.size:
        raise GarbageError("a message of another size than it says")
    return WireMessage(data[HEADER.size - 1], decode_fields(data[HEADER.size :]))


class Inbox:
    """Turns the bytes that arrive on a connection into messages, one at a time."""

    def __init__(self, limit_bytes: int = MAX_GREETING_BYTES) -> None:
        self._reader = FrameReader(Code, limit_bytes)

    def greeted(self) -> None:
        """Accept messages of any size from now on."""
        self._reader.limit_bytes = MAX_MESSAGE_BYTES

    def feed(self, data: bytes) -> WireMessage | None:
        """The message that ``data`` completes, None if there is more to come.

        Raises GarbageError, after which the connection is of no more use.
        """
        frames = self._reader.feed(data)
        if not frames:
            return None
        if len(frames) > 1 or self._reader.kept:
            raise GarbageError("bytes after the end of a message")
        return WireMessage(frames[0][0], decode_fields(frames[0][1]))


def proof(secret: bytes, side: bytes, nonces: Iterable[bytes]) -> bytes:
    """The proof by ``side`` (``b"client"`` or ``b"server"``) that it knows ``secret``."""
    return hmac.new(secret, side + b"".join(nonces), hashlib.sha256).digest()


def fit_into_messages(groups: Sequence[tuple[bytes, ...]]) -> list[list[bytes]]:
    """The fields of ``groups`` in order, in runs that each fit into one message; groups stay whole.

    There is always at least one run, if only an empty one: a request without keys is still sent.
    """
    runs: list[list[bytes]] = [[]]
    used_bytes = 0
    for group in groups:
        more_bytes = sum(map(len, group)) + _FIELD.size * len(group)
        full = used_bytes + more_bytes > _ROOM_BYTES or len(runs[-1]) + len(group) > _ROOM_FIELDS
        if full and runs[-1]:
            runs.append([])
            used_bytes = 0
        runs[-1] += group
        used_bytes += more_bytes
    return runs
