"""Messages and receives of one rank, paired in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.engine_protocol import FaultArgs
from tilework.comm.backends.operation_header import ANY

#: As the source of a receive: whichever rank sends first.
ANY_SOURCE = -1


class MatchedMessage(Protocol):
    """A message for this rank that has arrived, or was announced."""

    source: int
    tag: int


@dataclass(slots=True, eq=False)
class Receive:
    """A receive that waits for a message."""

    #: The group rank of the sender, or ANY_SOURCE.
    source: int
    #: The tag of the message.
    tag: int
    #: The tensor to write the message to.
    tensor: Tensor
    #: The limit in seconds, for the error.
    timeout: float
    #: The time when the limit is over, on the clock of time.monotonic().
    deadline: float
    #: Completed when the message has come, or the receive has failed.
    completion: PythonCompletion
    #: The label of the given dtype and shape.
    label: int = 0

    def timeout_fault(self) -> FaultArgs:
        """The fault of a receive whose time is up."""
        awaited = () if self.source == ANY_SOURCE else (self.source,)
        return ("timeout", awaited, f"waited {self.timeout:.1f} s for a message")


_Message = TypeVar("_Message", bound=MatchedMessage)


class MessageMatcher(Generic[_Message]):
    """The unmatched messages for one rank, and the rank's unmatched receives. For any thread.

    Receives are paired in the order posted, with messages in the order added. Without ``by_tag``,
    tags are ignored: messages between two ranks are in order.
    """

    def __init__(self, by_tag: bool = True) -> None:
        self._by_tag = by_tag
        self._lock = threading.Lock()
        self._messages: list[_Message] = []
        self._receives: list[Receive] = []

    def add_message(self, message: _Message) -> Receive | None:
        """The first receive that fits the message; None keeps the message for a later receive."""
        with self._lock:
            receive = next((r for r in self._receives if self._fits(message, r)), None)
            if receive is None:
                self._messages.append(message)
            else:
                self._receives.remove(receive)
            return receive

    def add_receive(self, receive: Receive) -> _Message | None:
        """The first message that fits the receive; None keeps the receive for a later message."""
        with self._lock:
            message = next((m for m in self._messages if self._fits(m, receive)), None)
            if message is None:
                self._receives.append(receive)
            else:
                self._messages.remove(message)
            return message

    def _fits(self, message: MatchedMessage, receive: Receive) -> bool:
        fits = receive.source in (ANY_SOURCE, message.source)
        return fits and (receive.tag == message.tag or not self._by_tag)

    def has_receives(self) -> bool:
        """True if a receive waits for a message."""
        return bool(self._receives)

    def end_receives(self, fault_of: Callable[[Receive], FaultArgs | None]) -> bool:
        """End the receives that have a fault; True if others still wait for a message."""
        with self._lock:
            waiting = list(self._receives)
        for receive in waiting:
            fault = fault_of(receive)
            if fault is not None:
                with self._lock:
                    if receive not in self._receives:
                        continue
                    self._receives.remove(receive)
                receive.completion.complete(fault)
        return self.has_receives()


def labels_fit(label: int, receive: Receive) -> bool:
    """True if a message with ``label`` has the dtype and shape of ``receive``, as far as known."""
    known = ANY not in (label, receive.label) and receive.tensor.numel() > 0
    return label == receive.label or not known
