"""The launcher's word, in the job's store, on the ranks whose processes have ended.

Where rank 0 serves that store, the launcher has a second store for this: rank 0 may be the rank
that has ended, and a server of torch's may listen at the port.

Without torch: the launcher writes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from datetime import timedelta

from tilework.errors import DistError
from tilework.store import PrefixStore, Store, UnixStore

#: Where the launcher tells it, unless in the job's store.
ENDS_VARIABLE = "TILEWORK_ENDED_RANKS"
#: The launcher is on this host, and lives as long as the ranks.
_TIMEOUT = timedelta(seconds=5)

_KEY = "tilework/ended-ranks"


class EndedRanks:
    """The ranks of a job that have ended, in order or not, and were not started again.

    Args:
        store: The job's, or a view of it.
    """

    def __init__(self, store: Store) -> None:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._store = store

    @classmethod
    def at_launcher(cls, rank: int, size: int) -> EndedRanks | None:
        """The ended ranks that the launcher of this process tells of at a place for this purpose.

        None if there is no such place, or if this process was started as another rank.
        """
        environment = os.environ
        address = environment.get(ENDS_VARIABLE, "").removeprefix("unix:")
        started = environment.get("RANK"), environment.get("WORLD_SIZE")
        if not address or started != (str(rank), str(size)):
            return None
        with contextlib.suppress(DistError, OSError, ValueError):
            secret = bytes.fromhex(environment.get("TILEWORK_SECRET", "")) or None
            return cls(UnixStore(address, timeout=_TIMEOUT, secret=secret))
        return None

    def add(self, rank: int) -> None:
        """Say that a rank's process has ended."""
        self._store.append(_KEY, f"{rank} ")

    def remove(self, rank: int) -> None:
        """Say that a rank was started again."""
        self._store.append(_KEY, f"-{rank + 1} ")

    def among(self, ranks: Collection[int]) -> set[int]:
        """Those of ``ranks`` that have ended. Asks the store once, or twice."""
        ended: set[int] = set()
        if self._store.check([_KEY]):
            for number in map(int, self._store.get(_KEY).split()):
                (ended.add if number >= 0 else ended.discard)(max(number, -1 - number))
        return ended.intersection(ranks)
