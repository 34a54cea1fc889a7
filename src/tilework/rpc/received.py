"""Received messages: references counted, memory mapped, the pickle not read yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilework.errors import DistError
from tilework.rpc.entries import Owned
from tilework.rpc.message import NEW, RpcMessage
from tilework.rpc.payload import load
from tilework.rpc.rref import RRef


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
