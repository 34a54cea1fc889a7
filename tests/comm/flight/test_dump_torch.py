"""Programs of torch.distributed on tilework's groups leave flight records, too."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

import tilework.torch_backend
from tests.faults.forked_ranks import ForkedRanks, Say
from tilework.comm.backend import core_error
from tilework.comm.flight.document import decode
from tilework.errors import CollectiveMismatchError

pytestmark = pytest.mark.skipif(core_error() is not None, reason=str(core_error()))


def test_all_groups_of_a_rank_are_in_one_record(tmp_path: Path) -> None:
    assert tilework.torch_backend  # registers the backend
    folder = tmp_path / "flight"

    def story(rank: int, say: Say) -> None:
        os.environ["TILEWORK_FLIGHT_DIR"] = str(folder)
        url = f"file://{tmp_path / 'store'}"
        limit = timedelta(seconds=120)
        torch_dist.init_process_group("tilework", url, limit, world_size=3, rank=rank)
        pair = torch_dist.new_group([1, 2])
        torch_dist.barrier()
        if rank > 0:
            with pytest.raises(CollectiveMismatchError):
                torch_dist.all_reduce(torch.ones(rank), group=pair)
        torch_dist.destroy_process_group()
        say("over")

    with ForkedRanks(3, story) as ranks:
        assert [rank.hear(120) for rank in ranks] == ["over"] * 3
    assert sorted(os.listdir(folder)) == ["rank-1.json", "rank-2.json"]
    record = decode((folder / "rank-2.json").read_bytes())
    assert record.world_size == 3
    assert sorted(group.ranks for group in record.groups) == [(0, 1, 2), (1, 2)]
    last = next(group.entries[-1] for group in record.groups if group.ranks == (1, 2))
    assert last.what == "all_reduce float32 [2] SUM"
    # The program's own line, not one of torch's.
    assert last.site.endswith(" in story")
