"""Objects sent and received: large buffers in memory files, references counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilework.errors import DistError
from tilework.memory_files import MemoryFile
from tilework.rpc.message import NEW, NO_FILE, File, MessageKind, Ref, RpcMessage, encode
from tilework.rpc.payload import Payload, load
from tilework.rpc.references import Owned, References
from tilework.rpc.rref import RRef
from tilework.rpc.shared_buffers import LEAST_BYTES, SharedBufferPool, place
from tilework.rpc.transport import Transport


class Sender:
    """Sends the messages of a rank. Never blocks."""

    def __init__(
        self,
        rank: int,
        transport: Transport,
        shared_buffers: SharedBufferPool,
        probes: Sequence[MemoryFile],
    ) -> None:
        self._rank, self._transport = rank, transport
        self._shared_buffers, self._probes = shared_buffers, probes
        self.references = References(rank, self.notify, transport.wake)
        #: Ranks that can open this one's memory files.
        self.readers: set[int] = set()

    def pack(self, obj: Any, to: int, new: Ref | None = None) -> tuple[Payload, list[Ref]]:
        """Pickle ``obj`` for rank ``to``; return the payload, and the references in it, counted.

        ``new`` is a reference in ``obj`` to a value that ``to`` is to make, if there is any.

        Raises:
            TypeError: ``obj`` cannot be pickled.
            ValueError: A reference in ``obj`` is of an RPC that was shut down.
        """
        refs: list[Ref] = []

        def refer(rref: RRef[Any]) -> None:
            if rref.agent.references is not self.references:
                raise ValueError(f"{rref!r} is of an RPC that was shut down")
            if new is not None and rref.entry.id == new.id:
                refs.append(new)
            else:
                refs.append(self.references.outgoing(rref.entry, to))

        try:
            return Payload(obj, refer), refs
        except BaseException:
            self.references.unsent(refs, to)
            raise

    def post(
        self, kind: MessageKind, to: int, number: int, payload: Payload, refs: list[Ref]
    ) -> bool:
        """Send a message with a body to rank ``to``; False if that rank is gone."""
        parts = [payload.data, *payload.buffers]
        file, places = self._share(to, parts)
        sent = self._transport.send(to, encode(kind, self._rank, number, refs, parts, file, places))
        if not sent:
            self._shared_buffers.taken(file.number)
            self.references.unsent(refs, to)
        return sent

    def _share(self, to: int, parts: Sequence[memoryview]) -> tuple[File, list[int]]:
        """Write large parts to a memory file for ``to``; (the file, parts' offsets or -1)."""
        sizes = [part.nbytes for part in parts]
        large = [i for i, size in enumerate(sizes) if size >= LEAST_BYTES]
        if not large or to not in self.readers:
            return NO_FILE, []
        offsets = place([sizes[i] for i in large])
        shared = self._shared_buffers.share(to, [parts[i] for i in large], offsets)
        if shared is None:
            return NO_FILE, []
        places = [-1] * len(parts)
        for i, offset in zip(large, offsets, strict=True):
            places[i] = offset
        return File(*shared), places

    def notify(self, kind: MessageKind, to: int, number: int, refs: Sequence[Ref] = ()) -> None:
        """Send a message without a body to rank ``to``; do nothing if that rank is gone."""
        self._transport.send(to, encode(kind, self._rank, number, refs))

    def hello(self, to: int) -> bytes:
        """The first message to rank ``to``: can this rank open the memory files of ``to``?"""
        return b"".join(encode(MessageKind.HELLO, self._rank, int(self._probes[to].is_reachable())))


@dataclass(slots=True, eq=False)
class Received:
    """A message whose references are counted and whose memory file is mapped.

    The pickle is not read yet: reading it may run code that takes long or fails. If the message is
    dropped unread, the references and the file are released as usual.
    """

    message: RpcMessage
    """The message."""
    refs: list[RRef[Any]]
    """The references in the message."""
    file: Any
    """The contents of the memory file; the error if that cannot be opened; None without a file."""

    @property
    def lacks_memory(self) -> bool:
        """True if the memory file could not be opened."""
        return isinstance(self.file, OSError)

    def load(self) -> Any:
        """Unpickle and return the object that was sent."""
        if self.lacks_memory:
            raise DistError(f"cannot open the sender's memory: {self.file}")
        data, *buffers = self.message.load(self.file)
        return load(data, buffers, self.refs)

    def fail_new(self, error: BaseException) -> None:
        """If the message was to make a value on this rank, fail that value with ``error``."""
        for rref, ref in zip(self.refs, self.message.refs, strict=True):
            if ref.pin == NEW and isinstance(rref.entry, Owned):
                rref.entry.fail(error)
