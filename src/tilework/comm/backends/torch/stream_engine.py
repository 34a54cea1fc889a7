"""The engine of a group whose data moves on a device's streams (nccl, ucc), beside the comparison.

A call returns at once, and data does not wait for the other ranks' headers. Who waits for a call
compares it, and those before it. If nobody waits, a thread does so after a moment.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.engine_protocol import Completion, Fault, FaultArgs
from tilework.comm.backends.hybrid.meeting_engine import Connections
from tilework.comm.backends.python_engine import OwnCompletion, Waits
from tilework.comm.backends.tensor_memory import as_bytes
from tilework.comm.backends.torch.compared_engine import OFF, ComparedEngine
from tilework.comm.forms import Operation

#: Seconds from a call until the thread compares: a burst of calls wakes the thread once.
_PATIENCE = 0.001
#: Seconds that ``close`` waits for the thread.
_CLOSE_SECONDS = 5.0


class StreamCompletion(OwnCompletion):
    """The completion of an operation on a stream: done if compared, and data has moved."""

    def __init__(self, engine: StreamEngine, work: Any, waits: Waits) -> None:
        super().__init__(waits)
        self._engine, self._work = engine, work

    def done(self) -> bool:
        if not super().done():
            return False
        if self._work is not None and self._fault is None:
            if not self._work.is_completed():
                return False
            self._fault, self._work = self._engine.failure_of(lambda: None), None
        return True

    def wait(self, timeout: float) -> bool:
        if timeout < 0 and not super().done():
            self._begin()
            try:
                self._engine.compare_calls(self)
            finally:
                self._end()
        if not super().wait(timeout):
            return False
        work = self._work
        if work is not None:  # each wait is for the stream that is current then
            self._fault = self._engine.failure_of(work.wait)
        return super().wait(timeout)

    def is_compared(self) -> bool:
        """True once the calls of all ranks were compared."""
        return super().done()


class StreamEngine(ComparedEngine):
    """A rank's end of a group whose data does not wait for the comparison."""

    matches_tags = False

    def __init__(self, amount: str, connections: Connections) -> None:
        #: The calls that were not compared yet.
        self._calls: deque[tuple[Operation, PythonCompletion]] = deque()
        self._comparing = threading.Lock()
        self._called = threading.Event()
        self._watcher: threading.Thread | None = None
        super().__init__(amount, connections)

    def perform(self, operation: Operation) -> None:
        self.begin(operation)
        self.compare(operation)

    def run(self, operation: Operation) -> None:
        self.submit(operation).wait(-1.0)

    def submit(self, operation: Operation) -> PythonCompletion:
        """Start ``operation``. Waits are for the comparison, and have the stream wait for data."""
        with self._lock:
            self._entered += 1
            number = self._entered
        self.check_open()
        waits = self.waits_of(operation, number)
        if self.refusal(operation):
            refused = StreamCompletion(self, None, waits)
            self._note_call(operation, refused)
            refused.wait(-1.0)
            self.refuse(operation)
        completion = self._started(partial(self.mover.call, operation), waits)
        self._note_call(operation, completion)
        return completion

    def _note_call(self, operation: Operation, completion: PythonCompletion) -> None:
        if self.amount == OFF:
            completion.complete()
            return
        self._calls.append((operation, completion))
        if not self._called.is_set():
            self._called.set()
            if self._watcher is None:
                name = f"tilework-compare-{self.rank}"
                self._watcher = threading.Thread(target=self._watch, name=name, daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        """Compare calls that nobody waits for."""
        while self._called.wait():
            time.sleep(_PATIENCE)
            self._called.clear()
            if self.closed:  # asked after the call to look is taken
                return
            with self._comparing:
                self._compare_until(None)

    def compare_calls(self, completion: StreamCompletion) -> None:
        """Compare the calls up to that of ``completion``, unless another thread does so."""
        if self._comparing.acquire(blocking=False):
            try:
                self._compare_until(completion)
            finally:
                self._comparing.release()

    def _compare_until(self, last: StreamCompletion | None) -> None:
        while self._calls and not (last is not None and last.is_compared()):
            operation, completion = self._calls.popleft()
            fault: FaultArgs | None = ("aborted", (self.rank,), "interrupted")
            try:
                fault = self.fault_of(partial(self.perform, operation))
            finally:
                self._failed = self._failed or fault
                completion.complete(fault)

    def failure_of(self, act: Callable[[], object]) -> FaultArgs | None:
        """Run ``act``, a call into torch's engine; return the fault, or None."""
        try:
            act()
            self.check_open()
        except Fault as fault:
            return fault.args
        except RuntimeError as error:
            why = self.explained(error)
            return why.args if isinstance(why, Fault) else ("aborted", (self.rank,), str(why))
        return None

    def _started(self, start: Callable[[], Any], waits: Waits) -> StreamCompletion:
        try:
            return StreamCompletion(self, start(), waits)
        except RuntimeError as error:
            raise self.explained(error) from error

    # -- messages ------------------------------------------------------------------------

    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        completion = self._move_message("send", tensor, dst, tag)
        self._messages.announce(tensor, dst, tag, label)
        completion.complete()  # the receiver compares
        return completion

    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        if src < 0:
            raise NotImplementedError(
                f"backend {self.name!r} has no receive from any rank: name the source"
            )
        completion = self._move_message("recv", tensor, src, tag)
        return self._messages.receive(tensor, src, tag, timeout, label, completion)

    def _move_message(self, way: str, tensor: Tensor, peer: int, tag: int) -> StreamCompletion:
        self.check_open()
        if not tensor.nbytes:
            return StreamCompletion(self, None, _NO_WAITS)
        start = getattr(self.mover.backend, way)
        return self._started(lambda: start([as_bytes(tensor)], peer, tag), _NO_WAITS)

    def fetch(self, tensor: Tensor, rank: int, number: int, timeout: float) -> Completion:
        arriving = PythonCompletion()  # the engine moves the data already
        arriving.complete()
        return arriving

    def sees_messages(self) -> bool:
        return False  # a message that was sent may still be queued on a stream

    # -- the end -------------------------------------------------------------------------

    def _give_up(self, number: int) -> None:
        if not self.closed:
            ranks = ",".join(str(self._global_ranks[rank]) for rank in self._died)
            self.abort("peer_lost", f"{ranks};its process ended")

    def may_wait(self) -> bool:
        return self.aborted() is not None

    def drain(self) -> bool:
        if not self.closed:
            with self._comparing:
                self._compare_until(None)
        return super().drain()

    def close(self) -> None:
        super().close()
        self._called.set()
        if self._watcher not in (None, threading.current_thread()):
            self._watcher.join(_CLOSE_SECONDS)


#: Messages report their waits otherwise.
_NO_WAITS: Waits = (lambda: None, lambda: None)
