"""A list, which the launcher keeps in a store, of the ranks whose processes have ended.

It is in the job's store. If rank 0 serves that store, the launcher has a second store for the list:
rank 0 may be the rank that has ended, and a server of torch's may listen at the port.

This module does not import torch, since the launcher imports it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from datetime import timedelta

from tilework.errors import DistError
from tilework.store import PrefixStore, Store, UnixStore

#: Where the launcher publishes it, unless in the job's store.
ENDS_VARIABLE = "TILEWORK_ENDED_RANKS"
#: The launcher is on this host, and lives as long as the ranks.
_TIMEOUT = timedelta(seconds=5)

_KEY = "tilework/ended-ranks"


class EndedRanks:
    """The list in a store of a job's ranks that have ended and were not started again.

    A rank counts as ended after a failure, and also after the program has finished.

    Args:
        store: The store with the list, or a prefixed view of that store.
    """

    def __init__(self, store: Store) -> None:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._store = store

    @classmethod
    def at_launcher(cls, rank: int, size: int) -> EndedRanks | None:
        """The list in the second store, which the launcher of this process serves for it.

        None if there is no second store, or if the launcher started this process as another rank
        than ``rank`` of ``size``.
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
        """Note in the store that the process of ``rank`` has ended."""
        self._store.append(_KEY, f"{rank} ")

    def remove(self, rank: int) -> None:
        """Note in the store that ``rank`` was started again."""
        self._store.append(_KEY, f"-{rank + 1} ")

    def among(self, ranks: Collection[int]) -> set[int]:
        """Those of ``ranks`` that the store lists as ended. Takes one or two requests."""
        ended: set[int] = set()
        if self._store.check([_KEY]):
            for number in map(int, self._store.get(_KEY).split()):
                (ended.add if number >= 0 else ended.discard)(max(number, -1 - number))
        return ended.intersection(ranks)
