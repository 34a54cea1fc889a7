"""Restoring a snapshot into a state that was built for other ranks, by a transfer plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree, run_plan
from tilework.layout import Tile, Tiling, plan
from tilework.parallel.resilient.catalog import (
    Catalog,
    Described,
    SnapshotEntry,
    make_catalog,
    merged,
    tiling_of,
)
from tilework.parallel.resilient.slots import SLOTS
from tilework.parallel.resilient.snapshots import Snapshots, part_view, unpack
from tilework.parallel.resilient.tracked import (
    State,
    Tracked,
    make_optimizer_states,
    parameter_values,
    set_plain,
    tracked_tensors,
)

#: By rank of the former group, the steps in the rank's slots, as far as they are here.
Stamps = dict[int, tuple[int | None, ...]]


@dataclass(frozen=True)
class HeldSnapshot:
    """A snapshot as this rank holds it: its own slots, and those that it keeps for others; none for
    a newcomer.
    """

    snapshots: Snapshots | None

    @property
    def place(self) -> int | None:
        """This rank's number in the former group; None for a newcomer."""
        return None if self.snapshots is None else self.snapshots.rank

    def stamps(self) -> Stamps:
        """The stamps of all slots that this rank has, by :func:`stamps_of`."""
        return {} if self.snapshots is None else stamps_of(self.snapshots)


def stamps_of(snapshots: Snapshots) -> Stamps:
    """The stamps of the slots that this rank has, by the rank that wrote them. Local."""
    slots = snapshots.slots
    return {
        rank: tuple(slots.stamp(rank, slot) for slot in range(SLOTS))
        for rank in range(len(slots.layout.tensor_bytes))
        if slots.area(rank) is not None
    }


@dataclass(frozen=True)
class FoundSnapshot:
    """A snapshot that is whole, the same on all ranks of the new group.

    ``holders`` are, by rank of the former group, the ranks of the new group that hold the slot;
    ``seats`` are those of the former ranks.
    """

    steps: int
    holders: tuple[tuple[int, ...], ...]
    described: list[Described]
    seats: tuple[int, ...]
    generation: int

    @property
    def catalog(self) -> Catalog:
        """The places of the snapshot's parts."""
        return make_catalog(self.described, len(self.holders))


def find(kept: Sequence[Snapshots], group: ProcessGroup) -> FoundSnapshot | None:
    """The last snapshot of which every part is held by some rank; None if there is none. ``kept``
    has also those that were being replaced. Collective over the new group; blocks.
    """
    reports: list[dict[int, Stamps]] = agree(
        lambda: {each.generation: stamps_of(each) for each in kept}, group
    )
    for generation in sorted({g for report in reports for g in report}, reverse=True):
        found = _find_in(
            generation, [report.get(generation, {}) for report in reports], kept, group
        )
        if found is not None:
            return found
    return None


def _find_in(
    generation: int, reports: list[Stamps], kept: Sequence[Snapshots], group: ProcessGroup
) -> FoundSnapshot | None:
    first = next(rank for rank, report in enumerate(reports) if report)

    def facts() -> Any:
        own = [each for each in kept if each.generation == generation]
        return (own[0].described, own[0].seats) if group.rank() == first else None

    described, seats = agree(facts, group)[first]
    stamped = {s for report in reports for stamps in report.values() for s in stamps}
    for steps in sorted((s for s in stamped if s is not None), reverse=True):
        holders = tuple(
            tuple(new for new, report in enumerate(reports) if steps in report.get(old, ()))
            for old in range(len(seats))
        )
        if all(holders):
            return FoundSnapshot(steps, holders, list(described), tuple(seats), generation)
    return None


def restore(
    found: FoundSnapshot,
    held: HeldSnapshot,
    state: State,
    group: ProcessGroup,
    seats: Sequence[int],
) -> None:
    """Fill a state, which all ranks have built, from this rank's part of a snapshot and the
    others'. Collective; blocks.

    ``seats`` has the seat of each rank of the default group. A tensor of another shape or dtype
    than the snapshot raises ValueError.
    """
    catalog = found.catalog
    make_optimizer_states(
        state, {entry.name: (entry.shape, entry.dtype) for entry in catalog.entries}
    )
    tracked = {each.name: each for each in tracked_tensors(state)}
    own = [each.described() for each in tracked.values()]
    targets = {each[0]: each for each in merged(agree(lambda: own, group))}
    slots = _slots(found, held)
    for entry in catalog.entries:
        target = targets.get(entry.name)
        _check_alike(entry, target)
        if target is not None and entry.parts:
            _fill(entry, tiling_of(target), tracked.get(entry.name), found, slots, group)
    plain = unpack(_plain_of(found, held, group, seats), group.authenticated)
    set_plain(state, plain, _parameter_values(found, held, group))


