"""Three processes run the tests; those that measure time, or end processes, share one of them.

Where the core is not built, what needs it is skipped, and says why.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Generator

import pytest

from tilework.comm.backend import core_error

WHY = core_error()
DEADLINE = pytest.StashKey[float]()

# Shells and nohup start jobs with these ignored, which all processes of theirs inherit.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        handler = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)


#: Modules of which no two tests may run at once.
IN_A_ROW = re.compile(
    r"tests/(chaos|faults|launch|rendezvous|rpc|store)/"
    r"|tests/torch_backend/test_rendezvous.py"
    r"|(fault|liveness|death|timeout|signal|garbage|failure|diagnosis|hosts)\w*\.py"
)


# Before pytest-xdist's own, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if IN_A_ROW.search(item.nodeid):
            item.add_marker(pytest.mark.xdist_group("in a row"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins after the time budget of ``python -m tests.check``."""
    if time.monotonic() > item.session.stash[DEADLINE]:
        pytest.skip("the time budget is spent; `make test` runs all")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the time budget, and freeze what is loaded: garbage collection skips it then."""
    budget = float(os.environ.get("TILEWORK_TEST_SECONDS", "inf"))
    session.stash[DEADLINE] = time.monotonic() + budget
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        if WHY and "backend 'shm' is not usable" in str(error):
            pytest.skip(WHY)
        raise
