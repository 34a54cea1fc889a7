"""The base of engines in Python: operations run one at a time, in the order of the calls."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.engine_protocol import Abort, Fault, FaultArgs
from tilework.comm.backends.tensor_memory import unseen
from tilework.comm.flight.history import named
from tilework.comm.forms import Operation

#: Seconds that ``close`` waits for the operation in flight to end.
_CLOSE_SECONDS = 5.0


class PythonEngine(ABC):
    """Runs operations one at a time: blocking calls on the caller's thread, others on a thread."""

    fault_type: type[Exception] = Fault
    refusals: tuple[type[Exception], ...] = ()
    takes_addresses = False
    watches = True

    def __init__(self, rank: int, global_ranks: Sequence[int]) -> None:
        #: The thread that made the group.
        self.owner = threading.current_thread()
        #: The number of the operation that the owner waits in; 0: none.
        self._waits_in = 0
        self.rank = rank
        self.size = len(global_ranks)
        self._global_ranks = global_ranks
        self.closed = False
        self._abortion: Abort | None = None
        #: The fault of the first failed operation; no operation starts after it.
        self._failed: FaultArgs | None = None
        self._lock = threading.Lock()
        self._entered = 0
        self._queued = 0
        #: The completion of the operation that was queued last.
        self._last_queued = PythonCompletion()
        self._queue: SimpleQueue[tuple[Operation, PythonCompletion] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None

    @abstractmethod
    def perform(self, operation: Operation) -> None:
        """Run ``operation``, and block until this rank's part is done. Raise Fault if it fails."""

    @abstractmethod
    def announce_abort(self, kind: str, text: str) -> None:
        """Report to the other ranks that this rank aborts. Never blocks for long."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make this rank's operations in flight fail."""

    @abstractmethod
    def release(self) -> None:
        """Free the engine's connections and memory. Called once, by :meth:`close`."""

    # -- operations ----------------------------------------------------------------------

    def run(self, operation: Operation) -> None:
        with self._lock:
            self._entered += 1
            number = self._entered
            last = self._last_queued if self._queued else None
        self.check_open()  # without the lock, which noting an abort takes
        if last is not None:
            with suppress(Fault):  # the check raises why this operation cannot start
                last.wait(-1.0)
            self.check_open()
        self._note_wait(number, operation.title or operation.kind)
        try:
            _perform(self, operation)
        except Fault as fault:
            self._failed = fault.args
            raise
        finally:
            self._note_wait(0)

    def submit(self, operation: Operation) -> PythonCompletion:
        with self._lock:
            self._entered += 1
            number = self._entered
        self.check_open()
        return self._enqueue(operation, number)

    def sees_messages(self) -> bool:
        return True

    def is_owner(self) -> bool:
        return threading.current_thread() is self.owner

    def _note_wait(self, number: int, name: str = "") -> None:
        """Note and publish that the owner waits in operation ``number``; 0: that it does not."""
        if self.is_owner():
            self._waits_in = number
            if number:
                self.publish_wait(number, name)

    def publish_wait(self, number: int, name: str) -> None:  # noqa: B027
        """Report to the other ranks that this rank's own thread waits in an operation."""

    def waiting(self) -> tuple[int, Sequence[int]] | None:
        if not self.is_owner() or not self._waits_in:
            return None
        return self._waits_in, [rank for rank in range(self.size) if rank != self.rank]

    def waits_of(self, operation: Operation, number: int) -> Waits:
        """Functions that note the begin and the end of a wait for an operation."""
        begin = partial(self._note_wait, number, operation.title or operation.kind)
        return begin, partial(self._note_wait, 0)

    def _enqueue(self, operation: Operation, number: int) -> PythonCompletion:
        completion = OwnCompletion(self.waits_of(operation, number))
        with self._lock:
            if self.closed:  # since the check; the thread takes nothing more
                raise Fault("closed", (self.rank,), "")
            self._queued += 1
            self._last_queued = completion
            if self._worker is None:
                name = f"tilework-engine-{self.rank}"
                self._worker = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    self._worker.start()
                except KeyError as error:
                    # If a signal handler raises in start(), CPython raises another error over
                    # the handler's.
                    raise (error.__context__ or error) from None
            self._queue.put((operation, completion))
        return completion

    def _work(self) -> None:
        for operation, completion in iter(self._queue.get, None):
            fault = self.fault_of(partial(self.perform, operation))
            self._failed = self._failed or fault
            with self._lock:
                self._queued -= 1
            completion.complete(fault)
            del operation, completion  # not kept until the next one comes

    def fault_of(self, act: Callable[[], object]) -> FaultArgs | None:
        """The fault of ``act``, or None; an exception other than Fault aborts the group."""
        try:
            self.check_open()
            act()
        except Fault as fault:
            return fault.args
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.abort("peer_lost", f"{self._global_ranks[self.rank]};{why}")
            return ("aborted", (self.rank,), why)
        return None

    def let_go(self, buffers: object) -> None:  # noqa: B027
        """Do nothing: this engine holds no buffers of finished operations."""

    def sequence(self) -> int:
        return self._entered

    def statistics(self) -> dict[str, int]:
        return {"operations": self._entered}

    # -- the end -------------------------------------------------------------------------

    def late_fault(self, late: Sequence[int], limit: float) -> Fault:
        """The fault of an operation that ranks ``late`` did not enter."""
        who = named([self._global_ranks[rank] for rank in late]) if late else "a rank"
        text = f"{who} did not enter the operation within {limit:g} s"
        return Fault("timeout", tuple(late), text)

    def check_open(self) -> None:
        """Raise Fault if this rank left, if the group was aborted, or if an operation failed."""
        if self.closed:
            raise Fault("closed", (self.rank,), "")
        abortion = self.aborted()
        if abortion is not None:
            raise Fault("aborted", (abortion[0],), abortion[2])
        if self._failed is not None:
            raise Fault(*self._failed)

    def abort(self, kind: str, text: str) -> None:
        if self.note_abort(self.rank, kind, text):
            self.announce_abort(kind, text)
            self.interrupt()

    def note_abort(self, by: int, kind: str, text: str) -> bool:
        """Record that rank ``by`` has aborted the group; False if an abort was known before."""
        with self._lock:
            if self._abortion is not None:
                return False
            self._abortion = (by, kind, text)
        return True

    def aborted(self) -> Abort | None:
        return self._abortion

    def close(self) -> None:
        """Leave the group; operations in flight fail."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            busy, worker = self._queued > 0, self._worker
        if busy:
            self.interrupt()
        if worker is not None:
            self._queue.put(None)
            if worker is not threading.current_thread():
                worker.join(_CLOSE_SECONDS)
        self.release()


@unseen
def _perform(engine: PythonEngine, operation: Operation) -> None:
    engine.perform(operation)


#: Functions that note the begin and the end of a wait.
Waits = tuple[Callable[[], None], Callable[[], None]]


class OwnCompletion(PythonCompletion):
    """The completion of a collective, which reports waits without a limit."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._begin, self._end = waits

    def wait(self, timeout: float) -> bool:
        if timeout >= 0 or self.done():
            return super().wait(timeout)
        self._begin()
        try:
            return super().wait(timeout)
        finally:
            self._end()


def poll(ready: Callable[[], bool], seconds: float) -> bool:
    """True once ``ready()`` is True; False after ``seconds``. Sleeps: for error paths only."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
