"""The c10d document's CommTest.test_debug_level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tilework.distributed as dist


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    monkeypatch.delenv("TILEWORK_DEBUG", raising=False)
    yield
    dist.set_debug_level(dist.DebugLevel.OFF)


def test_off_by_default() -> None:
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.OFF


@pytest.mark.parametrize("variable", ["TORCH_DISTRIBUTED_DEBUG", "TILEWORK_DEBUG"])
@pytest.mark.parametrize("name", ["OFF", "off", "oFf", "INFO", "info", "INfO", "DETAIL", "DeTaIl"])
def test_any_case_of_letters(name: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, name)
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel[name.upper()]


@pytest.mark.parametrize("nonsense", ["foo", "0", "1", "-1", ""])
def test_anything_else_is_refused(nonsense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", nonsense)
    with pytest.raises(ValueError, match="The value of TORCH_DISTRIBUTED_DEBUG must"):
        dist.set_debug_level_from_env()


def test_tilework_debug_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    monkeypatch.setenv("TILEWORK_DEBUG", "INFO")
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.INFO
