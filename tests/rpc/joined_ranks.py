"""Ranks that have joined RPC, and functions for them to call."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from tilework import rpc
from tilework.rpc.agent import Agent
from tilework.rpc.rref import current_agent
from tilework.testing import run_ranks
from tilework.testing.ranks import Kind

_Result = TypeVar("_Result")

LIMIT_SECONDS = 60.0


def this_agent() -> Agent:
    """The calling rank's agent, with what the public functions do not see of it."""
    agent = current_agent()
    assert isinstance(agent, Agent)
    return agent


def join(rank: int, timeout: float = LIMIT_SECONDS) -> None:
    """Join as ``w<rank>``, with the default group's ranks."""
    rpc.init_rpc(f"w{rank}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=timeout))


def together(
    n: int,
    program: Callable[[int], _Result],
    kind: Kind = "threads",
    timeout: float = LIMIT_SECONDS,
) -> list[_Result]:
    """Run ``program`` on ``n`` ranks between init_rpc and a graceful shutdown."""

    def body(rank: int) -> _Result:
        join(rank, timeout)
        result = program(rank)
        rpc.shutdown(timeout=LIMIT_SECONDS)
        return result

    return run_ranks(n, body, kind=kind, timeout=timedelta(seconds=120))


def only(rank_that_acts: int, act: Callable[[], Any]) -> Callable[[int], Any]:
    """A program in which one rank acts, and the others serve."""
    return lambda rank: act() if rank == rank_that_acts else None


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for ``condition``; AssertionError if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def identity(value: Any) -> Any:
    return value


def nothing() -> None:
    return None


def my_name() -> str:
    return rpc.get_worker_info().name


def relay(to: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call on from there."""
    return rpc.rpc_sync(to, fn, args=args)


class Gate:
    """Holds functions up until a test lets them go on. For ranks that are threads."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.open.wait(LIMIT_SECONDS)


def fork_and_wait(child: Callable[[], int]) -> int:
    """The exit status of a forked child that runs ``child``."""
    with warnings.catch_warnings():
        # Newer Pythons warn of forking beside threads, which is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        status = 99
        try:
            status = child()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
