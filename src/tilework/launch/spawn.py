"""Ranks for a program that runs on: :func:`spawn`."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

from tilework.cores import threads_per_rank
from tilework.errors import RankFailedError
from tilework.launch import signals
from tilework.launch.failure_text import failure_text
from tilework.launch.job import Job
from tilework.launch.notebook import CellOutput, in_notebook
from tilework.launch.program import Function, Packed, is_recreating_main
from tilework.launch.settings import LaunchSettings, StartMethod
from tilework.launch.supervise import Outcome

_Result = TypeVar("_Result")

#: The time for all steps of ending ranks politely, with a margin.
_STOP_TIME = timedelta(seconds=signals.KILL_SECONDS + 1)


class RunningRanks:
    """Ranks started by :func:`spawn` with ``join=False``; a context manager that ends them.

    Join it or close it from the thread that made it. Ranks that are still alive at the end of this
    process are ended then.
    """

    def __init__(self, job: Job, folder: str, cell: CellOutput | None = None) -> None:
        self._job, self._cell = job, cell
        self._folder = folder
        self._joined = False
        #: The ranks' results, in the order of ranks, once :meth:`join` has returned True.
        self.results: list[Any] = []

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return self._job.pids

    def join(self, timeout: timedelta | None = None) -> bool:
        """Block until all ranks have ended; False if ``timeout`` passes before.

        Raises:
            RankFailedError: A rank failed; all others have been ended.
        """
        __tracebackhide__ = True
        outcome = self._job.supervise(timeout)
        if outcome is None:
            return False
        if outcome.root is None and not self._joined:  # close() removes the ranks' files
            self.results = [self._result(rank) for rank in range(len(self.pids))]
            self._joined = True
        self.close()
        _raise_for(outcome)
        return True

    def settle(self) -> None:
        """In a notebook, wait until the cell shows what the ranks have written so far."""
        if self._cell is not None:
            self._cell.settle()

    def close(self) -> None:
        """Kill the ranks that are alive, and clean up. Idempotent."""
        self._job.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _result(self, rank: int) -> Any:
        """The result of a rank; None for a rank that called ``sys.exit(0)``."""
        file = Path(self._folder, str(rank))
        if not file.exists():
            return None
        return cast(Packed, pickle.loads(file.read_bytes())).load_result(rank)

    def __enter__(self) -> RunningRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@overload
def spawn(
    fn: Callable[..., _Result],
    args: tuple[Any, ...] = ...,
    nprocs: int = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    start_method: StartMethod | None = ...,
    *,
    start: StartMethod = ...,
    backend: str | None = ...,
    timeout: timedelta | None = ...,
) -> list[_Result]:
    """The ranks' results, after all have ended."""


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = ...,
    nprocs: int = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    start_method: StartMethod | None = ...,
    start: StartMethod = ...,
    backend: str | None = ...,
    timeout: timedelta | None = ...,
) -> RunningRanks:
    """The running ranks, at once; see below for the arguments."""


def spawn(
    fn: Callable[..., _Result],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod | None = None,
    *,
    start: StartMethod = "spawn",
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> list[_Result] | RunningRanks:
    """Call ``fn(rank, *args)`` in ``nprocs`` processes, set up as by ``tilework run``.

    Blocks until all ranks have ended and returns their results (``join=True``), else returns at
    once. When a rank fails, the others are ended within three seconds. No rank outlives the call or
    this process. Ranks share this process's output; a notebook shows their lines with the rank in
    front.

    Args:
        fn: The function for each rank; the result must be picklable.
        args: Arguments after the rank.
        nprocs: Number of ranks.
        join: Whether to wait.
        daemon: Accepted for torch's sake: ranks always end with this process.
        start_method: torch's name of ``start``.
        start: ``spawn``: fresh interpreters; ``fn`` and ``args`` must be picklable, and a script
            needs ``if __name__ == "__main__":``. Code typed into a notebook or at a prompt is sent
            along. ``fork``: quicker, but only for programs without threads so far; exit handlers
            registered before do not run in ranks.
        backend: The default backend of ``init_process_group``.
        timeout: The default timeout of collectives.

    Raises:
        RankFailedError: A rank failed; the text has that rank's traceback.
        TypeError: ``fn`` or ``args`` cannot be pickled.
        ValueError: An argument is invalid.
        RuntimeError: A script lacks ``if __name__ == "__main__":``.

    Warns:
        RuntimeWarning: ``start="fork"`` in a program that has threads.

    Example:
        >>> import operator
        >>> spawn(operator.add, (1,), nprocs=2)
        [1, 2]
    """
    __tracebackhide__ = True
    start = start_method or start
    _check_caller(start)
    settings = LaunchSettings(nprocs=nprocs, start=start, backend=backend, timeout=timeout)
    cell = CellOutput() if in_notebook() else None
    folder = tempfile.mkdtemp(prefix="tilework-")
    job = Job(settings, Function(fn, args, folder), threads_per_rank(nprocs, os.environ), cell=cell)
    ranks = RunningRanks(job, folder, cell)
    try:
        job.__enter__()
    except BaseException:
        ranks.close()
        raise
    if not join:
        return ranks
    with ranks:
        try:
            ranks.join()
        except KeyboardInterrupt:
            job.stop(signals.after_signal(signal.SIGINT), _STOP_TIME)
            raise
    return ranks.results


def _check_caller(start: StartMethod) -> None:
    """Raise if a rank that loads the main module calls spawn; warn of a fork beside threads."""
    if is_recreating_main():
        raise RuntimeError(
            "a rank that spawn() had started called spawn() again while it loaded the program: put "
            'the call under if __name__ == "__main__":, which ranks do not run'
        )
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    if start == "fork" and others:
        warnings.warn(
            f"spawn() forks a program that has {1 + len(others)} threads "
            f"(also {', '.join(others)}): a lock that one of them holds stays locked in the "
            f'ranks; start="spawn" is safe',
            RuntimeWarning,
            stacklevel=3,
        )


def _raise_for(outcome: Outcome) -> None:
    __tracebackhide__ = True  # a notebook shows the rank's traceback, which is in the text
    root = outcome.root
    if root is not None:
        raise RankFailedError(failure_text(root).rstrip("\n"), root.rank, root.code)
