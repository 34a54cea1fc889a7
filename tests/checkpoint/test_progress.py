"""Progress: what is counted, and what a terminal shows of it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.states import dtensor, numbers
from tilework import checkpoint
from tilework.checkpoint import api, asynchronous, progress, ranks, reading
from tilework.checkpoint.progress import Progress
from tilework.dtensor import Placement, Replicate, Shard
from tilework.testing import run_ranks


class Terminal(io.StringIO):
    """Error output that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal, where even short things are shown. In the test: pytest has its own before."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0)
    for name, value in (("RANK", "0"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    return shown


def test_bar_shows_numbers_and_the_end_of_a_path_and_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = terminal_of(monkeypatch)
    with Progress("saving /data/[run]/" + 99 * "x" + "/last", 3 << 20, afterwards="you") as shown:
        shown(1 << 20)
        shown(1 << 20)
        shown(1 << 20)
    text = terminal.getvalue()
    assert "saving …" in text
    assert "x/last" in text
    assert "1.0/3.0 MiB" in text
    assert "3.0/3.0 MiB" in text
    assert "B/s" in text
    assert "waiting for you" in text
    assert text.rindex("\x1b[2K") > text.rindex("waiting")  # the line is erased


def test_what_is_quick_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 60)
    with Progress("saving x", 2) as shown:
        shown(2)
    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_it_would_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with Progress("saving x", 2) as shown:
        shown(2)
    monkeypatch.setenv("RANK", "0")
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress("saving x", 2) as shown:
            shown(2)
        assert stream is None or stream.getvalue() == ""
    assert terminal.getvalue() == ""


class Counted(Progress):
    """Progress that can be looked at afterwards."""

    made: list[Progress]

    def __exit__(self, *_: object) -> None:
        self.made.append(self)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.made = []
    for module in (api, ranks):
        monkeypatch.setattr(module, "Progress", Counted)
    monkeypatch.setattr(reading, "CALL_BYTES", 1 << 20)
    return Counted


@pytest.mark.parametrize("url", [False, True])
def test_all_bytes_are_counted(counted: type[Counted], tmp_path: Path, url: bool) -> None:
    path = f"memory://{tmp_path.name}" if url else str(tmp_path)
    if url:
        pytest.importorskip("fsspec")
    full = numbers(1024, 768)  # parts of more than a chunk
    layouts: list[tuple[Placement, torch.dtype]] = [
        *((Shard(dim), torch.float32) for dim in (0, 1)),
        (Replicate(), torch.float32),
        (Shard(1), torch.float64),
    ]

    def program(rank: int) -> None:
        checkpoint.save({"w": dtensor(full, (2,), [Shard(0)])}, path)
        for placement, dtype in layouts:
            into = {"w": dtensor(torch.zeros(1024, 768, dtype=dtype), (2,), [placement])}
            checkpoint.load(path, into=into)
            assert torch.equal(into["w"].full_tensor(), full.to(dtype))

    run_ranks(2, program)
    checkpoint.read(path)
    half, whole = full.nbytes // 2, full.nbytes
    assert sorted(each.total for each in counted.made) == sorted([*8 * [half], *3 * [whole]])
    assert all(each.done == each.total for each in counted.made)


def test_who_waits_for_a_save_sees_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(asynchronous, "_SHOWN_SECONDS", 0.001)
    pending = asynchronous.PendingSave(str(tmp_path), 5 << 20)
    pending._count(1 << 20)
    with pytest.raises(TimeoutError):
        pending.wait(0.05)
    assert "1.0/5.0 MiB" in terminal.getvalue()
    pending._end(None)
    pending.wait()