def _slots(found: FoundSnapshot, held: HeldSnapshot) -> dict[int, Tensor]:
    """The bytes of the slots that are here, by the rank that wrote them."""
    if held.snapshots is None:
        return {}
    slots = held.snapshots.slots
    return {
        rank: slots.tensor_bytes(rank, stamps.index(found.steps))
        for rank, stamps in held.stamps().items()
        if found.steps in stamps
    }


def _check_alike(entry: SnapshotEntry, target: Described | None) -> None:
    dtype = str(entry.dtype).removeprefix("torch.")
    if target is None or (entry.shape, dtype) != (target[1], target[2]):
        now = "lacks it" if target is None else f"has {target[2]} {list(target[1])}"
        raise ValueError(
            f"{entry.name} is {dtype} {list(entry.shape)} in the last snapshot, and the state that "
            f"build() has made for the new group {now}: build() must make the same names, dtypes "
            f"and global shapes for any number of ranks"
        )


def _fill(
    entry: SnapshotEntry,
    target: Tiling,
    tracked: Tracked | None,
    found: FoundSnapshot,
    slots: dict[int, Tensor],
    group: ProcessGroup,
) -> None:
    me = group.rank()
    tiles = tuple(Tile(part.box, found.holders[part.writer]) for part in entry.parts)
    source = Tiling(entry.shape, (tiles,))
    views = [
        part_view(slots[part.writer], part, entry.dtype)
        for part in entry.parts
        if me in found.holders[part.writer]
    ]
    out = tracked.locals() if tracked is not None else []
    run_plan(plan(source, target, me), views, group, out=out, dtype=entry.dtype)


def _plain_of(
    found: FoundSnapshot, held: HeldSnapshot, group: ProcessGroup, seats: Sequence[int]
) -> bytes:
    """The plain data to restore: a newcomer gets that of the rank in the same seat. Collective."""
    wanted: list[int | None] = agree(lambda: held.place, group)
    sources = [_origin(place, seats[rank], found) for rank, place in enumerate(wanted)]

    def sent() -> dict[int, bytes]:
        return {
            rank: _plain_here(sources[rank], found, held)
            for rank, place in enumerate(wanted)
            if place is None and found.holders[sources[rank]][0] == group.rank()
        }

    arrived = {rank: data for part in agree(sent, group) for rank, data in part.items()}
    if held.place is None:
        return arrived[group.rank()]
    return _plain_here(held.place, found, held)


def _parameter_values(
    found: FoundSnapshot, held: HeldSnapshot, group: ProcessGroup
) -> dict[str, dict[str, dict[str, Any]]]:
    """All ranks' :func:`parameter_values`, by optimizer. Collective."""
    me, trusted = group.rank(), group.authenticated

    def here() -> dict[int, dict[str, dict[str, Any]]]:
        return {
            old: parameter_values(unpack(_plain_here(old, found, held), trusted))
            for old, holders in enumerate(found.holders)
            if holders[0] == me
        }

    merged_values: dict[str, dict[str, dict[str, Any]]] = {}
    for part in agree(here, group):
        for values in part.values():
            for name, of_parameters in values.items():
                merged_values.setdefault(name, {}).update(of_parameters)
    return merged_values


def _origin(place: int | None, seat: int, found: FoundSnapshot) -> int:
    """The rank of the former group whose plain data a rank gets."""
    if place is not None:
        return place
    return found.seats.index(seat) if seat in found.seats else 0


def _plain_here(rank: int, found: FoundSnapshot, held: HeldSnapshot) -> bytes:
    assert held.snapshots is not None
    slots = held.snapshots.slots
    slot = held.stamps()[rank].index(found.steps)
    return slots.plain(rank, slot)
