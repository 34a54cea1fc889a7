"""Boxes: regions of a tensor, by offset and size in each dim; and the shards of an extent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from operator import eq, index
from typing import Any

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The region of a tensor that starts at ``offsets`` and has ``sizes`` elements in each dim.

    A scalar's box has no dims and one element. A box with a size of 0 is empty.

    Raises:
        ValueError: The lengths differ, or a number is negative.

    Example:
        >>> box = Box((5, 0), (5, 10))
        >>> str(box), box.volume
        ('[5:10, 0:10]', 50)
    """

    offsets: Ints
    sizes: Ints

    def __post_init__(self) -> None:
        offsets, sizes = tuple(map(int, self.offsets)), tuple(map(int, self.sizes))
        if len(offsets) != len(sizes):
            raise ValueError(
                f"a box needs an offset and a size for each dim, got {len(offsets)} offsets "
                f"{offsets} and {len(sizes)} sizes {sizes}"
            )
        if offsets and (min(offsets) < 0 or min(sizes) < 0):
            raise ValueError(
                f"a box must not have negative offsets or sizes, got offsets {offsets} and sizes "
                f"{sizes}"
            )
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "sizes", sizes)

    @property
    def ends(self) -> Ints:
        """The end in each dim (exclusive)."""
        return tuple([o + s for o, s in zip(self.offsets, self.sizes, strict=True)])

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.sizes)

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def empty(self) -> bool:
        """True if the box has no element."""
        return 0 in self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of the full tensor for this region."""
        return tuple([slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True)])

    def intersection(self, other: Box) -> Box | None:
        """The intersection of both boxes; None if it is empty."""
        offsets, sizes = [], []
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low = a if a > b else b
            size = (a + m if a + m < b + n else b + n) - low
            if size <= 0:
                return None
            offsets.append(low)
            sizes.append(size)
        return trusted_box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """True if every element of ``other`` is in this box; any box contains an empty box."""
        if other.empty:
            return True
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def relative_to(self, other: Box) -> Box:
        """The same box, in coordinates that count from the start of ``other``.

        Raises:
            ValueError: The box starts before ``other``.
        """
        offsets = tuple([a - b for a, b in zip(self.offsets, other.offsets, strict=True)])
        if offsets and min(offsets) < 0:
            raise ValueError(f"{self} starts before {other}: relative offsets would be negative")
        return trusted_box(offsets, self.sizes)

    def __str__(self) -> str:
        spans = [f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)]
        return f"[{', '.join(spans)}]"


_new = object.__new__
# The descriptor of a slot can write where a frozen dataclass refuses.
_set_offsets = Box.__dict__["offsets"].__set__
_set_sizes = Box.__dict__["sizes"].__set__


def trusted_box(offsets: Ints, sizes: Ints) -> Box:
    """A box made without checks, five times as fast: the tuples must be known to be valid."""
    box = _new(Box)
    _set_offsets(box, offsets)
    _set_sizes(box, sizes)
    return box


def whole_box(shape: Sequence[int]) -> Box:
    """The box of the full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def replaced(numbers: Sequence[int], dim: int, number: int) -> Ints:
    """The numbers of all dims, with another for one dim."""
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def with_span(box: Box, dim: int, start: int, size: int) -> Box:
    """The box with another offset and size in one dim."""
    return trusted_box(replaced(box.offsets, dim, start), replaced(box.sizes, dim, size))


def packed(boxes: Sequence[Box]) -> list[Box]:
    """The place of each of a rank's boxes in the local tensor, where they lie side by side."""
    by_dim = [
        {(box.offsets[dim], box.sizes[dim]) for box in boxes}
        for dim in range(boxes[0].ndim if boxes else 0)
    ]

    def start(dim: int, offset: int) -> int:
        return sum([size for before, size in by_dim[dim] if before < offset])

    return [Box(tuple(map(start, range(box.ndim), box.offsets)), box.sizes) for box in boxes]


def whole_number(number: Any, takes: str) -> int:
    """The number, if it is an integer; else a TypeError that begins with ``takes``."""
    if number.__class__ is int:
        return number
    try:
        if isinstance(number, bool):
            raise TypeError
        return index(number)
    except TypeError:
        raise TypeError(f"{takes}; got {number!r}") from None


def whole_numbers(numbers: Any, takes: str) -> Ints:
    """The numbers of any iterable, if all are integers; else a TypeError."""
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise TypeError(f"{takes}; got {numbers!r}")
    return tuple([whole_number(number, takes) for number in numbers])


