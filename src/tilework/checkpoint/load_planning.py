"""Plans of loading: the bytes that each rank reads, and the ranks that get them. Pure.

If only one rank of a host needs a region, in long runs of bytes, it reads the region alone,
straight to the target. A part in short runs, such as columns, may be *split*: if ranks together
need all of it, each reads its own runs, and all runs are checked together. Other parts that several
ranks need are *shared*: the ranks of the host read them once, in equal pieces and in order, and
pass them on in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.checkpoint.format import Part, SavedTensor
from tilework.checkpoint.no_collections import no_collections
from tilework.comm.operations.internal import blocks
from tilework.layout import Box
from tilework.layout.internal import BoxIndex, trusted_box

#: The bytes of pieces of shared parts; a multiple of a chunk, unless chunks are longer.
UNIT_BYTES = 2 << 20
#: Direct reading may cost a host this many times the needed bytes, besides edges.
_MOST_TIMES = 1.25
#: The minimum of bytes in the runs of a split part.
_SPLIT_RUN_BYTES = 512
#: With fewer parts than this, a scan is faster than an index.
_FEW_PARTS = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of a checkpoint to load: boxes, each with the global ranks that want it."""

    saved: SavedTensor
    tiles: tuple[tuple[Box, tuple[int, ...]], ...]


class Need(NamedTuple):
    """The region of a part that ``ranks`` need, within the tile of this number of a Wanted."""

    box: Box
    tile: int
    ranks: tuple[int, ...]


class Read(NamedTuple):
    """A region of a part that one rank reads for itself. ``tensor`` counts the wanted tensors."""

    tensor: int
    part: Part
    need: Need


class ReadUnit(NamedTuple):
    """The elements of a shared part from ``start`` to ``stop``, which one rank reads for all."""

    tensor: int
    part: Part
    start: int
    stop: int
    needs: tuple[Need, ...]


class SharedPart(NamedTuple):
    """A part of a wanted tensor that several ranks of a host need, and read together."""

    tensor: int
    part: Part
    needs: Sequence[Need]


@dataclass
class LoadPlan:
    """The parts that one rank of a host reads.

    Args:
        split: Parts of which each rank reads the runs that it needs; together they read all.
        shared: Parts that the ranks of the host read once, for several ranks.
        units: By rank of the host, the pieces of shared parts that it reads for all, in order.
    """

    reads: list[Read] = field(default_factory=list)
    split: list[SharedPart] = field(default_factory=list)
    shared: list[SharedPart] = field(default_factory=list)
    units: dict[int, list[ReadUnit]] = field(default_factory=dict)


@no_collections()
def plan_load(
    wanted: Sequence[Wanted], host: Sequence[int], rank: int, chunk: int, *, splits: bool = False
) -> LoadPlan:
    """The plan of what ``rank`` reads; ``splits``: ranks of the host can combine checksums."""
    plan = LoadPlan(units={each: [] for each in host})
    loads = dict.fromkeys(host, 0)
    uses = _Uses(frozenset(host), splits)
    for number, each in enumerate(wanted):
        itemsize = each.saved.itemsize
        for at, needs, way in uses.of(each):
            part = each.saved.parts[at]
            if way != "direct":
                together = plan.split if way == "split" else plan.shared
                together.append(SharedPart(number, part, needs))
                continue
            for need in needs:
                if rank in need.ranks:
                    plan.reads.append(Read(number, part, need))
                for reader in need.ranks:
                    loads[reader] += need.box.volume * itemsize
    # In the order of the files, because many pages are mapped at a time.
    plan.reads.sort(key=_place_of_part)
    plan.split.sort(key=_place_of_part)
    for shared in plan.shared:
        itemsize = wanted[shared.tensor].saved.itemsize
        for unit in _units(*shared, itemsize, chunk):
            reader = min(loads, key=loads.__getitem__)
            loads[reader] += (unit.stop - unit.start) * itemsize
            plan.units[reader].append(unit)
    return plan


def _place_of_part(each: Read | SharedPart) -> tuple[str, int]:
    return each.part.file, each.part.offset


