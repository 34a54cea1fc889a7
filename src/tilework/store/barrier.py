"""Waiting for each other through a store alone, before there is a group."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from datetime import timedelta

from tilework.errors import DistStoreError, StoreTimeoutError
from tilework.store import checks
from tilework.store.contract import Store

_log = logging.getLogger(__name__)

#: Seconds between looks of a waiting rank for a reason not to wait any longer.
_LOOK_SECONDS = 1.0
#: Ranks that an error message spells out.
_RANKS_SHOWN = 16


def store_based_barrier(
    rank: int,
    store: Store,
    group_name: str,
    rendezvous_count: int,
    timeout: timedelta,
    logging_interval: timedelta = timedelta(seconds=10),
    *,
    ranks: Collection[int] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Block until ``rendezvous_count`` ranks have called this with the same name and store.

    Collective over those ranks. A name serves for one barrier per store. Each rank leaves its
    number behind, so that who gives up can say who is missing; the last one to come wakes all.

    Args:
        rank: This rank's number, unique among the callers.
        store: The store they share.
        group_name: What they wait for.
        rendezvous_count: How many they are.
        timeout: How long to wait for the last one.
        logging_interval: How often to log who is missing meanwhile.
        ranks: Their numbers; ``range(rendezvous_count)`` unless given.
        meanwhile: Called each second while this rank waits. What it raises ends the wait.

    Raises:
        DistStoreError: Time-out; it names the ranks that did not come.
        DistNetworkError: The store's server is gone.

    Example::

        store_based_barrier(rank, store, "start", world_size, timedelta(seconds=30))
    """
    limit = checks.seconds(timeout)
    deadline, interval = checks.Deadline(limit), checks.seconds(checks.positive(logging_interval))
    next_log = checks.Deadline(interval)
    call = _Barrier(store, group_name, rendezvous_count, ranks)
    call.arrive(rank)
    while not call.complete():
        left = deadline.left()
        if left == 0:
            raise DistStoreError(
                "Timed out initializing process group in store based barrier on rank "
                f"{rank} after {limit:g} s: {call.describe()} (group {group_name!r}, {store!r})."
            )
        if call.wait(min(left, next_log.left(), _LOOK_SECONDS if meanwhile else left)):
            return
        if meanwhile:
            meanwhile()
        if next_log.passed and not deadline.passed:
            next_log = checks.Deadline(interval)
            _log.info("rank %d waits for group %r: %s", rank, group_name, call.describe())


class _Barrier:
    """The keys of one barrier, and their meaning."""

    def __init__(
        self, store: Store, group_name: str, count: int, ranks: Collection[int] | None
    ) -> None:
        self._store = store
        self._count = count
        self._ranks = ranks
        self._arrived_key = f"store_based_barrier/{group_name}/arrived"
        self._done_key = f"store_based_barrier/{group_name}/done"
        self._arrived: Counter[int] = Counter()

    def arrive(self, rank: int) -> None:
        self._store.append(self._arrived_key, f"{rank},")

    def complete(self) -> bool:
        """Count the ranks that have come; if all have, wake those that wait."""
        # One list, not one key per rank: a thousand ranks read it once each, not a thousand keys.
        text = self._store.get(self._arrived_key).decode()
        self._arrived = Counter(int(part) for part in text.split(",") if part)
        if len(self._arrived) < self._count:
            return False
        self._store.set(self._done_key, b"1")
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for the last one; whether it came."""
        try:
            self._store.wait([self._done_key], timedelta(seconds=seconds))
        except StoreTimeoutError:
            return False
        return True

    def describe(self) -> str:
        """The ranks that have come and those that have not."""
        came = f"{len(self._arrived)} of {self._count} ranks came"
        expected = range(self._count) if self._ranks is None else self._ranks
        missing = sorted(set(expected) - set(self._arrived))
        strangers = set(self._arrived) - set(expected)
        if strangers:
            text = f"{came}: {_show(sorted(self._arrived))}"
        else:
            noun = "rank" if len(missing) == 1 else "ranks"
            text = f"{came}, missing {noun} {_show(missing)}"
        twice = sorted(rank for rank, times in self._arrived.items() if times > 1)
        if twice:
            text += f"; came more than once: {_show(twice)} (do two processes have the same rank?)"
        return f"{text}. Check whether the missing ones started, failed, or wait somewhere else"


def _show(ranks: list[int]) -> str:
    return checks.first_few(ranks, _RANKS_SHOWN)
