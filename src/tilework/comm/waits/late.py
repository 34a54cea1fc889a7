"""The lines on stderr of a rank that waits long: late ranks, and a store that is gone."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tilework.comm.contract import MessageWait, ProcessGroup
from tilework.comm.waits.by_rank import (
    AFTER_SECONDS,
    collective_wait,
    look_while_waiting,
    message_wait,
    open_groups,
    operation_name,
)
from tilework.comm.world import World
from tilework.store import Store
from tilework.store.internal import LateNotice, ranks_in_words

#: Seconds between looks of a thread that waits.
_PERIOD = 0.5
#: The most ranks whose last operation a line names.
_PLACES = 4


def notice_late_ranks() -> None:
    """Have threads that wait long report late ranks, from now on."""
    look_while_waiting(LateWaits)


class LateWaits:
    """Prints lines about the ranks that a rank's own thread waits for."""

    def __init__(self) -> None:
        self._next_look = 0.0
        self._place: tuple[str, float] | None = None
        self._notice = LateNotice(0.0)
        #: The store that was reported as gone.
        self._gone: Store | None = None

    def look(self, world: World) -> None:
        """Print a line about late ranks, if it is time, and no other rank of the group has."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _PERIOD
        self._tell_of_store(world)
        groups = open_groups(world)
        collective = collective_wait(groups)
        if collective is not None:
            group, number, awaited = collective
            if self._is_due(now, (group.group_name, number)):
                self._tell(group, number, awaited)
            return
        message = message_wait(groups)
        if message is not None and self._is_due(now, (message[0].group_name, message[1].begun)):
            self._tell_message(*message)

    def _tell_of_store(self, world: World) -> None:
        """Print a line, once, if the job's store is gone: groups live on, but none can be made."""
        store = world.record(world.default()).store.whole
        if store is not self._gone and (why := store.why_gone):
            self._gone = store
            print(f"tilework: {why} Groups go on; no group can be made", file=sys.stderr)

    def _is_due(self, now: float, place: tuple[str, float]) -> bool:
        """True if it is time for a line about the wait at ``place``."""
        if place != self._place:
            self._place, self._notice = place, LateNotice(now - AFTER_SECONDS)
        return self._notice.due(now)

    def _tell_message(self, group: ProcessGroup, wait: MessageWait) -> None:
        where, names = group.last_entered(), group.global_ranks
        peer, last = "any rank", ""
        if wait.peer >= 0:
            peer = f"rank {names[wait.peer]}"
            last = f"; {peer} last entered {where[wait.peer]}" if where else ""
        site = f" at {wait.site}" if wait.site else ""
        me = names[group.rank()]
        self._notice.tell(
            f"rank {me} waits for {peer} in {wait.what}{site} (group {group.group_name!r}){last}"
        )

    def _tell(self, group: ProcessGroup, number: int, awaited: Sequence[int]) -> None:
        where, names, me = group.last_entered(), group.global_ranks, group.rank()
        # The ranks whose last operation differs; an engine without knowledge reports its own.
        elsewhere = [rank for rank in awaited if where and where[rank] != where[me]]
        late = elsewhere or awaited
        if not {*range(me)} <= {*late}:
            return  # the first waiting rank prints a line for all
        last = "".join(f"; rank {names[r]} last entered {where[r]}" for r in elsewhere[:_PLACES])
        ranks = ranks_in_words([names[rank] for rank in late])
        what = operation_name(group, number)
        self._notice.tell(f"rank {names[me]} waits for {ranks} in {what}{last}")