class _Uses:
    """Tells which parts of tensors a host needs; cached, as models repeat layers."""

    def __init__(self, host: frozenset[int], splits: bool) -> None:
        self._host, self._splits = host, splits
        self._known: dict[object, list[tuple[int, list[Need], str]]] = {}

    def of(self, wanted: Wanted) -> list[tuple[int, list[Need], str]]:
        """For each part that the host needs: number, needs, and "direct", "split" or "shared"."""
        parts, itemsize = wanted.saved.parts, wanted.saved.itemsize
        boxes = tuple([(part.box.offsets, part.box.sizes) for part in parts])
        key = (itemsize, boxes, wanted.tiles)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = [
                (at, needs, self._way(parts[at], needs, itemsize))
                for at, needs in _needs_by_part(wanted, self._host)
            ]
        return known

    def _way(self, part: Part, needs: Sequence[Need], itemsize: int) -> str:
        if _is_direct(part, needs, itemsize):
            return "direct"
        return "split" if self._splits and _can_split(part, needs, itemsize) else "shared"


def _needs_by_part(wanted: Wanted, host: frozenset[int]) -> Iterator[tuple[int, list[Need]]]:
    parts = wanted.saved.parts
    tiles = [
        (number, box, tuple([rank for rank in ranks if rank in host]))
        for number, (box, ranks) in enumerate(wanted.tiles)
        if not box.empty and not host.isdisjoint(ranks)
    ]
    if not tiles:
        return
    needs: dict[int, list[Need]] = {}
    exact = {(part.box.offsets, part.box.sizes): at for at, part in enumerate(parts)}
    index: BoxIndex | None = None
    for number, box, ranks in tiles:
        same = exact.get((box.offsets, box.sizes))
        if same is not None:  # and no other box overlaps it
            needs.setdefault(same, []).append(Need(box, number, ranks))
            continue
        if index is None and len(parts) > _FEW_PARTS:
            index = BoxIndex([part.box for part in parts])
        for at in range(len(parts)) if index is None else index.overlapping(box):
            shared = parts[at].box.intersection(box)
            if shared is not None:
                needs.setdefault(at, []).append(Need(shared, number, ranks))
    for at in sorted(needs):
        yield at, needs[at]


def _is_direct(part: Part, needs: Sequence[Need], itemsize: int) -> bool:
    """True if each rank should read alone: the ranks read hardly more bytes than they need."""
    readers = {rank for need in needs for rank in need.ranks}
    if len(readers) == 1:
        return True
    read = needed = 0
    for need in needs:
        start, stop = span(part.box, need.box)
        read += (stop - start) * itemsize * len(need.ranks)
        needed += need.box.volume * itemsize
    return read <= _MOST_TIMES * needed


def _can_split(part: Part, needs: Sequence[Need], itemsize: int) -> bool:
    return (
        len(needs) > 1
        and sum(need.box.volume for need in needs) == part.box.volume
        and all(_run(part.box, need.box) * itemsize >= _SPLIT_RUN_BYTES for need in needs)
    )


def _run(part: Box, region: Box) -> int:
    run = 1
    for size, length in zip(reversed(part.sizes), reversed(region.sizes), strict=True):
        run *= length
        if length < size:
            break
    return run


def span(part: Box, region: Box) -> tuple[int, int]:
    """The shortest range of a part's elements, in row-major order, that contains a region."""
    first = last = 0
    for size, offset, start, length in zip(
        part.sizes, part.offsets, region.offsets, region.sizes, strict=True
    ):
        first = first * size + start - offset
        last = last * size + start - offset + length - 1
    return first, last + 1


def _units(
    tensor: int, part: Part, needs: Sequence[Need], itemsize: int, chunk: int
) -> Iterator[ReadUnit]:
    step = max(1, UNIT_BYTES // chunk) * chunk // itemsize
    spans = [(*span(part.box, need.box), need) for need in needs]
    for start in range(0, part.box.volume, step):
        stop = min(start + step, part.box.volume)
        inside = tuple([need for first, last, need in spans if first < stop and last > start])
        if inside:
            yield ReadUnit(tensor, part, start, stop, inside)


def is_for_all(unit: ReadUnit, host: Sequence[int]) -> bool:
    """True if each rank of the host needs all elements of a unit."""
    return (
        len(unit.needs) == 1
        and unit.needs[0].box == unit.part.box
        and len(unit.needs[0].ranks) == len(host)
    )


def blocks_of(part: Box, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut a range of a part's elements into boxes, each with the place in the range."""
    at = 0
    for block in blocks(part.sizes, start, stop):
        offsets, sizes = list(part.offsets), list(part.sizes)
        for dim, range_ in enumerate(block):
            offsets[dim] += range_.start
            sizes[dim] = range_.stop - range_.start
        box = trusted_box(tuple(offsets), tuple(sizes))
        yield at, box
        at += box.volume
