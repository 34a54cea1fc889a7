"""Making, naming and ending groups."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.comm.conftest import Join, Runner
from tilework.comm import groups
from tilework.comm.making.rank_watch import RankWatch
from tilework.testing import run_ranks


@pytest.fixture
def alone() -> Callable[..., None]:
    """Makes a world of one rank, in a thread's own World."""

    def run(fn: Callable[[], object], backend: str = "threads") -> None:
        run_ranks(1, lambda rank: fn(), backend=backend, timeout=timedelta(seconds=120))

    return run


@pytest.fixture
def nobody() -> Callable[[Callable[[], object]], None]:
    """Runs something where there is no group."""

    def run(fn: Callable[[], object]) -> None:
        run_ranks(1, lambda rank: fn(), init=False, timeout=timedelta(seconds=120))

    return run


Alone = Callable[..., None]


def test_before_there_is_a_group(nobody: Alone) -> None:
    def body() -> None:
        assert dist.is_available()
        assert not dist.is_initialized()
        assert dist.GroupMember.WORLD is None
        assert dist.group.WORLD is None
        for call in (
            dist.get_rank,
            dist.get_world_size,
            dist.get_backend,
            dist.barrier,
            dist.destroy_process_group,
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.new_group([0]),
            dist.get_default_group,
            dist.get_default_store,
        ):
            with pytest.raises(ValueError, match="init_process_group"):
                call()

    nobody(body)


def test_the_default_group(alone: Alone) -> None:
    def body() -> None:
        assert dist.is_initialized()
        assert dist.GroupMember.WORLD is dist.group.WORLD is dist.get_default_group()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert dist.get_rank(dist.group.WORLD) == 0
        assert dist.get_backend() == "threads"
        assert dist.get_backend_config() == "cpu:threads"
        assert dist.get_process_group_ranks(None) == [0]
        assert dist.get_pg_count() == 1

    alone(body)


def test_a_second_default_group_is_refused(alone: Alone) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("threads", store=dist.HashStore(), rank=0, world_size=1)
        dist.barrier()

    alone(body)


def test_destroying_ends_all_groups_and_allows_a_new_one(alone: Alone) -> None:
    def body() -> None:
        old = dist.new_group([0])
        dist.destroy_process_group()
        assert not dist.is_initialized()
        assert dist.get_pg_count() == 0
        with pytest.raises(ValueError, match="not registered"):
            dist.get_group_rank(old, 0)
        dist.init_process_group("threads", store=dist.HashStore(), rank=0, world_size=1)
        dist.barrier()

    alone(body)


def test_a_destroyed_group_is_of_no_use(alone: Alone) -> None:
    def body() -> None:
        group = dist.new_group([0])
        dist.destroy_process_group(group)
        with pytest.raises((ValueError, dist.DistBackendError)):
            dist.all_reduce(torch.ones(1), group=group)
        with pytest.raises(ValueError, match="not registered"):
            dist.destroy_process_group(group)

    alone(body)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 0}, "world_size"),
        ({"world_size": 1}, "rank"),
        ({"rank": 1, "world_size": 1}, "rank"),
        ({"rank": 0, "world_size": 1, "init_method": "env://"}, "not both"),
        ({"rank": 0, "world_size": 1, "backend": "nonsense"}, "nonsense"),
        ({"rank": 0, "world_size": 1, "backend": "cpu:shm,cpu:gloo"}, "cpu"),
        ({"rank": 0, "world_size": 1, "timeout": timedelta(0)}, "positive"),
    ],
)
def test_wrong_arguments(nobody: Alone, arguments: dict[str, object], words: str) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=words):
            dist.init_process_group(**{"store": dist.HashStore(), **arguments})  # type: ignore[arg-type]
        assert not dist.is_initialized()

    nobody(body)


def test_a_timeout_in_plain_seconds_is_refused(nobody: Alone) -> None:
    def body() -> None:
        with pytest.raises(TypeError, match="timedelta"):
            dist.init_process_group(
                "threads",
                store=dist.HashStore(),
                rank=0,
                world_size=1,
                timeout=120,  # type: ignore[arg-type]
            )

    nobody(body)


def test_ranks_must_agree_on_the_default_group(nobody: Alone) -> None:
    store = dist.HashStore()

    def body(rank: int) -> None:
        backend = ["threads", "shm"][rank]
        with pytest.raises(dist.CollectiveMismatchError, match="threads") as caught:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
            )
        assert "shm" in str(caught.value)

    run_ranks(2, body, init=False, timeout=timedelta(seconds=120))


