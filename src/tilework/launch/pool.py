"""Ranks that stay between calls, for example between a notebook's cells: :func:`ranks`."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Final, TypeVar, cast

from tilework.errors import RankFailedError
from tilework.framed import Door, knock
from tilework.launch.failure_report import FailureReport, RankFailure, describe, root_cause
from tilework.launch.failure_text import failure_text
from tilework.launch.program import Packed, pack
from tilework.launch.rank import abort_groups
from tilework.launch.spawn import RunningRanks, spawn

_Result = TypeVar("_Result")

#: The interval of checks for ranks that ended silently.
_LOOK_SECONDS: Final = 0.2
#: Seconds for ranks to answer after one has failed: usually they then wait for it.
_PATIENCE_SECONDS: Final = 1.0
#: Seconds for ranks to answer after a Ctrl-C, and to end once asked.
_STOP_SECONDS: Final = 6.0


@dataclass(frozen=True)
class _Answer:
    """The outcome of a call on a rank of a pool."""

    result: Packed | None
    """The function's result; None if it raised."""
    failure: FailureReport | None
    """The report of the error that the function raised; None if it returned."""


class RankPool:
    """Ranks made by :func:`ranks`; a context manager that ends them.

    Use it from the thread that made it. Ranks always end with this process.
    """

    def __init__(self, running: RunningRanks, links: list[Connection]) -> None:
        self._running = running
        self._links = links

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return self._running.pids

    def run(self, fn: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Call ``fn(rank, *args)`` on each rank, and return the results in the order of ranks.

        Globals of the main program that ``fn`` assigns stay on the rank: later calls see them.
        Globals that ``fn`` only reads, and that the notebook has, are sent along.

        Raises:
            RankFailedError: ``fn`` raised on a rank; the text has that rank's traceback. Ranks that
                waited for it are interrupted, and their groups aborted. Or a rank died: then the
                pool is closed.
            KeyboardInterrupt: The call was interrupted, on the ranks too; the pool stays.
            TypeError: ``fn``, an argument or a result cannot be pickled; or a result is a tensor
                distributed over several ranks.
            ValueError: The pool is closed.
        """
        __tracebackhide__ = True
        if not self._links:
            raise ValueError("this pool of ranks is closed: make another with ranks()")
        call = pack((fn, args))
        answers: dict[int, _Answer] = {}
        try:
            self._send(call)
            self._collect(answers)
            self._running.settle()
        except KeyboardInterrupt:
            self._interrupt(answers)
            raise
        failures = [
            RankFailure(rank, answer.failure.time, 1, answer.failure)
            for rank, answer in answers.items()
            if answer.failure is not None
        ]
        if failures:
            # Interrupted ranks only waited, even if the cause looks like a consequence.
            interrupt = "builtins.KeyboardInterrupt"
            own = [f for f in failures if f.report and interrupt not in f.report.classes]
            root = root_cause(own or failures)
            raise RankFailedError(failure_text(root).rstrip("\n"), root.rank, root.code)
        results = {rank: answers[rank].result for rank in range(len(self._links))}
        return [
            cast(_Result, result.load_result(rank))
            for rank, result in results.items()
            if result is not None
        ]

    def close(self) -> None:
        """End the ranks: exit handlers run, and slow ranks are killed. Idempotent."""
        for link in self._links:
            link.close()
        if self._links:
            with contextlib.suppress(RankFailedError):
                self._running.join(timedelta(seconds=_STOP_SECONDS))
        self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Packed) -> None:
        __tracebackhide__ = True
        with _interrupts_deferred():  # else only some ranks might get the call
            try:
                for link in self._links:
                    link.send(call)
            except OSError:
                self._raise_ended()

    def _collect(self, answers: dict[int, _Answer], seconds: float | None = None) -> None:
        """Collect answers for ``seconds``; without a limit, a failure interrupts all ranks."""
        __tracebackhide__ = True
        deadline = None if seconds is None else time.monotonic() + seconds
        while missing := [link for r, link in enumerate(self._links) if r not in answers]:
            left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return
            for link in wait(missing, min(left, _LOOK_SECONDS)):
                rank = self._links.index(cast(Connection, link))
                try:
                    with _interrupts_deferred():  # else a part of the answer would be lost
                        answers[rank] = cast(Connection, link).recv()
                except (EOFError, OSError):
                    self._raise_ended()
                if answers[rank].failure is not None and deadline is None:
                    self._collect(answers, _PATIENCE_SECONDS)
                    self._interrupt(answers)
                    return
            if self._running.join(timedelta(milliseconds=1)):
                self._raise_ended()

    def _interrupt(self, answers: dict[int, _Answer]) -> None:
        """Raise KeyboardInterrupt on ranks without an answer; close the pool if that fails."""
        __tracebackhide__ = True
        tries = 3  # ranks that had not begun the call ignored the first signal
        for _ in range(tries):
            for rank, pid in enumerate(self.pids):
                if rank not in answers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGINT)
            self._collect(answers, _STOP_SECONDS / tries)
        stuck = [rank for rank in range(len(self._links)) if rank not in answers]
        if stuck:
            self._kill()
            raise RankFailedError(
                f"ranks {stuck} did not stop within {_STOP_SECONDS:g} s of an interrupt: the pool "
                "was closed"
            )

    def _raise_ended(self) -> None:
        """End all other ranks, then raise an error about the rank that has ended."""
        __tracebackhide__ = True
        try:
            self._running.join(timedelta(seconds=_STOP_SECONDS))
            raise RankFailedError("a rank ended before it had answered: the pool was closed")
        except RankFailedError as error:
            error.args = (f"{error.args[0]}\nthe pool of ranks was closed", *error.args[1:])
            raise
        finally:
            self._kill()

    def _kill(self) -> None:
        for link in self._links:
            link.close()
        self._links = []
        self._running.close()


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold back Ctrl-C until the block ends; only in the main thread, which alone gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


def ranks(nprocs: int, *, backend: str | None = None, timeout: timedelta | None = None) -> RankPool:
    """Start ``nprocs`` ranks that wait for calls: a call's objects, such as a model, live on.

    The ranks are those of :func:`spawn`: fresh interpreters, whose lines appear in the notebook.
    ``backend`` and ``timeout`` are as there.

    Raises:
        RankFailedError: A rank could not start.
        ValueError: An argument is invalid.

    Example:
        >>> import operator
        >>> with ranks(2) as pool:
        ...     pool.run(operator.add, 10)
        [10, 11]
    """
    secret = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            address = f"\0tilework-{secrets.token_hex(8)}"
        else:  # only Linux has sockets without files
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tilework-"))
            address = f"{folder}/pool"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address)
        listener.listen(128)
        door = stack.enter_context(contextlib.closing(Door(listener, secret, range(nprocs))))
        running = spawn(
            _serve, (address, secret), nprocs, join=False, backend=backend, timeout=timeout
        )
        try:
            return RankPool(running, _links(door, running))
        except BaseException:
            running.close()
            raise


def _links(door: Door, running: RunningRanks) -> list[Connection]:
    links: dict[int, Connection] = {}
    while door.awaited:
        if running.join(timedelta(milliseconds=1)):
            raise RankFailedError("the ranks ended before they could be called")
        for rank, sock in door.admit(_LOOK_SECONDS).items():
            sock.setblocking(True)
            links[rank] = Connection(sock.detach())
    return [links[rank] for rank in sorted(links)]


def _serve(rank: int, address: str, secret: bytes) -> None:
    """Answer calls until the pool is closed; the program of each rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only a call can be interrupted
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    knock(sock, secret, rank)
    with Connection(sock.detach()) as link, contextlib.suppress(EOFError, OSError):
        while True:
            call: Packed = link.recv()
            link.send(_answer(rank, call))


def _answer(rank: int, call: Packed) -> _Answer:
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            fn, args = call.load()
            result = pack(fn(rank, *args))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interrupt may have come instead of that
        # Operations may have run on some ranks and not on others.
        abort_groups(f"rank {rank} was interrupted: destroy_process_group(), then init again")
        return _Answer(None, describe(error, 1))
    except BaseException as error:
        return _Answer(None, describe(error, 1))
    return _Answer(result, None)
