"""Ways of a program that take turns in the same ranks: seconds and CPU seconds of each."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import tilework.distributed as dist

#: For each way, seconds and CPU seconds of each round.
Taken = dict[str, list[tuple[float, float]]]


def by_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> Taken:
    """The times of each way on this rank, in another order each round. Collective."""
    taken: Taken = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(ways), len(ways)):
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            ways[name]()
            used = time.process_time() - used
            dist.barrier()
            if number:  # the first round makes plans
                taken[name].append((time.perf_counter() - began, used))
    return taken


def slowest(by_rank: Sequence[Taken], kind: int) -> dict[str, float]:
    """The median over rounds of the rank with most: seconds (0), or CPU seconds (1)."""
    return {
        name: statistics.median(
            max(each[kind] for each in turn)
            for turn in zip(*(rank[name] for rank in by_rank), strict=True)
        )
        for name in by_rank[0]
    }
