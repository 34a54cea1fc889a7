"""A rank's end of a hybrid group: collectives in shared memory and over a link to other hosts.

See :mod:`.hybrid_backend`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.backends.engine_protocol import Completion, Fault, FaultArgs
from tilework.comm.backends.hybrid.host_steps import STEPS
from tilework.comm.backends.hybrid.meeting_engine import COLLECTIVES, Connections, MeetingEngine
from tilework.comm.backends.rounding import Rounding
from tilework.comm.backends.shm.shm_group import ShmEngine
from tilework.comm.backends.tensor_memory import as_bytes
from tilework.comm.forms import Kind, Operation, Parts
from tilework.comm.reduce_op import AnyReduceOp


class HybridEngine(MeetingEngine):
    """A rank's end of a hybrid group: shared memory, and a link to other hosts."""

    name = "hybrid"
    _shm: ShmEngine

    def __init__(self, connections: Connections, rounding: Rounding | None = None) -> None:
        self.rounding = rounding
        #: The transfers of the running operation.
        self._in_flight: list[_Transfers] = []
        super().__init__(connections)

    def perform(self, operation: Operation) -> None:
        self.begin(operation)
        # Only the header carries the digest; the steps within a host do not.
        with torch.inference_mode(), provenance_digest.carrying(0):
            step = STEPS[operation.kind](self, operation)
            try:
                next(step)
                self.meet(operation)
                next(step, None)
            finally:
                for transfers in self._in_flight:
                    transfers.forget()
                self._in_flight.clear()

    def is_moving(self) -> bool:
        return bool(self._in_flight)

    def local(
        self,
        kind: Kind,
        inputs: Parts,
        outputs: Parts,
        reduce_op: AnyReduceOp | None = None,
        root: int = 0,
    ) -> None:
        with self.local_faults():
            self._shm.run(Operation(kind, inputs, outputs, reduce_op, root, self.left_seconds()))

    def transfers(self) -> _Transfers:
        self._in_flight.append(_Transfers(self))
        return self._in_flight[-1]

    def _message(
        self, way: str, tensor: Tensor, rank: int, number: int, timeout: float
    ) -> Completion:
        if rank not in self.hosts.local:
            return super()._message(way, tensor, rank, number, timeout)
        move = self._shm.isend if way == "send" else self._shm.irecv
        with self.local_faults():
            completion = move(tensor, self.hosts.local.index(rank), number, timeout)
        completion.add_done_callback(lambda: self._shm.let_go(tensor))
        return completion

    def statistics(self) -> dict[str, int]:
        return {
            **super().statistics(),
            "hosts": len(self.hosts.ranks),
            "link_bytes": self._sent_bytes,
            "segment_bytes": self._shm.statistics()["segment_bytes"],
        }


def _wait(work: Any, memory: Tensor, limit: timedelta) -> None:
    """Wait for Gloo's ``work``. ``memory`` is passed to keep it alive: Gloo may use it."""
    work.wait(limit)


class _Transfers:
    """Tensors in flight between hosts. Failures are values: tracebacks keep connections."""

    def __init__(self, engine: HybridEngine) -> None:
        self._engine = engine
        #: (rank at the other end, torch's Work, the memory that it uses)
        self._works: list[tuple[int, Any, Tensor]] = []

    def receive(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        _raise_first(self._begin("recv", *pair) for pair in tensors)

    def send(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        _raise_first(self._begin("send", *pair) for pair in tensors)

    def wait(self) -> None:
        """Block until all transfers are done; raise Fault if one fails, or at the limit."""
        _raise_first(self._end(*transfer) for transfer in self._works)

    def forget(self) -> None:
        """Drop torch's Works, also those of transfers that are still in flight."""
        self._works.clear()

    def _begin(self, way: str, rank: int, tensor: Tensor) -> FaultArgs | None:
        if not tensor.numel():
            return None
        memory = as_bytes(tensor)

        def begin() -> None:
            work = self._engine.start_transfer(way, memory, rank, COLLECTIVES)
            self._works.append((rank, work, memory))

        return self._engine.attempt(begin, rank)

    def _end(self, rank: int, work: Any, memory: Tensor) -> FaultArgs | None:
        limit = timedelta(seconds=self._engine.left_seconds())
        return self._engine.await_transfer(partial(_wait, work, memory, limit), rank)


def _raise_first(faults: Iterable[FaultArgs | None]) -> None:
    for fault in faults:
        if fault is not None:
            raise Fault(*fault)
