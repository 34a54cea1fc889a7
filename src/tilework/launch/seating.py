"""The ranks that each host's launcher starts, where hosts come and go: decisions, no sockets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

#: Seconds without a further launcher after which a job begins with fewer than the most hosts.
LAST_CALL_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Seats:
    """The seats of one host: the ranks that its launcher starts.

    A host that comes later may take over the number of a lost one.
    """

    node: int
    first: int
    ranks: int
    host: str

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.ranks)


class Seating:
    """The seats of all hosts of a job, of which ``least`` must be there to begin and to go on.

    Launchers beyond ``most`` wait for a host to be lost. Nobody gets seats before the ``awaited``
    callers have come or left.
    """

    def __init__(self, least: int, most: int, awaited: Collection[int] = ()) -> None:
        self.least, self.most = least, most
        self._awaited = set(awaited)
        #: The number of ranks at the start; 0 before.
        self.world_size = 0
        #: The seats of launchers that take part, by caller, and those that have finished.
        self.seated: dict[int, Seats] = {}
        self.finished: set[int] = set()
        #: Ranks and host of launchers that wait, by caller, the oldest first.
        self.waiting: dict[int, tuple[int, str]] = {}
        self._free: list[Seats] = []
        self._given = self._nodes = 0
        self._came_at = 0.0

    def arrive(self, caller: int, ranks: int, host: str, now: float) -> None:
        self.waiting[caller], self._came_at = (ranks, host), now
        self._awaited.discard(caller)

    def leave(self, caller: int) -> Seats | None:
        """A launcher is gone; the seats that are lost to the job by that, if any."""
        self.waiting.pop(caller, None)
        self._awaited.discard(caller)
        seats = self.seated.pop(caller, None)
        if seats is None or caller in self.finished:
            return None
        self._free.append(seats)
        return seats

    def newly_seated(self, now: float) -> Iterator[tuple[int, Seats]]:
        """Give seats to launchers that wait, as far as the job has any for them now."""
        if not self.world_size and not self._may_begin(now):
            return
        for caller, (ranks, host) in list(self.waiting.items()):
            if len(self.seated) < self.most and not self.finished:
                del self.waiting[caller]
                self.seated[caller] = self._seats(ranks, host)
                yield caller, self.seated[caller]
        self.world_size = self.world_size or self._given

    def _may_begin(self, now: float) -> bool:
        count = 0 if self._awaited else len(self.waiting)
        is_last_call = now - self._came_at >= LAST_CALL_SECONDS
        return count >= self.most or (count >= self.least and is_last_call)

    def _seats(self, ranks: int, host: str) -> Seats:
        """Those of a lost host with as many ranks, else further ones."""
        for seats in self._free:
            if seats.ranks == ranks:
                self._free.remove(seats)
                return Seats(seats.node, seats.first, ranks, host)
        self._given, self._nodes = self._given + ranks, self._nodes + 1
        return Seats(self._nodes - 1, self._given - ranks, ranks, host)

    def renewed(self) -> Seating:
        """The seating of the same job, which begins again with the launchers that are there."""
        seating = Seating(self.least, self.most, self.seated)
        seating.waiting, seating._came_at = self.waiting, self._came_at
        return seating

    @property
    def is_over(self) -> bool:
        """True if all launchers are gone, and none comes again."""
        here = self.seated or self._awaited
        return not here and (bool(self.world_size) or not self.waiting)

    @property
    def active(self) -> dict[int, Seats]:
        """The seats of launchers that have neither finished nor gone, by caller."""
        return {c: seats for c, seats in self.seated.items() if c not in self.finished}
