"""Symbols for compilers: what a compiler has assumed of a size is asked of others."""

from __future__ import annotations

import torch

from tilework.capture.program.sizes import Size
from tilework.capture.program.symbols import Symbols


def test_shapes_follow_the_size() -> None:
    symbols = Symbols(6)
    like = torch.zeros(6, 8)
    made = symbols.tensor(like, (Size(1, 0, 1), 8))
    halves = symbols.tensor(like, (Size(1, 2, 2), 3))
    assert str(made.shape[0]) == str(symbols.size)
    assert symbols.tensor(like).shape == (6, 8)
    assert all(symbols.hold(size) for size in (2, 7, 1 << 40))
    assert (made.shape[0], halves.shape[0]) == (6, 4)


def test_what_was_assumed_of_the_size_is_asked_of_others() -> None:
    symbols = Symbols(6)
    assert symbols.size % 2 == 0  # as a compiler asks
    assert [symbols.hold(size) for size in (4, 5, 6)] == [True, False, True]
    assert symbols.size < 100
    assert [symbols.hold(size) for size in (98, 100)] == [True, False]


def test_a_size_that_was_fixed_is_the_only_one() -> None:
    symbols = Symbols(6)
    assert int(symbols.size) == 6
    assert [symbols.hold(size) for size in (5, 6)] == [False, True]
