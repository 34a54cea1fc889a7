"""Objects that move the data of a rank's end of a group, on a backend of torch or of MPI."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.torch.torch_calls import CALLS
from tilework.comm.forms import Operation

#: A tag that no message ever has.
_NEVER_SENT = 0x7FFF_FFFE


class Mover:
    """Moves a rank's data by ``backend``, an object of torch or alike; knows nothing of faults."""

    #: True if an operation ends on a thread that waits, False if on a device's streams.
    blocks = True

    def __init__(self, backend: Any, request: DistributedBackendOptions, name: str) -> None:
        self.name = name
        self.rank, self.size = request.group_rank, request.group_size
        self.backend = backend

    def call(self, operation: Operation) -> Any:
        """Begin an operation; return torch's Work, or an object with the same interface."""
        return CALLS[operation.kind](self.backend, operation, self.rank)

    def interrupt(self) -> None:
        """Make every wait fail."""
        backend = self.backend  # another thread may release it
        if backend is not None:
            backend.abort()

    def release(self) -> None:
        """Free connections and memory."""
        self.backend = None


class GlooMover(Mover):
    """A mover on torch's Gloo (or MPI), whose abort() ends nothing."""

    def interrupt(self) -> None:
        backend = self.backend
        if backend is not None:
            end_connections(backend, self.rank, self.size)


class StreamMover(Mover):
    """A mover whose operations run on a device's streams: no operation blocks a thread."""

    blocks = False

    def release(self) -> None:
        """End the communicators, whose threads would outlive the group."""
        backend = self.backend
        super().release()
        if backend is not None:
            backend.shutdown()


def end_connections(backend: Any, rank: int, size: int) -> None:
    """Make every wait on Gloo fail at both ends: only a wait that times out does this."""
    for peer in (other for other in range(size) if other != rank):
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            backend.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            # A wait on a closed connection fails without closing the other connections.
            if "timed out" in str(error).lower():
                return
