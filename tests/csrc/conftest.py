"""Without the core there is nothing here to test; that is said once, at the end."""

from __future__ import annotations

import pytest

from tilework.comm.backend import core_error

WHY = core_error()
collect_ignore_glob = ["test_*.py"] if WHY else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WHY:
        terminalreporter.write_line(f"tests/csrc was left out: {WHY}")
