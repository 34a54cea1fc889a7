"""Run a function on N ranks, from inside a test: as threads, or as forked processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import secrets
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar, get_args

import torch

from tilework.comm.backends.internal import load_backend
from tilework.comm.groups import destroy_process_group, init_process_group
from tilework.comm.launching import armed
from tilework.comm.per_call.internal import stacks_of_threads
from tilework.comm.world import World, own_world
from tilework.errors import RankFailedError, text_of
from tilework.store import HashStore, Store, StoreServer, UnixStore
from tilework.testing.forward_levels import take_turns
from tilework.testing.generators import give_generator, own_generators

_Result = TypeVar("_Result")
Kind = Literal["threads", "processes"]

#: The bytes of the length in front of a pickled outcome: a rank may die while it writes.
_LENGTH_BYTES = 8
#: Seconds for stopped ranks to notice the stop.
_GRACE_SECONDS = 3.0


@dataclass
class _Outcome:
    """The result of a rank's program, or the error and the time of the error."""

    result: Any = None
    error: BaseException | None = None
    #: A time of ``time.monotonic``; 0: the process died; infinite: the program raised no error.
    when: float = float("inf")


def run_ranks(
    n: int,
    fn: Callable[..., _Result],
    *args: Any,
    kind: Kind = "threads",
    backend: str | None = None,
    timeout: timedelta = timedelta(seconds=60),
    init: bool = True,
    return_exceptions: bool = False,
) -> list[_Result]:
    """Run ``fn(rank, *args)`` on ``n`` ranks, and return their results in the order of ranks.

    During the run each rank has a default group of all ranks. Programs and values are real: threads
    spawn and pickle nothing, and cost a few milliseconds. Random numbers are as in processes: each
    rank has a separate generator, which begins in the state of torch's default generator, and which
    ``torch.manual_seed`` and related functions set and read.

    Args:
        n: The number of ranks.
        fn: The program of each rank; may be a closure. In processes the result must be picklable.
        args: Further arguments of ``fn``.
        kind: "threads" of this process, or "processes" forked from it.
        backend: The default group's backend; None: threads for threads, shm for processes.
        timeout: For the whole run, and for each operation of the default group.
        init: Whether to make the default group before ``fn``, and destroy it after.
        return_exceptions: Put a rank's exception in the place of the result instead of raising.

    Raises:
        TypeError, ValueError: An argument is invalid.
        Exception: The first exception of a rank (the cause, not a consequence), with a note that
            names the rank.
        RankFailedError: A process died.
        TimeoutError: The run took too long; the error has the stacks of stuck ranks.

    Example:
        >>> import tilework.distributed as dist
        >>> run_ranks(2, lambda rank: rank * 10 + dist.get_world_size())
        [2, 12]
    """
    if not (isinstance(n, int) and callable(fn)):
        raise TypeError(
            f"run_ranks takes a number of ranks and a function, as in run_ranks(2, program): got "
            f"{n!r} and {fn!r}"
        )
    if n < 1:
        raise ValueError(f"run_ranks needs at least one rank, got {n}")
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be 'threads' or 'processes', got {kind!r}")
    program = _Program(fn, args, n, backend, timeout, init)
    with armed():
        outcomes = _in_threads(program) if kind == "threads" else _in_processes(program)
    if return_exceptions:
        return [outcome.error or outcome.result for outcome in outcomes]  # type: ignore[misc]
    failed = [rank for rank in range(n) if outcomes[rank].error is not None]
    if failed:
        _raise_first(outcomes, failed)
    return [outcome.result for outcome in outcomes]


def _raise_first(outcomes: Sequence[_Outcome], failed: Sequence[int]) -> NoReturn:
    first = min(failed, key=lambda rank: outcomes[rank].when)
    error = outcomes[first].error
    assert error is not None
    others = [
        f"rank {rank}: {type(outcomes[rank].error).__name__}" for rank in failed if rank != first
    ]
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"[raised on rank {first}; also {', '.join(others) or 'no other'}]")
    raise error


