"""A part of a cut dim whose elements stay on their ranks: what the placements then are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.layout import Placement, Replicate, Shard, chunk_sizes

#: For ranges ``(offset, size)`` that a dim is cut into, how long each becomes.
Measure = Callable[[Sequence[tuple[int, int]]], Sequence[int]]


def uncut(spec: DTensorSpec, dims: Sequence[int]) -> DTensorSpec:
    """The same layout with these dims whole on each rank."""
    return spec.with_placements(
        [
            Replicate() if isinstance(one, Shard) and one.dim in dims else one
            for one in spec.placements
        ],
        spec.order,
    )


def resized(
    spec: DTensorSpec, measures: Mapping[int, Measure]
) -> tuple[DTensorSpec, dict[int, Ints | None]]:
    """How axes cut dims whose parts become longer or shorter where they are.

    Where no placement can write that, the last axis that cuts such a dim no longer does.

    Args:
        spec: How the tensor lies.
        measures: For each dim that changes, what its parts become.

    Returns:
        How the tensor has to lie first; and for each axis that cuts one of the dims the sizes of
        its parts then (None: as ``torch.chunk`` cuts).
    """
    sizes: dict[int, Ints | None] = {}
    for dim, measure in measures.items():
        while True:
            found = _sizes(spec, dim, measure)
            if found is not None:
                sizes.update(found)
                break
            last = spec.axes_of(dim)[-1]
            placements: list[Placement] = list(spec.placements)
            placements[last] = Replicate()
            spec = spec.with_placements(placements, spec.order)
    return spec, sizes


def _sizes(spec: DTensorSpec, dim: int, measure: Measure) -> dict[int, Ints | None] | None:
    """For each axis that cuts ``dim`` the sizes of its parts; None if they cannot be written."""
    axes = spec.axes_of(dim)
    parts = ranges(spec, dim)
    lengths = [*measure(parts)]
    found: dict[int, Ints | None] = {}
    for axis in reversed(axes):
        count = spec.mesh.shape[axis]
        groups = [tuple(lengths[i : i + count]) for i in range(0, len(lengths), count)]
        if all(list(group) == chunk_sizes(sum(group), count) for group in groups):
            found[axis] = None
        elif len(set(groups)) == 1:
            found[axis] = groups[0]
        else:
            return None
        lengths = [sum(group) for group in groups]
    return found


def ranges(spec: DTensorSpec, dim: int) -> list[tuple[int, int]]:
    """Offset and size of each part that a dim is cut into, in order."""
    parts = [(0, spec.shape[dim])]
    for axis in spec.axes_of(dim):
        placement = spec.placements[axis]
        assert isinstance(placement, Shard)
        cut = []
        for offset, size in parts:
            for one in placement.sizes or chunk_sizes(size, spec.mesh.shape[axis]):
                cut.append((offset, one))
                offset += one
        parts = cut
    return parts


def lying(
    spec: DTensorSpec,
    shape: Sequence[int],
    dims: Mapping[int, int],
    sizes: Mapping[int, Ints | None],
) -> DTensorSpec:
    """How a result lies that keeps each element where it is.

    Args:
        spec: How the tensor lies.
        shape: The result's shape.
        dims: Where dims of the tensor are in the result.
        sizes: Sizes of parts for axes where they have changed; see :func:`resized`.
    """
    placements = [
        Shard(dims[one.dim], sizes.get(axis, one.sizes)) if isinstance(one, Shard) else one
        for axis, one in enumerate(spec.placements)
    ]
    return spec_of(spec.mesh, placements, shape, spec.order)


def place_of(spec: DTensorSpec, dim: int) -> tuple[int, int]:
    """Which of the parts that a dim is cut into this rank has, and how many there are."""
    coordinate = spec.mesh.get_coordinate() or [0] * spec.mesh.ndim
    place, count = 0, 1
    for axis in spec.axes_of(dim):
        length = spec.mesh.shape[axis]
        place, count = place * length + coordinate[axis], count * length
    return place, count
