"""The calls that write files, recorded, and cut short at any of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tilework.checkpoint import storage

NAMES = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir", "pwrite")
#: Told the number of a call, its name and arguments, before it is made.
Before = Callable[[int, str, tuple[Any, ...]], None]


@contextmanager
def watched(before: Before) -> Iterator[None]:
    """Have all calls of local storage told in advance."""
    numbers = iter(range(10**9))
    lock = threading.Lock()

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            with lock:
                number = next(numbers)
            before(number, name, args)
            return call(*args)

        return function

    calls = storage.FileCalls()
    for name in NAMES:
        setattr(calls, name, wrapped(name, getattr(calls, name)))
    with mock.patch.object(storage, "calls", calls):
        yield


def recorded(work: Callable[[], object]) -> list[tuple[str, str]]:
    """The calls that some work makes, each with the name of the file that it is about."""
    found: list[tuple[str, str]] = []

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        target = args[0]
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        found.append((name, os.path.basename(str(target))))

    with watched(before):
        work()
    return found


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do some work in a forked process that is killed at its n-th call; True if it came to it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        torch.set_num_threads(1)  # of torch's others a fork has none, and would wait for them
        try:
            with watched(kill_at(number)):
                work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def kill_at(number: int) -> Before:
    """Kill this process at its n-th call; of writes, after half of it."""

    def before(found: int, name: str, args: tuple[Any, ...]) -> None:
        if found == number:
            if name == "write":
                memory = b"".join(args[1])
                os.write(args[0], memory[: len(memory) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def fail_at(number: int, error: int) -> Before:
    """Let the n-th call fail."""

    def before(found: int, name: str, args: tuple[Any, ...]) -> None:
        if found == number and name not in ("close", "unlink"):
            raise OSError(error, os.strerror(error))

    return before
