from __future__ import annotations

import math

import pytest

from tilework.store.late_notice import LATE_VARIABLE, LateNotice, late_seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("7.5", 7.5), ("0", math.inf), ("-1", math.inf), ("soon", math.inf)]
)
def test_the_setting(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LATE_VARIABLE, text)
    assert late_seconds() == seconds


def test_lines_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LATE_VARIABLE, "10")
    notice = LateNotice(100.0)
    due = [second for second in range(100, 400) if notice.due(float(second))]
    assert due == [110, 130, 190, 370]
    assert notice.number == 4
