"""Memory belongs to its caller again once an operation on it has raised, whoever is late."""

from __future__ import annotations

import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.workload import join, until_error
from tilework.errors import CollectiveTimeoutError

_ELEMENTS = 6_000_000


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_was_stopped_overwrites_nothing_later(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)

    def story(rank: int, say: Say) -> None:
        join(rank, 2, tmp_path / "store")
        group = dist.get_default_group()
        tensors = [group.empty(_ELEMENTS).fill_(1.0 + 8.0 * rank) for _ in range(2)]
        dist.barrier()
        group.set_timeout(timedelta(seconds=0.3))
        say("ready")
        heard = until_error(lambda turn: dist.all_reduce(tensors[turn % 2], op=dist.ReduceOp.MAX))
        known = all(bool(((t == 1.0) | (t == 9.0)).all()) for t in tensors)
        for tensor in tensors:
            tensor.fill_(7.0)
        say((heard, known))
        time.sleep(1.0 if rank == 0 else 0)
        say(sum(int((tensor != 7.0).sum()) for tensor in tensors))

    with ForkedRanks(2, story) as ranks:
        for rank in ranks:
            rank.hear()
        time.sleep(draw.uniform(0.02, 0.1))
        ranks[1].kill(signal.SIGSTOP)
        heard, known = ranks[0].hear()
        assert heard.kind is CollectiveTimeoutError, heard
        assert known  # inputs and results, nothing else
        ranks[1].kill(signal.SIGCONT)
        assert ranks[0].hear() == 0
        ranks[1].hear()
        assert ranks[1].hear() == 0
