"""Discovery of the ranks that call init_rpc, through a store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from tilework.errors import (
    CollectiveMismatchError,
    DistError,
    DistStoreError,
    StoreTimeoutError,
    text_of,
)
from tilework.rpc.memory import Probe
from tilework.store import PrefixStore, Store
from tilework.store.internal import first_few

#: Seconds between looks of waiting ranks whether another has failed.
_LOOK_SECONDS = 0.1
#: Seconds that a rank which failed lets the others find out why.
_LEAVING_SECONDS = 1.0
_RANKS_SHOWN = 16


@dataclass(frozen=True)
class Card:
    """A rank's description of itself: name, host and address, which all other ranks read."""

    name: str
    """The worker name of the rank."""
    proof: str
    """Equal where the job's secret is."""
    host: str
    """Equal where ranks may reach each other without a network."""
    address: str
    """Where it listens for those."""
    probe: Probe
    """The memory file by which others test whether they can open this rank's files."""


class Meeting:
    """This rank's part in a meeting of ``size`` ranks at ``store``, for at most ``seconds``.

    Ranks may meet at the same store again: the store counts how often each rank has come, and how
    often it has left, with success or without. A context manager: the end of the block counts as
    leaving.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self._rank, self._size = rank, size
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._visits = PrefixStore("tilework/rpc", store)
        self._visit = self._visits.add(f"came/{rank}", 1)
        #: Seen by the ranks of this meeting only.
        self.store: Store = PrefixStore(str(self._visit), self._visits)
        if self._visit > 1:  # to whom still waits for the last one, if anybody does
            PrefixStore(str(self._visit - 1), self._visits).set("again", str(rank))

    def __enter__(self) -> Meeting:
        if self._visits.add(f"left/{self._rank}", 0) < self._visit - 1:
            raise self._twice(self._rank)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        with contextlib.suppress(DistError):  # whoever serves the store may have gone
            if error is not None and not isinstance(error, DistError):  # which all find out alone
                failure = f"rank {self._rank} raised {type(error).__name__}: {text_of(error)}"
                self.store.compare_set("failure", "", failure)
            self._visits.add(f"left/{self._rank}", 1)
            if error is not None:
                self._let_others_leave()

    def _let_others_leave(self) -> None:
        """Wait at most a second until the other ranks that came have left.

        This rank may serve the store from which they read what went wrong.
        """
        deadline = time.monotonic() + _LEAVING_SECONDS
        for rank in range(self._size):
            came = self._visits.add(f"came/{rank}", 0) >= self._visit
            while came and self._visits.add(f"left/{rank}", 0) < self._visit:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)

    def agree_on_size(self) -> None:
        """Raise CollectiveMismatchError, here and on the others, if ranks gave different sizes."""
        own = f"rank {self._rank} says world_size={self._size}"
        first = self.store.compare_set("size", "", own).decode()
        if first.partition("=")[2] != str(self._size):
            self._disagree(f"ranks disagree on how many workers there are: {own}, but {first}")

    def exchange(self, card: Card) -> list[Card]:
        """Publish ``card``, and return the cards of all ranks, in their order. Blocks.

        Raises:
            CollectiveMismatchError: Ranks have different secrets, or two workers gave the same
                rank.
            DistStoreError: Some ranks did not come in time.
        """
        text = json.dumps(asdict(card))
        self.publish("card", text)
        cards = [_card(text) for text in self.gather("card")]
        others = [rank for rank, other in enumerate(cards) if other.proof != cards[0].proof]
        if others:
            raise CollectiveMismatchError(
                f"ranks {others} have another secret than rank 0: set TILEWORK_SECRET to the "
                f"same on every rank, or on none",
                ranks=others,
            )
        return cards

    def wait_for_all(self) -> None:
        """Block until all ranks have called this."""
        self.publish("here", "")
        self.gather("here")

    def publish(self, what: str, text: str) -> None:
        """Publish this rank's ``text`` under the name ``what``, for :meth:`gather` of all ranks."""
        self.store.set(f"{what}/{self._rank}", text)

    def gather(self, what: str) -> list[str]:
        """The texts that all ranks published under ``what``, in the order of ranks. Blocks."""
        keys = [f"{what}/{rank}" for rank in range(self._size)]
        while not self._there(keys):
            if time.monotonic() > self._deadline:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise DistStoreError(
                    f"Timed out in init_rpc on rank {self._rank}: ranks "
                    f"[{first_few(missing, _RANKS_SHOWN)}] of {self._size} did not call it within "
                    f"{self._seconds:g} s. Check whether they started, failed, or wait elsewhere"
                )
        return [value.decode() for value in self.store.multi_get(keys)]

    def _there(self, keys: Sequence[str]) -> bool:
        try:
            self.store.wait(keys, timedelta(seconds=_LOOK_SECONDS))
            complete = True
        except StoreTimeoutError:
            complete = False
        if self.store.check(["disagreement"]):
            raise CollectiveMismatchError(self.store.get("disagreement").decode())
        if not complete and self.store.check(["failure"]):
            raise DistError(f"init_rpc failed: {self.store.get('failure').decode()}")
        if not complete and self.store.check(["again"]) and not self.store.check(keys):
            # Nobody comes again before this meeting has ended.
            raise self._twice(int(self.store.get("again")))
        return complete

    def _twice(self, rank: int) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"rank {rank} called init_rpc again before all others had called it: two workers say "
            f"that they are rank {rank}, or the first call of rank {rank} failed",
            ranks=[rank],
        )

    def _disagree(self, text: str) -> None:
        self.store.set("disagreement", text)
        raise CollectiveMismatchError(text)


def _card(text: str) -> Card:
    fields = json.loads(text)
    return Card(**{**fields, "probe": Probe(*fields["probe"])})
