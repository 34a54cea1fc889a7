"""``grow_group``: ranks that were started again are let into the default group.

A newcomer leaves a *ticket* in the job's store and waits for the answer. The members look for
tickets when they call ``grow_group``: rank 0 reads the tickets, all members agree on the result,
and members and newcomers make the new group together. If that fails on any of them, the members
keep the old group and the newcomers ask again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

from tilework.comm.agreement import agree
from tilework.comm.backend import BackendConfig
from tilework.comm.contract import ProcessGroup
from tilework.comm.debug import logger
from tilework.comm.elastic.consensus import Decision, Participant, confirm, failed
from tilework.comm.elastic.registers import Registers, StoreRegisters, identity_key
from tilework.comm.elastic.shrink import PATIENCE, drive
from tilework.comm.elastic.ticket_store import Ticket, TicketStore, note_event
from tilework.comm.elastic.watched_store import WatchedStore
from tilework.comm.making.group_plan import GroupPlan, Watch
from tilework.comm.world import World, current_world
from tilework.errors import DistBackendError, DistError, PeerLostError
from tilework.rendezvous.internal import EndedRanks, has_ended, process_identity
from tilework.store import PrefixStore, Store

#: Admissions that may fail, because ranks die, before a newcomer gives up.
_MOST_TICKETS: Final = 20
#: Seconds for which all members must be known to have ended before a newcomer gives up.
_NOBODY_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Admission:
    """The plan of a group with newcomers, as members and newcomers know it."""

    #: The number of the attempt to let newcomers in, from 1. Store keys of the attempt contain it.
    epoch: int
    #: The name of the old group, which the new group takes over.
    name: str
    #: The backend of each device, like "cpu:shm,cuda:nccl".
    backend: str
    #: By rank of the new group: the number that the rank was started with.
    seats: tuple[int, ...]
    #: By rank of the new group: the identity, by which others see whether the rank has ended.
    identities: tuple[str, ...]
    #: By rank of the new group: the rank in the old group; None for a newcomer.
    origins: tuple[int | None, ...]
    #: The tickets of the newcomers.
    tickets: tuple[str, ...] = ()
    #: True if the backend may be another, as newcomers may be on other hosts.
    falls_back: bool = False


def tickets_waiting(group: ProcessGroup) -> bool:
    """True if ranks wait to be let into the group again. Local; asks the job's store once."""
    return bool(TicketStore(current_world().record(group).store).tickets())


def grow(group: ProcessGroup, timeout: timedelta | None) -> ProcessGroup:
    """The group that follows ``group``, with newcomers; ``group`` itself if there are none."""
    world = current_world()
    record = world.record(group)
    if group is not world.default_group:
        raise ValueError(f"only the default group can grow, got {group!r}")
    ticket_store = TicketStore(record.store)
    if group.rank() == 0:
        offer = agree(lambda: _offer(world, group, ticket_store), group)[0]
    else:
        offer = agree(lambda: None, group)[0]
    if offer is None:
        return group
    admission = _admission(offer)
    if group.rank() == 0:
        for ticket in admission.tickets:
            ticket_store.set(f"answer/{ticket}", json.dumps(offer))
    me = admission.origins.index(group.rank())
    limit = min(PATIENCE, record.timeout) if timeout is None else timeout
    grown = _make(world, admission, me, ticket_store, (limit, record.timeout), record.options)
    if grown is None:
        return group
    grown.successors = group.successors
    world.succeed(grown, admission.seats)
    if grown.rank() == 0:
        note_event(record.store, "grown", seats=admission.seats)
    return grown


def rejoin(world: World, store: Store, seat: int, timeout: timedelta, options: Any) -> ProcessGroup:
    """Ask to be let into the default group; return the new group that has this process in ``seat``.

    Blocks until the members call grow; raises if they do not within ``timeout``
    (StoreTimeoutError), or have ended (PeerLostError).
    """
    ticket_store = TicketStore(store)
    # The first optimizer of a process imports this, for seconds: do it before members wait.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
    deadline = time.monotonic() + timeout.total_seconds()
    for _ in range(_MOST_TICKETS):
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        token = secrets.token_hex(8)
        ticket_store.leave_ticket(Ticket(token, seat, process_identity()))
        logger.info("seat %d waits to be let in", seat)
        answers = WatchedStore("answer", ticket_store, _SomebodyLeft(ticket_store))
        admission = _admission(json.loads(answers.get(token, left)))
        me = admission.seats.index(seat)
        limits = min(PATIENCE, timeout), timeout
        group = _make(world, admission, me, ticket_store, limits, options)
        if group is not None:
            world.seats, world.chooses_backend = admission.seats, admission.falls_back
            if group.rank() == 0:
                note_event(store, "grown", seats=admission.seats)
            return group
    raise DistBackendError(
        f"the process started as rank {seat} was not let into the group: {_MOST_TICKETS} attempts "
        f"to make the group with it failed"
    )