@pytest.mark.parametrize("numbers", [(1, 1, 0), (0, 0, 1), (2, 1, 2)])
def test_two_of_one_number_are_told_to_all(numbers: tuple[int, ...]) -> None:
    """None of them waits for the time-out, which is longer than the test may take."""
    store = dist.HashStore()

    def body(place: int) -> None:
        rank, limit = numbers[place], timedelta(minutes=10)
        dist.init_process_group("threads", store=store, rank=rank, world_size=3, timeout=limit)

    twice = next(n for n in numbers if numbers.count(n) > 1)
    found = run_ranks(len(numbers), body, init=False, return_exceptions=True)
    for error in found:
        assert isinstance(error, dist.CollectiveMismatchError)
        assert f"two processes say that they are rank {twice}" in str(error)
        assert error.ranks == (twice,)


def test_ranks_must_agree_on_a_new_group(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 3)
        with pytest.raises(dist.CollectiveMismatchError, match=r"\[0, 1\]") as caught:
            dist.new_group([0, 1] if rank != 2 else [0, 2])
        assert "[0, 2]" in str(caught.value)
        dist.barrier()

    ranks(3, body)


def test_outside_a_group(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 2)
        group = dist.new_group([1])
        if rank == 1:
            assert not dist.rank_not_in_group(group)
            return
        assert dist.rank_not_in_group(group)
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == dist.get_world_size(group) == -1
        with pytest.raises(ValueError, match="not in"):
            dist.get_backend(group)

    ranks(2, body)


def test_groups_may_have_another_backend(ranks: Runner, join: Join, backend: str) -> None:
    if backend == "shm":

        def body(rank: int) -> None:
            join(rank, 2)
            group = dist.new_group([0, 1], backend="gloo")
            assert dist.get_backend(group) == "gloo"
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2
            assert dist.get_backend() == "shm"

    else:

        def body(rank: int) -> None:
            join(rank, 2)
            group = dist.new_group([0, 1], backend="shm")
            assert dist.get_backend(group) == "shm"
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2

    ranks(2, body)


def test_a_group_for_each_device(ranks: Runner, join: Join, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        store = dist.FileStore(os.fspath(tmp_path / "other"), 2)
        dist.init_process_group(
            "cpu:shm,cuda:gloo",
            store=store,
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=120),
        )
        assert dist.get_backend() == "shm"
        assert dist.get_backend_config() == "cpu:shm,cuda:gloo"
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]

    ranks(2, body)


def test_node_local_rank_of_ranks_that_are_threads() -> None:
    ranks = run_ranks(3, lambda rank: dist.get_node_local_rank())
    assert ranks == [0, 1, 2]


def test_many_groups_one_after_the_other(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 2)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            group = dist.new_group([0, 1])
            dist.barrier(group=group)
            dist.destroy_process_group(group)
        assert len(os.listdir("/proc/self/fd")) < before + 20

    ranks(2, body)


def test_a_world_can_be_made_again_and_again(ranks: Runner, backend: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        with dist.FileStore(os.fspath(tmp_path / "again"), 2) as store:
            for i in range(5):
                dist.init_process_group(backend, store=store, rank=rank, world_size=2)
                tensor = torch.full((2,), float(i))
                dist.all_reduce(tensor)
                assert tensor.tolist() == [2.0 * i] * 2
                dist.barrier()
                dist.destroy_process_group()

    ranks(2, body)


def test_a_rank_that_is_refused_memory_before_it_has_said_who_it_is_tells_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()

    def refuse(store: dist.Store, rank: int, size: int, identity: str) -> RankWatch:
        if rank == 1:
            raise MemoryError("no more of it")
        return RankWatch(store, rank, size, identity)

    def program(rank: int) -> str:
        with pytest.raises(dist.DistBackendError, match="rank 1 could not make its end") as caught:
            dist.init_process_group("threads", store=store, rank=rank, world_size=3)
        assert caught.value.ranks == (1,)
        assert not dist.is_initialized()
        return str(caught.value)

    monkeypatch.setattr(groups, "RankWatch", refuse)
    texts = run_ranks(3, program, init=False)
    assert all("MemoryError: no more of it" in text for text in texts)


def test_what_the_system_refuses_on_the_way_to_the_store_is_a_dist_error(
    monkeypatch: pytest.MonkeyPatch, nobody: Alone
) -> None:
    def refuse(*args: object, **kwargs: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    def body() -> None:
        with pytest.raises(dist.DistBackendError, match=r"this rank could not.*open files"):
            dist.init_process_group("threads", init_method="tcp://127.0.0.1:1")

    monkeypatch.setattr(groups, "rendezvous", refuse)
    nobody(body)
