"""Objects from strangers are not unpickled."""

from __future__ import annotations

import pytest

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
