"""A rank that dies, is late or calls something else ends the others with an error, never a hang."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import tilework.distributed as tw
from tests.jobs import Job, Launcher, Rank
from tests.limits import PROMPTLY


def join(rank: Rank) -> None:
    dist.init_process_group(
        "tilework",
        init_method=f"file://{rank.folder}/store",
        rank=rank.number,
        world_size=rank.size,
    )


def until_it_fails(rank: Rank, model: nn.Module) -> tuple[str, str, float]:
    """Train for ever; what ended it, and when."""
    try:
        while True:
            model(torch.ones(2, 64)).sum().backward()
            rank.say.send("stepped")
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic()


def ddp(rank: Rank) -> tuple[str, str, float]:
    join(rank)
    return until_it_fails(rank, DDP(nn.Linear(64, 64)))


def fsdp(rank: Rank) -> tuple[str, str, float]:
    join(rank)
    model = nn.Linear(64, 64)
    fully_shard(model)
    return until_it_fails(rank, model)


@pytest.mark.parametrize("program", [ddp, fsdp])
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, program: Any) -> None:
    with Job(tmp_path, 3, program) as job:
        for number in range(3):
            assert job.hear(number) == "stepped"
        killed = job.kill(1)
        for number in (0, 2):
            said: Any = "stepped"
            while said == "stepped":
                said = job.hear(number)
            kind, text, when = said
            assert when - killed < PROMPTLY
            assert "PeerLostError" in (kind, *text.replace(":", " ").split())
            assert "rank 1" in text


def errors(rank: Rank) -> None:
    join(rank)
    pair = dist.new_group([0, 1])
    x = torch.ones(3)
    with pytest.raises(ValueError, match="AVG"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="2 times the elements"):
        dist.all_gather_into_tensor(torch.empty(3), x)
    with pytest.raises(ValueError, match="sparse"):
        dist.all_reduce(torch.eye(2).to_sparse(), op=dist.ReduceOp.MAX)
    dist.barrier()  # misuse has harmed nothing
    call = dist.broadcast if rank.number else dist.all_reduce
    with pytest.raises(
        tw.CollectiveMismatchError, match=r"(?s)broadcast.*all_reduce|all_reduce.*b"
    ):
        call(x, 0) if rank.number else call(x)
    with pytest.raises(tw.CollectiveMismatchError):  # the group is aborted
        dist.barrier()
    with pytest.raises(tw.CollectiveMismatchError):  # through torch's C++
        functional.all_reduce(torch.ones(1 + rank.number), "sum", pair).sum()


def test_errors_keep_their_classes(ranks: Launcher) -> None:
    ranks(2, errors)


def futures(rank: Rank) -> None:
    join(rank)
    work = dist.all_reduce(torch.ones(1 + rank.number), async_op=True)
    assert work is not None
    future = work.get_future()
    with pytest.raises(RuntimeError, match="CollectiveMismatchError"):
        future.wait()
    with pytest.raises(tw.CollectiveMismatchError):
        work.wait()
    assert isinstance(work.exception(), tw.CollectiveMismatchError)
    assert not work.is_success()


def test_futures_fail_by_name(ranks: Launcher) -> None:
    ranks(2, futures)


def too_late(rank: Rank) -> list[tuple[tuple[int, ...], str]]:
    join(rank)
    limit = timedelta(seconds=2)  # in which all but one come on a busy machine, too
    made_with: Any = dist.new_group(timeout=limit)
    set_later: Any = dist.new_group()
    set_later.set_timeout(limit)
    found = []
    if rank.number != 1:
        for group in (made_with, set_later):
            with pytest.raises(tw.CollectiveTimeoutError) as caught:
                dist.all_reduce(torch.ones(1), group=group)
            found.append((caught.value.ranks, str(caught.value)))
    rank.folder.joinpath(f"{rank.number} is through").touch()
    while not all(rank.folder.joinpath(f"{n} is through").exists() for n in range(rank.size)):
        time.sleep(0.01)  # in a collective rank 1 would be found in a circle
    return found


def not_all_come(rank: Rank) -> str:
    os.environ["TILEWORK_BACKEND"] = "gloo"
    with pytest.raises(tw.DistStoreError) as caught:
        dist.init_process_group(
            "tilework",
            init_method=f"file://{rank.folder}/store",
            rank=rank.number,
            world_size=3,
            timeout=timedelta(seconds=2),
        )
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(ranks: Launcher) -> None:
    for text in ranks(2, not_all_come):
        assert "missing rank 2" in text


def in_a_circle(rank: Rank) -> list[str]:
    join(rank)
    found = []
    for engine in ("shm", "gloo"):
        os.environ["TILEWORK_BACKEND"] = engine
        pair: list[Any] = [dist.new_group(), dist.new_group()]
        with pytest.raises(tw.CollectiveMismatchError) as caught:
            dist.all_reduce(torch.ones(1), group=pair[rank.number])
        found.append(str(caught.value))
    return found


def test_circles_over_groups_are_found(ranks: Launcher) -> None:
    first, second = ranks(2, in_a_circle)
    for text in first + second:
        assert "ranks wait for each other in a circle" in text
        assert text.count("test_work_failures.py") >= 2


def test_who_is_late_is_named(ranks: Launcher) -> None:
    first, late, last = ranks(3, too_late)
    assert not late
    for at_fault, text in (*first, *last):
        assert at_fault == (1,)
        assert "all_reduce" in text
        assert "test_work_failures.py" in text  # where it was called, not where torch did
        assert " Timed out waiting 2000ms" in text  # as programs look for


def monitored(rank: Rank) -> list[str]:
    join(rank)
    group: Any = dist.new_group(timeout=timedelta(seconds=120))
    work_group: Any = dist.new_group()
    found = []
    if rank.number == 0:
        with pytest.raises(tw.CollectiveTimeoutError) as caught:
            group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
        found.append(str(caught.value))
        work: Any = dist.all_reduce(torch.ones(1), group=work_group, async_op=True)
        with pytest.raises(tw.CollectiveTimeoutError) as caught:
            work.wait(timedelta(seconds=0.1))
        found.append(str(caught.value))
    dist.barrier()
    return found


def test_time_outs_have_the_words_that_torch_s_have(ranks: Launcher) -> None:
    late, waited = ranks(3, monitored)[0]
    assert "Rank 0 timed out in monitoredBarrier" in late
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in late
    assert " Timed out waiting 100ms" in waited


def aborted(rank: Rank) -> str:
    join(rank)
    group: Any = dist.group.WORLD
    if rank.number == 0:
        group.abort()
        return "rank 0"
    try:
        dist.barrier()
    except tw.PeerLostError as error:
        return str(error)
    return "nothing happened"


def test_abort_reaches_every_rank(ranks: Launcher) -> None:
    assert all("rank 0" in text for text in ranks(3, aborted))


def forks(rank: Rank) -> float:
    join(rank)
    child = os.fork()
    if not child:
        atexit._run_exitfuncs()  # the parent is still in its group
        os._exit(0)
    os.waitpid(child, 0)
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def test_a_forked_child_that_ends_is_no_rank(ranks: Launcher) -> None:
    assert ranks(2, forks) == [2.0, 2.0]


def leaves_without_a_word(rank: Rank) -> str:
    join(rank)
    if rank.number:
        return "left"  # neither destroyed nor aborted anything
    try:
        dist.all_reduce(torch.ones(1))
    except tw.PeerLostError as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_ends_is_noticed(ranks: Launcher) -> None:
    assert "rank 1" in ranks(2, leaves_without_a_word)[0]
