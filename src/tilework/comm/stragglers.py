"""``find_stragglers``: ranks ask each other how long they take."""

from __future__ import annotations

from tilework.comm.agreement import agree
from tilework.comm.flight.stragglers import Straggler, own_times, stragglers
from tilework.comm.world import AnyGroup, member


def find_stragglers(group: AnyGroup = None) -> list[Straggler]:
    """The ranks of a group that the others wait for, the slowest first; the same on all of them.

    Collective; blocks. It comes from the flight record: the last operations of the group, of which
    there are some hundreds. A rank's own time is that between two collectives; a straggler takes at
    least 1.2 times as much as the others' median.

    Args:
        group: None: the default group. Outside it the list is empty.

    Example:
        >>> import time, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     for _ in range(20):
        ...         time.sleep(0.02 if rank == 2 else 0.002)
        ...         dist.barrier()
        ...     return [straggler.rank for straggler in dist.find_stragglers()]
        >>> run_ranks(3, program)
        [[2], [2], [2]]
    """
    pg = member(group, "find_stragglers")
    if pg is None:
        return []
    own = own_times(pg.flight_entries())
    times: list[dict[int, float]] = agree(lambda: own, pg)
    return stragglers(dict(zip(pg.global_ranks, times, strict=True)))
