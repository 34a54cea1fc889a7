"""``shrink_group``: the group of the ranks that are left."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Final, TypeVar

from tilework.comm.contract import ProcessGroup
from tilework.comm.debug import logger
from tilework.comm.elastic.consensus import (
    Decision,
    NoGroupError,
    Participant,
    Steps,
    failed,
    survive,
)
from tilework.comm.elastic.registers import Registers, identity_key, left_key
from tilework.comm.elastic.ticket_store import note_event
from tilework.comm.making.group_plan import GroupPlan, Watch
from tilework.comm.world import GroupRecord, World, current_world
from tilework.errors import (
    DistBackendError,
    DistError,
    DistNetworkError,
    ExcludedError,
    PeerLostError,
)
from tilework.rendezvous.internal import has_ended
from tilework.store import PrefixStore, Store, UnixStore

T = TypeVar("T")
#: Seconds of a pause, from the first to the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class GroupLosses:
    """Returns the given ranks that have ended or left a group; a lost rank stays lost."""

    def __init__(self, group: ProcessGroup, registers: Registers) -> None:
        self._group, self._registers = group, registers
        self._lost: set[int] = set()

    def __call__(self, asked: Collection[int]) -> set[int]:
        departed = set(self._group.departed())
        for rank in set(asked) - self._lost:
            identity = self._registers.read(identity_key(rank))
            ended = identity is not None and has_ended(identity)
            if ended or rank in departed or self._registers.read(left_key(rank)) is not None:
                self._lost.add(rank)
        return self._lost.intersection(asked)


def participant_of(group: ProcessGroup, registers: Registers, patience: float) -> Participant:
    """This rank as a participant of the agreement of ``group``'s ranks."""
    losses = GroupLosses(group, registers)
    return Participant(group.rank(), registers, losses, time.monotonic, patience)


def drive(steps: Steps[T]) -> T:
    """The result of a protocol, run to the end, with sleeps where it asks for a pause. Blocks."""
    pause = _FIRST_PAUSE
    while True:
        try:
            wants_pause = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        if wants_pause:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)


#: Remarks on a decision: use the old store, or the first member serves a new store.
OLD_STORE: Final = "store"
NEW_STORE: Final = "server"
#: Seconds within which a live store answers.
_ANSWER_SECONDS = 1.0
_PAUSE_SECONDS = 0.005


