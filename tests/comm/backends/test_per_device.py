"""The c10d document's ProcessGroupWithDispatchedCollectivesTests: a world of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.comm.conftest import Join, Runner
from tilework.testing import run_ranks

USABLE = [name for name in ("threads", "shm", "gloo") if dist.is_backend_available(name)]


def test_no_backend_need_be_named(processes: Runner, tmp_path: Path) -> None:
    def body(rank: int) -> str:
        store = dist.FileStore(os.fspath(tmp_path / "store"), 1)
        dist.init_process_group(store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        return dist.get_backend()

    assert processes(1, body) == ["shm" if "shm" in USABLE else "gloo"]


@pytest.mark.parametrize("name", USABLE)
def test_every_backend_makes_a_group(name: str, processes: Runner, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        store = dist.FileStore(os.fspath(tmp_path / "store"), 1)
        dist.init_process_group(backend=name, rank=rank, world_size=1, store=store)
        group = dist.get_default_group()
        assert (group.rank(), group.size(), group.name()) == (0, 1, name)
        dist.destroy_process_group()

    processes(1, body)


def test_known_backends_are_listed() -> None:
    assert set(dist.Backend.backend_list) >= {"undefined", "threads", "shm", "gloo", "nccl"}


def _calls() -> dict[str, Callable[[torch.Tensor], object]]:
    return {
        "reduce": lambda t: dist.reduce(t, 0),
        "broadcast": lambda t: dist.broadcast(t, 0),
        "all_reduce": dist.all_reduce,
        "all_gather": lambda t: dist.all_gather([t], t),
        "gather": lambda t: dist.gather(t, [t], 0),
        "reduce_scatter": lambda t: dist.reduce_scatter(t, [t]),
        "barrier": lambda t: dist.barrier(),
        "all_to_all": lambda t: dist.all_to_all([t], [t]),
        "scatter": lambda t: dist.scatter(t, [t], 0),
    }


def test_collectives_of_one_rank_in_place(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 1)
        for name, call in _calls().items():
            tensor = torch.arange(4.0).reshape(2, 2)
            call(tensor)
            assert tensor.equal(torch.arange(4.0).reshape(2, 2)), name

    ranks(1, body)


def test_all_reduce_coalesced(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 1)
        tensors = [torch.ones(10, 10)]
        dist.all_reduce_coalesced(tensors, dist.ReduceOp.SUM)
        assert tensors[0].equal(torch.ones(10, 10))

    ranks(1, body)


def test_all_to_all_single(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 1)
        output = torch.zeros(2, 2)
        dist.all_to_all_single(output, torch.ones(2, 2))
        assert output.equal(torch.ones(2, 2))

    ranks(1, body)


@pytest.mark.skipif("shm" not in USABLE, reason="no backend here has a fast path")
def test_the_fast_path_has_the_groups_timeout() -> None:
    def body(rank: int) -> list[object]:
        group = dist.new_group([0, 1], backend="cpu:shm,cuda:threads")
        assert isinstance(group, dist.ProcessGroup)
        group.set_timeout(timedelta(milliseconds=60))
        return [getattr(group.fast_path, "timeout", 0.06), type(group).__name__]

    assert run_ranks(2, body, kind="threads", backend="shm") == [[0.06, "DispatchGroup"]] * 2


@pytest.mark.skipif("gloo" not in USABLE, reason="needs an engine that serves several devices")
def test_an_engine_serves_the_devices_that_it_is_named_for() -> None:
    def body(rank: int) -> None:
        group = dist.new_group(backend="cuda:gloo")
        with pytest.raises(ValueError, match="moves cuda tensors, got one on cpu"):
            dist.all_reduce(torch.ones(3), group=group)

    run_ranks(1, body, backend="gloo")
