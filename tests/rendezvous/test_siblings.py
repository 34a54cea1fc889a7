"""Ranks that were started beside a rank, with their numbers in their environment, are missed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tilework.rendezvous.siblings import Siblings

JOB = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
WATCHER = """
import time
from tilework.rendezvous.siblings import Siblings
siblings = Siblings.of(0, 3)
print(siblings.ended([1, 2]), flush=True)
while not siblings.ended([1, 2]):
    time.sleep(0.01)
print(siblings.ended([1, 2]), flush=True)
"""
WAITER = """
import time
from datetime import timedelta
from tilework.errors import PeerLostError
from tilework.rendezvous import rendezvous
print("here", flush=True)
try:
    next(rendezvous("env://", timeout=timedelta(minutes=2)))
except PeerLostError as error:
    print(error.ranks, "rank 0" in str(error), flush=True)
"""


@contextlib.contextmanager
def process(command: list[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A child of this process, with a rank's variables."""
    environment = {**os.environ, **JOB, **variables}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_rank_that_was_there_is_missed_and_none_else() -> None:
    sleep = ["/bin/sleep", "60"]
    with (
        process(sleep, RANK="1") as first,
        process(sleep, RANK="2") as second,
        process(sleep, RANK="2", MASTER_PORT="2") as stranger,
        process([sys.executable, "-c", WATCHER], RANK="0") as watcher,
    ):
        assert line_of(watcher) == "set()"
        stranger.kill()
        first.kill()
        assert line_of(watcher) == "{1}"
        assert second.poll() is None


def test_a_rank_that_waits_for_the_store_hears_of_the_end_of_who_would_serve_it() -> None:
    with (
        process(["/bin/sleep", "60"], RANK="0") as first,
        process([sys.executable, "-c", WAITER], RANK="1", TILEWORK_LATE_SECONDS="0.3") as waiter,
    ):
        assert line_of(waiter) == "here"
        assert waiter.stderr is not None
        assert "waits for rank 0" in waiter.stderr.readline()
        first.kill()
        assert line_of(waiter) == "(0,) True"


def test_a_process_whose_environment_names_no_such_rank_has_no_siblings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert Siblings.of(0, 3) is None
    for name, value in {**JOB, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Siblings.of(0, 3) is None
    siblings = Siblings.of(1, 3)
    assert siblings is not None
    assert siblings.ended([0, 2]) == set()