def chunk_size(extent: int, n: int) -> int:
    """The size of a full chunk: ``extent / n``, rounded up.

    Raises:
        ValueError: ``n`` is below 1, or ``extent`` is negative.

    Example: see :func:`chunk_sizes`.
    """
    if n < 1 or extent < 0:
        raise ValueError(
            f"an extent of 0 or more has 1 or more chunks, got extent {extent}, {n} chunks"
        )
    return -(-extent // n)


def chunk_sizes(extent: int, n: int) -> list[int]:
    """The sizes of ``n`` chunks: full chunks, then a shorter one, then empty ones.

    ``torch.chunk`` gives the same sizes, but leaves out empty chunks.

    Example:
        >>> chunk_sizes(10, 4), chunk_sizes(2, 4)
        ([3, 3, 3, 1], [1, 1, 0, 0])
    """
    size = chunk_size(extent, n)
    full, rest = divmod(extent, size) if size else (0, 0)
    return ([size] * full + [rest] + [0] * n)[:n]


def chunk_offsets(extent: int, n: int) -> list[int]:
    """The offsets of the ``n`` chunks: each starts one full chunk size after the chunk before it.

    An empty chunk may therefore start past the end of the extent.

    Example:
        >>> chunk_offsets(10, 4), chunk_offsets(2, 4)
        ([0, 3, 6, 9], [0, 1, 2, 3])
    """
    size = chunk_size(extent, n)
    return [size * i for i in range(n)]


def chunk_at(extent: int, n: int, place: int) -> tuple[int, int]:
    """Offset and size of one of the ``n`` chunks; an empty chunk is at the end of the extent."""
    size = chunk_size(extent, n)
    start = min(size * place, extent)
    return start, min(size, extent - start)


def offsets_of(sizes: Iterable[int]) -> list[int]:
    """The offsets of chunks of these sizes, one after the other.

    Example: see :func:`chunk_sizes`.
    """
    return [0, *accumulate(sizes)][:-1]


def infer_chunking(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """The dim along which ``torch.chunk`` would split the shape into exactly these boxes, in order.

    None if no dim fits: the boxes are a grid, or have uneven sizes or another order. If several
    dims fit, the result is the first.

    Example:
        >>> infer_chunking((4, 6), [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))])
        1
    """
    shape = tuple(shape)
    if not boxes or any(box.ndim != len(shape) for box in boxes):
        return None
    whole = whole_box(shape)
    for dim, extent in enumerate(shape):
        spans = zip(chunk_offsets(extent, len(boxes)), chunk_sizes(extent, len(boxes)), strict=True)
        chunks = (with_span(whole, dim, start, size) for start, size in spans)
        if all(map(eq, boxes, chunks)):
            return dim
    return None


# -- shards of one dim -----------------------------------------------------------------------

#: The way in which an axis splits an extent: into shards of given sizes; with a number, into equal
#: blocks that are dealt in so many turns; None: as ``torch.chunk`` splits.
Cut = Ints | int | None
Split = tuple[int, Cut]
#: The splits of one dim, the outermost first.
Splits = tuple[Split, ...]

#: The ranges of a dim that are one shard, in their order in the local tensor: offset and size.
Ranges = tuple[tuple[int, int], ...]


class SeveralRangesError(Exception):
    """A shard of a factor, or of splits, was asked for its range, but is dealt in turns."""

    def __init__(self, of: Any) -> None:
        super().__init__(f"a shard of {of} has several ranges")
        self.of = of


def axes_of(splits: Splits) -> Ints:
    """The axes that shard a dim, the outermost first."""
    return tuple([axis for axis, _ in splits])


def is_dealt(splits: Splits) -> bool:
    """True if an axis deals blocks of the dim in turns."""
    return any(isinstance(cut, int) for _, cut in splits)


def dealt_blocks(length: int, turns: int, place: int) -> list[int]:
    """The numbers of the blocks of one rank along an axis, dealt forth and back."""
    return [turn * length + (length - 1 - place if turn % 2 else place) for turn in range(turns)]


def shard_sizes(extent: int, length: int, cut: Cut) -> Ints | None:
    """The sizes of the shards of an extent; None if given sizes do not add up to it."""
    if cut is None:
        return tuple(chunk_sizes(extent, length))
    if isinstance(cut, int):
        blocks = chunk_sizes(extent, length * cut)
        dealt = [dealt_blocks(length, cut, place) for place in range(length)]
        return tuple([sum([blocks[number] for number in numbers]) for numbers in dealt])
    return cut if sum(cut) == extent else None


def shards(extent: int, lengths: Ints, splits: Splits) -> tuple[Ints, Ints]:
    """Offsets and sizes of all shards of an extent; empty if explicit sizes do not fit.

    There is a shard for each combination of coordinates along the axes of ``splits``, the last axis
    running fastest: in the order of offsets.
    """
    if is_dealt(splits):
        raise SeveralRangesError(splits)
    sizes = all_shard_sizes(extent, lengths, splits)
    return tuple(offsets_of(sizes)), sizes


def all_shard_sizes(extent: int, lengths: Ints, splits: Splits) -> Ints:
    """The sizes of all shards of an extent, in the order of :func:`shards`."""
    sizes: Ints = (extent,)
    for axis, cut in splits:
        parts = [shard_sizes(size, lengths[axis], cut) or () for size in sizes]
        sizes = tuple([part for each in parts for part in each])
    return sizes


def shard_ranges(extent: int, lengths: Ints, splits: Splits) -> list[Ranges]:
    """The ranges of all shards of an extent, in the order of :func:`shards`."""
    every: list[Ranges] = [((0, extent),)]
    for axis, cut in splits:
        every = [inner for ranges in every for inner in _split(ranges, lengths[axis], cut)]
    return every


def ranges_at(extent: int, lengths: Ints, splits: Splits, coordinate: Sequence[int]) -> Ranges:
    """The ranges of the shard of an extent at a mesh coordinate."""
    ranges: Ranges = ((0, extent),)
    for axis, cut in splits:
        ranges = _split(ranges, lengths[axis], cut)[coordinate[axis]]
    return ranges


def _split(ranges: Ranges, length: int, cut: Cut) -> list[Ranges]:
    extent = sum([size for _, size in ranges])
    if not isinstance(cut, int):
        return _consecutive(ranges, shard_sizes(extent, length, cut) or ())
    blocks = _consecutive(ranges, chunk_sizes(extent, length * cut))
    return [
        tuple([each for number in dealt_blocks(length, cut, place) for each in blocks[number]])
        for place in range(length)
    ]


def _consecutive(ranges: Ranges, sizes: Sequence[int]) -> list[Ranges]:
    """Ranges that follow each other, in parts of these sizes; an empty part is an empty range."""
    parts: list[Ranges] = []
    for at, size in zip(offsets_of(sizes), sizes, strict=True):
        part, passed = [], 0
        for start, count in ranges:
            low, high = max(at - passed, 0), min(at + size - passed, count)
            if low < high:
                part.append((start + low, high - low))
            passed += count
        parts.append(tuple(part) or ((ranges[0][0] + min(at, ranges[0][1]), 0),))
    return parts


def shard_at(
    extent: int, lengths: Ints, splits: Splits, coordinate: Sequence[int]
) -> tuple[int, int]:
    """Offset and size of the shard of an extent at a mesh coordinate, unless blocks are dealt."""
    offset = 0
    for axis, cut in splits:
        at = coordinate[axis]
        if cut is None:
            start, extent = chunk_at(extent, lengths[axis], at)
        elif isinstance(cut, int):
            raise SeveralRangesError(splits)
        else:
            start, extent = sum(cut[:at]), cut[at]
        offset += start
    return offset, extent


def size_at(extent: int, lengths: Ints, splits: Splits, coordinate: Sequence[int]) -> int:
    """The size of the shard of an extent at a mesh coordinate."""
    for axis, cut in splits:
        extent = (shard_sizes(extent, lengths[axis], cut) or (0,) * lengths[axis])[coordinate[axis]]
    return extent


@lru_cache(maxsize=4096)
def shard_extents(extent: int, lengths: Ints, splits: Splits) -> Ints:
    """The different sizes that shards of an extent have, ascending; empty if sizes do not fit."""
    extents = {extent}
    for axis, cut in splits:
        parts = [shard_sizes(size, lengths[axis], cut) for size in extents]
        if None in parts:
            return ()
        extents = {part for each in parts for part in each or ()}
    return tuple(sorted(extents))


def infer_splits(sizes: Sequence[int], lengths: Sequence[int]) -> tuple[Ints | None, ...] | None:
    """The sizes of each axis's shards, from all shards' sizes: the inverse of :func:`shards`.

    An axis that splits as ``torch.chunk`` has None. None if no placement has these shards, because
    an axis splits equally everywhere.
    """
    inferred: list[Ints | None] = []
    for length in reversed(lengths):
        groups = [tuple(sizes[at : at + length]) for at in range(0, len(sizes), length)]
        if all(list(group) == chunk_sizes(sum(group), length) for group in groups):
            inferred.append(None)
        elif len(set(groups)) == 1:
            inferred.append(groups[0])
        else:
            return None
        sizes = [sum(group) for group in groups]
    return tuple(reversed(inferred))


def combination_index(axes: Sequence[int], others: Sequence[int], lengths: Ints) -> list[int]:
    """For each combination of coordinates along ``axes``, the number of that along ``others``."""
    strides, stride = dict.fromkeys(axes, 0), 1
    for axis in reversed(others):
        strides[axis] = stride
        stride *= lengths[axis]
    return sums_of_combinations([[strides[a] * i for i in range(lengths[a])] for a in axes])


def sums_of_combinations(choices: Sequence[Sequence[int]]) -> list[int]:
    """The sum of each combination of a number from each sequence; the last runs fastest."""
    sums = [0]
    for numbers in choices:
        sums = [total + number for total in sums for number in numbers]
    return sums


def most_moved(
    shape: Ints, lengths: Ints, source: Sequence[Splits], target: Sequence[Splits]
) -> int:
    """The largest number of elements that any rank sends or receives between two layouts."""
    before, after = (
        {axis for splits in of_dims for axis in axes_of(splits)} for of_dims in (source, target)
    )
    readers = math.prod([lengths[axis] for axis in before - after])
    owners = math.prod([lengths[axis] for axis in after - before])
    sharding = sorted(before | after)
    columns = []
    for dim, extent in enumerate(shape):
        ends = source[dim], target[dim]
        axes = sorted({axis for splits in ends for axis in axes_of(splits)})
        table = _extents_by_rank(extent, lengths, axes, *ends)
        columns.append([table[i] for i in combination_index(sharding, axes, lengths)])
    most = 0
    for extents in set(zip(*columns, strict=True)):
        had, wanted, kept = (math.prod(numbers) for numbers in zip(*extents, strict=True))
        most = max(most, wanted - kept, -(-had * readers // owners) - kept)
    return most


def _extents_by_rank(
    extent: int, lengths: Ints, axes: Sequence[int], source: Splits, target: Splits
) -> list[Ints]:
    """By coordinates along ``axes``: sizes of a shard before, after, and of the overlap."""
    before, after = (shard_ranges(extent, lengths, splits) for splits in (source, target))
    here, there = (combination_index(axes, axes_of(s), lengths) for s in (source, target))
    extents: list[Ints] = []
    for i, j in zip(here, there, strict=True):
        overlaps = [
            max(0, min(a + n, b + m) - max(a, b)) for a, n in before[i] for b, m in after[j]
        ]
        sizes = [sum([size for _, size in ranges]) for ranges in (before[i], after[j])]
        extents.append((*sizes, sum(overlaps)))
    return extents


def box_at(shape: Ints, lengths: Ints, splits: Sequence[Splits], coordinate: Sequence[int]) -> Box:
    """The region that the rank at a mesh coordinate holds, unless blocks are dealt in turns."""
    spans = [
        shard_at(extent, lengths, of_dim, coordinate)
        for extent, of_dim in zip(shape, splits, strict=True)
    ]
    return trusted_box(tuple([start for start, _ in spans]), tuple([size for _, size in spans]))


def boxes_at(
    shape: Ints, lengths: Ints, splits: Sequence[Splits], coordinate: Sequence[int]
) -> tuple[Box, ...]:
    """The regions of a tensor that the rank at a mesh coordinate holds, ascending by offsets."""
    if not any(map(is_dealt, splits)):
        return (box_at(shape, lengths, splits, coordinate),)
    return boxes_of([
        ranges_at(extent, lengths, of_dim, coordinate)
        for extent, of_dim in zip(shape, splits, strict=True)
    ])  # fmt: skip


def boxes_of(ranges: Sequence[Ranges]) -> tuple[Box, ...]:
    """The box of each combination of a range from each dim."""
    boxes = [list(zip(*each, strict=True)) for each in product(*ranges)]
    return tuple([trusted_box(offsets, sizes) for offsets, sizes in boxes])
