"""Placements: what each axis of a mesh of ranks does to a tensor, as values; and their tilings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from tilework.layout.box import Box, Ints, trusted_box
from tilework.layout.chunking import chunk_offsets, chunk_sizes, offsets_of
from tilework.layout.tiling import Tile, Tiling, trusted_tile, trusted_tiling


class _Kind:
    """What all placements answer."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it cuts a dim; this one, if ``dim`` is given."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether all ranks along the axis hold the same."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether what the ranks hold is to be combined; by this, if ``reduce_op`` is given."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, slots=True, repr=False)
class Shard(_Kind):
    """A mesh axis cuts ``dim`` into as many parts as the axis is long.

    Args:
        dim: Which dim; negative ones count from the last.
        sizes: The size of each part; None: as ``torch.chunk`` cuts.

    Raises:
        ValueError: ``sizes`` is empty or has a negative number.

    Example:
        >>> Shard(0), Shard(-1, sizes=(3, 5))
        (Shard(dim=0), Shard(dim=-1, sizes=(3, 5)))
    """

    dim: int
    sizes: Ints | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", int(self.dim))
        if self.sizes is not None:
            sizes = tuple(map(int, self.sizes))
            if not sizes or min(sizes) < 0:
                raise ValueError(f"Shard takes one or more sizes, none negative, got {sizes}")
            object.__setattr__(self, "sizes", sizes)

    def __repr__(self) -> str:
        return (
            f"Shard(dim={self.dim})"
            if self.sizes is None
            else f"Shard(dim={self.dim}, sizes={self.sizes})"
        )


@dataclass(frozen=True, slots=True)
class Replicate(_Kind):
    """All ranks along a mesh axis hold the same."""


@dataclass(frozen=True, slots=True)
class Partial(_Kind):
    """The value is the reduction of what the ranks along a mesh axis hold.

    Args:
        reduce_op: How they are combined.
    """

    reduce_op: str = "sum"


Placement = Shard | Replicate | Partial

#: The ranks of a mesh, as lists in lists (or tuples), one level for each axis.
Mesh = Sequence[Any]


def mesh_tiling(
    shape: Sequence[int],
    mesh: Mesh,
    placements: Sequence[Placement],
    *,
    order: Sequence[int] | None = None,
) -> Tiling:
    """The tiling that placements on a mesh mean.

    Where several axes shard one dim, the first cuts the whole and the next cuts each part.
    Each combination of coordinates along the Partial axes is a term.

    Args:
        shape: The tensor's global shape.
        mesh: The ranks, in lists one level deep for each axis of the mesh.
        placements: What each axis does.
        order: The axes in the order in which they cut; None: from the first to the last.

    Raises:
        ValueError: The mesh is ragged or has a rank twice, placements or order do not fit to its
            axes, a dim does not exist, sizes do not add up, or axes name different reductions.

    Example:
        >>> tiling = mesh_tiling((4, 6), [[0, 1], [2, 3]], [Shard(0), Replicate()])
        >>> [(str(tile.box), tile.owners) for tile in tiling.tiles]
        [('[0:2, 0:6]', (0, 1)), ('[2:4, 0:6]', (2, 3))]
    """
    shape = tuple(map(int, shape))
    lengths, ranks = _flat(mesh)
    _check_mesh(lengths, ranks)
    check_cuts(lengths, placements, order)
    strides = [math.prod(lengths[axis + 1 :]) for axis in range(len(lengths))]

    def steps(kind: type[Placement]) -> list[int]:
        """How far it is in ``ranks`` to each combination of coordinates along such axes."""
        spans = [
            range(0, length * stride, stride)
            for length, stride, placement in zip(lengths, strides, placements, strict=True)
            if isinstance(placement, kind)
        ]
        return [sum(combination) for combination in product(*spans)]

    cells = [(0, (0,) * len(shape), shape)]
    for axis in range(len(lengths)) if order is None else order:
        if isinstance(placement := placements[axis], Shard):
            cells = _cut(cells, placement, lengths[axis], strides[axis])
    boxes = [(at, trusted_box(offsets, sizes)) for at, offsets, sizes in cells]
    copies = steps(Replicate)

    def tile(at: int, box: Box) -> Tile:
        return trusted_tile(box, tuple([ranks[at + copy] for copy in copies]))

    terms = tuple([tuple([tile(term + at, box) for at, box in boxes]) for term in steps(Partial)])
    ops = {placement.reduce_op for placement in placements if isinstance(placement, Partial)}
    return trusted_tiling(shape, terms, ops.pop() if len(terms) > 1 else None)


