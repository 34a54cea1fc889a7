"""Shared parts: each rank of a host reads its units, and all ranks get their regions, in memory.

It runs in rounds through small buffers. A round of units that all ranks need is an all-gather; any
other round is an all-to-all of the needed regions. All ranks know all units, so that sizes are not
sent. A rank whose units are damaged goes on with the bytes that it has read, and raises after all
rounds: no other rank waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilework.checkpoint.dtypes import DTYPES
from tilework.checkpoint.host_load import HostLoad
from tilework.checkpoint.load_planning import Need, ReadUnit, blocks_of, is_for_all
from tilework.checkpoint.memory import byte_view
from tilework.checkpoint.reading import copy_region
from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import all_gather_into_tensor, all_to_all_single
from tilework.layout import Box

#: The bytes that a rank reads for a round, unless a single unit is longer.
ROUND_BYTES = 4 << 20
#: Regions begin at multiples of this, so that a view as any dtype is possible.
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Region:
    """Elements of a unit that a rank needs: the overlap of a block of the unit with a need."""

    #: The piece of a shared part that a rank reads for the others.
    unit: ReadUnit
    #: The region of the part that a rank needs.
    need: Need
    #: The first element of the block, counted from the first element of the unit.
    at: int
    #: The elements of the block, in the full tensor's coordinates.
    block: Box
    #: The overlap of the block and the need, in the same coordinates.
    box: Box


def exchange_shared(load: HostLoad) -> None:
    """Read this rank's units, exchange all units, and fill targets. Collective over the host.

    Raises:
        CheckpointError: A unit that this rank has read is damaged. Raised after the last round.
    """
    if load.group is not None and any(load.plan.units.values()):
        _Exchange(load, load.group).run(load.plan.units)


class _Exchange:
    """The rounds of one load, on this rank."""

    def __init__(self, load: HostLoad, group: ProcessGroup) -> None:
        self._group, self._wanted, self._reader = group, load.wanted, load.reader
        self._target_of, self._progress = load.targets.view, load.reader.progress
        self._host = group.global_ranks
        self._here = self._host[group.rank()]
        self._error: Exception | None = None
        self._buffers: dict[str, Tensor] = {}

    def run(self, units: Mapping[int, Sequence[ReadUnit]]) -> None:
        """Run all rounds; ``units`` has the units that each rank reads."""
        for_all = {r: [u for u in own if is_for_all(u, self._host)] for r, own in units.items()}
        others = {r: [u for u in own if not is_for_all(u, self._host)] for r, own in units.items()}
        for units_of_round in self._rounds(for_all):
            self._gather(units_of_round)
        for units_of_round in self._rounds(others):
            self._exchange(units_of_round)
        if self._error is not None:
            raise self._error

    def _rounds(
        self, units: Mapping[int, Sequence[ReadUnit]]
    ) -> Iterator[dict[int, list[ReadUnit]]]:
        by_rank = {rank: list(self._by_round(own)) for rank, own in units.items()}
        for number in range(max(map(len, by_rank.values()), default=0)):
            yield {
                rank: rounds[number] if number < len(rounds) else []
                for rank, rounds in by_rank.items()
            }

    def _by_round(self, units: Sequence[ReadUnit]) -> Iterator[list[ReadUnit]]:
        share: list[ReadUnit] = []
        used = 0
        for unit in units:
            nbytes = _aligned(self._nbytes(unit))
            if share and used + nbytes > ROUND_BYTES:
                yield share
                share, used = [], 0
            share.append(unit)
            used += nbytes
        if share:
            yield share

    def _nbytes(self, unit: ReadUnit) -> int:
        return (unit.stop - unit.start) * self._itemsize(unit)

    def _itemsize(self, unit: ReadUnit) -> int:
        return self._wanted[unit.tensor].saved.itemsize

    def _read(self, units: Sequence[ReadUnit], buffer: Tensor) -> Iterator[tuple[ReadUnit, Tensor]]:
        """Read this rank's units into a buffer, and yield each with the unit's memory.

        After an error nothing more is read; :meth:`run` raises the error after the last round.
        """
        used = 0
        for unit in units:
            memory = buffer[used : used + self._nbytes(unit)]
            used += _aligned(memory.numel())
            if self._error is None:
                start = unit.start * self._itemsize(unit)
                try:
                    tensor = self._wanted[unit.tensor].saved
                    self._reader.read_chunks(tensor, unit.part, start, byte_view(memory))
                except Exception as error:  # plug-ins raise any class
                    self._error = error
            yield unit, memory

    def _size_of(self, units: Sequence[ReadUnit]) -> int:
        return sum(_aligned(self._nbytes(unit)) for unit in units)

    # -- units for all ranks -----------------------------------------------------------------

    def _gather(self, units: Mapping[int, Sequence[ReadUnit]]) -> None:
        size = max(self._size_of(own) for own in units.values())
        own = self._buffer("own", size)
        for _ in self._read(units[self._here], own):
            pass
        everything = self._buffer("all", size * len(self._host))
        all_gather_into_tensor(everything, own, group=self._group)
        for number, rank in enumerate(self._host):
            used = number * size
            for unit in units[rank]:
                nbytes = self._nbytes(unit)
                self._put_all(unit, everything[used : used + nbytes])
                used += _aligned(nbytes)
                self._progress(nbytes)

    def _put_all(self, unit: ReadUnit, memory: Tensor) -> None:
        need, tensor = unit.needs[0], self._wanted[unit.tensor].saved
        target = self._target_of(unit.tensor, need)
        copy_region(memory.view(DTYPES[tensor.dtype]), unit.part, unit.start, need.box, target)

    # -- units for some ranks -------------------------------------------------------------------

    def _exchange(self, units: Mapping[int, Sequence[ReadUnit]]) -> None:
        own = self._buffer("own", self._size_of(units[self._here]))
        read = {id(unit): memory for unit, memory in self._read(units[self._here], own)}
        going = {r: self._regions(units[self._here], r) for r in self._host if r != self._here}
        coming = {r: self._regions(units[r], self._here) for r in self._host if r != self._here}
        sizes_going = [self._bytes_of(going.get(rank, ())) for rank in self._host]
        sizes_coming = [self._bytes_of(coming.get(rank, ())) for rank in self._host]
        sent = self._buffer("sent", sum(sizes_going))
        received = self._buffer("received", sum(sizes_coming))
        for view, region in self._placed(sent, going):
            view.copy_(self._source(region, read[id(region.unit)]))
        all_to_all_single(received, sent, sizes_coming, sizes_going, group=self._group)
        for view, region in self._placed(received, coming):
            self._put(region, view)
        own_regions = self._regions(units[self._here], self._here)
        for region in own_regions:
            self._put(region, self._source(region, read[id(region.unit)]))
        arrived = [*own_regions, *(region for each in coming.values() for region in each)]
        self._progress(sum(each.box.volume * self._itemsize(each.unit) for each in arrived))

    def _regions(self, units: Sequence[ReadUnit], rank: int) -> list[_Region]:
        """The regions of ``units`` that ``rank`` needs, in an order that both ends know."""
        return [
            _Region(unit, need, at, block, shared)
            for unit in units
            for need in unit.needs
            if rank in need.ranks
            for at, block in blocks_of(unit.part.box, unit.start, unit.stop)
            if (shared := block.intersection(need.box)) is not None
        ]

    def _bytes_of(self, regions: Sequence[_Region]) -> int:
        return sum(_aligned(r.box.volume * self._itemsize(r.unit)) for r in regions)

    def _placed(
        self, buffer: Tensor, regions: Mapping[int, Sequence[_Region]]
    ) -> Iterator[tuple[Tensor, _Region]]:
        """The view of each region's place in ``buffer``, with the region; rank after rank."""
        used = 0
        for rank in self._host:
            for region in regions.get(rank, ()):
                dtype = DTYPES[self._wanted[region.unit.tensor].saved.dtype]
                nbytes = region.box.volume * dtype.itemsize
                yield buffer[used : used + nbytes].view(dtype).view(region.box.sizes), region
                used += _aligned(nbytes)

    def _source(self, region: _Region, memory: Tensor) -> Tensor:
        dtype = DTYPES[self._wanted[region.unit.tensor].saved.dtype]
        elements = memory.view(dtype)[region.at : region.at + region.block.volume]
        shared = region.box.relative_to(region.block)
        return elements.view(region.block.sizes)[shared.slices]

    def _put(self, region: _Region, values: Tensor) -> None:
        target = self._target_of(region.unit.tensor, region.need)
        target[region.box.relative_to(region.need.box).slices].copy_(values)

    def _buffer(self, purpose: str, nbytes: int) -> Tensor:
        """``nbytes`` bytes of the buffer for a purpose; later rounds use the same memory again."""
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[purpose] = self._group.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
