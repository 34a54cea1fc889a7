"""The costs for ranks of meeting, counted by running the code of some without the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

from tilework.comm.pretence import MeetingCost
from tilework.store import HashStore, Store


class _PeersStore(HashStore):
    """A store at which each peer does as the caller: those before ``place`` have, others will."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place
        self.requests = self.connections = 0

    def _do(self, *args: Any) -> Any:
        self.requests += 1
        return super()._do(*args)

    def _send(self, *args: Any) -> Any:
        self.requests += 1
        return super()._send(*args)

    def append(self, key: str, value: Any) -> None:
        """Append what all ranks up to the caller would: the same, with their own numbers."""
        text = value if isinstance(value, str) else value.decode()
        rest = text.removeprefix(str(self._place))
        peers = range(self._place + 1) if rest != text else ()
        super().append(key, "".join(f"{peer}{rest}" for peer in peers) or text)

    def add(self, key: str, amount: int) -> int:
        """Add what all ranks up to the caller would."""
        return super().add(key, amount * (self._place + 1))

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        """The value, which a later rank writes if there is none."""
        if key.encode() in self._state.table.values:
            return super().get(key)
        self.requests += 1
        return b""

    def append_on_disconnect(self, key: str, value: Any, greeting: Any = None) -> None:
        self.connections += 1
        super().append_on_disconnect(key, value, greeting)


def counted(
    ranks: Sequence[int], members: Collection[int], meet: Callable[[int, Store], None], opens: int
) -> MeetingCost:
    """The cost of a meeting: one rank of each kind runs: first, last, in the new group or not.

    ``meet`` is called with a rank's place among ``ranks``, and a store; each rank has opened
    ``opens`` connections to reach the store.
    """
    inside, last = frozenset(members), len(ranks) - 1
    kinds: dict[tuple[bool, ...], list[int]] = defaultdict(list)
    for place, rank in enumerate(ranks):
        kinds[place == 0, place == last, rank in inside].append(place)
    requests = connections = most = 0
    for places in kinds.values():
        with _PeersStore(places[0]) as store:
            meet(places[0], store)
            most = max(most, store.requests)
            requests += len(places) * store.requests
            connections += len(places) * (store.connections + opens)
    return MeetingCost(tuple(ranks), requests, most, connections)
