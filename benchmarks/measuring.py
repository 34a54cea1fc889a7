"""What each rank of ``collectives.py`` does: run the peers by turns, and write down the times."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from figures import ADD, COPY, LARGEST, SEGMENT, TILEWORK, Case, Plan, spread
from peers import PEERS, Call, Workload
from torch import Tensor

import tilework.distributed as dist

LEAST, MOST = 2, 200  # runs of calls of one peer in one round

#: Calls between two looks at the clock, where one takes less than a time slice is worth: ranks that
#: share a core run through several calls at once and wait longer for the next, so that single calls
#: are either too quick or too slow.
CALLS_IN_A_RUN, SHORT_CALL = 10, 100e-6

#: What each contestant does; None: it lacks the operation, on all ranks.
Calls = Mapping[str, Call | None]


def work(folder: Path) -> None:
    """Measure the plan in ``folder`` as one of its ranks, and write the times there."""
    try:
        # The names of Open MPI, of MPICH and Intel MPI, of tilework run.
        rank = first_of("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
        ranks = first_of("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
        measure(Measurement(rank, ranks, folder))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # MPI's own end would wait for ranks that wait for this one


def first_of(*names: str) -> int:
    """The first of these variables of the environment that there is."""
    return int(next(value for name in names if (value := os.environ.get(name))))


def measure(measurement: Measurement) -> None:
    """All sections of the plan. Collective."""
    m = measurement
    torch.set_num_threads(1)
    cases = [m.by_turns(m.peers_calls(case)) for case in m.told(m.plan.cases(m.ranks))]
    segment = [m.by_turns(m.segment_calls(c)) for c in m.told(m.plan.segment_cases(m.ranks))]
    m.write(f"{m.rank}.json", json.dumps({"cases": cases, "segment": segment}))
    for peer in reversed(m.peers.values()):
        peer.close()


class Measurement:
    """One rank's part of measuring the plan that is in ``folder``."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.plan = Plan.from_json(json.loads((folder / "plan.json").read_text()))
        self.peers = {name: PEERS[name](rank, ranks, folder) for name in self.plan.peers}

    def peers_calls(self, case: Case) -> Calls:
        """What the peers do, checked once; and what memory alone does."""
        work = Workload(case, self.rank, self.ranks)
        calls: dict[str, Call | None] = {}
        for name, peer in self.peers.items():
            work.fill()
            calls[name] = call = peer.prepare(work)
            if call:
                work.fill()
                call()
                work.check(name)
        return {**calls, **self.memory_calls(case)}

    def segment_calls(self, case: Case) -> Calls:
        """Time tilework on tensors of torch's, and on tensors that live in the group's segment."""
        makers: dict[str, Callable[..., Tensor]]
        makers = {TILEWORK: torch.empty, SEGMENT: dist.get_default_group().empty}
        calls: dict[str, Call | None] = {}
        for name, empty in makers.items():
            work = Workload(case, self.rank, self.ranks, empty)
            work.fill()
            calls[name] = call = self.peers[TILEWORK].prepare(work)
            assert call is not None
            call()
            work.check(name)
        return {**calls, **self.memory_calls(case)}

    def memory_calls(self, case: Case) -> Calls:
        """Copying and adding on both cores at once, where the limit is asked for."""
        if not (case.has_limit and self.ranks == 2 <= self.plan.cores):
            return {}
        # Written, since memory that only was allocated is one page of zeros, read from the cache.
        a, b = torch.ones(LARGEST // 4), torch.ones(LARGEST // 4)
        return {COPY: lambda: b.copy_(a), ADD: lambda: b.add_(a)}

    def by_turns(self, calls: Calls) -> dict[str, tuple[float, float, float] | None]:
        """This rank's median and mean seconds of a call, and the spread of the medians."""
        runs = {name: self.affordable(call) for name, call in calls.items()}
        taken: dict[str, list[float]] = {name: [] for name in calls}
        medians: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(3 * self.plan.rounds):
            if number >= self.plan.rounds and self.is_known(medians):
                break
            # Another order in each round, the same on all ranks: nobody always follows the slowest.
            for name in random.Random(number).sample(list(calls), len(calls)):
                if turn := self.turn(calls[name], *runs[name]):
                    taken[name] += turn
                    medians[name].append(statistics.median(turn))
        return {
            name: (statistics.median(ts), statistics.fmean(ts), spread(medians[name]))
            if ts
            else None
            for name, ts in taken.items()
        }

    def is_known(self, medians: Mapping[str, list[float]]) -> bool:
        """True if every spread is small enough, as rank 0 sees it."""
        known = all(spread(turns) <= self.plan.spread for turns in medians.values() if turns)
        told = torch.tensor([int(known)])
        dist.broadcast(told, 0)
        return bool(told)

    def turn(self, call: Call | None, runs: int, calls: int) -> list[float]:
        """Seconds of a call in each of some runs of ``calls`` calls."""
        dist.barrier()
        if call is None:
            return []
        call()  # not counted: its processes come from something else
        taken = []
        for _ in range(runs):
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            taken.append((time.perf_counter() - begun) / calls)
        return taken

    def affordable(self, call: Call | None) -> tuple[int, int]:
        """How many runs fit into a turn, and of how many calls they are, as rank 0 sees it."""
        seconds = min(self.turn(call, 2 * LEAST, 1) or [1.0])
        calls = CALLS_IN_A_RUN if seconds < SHORT_CALL else 1
        runs = min(MOST, max(LEAST, int(self.plan.seconds / (calls * seconds))))
        told = torch.tensor([runs, calls])
        dist.broadcast(told, 0)
        return int(told[0]), int(told[1])

    def told(self, cases: Iterator[Case]) -> Iterator[Case]:
        """The same cases; rank 0 writes down which one it has come to."""
        for case in cases:
            if self.rank == 0:
                self.write("progress", f"{self.ranks} ranks: {case}")
            yield case

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.new").write_text(text)
        os.replace(self.folder / f"{name}.new", self.folder / name)
