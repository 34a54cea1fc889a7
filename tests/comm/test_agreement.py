"""agree: what one rank says, all hear; what one raises, all raise."""

from __future__ import annotations

import pytest
import torch

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import check_all_raise, errors_of, on
from tests.tables import each
from tilework.comm.agreement import agree, agree_equal
from tilework.errors import DistError
from tilework.testing import run_ranks


def test_all_hear_what_each_says() -> None:
    said = on(3, lambda rank: agree(lambda: {"rank": rank, "of": [1.5, None, "x"]}))
    assert said == [[{"rank": r, "of": [1.5, None, "x"]} for r in range(3)]] * 3


def test_one_rank_alone() -> None:
    assert on(1, lambda rank: agree(lambda: "me")) == [["me"]]
    check_all_raise(1, lambda rank: agree(lambda: int("x")), ValueError, "^invalid literal")


class MuteError(ValueError):
    """Without words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_has_no_text_is_raised_by_all() -> None:
    def make(rank: int) -> None:
        if rank == 1:
            raise MuteError

    errors = errors_of(2, lambda rank: agree(lambda: make(rank)))
    assert type(errors[1]) is MuteError
    assert str(errors[0]) == "rank 1: (its message cannot be shown)"


class OwnError(NotImplementedError, ValueError):
    """Of two kinds."""


@each(
    ("error", "others"),
    [
        (ValueError("no"), ValueError),
        (TypeError("no"), TypeError),
        (IndexError("no"), IndexError),
        (NotImplementedError("no"), NotImplementedError),
        (DistError("no"), RuntimeError),
        (OSError("no"), RuntimeError),
        (OwnError("no"), NotImplementedError),
    ],
)
def test_what_one_raises_all_raise(error: Exception, others: type[Exception]) -> None:
    def make(rank: int) -> int:
        if rank == 1:
            raise error
        return rank

    errors = errors_of(3, lambda rank: agree(lambda: make(rank)))
    assert errors[1] is error
    for rank in (0, 2):
        assert type(errors[rank]) is others
        assert str(errors[rank]) == "rank 1: no"


def test_each_raises_its_own_if_several_do() -> None:
    def make(rank: int) -> None:
        if rank:
            raise ValueError(f"mine is {rank}")

    errors = errors_of(3, lambda rank: agree(lambda: make(rank)))
    assert [str(error) for error in errors] == ["rank 1: mine is 1", "mine is 1", "mine is 2"]


def test_in_a_group_ranks_are_named_by_their_global_numbers() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank:
            assert agree(lambda: rank, group) == [1, 2]
            agree(lambda: [0, 0][rank - 1 :][1], group)  # no second entry on rank 2

    errors = errors_of(3, program)
    assert errors[0] is None
    assert [str(error) for error in errors[1:]] == [
        "rank 2: list index out of range",
        "list index out of range",
    ]


def test_outside_a_group_nothing_is_made() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1])
        if rank == 0:
            with pytest.warns(UserWarning, match="does not belong to the given group"):
                assert agree(lambda: pytest.fail("made"), group) == []

    on(2, program)


def test_the_group_serves_on_after_an_error() -> None:
    def program(rank: int) -> list[int]:
        with pytest.raises(ValueError, match="never"):
            agree(lambda: 1 if rank else _never())
        return agree(lambda: rank)

    assert on(2, program) == [[0, 1], [0, 1]]


def _never() -> int:
    raise ValueError("never")


def test_between_processes() -> None:
    def program(rank: int) -> object:
        assert agree(lambda: torch.float16) == [torch.float16] * 2
        with pytest.raises(ValueError, match="never"):
            agree(lambda: 1 if rank else _never())
        return agree(lambda: (rank, "x"))

    assert run_ranks(2, program, kind="processes") == [[(0, "x"), (1, "x")]] * 2


def test_what_cannot_be_sent_leaves_nobody_waiting() -> None:
    errors = errors_of(2, lambda rank: agree(lambda: (lambda: 0) if rank else 0))
    assert all(errors)
    assert "rank 1: " in str(errors[0])


def test_a_fact_that_only_one_rank_has_differs() -> None:
    def program(rank: int) -> None:
        agree_equal(lambda: {"size": 1, **({"order": "C"} if rank == 1 else {})}, what="alike:")

    check_all_raise(3, program, ValueError, "^alike: order=nothing on rank 0 does not match")
