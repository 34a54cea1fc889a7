"""Messages with a body, of which everything was taken that must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilework.errors import DistError
from tilework.rpc.entries import Owned
from tilework.rpc.message import NEW, Message
from tilework.rpc.payload import load
from tilework.rpc.rref import RRef


@dataclass(slots=True, eq=False)
class Arrived:
    """A message whose references are counted and whose memory file is mapped.

    Reading the pickle may run code that takes its time, or fails; dropping it loses nothing.
    """

    message: Message
    refs: list[RRef[Any]]
    file: Any
    """What the memory file holds; why it cannot be opened."""

    @property
    def lacks_memory(self) -> bool:
        """Whether its memory file could not be opened."""
        return isinstance(self.file, OSError)

    def load(self) -> Any:
        """The object that was sent."""
        if self.lacks_memory:
            raise DistError(f"cannot open the sender's memory: {self.file}")
        data, *buffers = self.message.load(self.file)
        return load(data, buffers, self.refs)

    def fail_new(self, error: BaseException) -> None:
        """The value that it was to make will not come."""
        for rref, ref in zip(self.refs, self.message.refs, strict=True):
            if ref.pin == NEW and isinstance(rref.entry, Owned):
                rref.entry.fail(error)