def answers_soon(store: Store) -> bool:
    """True if the store's server answers within a second: it has not ended or stopped."""
    answered = threading.Event()

    def ask() -> None:
        try:
            store.check(["tilework/answers"])
        except DistError:
            return
        answered.set()

    thread = threading.Thread(target=ask, name="tilework-ask-store", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answered.is_set()


def serve_store(registers: Registers, key: str, timeout: timedelta) -> UnixStore:
    """Serve a new store, and write the address to register ``key`` for the other ranks. Local."""
    secret, name = secrets.token_bytes(32), f"@tilework-{secrets.token_hex(16)}"
    store = UnixStore(name, is_master=True, timeout=timeout, secret=secret)
    registers.write(key, f"{name} {secret.hex()}")
    return store


def find_served_store(
    registers: Registers, key: str, timeout: timedelta, limit: float, check: Callable[[], None]
) -> UnixStore:
    """Connect to the store whose address appears in register ``key`` within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while (text := registers.read(key)) is None:
        check()
        if time.monotonic() > deadline:
            raise DistBackendError(
                f"no rank announced the address of a new store within {limit:g} s"
            )
        time.sleep(_PAUSE_SECONDS)
    name, secret = text.split(" ")
    return UnixStore(name, timeout=timeout, secret=bytes.fromhex(secret))


#: The longest wait for a rank that has not ended, unless the group's timeout is less.
PATIENCE = timedelta(seconds=30)
#: Rounds that may fail, besides rounds in which a rank is lost.
_SPARE_ROUNDS = 3


def shrink(group: ProcessGroup, exclude: Sequence[int], timeout: timedelta | None) -> ProcessGroup:
    """Make the group of the ranks that are left, without ``exclude``: see ``dist.shrink_group``."""
    world = current_world()
    record = world.record(group)
    _check_excluded(group, exclude)
    patience = min(PATIENCE, record.timeout) if timeout is None else timeout
    # Abort all groups, so that ranks that wait in an operation of any group come here.
    for known in list(world.records):
        known.abort(f"rank {group.global_ranks[group.rank()]} shrinks group {group.group_name!r}")
    return _Shrinking(world, record, patience).run([group.group_ranks[rank] for rank in exclude])


def _check_excluded(group: ProcessGroup, exclude: Sequence[int]) -> None:
    strangers = sorted(set(exclude).difference(group.global_ranks))
    if strangers:
        raise ValueError(
            f"ranks_to_exclude names ranks {strangers}, which are not in group "
            f"{group.group_name!r} of ranks {list(group.global_ranks)}"
        )
    if group.global_ranks[group.rank()] in exclude:
        raise ValueError(
            f"rank {group.global_ranks[group.rank()]} is to be excluded: call shrink_group on the "
            f"ranks that stay"
        )


class _Shrinking:
    """A rank's part in replacing a group by a new group of the ranks that are left."""

    def __init__(self, world: World, record: GroupRecord, patience: timedelta) -> None:
        self._world, self._record, self._patience = world, record, patience
        self._old = record.group
        assert self._old.registers is not None
        self._registers = self._old.registers
        self._participant = participant_of(self._old, self._registers, patience.total_seconds())
        self._served: Store | None = None
        self._group: ProcessGroup | None = None

    def run(self, excluded: Sequence[int]) -> ProcessGroup:
        """Agree with the other ranks, none of ``excluded``, on the new group. Blocks."""
        candidates = [rank for rank in range(self._old.size()) if rank not in excluded]
        rounds = len(candidates) + _SPARE_ROUNDS
        try:
            decision = drive(survive(self._participant, candidates, self, rounds))
        except NoGroupError as error:
            reasons = "; ".join(
                f"rank {self._old.global_ranks[rank]}: {why}" for rank, why in error.args[0].items()
            )
            raise DistBackendError(
                f"no successor of group {self._old.group_name!r} could be made in {rounds} "
                f"attempts: {reasons}"
            ) from None
        except DistNetworkError as error:
            raise DistNetworkError(
                f"group {self._old.group_name!r} cannot shrink: its ranks agree through the store, "
                f"which is gone ({error}). Use a store that outlives ranks, as that of tilework "
                f"run or init_method='file://...', or the backend 'shm' or 'hybrid', whose ranks "
                f"agree without it"
            ) from error
        if self._participant.me not in decision.members:
            raise self._excluded_error(decision)
        assert self._group is not None
        return self._adopt(self._group, decision)

    def build(self, decision: Decision) -> Steps[str | None]:
        """Make the group of ``decision`` within a limited time; return why that failed, or None."""
        try:
            self._group = self._make(decision)
        except (DistError, OSError) as error:
            logger.info("attempt %d to shrink failed here: %s", decision.round, error)
            return f"{type(error).__name__}: {error}"[:500]
        return None
        yield False  # a yield makes this a generator, as builders in the model check are

    def discard(self) -> None:
        """Drop the new group, if this rank has made it, and the store that was opened for it."""
        if self._group is not None:
            self._world.forget(self._group)
        if self._served is not None:
            self._served.close()
        self._group = self._served = None

    def remark(self) -> str:
        """The store for the new group: the old store if it answers here, else a new store."""
        return OLD_STORE if answers_soon(self._record.store) else NEW_STORE

    def _make(self, decision: Decision) -> ProcessGroup:
        members, old = decision.members, self._old

        def check() -> None:
            if failed(self._participant, decision.round):
                raise DistBackendError("another rank gave up making this group")
            lost = self._participant.lost(members)
            if lost:
                ranks = sorted(old.global_ranks[rank] for rank in lost)
                raise PeerLostError(f"lost ranks {ranks} while the group was made", ranks=ranks)

        seconds = self._patience.total_seconds()
        store = self._record.store
        if decision.remark == NEW_STORE:
            key = f"{decision.round}/server"
            if members[0] == self._participant.me:
                store = serve_store(self._registers, key, self._record.timeout)
            else:
                store = find_served_store(
                    self._registers, key, self._record.timeout, seconds, check
                )
            self._served = store
        is_default = old is self._world.default_group
        ranks = tuple(range(len(members))) if is_default else self._globals(members)
        plan = GroupPlan(
            self._world,
            PrefixStore(f"{old.group_name}/shrunk/{decision.round}", store),
            ranks,
            members.index(self._participant.me),
            old.group_name,
            self._record.timeout,
            old.group_desc,
            Watch(check, self._patience),
        )
        return plan.make(self._record.config, self._record.options, fall_back=False)

    def _globals(self, members: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._old.global_ranks[rank] for rank in members)

    def _adopt(self, group: ProcessGroup, decision: Decision) -> ProcessGroup:
        """Replace the old group by ``group`` in this process; return ``group``."""
        world, old = self._world, self._old
        group.origins, group.successors = decision.members, old.successors
        if old is not world.default_group:
            world.forget(old)
            return group
        seats = world.seats or tuple(range(old.size()))
        world.succeed(group, tuple(seats[rank] for rank in decision.members))
        if group.rank() == 0:
            note_event(self._record.store, "shrunk", seats=world.seats)
        if self._served is not None:
            before, world.owned_store = world.owned_store, self._served
            if before is not None:
                before.close()
        return group

    def _excluded_error(self, decision: Decision) -> ExcludedError:
        old = self._old
        return ExcludedError(
            f"rank {old.global_ranks[old.rank()]} is out: ranks "
            f"{list(self._globals(decision.members))} of group {old.group_name!r} went on without "
            f"it: it was left out on purpose, or was stopped or busy for longer than they wait "
            f"(shrink_group's timeout). End this rank; started again it can rejoin",
            ranks=[old.global_ranks[old.rank()]],
        )
