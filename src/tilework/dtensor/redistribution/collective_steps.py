"""Steps of a redistribution on this rank's local tensor: each is prepared once, and then run.

Functional collectives (``comm.functional.kinds``) divide one dim in the order of ranks, and check
this at each call. A step divides by boxes: ranks may hold a dim's shards in any order, results are
contiguous for any dim, and everything is prepared before the first run. Steps therefore share only
the start of a collective (``ProcessGroup.collective``) with functional collectives, and not the
division of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.backends.internal import backend_for
from tilework.comm.contract import AnyReduceOp, ProcessGroup, RedOpType, Work, check_reduction
from tilework.comm.operations.internal import LARGE_BYTES, empty_tensor, identity_element, run_plan
from tilework.dtensor.spec import DTensorSpec
from tilework.layout import Box, Partial, Replicate, Shard, Step, Tiling, mesh_tiling, plan
from tilework.layout.internal import packed, ranges_at

#: Runs a step on a local tensor. The Work is None if the step is done. With ``async_op`` the last
#: collective may still be in flight, but the local tensor is not read after the return.
RunStep = Callable[[Tensor, bool], tuple[Tensor, Work | None]]

#: The steps that communicate nothing.
LOCAL_STEPS = ("slice", "fill")

#: Reductions in which every rank may hold the full value.
_IDEMPOTENT = ("avg", "min", "max", "band", "bor")


def prepare_step(
    step: Step, source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype, last: bool
) -> RunStep:
    """A step from one layout to another, ready to run on local tensors of a dtype.

    Collective over the ranks of the step's group if the group is not made yet. After the last step
    the user gets the result, which then must not share memory with the local tensor before.
    """
    if step.kind == "slice":
        return _slice(step, source, target, last)
    if step.kind == "fill":
        return _fill(step, target, dtype)
    group = source.mesh.axes_group(step.axes)
    if step.kind in ("all_reduce", "reduce_scatter"):
        op = RedOpType(source.reduce_op)
        check_reduction(op, dtype)
        if not backend_for(group, source.mesh.device_type).reduces(op, dtype):
            return _plan(step, source, target, group)
        if step.kind == "all_reduce":
            return _all_reduce(group, op)
    if step.kind == "plan" or source.is_dealt or target.is_dealt:
        return _plan(step, source, target, group)
    ends = _Ends(step, source, target, group, dtype)
    if step.kind == "reduce_scatter":
        return _reduce_scatter(ends, RedOpType(source.reduce_op))
    return _all_gather(ends) if step.kind == "all_gather" else _all_to_all(ends)


# -- without communication -------------------------------------------------------------------


def _slice(step: Step, source: DTensorSpec, target: DTensorSpec, last: bool) -> RunStep:
    (axis,) = step.axes
    dim, mesh = _dim(target, axis), source.mesh
    split = next(split for split in target.splits[dim] if split[0] == axis)
    here = mesh.get_coordinate() or ()
    ranges = ranges_at(source.local_shape[dim], mesh.spec.shape, (split,), here)

    def run(x: Tensor, async_op: bool) -> tuple[Tensor, None]:
        views = [x.narrow(dim, start, size) for start, size in ranges]
        if len(views) > 1:
            return torch.cat(views, dim), None
        (x,) = views
        # A view would keep all of the source in memory, and writes to the view would reach it.
        return (_copy(x) if last else x), None

    return run


def _fill(step: Step, target: DTensorSpec, dtype: torch.dtype) -> RunStep:
    op = str(target.reduce_op)
    # All ranks ask, even those that need no identity element: without one, all ranks must raise.
    identity = None if op in _IDEMPOTENT else identity_element(RedOpType(op), dtype)
    if target.is_first(step.axes):
        identity = None

    def run(x: Tensor, async_op: bool) -> tuple[Tensor, None]:
        if identity is None:
            return _copy(x), None
        return torch.full_like(x, identity, memory_format=torch.contiguous_format), None

    return run


# -- collectives -----------------------------------------------------------------------------


class _Ends:
    """Both layouts of a collective step: the boxes of all ranks, before and afterwards."""

    def __init__(
        self,
        step: Step,
        source: DTensorSpec,
        target: DTensorSpec,
        group: ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        self.step, self.group, self.dtype = step, group, dtype
        self.source, self.target = source, target
        #: The dims that the step's axes shard before and afterwards.
        self.source_dim, self.target_dim = (_dim(spec, step.axes[0]) for spec in (source, target))
        self.shape = target.local_shape
        self.large = target.local_box.volume * dtype.itemsize >= LARGE_BYTES
        self.source_box, self.target_box = source.local_box, target.local_box
        mesh = source.mesh.spec
        coordinates = [mesh.coordinate(rank) or () for rank in group.global_ranks]
        self.source_boxes = [source.box_at(coordinate) for coordinate in coordinates]
        self.target_boxes = [target.box_at(coordinate) for coordinate in coordinates]

    def empty(self, like: Tensor) -> Tensor:
        """Memory for this rank's result."""
        if self.large:
            return empty_tensor(self.shape, self.dtype, like.device)
        return torch.empty(self.shape, dtype=self.dtype, device=like.device)


