"""Two processes run the tests; those that measure time, or end processes, run alone.

Where the core is not built, what needs it is skipped, and says why.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tilework.comm.backend import core_error

WHY = core_error()

# Shells and nohup start jobs with these ignored, which all processes of theirs inherit.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        handler = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)


#: Modules of tests that no other test may slow down.
ALONE = re.compile(
    r"tests/(chaos|faults|launch|rendezvous|rpc|store)/"
    r"|(fault|death|timeout|late|signal|garbage|failure|interrupt|starting|diagnosis|hosts)\w*\.py"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    cache = item.config.cache
    if cache is None or "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with _turn(cache.mkdir("turns"), alone=bool(ALONE.search(item.nodeid))):
        return (yield)


@contextmanager
def _turn(folder: Path, alone: bool) -> Iterator[None]:
    """Run beside others, or alone: in the order in which tests ask."""
    import fcntl  # not on every platform

    with (folder / "gate").open("a") as gate, (folder / "turn").open("a") as turn:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:  # closing does not do it where a forked process is left
            fcntl.flock(turn, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        if WHY and "backend 'shm' is not usable" in str(error):
            pytest.skip(WHY)
        raise
