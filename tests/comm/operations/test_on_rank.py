"""Work of one rank for all, values that must be the same, decisions that all make alike."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.tables import each
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks


class ConfigError(Exception):
    def __init__(self, key: str, line: int) -> None:
        super().__init__(key, line)


class UnlikeError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, key: str) -> None:
        super().__init__()


def test_one_rank_works_and_all_get_the_result() -> None:
    calls: list[int] = []

    def program(rank: int) -> Any:
        def work() -> dict[str, torch.Tensor]:
            calls.append(rank)
            return {"x": torch.ones(2)}

        return dist.on_rank(1, work)

    results = run_ranks(3, program)
    assert calls == [1]
    assert all(torch.equal(result["x"], torch.ones(2)) for result in results)


def test_its_error_is_raised_on_all_with_its_class() -> None:
    def program(rank: int) -> tuple[Any, ...]:
        def fail() -> None:
            raise ConfigError("lr", 3)

        with pytest.raises(ConfigError) as caught:
            dist.on_rank(0, fail)
        dist.barrier()  # the group goes on
        return caught.value.args

    assert run_ranks(2, program) == [("lr", 3)] * 2


def test_an_error_that_cannot_be_sent_is_told_by_its_text() -> None:
    def program(rank: int) -> None:
        def fail() -> None:
            raise UnlikeError("key")

        with pytest.raises(UnlikeError if rank == 0 else RuntimeError):
            dist.on_rank(0, fail)

    run_ranks(2, program)


def test_a_result_that_cannot_be_sent_raises_on_all() -> None:
    def program(rank: int) -> None:
        with pytest.raises(TypeError, match="a lock cannot be pickled"):
            dist.on_rank(0, threading.Lock)

    run_ranks(2, program)


def test_ranks_of_a_group_work_for_it() -> None:
    def program(rank: int) -> int | None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        with pytest.raises(ValueError, match="not part of group"):
            dist.on_rank(0, lambda: rank, group)
        return dist.on_rank(2, lambda: rank, group)

    assert run_ranks(3, program) == [None, 2, 2]


SAME = [
    torch.zeros(0, 3),
    torch.tensor(float("nan")),
    torch.ones(2, dtype=torch.complex64).conj(),
    {"a": [1, (2.0, "x")], "b": {3}, "c": None},
]


@each("value", SAME)
def test_values_that_are_the_same_pass(value: Any) -> None:
    run_ranks(2, lambda rank: dist.assert_same(value))


def test_the_order_of_sets_does_not_count() -> None:
    def program(rank: int) -> list[int]:
        inner = frozenset([8, 0] if rank else [0, 8])
        dist.assert_same({"plain": set(inner), "nested": {inner, "x"}})
        return list(inner)

    first, second = run_ranks(2, program)
    assert first != second


@each(
    ("first", "second", "message"),
    [
        (torch.ones(2), torch.ones(2).double(), r"value=float32.*value=float64"),
        ({"a": [1, 2]}, {"a": [1, 3]}, r"\['a'\]\[1\]=2 on rank 0.*\['a'\]\[1\]=3 on rank 1"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, r"value\.keys\(\)"),
        ([1], [1, 2], r"len\(value\)=1 on rank 0"),
        (1, 1.0, "value=1 on rank 0"),
        ({1, 2}, {1, 3}, "value=set of digest"),
        ({1}, frozenset({1}), "value=set of digest"),
    ],
)
def test_values_that_differ_raise_on_all_ranks(first: Any, second: Any, message: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match=rf"(?s)the step must be the same.*{message}"):
            dist.assert_same(second if rank else first, "the step")
        dist.barrier()

    run_ranks(2, program)


def test_parts_of_tensors_are_refused() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(TypeError, match="whose parts lie on several ranks"):
            dist.assert_same([x])

    run_ranks(2, program)


def test_a_group_agrees_if_all_do() -> None:
    def program(rank: int) -> tuple[bool, bool]:
        group = dist.get_default_group()
        return group.agree(True), group.agree(rank != 1)

    assert run_ranks(3, program) == [(True, False)] * 3


def test_a_rank_that_left_is_no_answer() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            return
        with pytest.raises(dist.PeerLostError):
            dist.get_default_group().agree(True)

    run_ranks(2, program)
