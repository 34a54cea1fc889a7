"""The line on stderr of a rank that waits in a collective for others that do not come."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tilework.comm import long_waits
from tilework.comm.contract import ProcessGroup
from tilework.comm.cyclic_waits import operation_name
from tilework.comm.world import World, current_world
from tilework.store.late_notice import LateNotice, ranks_in_words

#: Seconds between looks of a thread that waits.
_PERIOD = 0.5
#: Ranks of which a line says where they were last.
_PLACES = 4


def notice_late_ranks() -> None:
    """Have threads that wait long tell of the ranks that are late, from now on."""
    long_waits.add_function(_look)


def _look() -> None:
    """Print a line if it is time for one. Quick; to be called often by a thread that waits."""
    world = current_world()
    if world.default_group is not None:
        world.state(LateWaits).look(world)


class LateWaits:
    """The wait of a rank's own thread, and its lines."""

    def __init__(self) -> None:
        self._next_look = 0.0
        self._place: tuple[str, int] | None = None
        self._notice = LateNotice(0.0)

    def look(self, world: World) -> None:
        """On the thread that waits: print a line if it is due, and this rank's to print."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _PERIOD
        found = next(((g, wait) for g in [*world.records] if (wait := g.waiting())), None)
        if found is None:
            return
        group, (number, awaited) = found
        place = group.group_name, number
        if place != self._place:
            self._place, self._notice = place, LateNotice(now - long_waits.AFTER_SECONDS)
        if self._notice.due(now):
            self._tell(group, number, awaited)

    def _tell(self, group: ProcessGroup, number: int, awaited: Sequence[int]) -> None:
        where, names, me = group.last_entered(), group.global_ranks, group.rank()
        # Those that were last somewhere else; an engine that knows of no others tells its own.
        elsewhere = [rank for rank in awaited if where and where[rank] != where[me]]
        late = elsewhere or awaited
        if any(rank not in late for rank in range(me)):
            return  # one line for all that wait: the first of them prints it
        last = "".join(f"; rank {names[r]} last entered {where[r]}" for r in elsewhere[:_PLACES])
        ranks = ranks_in_words([names[rank] for rank in late])
        what = operation_name(group, number)
        self._notice.tell(f"rank {names[me]} waits for {ranks} in {what}{last}")
