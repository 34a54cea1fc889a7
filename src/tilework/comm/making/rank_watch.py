"""The watch over the ranks of a job, from the first meeting of each rank.

A rank's first act in the job's store is to write an identity. The rank also asks the
store's server to append a key when the connection closes, if the server can. So waiting ranks learn
that the rank has ended: from the system on the same host, from that key on other hosts.

A rank may end before it writes an identity. Then others may know: the launcher, which informs the
store; the store, if each rank has made one (``store.arrivals``); the system, if ranks have numbers
in their environment, or are as many as the processes that were started together
(:mod:`~tilework.rendezvous.siblings`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection

from tilework.errors import DistError, StoreTimeoutError
from tilework.rendezvous.internal import (
    EndedRanks,
    MultiprocessingChildren,
    Siblings,
    has_ended,
    outlives_ranks,
)
from tilework.store import PrefixStore, Store
from tilework.store.internal import Arrivals

_WHO, _GONE = "who", "gone"
#: The number of following ranks that each rank asks the system about, for all ranks; and of ranks
#: that are told the same identities.
BLOCK = 16
#: Seconds between looks for ranks that never came: a constant, plus a share for each rank.
_LOOK_SECONDS, _LOOK_SECONDS_PER_RANK = 0.25, 0.002
#: Seconds that doubted ranks have to show that they have not ended.
_DOUBT_SECONDS = 0.8


class RankWatch:
    """A rank's watch over the others, by a store for this job and this attempt to form it."""

    def __init__(self, store: Store, rank: int, size: int, identity: str) -> None:
        self._store = PrefixStore("ranks", store)
        self._rank, self._size = rank, size
        self._identities: dict[int, str] = {}
        #: Identified ranks, by name in the store's arrivals.
        self._arrival_names: dict[str, int] = {}
        #: True once the ranks have met.
        self._has_met = False
        self._lost: set[int] = set()
        here = f"{rank} {store.arrival_name or '-'} {identity}\n"
        self._revoke = self._store.append_on_disconnect(_GONE, f"{rank} ", (_WHO, here))
        self._ended_ranks = EndedRanks.at_launcher(rank, size) or EndedRanks(store)
        self._siblings = Siblings.of(rank, size)
        is_process = identity.startswith("process ")
        # A store of several hosts may have ranks that no local process knows of.
        self._children = (
            MultiprocessingChildren.of_this_process()
            if is_process and store.is_of_one_host
            else None
        )
        self._next_look = 0.0
        self._doubted_since = 0.0
        #: Ranks of which at least one has ended, but it is unknown which.
        self.doubted: frozenset[int] = frozenset()
        #: The reason why the rank that serves the store has given up; "" if it has not.
        self.given_up = ""

    def lost(self) -> set[int]:
        """The ranks that ended, or a StoreTimeoutError if the store is mute and none is known."""
        ended: set[int] = set()
        try:
            if self._store.check([_GONE]):
                self._lost.update(map(int, self._store.get(_GONE).split()))
            ended = self._missed()
        except StoreTimeoutError:  # a second try would take as long again
            if not self.ended_here(self._neighbours()) | self._lost:
                raise
        except DistError:
            pass  # the store is gone; ask the system
        ended |= self.ended_here(self._neighbours())
        ended -= self._lost
        if ended:
            self._lost |= ended
            with contextlib.suppress(DistError):
                self._store.append(_GONE, "".join(f"{rank} " for rank in sorted(ended)))
        return self._lost - {self._rank}

    def ended_here(self, ranks: Collection[int]) -> set[int]:
        """The members of ``ranks`` that have ended, as the system knows. Asks no store."""
        known = self._identities
        return {rank for rank in ranks if rank in known and has_ended(known[rank])}

    def rolls(self) -> list[str]:
        """By block of ranks: the identities of the ranks that they watch, and of rank 0."""
        lines = self._store.get(_WHO).decode().splitlines(keepends=True)
        of = {int(line.partition(" ")[0]): line for line in lines}
        starts = range(0, self._size, BLOCK)
        needed = [{0, *((at + i) % self._size for i in range(2 * BLOCK))} for at in starts]
        return ["".join(of[rank] for rank in ranks) for ranks in needed]

    def learn_all_needed(self, roll: str) -> None:
        """Learn the identities in ``roll``, which is for this rank, once all ranks have come."""
        self._learn(roll)
        self._has_met = True

    def _learn(self, roll: str) -> None:
        for line in roll.splitlines():
            rank, name, identity = line.split(" ", 2)
            self._identities.setdefault(int(rank), identity)
            self._arrival_names[name] = int(rank)

    def here(self) -> set[int]:
        """The ranks that have identified themselves; all ranks if each has made a store already."""
        self._read_identities()
        arrivals = self._store.arrivals()
        if arrivals is not None and self._are_all_at(arrivals):
            return set(range(self._size))
        return set(self._identities)

    def server_is_unknown(self) -> bool:
        """True if rank 0, which may serve the store, has not identified itself to this rank."""
        is_rank_0s = self._rank != 0 and 0 not in self._identities
        return is_rank_0s and not outlives_ranks(self._store)

    def everyone(self) -> Collection[int]:
        """All other ranks."""
        return [rank for rank in range(self._size) if rank != self._rank]

    def close(self) -> None:
        """Take part no longer: the end of this rank is then no loss to others. Idempotent."""
        revoke, self._revoke = self._revoke, None
        if revoke is not None:
            with contextlib.suppress(DistError, OSError):
                revoke()

    def _neighbours(self) -> Collection[int]:
        """Up to 16 following ranks that have come, which this rank asks the system about."""
        others = sorted(self._identities, key=lambda rank: (rank - self._rank) % self._size)
        return [rank for rank in others if rank != self._rank][:BLOCK]

    def _read_identities(self) -> None:
        if not self._has_met:
            self._learn(self._store.get(_WHO).decode())

    # -- facts from the store, the launcher and the environment -------------------------------

    def _missed(self) -> set[int]:
        """Ranks known to have ended; empty if the last look was a moment ago."""
        now = time.monotonic()
        if now < self._next_look:
            return set()
        self._next_look = now + _LOOK_SECONDS + _LOOK_SECONDS_PER_RANK * self._size
        self._read_identities()
        silent = set() if self._has_met else set(range(self._size)) - set(self._identities)
        ended = self._missed_by_store(silent, now)
        if silent:
            ended |= self._ended_ranks.among(silent)
        if silent and self._siblings is not None:
            ended |= self._siblings.ended(silent)
        if silent and self._children is not None:
            known = self._identities.values()
            count = self._children.ended(self._size, known, len(silent))
            if 0 < count < len(silent):
                self.doubted = frozenset(silent)
            ended |= silent if count >= len(silent) else set()
        return ended

    def _missed_by_store(self, silent: set[int], now: float) -> set[int]:
        """Ranks whose connection was lost; all of ``silent`` if that many were lost."""
        arrivals = self._store.arrivals()
        if arrivals is None:
            return set()
        self.given_up = arrivals.given_up
        if not arrivals.lost <= self._arrival_names.keys():
            self._learn(self._store.get(_WHO).decode())
        ended = {self._arrival_names[name] for name in arrivals.lost if name in self._arrival_names}
        # Elimination is only valid if each rank has made exactly one store.
        if not self._are_all_at(arrivals):
            return ended
        unknown = arrivals.lost.difference(self._arrival_names)
        if len(unknown) >= len(silent):
            return ended | silent
        self._doubted_since = (self._doubted_since or now) if unknown else 0.0
        if unknown and now - self._doubted_since > _DOUBT_SECONDS:
            self.doubted = frozenset(silent)
        return ended

    def _are_all_at(self, arrivals: Arrivals) -> bool:
        """True if each rank made exactly one store, by the server's count ``arrivals``."""
        return {arrivals.expected, arrivals.came} == {self._size}
