"""Engines that compare nothing by themselves, compared: headers travel beside the data.

The ranks meet before an engine that blocks (gloo, mpi) moves data, as those of ``hybrid`` do. An
engine that runs on a device's streams (nccl, ucc) gets an operation at once, and the engine's
thread compares; :meth:`ComparedEngine.submit` says what a wait means then.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch import Tensor

from tilework.comm.backend import DistributedBackendOptions, core_error
from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.engine_protocol import Completion, Fault, FaultArgs
from tilework.comm.backends.hybrid.host_ranks import Hosts
from tilework.comm.backends.hybrid.meeting_engine import (
    ASK_SECONDS,
    Connections,
    Link,
    MeetingEngine,
    connect_hosts,
)
from tilework.comm.backends.python_engine import OwnCompletion, Waits, poll
from tilework.comm.backends.tensor_memory import as_bytes
from tilework.comm.backends.threads.threads_collectives import scan_gathered, scan_source
from tilework.comm.backends.torch.movers import Mover
from tilework.comm.backends.torch.torch_calls import said_by
from tilework.comm.forms import SCANS, Operation
from tilework.comm.waits import by_rank
from tilework.errors import DistBackendError

#: The environment variable for the amount of comparison, and the amounts.
VARIABLE: Final = "TILEWORK_COMPARE"
_ALL, _FIRST, _OFF = _AMOUNTS = ("all", "first", "off")
#: With "first", contents are compared in so many first calls, and in each call with a multiple of
#: this number.
_FIRST_CALLS = 100
#: The format of headers; bumped with every change.
_FORMAT = 1
#: The time between looks of a thread that waits for data.
_LOOK = timedelta(seconds=0.1)
#: Seconds that explaining a failure takes at most.
EXPLAIN_SECONDS = 2.0
#: Words in errors of torch's engines: of a late rank, and of closed connections.
_LATE = ("timed out",)
#: Messages report their waits otherwise.
_NO_WAITS: Waits = (lambda: None, lambda: None)
_LOST = ("connection closed", "connection reset", "broken pipe", "pair closure", "aborted")


class ComparedEngine(MeetingEngine):
    """A rank's end of a group on an engine that compares nothing by itself.

    Args:
        amount: What is compared: "all", "first" or "off".
    """

    refusals: tuple[type[Exception], ...] = (NotImplementedError,)
    watches = True

    def __init__(
        self,
        mover: Mover,
        amount: str,
        hosts: Hosts,
        global_ranks: Sequence[int],
        connections: Connections,
    ) -> None:
        self.name, self.mover, self._amount = mover.name, mover, amount
        self.matches_tags = mover.blocks
        self._moving = False
        #: Why the engine lacks an operation; "" if it has it. All ranks ask once they have agreed.
        self.refusal: Callable[[Operation], str] = lambda operation: ""
        super().__init__(hosts, global_ranks, connections)

    def check_open(self) -> None:
        if self._failed is not None:  # the abort that follows says more
            poll(lambda: self.closed or self.aborted() is not None, EXPLAIN_SECONDS)
        super().check_open()

    def perform(self, operation: Operation) -> None:
        self.begin(operation)
        if self._amount != _OFF:
            count = self._performed
            if self._amount == _FIRST and count > _FIRST_CALLS and count % _FIRST_CALLS:
                operation.provenance = 0
            self.meet(operation)
        if not self.mover.blocks:
            return
        self._refuse(operation)
        self._moving = True
        try:
            self._move(operation)
        except RuntimeError as error:
            raise self._explained(error) from error
        finally:
            self._moving = False

    def _refuse(self, operation: Operation) -> None:
        refusal = self.refusal(operation)
        if refusal:
            raise NotImplementedError(refusal)

    def _move(self, operation: Operation) -> None:
        if operation.kind not in SCANS:
            self._await(self.mover.call(operation))
            return
        source = scan_source(operation)
        gathered = source.new_empty((self.size, source.numel()))
        gather = Operation("all_gather", [source], gathered, timeout=operation.timeout)
        self._await(self.mover.call(gather))
        scan_gathered(operation, self.rank, gathered)

    def _await(self, work: Any) -> None:
        """Block until ``work`` is done. Between looks the thread sees a rank that died: the engine
        may not.
        """
        begun = time.monotonic()
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError as error:
                if not _is_late(error) or time.monotonic() > self._deadline:
                    raise
            self.check_open()
            by_rank.look_if_long(begun)
            died = [*self._died.values()]
            if died and time.monotonic() - min(died) > 2 * ASK_SECONDS:
                raise Fault("peer_lost", tuple(self._died), "its process ended")

    def _explained(self, error: RuntimeError) -> Exception:
        if isinstance(error, (DistBackendError, NotImplementedError)) or self.closed:
            return error
        if _is_late(error) or any(words in str(error).lower() for words in _LOST):
            return Fault(*self._why(error, -1))
        return DistBackendError(f"{self.name}: {said_by(str(error))}")

    def is_moving(self) -> bool:
        return self._moving

    # -- engines on streams --------------------------------------------------------------

    def run(self, operation: Operation) -> None:
        if self.mover.blocks:
            super().run(operation)
        else:
            self.submit(operation).wait(-1.0)

    def submit(self, operation: Operation) -> PythonCompletion:
        """Start ``operation``. On an engine with streams data moves at once, and the engine's
        thread compares; a wait is over when the calls of all ranks were compared, and the current
        stream waits for the data.
        """
        if self.mover.blocks:
            return super().submit(operation)
        with self._lock:
            self._entered += 1
            number = self._entered
        self.check_open()
        waits = self.waits_of(operation, number)
        if self.refusal(operation):
            refused = OwnCompletion(waits)
            self._compare(operation, refused)
            refused.wait(-1.0)
            self._refuse(operation)
        completion = self._started(lambda: self.mover.call(operation), waits)
        self._compare(operation, completion)
        return completion

    def _compare(self, operation: Operation, completion: PythonCompletion) -> None:
        if self._amount == _OFF:
            completion.complete()
        else:
            self.enqueue(operation, completion)

    def _started(self, start: Callable[[], Any], waits: Waits = _NO_WAITS) -> StreamCompletion:
        try:
            return StreamCompletion(self, start(), waits)
        except RuntimeError as error:
            raise self._explained(error) from error

    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        if self.mover.blocks:
            return super().isend(tensor, dst, tag, timeout, label)
        self.check_open()
        memory = [as_bytes(tensor)]
        completion = self._started(
            lambda: self.mover.backend.send(memory, dst, tag) if tensor.nbytes else None
        )
        self._messages.announce(tensor, dst, tag, label)
        completion.complete()  # the receiver compares
        return completion

    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        if self.mover.blocks:
            return super().irecv(tensor, src, tag, timeout, label)
        if src < 0:
            raise NotImplementedError(f"backend {self.name!r} receives from a rank that is named")
        self.check_open()
        memory = [as_bytes(tensor)]
        completion = self._started(
            lambda: self.mover.backend.recv(memory, src, tag) if tensor.nbytes else None
        )
        return self._messages.receive(tensor, src, tag, timeout, label, completion)

    def fetch(self, tensor: Tensor, rank: int, number: int, timeout: float) -> Completion:
        if self.mover.blocks:
            return super().fetch(tensor, rank, number, timeout)
        arriving = PythonCompletion()
        arriving.complete()
        return arriving

    def failure_of(self, act: Callable[[], object]) -> FaultArgs | None:
        """Run ``act``, a call into torch's engine; return the fault, or None."""
        try:
            act()
            self.check_open()
        except Fault as fault:
            return fault.args
        except RuntimeError as error:
            why = self._explained(error)
            return why.args if isinstance(why, Fault) else ("aborted", (self.rank,), str(why))
        return None

    def _give_up(self, number: int) -> None:
        if self.mover.blocks:
            super()._give_up(number)
        elif not self.closed:
            ranks = ",".join(str(self._global_ranks[rank]) for rank in self._died)
            self.abort("peer_lost", f"{ranks};its process ended")

    # -- the end -------------------------------------------------------------------------

    def drain(self) -> bool:
        """Wait until the calls so far were compared, on an engine with streams. True if one failed:
        the explanation follows.
        """
        if not (self.mover.blocks or self.closed) and self._queued:
            with contextlib.suppress(Fault):
                self._last_queued.wait(-1.0)
        return self._failed is not None

    def may_wait(self) -> bool:
        return bool(self._waits.running)

    def release(self) -> None:
        super().release()
        self.mover.release()


