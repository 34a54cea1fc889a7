"""Where the core is not built, what needs it is skipped, and says why."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest

from tilework.comm.backend import core_error

WHY = core_error()

# Shells start background jobs with Ctrl-C ignored, which all processes of theirs inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        if WHY and "backend 'shm' is not usable" in str(error):
            pytest.skip(WHY)
        raise
