"""Placements: what each axis of a mesh of ranks does to a tensor, as values; and their tilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tilework.layout.box import Ints, trusted_box
from tilework.layout.chunking import chunk_sizes, offsets_of
from tilework.layout.tiling import Tile, Tiling


@dataclass(frozen=True, slots=True)
class Shard:
    """A mesh axis cuts ``dim`` into as many parts as it has ranks.

    Args:
        dim: Which dim; negative ones count from the last.
        sizes: The size of each part; None for chunks as ``torch.chunk`` makes them.

    Example:
        >>> Shard(0), Shard(-1, sizes=(3, 5))
        (Shard(dim=0, sizes=None), Shard(dim=-1, sizes=(3, 5)))
    """

    dim: int
    sizes: Ints | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", int(self.dim))
        if self.sizes is not None:
            sizes = tuple(map(int, self.sizes))
            if not sizes or min(sizes) < 0:
                raise ValueError(f"Shard's sizes are one or more, none negative, got {sizes}")
            object.__setattr__(self, "sizes", sizes)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank of a mesh axis holds the same."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction of what the ranks of a mesh axis hold.

    Args:
        reduce_op: How they are combined.
    """

    reduce_op: str = "sum"


Placement = Shard | Replicate | Partial
#: A mesh: nested sequences of ranks, all of one length at each level.
Mesh = Sequence[Any]


def mesh_tiling(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> Tiling:
    """The tiling that placements on a mesh write down.

    Where several mesh axes shard one dim, the first cuts the whole, the next its parts.

    Args:
        shape: The tensor's global shape.
        mesh: The ranks, as a nested sequence with one level for each mesh axis.
        placements: What each mesh axis does, one per axis.

    Raises:
        ValueError: The mesh is ragged, or repeats a rank; there are more or fewer placements than
            axes; a dim does not exist; sizes do not add up; several reductions differ.

    Example:
        >>> tiling = mesh_tiling((4, 6), [[0, 1], [2, 3]], [Shard(0), Replicate()])
        >>> [(str(tile.box), tile.owners) for tile in tiling.tiles]
        [('[0:2, 0:6]', (0, 1)), ('[2:4, 0:6]', (2, 3))]
    """
    shape = tuple(map(int, shape))
    lengths, ranks = _flat(mesh)
    if len(placements) != len(lengths):
        raise ValueError(
            f"a mesh of shape {lengths} needs {len(lengths)} placements, got {len(placements)}"
        )
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if len(ops) > 1:
        raise ValueError(f"a tensor has one reduction, got {', '.join(sorted(ops))}")
    tiles: dict[tuple[Ints, Ints], dict[tuple[Ints, Ints], list[int]]] = {}
    for coordinate, rank in zip(product(*map(range, lengths)), ranks, strict=True):
        offsets, sizes = [0] * len(shape), list(shape)
        term, place = [], []
        for at, n, placement in zip(coordinate, lengths, placements, strict=True):
            if isinstance(placement, Partial):
                term.append(at)
            elif isinstance(placement, Shard):
                place.append(at)
                dim = _dim(placement, len(shape))
                parts = _parts(placement, sizes[dim], n)
                offsets[dim] += offsets_of(parts)[at]
                sizes[dim] = parts[at]
        box = (tuple(offsets), tuple(sizes))
        owners = tiles.setdefault(tuple(term), {})  # type: ignore[arg-type]
        owners.setdefault((tuple(place), box), []).append(rank)  # type: ignore[arg-type]
    terms = tuple(
        tuple(Tile(trusted_box(box[0], box[1]), tuple(owners)) for (_, box), owners in term.items())
        for term in tiles.values()
    )
    return Tiling(shape, terms, ops.pop() if len(terms) > 1 else None)


def _dim(placement: Shard, ndim: int) -> int:
    dim = placement.dim + ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < ndim:
        raise ValueError(f"{placement} names no dim of a tensor with {ndim} dims")
    return dim


def _parts(placement: Shard, extent: int, n: int) -> list[int]:
    if placement.sizes is None:
        return chunk_sizes(extent, n)
    if len(placement.sizes) != n or sum(placement.sizes) != extent:
        raise ValueError(f"{placement} does not cut {extent} elements into {n} parts")
    return list(placement.sizes)


def _flat(mesh: Any) -> tuple[Ints, Ints]:
    """The mesh's shape, and its ranks in order."""
    if not isinstance(mesh, Sequence):
        return (), (int(mesh),)
    inner = [_flat(part) for part in mesh]
    if not inner or any(lengths != inner[0][0] for lengths, _ in inner):
        raise ValueError(f"a mesh is as long everywhere along each axis, and not empty: {mesh}")
    ranks = tuple([rank for _, part in inner for rank in part])
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"a mesh has each rank once, got {ranks}")
    return (len(inner), *inner[0][0]), ranks
