"""The catalog of a snapshot: the boxes of each tensor, their writers and places. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilework.layout import Box, Tile, Tiling, chunk_sizes, offsets_of

Ints = tuple[int, ...]
#: A tensor of a state: name, shape, dtype, and tiles (offsets, sizes, owners).
Described = tuple[str, Ints, str, tuple[tuple[Ints, Ints, Ints], ...]]
#: Parts begin at multiples of this many bytes.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A box of a tensor that one rank writes."""

    box: Box
    #: The index, in the tensor's tiling, of the tile that the box belongs to.
    tile: int
    #: The rank that writes the box, in the group that takes the snapshot.
    writer: int
    #: The first byte in the writer's slot.
    offset: int


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """A tensor of a snapshot."""

    #: The key in the state; then, after slashes, the path in the module or optimizer.
    name: str
    #: The shape of the whole tensor, over all ranks.
    shape: Ints
    dtype: torch.dtype
    #: The parts of all writers, which cover the tensor; empty for a tensor without elements.
    parts: tuple[SnapshotPart, ...]


@dataclass(frozen=True)
class Catalog:
    """All tensors of a snapshot, and the bytes of each rank's slot."""

    entries: tuple[SnapshotEntry, ...]
    #: By rank: the bytes of all parts that the rank writes, with padding, without plain data.
    slot_bytes: Ints

    @property
    def total_bytes(self) -> int:
        """The bytes of the snapshot, on all ranks."""
        return sum(self.slot_bytes)


def described(name: str, dtype: torch.dtype, tiling: Tiling) -> Described:
    """Describe a tensor of a training state, not a partial one, as plain data that ranks can
    exchange.
    """
    if len(tiling.terms) != 1:
        raise ValueError(
            f"{name} is partial: ranks hold terms of a reduction, and a state needs the value. "
            f"Redistribute {name} to Replicate() or Shard(dim), or leave it out of the state"
        )
    tiles = tuple((t.box.offsets, t.box.sizes, t.owners) for t in tiling.tiles)
    return name, tiling.shape, str(dtype).removeprefix("torch."), tiles


def tiling_of(tensor: Described) -> Tiling:
    """The tiling of a described tensor."""
    _, shape, _, tiles = tensor
    return Tiling.of_tiles(shape, [Tile(Box(o, s), owners) for o, s, owners in tiles])


def make_catalog(tensors: Sequence[Described], ranks: int) -> Catalog:
    """The catalog in which each rank writes nearly equally many bytes.

    A tile with several owners is cut along the first dim, and each owner writes a part. The result
    is the same on every rank.

    Example:
        >>> whole = ("w", (4, 2), "float32", (((0, 0), (4, 2), (0, 1)),))
        >>> catalog = make_catalog([whole], 2)
        >>> [(str(p.box), p.writer) for p in catalog.entries[0].parts], catalog.slot_bytes
        ([('[0:2, 0:2]', 0), ('[2:4, 0:2]', 1)], (64, 64))
    """
    used = [0] * ranks
    entries = []
    for name, shape, dtype_name, tiles in tensors:
        dtype: torch.dtype = getattr(torch, dtype_name)
        parts: list[SnapshotPart] = []
        for number, (offsets, sizes, owners) in enumerate(tiles):
            for box, writer in _shares(Box(offsets, sizes), owners, used):
                parts.append(SnapshotPart(box, number, writer, used[writer]))
                nbytes = box.volume * dtype.itemsize
                used[writer] += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        entries.append(SnapshotEntry(name, shape, dtype, tuple(parts)))
    return Catalog(tuple(entries), tuple(used))


def _shares(box: Box, owners: Ints, used: Sequence[int]) -> list[tuple[Box, int]]:
    """The parts of a box, and the owner that writes each: the least loaded owners first."""
    if box.empty:
        return []
    by_load = sorted(owners, key=lambda rank: (used[rank], rank))
    if not box.sizes or box.sizes[0] < len(owners):
        return [(box, by_load[0])]
    sizes = [size for size in chunk_sizes(box.sizes[0], len(owners)) if size]
    shares = []
    for writer, size, offset in zip(by_load, sizes, offsets_of(sizes), strict=False):
        start = (box.offsets[0] + offset, *box.offsets[1:])
        shares.append((Box(start, (size, *box.sizes[1:])), writer))
    return shares


def merged(by_rank: Sequence[Sequence[Described]]) -> list[Described]:
    """The tensors of all ranks, each once. Owners that ranks list for equal boxes are joined.

    A rank may know only some owners of a tile: those along one axis of a mesh, while other ranks
    know the owners along other axes.

    Raises:
        ValueError: Ranks have tensors of the same name with other boxes or dtypes.
    """
    known: dict[str, Described] = {}
    first_rank: dict[str, int] = {}
    for rank, tensors in enumerate(by_rank):
        for tensor in tensors:
            name = tensor[0]
            first = known.setdefault(name, tensor)
            first_rank.setdefault(name, rank)
            if first == tensor:
                continue
            if first[:3] != tensor[:3] or _boxes(first) != _boxes(tensor):
                raise ValueError(
                    f"{name} is {_short(first)} on rank {first_rank[name]} and "
                    f"{_short(tensor)} on rank {rank}: build the same state on every rank"
                )
            known[name] = _joined(first, tensor)
    return list(known.values())


def _boxes(tensor: Described) -> list[tuple[Ints, Ints]]:
    return [(offsets, sizes) for offsets, sizes, _ in tensor[3]]


def _joined(one: Described, other: Described) -> Described:
    tiles = tuple(
        (offsets, sizes, tuple(dict.fromkeys((*owners, *more))))
        for (offsets, sizes, owners), (_, _, more) in zip(one[3], other[3], strict=True)
    )
    return (*one[:3], tiles)


def _short(tensor: Described) -> str:
    return f"{tensor[2]} {list(tensor[1])} in {len(tensor[3])} tiles"