def _dim(spec: DTensorSpec, axis: int) -> int:
    placement = spec.placements[axis]
    return placement.dim if isinstance(placement, Shard) else 0


class _Division:
    """The division of a local tensor along one dim among the group's ranks."""

    def __init__(self, local: Box, boxes: Sequence[Box], dim: int) -> None:
        self.dim = dim
        offsets = [box.offsets[self.dim] for box in boxes]
        sizes = [box.sizes[self.dim] for box in boxes]
        order = sorted(range(len(boxes)), key=lambda i: (offsets[i], sizes[i]))
        self.sizes = [sizes[i] for i in order]
        places = [order.index(i) for i in range(len(boxes))]
        #: The place of each rank's region; None if the regions are in the order of ranks.
        self.places = None if places == sorted(places) else places
        self.even = len(set(sizes)) == 1
        outer = local.sizes[:dim]
        #: True if the regions of a contiguous tensor are equal memory, in the order of ranks.
        self.in_memory_order = self.even and self.places is None and outer == (1,) * dim

    def __call__(self, tensor: Tensor) -> list[Tensor]:
        """The regions of ``tensor`` in the order of ranks, as views."""
        views = tensor.split_with_sizes(self.sizes, self.dim)
        return list(views) if self.places is None else [views[i] for i in self.places]


def _overlaps(local: Box, boxes: Sequence[Box]) -> list[Box]:
    """Each box's overlap with the local tensor's box along the sharded dims; it may be empty."""
    overlaps = []
    for box in boxes:
        low = tuple(map(max, local.offsets, box.offsets))
        high = tuple(map(min, local.ends, box.ends))
        sizes = tuple([max(0, end - start) for start, end in zip(low, high, strict=True)])
        overlaps.append(Box(low, sizes))
    return overlaps


def _all_gather(ends: _Ends) -> RunStep:
    division, group = _Division(ends.target_box, ends.source_boxes, ends.source_dim), ends.group
    if division.in_memory_order:

        def run(x: Tensor, async_op: bool) -> tuple[Tensor, Work | None]:
            out = ends.empty(x)
            source = _stable(x, async_op)
            return out, group.collective("all_gather_into_tensor", source, out, async_op=async_op)

        return run
    if not division.even and not group.uneven_sizes:
        return _exchange(ends, None, division)

    def run_regions(x: Tensor, async_op: bool) -> tuple[Tensor, Work | None]:
        out = ends.empty(x)
        source = _stable(x, async_op)
        return out, group.collective("all_gather", source, division(out), async_op=async_op)

    return run_regions


def _all_to_all(ends: _Ends) -> RunStep:
    sent = _Division(
        ends.source_box, _overlaps(ends.source_box, ends.target_boxes), ends.target_dim
    )
    received = _Division(
        ends.target_box, _overlaps(ends.target_box, ends.source_boxes), ends.source_dim
    )
    return _exchange(ends, sent, received)


