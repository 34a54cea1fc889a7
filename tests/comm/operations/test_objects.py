"""Objects of strangers, and objects that cannot be sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import tilework.distributed as dist
from tilework.testing import run_ranks

Call = Callable[[int, Any], Any]


def test_groups_of_strangers_exchange_plain_data_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> list[object]:
        group = dist.get_default_group()
        monkeypatch.setattr(type(group), "authenticated", property(lambda group: False))
        with pytest.raises(dist.DistBackendError, match="would unpickle what strangers"):
            dist.all_gather_object([None], rank)
        objects: list[object] = [None]
        dist.all_gather_object(objects, {"rank": rank}, weights_only=True)
        return objects

    assert run_ranks(1, program) == [[{"rank": 0}]]


@pytest.mark.parametrize(
    "call",
    [
        lambda rank, obj: dist.all_gather_object([None, None], rank and obj),
        lambda rank, obj: dist.gather_object(rank and obj, [None, None] if rank == 0 else None),
        lambda rank, obj: dist.gather_object(1, [None] if rank == 0 and obj else None),
        lambda rank, obj: dist.broadcast_object_list([obj], src=1),
        lambda rank, obj: dist.scatter_object_list([None], [1, obj] if rank == 1 else None, src=1),
        lambda rank, obj: dist.scatter_object_list([None], [obj] if rank == 1 else None, src=1),
        lambda rank, obj: (
            dist.send_object_list([1, obj], dst=0)
            if rank == 1
            else dist.recv_object_list([0, 0], src=1)
        ),
    ],
)
def test_all_ranks_raise_if_an_object_of_one_rank_cannot_be_sent(call: Call) -> None:
    def program(rank: int) -> tuple[str, list[Any]]:
        with pytest.raises((TypeError, ValueError)) as failure:
            call(rank, threading.Lock())
        objects = [None, None]
        dist.all_gather_object(objects, f"second of {rank}")
        return str(failure.value), objects

    (first, objects), (second, _) = run_ranks(2, program)
    assert objects == ["second of 0", "second of 1"]
    assert {first.startswith("rank "), second.startswith("rank ")} == {True, False}
