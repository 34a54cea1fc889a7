"""Engines that compare nothing by themselves, compared: headers travel beside the data.

The ranks meet before data moves, as those of ``hybrid`` do. :mod:`.stream_engine` is about engines
that do not block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from tilework.comm.backends.engine_protocol import Fault
from tilework.comm.backends.hybrid.meeting_engine import ASK_SECONDS, Connections, MeetingEngine
from tilework.comm.backends.python_engine import poll
from tilework.comm.backends.threads.threads_collectives import scan_gathered, scan_source
from tilework.comm.backends.torch.torch_calls import said_by
from tilework.comm.forms import SCANS, Operation
from tilework.comm.waits import by_rank
from tilework.errors import DistBackendError

#: The environment variable for the amount of comparison, and the amounts.
VARIABLE: Final = "TILEWORK_COMPARE"
ALL, FIRST, OFF = AMOUNTS = ("all", "first", "off")
#: With "first", contents are compared in so many first calls, and in each call with a multiple of
#: this number.
_FIRST_CALLS = 100
#: The time between looks of a thread that waits for data.
_LOOK = timedelta(seconds=0.1)
#: Seconds that the engine has to end what was given up.
_END_SECONDS = 0.2
#: Words in errors of torch's engines: of a late rank, and of closed connections.
_LATE = ("timed out",)
_LOST = ("connection closed", "connection reset", "broken pipe", "pair closure", "aborted")


class ComparedEngine(MeetingEngine):
    """A rank's end of a group on an engine that compares nothing by itself."""

    refusals: tuple[type[Exception], ...] = (NotImplementedError,)

    def __init__(self, amount: str, connections: Connections) -> None:
        self.mover = connections.link
        self.name, self.amount = self.mover.name, amount
        self._moving = False
        #: Why the engine lacks an operation; "" if it has it. All ranks ask once they have agreed.
        self.refusal: Callable[[Operation], str] = lambda operation: ""
        super().__init__(connections)

    def perform(self, operation: Operation) -> None:
        self.begin(operation)
        self.compare(operation)
        self.refuse(operation)
        self._moving = True
        try:
            self._move(operation)
        except RuntimeError as error:
            raise self.explained(error) from error
        finally:
            self._moving = False

    def compare(self, operation: Operation) -> None:
        """Compare ``operation`` with the calls of the other ranks, as far as that is on."""
        if self.amount == OFF:
            return
        count = self._performed
        if self.amount == FIRST and count > _FIRST_CALLS and count % _FIRST_CALLS:
            operation.provenance = 0
        self.meet(operation)

    def refuse(self, operation: Operation) -> None:
        """Raise NotImplementedError if the engine lacks the operation."""
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
        """Block until ``work`` is done, and look for dead ranks: the engine may see none."""
        begun = time.monotonic()
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError as error:
                if not _is_late(error):
                    raise
                if work.is_completed():  # since the look, or by the engine's own limit
                    work.wait()
                    return
                late = error if time.monotonic() > self._deadline else None
            try:
                self.check_open()
                self._check_deaths()
                by_rank.look_if_long(begun)
                if late is not None:
                    raise self.explained(late)
            except BaseException:
                # Until the engine lets go of the memory, it may write there.
                self.interrupt()
                poll(work.is_completed, _END_SECONDS)
                raise

    def _check_deaths(self) -> None:
        died = [*self._died.values()]
        if died and time.monotonic() - min(died) > 2 * ASK_SECONDS:
            raise Fault("peer_lost", tuple(self._died), "its process ended")

    def explained(self, error: RuntimeError) -> Exception:
        if isinstance(error, (DistBackendError, NotImplementedError)) or self.closed:
            return error
        late = _is_late(error)
        if late and self.aborted() is None:
            return Fault("timeout", self.silent_ranks(), f"{self.name}: {said_by(str(error))}")
        if late or any(words in str(error).lower() for words in _LOST):
            return Fault(*self._why(error, -1))
        return DistBackendError(f"{self.name}: {said_by(str(error))}")

    def is_moving(self) -> bool:
        return self._moving

    # -- the end -------------------------------------------------------------------------

    def drain(self) -> bool:
        """Wait until the calls so far were compared. True if one failed: the error follows."""
        return self._failed is not None

    def may_wait(self) -> bool:
        return self._moving or bool(self._waits.running)


def _is_late(error: RuntimeError) -> bool:
    return any(words in str(error).lower() for words in _LATE)
