"""The agreement on who is left, under every interleaving that can be afforded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from tests.comm.elastic.model import Model, in_turn
from tests.tables import each
from tilework.comm.elastic.consensus import answers, confirm, decide
from tilework.comm.elastic.shrink import drive


def test_all_that_live_make_one_group() -> None:
    model = Model(4)
    model.run(in_turn())
    assert model.results == dict.fromkeys(range(4), (0, 1, 2, 3))


def test_a_dead_rank_is_not_waited_for() -> None:
    model = Model(3)
    model.kill(1)
    model.run(in_turn())
    assert model.results == {0: (0, 2), 2: (0, 2)}
    assert model.now < 500


def test_a_stopped_rank_comes_back_and_is_out() -> None:
    model = Model(3)
    model.stop(0)
    model.run(in_turn())
    assert model.results == {0: None, 1: (1, 2), 2: (1, 2)}


def test_the_proposer_s_remark_is_everyone_s() -> None:
    model = Model(2)
    model.run(in_turn())
    assert model.registers.values["1/members"] in ("0,1;by 0", "0,1;by 1")


def test_reasons_of_failure_are_told() -> None:
    model = Model(2)
    participant = next(iter(model.running.values())).gi_frame.f_locals["participant"]  # type: ignore[attr-defined]
    model.registers.write("1/here/1", "")
    decision = drive(decide(participant, 1, range(2), lambda: ""))
    assert not drive(confirm(participant, decision, "no memory"))
    assert answers(participant, decision) == {0: "no memory"}


Event = tuple[int, str, int]


def with_events(events: list[Event]) -> Callable[[Model], int]:
    """A scheduler that runs one rank until it pauses, but for some events at some steps.

    An event is (step, what, rank): at that step go on with that rank, kill it, or stop it.
    """
    left = sorted(events)
    current = 0

    def choose(model: Model) -> int:
        nonlocal current
        while left and left[0][0] <= model.steps:
            _, what, rank = left.pop(0)
            if what == "kill":
                model.kill(rank)
            elif what == "stop":
                model.stop(rank)
            current = rank
        ready = model.ready()
        if ready and (current not in ready or model.paused == current):
            current = next((rank for rank in ready if rank > current), ready[0])
        return current

    return choose


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_every_fault_with_every_switch_between_two_ranks(what: str) -> None:
    """Two ranks, one fault at any step, and one switch from rank to rank at any step."""
    steps = range(40)
    for fault_at, victim, switch_at, to in itertools.product(steps, range(2), steps, range(2)):
        Model(2).run(with_events([(fault_at, what, victim), (switch_at, "switch", to)]))


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_every_pair_of_faults_among_three_ranks(what: str) -> None:
    steps = range(0, 75, 2)
    for first, second in itertools.combinations(steps, 2):
        for victims in itertools.permutations(range(3), 2):
            Model(3).run(with_events([(first, what, victims[0]), (second, "kill", victims[1])]))


@each("seed", range(4))
def test_random_interleavings_with_random_faults(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(250):
        model = Model(draw.randint(2, 5))
        faults = draw.randint(0, model.size)
        chance = draw.choice([0.002, 0.01, 0.05])

        def choose(model: Model, left: list[int] = [faults], chance: float = chance) -> int:  # noqa: B006
            if left[0] and draw.random() < chance:
                left[0] -= 1
                victim = draw.randrange(model.size)
                draw.choice([model.kill, model.stop])(victim)
            ready = model.ready()
            return draw.choice(ready) if ready else 0

        model.run(choose)
