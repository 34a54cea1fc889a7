"""How one tensor lies on a mesh: a value of which each mesh keeps one instance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from tilework.layout import (
    Box,
    Partial,
    Placement,
    Replicate,
    Shard,
    Tiling,
    chunk_sizes,
    mesh_tiling,
    offsets_of,
)
from tilework.layout.placements import check_cuts
from tilework.mesh import DeviceMesh

Ints = tuple[int, ...]

#: How many specs a mesh remembers before it forgets all.
_MOST_SPECS = 1 << 14


class DTensorSpec:
    """A mesh, a global shape, and what each axis of the mesh does to a tensor of that shape.

    Made by :func:`spec_of`. Placements are in their normal form: dims are not negative, and sizes
    are None where the axis cuts as ``torch.chunk`` does. ``order`` tells in which order axes cut a
    dim that several share, and is None where they do so from the first to the last.

    Specs are equal by content; those of one mesh are mostly one object.
    """

    __slots__ = ("__dict__", "_hash", "mesh", "order", "placements", "shape", "size")

    def __init__(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Ints, order: Ints | None
    ) -> None:
        self.mesh, self.placements, self.shape, self.order = mesh, placements, shape, order
        #: The shape as torch has it.
        self.size = torch.Size(shape)
        self._hash = hash((placements, shape, order))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DTensorSpec):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.shape == other.shape
            and self.placements == other.placements
            and self.order == other.order
            and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        order = "" if self.order is None else f", order={self.order}"
        return f"DTensorSpec({list(self.shape)}, {list(self.placements)}{order}, {self.mesh!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return spec_of, (self.mesh, self.placements, self.shape, self.order)

    @property
    def ndim(self) -> int:
        """The number of the tensor's dims."""
        return len(self.shape)

    def axes_of(self, dim: int) -> Ints:
        """The axes that cut a dim, in the order in which they do."""
        return self._axes_of[dim]

    @cached_property
    def _axes_of(self) -> tuple[Ints, ...]:
        found: list[list[int]] = [[] for _ in self.shape]
        for axis in self.order or range(len(self.placements)):
            placement = self.placements[axis]
            if isinstance(placement, Shard):
                found[placement.dim].append(axis)
        return tuple(map(tuple, found))

    @cached_property
    def partial_axes(self) -> Ints:
        """The axes along which the value is still to be reduced."""
        return tuple(a for a, one in enumerate(self.placements) if isinstance(one, Partial))

    @cached_property
    def reduce_op(self) -> str | None:
        """How terms are combined; None if there are none."""
        found = [one.reduce_op for one in self.placements if isinstance(one, Partial)]
        return found[0] if found else None

    @cached_property
    def is_replicated(self) -> bool:
        """Whether each rank of the mesh has the whole value."""
        return all(
            isinstance(one, Replicate) or length == 1
            for one, length in zip(self.placements, self.mesh.shape, strict=True)
        )

    @cached_property
    def takes_part(self) -> bool:
        """Whether this rank is in the mesh."""
        return self.mesh.get_coordinate() is not None

    @cached_property
    def local_box(self) -> Box:
        """Which part of the tensor this rank has; an empty one outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return Box((0,) * self.ndim, (0,) * self.ndim)
        return self.box_at(coordinate)

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """Which part of the tensor the rank at a place of the mesh has."""
        offsets, sizes = [0] * self.ndim, list(self.shape)
        for dim, axes in enumerate(self._axes_of):
            for axis in axes:
                parts = self._parts(axis, sizes[dim])
                offsets[dim] += offsets_of(parts)[coordinate[axis]]
                sizes[dim] = parts[coordinate[axis]]
        return Box(tuple(offsets), tuple(sizes))

    def _parts(self, axis: int, extent: int) -> list[int]:
        placement = self.placements[axis]
        assert isinstance(placement, Shard)
        return list(placement.sizes or chunk_sizes(extent, self.mesh.shape[axis]))

    @cached_property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's part; ``[0]`` outside the mesh."""
        return torch.Size(self.local_box.sizes if self.takes_part else (0,))

    @cached_property
    def tiling(self) -> Tiling:
        """Which global rank holds which box."""
        return mesh_tiling(self.shape, self.mesh.spec.nested(), self.placements, order=self.order)

    @cached_property
    def dual(self) -> DTensorSpec:
        """The layout of its gradient: partial values have gradients that are replicated."""
        if not self.partial_axes:
            return self
        return self.with_placements(
            [Replicate() if isinstance(one, Partial) else one for one in self.placements],
            self.order,
        )

    @cached_property
    def replicated(self) -> DTensorSpec:
        """The whole value on each rank."""
        return self.with_placements([Replicate()] * len(self.placements))

    def with_placements(
        self, placements: Sequence[Placement], order: Sequence[int] | None = None
    ) -> DTensorSpec:
        """The same mesh and shape, laid out otherwise."""
        return spec_of(self.mesh, placements, self.shape, order)

    @cached_property
    def routes(self) -> dict[Any, Any]:
        """What redistribution remembers of the ways from here, by target and dtype."""
        return {}

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize


