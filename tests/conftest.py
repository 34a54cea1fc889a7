"""Four processes run the tests; those that measure time, or end processes, share two of them.

Where the core is not built, what needs it is skipped, and says why.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import signal
import time
import warnings
import zlib
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest
import torch

from tilework.comm.backend import core_error

# Collecting garbage as often as Python does by default took a tenth of the time of all tests.
gc.set_threshold(20_000, 20, 20)
WHY = core_error()
# With a process of tests for each core, torch's other threads only spin, and in runs of ranks too.
torch.set_num_threads(1)
# Tests of the calibration turn it on.
os.environ.setdefault("TILEWORK_CALIBRATION", "0")
DEADLINE = pytest.StashKey[float]()

# The same code gives the same verdict; `pytest --hypothesis-profile explore` draws other examples.
# A busy machine is no fault of a property.
hypothesis.settings.register_profile(
    "tilework",
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "explore", hypothesis.settings.get_profile("tilework"), derandomize=False
)
hypothesis.settings.load_profile("tilework")

# Shells and nohup start jobs with these ignored, which all processes of theirs inherit.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        handler = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)


#: By name, modules of which no two tests run at once: those of a row wait for processes and
#: clocks, those of the others would build, parse or load the same things in every process.
ROWS = {
    "launch": r"tests/(launch|rendezvous|rpc|store)/|tests/torch_backend/test_rendezvous.py",
    "faults": r"tests/(chaos|faults)/"
    r"|(fault|liveness|death|timeout|signal|garbage|failure|diagnosis|hosts)\w*\.py",
    "simulation": "tests/csrc/simulation/",
    "compilers": r"tests/(capture/test_(inductor|modules)|models/test_captured|comm/functional/"
    r"test_running_tracing)\.py|parallel/test_composition.py::test_compiled",
    "transformers": r"tests/models/|hugging[-_]face",
    "databases": r"tests/dtensor/(op_db|module_db)/|tests/csrc/python/test_operator_call.py",
    "sources": r"tests/test_(layers|structure|style)\.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each test is handed to a process by itself, but those that are to run in a row to one.

    pytest-xdist's own groups are in names of tests, which pytest 9.2 does not let it change.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((name for name, row in ROWS.items() if re.search(row, nodeid)), nodeid)

    return Scheduling(config, log)


def _seed(name: str) -> None:
    """Numbers drawn without a generator are a test's own: its neighbours do not change them."""
    torch.manual_seed(zlib.crc32(name.encode()))
    random.seed(name)


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        _seed(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins after the time budget of ``python -m tests.check``."""
    if time.monotonic() > item.session.stash[DEADLINE]:
        pytest.skip("the time budget is spent; `make test` runs all")
    _seed(item.nodeid)


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


@pytest.fixture(scope="session")
def compilers() -> None:
    """Import torch's compilers: forked ranks that compile would take two seconds each to do so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what torch itself does
        for name in ("torch._dynamo.backends.debugging", "torch._inductor.compile_fx"):
            importlib.import_module(name)


@pytest.fixture
def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads meet in Python, as where the core is not installed."""
    monkeypatch.setattr("tilework.comm.backends.threads.threads_backend._core", None)
