"""A rank's wait for others while a group is made: reasons to give up, and a line on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tilework.comm.contract import ProcessGroup
from tilework.comm.flight.dump import note_fault
from tilework.comm.making.rank_watch import RankWatch
from tilework.errors import (
    CollectiveMismatchError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    PeerLostError,
    text_of,
)
from tilework.store import Store
from tilework.store.internal import Barrier, LateNotice, ranks_in_words

#: Seconds between looks, from the first to the longest.
_FIRST_LOOK, _LONGEST_LOOK = 0.1, 0.3
#: Seconds of another rank's wait in another operation after which it counts as a mismatch.
_STUCK_SECONDS = 0.8
#: Seconds until a process with closed connections is also gone from the system's lists.
_GONE_SECONDS = 1.0
#: The most seconds that rank 0 stays until the others have heard of a failure.
_PARTING_SECONDS = 1.0
_KINDS = (PeerLostError, CollectiveMismatchError, DistBackendError)
_LATE = "late"


#: Errors of the system, and of torch, for a resource that is used up.
MEANS_ERRORS = (OSError, MemoryError, RuntimeError)


def lack_of_means(rank: int, what: str, error: Exception) -> DistBackendError:
    """The error that ``rank`` (-1: unknown) could not make ``what``, because of ``error``."""
    text = f"{type(error).__name__}: {text_of(error)}"
    who, ranks = (f"rank {rank}", [rank]) if rank >= 0 else ("this rank", [])
    return DistBackendError(f"{who} could not make {what}: {text}", ranks=ranks)


@dataclass
class GroupWait:
    """The wait of a rank while a group is made; any rank's failure in the store ends it."""

    #: The name of the group, for errors and notices.
    name: str
    #: The global rank of this rank.
    me: int
    #: The awaited global ranks.
    ranks: Sequence[int]
    #: A store that only the ranks of this group use.
    store: Store
    #: The watch over the job's ranks; None: only ``groups`` know of lost ranks.
    watch: RankWatch | None = None
    #: This rank's groups, the default group first.
    groups: Sequence[ProcessGroup] = ()

    def __post_init__(self) -> None:
        self._begun = time.monotonic()
        self._next_look, self._pause = self._begun + _FIRST_LOOK, _FIRST_LOOK
        #: By rank: the operation that the rank waits in, and since when.
        self._stuck: dict[int, tuple[str, float]] = {}
        self._notice = LateNotice(self._begun)
        #: A name that differs from another process's that claims the same rank.
        self._name = os.urandom(8).hex()
        #: True once the store did not take a message of this rank.
        self._is_cut_off = False
        #: The barrier of the ranks while they meet, by positions in ``ranks``.
        self.barrier: Barrier | None = None

    def meanwhile(self, missing: Collection[int]) -> None:
        """Call :meth:`check` for the ``missing`` ranks, given as positions in ``ranks``."""
        self.check([self.ranks[position] for position in missing])

    @property
    def tells_identities(self) -> bool:
        """True if the last rank to come tells the others' identities: the store may end soon."""
        return self.watch is not None and not self.groups

    def rolls(self) -> list[str]:
        """The last rank's messages, by block of ranks."""
        return [""] if self.watch is None or self.groups else self.watch.rolls()

    def check(self, missing: Collection[int] | None = None) -> None:
        """Raise if waiting for the ``missing`` ranks (None: unknown) is futile. Called often."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._pause = min(1.5 * self._pause, _LONGEST_LOOK)
        self._hear()
        self._check_lost()
        self._check_aborted()
        self._check_stuck(self.ranks if missing is None else missing, now)
        if missing and self._notice.due(now) and self._is_first_to_tell():
            self._notice.tell(self._late_text(missing))
        self._next_look = time.monotonic() + self._pause

    def fail(self, error: BaseException) -> DistError | None:
        """Tell others of a failure; return another's earlier error, or None. Never raises."""
        kind: int | str = next(
            (i for i, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1
        )
        if isinstance(error, DistStoreError):  # timed out: ranks that came later know why
            kind = _LATE
        ranks = list(getattr(error, "ranks", ())) or [self.me]
        told = {"rank": self.me, "kind": kind, "ranks": ranks, "text": str(error), "by": self._name}
        record = json.dumps(told)
        try:
            return self._error_of(self.store.compare_set("failed", "", record))
        except DistError:
            self._is_cut_off = True
        return None

    def part(self) -> None:
        """Leave the waiting ranks, since the wait is futile. Never raises. Rank 0, which may serve
        the store, stays until the others have heard, or would be named as lost.
        """
        if self._is_cut_off:
            return
        with contextlib.suppress(DistError):
            self.store.append("heard", f"{self.me} ")
            if self.me != 0 or self.watch is None:
                return
            deadline = time.monotonic() + _PARTING_SECONDS
            while time.monotonic() < deadline:
                waiting = self._here() - self.watch.lost() - self.watch.doubted
                if waiting <= {self.me, *map(int, self.store.get("heard").split())}:
                    return
                time.sleep(0.02)

    def _here(self) -> set[int]:
        """The ranks that wait for this group, or are about to."""
        here = set(self.ranks)
        if self.barrier is not None:
            here = {self.ranks[position] for position in self.barrier.came()}
        if self.watch is not None and not self.groups:
            # The job's first group: every rank at the store comes to it.
            here |= self.watch.here().intersection(self.ranks)
        return here

    def without_means(self, error: Exception) -> DistBackendError:
        """Report that the system or torch raised ``error``; return the error to raise."""
        failed = lack_of_means(self.me, f"its end of group {self.name!r}", error)
        self.fail(failed)
        self.part()
        return failed

    def explain(self, error: DistNetworkError) -> DistError:
        """The error for a lost store: ranks that ended, or an abort if known; else ``error``."""
        aborted = self.groups[0].why_aborted() if self.groups else None
        if aborted is not None:  # perhaps the abort has ended that rank
            return aborted
        deadline = time.monotonic() + _GONE_SECONDS
        while self.watch is not None and time.monotonic() < deadline:
            lost = self.watch.ended_here(self.watch.everyone())
            if lost:
                return self._lost_error(lost, f" ({error})")
            time.sleep(0.02)
        if self.watch is not None and self.watch.server_is_unknown():
            return self._lost_error([0], f", or never came ({error})")
        return error

    # -- reasons ----------------------------------------------------------------------------

    def _hear(self) -> None:
        error = self._error_of(self.store.get("failed")) if self.store.check(["failed"]) else None
        if error is not None:
            raise error

    def _error_of(self, record: bytes) -> DistError | None:
        """The error in another rank's record; None for this rank's own record."""
        told = json.loads(record)
        if told["by"] == self._name:
            return None
        text = f"rank {self.me}: group {self.name!r} is not made: rank {told['rank']} says: "
        if told["kind"] == _LATE:
            return DistStoreError(text + told["text"])
        return _KINDS[told["kind"]](text + told["text"], ranks=told["ranks"])

    def _check_lost(self) -> None:
        lost = set() if self.watch is None else self.watch.lost()
        if self.groups:
            default = self.groups[0]
            lost = lost | {default.global_ranks[rank] for rank in default.departed()}
        lost = lost.intersection(self.ranks) - {self.me}
        if lost:
            raise self._told(self._lost_error(lost))
        if self.watch is not None and self.watch.given_up:
            why = f"whoever serves the store has given up: {self.watch.given_up}"
            raise DistStoreError(f"rank {self.me}: group {self.name!r} is not made: {why}")
        doubted = frozenset() if self.watch is None else self.watch.doubted
        if doubted.intersection(self.ranks):
            raise self._told(
                PeerLostError(
                    f"rank {self.me}: lost one of {ranks_in_words(sorted(doubted))} while group "
                    f"{self.name!r} was made: the process of one of them has ended, and none of "
                    f"them has said yet which rank it is",
                    ranks=sorted(doubted),
                )
            )

    def _check_aborted(self) -> None:
        """Raise if the default group was aborted: awaited ranks may never come."""
        error = self.groups[0].why_aborted() if self.groups else None
        if error is not None:
            raise self._told(error)

    def _lost_error(self, lost: Collection[int], why: str = "") -> PeerLostError:
        ranks = sorted(lost)
        return PeerLostError(
            f"rank {self.me}: lost {ranks_in_words(ranks)} while group {self.name!r} was "
            f"made: its process ended, became another program, or left its groups{why}",
            ranks=ranks,
        )

    def _check_stuck(self, missing: Collection[int], now: float) -> None:
        """Raise if an awaited rank has waited for some time for this rank in another operation."""
        before, self._stuck = self._stuck, {}
        for group in self.groups:
            for position, _, operation in group.blocked():
                rank = group.global_ranks[position]
                if rank not in missing or rank == self.me:
                    continue
                what = f"{operation} of group {group.group_name!r}"
                since = before[rank][1] if before.get(rank, ("",))[0] == what else now
                self._stuck[rank] = what, since
                if now - since > _STUCK_SECONDS:
                    self._raise_at_odds(group, rank, what)

    def _raise_at_odds(self, group: ProcessGroup, rank: int, what: str) -> None:
        text = (
            f"ranks called different things: rank {self.me} makes group {self.name!r} and waits "
            f"for rank {rank}, which waits for rank {self.me} in {what}. Make groups, and call "
            f"operations, in the same order on every rank"
        )
        try:
            error = self._told(CollectiveMismatchError(text, ranks=[self.me, rank]))
        finally:
            # Abort last: it ends that rank's wait, and then perhaps the rank.
            group.abort_for("mismatch", [self.me, rank], text)
            note_fault(text)
        raise error

    def _told(self, error: DistBackendError) -> DistError:
        """Report a failure to all ranks; returns the first reported error, which all raise."""
        first = self.fail(error)
        return error if first is None or type(first) is DistStoreError else first

    # -- the line of waiting ranks ------------------------------------------------------------

    def _is_first_to_tell(self) -> bool:
        with contextlib.suppress(DistError):
            key = f"late/{self._notice.number}"
            return self.store.compare_set(key, "", str(self.me)) == str(self.me).encode()
        return False

    def _late_text(self, missing: Collection[int]) -> str:
        came = [rank for rank in self.ranks if rank not in missing]
        where = "".join(f"; rank {rank} is in {what}" for rank, (what, _) in self._stuck.items())
        late, here = ranks_in_words(sorted(missing)), ranks_in_words(came)
        return f"group {self.name!r} is not made yet: waiting for {late}, {here} came{where}"
