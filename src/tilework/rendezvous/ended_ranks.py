"""The launcher's word, in the job's store, on the ranks whose processes have ended.

Without torch: the launcher writes it.
"""

from __future__ import annotations

from collections.abc import Collection

from tilework.store import PrefixStore, Store

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
