"""Objects from strangers are not unpickled; objects in a coalescing block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tilework.testing import run_ranks


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


def test_objects_in_a_coalescing_block() -> None:
    def program(rank: int) -> list[object]:
        total = torch.ones(1)
        gathered: list[Any] = [None, None]
        listed: list[Any] | None = [None, None] if rank == 0 else None
        sent, own = ["ab" * rank], [None]
        with dist.coalescing_manager():
            dist.all_reduce(total)
            dist.all_gather_object(gathered, "x" * rank)
            dist.gather_object(rank, listed)
            dist.broadcast_object_list(sent, src=1)
            dist.scatter_object_list(own, ["a", "b"] if rank == 0 else None)
        return [total.item(), gathered, listed, sent, own]

    first, second = run_ranks(2, program)
    assert first == [2.0, ["", "x"], [0, 1], ["ab"], ["a"]]
    assert second == [2.0, ["", "x"], None, ["ab"], ["b"]]