def spec_of(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    order: Sequence[int] | None = None,
) -> DTensorSpec:
    """The spec with these contents. Local; not collective.

    Args:
        mesh: The ranks.
        placements: One for each axis of the mesh.
        shape: The tensor's global shape.
        order: The axes in the order in which they cut; None: from the first to the last.

    Raises:
        ValueError: Placements or order do not fit the mesh or the shape.
        TypeError: Something else than a placement was given.
    """
    key = (tuple(placements), tuple(shape), None if order is None else tuple(order))
    known = mesh.specs
    found: DTensorSpec | None = known.get(key)
    if found is None:
        made = _make(mesh, *key)
        if len(known) >= _MOST_SPECS:
            known.clear()
        # The normal form and what was written are the same spec.
        found = known.setdefault((made.placements, made.shape, made.order), made)
        known[key] = found
    return found


def _make(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Ints, order: Ints | None
) -> DTensorSpec:
    check_cuts(mesh.shape, placements, order)
    shape = tuple(map(int, shape))
    cutting = tuple(range(mesh.ndim)) if order is None else order
    extents: list[set[int]] = [{size} for size in shape]
    normal = list(placements)
    for axis in cutting:
        placement = placements[axis]
        if isinstance(placement, Shard):
            normal[axis], extents = _normal(placement, mesh.shape[axis], shape, extents)
    shared = [
        axis
        for axis in cutting
        if isinstance(one := normal[axis], Shard)
        and sum(isinstance(other, Shard) and other.dim == one.dim for other in normal) > 1
    ]
    return DTensorSpec(mesh, tuple(normal), shape, _normal_order(normal, cutting, shared))


def _normal(
    placement: Shard, length: int, shape: Ints, extents: list[set[int]]
) -> tuple[Shard, list[set[int]]]:
    """The normal form, and how large parts of each dim then are."""
    if not -len(shape) <= placement.dim < len(shape):
        raise ValueError(
            f"{placement} shards a dim that a tensor of shape {list(shape)} has not: its dims are "
            f"{-len(shape)} to {len(shape) - 1}"
        )
    dim = placement.dim % len(shape)
    sizes = placement.sizes
    if sizes is not None:
        for extent in extents[dim]:
            if len(sizes) != length or sum(sizes) != extent:
                raise ValueError(
                    f"{placement} must have a size for each of {length} ranks that add up to "
                    f"{extent}, what is to be cut of dim {dim} of shape {list(shape)}"
                )
        if all(list(sizes) == chunk_sizes(extent, length) for extent in extents[dim]):
            sizes = None
    parts = {part for extent in extents[dim] for part in sizes or chunk_sizes(extent, length)}
    return Shard(dim, sizes), [*extents[:dim], parts, *extents[dim + 1 :]]


def _normal_order(
    placements: Sequence[Placement], cutting: Ints, shared: Sequence[int]
) -> Ints | None:
    """The order if it matters: of axes that share a dim, some are not in ascending order."""
    by_dim: dict[int, list[int]] = {}
    for axis in shared:
        placement = placements[axis]
        assert isinstance(placement, Shard)
        by_dim.setdefault(placement.dim, []).append(axis)
    if all(axes == sorted(axes) for axes in by_dim.values()):
        return None
    # Axes that share no dim may cut at any time: the normal form has the others in place.
    order = list(range(len(placements)))
    for axes in by_dim.values():
        for place, axis in zip(sorted(axes), axes, strict=True):
            order[place] = axis
    return tuple(order)
