"""Layouts of results whose elements stay on their ranks: slices and padding of sharded dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.layout import Placement, Replicate, Shard
from tilework.layout.internal import infer_splits

#: The sizes that shards have afterwards, from their ranges ``(offset, size)`` before.
Resize = Callable[[Sequence[tuple[int, int]]], Sequence[int]]


def with_dims_unsharded(spec: DTensorSpec, dims: Sequence[int]) -> DTensorSpec:
    """The same layout with all of these dims on each rank."""
    return spec.with_placements(
        [
            Replicate() if isinstance(placement, Shard) and placement.dim in dims else placement
            for placement in spec.placements
        ],
        spec.order,
    )


def resizable(
    spec: DTensorSpec, resizes: Mapping[int, Resize]
) -> tuple[DTensorSpec, dict[int, Ints | None]]:
    """The layout in which shards of some dims may become longer or shorter where they are.

    If no placement has the new shards of a dim, the dim's innermost axis no longer shards it.

    Args:
        spec: The layout of the tensor.
        resizes: For each dim that changes, a function from the old shards to the new sizes.

    Returns:
        The layout that the tensor must have first; and for each axis that shards one of the dims
        the sizes of the shards afterwards (None: as ``torch.chunk`` splits).
    """
    sizes: dict[int, Ints | None] = {}
    for dim, resize in resizes.items():
        while (after := _sizes_after(spec, dim, resize)) is None:
            placements: list[Placement] = list(spec.placements)
            placements[spec.axes_of(dim)[-1]] = Replicate()
            spec = spec.with_placements(placements, spec.order)
        sizes.update(after)
    return spec, sizes


def _sizes_after(spec: DTensorSpec, dim: int, resize: Resize) -> dict[int, Ints | None] | None:
    """The sizes of the shards of each axis that shards ``dim``; None if no placement has them."""
    axes = spec.axes_of(dim)
    lengths = [spec.mesh.shape[axis] for axis in axes]
    sizes = infer_splits(resize(spec.shards_of(dim)), lengths)
    return None if sizes is None else dict(zip(axes, sizes, strict=True))


def resized(
    spec: DTensorSpec,
    shape: Sequence[int],
    dims: Mapping[int, int],
    sizes: Mapping[int, Ints | None],
) -> DTensorSpec:
    """The layout of a result that keeps each element where it is.

    Args:
        spec: The layout of the tensor.
        shape: The result's shape.
        dims: The result's dim for each dim of the tensor that it keeps.
        sizes: Sizes of shards for axes where they have changed; see :func:`resizable`.
    """
    placements = [
        Shard(dims[placement.dim], sizes.get(axis, placement.sizes))
        if isinstance(placement, Shard)
        else placement
        for axis, placement in enumerate(spec.placements)
    ]
    return spec_of(spec.mesh, placements, shape, spec.order)


def shard_number(spec: DTensorSpec, dim: int) -> tuple[int, int]:
    """The number of this rank's shard among those of a dim, in their order, and how many exist."""
    coordinate = spec.mesh.get_coordinate() or [0] * spec.mesh.ndim
    number, count = 0, 1
    for axis in spec.axes_of(dim):
        length = spec.mesh.shape[axis]
        number, count = number * length + coordinate[axis], count * length
    return number, count
