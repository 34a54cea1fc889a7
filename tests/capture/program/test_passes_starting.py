"""Collectives that start early and are awaited late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import tilework.distributed as dist
from tests.capture.program.collective_programs import difference, programs
from tests.capture.twins import run_twins
from tests.hypothesis_settings import examples
from tilework.capture import capture
from tilework.capture.program import merging, passes
from tilework.testing import run_ranks


@pytest.fixture(autouse=True)
def small_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "LEAST_BYTES", 1)
    monkeypatch.setattr(passes, "has_spare_core", lambda ranks: True)
    monkeypatch.setattr(merging, "SMALL_BYTES", 0)


def order_of(step: Any, *args: Tensor) -> list[str]:
    """The names of a program's instructions on rank 0 of two."""

    def program(rank: int) -> list[str]:
        fast = capture(step)
        for _ in range(4):
            fast(*[each.clone() for each in args])
        (record,) = fast.records
        return [each.name.split(" ")[0] for each in record.graph.instructions]

    return run_ranks(2, program)[0]


def test_two_collectives_run_beside_operators() -> None:
    def step(x: Tensor, y: Tensor, z: Tensor) -> Any:
        before = z.sin()
        dist.all_reduce(x)
        twice = x * 2
        dist.all_reduce(y)
        return twice, y + 1, before + z.cos()

    assert order_of(step, *torch.randn(3, 5)) == [
        *["allreduce", "aten.sin.default", "allreduce", "aten.cos.default", "aten.add.Tensor"],
        *["wait", "aten.mul.Tensor", "wait", "aten.add.Tensor"],
    ]


def test_a_write_through_a_view_waits_for_the_collective() -> None:
    def step(x: Tensor, y: Tensor) -> Any:
        half = x[:2]
        dist.all_reduce(x)
        half.add_(1)
        return y.sin(), x * 2

    names = order_of(step, torch.ones(4), torch.ones(4))
    assert names.index("aten.sin.default") < names.index("wait") < names.index("aten.add_.Tensor")


def test_what_a_collective_reads_is_not_overwritten() -> None:
    def step(x: Tensor, out: Tensor, y: Tensor) -> Any:
        dist.all_gather_into_tensor(out, x)
        x.zero_()
        return y.sin(), out * 2

    names = order_of(step, torch.ones(2), torch.ones(4), torch.ones(4))
    assert names.index("wait") < names.index("aten.zero_.default")


def test_nothing_is_in_flight_where_a_value_is_compared() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        dist.all_reduce(x)
        y = y.sin()
        return y.exp() if y.sum() < 9 else y.log()

    names = order_of(step, torch.ones(2), torch.ones(2))
    assert names.index("wait") < names.index("expect")


def test_a_collective_without_work_beside_it_blocks() -> None:
    def step(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x.view(2, -1) * 2

    assert "wait" not in order_of(step, torch.ones(4))


def test_small_collectives_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor, y: Tensor) -> Any:
        dist.all_reduce(x)
        return y.sin(), x * 2

    monkeypatch.setattr(passes, "LEAST_BYTES", 17)
    assert "wait" not in order_of(step, torch.ones(4), torch.ones(9))


def test_ranks_without_a_second_core_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor, y: Tensor) -> Any:
        dist.all_reduce(x)
        return y.sin(), x * 2

    monkeypatch.setattr(passes, "has_spare_core", lambda ranks: ranks < 2)
    assert "wait" not in order_of(step, torch.ones(4), torch.ones(9))


def test_few_bytes_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor, y: Tensor, z: Tensor) -> Any:
        dist.all_reduce(x)
        dist.all_reduce(y)
        return z.sin(), x + y

    monkeypatch.setattr(passes, "MOST_BYTES", 31)
    assert order_of(step, *torch.ones(3, 8))[:2] == ["allreduce", "allreduce"]


@pytest.mark.filterwarnings("ignore:step is recorded again")
def test_arguments_that_share_memory_are_recorded_again() -> None:
    def program(rank: int) -> int:
        def step(x: Tensor, y: Tensor) -> Any:
            dist.all_reduce(x)
            return y.sin(), x + 1

        fast = capture(step)
        for _ in range(3):
            fast(torch.ones(4), torch.ones(4))
        memory = torch.ones(6)
        found, _ = fast(memory[:4], memory[2:])
        expected = torch.tensor([2.0, 2.0, 1.0, 1.0]).sin()
        assert torch.equal(found, expected)
        return len(fast.records)

    assert run_ranks(2, program) == [2, 2]


@pytest.mark.filterwarnings("ignore:step is recorded again")
def test_a_rank_that_moves_nothing_is_recorded_again_with_the_others() -> None:
    def program(rank: int) -> int:
        def step(x: Tensor, y: Tensor) -> Any:
            dist.all_reduce(x)
            return y.sin() if rank else y.view(2, 2), x + 1

        fast = capture(step)
        for _ in range(3):
            fast(torch.ones(4), torch.ones(4))
        memory = torch.ones(6)
        fast(memory[:4], memory[2:])
        return len(fast.records)

    assert run_ranks(2, program) == [2, 2]


def test_ranks_that_move_other_instructions() -> None:
    def program(rank: int) -> None:
        def step(a: Tensor, b: Tensor) -> Any:
            x, y = a * 1, b * 1
            dist.all_reduce(x)
            z = x * 2 if rank else y * 3
            dist.all_reduce(y)
            return x + y, z.sin()

        run_twins(lambda: (step, dict), [(torch.ones(4), torch.ones(4)) for _ in range(9)])

    run_ranks(3, program)


@pytest.mark.parametrize("most_merged", [0, 40])
@examples(30)
@given(chosen=programs)
def test_random_programs_give_the_same_bits(most_merged: int, chosen: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "SMALL_BYTES", most_merged)
        wrong = difference(chosen)
    assert wrong is None, wrong
