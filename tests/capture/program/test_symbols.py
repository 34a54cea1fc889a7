"""Symbols for compilers: what a compiler has assumed of sizes is asked of others."""

from __future__ import annotations

from typing import Any

import torch

from tilework.capture.program.graph import Hole
from tilework.capture.program.symbols import Symbols


def test_equal_integers_share_a_symbol() -> None:
    symbols = Symbols([6, 3, 6])
    made = symbols.tensor(torch.zeros(6, 8), (Hole(0, 6), 8))
    assert str(made.shape[0]) == str(symbols.at(0)) == str(symbols.at(2)) != str(symbols.at(1))
    assert symbols.tensor(torch.zeros(6, 8)).shape == (6, 8)
    assert [symbols.hold(x) for x in ([8, 3, 8], [8, 3, 6], [2, 1 << 40, 2])] == [True, False, True]


def test_what_was_assumed_of_a_size_is_asked_of_others() -> None:
    symbols = Symbols([6, 12])
    size, twice = symbols.at(0), symbols.at(1)
    assert size % 2 == 0  # as a compiler asks
    assert [symbols.hold([x, 12]) for x in (4, 5, 6)] == [True, False, True]
    assert size * 2 == twice
    assert [symbols.hold(x) for x in ([8, 16], [8, 12])] == [True, False]


def test_constants_that_are_no_sizes_stay() -> None:
    values: list[Any] = [6, 1, 0.5, "a"]
    symbols = Symbols(values)
    assert int(symbols.at(0)) == 6
    assert symbols.hold(values)
    assert not any(symbols.hold(x) for x in ([5, 1, 0.5, "a"], [6, 2, 0.5, "a"], [6, 1, 0.25, "a"]))
