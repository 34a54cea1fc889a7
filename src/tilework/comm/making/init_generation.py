"""Numbered attempts to make the default group at a store, where no two processes may be a rank."""

from __future__ import annotations

from tilework.errors import CollectiveMismatchError
from tilework.store import PrefixStore, Store


class InitGeneration:
    """A numbered attempt of ``rank`` to make the default group with the other ranks at ``store``.

    Each rank counts in the store how often it came. Ranks with equal counts make a group together.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._count = _count_key(rank)
        self._rank = rank
        self._number = store.add(self._count, 1)
        #: A store that only the ranks of this generation use.
        self.store: Store = self._at(self._number)

    @staticmethod
    def has_come(store: Store, rank: int) -> bool:
        """True if a process has come to ``store`` as ``rank`` to make the default group."""
        return store.whole.check([_count_key(rank)])

    def check(self) -> None:
        """Raise CollectiveMismatchError if two processes are the same rank. To be called repeatedly
        while waiting.

        The process that came first, and still waits, sees that the rank came again. It informs the
        ranks that wait with it, and the ranks that wait with the other process.
        """
        latest = int(self._store.get(self._count))
        if latest > self._number:
            for number in range(self._number, latest + 1):
                self._at(number).set("twice", str(self._rank))
        if self.store.check(["twice"]):
            rank = int(self.store.get("twice"))
            raise CollectiveMismatchError(
                f"two processes say that they are rank {rank}: give each its own number, from 0 "
                f"on (the variable RANK, or rank=)",
                ranks=[rank],
            )

    def _at(self, number: int) -> Store:
        return PrefixStore(f"tilework/{number}", self._store)


def _count_key(rank: int) -> str:
    return f"tilework/generations/{rank}"
