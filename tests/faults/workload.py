"""What ranks do until something happens to one of them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import Holdings, Say
from tests.random_programs import OPERATIONS, RandomOperation, RandomProgram, run_program
from tilework.testing.groups.values import Case

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
#: Several rounds of the core at most: checking larger results would take longer than noticing.
SHAPES = ((5,), (3, 1000), (20_001,), (50_000,))


@dataclass(frozen=True)
class SeenError:
    """The error by which a rank learnt of a fault."""

    kind: type[BaseException]
    text: str
    ranks: tuple[int, ...]
    #: time.monotonic(), which is one clock for all processes.
    when: float


def join(
    rank: int,
    n: int,
    folder: Path,
    timeout: timedelta = timedelta(seconds=20),
    backend: str = "shm",
) -> dist.Store:
    """Make the default group."""
    store = dist.FileStore(os.fspath(folder), n)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=timeout)
    return store


def leave(store: dist.Store) -> None:
    """End every group."""
    dist.destroy_process_group()
    store.close()


def random_steps(n: int, seed: int) -> RandomProgram:
    """A few operations, some overlapping; equal on all ranks for equal seeds."""
    draw = random.Random(seed)
    return RandomProgram(n, tuple(random_step(draw, n) for _ in range(draw.randint(1, 4))))


def random_step(draw: random.Random, n: int) -> RandomOperation:
    return RandomOperation(
        operation=draw.choice(sorted(OPERATIONS)),
        case=Case(draw.choice(SHAPES), draw.choice(DTYPES)),
        root=draw.randrange(n),
        reduction=draw.choice(["SUM", "MAX"]),
        async_op=draw.random() < 0.5,
        seed=draw.randrange(10),
    )


def until_error(act: Callable[[int], object]) -> SeenError:
    """Call ``act(0)``, ``act(1)``, … until a DistBackendError says that something happened."""
    turn = 0
    try:
        while True:
            act(turn)
            turn += 1
    except dist.DistBackendError as error:
        return SeenError(type(error), str(error), error.ranks, time.monotonic())


def warm_up() -> Holdings:
    """Have a group once, so that only what every further group leaves behind counts."""
    with dist.HashStore() as store:
        dist.init_process_group("shm", store=store, rank=0, world_size=1)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
        dist.destroy_process_group()
    return Holdings.now()


def serve(
    rank: int, n: int, seed: int, folder: Path, say: Say, then: Callable[[], object] = int
) -> None:
    """Run random operations until a fault; report it, what was left behind, and start anew.

    ``then`` is called once the group is there.
    """
    before = warm_up()
    store = join(rank, n, folder / "first")
    say("ready")
    then()
    heard = until_error(lambda turn: run_program(random_steps(n, 1000 * seed + turn), rank))
    say(heard)
    leave(store)
    say((before, Holdings.now()))
    survivors = [r for r in range(n) if r not in heard.ranks]
    store = join(survivors.index(rank), len(survivors), folder / "second")
    total = torch.ones(3)
    dist.all_reduce(total)
    leave(store)
    say(total.tolist())
