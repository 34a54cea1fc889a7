"""Without the core there is nothing here to test; that is said once, at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilework.comm.backend import core_error

WHY = core_error()
collect_ignore_glob = ["test_*.py"] if WHY else []


@pytest.fixture(scope="module")
def reading_as_tunables_say() -> Iterator[None]:
    """Also where the suite runs without the single copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TILEWORK_SINGLE_COPY", raising=False)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WHY:
        terminalreporter.write_line(f"tests/csrc was left out: {WHY}")
