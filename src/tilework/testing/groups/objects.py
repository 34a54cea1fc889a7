"""Operations on any Python object that can be pickled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tilework.testing.groups.base import GroupSuite, on_ranks, refused, still_works
from tilework.testing.groups.values import assert_same


def thing(rank: int) -> Any:
    """The object of ``rank``: of another type and size than the neighbours' objects."""
    things: list[Any] = [
        None,
        {"rank": rank, "nested": [1, (2, {"x": b"y" * rank})]},
        "z" * 300_000,
        {"tensor": torch.full((3, 2), float(rank))},
        [],
    ]
    return things[rank % len(things)]


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare objects that may hold tensors."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict) and "tensor" in expected:
        assert_same(actual["tensor"], expected["tensor"])
    else:
        assert actual == expected


class ObjectSuite(GroupSuite):
    """The operations on objects."""

    @on_ranks()
    def test_all_gather_object(self, rank: int, n: int) -> None:
        everyone: list[Any] = ["?"] * n
        dist.all_gather_object(everyone, thing(rank))
        for source, got in enumerate(everyone):
            assert_equal(got, thing(source))

    @on_ranks()
    def test_gather_object(self, rank: int, n: int) -> None:
        for root in range(n):
            everyone: list[Any] | None = ["?"] * n if rank == root else None
            dist.gather_object(thing(rank), everyone, dst=root)
            for source, got in enumerate(everyone or []):
                assert_equal(got, thing(source))

    @on_ranks()
    def test_broadcast_object_list(self, rank: int, n: int) -> None:
        for root in range(n):
            mine = [thing(i) for i in range(5)] if rank == root else ["?"] * 5
            dist.broadcast_object_list(mine, src=root)
            for i, got in enumerate(mine):
                assert_equal(got, thing(i))

    @on_ranks()
    def test_scatter_object_list(self, rank: int, n: int) -> None:
        for root in range(n):
            output: list[Any] = ["?"]
            inputs = [thing(dst + root) for dst in range(n)] if rank == root else None
            dist.scatter_object_list(output, inputs, src=root)
            assert_equal(output[0], thing(rank + root))

    @on_ranks(2)
    def test_send_and_recv_object_list(self, rank: int) -> None:
        objects = [thing(i) for i in range(5)]
        if rank == 0:
            dist.send_object_list(objects, dst=1)
        elif rank == 1:
            received: list[Any] = [None] * 5
            assert dist.recv_object_list(received, src=0) == 0
            for got, sent in zip(received, objects, strict=True):
                assert_equal(got, sent)

    @on_ranks(3)
    def test_recv_object_list_from_any(self, rank: int) -> None:
        if rank == 2:
            dist.send_object_list(["from two", None], dst=0)
        elif rank == 0:
            received: list[Any] = [0, 0]
            assert dist.recv_object_list(received) == 2
            assert received == ["from two", None]

    @on_ranks(3)
    def test_in_a_sub_group_roots_are_global_ranks(self, rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        mine = ["news"] if rank == 2 else [None]
        dist.broadcast_object_list(mine, src=2, group=group)
        assert mine == ["news"]
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, rank, group=group)
        assert everyone == [1, 2]

    @on_ranks(2)
    def test_an_object_that_cannot_be_pickled_moves_nothing(self, rank: int) -> None:
        with pytest.raises(Exception, match=r"(?i)pickle|lambda"):
            dist.all_gather_object([None, None], lambda: rank)
        still_works(2)

    @on_ranks(2)
    def test_lists_of_the_wrong_length_are_refused(self, rank: int) -> None:
        with refused():
            dist.all_gather_object([None], 1)
        with refused():
            dist.gather_object(1, [None] if rank == 0 else [None, None], dst=0)
        with refused():
            dist.scatter_object_list([], [1, 2] if rank == 0 else None, src=0)
        still_works(2)
