"""Lives in which a rank is struck, one for each phase; ``make chaos`` has them by the thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.life_plan import AFTER_ALL, BEFORE_ALL, PHASES, Life, draw_life
from tests.chaos.life_trials import Lives
from tests.faults.workload import warm_up
from tilework.comm.backend import core_error

pytestmark = pytest.mark.skipif(core_error() is not None, reason="the core is not built")


#: A rank that is lost in bring-up may not have said yet who it is.
OUTSIDE = (*BEFORE_ALL, "bring-up", *AFTER_ALL)


@pytest.mark.parametrize("fault", ["kill", "exec"])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in OUTSIDE])
def test_a_rank_is_struck_in_a_phase(phase: str, fault: str, tmp_path: Path) -> None:
    warm_up()
    life = Life(1, 3, "fork", phase, fault, 1, 0.001, "tcp", "plain")
    outcome = Lives(tmp_path).run(life)
    assert not outcome.violations(), f"{life}: {outcome.violations()}"


def test_lives_follow_from_their_seeds() -> None:
    assert [draw_life(seed, False) for seed in range(9)] == [
        draw_life(seed, False) for seed in range(9)
    ]
