"""The function for long waits."""

from __future__ import annotations

import time

import pytest

from tilework.comm.waits import long_waits


def test_it_is_called_for_a_long_wait_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(long_waits, "_functions", [lambda: calls.append("called")])
    long_waits.look(time.monotonic())
    assert not calls
    long_waits.look(time.monotonic() - 2 * long_waits.AFTER_SECONDS)
    assert calls == ["called"]


def test_a_function_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(long_waits._functions)
    monkeypatch.setattr(long_waits, "_functions", [*before])

    def first() -> None:
        pass

    for function in (first, first):
        long_waits.add_function(function)
    assert long_waits._functions == [*before, first]
