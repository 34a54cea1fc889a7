"""Where trials can take place: kinds of ranks, and the backend between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.chaos.plan import FAULTS, Kind
from tests.chaos.processes import Processes
from tests.chaos.rank_program import Setting
from tests.chaos.threads import Threads
from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.hybrid import hosts


@dataclass(frozen=True)
class Environment:
    """Ranks of one kind on one backend."""

    kind: Kind
    setting: Setting
    #: Those that cannot be noticed there.
    without: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        """What may go wrong there."""
        return tuple(kind for kind in FAULTS[self.kind] if kind not in self.without)


def two_hosts() -> None:
    """Take ranks 0 and 1 for one host, and the others for another."""

    def identity(request: DistributedBackendOptions | None = None) -> str:
        assert request is not None
        return f"host {request.global_ranks_in_group[request.group_rank] // 2}"

    hosts.host_identity = identity


ENVIRONMENTS = {
    "shm": Environment("processes", Setting("shm")),
    "threads": Environment("threads", Setting("threads")),
    # Threads of one process all end with it, so the core does not watch them one by one.
    "hybrid": Environment("processes", Setting("hybrid", two_hosts)),
    "shm-threads": Environment("threads", Setting("shm"), without=("vanish",)),
}


def environment(name: str, folder: Path) -> Processes | Threads:
    """A place to run trials in; a context manager."""
    chosen = ENVIRONMENTS[name]
    if chosen.kind == "threads":
        return Threads(chosen.setting)
    return Processes(chosen.setting, folder)


def replay(name: str, seed: int, faults: tuple[str, ...]) -> str:
    """How to have a trial again."""
    chosen = (
        "" if faults == ENVIRONMENTS[name].faults else f" --faults {' '.join(map(repr, faults))}"
    )
    return f'again: make chaos ARGS="--on {name} --seed {seed} --trials 1{chosen}"'
