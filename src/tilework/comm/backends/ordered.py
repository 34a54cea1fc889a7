"""Engines written in Python: operations run one at a time, in the order of the calls."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from tilework.comm.backends.engine_protocol import Fault, Operation

FaultArgs = tuple[str, tuple[int, ...], str]
#: How long closing waits for the operation under way to notice.
_CLOSE_SECONDS = 5.0


class Errand:
    """A Ticket: something that ends once, with or without a fault."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = False
        self._fault: FaultArgs | None = None
        self._callbacks: list[Callable[[], None]] = []
        #: For a receive: where the message came from.
        self.found_source = -1

    def complete(self, fault: FaultArgs | None = None) -> None:
        """End it; only the first call counts."""
        with self._changed:
            if self._done:
                return
            self._done, self._fault = True, fault
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def done(self) -> bool:
        return self._done

    def fault(self) -> FaultArgs | None:
        return self._fault

    def source(self) -> int:
        return self.found_source

    def wait(self, timeout: float) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, None if timeout < 0 else timeout):
                return False
        if self._fault is not None:
            raise Fault(*self._fault)
        return True

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        with self._changed:
            if not self._done:
                self._callbacks.append(fn)
                return
        fn()


class OrderedEngine(ABC):
    """An engine that runs blocking operations: at once, or on its thread if asynchronous.

    A subclass supplies :meth:`perform`, :meth:`tell` and :meth:`interrupt`.
    """

    fault_type: type[Exception] = Fault

    def __init__(self, rank: int, global_ranks: Sequence[int]) -> None:
        self.rank = rank
        self.size = len(global_ranks)
        self._global_ranks = global_ranks
        self.closed = False
        #: (rank, kind, text) of the first abort that this rank heard of.
        self.abortion: tuple[int, str, str] | None = None
        #: What the first operation failed with that failed: none starts after it.
        self._failed: FaultArgs | None = None
        self._lock = threading.Lock()
        self._entered = 0
        self._queued = 0
        self._queue: SimpleQueue[tuple[Operation, Errand] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None

    @abstractmethod
    def perform(self, operation: Operation) -> None:
        """Run ``operation`` and block until this rank is done; raise Fault."""

    @abstractmethod
    def tell(self, kind: str, text: str) -> None:
        """Let the other ranks know of an abort. Never blocks for long."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make what is under way on this rank fail."""

    def run(self, operation: Operation) -> None:
        with self._lock:
            self.check_open()
            self._entered += 1
            alone = self._queued == 0
        if alone:
            try:
                self.perform(operation)
            except Fault as fault:
                self._failed = fault.args
                raise
        else:
            self._enqueue(operation).wait(-1.0)

    def submit(self, operation: Operation) -> Errand:
        with self._lock:
            self.check_open()
            self._entered += 1
        return self._enqueue(operation)

    def _enqueue(self, operation: Operation) -> Errand:
        errand = Errand()
        with self._lock:
            self._queued += 1
            if self._worker is None:
                name = f"tilework-engine-{self.rank}"
                self._worker = threading.Thread(target=self._work, name=name, daemon=True)
                self._worker.start()
        self._queue.put((operation, errand))
        return errand

    def _work(self) -> None:
        for operation, errand in iter(self._queue.get, None):
            fault = self.outcome(partial(self.perform, operation))
            if fault is not None:
                self._fail(operation, fault)
            with self._lock:
                self._queued -= 1
            errand.complete(fault)

    def _fail(self, operation: Operation, fault: FaultArgs) -> None:
        """Nobody may be waiting for it to ask why: tell the others at once."""
        self._failed = self._failed or fault
        kind, ranks, detail = fault
        if kind in ("peer_lost", "timeout"):  # of a mismatch all know by themselves
            at_fault = ",".join(str(self._global_ranks[r]) for r in ranks)
            self.abort(kind, f"{at_fault};{operation.describe()}: {detail}")

    def outcome(self, act: Callable[[], object]) -> FaultArgs | None:
        """Run ``act`` on a thread of this engine; return its fault."""
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

    def check_open(self) -> None:
        """Raise Fault if this rank left, or if the group was aborted."""
        if self.closed:
            raise Fault("closed", (self.rank,), "")
        if self.abortion is not None:
            raise Fault("aborted", (self.abortion[0],), self.abortion[2])
        if self._failed is not None:
            raise Fault(*self._failed)

    def sequence(self) -> int:
        return self._entered

    def abort(self, kind: str, text: str) -> None:
        if self.hear_abort(self.rank, kind, text):
            self.tell(kind, text)
            self.interrupt()

    def hear_abort(self, by: int, kind: str, text: str) -> bool:
        """Remember an abort; return whether it is the first."""
        with self._lock:
            if self.abortion is not None:
                return False
            self.abortion = (by, kind, text)
        return True

    def aborted(self) -> tuple[int, str, str] | None:
        return self.abortion

    def close(self) -> None:
        """Leave the group: what is still under way fails."""
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

    @abstractmethod
    def release(self) -> None:
        """Free what the engine holds."""

    def statistics(self) -> dict[str, int]:
        return {"operations": self._entered}


def until(ready: Callable[[], bool], seconds: float) -> bool:
    """Look at ``ready`` now and then until it holds or time is up; for the way to an error."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