def chunk_tiling(shape: Sequence[int], dim: int, owners: Sequence[int]) -> Tiling:
    """One chunk of ``dim`` for each entry of ``owners``, as ``torch.chunk`` cuts.

    A rank may own several chunks. An empty chunk is where it would be if the extent went on.

    Raises:
        ValueError: There is no owner, or no such dim.

    Example:
        >>> [str(box) for box in chunk_tiling((5, 2), 0, [0, 1, 0]).boxes_of(0)]
        ['[0:2, 0:2]', '[4:5, 0:2]']
    """
    shape = tuple(map(int, shape))
    dim = _existing(dim, shape)
    starts = chunk_offsets(shape[dim], len(owners))
    sizes = chunk_sizes(shape[dim], len(owners))
    zeros = (0,) * len(shape)
    tiles = [
        trusted_tile(trusted_box(_with(zeros, dim, start), _with(shape, dim, size)), (int(owner),))
        for start, size, owner in zip(starts, sizes, owners, strict=True)
    ]
    return trusted_tiling(shape, (tuple(tiles),))


#: A place in the list of ranks, offsets, sizes.
Cell = tuple[int, Ints, Ints]


def _cut(cells: list[Cell], placement: Shard, length: int, stride: int) -> list[Cell]:
    """Each cell cut into as many as the axis is long."""
    dim = _existing(placement.dim, cells[0][2])

    @cache  # few extents are different
    def parts(extent: int) -> list[tuple[int, int, int]]:
        sizes = _sizes(placement, extent, length)
        return list(zip(range(0, length * stride, stride), offsets_of(sizes), sizes, strict=True))

    return [
        (place + at, _with(offsets, dim, offsets[dim] + start), _with(sizes, dim, size))
        for place, offsets, sizes in cells
        for at, start, size in parts(sizes[dim])
    ]


def _with(numbers: Ints, dim: int, number: int) -> Ints:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def _existing(dim: int, shape: Ints) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"a tensor of shape {shape} has no dim {dim}")
    return dim % len(shape)


def _sizes(placement: Shard, extent: int, length: int) -> list[int]:
    if placement.sizes is None:
        return chunk_sizes(extent, length)
    if len(placement.sizes) != length or sum(placement.sizes) != extent:
        raise ValueError(
            f"{placement} does not cut an extent of {extent} into {length} parts, one for each "
            f"rank along the axis"
        )
    return list(placement.sizes)


def _flat(mesh: Any) -> tuple[Ints, list[int]]:
    """The mesh's shape, and its ranks in order."""
    if not isinstance(mesh, (list, tuple)):
        return (), [int(mesh)]
    if not any(isinstance(part, (list, tuple)) for part in mesh):
        return (len(mesh),), list(map(int, mesh))
    lengths, ranks = zip(*map(_flat, mesh), strict=True)
    if len(set(lengths)) != 1:
        raise ValueError(f"a mesh has parts of one shape along each axis, got {set(lengths)}")
    return (len(mesh), *lengths[0]), [rank for part in ranks for rank in part]


def _check_mesh(lengths: Ints, ranks: list[int]) -> None:
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"a mesh has one or more ranks, none twice, got {ranks}")


def check_cuts(
    lengths: Sequence[int], placements: Sequence[Placement], order: Sequence[int] | None
) -> None:
    """That placements and order are such for a mesh with axes of these lengths.

    Raises:
        ValueError: They are not as many as the axes, or axes name different reductions.
        TypeError: Something is no placement.
    """
    for placement in placements:
        if not isinstance(placement, _Kind):
            raise TypeError(
                f"a placement is Shard(dim), Replicate() or Partial(), got {placement!r}"
            )
    if len(placements) != len(lengths):
        raise ValueError(
            f"placements and the mesh's axes must have the same length: a mesh of shape "
            f"{tuple(lengths)} takes {len(lengths)}, got {list(placements)}"
        )
    ops = {placement.reduce_op for placement in placements if isinstance(placement, Partial)}
    if len(ops) > 1:
        raise ValueError(f"a tensor has one reduction, its Partial placements have {sorted(ops)}")
    if order is not None and sorted(order) != list(range(len(lengths))):
        raise ValueError(
            f"order names each of the mesh's {len(lengths)} axes once, got {list(order)}"
        )
