"""Keywords and names of torch.distributed's that programs use: they do what they do there."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

import tilework.distributed as dist
from tilework.distributed import distributed_c10d
from tilework.testing import run_ranks


def test_a_barrier_has_a_timeout_of_its_own() -> None:
    def program(rank: int) -> str:
        dist.barrier(timeout=timedelta(minutes=1))
        if rank == 1:
            return ""
        with pytest.raises((dist.CollectiveTimeoutError, dist.PeerLostError)) as caught:
            dist.barrier(timeout=timedelta(seconds=0.2))
        return str(caught.value)

    def waits(rank: int) -> str:
        text = program(rank)
        if rank == 1:
            time.sleep(0.5)
        return text

    assert "rank 1" in run_ranks(2, waits)[0]


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_ranks_of_a_group_can_keep_the_order_in_which_they_were_named(backend: str) -> None:
    def program(rank: int) -> tuple[int, list[float]]:
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        parts = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([float(rank)]), group=group)
        return dist.get_rank(group), [part.item() for part in parts]

    order = [2.0, 0.0, 1.0]
    assert run_ranks(3, program, backend=backend) == [(1, order), (2, order), (0, order)]


def test_objects_may_be_asked_to_go_in_batches() -> None:
    def program(rank: int) -> list[object]:
        objects: list[object] = [1, "a"] if rank == 0 else [None, None]
        if rank == 0:
            dist.send_object_list(objects, dst=1, use_batch=True)
        else:
            dist.recv_object_list(objects, src=0, use_batch=True)
        return objects

    assert run_ranks(2, program)[1] == [1, "a"]


def test_a_split_of_a_part_counts_ranks_within_it() -> None:
    def program(rank: int) -> list[int] | None:
        part = dist.new_group([1, 2, 3])
        if rank == 0:
            return None
        mine = dist.split_group(part, [[0, 2]])
        return dist.get_process_group_ranks(mine) if mine else None

    assert run_ranks(4, program) == [None, [1, 3], None, [1, 3]]


def test_ranks_that_split_differently_all_raise() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match="must cut the group equally"):
            dist.split_group(split_ranks=[[0], [1]] if rank == 0 else [[0, 1]])
        with pytest.raises(ValueError, match="named twice"):
            dist.split_group(split_ranks=[[0], [0, 1]])

    run_ranks(2, program)


def test_groups_have_the_methods_that_programs_call() -> None:
    def program(rank: int) -> tuple[list[float], list[float], bool]:
        group = dist.get_default_group()
        gathered, summed = torch.zeros(4), torch.zeros(1)
        group._allgather_base(gathered, torch.full((2,), float(rank))).wait()
        group.reduce_scatter_tensor_coalesced([summed], [torch.ones(2)]).synchronize()
        return gathered.tolist(), summed.tolist(), group._get_backend("cpu") is group

    assert run_ranks(2, program)[0] == ([0.0, 0.0, 1.0, 1.0], [2.0], True)


def test_underscored_names_are_the_public_ones() -> None:
    for name in distributed_c10d.__all__:
        assert getattr(dist, name) is getattr(distributed_c10d, name)
    assert distributed_c10d._get_default_group is dist.get_default_group
    assert distributed_c10d.all_reduce is dist.all_reduce


def test_the_timeout_of_a_group_is_set_under_torchs_name() -> None:
    def program(rank: int) -> None:
        distributed_c10d._set_pg_timeout(timedelta(seconds=0.2))
        if rank == 0:
            with pytest.raises((dist.CollectiveTimeoutError, dist.PeerLostError)):
                dist.barrier()
        else:
            time.sleep(0.5)

    run_ranks(2, program)


def test_a_breakpoint_skips_calls() -> None:
    def program(rank: int) -> None:
        for _ in range(2):
            dist.breakpoint(rank=0, skip=2)

    run_ranks(2, program)


def test_the_other_ranks_wait_while_one_is_in_the_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr("pdb.set_trace", lambda: stopped.append("here"))
    run_ranks(2, lambda rank: dist.breakpoint(rank=1))
    assert stopped == ["here"]


def test_a_left_out_name_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"no Reducer, which torch.*Use Distributed.*report"):
        exec("from tilework.distributed import Reducer")
    with pytest.raises(AttributeError, match="no Reducer"):
        dist.Reducer  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(dist, "Reducer")
    assert not hasattr(dist, "nothing")
