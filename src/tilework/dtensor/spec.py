"""The layout of a tensor on a mesh. A mesh keeps one instance of each distinct layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import torch

from tilework.comm.contract import ProcessGroup
from tilework.layout import Box, Partial, Placement, Replicate, Shard, Tiling, mesh_tiling
from tilework.layout.internal import (
    Ranges,
    SeveralRangesError,
    Splits,
    all_shard_sizes,
    axes_of,
    box_at,
    boxes_at,
    is_dealt,
    normal_form,
    order_in,
    packed,
    ranges_at,
    shard_at,
    shards,
    size_at,
)
from tilework.mesh import DeviceMesh

Ints = tuple[int, ...]
#: Reductions in which each rank's value has a different gradient.
NONLINEAR = ("min", "max", "product")

#: A mesh drops all specs when it has more than this.
_MOST_SPECS = 1 << 14
#: Up to this many places in memory, elements are compared individually.
_MOST_SEARCHED = 1 << 20


class DTensorSpec:
    """The layout of a tensor: a mesh, a global shape, and a placement for each axis of the mesh.

    Made by :func:`spec_of`. Placements are in their normal form: dims are not negative, and sizes
    are None where the axis splits as ``torch.chunk`` does. ``order`` lists the axes in the order in
    which they shard a dim that several axes share; None means from the first to the last.

    ``strides`` are the strides that the full tensor would have if it were plain. torch decides by
    strides whether a reshape is a view and whether a tensor is contiguous. Strides do not say where
    elements lie: ``==`` ignores them. Specs of one mesh with equal contents and strides are mostly
    the same object.
    """

    __slots__ = (
        *("__dict__", "_hash", "mesh", "op_shardings", "order", "placements", "shape", "size"),
        *("splits", "strides"),
    )

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
        #: The mesh's, which the core reads at each call.
        self.op_shardings = mesh.op_shardings
        #: The shape as torch has it.
        self.size = torch.Size(shape)
        self.strides = row_major(shape)
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
        return spec_of, (self.mesh, self.placements, self.shape, self.order, self.strides)

    @property
    def ndim(self) -> int:
        """The number of the tensor's dims."""
        return len(self.shape)

    def axes_of(self, dim: int) -> Ints:
        """The axes that shard a dim, the outermost first."""
        return axes_of(self.splits[dim])

    @cached_property
    def sharded_axes(self) -> frozenset[int]:
        """The axes along which the ranks have parts of the value."""
        return frozenset(a for a, p in enumerate(self.placements) if isinstance(p, Shard))

    @cached_property
    def partial_axes(self) -> Ints:
        """The axes along which the value is still to be reduced."""
        return tuple(a for a, p in enumerate(self.placements) if isinstance(p, Partial))

    @cached_property
    def partial_group(self) -> ProcessGroup:
        """The group along the axes that are partial. Collective as ``mesh.axes_group``."""
        return self.mesh.axes_group(self.partial_axes)

    @cached_property
    def reduce_op(self) -> str | None:
        """The reduction of a partial value; None if it is not partial."""
        ops = [p.reduce_op for p in self.placements if isinstance(p, Partial)]
        return ops[0] if ops else None

    @cached_property
    def is_replicated(self) -> bool:
        """True if each rank of the mesh has the full value."""
        return all(
            isinstance(placement, Replicate) or length == 1
            for placement, length in zip(self.placements, self.mesh.spec.shape, strict=True)
        )

    @cached_property
    def has_empty_parts(self) -> bool:
        """True if the tensor has elements, but some rank holds none."""
        return 0 not in self.shape and self.has_empty_ranges

    @cached_property
    def has_empty_ranges(self) -> bool:
        """True if a dim has elements, but some rank holds an empty range of it."""
        return any(
            splits and extent and 0 in all_shard_sizes(extent, self.mesh.spec.shape, splits)
            for extent, splits in zip(self.shape, self.splits, strict=True)
        )

    @cached_property
    def takes_part(self) -> bool:
        """True if this rank is in the mesh."""
        return self.mesh.here

    @cached_property
    def is_dealt(self) -> bool:
        """True if ranks hold several regions each, as an axis deals blocks of a dim in turns."""
        return any(map(is_dealt, self.splits))

    @cached_property
    def without_turns(self) -> DTensorSpec:
        """The layout in which axes that deal blocks in turns split as ``torch.chunk`` does."""
        if not self.is_dealt:
            return self
        placements = [Shard(p.dim, p.sizes) if isinstance(p, Shard) else p for p in self.placements]
        return self.with_placements(placements, self.order)

    @cached_property
    def local_boxes(self) -> tuple[Box, ...]:
        """The regions of the tensor that this rank holds; none outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        return () if coordinate is None else self.boxes_at(coordinate)

    def boxes_at(self, coordinate: Sequence[int]) -> tuple[Box, ...]:
        """The regions of the tensor that the rank at a mesh coordinate holds."""
        return boxes_at(self.shape, self.mesh.spec.shape, self.splits, coordinate)

    @cached_property
    def local_places(self) -> tuple[Box, ...]:
        """The place of each of the ``local_boxes`` in the local tensor."""
        return tuple(packed(self.local_boxes))

    def tiles_of(self, local: torch.Tensor) -> list[torch.Tensor]:
        """The parts of this rank's local tensor that are the ``local_boxes``, as views."""
        if not self.is_dealt:
            return [local] if self.takes_part else []
        return [local[place.slices] for place in self.local_places]

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """The part of the full tensor that this rank, in the mesh, holds. Local; differentiable."""
        for dim, splits in enumerate(self.splits):
            if splits:
                views = [full.narrow(dim, *span) for span in self.local_ranges(dim)]
                full = views[0] if len(views) == 1 else torch.cat(views, dim)
        return full

    @cached_property
    def local_box(self) -> Box:
        """This rank's only region of the tensor, or SeveralRangesError; empty outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return Box((0,) * self.ndim, (0,) * self.ndim)
        return self.box_at(coordinate)

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """The only region of the rank at a mesh coordinate, or SeveralRangesError."""
        return box_at(self.shape, self.mesh.spec.shape, self.splits, coordinate)

    def local_range(self, dim: int) -> tuple[int, int]:
        """This rank's only range of a dim, or SeveralRangesError; empty outside the mesh."""
        if is_dealt(self.splits[dim]):
            raise SeveralRangesError(self.splits[dim])
        return next(iter(self.local_ranges(dim)), (0, 0))

    def range_at(self, dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """The only range of a dim of the rank at a mesh coordinate, or SeveralRangesError."""
        return shard_at(self.shape[dim], self.mesh.spec.shape, self.splits[dim], coordinate)

    def local_ranges(self, dim: int) -> Ranges:
        """Offset and size of the ranges of a dim that this rank holds; none outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return ()
        return ranges_at(self.shape[dim], self.mesh.spec.shape, self.splits[dim], coordinate)

    def local_indices(self, dim: int) -> torch.Tensor:
        """The indices in the full dim of this rank's elements."""
        ranges = [torch.arange(start, start + size) for start, size in self.local_ranges(dim)]
        return torch.cat(ranges) if ranges else torch.arange(0)

    def sizes_at(self, coordinate: Sequence[int]) -> Ints:
        """The shape of the local tensor of the rank at a mesh coordinate."""
        lengths = self.mesh.spec.shape
        return tuple([
            size_at(extent, lengths, splits, coordinate) if splits else extent
            for extent, splits in zip(self.shape, self.splits, strict=True)
        ])  # fmt: skip

    def shards_of(self, dim: int) -> list[tuple[int, int]]:
        """Offset and size of each shard of a dim, in order, or SeveralRangesError."""
        return list(
            zip(*shards(self.shape[dim], self.mesh.spec.shape, self.splits[dim]), strict=True)
        )

    @cached_property
    def local_shape(self) -> torch.Size:
        """The shape of the local tensor; ``[0]`` outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        return torch.Size((0,) if coordinate is None else self.sizes_at(coordinate))

    def is_first(self, axes: Sequence[int]) -> bool:
        """True if this rank is the first along all of these axes; False outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        return coordinate is not None and not any(coordinate[axis] for axis in axes)

    @cached_property
    def tiling(self) -> Tiling:
        """The boxes and the global ranks that hold them."""
        return mesh_tiling(self.shape, self.mesh.spec.nested(), self.placements, order=self.order)

    @cached_property
    def dual(self) -> DTensorSpec:
        """The layout of the gradient of a tensor in this layout: replicated where it is partial."""
        if not self.partial_axes:
            return self
        return self.with_placements(
            [Replicate() if isinstance(p, Partial) else p for p in self.placements], self.order
        )

    @cached_property
    def grad_spec(self) -> DTensorSpec:
        """The layout in which a user sees the gradient: replicated where this is a partial sum.

        With another reduction, each rank has the gradient of the value that the rank holds. The
        gradients of all ranks add up to the gradient of the reduced value: a partial sum.

        Raises:
            NotImplementedError: This is a partial product, whose gradient is not that sum.
        """
        if self.reduce_op in (None, "sum"):
            return self.dual
        if self.reduce_op == "product":
            raise NotImplementedError(
                f"the gradient of a tensor that is a partial product ({list(self.placements)}) "
                f"cannot be seen: redistribute() the tensor first, and take the result's gradient"
            )
        return self.with_placements(
            [Partial() if isinstance(p, Partial) else p for p in self.placements], self.order
        )

    @cached_property
    def replicated(self) -> DTensorSpec:
        """The same mesh and shape, with the full value on each rank."""
        return self.with_placements([Replicate()] * len(self.placements))

    def with_placements(
        self, placements: Sequence[Placement], order: Sequence[int] | None = None
    ) -> DTensorSpec:
        """The same mesh, shape and strides, with other placements."""
        return spec_of(self.mesh, placements, self.shape, order, self.strides)

    def as_partial(self, axes: Ints) -> DTensorSpec:
        """The layout of a gradient that is still to be summed along ``axes``."""
        placements = list(self.placements)
        for axis in axes:
            placements[axis] = Partial()
        return self.with_placements(placements, self.order)

    @cached_property
    def repeats(self) -> bool:
        """True if elements along a dim share a place in memory, as in an expanded dim."""
        return 0 not in self.shape and any(
            size > 1 and not stride for size, stride in zip(self.shape, self.strides, strict=True)
        )

    @cached_property
    def overlaps(self) -> bool:
        """True if several elements share a place in memory, as in an unfolded dim."""
        return self.repeats or has_overlap(self.shape, self.strides)

    @cached_property
    def digest(self) -> int:
        """A hash that is the same on all ranks, in all processes."""
        mesh = self.mesh.spec
        facts = (self.placements, self.shape, self.order, mesh.shape, mesh.ranks)
        return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little") >> 2

    @cached_property
    def redistributions(self) -> dict[Any, Any]:
        """The prepared redistributions from this layout, by target and dtype."""
        plain = self.with_strides(row_major(self.shape))
        return {} if plain is self else plain.redistributions

    @cached_property
    def _by_strides(self) -> dict[Ints, DTensorSpec]:
        """Variants of this layout by strides. All variants share this dict."""
        return {self.strides: self}

    def with_strides(self, strides: Sequence[int]) -> DTensorSpec:
        """The same layout of a tensor that has other strides in memory."""
        strides = tuple(strides)
        if strides == self.strides:
            return self
        spec = self._by_strides.get(strides)
        if spec is None:
            spec = self.copy()
            spec.strides = strides
            spec = self._by_strides.setdefault(strides, spec)
        return spec

    def copy(self) -> DTensorSpec:
        """An equal layout in a new object, which a tensor gets with other data or other dims."""
        spec = DTensorSpec(self.mesh, self.placements, self.shape, self.order, self.splits)
        spec.strides, spec._by_strides = self.strides, self._by_strides
        return spec

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """True if the full tensor is contiguous, in torch's sense."""
        known = self._contiguous.get(memory_format)
        if known is None:
            known = self._contiguous[memory_format] = self.on_meta(torch.float32).is_contiguous(
                memory_format=memory_format
            )
        return known

    @cached_property
    def _contiguous(self) -> dict[torch.memory_format, bool]:
        return {}

    def on_meta(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without memory, of this shape and these strides."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device="meta")

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * itemsize


def spec_of(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    order: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> DTensorSpec:
    """The spec with these contents. Local; not collective.

    Args:
        order: The axes in the order in which they shard; None: from the first to the last.
        strides: The strides of the full tensor; None: it is contiguous.

    Raises:
        ValueError: Placements or order do not fit the mesh or the shape.
        TypeError: An entry of ``placements`` is not a placement.
    """
    if order is not None and order.__class__ is not tuple:
        order = order_in(order)
    key = (tuple(placements), tuple(shape), order)
    known = mesh.specs
    spec: DTensorSpec | None = known.get(key)
    if spec is None:
        spec = _new_spec(mesh, *key)
        if len(known) >= _MOST_SPECS:
            known.clear()
        # The normal form and what was written are the same spec.
        spec = known.setdefault((spec.placements, spec.shape, spec.order), spec)
        known[key] = spec
    return spec if strides is None else spec.with_strides(strides)


@lru_cache(maxsize=1 << 12)
def row_major(shape: Ints) -> Ints:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=1 << 12)
def has_overlap(shape: Ints, strides: Ints) -> bool:
    """True if two elements of a tensor of these strides lie at one place in memory.

    With too many elements to compare, the answer is True wherever an overlap is possible.

    Example:
        >>> has_overlap((3, 2), (1, 1)), has_overlap((3, 2), (2, 1)), has_overlap((3, 2), (2, 3))
        (True, False, False)
    """
    if 0 in shape:
        return False
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    reach = 0  # of the dims so far
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if math.prod(shape) > _MOST_SEARCHED:
        return True
    places = torch.zeros((), dtype=torch.int64)
    for stride, size in dims:
        places = places.unsqueeze(-1) + stride * torch.arange(size)
    return len(set(places.flatten().tolist())) < places.numel()


def _new_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Ints, order: Ints | None
) -> DTensorSpec:
    shape = tuple(map(int, shape))
    layout, splits = normal_form(shape, mesh.spec.shape, placements, order)
    return DTensorSpec(mesh, layout.placements, shape, layout.order, splits)


def without_sizes(placement: Placement) -> Placement:
    """The placement, without the sizes of shards."""
    if not isinstance(placement, Shard):
        return placement
    return Shard(placement.dim, turns=placement.turns)
