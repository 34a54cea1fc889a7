"""A rank's wait for others while a group is made: what ends it early, and its line on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tilework.comm.contract import ProcessGroup
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
from tilework.store.barrier import Barrier
from tilework.store.late_notice import LateNotice, ranks_in_words

#: Seconds between looks, from the first to the longest.
_FIRST_LOOK, _LONGEST_LOOK = 0.1, 0.3
#: Seconds for which a rank must have waited in another operation to be at odds with this one.
_STUCK_SECONDS = 0.8
#: Seconds in which a process whose connections have closed is gone from the system's lists, too.
_GONE_SECONDS = 1.0
#: Seconds for which rank 0 stays at most until the others have heard of a failure.
_PARTING_SECONDS = 1.0
_KINDS = (PeerLostError, CollectiveMismatchError, DistBackendError)
_LATE = "late"


#: Raised by the system where a process may have no more of something, and by torch.
MEANS_ERRORS = (OSError, MemoryError, RuntimeError)


def lack_of_means(rank: int, what: str, error: Exception) -> DistBackendError:
    """The error of a rank, -1 if unknown, to which the system, or torch, has refused something."""
    text = f"{type(error).__name__}: {text_of(error)}"
    who, ranks = (f"rank {rank}", [rank]) if rank >= 0 else ("this rank", [])
    return DistBackendError(f"{who} could not make {what}: {text}", ranks=ranks)


@dataclass
class GroupWait:
    """A group that is being made, as one of its ranks waits for the others.

    Any rank's failure ends the wait of all, who hear of it through the group's store.
    """

    name: str
    me: int
    #: The global ranks that are awaited.
    ranks: Sequence[int]
    #: Seen by those who make this group only.
    store: Store
    watch: RankWatch | None = None
    #: This rank's groups, the default group first.
    groups: Sequence[ProcessGroup] = ()

    def __post_init__(self) -> None:
        self._begun = time.monotonic()
        self._next_look, self._pause = self._begun + _FIRST_LOOK, _FIRST_LOOK
        #: By rank: since when it has waited in which operation.
        self._stuck: dict[int, tuple[str, float]] = {}
        self._notice = LateNotice(self._begun)
        #: Apart from another process that claims the same rank.
        self._name = os.urandom(8).hex()
        #: True once the store did not take what this rank had to say.
        self._is_cut_off = False
        #: Where they meet, while they do: by their positions in ``ranks``.
        self.barrier: Barrier | None = None

    def meanwhile(self, missing: Collection[int]) -> None:
        """Look, while the barrier of the group misses these of its ranks, by position."""
        self.check([self.ranks[position] for position in missing])

    def roll(self) -> str:
        """The identities of all; read by the rank that comes last, since the store may go soon."""
        return "" if self.watch is None else self.watch.roll()

    def check(self, missing: Collection[int] | None = None) -> None:
        """Raise if waiting is futile. To be called now and then; it looks as often as is right.

        Args:
            missing: The global ranks that have not come; None: it is not known which.
        """
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
        """Let the other ranks hear why this one cannot make the group. Never raises.

        Returns:
            What another rank had said before; None if this one is the first.
        """
        kind: int | str = next(
            (i for i, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1
        )
        if isinstance(error, DistStoreError):  # its time was up: those who came later hear why
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
        """Leave the ranks that wait, once this one knows that it waits in vain. Never raises.

        Rank 0, with which the store may go, stays until the others have heard of it, or a moment:
        else they would take it for the one that was lost.
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
        """The ranks that wait for this group by now, or are about to."""
        here = set(self.ranks)
        if self.barrier is not None:
            here = {self.ranks[position] for position in self.barrier.came()}
        if self.watch is not None and not self.groups:
            # The job's first group: whoever is at the store comes to it.
            here |= self.watch.here().intersection(self.ranks)
        return here

    def without_means(self, error: Exception) -> DistBackendError:
        """The error, of which all hear, for what the system, or torch, has refused to this rank."""
        failed = lack_of_means(self.me, f"its end of group {self.name!r}", error)
        self.fail(failed)
        self.part()
        return failed

    def explain(self, error: DistNetworkError) -> DistError:
        """The error for a store that went away: why the rank that served it left, if one did."""
        aborted = self.groups[0].why_aborted() if self.groups else None
        if aborted is not None:  # which has ended that rank, perhaps
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
        """The error that another rank told of; None where it was this one."""
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
                    f"{self.name!r} was made: one's process has ended, and these have not said yet "
                    f"who they are",
                    ranks=sorted(doubted),
                )
            )

    def _check_aborted(self) -> None:
        """Raise if the default group was aborted: those that are awaited may have gone elsewhere.

        To the group of those that are left, say, since a rank was lost that this group is without.
        """
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
        """Raise where a rank that is awaited waits for this one in an operation."""
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
            # Afterwards: it ends that rank's wait, and then the rank perhaps.
            group.abort_for("mismatch", [self.me, rank], text)
        raise error

    def _told(self, error: DistBackendError) -> DistError:
        """The error that all ranks raise: this one, or that of which another has told before.

        Who was first has ended since, perhaps, and must not be taken for the rank that was lost.
        """
        first = self.fail(error)
        return error if first is None or type(first) is DistStoreError else first

    # -- the line of those who wait -----------------------------------------------------------

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