@dataclass
class _Program:
    """The program that each rank runs, and the arguments of :func:`run_ranks` for it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    size: int
    backend: str | None
    timeout: timedelta
    init: bool

    def run(self, rank: int, store: Store, default_backend: str) -> Any:
        if not self.init:
            return self.fn(rank, *self.args)
        init_process_group(
            self.backend or default_backend,
            store=store,
            rank=rank,
            world_size=self.size,
            timeout=self.timeout,
        )
        result = self.fn(rank, *self.args)
        with contextlib.suppress(ValueError):  # the program may have destroyed it
            destroy_process_group()
        return result


# -- threads -------------------------------------------------------------------------------


def _in_threads(program: _Program) -> list[_Outcome]:
    outcomes = [_Outcome() for _ in range(program.size)]
    worlds = [World(local_rank=rank) for rank in range(program.size)]
    store = HashStore(timeout=program.timeout)
    threads = [
        threading.Thread(
            target=_thread_rank,
            args=(program, rank, worlds, store, outcomes),
            name=f"rank {rank}",
            daemon=True,
        )
        for rank in range(program.size)
    ]
    for world in worlds:
        give_generator(world)
    take_turns()
    with own_generators():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + program.timeout.total_seconds() + 1.0
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        _check_ended(program, threads, worlds, outcomes)
    return outcomes


def _thread_rank(
    program: _Program, rank: int, worlds: list[World], store: Store, outcomes: list[_Outcome]
) -> None:
    outcome = outcomes[rank]
    # A new thread learns of torch.set_num_threads() here. Otherwise it would learn at the first
    # parallel loop: products before and after would have other threads, and other last bits.
    torch.get_num_threads()
    with own_world(worlds[rank]) as world:
        try:
            outcome.result = program.run(rank, store, "threads")
        except BaseException as error:
            outcome.error, outcome.when = error, time.monotonic()
            world.abort(f"rank {rank} raised {type(error).__name__}: {text_of(error)}")
        finally:
            world.end()


def _check_ended(
    program: _Program,
    threads: Sequence[threading.Thread],
    worlds: Sequence[World],
    outcomes: Sequence[_Outcome],
) -> None:
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if not stuck:
        return
    stacks = "\n".join(_stack_of(threads[rank]) for rank in stuck)
    for world in worlds:
        world.abort("run_ranks gave up waiting")
    for thread in threads:
        thread.join(_GRACE_SECONDS / len(threads))
    causes = [
        f"rank {rank}: {outcome.error!r}" for rank, outcome in enumerate(outcomes) if outcome.error
    ]
    raise TimeoutError(
        f"ranks {stuck} did not end within {program.timeout.total_seconds():g} s; they were "
        f"here:\n{stacks}\n{'; '.join(causes)}"
    )


def _stack_of(thread: threading.Thread) -> str:
    innermost = stacks_of_threads().get(thread.ident or 0, [])[:8]
    lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in innermost[::-1])
    told = "".join(lines.format()) or "ended\n"
    return f"--- {thread.name}\n{told}"


# -- processes -----------------------------------------------------------------------------


@dataclass
class _Child:
    """A forked rank, and the pipe for its outcome."""

    pid: int
    #: The file descriptor that this process reads from.
    pipe: int
    #: The bytes read so far: the length and the bytes of a pickled :class:`_Outcome`. Bytes are
    #: missing if the rank died while it wrote, or before.
    data: bytearray
    #: True once the rank has closed the pipe.
    ended: bool = False
    #: None: not reaped yet; negative: the number of the signal that killed the rank.
    exitcode: int | None = None


def _in_processes(program: _Program) -> list[_Outcome]:
    secret = secrets.token_bytes(16)
    load_backend(program.backend or "shm")
    with tempfile.TemporaryDirectory(prefix="tilework-") as folder:
        # Only Linux has sockets without files.
        linux = sys.platform.startswith("linux")
        address = f"@tilework-{secrets.token_hex(16)}" if linux else f"{folder}/store"
        server = StoreServer.listen_unix(address, secret)
        children: list[_Child] = []
        try:
            for rank in range(program.size):
                children.append(_fork(program, rank, address, secret))
            server.start()
            _collect(program, children)
        finally:
            _end(children)
            server.close()
    return [_outcome(program, rank, child) for rank, child in enumerate(children)]


def _fork(program: _Program, rank: int, address: str, secret: bytes) -> _Child:
    reader, writer = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Newer Pythons warn of forking beside threads (torch has a pool). The child only uses
        # a torch thread and no Python thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(pid, reader, bytearray())
    status = 1
    try:
        # Garbage of the parent is not for the rank to free: a destructor may join a thread, which
        # a forked process lacks.
        gc.freeze()
        os.close(reader)
        _die_with(parent)
        status = _process_rank(program, rank, address, secret, writer)
    finally:
        os._exit(status)


def _die_with(parent: int) -> None:
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _process_rank(program: _Program, rank: int, address: str, secret: bytes, pipe: int) -> int:
    torch.set_num_threads(1)
    outcome = _Outcome()
    try:
        with UnixStore(address, timeout=program.timeout, secret=secret) as store:
            outcome.result = program.run(rank, store, "shm")
    except BaseException as error:
        outcome.error, outcome.when = error, time.monotonic()
        if hasattr(error, "add_note"):
            error.add_note(f"On rank {rank}:\n{traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    data = _pickled(outcome)
    with os.fdopen(pipe, "wb") as stream:
        stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    return 1 if outcome.error is not None else 0


def _pickled(outcome: _Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # some exceptions pickle, but do not unpickle
    except Exception as error:
        cause = outcome.error or error
        text = "".join(traceback.format_exception(cause))
        return pickle.dumps(_Outcome(error=RankFailedError(text), when=outcome.when))
    return data


def _collect(program: _Program, children: Sequence[_Child]) -> None:
    deadline = time.monotonic() + program.timeout.total_seconds() + 1.0
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(0.1):
                data = os.read(key.fd, 1 << 20)
                key.data.data.extend(data)
                if not data:
                    key.data.ended = True
                    selector.unregister(key.fd)


def _end(children: Sequence[_Child]) -> None:
    for child in children:
        deadline = time.monotonic() + 1.0
        while child.exitcode is None:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.exitcode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline or not child.ended:
                os.kill(child.pid, signal.SIGKILL)
                child.exitcode = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            else:
                time.sleep(0.005)
        os.close(child.pipe)


def _outcome(program: _Program, rank: int, child: _Child) -> _Outcome:
    length, data = child.data[:_LENGTH_BYTES], child.data[_LENGTH_BYTES:]
    if child.data and len(data) == int.from_bytes(length, "big"):
        outcome = pickle.loads(bytes(data))
        assert isinstance(outcome, _Outcome)
        return outcome
    if not child.ended:
        limit = program.timeout.total_seconds()
        return _Outcome(error=TimeoutError(f"rank {rank} did not end within {limit:g} s"))
    code = child.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    message = f"rank {rank} {how} before its function returned"
    # A death comes before the errors that it caused on other ranks.
    return _Outcome(error=RankFailedError(message, rank, code), when=0.0)


__all__ = ["RankFailedError", "run_ranks"]
