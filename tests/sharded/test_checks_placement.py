"""From placements to ranks."""

from __future__ import annotations

import pytest
import torch

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import check_all_raise, on
from tilework.sharded import RemoteDevice, ShardMetadata, parse_and_validate_remote_device

parse = parse_and_validate_remote_device


def test_a_rank_and_its_device() -> None:
    def program(rank: int) -> None:
        assert parse(None, RemoteDevice("rank:0/cpu")) == (0, torch.device("cpu"))
        assert parse(None, RemoteDevice("rank:1/cuda:7")) == (1, torch.device("cuda:7"))

    on(2, program)


def test_no_placement() -> None:
    placement = ShardMetadata([10], [0]).placement
    check_all_raise(1, lambda _: parse(None, placement), ValueError, "remote device is None")


def test_a_device_alone_does_not_tell_whose_it_is() -> None:
    check_all_raise(
        1, lambda _: parse(None, RemoteDevice("cpu")), ValueError, "write 'rank:<rank>/cpu'"
    )


def test_ranks_are_global_ones_of_the_group() -> None:
    def program(rank: int) -> None:
        members = [r for r in range(4) if r % 2 == rank % 2]
        group = dist.new_group(members, use_local_synchronization=True)
        for member in members:
            assert parse(group, RemoteDevice(f"rank:{member}/cuda:{member // 2}"))[0] == member
        with pytest.raises(
            ValueError, match=f"Global rank {1 - rank % 2} does not exist in input process group"
        ):
            parse(group, RemoteDevice(f"rank:{1 - rank % 2}/cpu"))

    on(4, program)


def test_ranks_outside_a_group_know_its_members_too() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1, 2])
        assert parse(group, RemoteDevice("rank:2/cpu")) == (2, torch.device("cpu"))
        parse(group, RemoteDevice("rank:0/cpu"))

    check_all_raise(3, program, ValueError, r"Global rank 0 does not exist.*\[1, 2\]")


def test_a_workers_name_takes_rpc() -> None:
    check_all_raise(
        1,
        lambda _: parse(None, RemoteDevice("worker0/cpu")),
        RuntimeError,
        "RPC framework needs to be initialized",
    )
