"""``find_stragglers``: ranks ask each other how long each takes.

``flight.stragglers`` judges the times. It does without torch, as ``tilework explain`` has to.
"""

from __future__ import annotations

from tilework.comm.agreement import agree
from tilework.comm.flight.stragglers import Straggler, own_times, slowest, stragglers, without
from tilework.comm.world import AnyGroup, current_world, member

#: A group by name and global ranks.
_Key = tuple[str, tuple[int, ...]]


def find_stragglers(group: AnyGroup = None) -> list[Straggler]:
    """The ranks of a group that the other ranks wait for, the slowest first; equal on every rank.

    Collective; blocks. The result comes from the flight records: the last operations, some
    hundreds, of the group and of the groups within it (a mesh's). A rank's own time is the time
    between two collectives of a group, without waits in other groups or for messages. A straggler
    takes at least 1.2 times the others' median.

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
    within = set(pg.global_ranks)
    records = {
        (each.group_name, each.global_ranks): each.flight_entries()
        for each in current_world().records
    }
    everything = [entry for entries in records.values() for entry in entries]
    own: dict[_Key, dict[int, float]] = {
        key: own_times(entries, without(everything, entries))
        for key, entries in records.items()
        if within.issuperset(key[1])
    }
    reports: list[dict[_Key, dict[int, float]]] = agree(lambda: own, pg)
    by_rank = dict(zip(pg.global_ranks, reports, strict=True))
    found: list[Straggler] = []
    for key in dict.fromkeys(key for report in reports for key in report):
        times = {rank: by_rank[rank][key] for rank in key[1] if key in by_rank[rank]}
        found += stragglers(times) if len(times) == len(key[1]) else []
    return slowest(found)
