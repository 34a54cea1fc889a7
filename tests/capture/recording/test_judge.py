"""The step as the judge of a record: on a schedule, on copies, on all ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tilework.capture import capture
from tilework.errors import CaptureError
from tilework.testing import run_ranks


@pytest.mark.parametrize(
    ("check", "calls"),
    [
        (True, [1, 2, 4, 8, 16]),
        ("always", [1, 2, 3, 4, 5]),
        (3, [1, 2, 5, 8, 11]),
        ("never", [1, 2]),
        (False, [1, 2]),
    ],
)
def test_the_step_runs_in_the_calls_that_are_checked(
    check: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    note = ran.append  # no rule sees what a method in C refers to

    def step(x: Tensor) -> Tensor:
        note(int(os.environ["TILEWORK_TEST_CALL"]))
        return x * 2

    program = capture(step, check=check)
    for number in range(1, 20):
        monkeypatch.setenv("TILEWORK_TEST_CALL", str(number))
        assert program(torch.ones(2)).tolist() == [2.0, 2.0]
    assert ran[:5] == calls


@pytest.mark.parametrize("check", ["sometimes", 0, -2, 1.5])
def test_other_schedules_are_refused(check: Any) -> None:
    with pytest.raises(ValueError, match="check must be True, False"):
        capture(lambda x: x, check=check)


def test_a_change_that_no_rule_sees_is_found_by_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEWORK_TEST_FACTOR", "1")
    program = capture(lambda x: x * float(os.environ["TILEWORK_TEST_FACTOR"]))
    for _ in range(4):
        program(torch.ones(2))
    monkeypatch.setenv("TILEWORK_TEST_FACTOR", "3")
    for _ in range(3):
        program(torch.ones(2))
    with pytest.raises(CaptureError, match=r"in call 8, .* another result.* since 4 was checked"):
        program(torch.ones(2))
    assert program(torch.ones(2)).tolist() == [3.0, 3.0]  # recorded again


def test_a_write_that_the_record_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_TEST_COUNTS", raising=False)
    total = torch.zeros(1)

    def step(x: Tensor) -> Tensor:
        if "TILEWORK_TEST_COUNTS" in os.environ:
            total.add_(1)
        return x + 1

    program = capture(step)
    for _ in range(3):
        program(torch.ones(2))
    monkeypatch.setenv("TILEWORK_TEST_COUNTS", "1")
    with pytest.raises(CaptureError, match="another total, which the record does not write"):
        program(torch.ones(2))


def test_a_rank_whose_record_differs_raises_on_all_ranks() -> None:
    def program(rank: int) -> bool:
        factor = iter([1.0, 1.0, 1.0 + rank]).__next__

        def step(x: Tensor) -> Tensor:
            total = x + 0
            dist.all_reduce(total)
            return total * factor()

        fast = capture(step)
        for _ in range(3):
            fast(torch.ones(2))
        with pytest.raises(CaptureError, match="in call 4") as error:
            fast(torch.ones(2))
        return "another rank's record" in str(error.value)

    assert run_ranks(2, program) == [True, False]
