"""Steps of a redistribution on this rank's part: each is prepared once, and then run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import Options, ProcessGroup, Work
from tilework.comm.dispatch import DispatchGroup
from tilework.comm.reduce_op import AnyReduceOp, RedOpType, check_reduction
from tilework.comm.transfer.identity_element import neutral_element
from tilework.comm.transfer.large_buffers import LARGE_BYTES, fresh
from tilework.comm.transfer.run import run_plan
from tilework.dtensor.spec import DTensorSpec
from tilework.layout import Box, Partial, Replicate, Shard, Step, Tiling, mesh_tiling, plan

#: Runs a step; the Work is None if it is done. With ``later``, the part given is read after the
#: return.
Move = Callable[[Tensor, bool], tuple[Tensor, Work | None]]

#: The steps that communicate nothing.
FREE = ("slice", "fill")

#: Reductions of which every rank may bring the whole value.
_KEEPS_VALUE = ("avg", "min", "max", "band", "bor")


def prepared(
    step: Step, source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype, last: bool
) -> Move:
    """A step from one layout to another, for parts of a dtype.

    Collective over the ranks of the step's group, where that is not made yet.

    Args:
        step: What is to be done.
        source: The layout before it.
        target: The layout afterwards.
        dtype: The parts'.
        last: Whether the result is what the user gets: then it is a tensor of its own.
    """
    if step.kind == "slice":
        return _slice(source, target, last)
    if step.kind == "fill":
        return _fill(step, target, dtype)
    group = source.mesh.axes_group(step.axes)
    if step.kind == "plan":
        return _plan(step, source, target, group)
    end = _Ends(step, source, target, group, dtype)
    if step.kind in ("all_reduce", "reduce_scatter"):
        op = RedOpType(source.reduce_op)
        check_reduction(op, dtype)
        if not _reduces(group, op, dtype, source.mesh.device_type):
            return _plan(step, source, target, group)
        return _all_reduce(end, op) if step.kind == "all_reduce" else _reduce_scatter(end, op)
    return _all_gather(end) if step.kind == "all_gather" else _all_to_all(end)


# -- without communication -------------------------------------------------------------------


def _slice(source: DTensorSpec, target: DTensorSpec, last: bool) -> Move:
    here = target.local_box.slices
    base = source.local_box.offsets
    part = tuple([slice(s.start - o, s.stop - o) for s, o in zip(here, base, strict=True)])

    def move(x: Tensor, later: bool) -> tuple[Tensor, None]:
        x = x[part]
        # As a view it would keep the whole in memory, and writes to it would reach the whole.
        return (_copy(x) if last else x), None

    return move


def _fill(step: Step, target: DTensorSpec, dtype: torch.dtype) -> Move:
    op = str(target.reduce_op)
    brings = op in _KEEPS_VALUE or is_first(target, step.axes)
    neutral = None if brings else neutral_element(RedOpType(op), dtype)

    def move(x: Tensor, later: bool) -> tuple[Tensor, None]:
        if neutral is None:
            return _copy(x), None
        return torch.full_like(x, neutral, memory_format=torch.contiguous_format), None

    return move


def is_first(spec: DTensorSpec, axes: Sequence[int]) -> bool:
    """Whether this rank is the first along all of these axes."""
    coordinate = spec.mesh.get_coordinate()
    return coordinate is not None and not any(coordinate[axis] for axis in axes)


# -- collectives -----------------------------------------------------------------------------


class _Ends:
    """What a collective's move needs of both layouts."""

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
        #: The dims that the step's axes cut before and afterwards.
        self.from_dim, self.to_dim = (_dim(spec, step.axes[0]) for spec in (source, target))
        self.run = group.direct.run
        self.shape = target.local_shape
        self.large = target.local_box.volume * dtype.itemsize >= LARGE_BYTES
        self.had, self.gets = source.local_box, target.local_box
        spec = source.mesh.spec
        places = [spec.coordinate(rank) or () for rank in group.global_ranks]
        #: Each member's box before and afterwards.
        self.before = [source.box_at(place) for place in places]
        self.after = [target.box_at(place) for place in places]

    def empty(self, like: Tensor) -> Tensor:
        """Memory for this rank's part."""
        if self.large:
            return fresh(self.shape, self.dtype, like.device)
        return torch.empty(self.shape, dtype=self.dtype, device=like.device)


def _dim(spec: DTensorSpec, axis: int) -> int:
    placement = spec.placements[axis]
    return placement.dim if isinstance(placement, Shard) else 0


class _Cut:
    """How a part is divided among the group's ranks, along one dim."""

    def __init__(self, part: Box, boxes: Sequence[Box], dim: int) -> None:
        self.dim = dim
        starts = [box.offsets[self.dim] for box in boxes]
        sizes = [box.sizes[self.dim] for box in boxes]
        order = sorted(range(len(boxes)), key=lambda i: (starts[i], sizes[i]))
        self.sizes = [sizes[i] for i in order]
        places = [order.index(i) for i in range(len(boxes))]
        #: Where each rank's is; None if they follow each other.
        self.places = None if places == sorted(places) else places
        self.even = len(set(sizes)) == 1
        #: Whether in a contiguous part equal memory for each follows the other.
        outer = part.sizes[:dim]
        self.in_a_row = self.even and self.places is None and outer == (1,) * dim

    def __call__(self, tensor: Tensor) -> Sequence[Tensor]:
        found = tensor.split_with_sizes(self.sizes, self.dim)
        return list(found) if self.places is None else [found[i] for i in self.places]


