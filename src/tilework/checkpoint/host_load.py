"""A load on the ranks of a host, and the interface of the ways of reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import xor

import torch
from torch import Tensor

from tilework.checkpoint.format import chunk_count
from tilework.checkpoint.load_planning import (
    LoadPlan,
    Need,
    ReadUnit,
    SharedPart,
    Wanted,
    blocks_of,
    is_for_all,
)
from tilework.checkpoint.reading import PartReader, Targets, copy_region
from tilework.checkpoint.tensor_bytes import DTYPES, byte_view, crc32
from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.operations.internal import all_gather_into_tensor, all_reduce, all_to_all_single
from tilework.layout import Box


@dataclass(frozen=True)
class HostLoad:
    """The inputs of one rank for loading a checkpoint with the ``group`` of this host's ranks."""

    plan: LoadPlan
    wanted: Sequence[Wanted]
    reader: PartReader
    targets: Targets
    rank: int
    group: ProcessGroup | None


#: A way in which the ranks of a host read a part of a plan, all in the same order.
WayOfReading = Callable[[HostLoad], None]


def read_own(load: HostLoad) -> None:
    """Read the parts that this rank reads alone, directly into the tensors to fill. Local."""
    reader = load.reader
    reader.check_sizes(sorted({each.part.file for each in load.plan.reads}))
    with reader.together():
        for each in load.plan.reads:
            saved = load.wanted[each.tensor].saved
            target = load.targets.place(each.tensor, each.part, each.need)
            reader.read_box(saved, each.part, each.need.box, target)


def read_shared(load: HostLoad) -> None:
    """Check this rank's chunks of shared parts, and fill the regions that it needs. Local.

    Bytes that a rank has read are in the system's pages of the file, which the others map. All
    ranks take parts in the same order, so that bytes checked by a rank are often in a cache.
    """
    rank, reader = load.rank, load.reader
    own = _own_chunks(load.plan, rank, load.wanted, reader.index.chunk_bytes)
    with reader.together():
        for number, part, needs in load.plan.shared:
            tensor = load.wanted[number].saved
            checked = bytes(own[number, part.file, part.offset])
            boxes = [need for need in needs if rank in need.ranks]
            for need in boxes:
                target = load.targets.place(number, part, need)
                reader.read_shared_box(tensor, part, need.box, target, checked)
                checked = bytes(len(checked))
            if not boxes:
                reader.read_shared_box(tensor, part, None, None, checked)


def _own_chunks(
    plan: LoadPlan, rank: int, wanted: Sequence[Wanted], chunk: int
) -> dict[tuple[int, str, int], bytearray]:
    """By (tensor, file, offset) of a shared part, a byte per chunk: 1 if ``rank`` checks it."""
    own = {
        (number, part.file, part.offset): bytearray(chunk_count(part.nbytes, chunk))
        for number, part, _ in plan.shared
    }
    for unit in plan.units[rank]:
        itemsize = wanted[unit.tensor].saved.itemsize
        first, last = unit.start * itemsize // chunk, -(-unit.stop * itemsize // chunk)
        flags = own[unit.tensor, unit.part.file, unit.part.offset]
        flags[first:last] = b"\1" * (last - first)
    return own


def read_split(load: HostLoad) -> None:
    """Read this rank's runs of split parts, and compare checksums. Collective over the host.

    Checksums are affine: bytes at any place in a chunk have a share in its checksum, which can be
    computed without the other bytes. The exclusive or of all ranks' shares is the checksum up to a
    constant. So no rank reads the bytes of another, and four bytes per chunk are exchanged.
    """
    if load.group is not None and load.plan.split:
        _SplitReading(load, load.group).run()


