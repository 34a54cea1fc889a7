"""The verdicts on lives are themselves right."""

from __future__ import annotations

from tests.chaos.life_plan import Life
from tests.chaos.life_program import Lived
from tests.chaos.life_trials import LifeOutcome

KILLED = Life(1, 2, "fork", "callback", "kill", 1, 0.03, "tcp", "plain")
STOPPED = Life(1, 2, "fork", "bring-up", "stop", 0, 0.0, "tcp", "plain")


def test_a_loss_must_be_noticed_unless_the_rank_had_done_its_part() -> None:
    reports = {0: Lived("exit", 1.0, 1.0)}
    assert LifeOutcome(KILLED, reports, 0.9).violations() == ["rank 0 did not notice anything"]
    assert not LifeOutcome(KILLED, reports, 0.9, came_to_last_call=True).violations()


def test_the_rank_that_is_lost_must_be_named() -> None:
    def outcome(ranks: tuple[int, ...]) -> LifeOutcome:
        error = Lived("callback", 0.0, 1.0, "PeerLostError", "lost", ranks=ranks)
        return LifeOutcome(KILLED, {0: error}, 0.9)

    assert outcome((0,)).violations() == ["rank 0 names (0,): lost"]
    assert not outcome((1,)).violations()


def test_a_stopped_server_gives_nobody_more_time() -> None:
    def outcome(left: float) -> LifeOutcome:
        return LifeOutcome(STOPPED, {1: Lived("bring-up", 0.0, left, "StoreTimeoutError")}, 0.5)

    assert not outcome(3.0).violations()
    assert outcome(4.0).violations() == ["rank 1 noticed after 3.50 s"]
