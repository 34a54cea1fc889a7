"""Arguments of run_ranks; what it does is used by most other tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tables import each
from tilework.testing import run_ranks


def nothing(rank: int) -> None:
    pass


@each(
    ("arguments", "error", "message"),
    [
        ((0, nothing), ValueError, "at least one rank, got 0"),
        ((nothing, 2), TypeError, r"as in run_ranks\(2, program\): got <function nothing"),
        (("2", nothing), TypeError, "got '2' and"),
    ],
)
def test_arguments_that_cannot_be(
    arguments: tuple[Any, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_ranks(*arguments)


def test_other_kinds_of_ranks() -> None:
    kind: Any = "process"
    with pytest.raises(ValueError, match="'threads' or 'processes', got 'process'"):
        run_ranks(2, nothing, kind=kind)
