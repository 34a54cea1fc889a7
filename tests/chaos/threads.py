"""Trials on ranks that are threads of this process."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta

import tilework.distributed as dist
from tests.chaos.expected import Outcome
from tests.chaos.plan import Trial
from tests.chaos.rank_program import RankProgram, Restart, Setting, settled, sum_after_restart
from tests.faults.forked_ranks import Holdings
from tilework.comm.per_call.callsite import stacks_of_threads
from tilework.comm.world import World, own_world
from tilework.rendezvous.liveness import process_identity

ENDING_SECONDS = 40.0


class Threads:
    """Plays trial after trial."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __enter__(self) -> Threads:
        process_identity()  # makes the process's mark, which it holds from then on
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, trial: Trial) -> Outcome:
        """One trial."""
        outcome = Outcome(trial)
        before = Holdings.now()
        worlds = [World() for _ in range(trial.n)]
        totals: dict[int, float] = {}
        left = [rank for rank in range(trial.n) if rank not in trial.gone]
        with dist.HashStore(timeout=timedelta(seconds=120)) as store:

            def first(rank: int) -> None:
                with own_world(worlds[rank]):
                    part = RankProgram(trial, rank)
                    outcome.reports[rank] = part.play(self._setting, store, int)
                    if trial.fault.kind != "vanish" or not part.is_victim:
                        part.end()

            outcome.trouble = _together(first, range(trial.n))
        for world in worlds:
            world.close()  # of those that vanished
        with dist.HashStore(timeout=timedelta(seconds=120)) as again:

            def second(rank: int) -> None:
                with own_world(World()):
                    totals[rank] = sum_after_restart(
                        self._setting, again, left.index(rank), len(left)
                    )

            outcome.trouble = outcome.trouble or _together(second, left)
        after = settled(before)
        outcome.restarts = {rank: Restart(total, before, after) for rank, total in totals.items()}
        return outcome


def _together(act: Callable[[int], None], ranks: Iterable[int]) -> str:
    """Run ``act`` on threads; return what went wrong, "" for nothing."""
    failures: list[str] = []

    def guarded(rank: int) -> None:
        try:
            act(rank)
        except BaseException:
            failures.append(f"rank {rank}:\n{traceback.format_exc()}")

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ENDING_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stacks = stacks_of_threads()
    for thread in threads:
        if thread.is_alive():
            stack = "\n".join(map(str, stacks[thread.ident or 0]))
            failures.append(f"{thread.name} is stuck here:\n{stack}")
    return "\n".join(failures)
