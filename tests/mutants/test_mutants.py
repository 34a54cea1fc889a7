"""Mutants that can still be made; ``make mutants`` makes them."""

from __future__ import annotations

from collections import Counter

from tests.mutants.__main__ import MUTANTS
from tests.mutants.workshop import ROOT


def test_each_can_be_made() -> None:
    problems = [problem for mutant in MUTANTS if (problem := mutant.problem(ROOT))]
    assert not problems, "\n".join(problems)


def test_there_are_enough_and_each_has_a_name() -> None:
    names = Counter(mutant.name for mutant in MUTANTS)
    assert len(MUTANTS) >= 40
    assert max(names.values()) == 1
