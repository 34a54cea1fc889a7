"""A barrier for ranks that share a store and have no group yet."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

from tilework.errors import DistStoreError, StoreTimeoutError
from tilework.store import checks
from tilework.store.checks import data_bytes
from tilework.store.contract import Data, Store

_log = logging.getLogger(__name__)

#: Seconds between looks of a waiting rank for a reason not to wait any longer; with very many
#: ranks more, so that the store's server has time for them.
_LOOK_SECONDS, _LOOK_SECONDS_PER_RANK = 0.2, 0.001
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
    meanwhile: Callable[[Collection[int]], None] | None = None,
) -> None:
    """Block until ``rendezvous_count`` ranks have called this with the same name and store.

    Collective over those ranks. A name can be used for one barrier per store. Each rank writes
    ``rank`` into the store; a rank that gives up can therefore name the missing ranks. The last
    rank to come wakes all others.

    Args:
        rank: This rank's number, unique among the callers.
        store: The store that all callers share.
        group_name: The name of the barrier, the same for all callers.
        rendezvous_count: The number of callers.
        timeout: How long to wait for the last caller.
        logging_interval: How often to log the missing ranks while this rank waits.
        ranks: The numbers of all callers; ``range(rendezvous_count)`` unless given.
        meanwhile: Called now and then, with the ranks that have not come, while this rank waits.
            An exception that it raises ends the wait.

    Raises:
        DistStoreError: Time-out; it names the ranks that did not come.
        DistNetworkError: The store's server is gone.

    Example:
        >>> from tilework.store import HashStore
        >>> store_based_barrier(0, HashStore(), "start", 1, timedelta(seconds=30))
    """
    call = Barrier(store, group_name, rendezvous_count, ranks)
    meet(rank, call, timeout, logging_interval, meanwhile)


def meet(
    rank: int,
    call: Barrier,
    timeout: timedelta,
    logging_interval: timedelta,
    meanwhile: Callable[[Collection[int]], None] | None = None,
) -> bytes:
    """Wait as :func:`store_based_barrier` does; return the message of the last rank to come."""
    store, group_name = call.store, call.group_name
    limit = checks.seconds(timeout)
    deadline, interval = checks.Deadline(limit), checks.seconds(checks.positive(logging_interval))
    next_log = checks.Deadline(interval)
    look = max(_LOOK_SECONDS, _LOOK_SECONDS_PER_RANK * call.count)
    if call.arrive(rank) and call.complete():
        return call.told
    while not call.wait(min(deadline.left(), next_log.left(), look if meanwhile else limit)):
        if call.complete():
            break
        if deadline.passed:
            raise DistStoreError(
                "Timed out initializing process group in store based barrier on rank "
                f"{rank} after {limit:g} s: {call.describe()} (group {group_name!r}, {store!r})."
            )
        if meanwhile:
            meanwhile(call.missing())
        if next_log.passed:
            next_log = checks.Deadline(interval)
            _log.info("rank %d waits for group %r: %s", rank, group_name, call.describe())
    return call.told


class Barrier:
    """A barrier in a store: counts the ranks that have come, and waits for the last.

    The last rank that comes calls ``messages``, which gives a message for each part of the ranks.
    That for this rank's ``part`` becomes ``told``.
    """

    def __init__(
        self,
        store: Store,
        group_name: str,
        count: int,
        ranks: Collection[int] | None = None,
        messages: Callable[[], Sequence[Data]] = lambda: [b"1"],
        part: int = 0,
    ) -> None:
        self.store, self.group_name, self.count = store, group_name, count
        self._ranks = ranks
        self._messages, self._part = messages, part
        #: The message of the last rank to come.
        self.told = b""
        self._key = f"store_based_barrier/{group_name}"
        self._arrived: Counter[int] = Counter()

    def arrive(self, rank: int) -> bool:
        """Come; True if all may have come, False if surely not."""
        self.store.append(f"{self._key}/arrived", f"{rank},")
        return self.store.add(f"{self._key}/count", 1) >= self.count

    def complete(self) -> bool:
        """Count the ranks that have come. If all have, wake those that wait, and return True."""
        if len(self.came()) < self.count:
            return False
        messages = self._messages()
        self.told = data_bytes(messages[self._part])
        keys = [f"{self._key}/done/{part}" for part in range(len(messages))]
        self.store.multi_set(keys, messages)
        return True

    def came(self) -> Collection[int]:
        """The ranks that have come by now, read from the store; this rank is among them."""
        # One list, not one key per rank, which the last rank reads, and who waits long.
        text = self.store.get(f"{self._key}/arrived").decode()
        self._arrived = Counter(int(part) for part in text.split(",") if part)
        return self._arrived.keys()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the last rank; return True if it came."""
        try:
            self.told = self.store.get(f"{self._key}/done/{self._part}", timedelta(seconds=seconds))
        except StoreTimeoutError:
            return False
        return True

    def missing(self) -> list[int]:
        """The ranks that have not come, as of the last count."""
        expected = range(self.count) if self._ranks is None else self._ranks
        return sorted(set(expected) - set(self._arrived))

    def describe(self) -> str:
        """Text for messages: the ranks that have come, and those that have not."""
        came = f"{len(self._arrived)} of {self.count} ranks came"
        expected = range(self.count) if self._ranks is None else self._ranks
        missing = self.missing()
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
