"""Lives of models have the plain model's values; ``python -m tests.parallel.lives`` leads more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilework.distributed as dist
from tests.parallel.lives import living, ways
from tests.parallel.lives.__main__ import life_of
from tests.parallel.lives.drawing import Life, Unlike
from tests.parallel.lives.living import Outcome, live, run_lives
from tests.parallel.lives.minimise import minimise
from tests.parallel.sides import OnRanks

#: Of so many numbers, the lives of each number of ranks.
NUMBERS = 48


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_lives(ranks: int) -> None:
    lives = [life_of(number) for number in range(NUMBERS)]
    lives = [life for life in lives if life.ranks == ranks]
    for outcome in run_lives(lives):
        if outcome.kind == "wrong":
            outcome = minimise(outcome)
        assert outcome.kind != "wrong", f"{outcome.life}\n{outcome.why}"


# -- what they find ------------------------------------------------------------------------------


def unaveraged() -> OnRanks:
    return OnRanks(lambda model: model, dist.get_default_group())


class RaisesOnOneRank(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("no such rows")
        return self.model(*args)


def outcome_of(acts: str, unlike: Unlike | None = None) -> Outcome:
    life = Life(0, "ddp", 2, False, "double", tuple(acts.split("; ")), unlike)
    return next(iter(run_lives([life])))


TRAIN = "train(seed=1, routes=(0, 0), mode='')"


def test_gradients_that_are_not_averaged_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ways.WAYS, "ddp", ways.Way(unaveraged))
    outcome = outcome_of(f"freeze(name='norm', freezes=True); {TRAIN}; forget(); look()")
    assert outcome.kind == "wrong"
    shorter = minimise(outcome)
    assert shorter.life.acts == (TRAIN, "look()")
    assert "grad" in shorter.why or "should be" in shorter.why


def test_an_error_on_one_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def side() -> OnRanks:
        return OnRanks(RaisesOnOneRank, dist.get_default_group())

    monkeypatch.setitem(ways.WAYS, "ddp", ways.Way(side))
    monkeypatch.setattr(living, "PATIENCE", 0.2)
    assert outcome_of(f"{TRAIN}; look()").kind == "wrong"


def test_an_error_that_ranks_do_not_raise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgiving(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.first, self.second = model.first, model.second

        def forward(self, x: torch.Tensor, *_: Any) -> Any:
            return x[:, :2] * self.first.up.weight.sum()

    monkeypatch.setitem(ways.WAYS, "ddp", ways.Way(lambda: OnRanks(Forgiving)))
    outcome = outcome_of("fail_in_forward(where='', seed=1)")
    assert outcome.kind == "right"  # both raise
    outcome = outcome_of("fail_in_forward(where='second', seed=1)")
    assert outcome.kind == "wrong"


def test_ranks_that_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    acts = f"{TRAIN}; {TRAIN}; look(); verify()"
    assert outcome_of(acts, Unlike(1, 0, "skips")).kind == "right"
    acts = f"{TRAIN}; look(); {TRAIN}"  # nothing but the look tells
    monkeypatch.setitem(ways.WAYS, "ddp", ways.Way(unaveraged))
    assert outcome_of(acts, Unlike(1, 0, "skips")).kind == "wrong"


def test_a_life_that_was_printed_runs() -> None:
    live(
        "ddp",
        ranks=2,
        batch_norm=False,
        dtype="double",
        seed=3,
        acts=f"\n    {TRAIN}\n    look()\n",
    )
