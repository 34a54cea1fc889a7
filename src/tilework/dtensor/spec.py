"""How one tensor lies on a mesh: a value of which each mesh keeps one instance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from tilework.layout import Box, Layout, Partial, Placement, Replicate, Tiling, mesh_tiling
from tilework.layout.sharding import Splits, axes_of, box_at, normal_layout, shards, splits_of
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

    __slots__ = ("__dict__", "_hash", "mesh", "order", "placements", "shape", "size", "splits")

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: Ints,
        order: Ints | None,
        splits: tuple[Splits, ...],
    ) -> None:
        self.mesh, self.placements, self.shape, self.order = mesh, placements, shape, order
        #: The axes that shard each dim, and the sizes of their shards, the outermost first.
        self.splits = splits
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
        """The axes that shard a dim, in the order in which they do."""
        return axes_of(self.splits[dim])

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
        """The region of the tensor that this rank holds; an empty one outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return Box((0,) * self.ndim, (0,) * self.ndim)
        return self.box_at(coordinate)

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """The region of the tensor that the rank at a mesh coordinate holds."""
        return box_at(self.shape, self.mesh.spec.shape, self.splits, coordinate)

    def shards_of(self, dim: int) -> list[tuple[int, int]]:
        """Offset and size of each shard of a dim, in order."""
        return list(
            zip(*shards(self.shape[dim], self.mesh.spec.shape, self.splits[dim]), strict=True)
        )

    @cached_property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's part; ``[0]`` outside the mesh."""
        return torch.Size(self.local_box.sizes if self.takes_part else (0,))

    def is_first(self, axes: Sequence[int]) -> bool:
        """True if this rank is the first along all of these axes; False outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        return coordinate is not None and not any(coordinate[axis] for axis in axes)

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
    def redistributions(self) -> dict[Any, Any]:
        """The redistributions that are prepared from here, by target and dtype."""
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
    spec: DTensorSpec | None = known.get(key)
    if spec is None:
        spec = _new_spec(mesh, *key)
        if len(known) >= _MOST_SPECS:
            known.clear()
        # The normal form and what was written are the same spec.
        spec = known.setdefault((spec.placements, spec.shape, spec.order), spec)
        known[key] = spec
    return spec


def _new_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Ints, order: Ints | None
) -> DTensorSpec:
    shape = tuple(map(int, shape))
    layout = Layout(placements, order)
    splits = splits_of(shape, mesh.spec.shape, layout)
    layout = normal_layout(layout, splits)
    return DTensorSpec(mesh, layout.placements, shape, layout.order, splits)
