"""Callbacks of futures, and the end of the process in which they run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tilework.comm.per_call.callbacks import finish_callbacks, run_soon

PROGRAM = """
import sys, time
import torch, tilework.distributed as dist

dist.init_process_group()
tensor = torch.ones(3)

def called_back(future):
    time.sleep(0.3)
    print("called back", flush=True)

work = dist.all_reduce(tensor, async_op=True)
work.wait()
work.get_future().then(called_back)
"""


@pytest.mark.parametrize(
    "command",
    [[sys.executable], [sys.executable, "-m", "tilework", "run", "-n", "2", "--prefix", "none"]],
    ids=["alone", "forked"],
)
def test_a_program_ends_after_its_callbacks(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [*command, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split("\n")) == {"called back", ""}


def test_finishing_waits_for_what_tasks_hand_in() -> None:
    events, first = [], threading.Event()

    def outer() -> None:
        first.wait()
        run_soon(inner)

    def inner() -> None:
        events.append("inner")

    run_soon(outer)
    threading.Timer(0.05, first.set).start()
    finish_callbacks()
    assert events == ["inner"]


def test_a_callback_that_never_returns_is_waited_for_a_while(
    capfd: pytest.CaptureFixture[str],
) -> None:
    never = threading.Event()

    def wait() -> None:
        never.wait()

    run_soon(wait)
    assert not finish_callbacks(word=0.01, limit=0.05)
    told = capfd.readouterr().err
    assert "waits for 1 callbacks of futures to return" in told
    assert "have not returned within 0.05 s" in told
    never.set()
    assert finish_callbacks()
