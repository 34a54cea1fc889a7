"""A bounded number of random trials in every place; ``make chaos`` has them by the thousand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.environments import ENVIRONMENTS, environment, replay
from tests.chaos.plan import LATE, draw_trial
from tests.chaos.processes import Processes
from tests.chaos.threads import Threads
from tilework.comm.backend import core_error

TRIALS = {"shm": 20, "threads": 15, "shm-threads": 15, "hybrid": 10}


@pytest.fixture(scope="module", params=TRIALS)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Processes | Threads]]:
    name = request.param
    if name != "threads" and core_error():
        pytest.skip(str(core_error()))
    with environment(name, tmp_path_factory.mktemp(name)) as made:
        yield name, made


def fails(name: str, place: Processes | Threads, seed: int, faults: tuple[str, ...]) -> str:
    """What is wrong with a trial, with all that is needed to have it again."""
    trial = draw_trial(seed, faults)
    violations = place.run(trial).violations()
    return "\n".join([*violations, str(trial), replay(name, seed, faults)]) if violations else ""


@pytest.mark.parametrize("part", range(5))
def test_random_faults(place: tuple[str, Processes | Threads], part: int) -> None:
    name, made = place
    quick = tuple(fault for fault in ENVIRONMENTS[name].faults if fault not in LATE)
    for seed in range(part, TRIALS[name], 5):
        assert not (why := fails(name, made, seed, quick)), why


def test_every_fault(place: tuple[str, Processes | Threads]) -> None:
    name, made = place
    for fault in ENVIRONMENTS[name].faults:
        assert not (why := fails(name, made, 7, (fault,))), why
