"""The watch over the ranks of a job, from the moment at which each first meets the others.

A rank says who it is as the first thing that it does in the job's store, and leaves a will there
where the store's server can carry one out. So those that wait for it learn that it has ended: from
the system where they are on one host, from its will where they are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from tilework.comm.elastic.liveness import has_ended
from tilework.errors import DistError
from tilework.store import PrefixStore, Store

_WHO, _GONE = "who", "gone"
#: Each rank asks the system about so many ranks that come after it, and tells the others.
_NEIGHBOURS = 16


class RankWatch:
    """The watch of a rank over the others of its job.

    Args:
        store: Seen by the ranks of this job, and of this attempt to form it, only.
        rank: This rank's number.
        size: How many there are.
        identity: This rank's, as from :mod:`tilework.comm.elastic.liveness`.
    """

    def __init__(self, store: Store, rank: int, size: int, identity: str) -> None:
        self._store = PrefixStore("ranks", store)
        self._rank, self._size = rank, size
        self._identities: dict[int, str] = {}
        self._lost: set[int] = set()
        self._revoke = self._store.leave_will(_GONE, f"{rank} ")
        self._store.append(_WHO, f"{rank} {identity}\n")
        self._read_identities()

    def lost(self) -> set[int]:
        """The ranks that came and have ended since. Asks the store, and the system."""
        with contextlib.suppress(DistError):  # the store has gone; the system can be asked
            self._read_identities()
            if self._store.check([_GONE]):
                self._lost.update(map(int, self._store.get(_GONE).split()))
        ended = self.ended_here(self._neighbours()) - self._lost
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
            rank, _, identity = line.partition(" ")
            self._identities.setdefault(int(rank), identity)

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