def _exchange(ends: _Ends, sent: _Division | None, received: _Division) -> RunStep:
    """A step by all_to_all, from the regions of ``sent`` (None: whole) to those of ``received``."""
    group, size = ends.group, ends.group.size()

    def run(x: Tensor, async_op: bool) -> tuple[Tensor, Work | None]:
        out = ends.empty(x)
        x = _stable(x, async_op)
        inputs = [x] * size if sent is None else sent(x)
        return out, group.collective("all_to_all", inputs, received(out), async_op=async_op)

    return run


def _all_reduce(group: ProcessGroup, op: AnyReduceOp) -> RunStep:
    def run(x: Tensor, async_op: bool) -> tuple[Tensor, Work | None]:
        out = _copy(x)
        return out, group.collective("all_reduce", out, out, op, async_op=async_op)

    return run


def _reduce_scatter(ends: _Ends, op: AnyReduceOp) -> RunStep:
    division, group = _Division(ends.source_box, ends.target_boxes, ends.target_dim), ends.group
    if division.in_memory_order:

        def run(x: Tensor, async_op: bool) -> tuple[Tensor, Work | None]:
            out, x = ends.empty(x), _stable(x, async_op).contiguous()
            return out, group.collective("reduce_scatter_tensor", x, out, op, async_op=async_op)

        return run
    if not division.even and not group.uneven_sizes:
        return _plan(ends.step, ends.source, ends.target, group)

    def run_regions(x: Tensor, async_op: bool) -> tuple[Tensor, Work | None]:
        out = ends.empty(x)
        inputs = [
            _copy(region) if async_op or not region.is_contiguous() else region
            for region in division(x)
        ]
        return out, group.collective("reduce_scatter", inputs, out, op, async_op=async_op)

    return run_regions


def _stable(x: Tensor, async_op: bool) -> Tensor:
    """A tensor that an operation may read; a copy if the program may write to it meanwhile."""
    return _copy(x) if async_op else x


def _copy(x: Tensor) -> Tensor:
    """A contiguous copy; a large copy reuses memory that was written to before."""
    if x.nbytes < LARGE_BYTES:
        return x.clone(memory_format=torch.contiguous_format)
    return empty_tensor(x.shape, x.dtype, x.device).copy_(x)


# -- anything --------------------------------------------------------------------------------


def _plan(step: Step, source: DTensorSpec, target: DTensorSpec, group: ProcessGroup) -> RunStep:
    """A step that runs a transfer plan between the ranks along the step's axes."""
    me = source.mesh.get_rank()
    own_plan = plan(tiling_along(source, step.axes), tiling_along(target, step.axes), me)
    sources, targets = (
        [place.slices for place in packed(each.boxes_of(me))]
        for each in (own_plan.source, own_plan.target)
    )

    def run(x: Tensor, async_op: bool) -> tuple[Tensor, None]:
        tiles = [x[slices] for slices in sources]
        if len(targets) == 1:
            return run_plan(own_plan, tiles, group)[0], None
        out = empty_tensor(target.local_shape, x.dtype, x.device)
        run_plan(own_plan, tiles, group, out=[out[slices] for slices in targets])
        return out, None

    return run


def tiling_along(spec: DTensorSpec, axes: Sequence[int]) -> Tiling:
    """The tiling of what the ranks along some axes, through this rank, have together."""
    here = spec.mesh.spec.through(axes, spec.mesh.get_rank())
    together = _without(spec, axes).local_shape
    order = [axes.index(axis) for axis in spec.order or range(spec.mesh.ndim) if axis in axes]
    placements = [spec.placements[axis] for axis in axes]
    return mesh_tiling(together, here.nested(), placements, order=order)


def _without(spec: DTensorSpec, axes: Sequence[int]) -> DTensorSpec:
    """The layout in which some axes replicate."""
    placements: list[Any] = [
        placement if axis not in axes and isinstance(placement, Shard | Partial) else Replicate()
        for axis, placement in enumerate(spec.placements)
    ]
    return spec.with_placements(placements, spec.order)
