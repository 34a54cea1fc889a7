"""Ranks in trouble, as processes, and what their flight records tell of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks
from tilework.comm.flight.diagnosis import Finding, diagnose
from tilework.launch.flight_records import read_latest_run


@dataclass
class FailingJob:
    """``n`` ranks that run ``story(rank)`` with a default group, and may hang in it."""

    folder: Path
    n: int
    story: Callable[[int], object]
    backend: str = "shm"
    timeout: timedelta = timedelta(seconds=180)
    #: What happens to them once all have made the group.
    then: Callable[[ForkedRanks], object] = lambda ranks: None
    #: Who is not asked for a record.
    unasked: Sequence[int] = field(default=())

    @property
    def records(self) -> Path:
        return self.folder / "flight"

    def findings(self, enough: Callable[[list[Finding]], bool]) -> list[Finding]:
        """Ask the ranks again and again until what they tell is ``enough``."""
        with ForkedRanks(self.n, self._live) as ranks:
            try:
                for rank in ranks:
                    rank.hear()
                self.then(ranks)
                return self._ask(ranks, enough)
            finally:
                for rank in ranks:
                    rank.kill()

    def _live(self, rank: int, say: Callable[[object], None]) -> None:
        os.environ["TILEWORK_FLIGHT_DIR"] = str(self.records)
        store = dist.FileStore(str(self.folder / "store"), self.n)
        patient = timedelta(seconds=180)
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=self.n, timeout=patient
        )
        dist.get_default_group().set_timeout(self.timeout)
        say("ready")
        with contextlib.suppress(dist.DistBackendError):
            self.story(rank)
        doze()

    def _ask(self, ranks: ForkedRanks, enough: Callable[[list[Finding]], bool]) -> list[Finding]:
        deadline = time.monotonic() + 60
        found: list[Finding] = []
        while time.monotonic() < deadline:
            for number, rank in enumerate(ranks):
                if number not in self.unasked:
                    rank.kill(signal.SIGUSR1)
            time.sleep(0.1)
            if self.records.exists():
                found = diagnose(read_latest_run(self.records).records)
                if enough(found):
                    return found
        raise AssertionError(f"all that the records tell is {found}")


def doze() -> None:
    """What a rank does that is not to be heard of any more."""
    while True:
        time.sleep(1)
