"""Where the core is not built, what needs it is skipped, and says why."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import suppress

import pytest

from tilework.comm.backend import core_error

WHY = core_error()

with suppress(ImportError):
    # Compilers draw progress bars, the first of which starts a thread for good; spawn() would
    # warn of it.
    importlib.import_module("tqdm").tqdm.monitor_interval = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        if WHY and "backend 'shm' is not usable" in str(error):
            pytest.skip(WHY)
        raise