class _SplitReading:
    def __init__(self, load: HostLoad, group: ProcessGroup) -> None:
        self._group, self._parts, self._wanted = group, load.plan.split, load.wanted
        self._reader, self._targets, self._here = load.reader, load.targets, load.rank

    def run(self) -> None:
        ranks = self._group.size()
        shares = bytearray(4 * (ranks + sum(map(self._chunks, self._parts))))
        failure: Exception | None = None
        try:
            self._read(memoryview(shares)[4 * ranks :].cast("I"))
        except Exception as error:  # of any class: the other ranks wait in the reduction
            shares[4 * self._group.rank()] = 1
            failure = error
        if self._reader.verify:
            all_reduce(torch.frombuffer(shares, dtype=torch.int32), ReduceOp.BXOR, self._group)
        if failure is not None:
            raise failure
        if self._reader.verify and not any(shares[: 4 * ranks]):  # else the reduction shows
            self._compare(memoryview(shares)[4 * ranks :].cast("I"))

    def _chunks(self, split: SharedPart) -> int:
        return chunk_count(split.part.nbytes, self._reader.index.chunk_bytes)

    def _read(self, shares: memoryview) -> None:
        """Read this rank's runs, and add their shares in the checksums of chunks to ``shares``."""
        here, reader, place = self._here, self._reader, 0
        with reader.together():
            reader.collect_shares(shares)
            for turn, split in enumerate(self._parts):
                tensor = self._wanted[split.tensor].saved
                for need in split.needs:
                    if here not in need.ranks:
                        continue
                    target = self._targets.place(split.tensor, split.part, need)
                    counts = need.ranks[turn % len(need.ranks)] == here
                    at = place if reader.verify and counts else None
                    reader.read_split_box(tensor, split.part, need.box, target, at)
                    nbytes = need.box.volume * tensor.itemsize
                    reader.bytes_read += nbytes if counts else 0
                place += self._chunks(split)

    def _compare(self, sums: Sequence[int]) -> None:
        chunk, at = self._reader.index.chunk_bytes, 0
        for split in self._parts:
            part, count = split.part, self._chunks(split)
            if any(self._here in need.ranks for need in split.needs):
                last = part.nbytes - (count - 1) * chunk
                zeros = [crc32_of_zeros(chunk)] * (count - 1) + [crc32_of_zeros(last)]
                found = list(map(xor, sums[at : at + count], zeros))
                if found != list(part.crc32):
                    wrong = next(k for k in range(count) if found[k] != part.crc32[k])
                    tensor = self._wanted[split.tensor].saved
                    raise self._reader.damaged(tensor, part, wrong, found[wrong])
            at += count


@lru_cache(maxsize=64)
def crc32_of_zeros(nbytes: int) -> int:
    """The CRC-32 of ``nbytes`` zeros."""
    return crc32(memoryview(bytearray(nbytes)))


#: The bytes that a rank reads for a round, unless a single unit is longer.
ROUND_BYTES = 4 << 20
#: Regions begin at multiples of this, so that a view as any dtype is possible.
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Region:
    """Elements of a unit that a rank needs: the overlap of a block of the unit with a need."""

    unit: ReadUnit
    need: Need
    #: The first element of the block, counted from the first element of the unit.
    at: int
    #: The elements of the block, in the full tensor's coordinates.
    block: Box
    #: The overlap of the block and the need, in the same coordinates.
    box: Box


def exchange_shared(load: HostLoad) -> None:
    """Read this rank's units, exchange all units, and fill targets. Collective over the host.

    It runs in rounds through small buffers: an all-gather of units that all ranks need, an
    all-to-all of others' regions. A rank with damaged units takes part in all rounds.
    """
    if load.group is not None and any(load.plan.units.values()):
        _Exchange(load, load.group).run(load.plan.units)


class _Exchange:
    def __init__(self, load: HostLoad, group: ProcessGroup) -> None:
        self._group, self._wanted, self._reader = group, load.wanted, load.reader
        self._target_of, self._progress = load.targets.view, load.reader.progress
        self._host = group.global_ranks
        self._here = self._host[group.rank()]
        self._error: Exception | None = None
        self._buffers: dict[str, Tensor] = {}

    def run(self, units: Mapping[int, Sequence[ReadUnit]]) -> None:
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
                need, kind = unit.needs[0], DTYPES[self._wanted[unit.tensor].saved.dtype]
                elements = everything[used : used + nbytes].view(kind)
                target = self._target_of(unit.tensor, need)
                copy_region(elements, unit.part, unit.start, need.box, target)
                used += _aligned(nbytes)
                self._progress(nbytes)

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