class StreamCompletion(OwnCompletion):
    """The completion of an operation on a device's streams: done if it was compared, and if the
    data has moved.
    """

    def __init__(self, engine: ComparedEngine, work: Any, waits: Waits) -> None:
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
        if not super().wait(timeout):
            return False
        work = self._work
        if work is not None:  # each wait is for the stream that is current then
            self._fault = self._engine.failure_of(work.wait)
        return super().wait(timeout)


def _is_late(error: RuntimeError) -> bool:
    return any(words in str(error).lower() for words in _LATE)


def compared(mover: Mover, request: DistributedBackendOptions) -> ComparedEngine:
    """The engine of a group whose data ``mover`` moves. Collective; blocks until all ranks came.

    Raises:
        ValueError: ``TILEWORK_COMPARE`` is none of the amounts.
        DistBackendError: Ranks have different amounts, or cannot be reached.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(mover.release)
        amount = _agreed_amount(request)
        size, me = request.group_size, request.group_rank
        hosts, shared = Hosts(tuple((rank,) for rank in range(size)), me), None
        if size > 1 and amount != _OFF and core_error() is None:
            from tilework.comm.backends.hybrid.hosts import share_memory

            hosts, group = share_memory(request)
            undo.callback(group.close)
            shared = group.engine
            if group.registers is not None:
                group.registers.leave(group.rank())
        control, leaders = connect_hosts(request, hosts, undo)
        link = Link(mover.name, mover.backend, mover.interrupt)
        undo.pop_all()
    connections = Connections(control, leaders, link, shared)
    return ComparedEngine(mover, amount, hosts, request.global_ranks_in_group, connections)


def _agreed_amount(request: DistributedBackendOptions) -> str:
    amount = os.environ.get(VARIABLE, _ALL).lower()
    if amount not in _AMOUNTS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(_AMOUNTS)}, got {amount!r}")
    store, ranks = request.store, range(request.group_size)
    store.set(f"compare/{request.group_rank}", f"{amount}, headers of format {_FORMAT}")
    texts = [text.decode() for text in store.multi_get([f"compare/{rank}" for rank in ranks])]
    if len({*texts}) > 1:
        values = "; ".join(
            f"rank {rank} has {text}"
            for rank, text in zip(request.global_ranks_in_group, texts, strict=True)
        )
        raise DistBackendError(
            f"ranks of group {request.group_id!r} would compare different things: {values}. Give "
            f"{VARIABLE} the same value on all ranks, and install one version of tilework"
        )
    return amount
