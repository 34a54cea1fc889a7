"""The watch over the ranks of a job, from the moment at which each first meets the others.

A rank says who it is as the first thing that it does in the job's store, and leaves a will there
where the store's server can carry one out. So those that wait for it learn that it has ended: from
the system where they are on one host, from its will where they are not.

Of a rank that ends before it has said who it is others may know: the launcher, which says so in the
store; the store, where each rank has made one (its attendance); the system, where ranks have their
numbers in their environment (:mod:`~tilework.rendezvous.siblings`), or are as many as the processes
that were started together (:mod:`~tilework.rendezvous.kin`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection

from tilework.errors import DistError, StoreTimeoutError
from tilework.rendezvous.ended_ranks import EndedRanks
from tilework.rendezvous.kin import Kin
from tilework.rendezvous.liveness import has_ended
from tilework.rendezvous.siblings import Siblings
from tilework.store import PrefixStore, Store
from tilework.store.attendance import Attendance

_WHO, _GONE = "who", "gone"
#: Each rank asks the system about so many ranks that come after it, and tells the others.
_NEIGHBOURS = 16
#: Seconds between looks for those that never came: so many, and so many more for each rank.
_LOOK_SECONDS, _LOOK_SECONDS_PER_RANK = 0.25, 0.002
#: Seconds for which those that may have ended are given the time to say that they have not.
_DOUBT_SECONDS = 0.8


class RankWatch:
    """The watch of a rank over the others of its job.

    Args:
        store: Seen by the ranks of this job, and of this attempt to form it, only.
        rank: This rank's number.
        size: How many there are.
        identity: This rank's, as from :mod:`tilework.rendezvous.liveness`.
    """

    def __init__(self, store: Store, rank: int, size: int, identity: str) -> None:
        self._store = PrefixStore("ranks", store)
        self._rank, self._size = rank, size
        self._identities: dict[int, str] = {}
        #: By their names in the store's attendance: ranks that said who they are.
        self._attendants: dict[str, int] = {}
        self._lost: set[int] = set()
        here = f"{rank} {store.attendant or '-'} {identity}\n"
        self._revoke = self._store.leave_will(_GONE, f"{rank} ", (_WHO, here))
        self._ended_ranks = EndedRanks.at_launcher(rank, size) or EndedRanks(store)
        self._siblings = Siblings.of(rank, size)
        is_process = identity.startswith("process ")
        # Elsewhere there may be ranks that no process here knows of.
        self._kin = Kin.of_this_process() if is_process and store.is_of_one_host else None
        self._next_look = 0.0
        self._doubted_since = 0.0
        #: Those of which at least one has ended, though nobody knows which.
        self.doubted: frozenset[int] = frozenset()
        #: Why the rank that serves the store has given up; "" while it has not.
        self.given_up = ""
        self._read_identities()

    def lost(self) -> set[int]:
        """The ranks that have ended. Asks the store, and the system.

        Raises:
            StoreTimeoutError: The store's server does not answer, and nothing is known to be lost.
        """
        ended = self.ended_here(self._neighbours())
        try:
            self._read_identities()
            if self._store.check([_GONE]):
                self._lost.update(map(int, self._store.get(_GONE).split()))
            ended |= self._missed()
        except StoreTimeoutError:  # asking once more would take as long again
            if not ended | self._lost:
                raise
        except DistError:
            pass  # the store has gone; the system can be asked
        ended -= self._lost
        if ended:
            self._lost |= ended
            with contextlib.suppress(DistError):
                self._store.append(_GONE, "".join(f"{rank} " for rank in sorted(ended)))
        return self._lost - {self._rank}

    def ended_here(self, ranks: Collection[int]) -> set[int]:
        """Those of ``ranks`` of which the system knows that they have ended. Asks no store."""
        known = self._identities
        return {rank for rank in ranks if rank in known and has_ended(known[rank])}

    def roll(self) -> str:
        """The identities of those that came, for :meth:`learn`."""
        return self._store.get(_WHO).decode()

    def learn(self, roll: str) -> None:
        """Know who the others are, as another rank has read it."""
        for line in roll.splitlines():
            rank, attendant, identity = line.split(" ", 2)
            self._identities.setdefault(int(rank), identity)
            self._attendants[attendant] = int(rank)

    def here(self) -> set[int]:
        """The ranks that have said who they are; all, where each has made its store already."""
        self._read_identities()
        attendance = self._store.attendance()
        if attendance is not None and self._are_all_at(attendance):
            return set(range(self._size))
        return set(self._identities)

    def server_is_unknown(self) -> bool:
        """True if rank 0, which serves the store unless another process does, is not known."""
        return self._rank != 0 and 0 not in self._identities

    def everyone(self) -> Collection[int]:
        """All other ranks."""
        return [rank for rank in range(self._size) if rank != self._rank]

    def close(self) -> None:
        """Leave in order: this rank's end is no news to those that still watch. Idempotent."""
        revoke, self._revoke = self._revoke, None
        if revoke is not None:
            with contextlib.suppress(DistError, OSError):
                revoke()

    def _neighbours(self) -> Collection[int]:
        """The next ranks that are here, going round."""
        others = sorted(self._identities, key=lambda rank: (rank - self._rank) % self._size)
        return [rank for rank in others if rank != self._rank][:_NEIGHBOURS]

    def _read_identities(self) -> None:
        if len(self._identities) == self._size:
            return
        self.learn(self.roll())

    # -- what the store, the launcher and the environment tell --------------------------------

    def _missed(self) -> set[int]:
        """Ranks that have ended, as others know than the system and the server of their wills."""
        now = time.monotonic()
        if now < self._next_look:
            return set()
        self._next_look = now + _LOOK_SECONDS + _LOOK_SECONDS_PER_RANK * self._size
        silent = set(range(self._size)) - set(self._identities)
        ended = self._missed_by_store(silent, now)
        if silent:
            ended |= self._ended_ranks.among(silent)
        if silent and self._siblings is not None:
            ended |= self._siblings.ended(silent)
        if silent and self._kin is not None:
            known = self._identities.values()
            count = self._kin.ended(self._size, known, len(silent))
            if 0 < count < len(silent):
                self.doubted = frozenset(silent)
            ended |= silent if count >= len(silent) else set()
        return ended

    def _missed_by_store(self, silent: set[int], now: float) -> set[int]:
        """Those whose store was not closed by them; silent ones are found by elimination."""
        attendance = self._store.attendance()
        if attendance is None:
            return set()
        self.given_up = attendance.given_up
        ended = {self._attendants[name] for name in attendance.lost if name in self._attendants}
        # Only where each rank has made one store: who is missing there is a rank for sure.
        if not self._are_all_at(attendance):
            return ended
        unknown = attendance.lost.difference(self._attendants)
        if len(unknown) >= len(silent):
            return ended | silent
        self._doubted_since = (self._doubted_since or now) if unknown else 0.0
        if unknown and now - self._doubted_since > _DOUBT_SECONDS:
            self.doubted = frozenset(silent)
        return ended

    def _are_all_at(self, attendance: Attendance) -> bool:
        """True if each rank has made one store there."""
        return {attendance.expected, attendance.came} == {self._size}
