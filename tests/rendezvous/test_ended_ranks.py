from __future__ import annotations

from tilework.rendezvous.ended_ranks import EndedRanks
from tilework.store import HashStore, PrefixStore


def test_ranks_end_and_are_started_again() -> None:
    store = HashStore()
    ended, seen = EndedRanks(store), EndedRanks(PrefixStore("a", PrefixStore("b", store)))
    assert seen.among(range(9)) == set()
    for rank in (0, 3, 8):
        ended.add(rank)
    ended.remove(3)
    ended.remove(5)
    assert seen.among(range(9)) == {0, 8}
    assert seen.among([3, 8]) == {8}
    ended.remove(0)
    ended.add(3)
    assert seen.among(range(9)) == {3, 8}