class _SomebodyLeft:
    """Raises once all members of the group have been known to have ended for a while.

    Ranks that wait to be let in are no members, though they may have a member's number.
    """

    def __init__(self, ticket_store: TicketStore) -> None:
        self._store, self._since = ticket_store, time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        members = next((e["seats"] for e in reversed(self._store.events()) if "seats" in e), None)
        first = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else 0
        seats = set(range(first) if members is None else members)
        seats -= {ticket.seat for ticket in self._store.tickets()}
        if seats - EndedRanks(self._store).among(seats):
            self._since = now
        elif now - self._since > _NOBODY_SECONDS:
            raise PeerLostError("all ranks of the group that this rank waits to join have ended")


def _offer(world: World, group: ProcessGroup, ticket_store: TicketStore) -> dict[str, Any] | None:
    """The :class:`Admission` of all live newcomers as a dict; None without any. On rank 0."""
    registers = group.registers
    assert registers is not None
    seats = world.seats or tuple(range(group.size()))
    members = {
        seat: (registers.read(identity_key(rank)) or "unknown", rank)
        for rank, seat in enumerate(seats)
    }
    places: dict[int, tuple[str, int | None]] = dict(members)
    tickets = []
    for ticket in ticket_store.tickets():
        if ticket.seat in places and not has_ended(ticket.identity):
            continue  # the seat is free after the group has shrunk
        ticket_store.handle(ticket)
        if not has_ended(ticket.identity):
            places[ticket.seat] = ticket.identity, None
            tickets.append(ticket.token)
    if not tickets:
        return None
    seated = sorted(places)
    record = world.record(group)
    return asdict(
        Admission(
            ticket_store.add("epoch", 1),
            group.group_name,
            str(record.config),
            tuple(seated),
            tuple(places[seat][0] for seat in seated),
            tuple(places[seat][1] for seat in seated),
            tuple(tickets),
            world.chooses_backend,
        )
    )


def _admission(offer: dict[str, Any]) -> Admission:
    lists: dict[str, Any] = {}
    for name, value in offer.items():
        lists[name] = tuple(value) if isinstance(value, list) else value
    return Admission(**lists)


def _make(
    world: World,
    admission: Admission,
    me: int,
    ticket_store: TicketStore,
    limits: tuple[timedelta, timedelta],
    options: Any,
) -> ProcessGroup | None:
    """The new group; None if some rank could not make it. Collective; blocks."""
    patience, timeout = limits
    size = len(admission.seats)
    registers: Registers = StoreRegisters(PrefixStore(f"registers/{admission.epoch}", ticket_store))
    seconds = patience.total_seconds()
    losses = _losses(admission, EndedRanks(ticket_store))
    participant = Participant(me, registers, losses, time.monotonic, seconds)
    decision = Decision(1, tuple(range(size)))

    def check() -> None:
        if failed(participant, 1):
            raise DistBackendError("another rank gave up making this group")
        lost = participant.lost(range(size))
        if lost:
            raise PeerLostError(f"lost ranks {sorted(lost)} while the group was made")

    plan = GroupPlan(
        world,
        PrefixStore(f"epoch/{admission.epoch}", ticket_store),
        tuple(range(size)),
        me,
        admission.name,
        timeout,
        watch=Watch(check, patience),
    )
    group, error, is_elsewhere = None, None, False
    try:
        config = BackendConfig(admission.backend)
        group = plan.make(config, options, fall_back=admission.falls_back)
    except (DistError, OSError) as reason:
        error = f"{type(reason).__name__}: {reason}"[:500]
        is_elsewhere = getattr(reason, "elsewhere", False)
    if drive(confirm(participant, decision, error)) and group is not None:
        group.origins = admission.origins
        return group
    if group is not None:
        world.forget(group)
    if is_elsewhere and admission.origins[me] is None:
        raise DistBackendError(
            f"rank {admission.seats[me]} cannot be let in: the group's backend is "
            f"{admission.backend}, for ranks of one host, and this host is another. Start the job "
            f"with --backend hybrid, or without --backend (and init_process_group() likewise)"
        )
    return None


def _losses(admission: Admission, ended: EndedRanks) -> Any:
    seats = admission.seats

    def lost(asked: Collection[int]) -> set[int]:
        # What launchers of other hosts say; a seat is on the list until its newcomer is let in.
        old = {seats[rank] for rank in asked if admission.origins[rank] is not None}
        known = ended.among(old) if old else set()
        return {r for r in asked if seats[r] in known or has_ended(admission.identities[r])}

    return lost
