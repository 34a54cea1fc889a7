"""Messages between ranks, as ZeroMQ carries them. All numbers are little-endian.

    first frame    kind, sender, number; then, where there is a body: how many references and
                   parts, the memory file; each reference; each part's size and place;
                   the parts that stand here
    more frames    the parts that stand apart, cut into frames of at most MAX_FRAME_BYTES

The first part is a pickle, the others are the buffers of the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from tilework.rpc.transport import MAX_FRAME_BYTES

_HEAD: Final = struct.Struct("<BIQ")
_BODY: Final = struct.Struct("<IIi?")
_REF: Final = struct.Struct("<IQIQ")
_PART: Final = struct.Struct("<Qq")

#: Places of parts; others are offsets in the memory file.
_APART: Final = -1
_HERE: Final = -2
#: Larger pickles stand apart.
_HERE_BYTES: Final = 64 << 10


class MessageKind(IntEnum):
    """The kind of a message."""

    #: Run a function. The number is the caller's, and the answer's.
    CALL = 1
    #: The same, for RPC's own purposes: not counted as work.
    INNER_CALL = 2
    RESULT = 3
    ERROR = 4
    #: About a reference: one more here (sent to the owner); yes; this many less here.
    ADD = 5
    ADDED = 6
    DROP = 7
    #: A reference arrived, and need not be held for this rank any longer. The number of the pin.
    HOLDS = 8
    #: A memory file was opened, and may be closed. The number of the file.
    TAKEN = 9
    #: A memory file is not mapped any more, and may be used again. The number of the file.
    RETURNED = 10
    #: The first message to a rank: 1 if the sender can open the memory files of that rank.
    HELLO = 11
    #: To oneself: stop receiving.
    STOP = 12


class File(NamedTuple):
    """The memory file of a message."""

    number: int
    """The number that the sender gave to the file; -1: the message has no file."""
    returning: bool
    """True if the sender wants it back, RETURNED; otherwise it is to be TAKEN."""


NO_FILE: Final = File(-1, False)


class RefId(NamedTuple):
    """The name of a reference, the same on all ranks: the creator's rank, and a number there."""

    creator: int
    number: int


class Ref(NamedTuple):
    """A reference in a message."""

    id: RefId
    owner: int
    pin: int
    """The number by which the sender keeps the reference until the receiver HOLDS it, or COUNTED or
    NEW."""


#: The owner itself sends it, and has counted it.
COUNTED: Final = 0
#: The owner, which receives this, makes the reference: the result of the call goes there.
NEW: Final = 1
FIRST_PIN: Final = 2


@dataclass(slots=True, eq=False)
class RpcMessage:
    """A received message, decoded into parts that are not unpickled yet."""

    kind: int
    sender: int
    number: int
    #: The references in the pickle, or the reference that the message is about.
    refs: list[Ref]
    #: The size in bytes and the place of each part: the pickle, then the buffers of the pickle.
    parts: list[tuple[int, int]]
    #: The memory file with the large parts; ``NO_FILE``: no part is in a memory file.
    file: File
    #: The end of the first frame: the pickle, if the pickle is small.
    rest: memoryview
    #: The other frames, of ZeroMQ: the parts that stand apart.
    frames: list[Any]

    def load(self, memory: Any) -> list[Any]:
        """The parts as buffers; ``memory`` is the mapped memory file, if the message has any."""
        parts: list[Any] = []
        frames = iter(self.frames)
        for size, place in self.parts:
            if place == _HERE:
                parts.append(self.rest[:size])
            elif place == _APART:
                parts.append(_join(frames, size))
            else:
                parts.append(memoryview(memory)[place : place + size])
        return parts

    @property
    def file_bytes(self) -> int:
        return max(size + place for size, place in self.parts if place >= 0)


def encode(  # noqa: PLR0913
    kind: MessageKind,
    sender: int,
    number: int,
    refs: Sequence[Ref] = (),
    parts: Sequence[memoryview] = (),
    file: File = NO_FILE,
    places: Sequence[int] = (),
) -> list[bytes | memoryview]:
    """The ZeroMQ frames of a message (see :class:`MessageKind`), with the references in the pickle.

    Args:
        parts: The pickle, then the buffers that belong to it.
        file: The memory file that some of the parts are in.
        places: For each part, the offset in ``file``, or a negative number; empty: none is there.
    """
    head: list[bytes | memoryview] = [_HEAD.pack(kind, sender, number)]
    if not parts and not refs:
        return head
    head += [_BODY.pack(len(refs), len(parts), *file)]
    head += [_REF.pack(*ref.id, ref.owner, ref.pin) for ref in refs]
    frames: list[bytes | memoryview] = []
    here: bytes | memoryview = b""
    for index, part in enumerate(parts):
        place = places[index] if places else _APART
        if place < 0:
            place = _HERE if not index and part.nbytes <= _HERE_BYTES else _APART
        head.append(_PART.pack(part.nbytes, place))
        if place == _APART:
            cuts = range(0, part.nbytes, MAX_FRAME_BYTES)
            frames += [part[cut : cut + MAX_FRAME_BYTES] for cut in cuts]
        elif place == _HERE:
            here = part
    return [b"".join([*head, here]), *frames]


def decode(frames: Sequence[Any]) -> RpcMessage:
    """Decode the message in ``frames``; raises struct.error if they are none."""
    first = memoryview(frames[0].bytes)
    kind, sender, number = _HEAD.unpack_from(first)
    at = _HEAD.size
    refs: list[Ref] = []
    parts: list[tuple[int, int]] = []
    file = NO_FILE
    if len(first) > at:
        ref_count, part_count, *about_file = _BODY.unpack_from(first, at)
        file = File(*about_file)
        at += _BODY.size
        for _ in range(ref_count):
            creator, serial, owner, pin = _REF.unpack_from(first, at)
            refs.append(Ref(RefId(creator, serial), owner, pin))
            at += _REF.size
        for _ in range(part_count):
            parts.append(_PART.unpack_from(first, at))
            at += _PART.size
    return RpcMessage(kind, sender, number, refs, parts, file, first[at:], list(frames[1:]))


def _join(frames: Any, size: int) -> Any:
    first = next(frames).buffer
    if len(first) == size:
        return first
    whole = bytearray(size)
    whole[: len(first)] = first
    at = len(first)
    while at < size:
        piece = next(frames).buffer
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return whole
