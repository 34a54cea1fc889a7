"""A rank's wait for the store that rank 0 is to serve, when it comes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from contextlib import AbstractContextManager

from tilework.errors import DistError, PeerLostError
from tilework.rendezvous.ended_ranks import EndedRanks
from tilework.rendezvous.liveness import process_identity
from tilework.rendezvous.multiprocessing_children import MultiprocessingChildren
from tilework.rendezvous.place import RankPlace
from tilework.rendezvous.siblings import Siblings
from tilework.store.internal import LateNotice, ranks_in_words, while_connecting


class ServerWait:
    """Watches the other ranks while this rank waits for rank 0 to serve the store.

    Within :meth:`during` the wait raises PeerLostError if another rank has ended. A wait that lasts
    long is reported on stderr.

    Args:
        place: This rank, and the number of ranks.
        where: The address of the store, for messages; "" for the address from the environment.
        one_host: True if only processes of this host can reach that address.
    """

    def __init__(self, place: RankPlace, where: str, one_host: bool) -> None:
        self._rank = place.rank
        self._where = f"at {where}" if where else "of this job"
        self._others = [rank for rank in range(place.world_size) if rank != place.rank]
        self._siblings = Siblings.of(place.rank, place.world_size)
        self._children = MultiprocessingChildren.of_this_process() if one_host else None
        # Now: while it connects to the store, it can connect to no other.
        self._launcher = EndedRanks.at_launcher(place.rank, place.world_size)
        self._notice = LateNotice(time.monotonic())

    def during(self) -> AbstractContextManager[None]:
        """The context manager within which the caller makes the store."""
        return while_connecting(self._meanwhile)

    def _meanwhile(self, reason: str) -> None:
        ended = self._siblings.ended(self._others) if self._siblings else set()
        if self._launcher is not None:
            with contextlib.suppress(DistError):
                ended |= self._launcher.among(self._others)
        if ended:
            raise self._lost(ranks_in_words(sorted(ended)), ended, reason)
        if self._children is not None:
            others = self._others
            count = self._children.ended(len(others) + 1, [process_identity()], len(others))
            if count:
                which = "" if count == len(others) else "one of "
                raise self._lost(which + ranks_in_words(others), others, reason)
        if self._notice.due(time.monotonic()):
            self._notice.tell(
                f"rank {self._rank} waits for rank 0, which is to serve the store {self._where} "
                f"({reason})"
            )

    def _lost(self, which: str, ranks: Collection[int], reason: str) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank}: lost {which} before the job's ranks met: a process "
            f"ended before it joined, or served the store {self._where} ({reason}); look at "
            "the output of that rank",
            ranks=sorted(ranks),
        )