def _common(part: Box, boxes: Sequence[Box]) -> list[Box]:
    """What each box shares with a part along the dims that they cut; maybe nothing."""
    found = []
    for box in boxes:
        low = tuple(map(max, part.offsets, box.offsets))
        high = tuple(map(min, part.ends, box.ends))
        sizes = tuple([max(0, h - at) for at, h in zip(low, high, strict=True)])
        found.append(Box(low, sizes))
    return found


def _all_gather(ends: _Ends) -> Move:
    cut, group, run = _Cut(ends.gets, ends.before, ends.from_dim), ends.group, ends.run
    if cut.in_a_row:

        def move(x: Tensor, later: bool) -> tuple[Tensor, Work | None]:
            out = ends.empty(x)
            if not later and run("all_gather_into_tensor", x, out):
                return out, None
            return out, group.allgather_into_tensor(out, _kept(x, later), Options(asyncOp=later))

        return move
    if not cut.even and not group.uneven_sizes:
        return _exchange(ends, None, cut)

    def move_parts(x: Tensor, later: bool) -> tuple[Tensor, Work | None]:
        out = ends.empty(x)
        parts = cut(out)
        if not later and run("all_gather", x, parts):
            return out, None
        return out, group.allgather([list(parts)], [_kept(x, later)], Options(asyncOp=later))

    return move_parts


def _all_to_all(ends: _Ends) -> Move:
    sent = _Cut(ends.had, _common(ends.had, ends.after), ends.to_dim)
    received = _Cut(ends.gets, _common(ends.gets, ends.before), ends.from_dim)
    return _exchange(ends, sent, received)


def _exchange(ends: _Ends, sent: _Cut | None, received: _Cut) -> Move:
    """An all_to_all of the parts of what there is; of all of it to each rank without ``sent``."""
    group, run, size = ends.group, ends.run, ends.group.size()

    def move(x: Tensor, later: bool) -> tuple[Tensor, Work | None]:
        out = ends.empty(x)
        x = _kept(x, later)
        inputs = [x] * size if sent is None else sent(x)
        outputs = received(out)
        if not later and run("all_to_all", inputs, outputs):
            return out, None
        return out, group.alltoall(list(outputs), list(inputs), Options(asyncOp=later))

    return move


def _all_reduce(ends: _Ends, op: AnyReduceOp) -> Move:
    group, run = ends.group, ends.run

    def move(x: Tensor, later: bool) -> tuple[Tensor, Work | None]:
        out = _copy(x)
        if not later and run("all_reduce", out, out, op):
            return out, None
        return out, group.allreduce([out], Options(op, asyncOp=later))

    return move


def _reduce_scatter(ends: _Ends, op: AnyReduceOp) -> Move:
    cut, group, run = _Cut(ends.had, ends.after, ends.to_dim), ends.group, ends.run
    if cut.in_a_row:

        def move(x: Tensor, later: bool) -> tuple[Tensor, Work | None]:
            out, x = ends.empty(x), _kept(x, later).contiguous()
            if not later and run("reduce_scatter_tensor", x, out, op):
                return out, None
            return out, group.reduce_scatter_tensor(out, x, Options(op, asyncOp=later))

        return move
    if not cut.even and not group.uneven_sizes:
        return _plan(ends.step, ends.source, ends.target, group)

    def move_parts(x: Tensor, later: bool) -> tuple[Tensor, Work | None]:
        out = ends.empty(x)
        parts = [_copy(part) if later or not part.is_contiguous() else part for part in cut(x)]
        if not later and run("reduce_scatter", parts, out, op):
            return out, None
        return out, group.reduce_scatter([out], [parts], Options(op, asyncOp=later))

    return move_parts


def _kept(x: Tensor, later: bool) -> Tensor:
    """What the operation may read; a copy if others may write to it meanwhile."""
    return _copy(x) if later else x


def _copy(x: Tensor) -> Tensor:
    """A contiguous copy; a large one where memory was written to before."""
    if x.nbytes < LARGE_BYTES:
        return x.clone(memory_format=torch.contiguous_format)
    return fresh(x.shape, x.dtype, x.device).copy_(x)


def _reduces(group: ProcessGroup, op: AnyReduceOp, dtype: torch.dtype, device: str) -> bool:
    if isinstance(group, DispatchGroup):
        group = group.by_device.get(device, group)
    return group.reduces(op, dtype)


# -- anything --------------------------------------------------------------------------------


def _plan(step: Step, source: DTensorSpec, target: DTensorSpec, group: ProcessGroup) -> Move:
    """The plan of the ranks along the step's axes, within the part that they have together."""
    mesh, axes = source.mesh, step.axes
    me = mesh.get_rank()
    here = mesh.spec.through(axes, me)
    together = _without(source, axes).local_box.sizes

    def tiling(spec: DTensorSpec) -> Tiling:
        order = [axes.index(axis) for axis in spec.order or range(mesh.ndim) if axis in axes]
        placements = [spec.placements[axis] for axis in axes]
        return mesh_tiling(together, here.nested(), placements, order=order)

    mine = plan(tiling(source), tiling(target), me)

    def move(x: Tensor, later: bool) -> tuple[Tensor, None]:
        return run_plan(mine, [x], group)[0], None

    return move


def _without(spec: DTensorSpec, axes: Sequence[int]) -> DTensorSpec:
    """The layout without what some axes do."""
    kept: list[Any] = [
        one if axis not in axes and isinstance(one, Shard | Partial) else Replicate()
        for axis, one in enumerate(spec.placements)
    ]
    return spec.with_placements(kept, spec.order)
