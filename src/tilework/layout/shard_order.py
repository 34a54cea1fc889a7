"""Which axes of a mesh cut which dim of a tensor, one on top of the other; and how large parts are.

Only the axis on top of a dim's stack can be taken off by a collective along it: what the ranks
along another axis hold does not lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilework.layout.box import Ints
from tilework.layout.chunking import chunk_sizes, offsets_of
from tilework.layout.placements import Partial, Placement, Replicate, Shard, check_cuts

#: An axis, and the sizes of the parts that it cuts; None: as ``torch.chunk`` cuts.
Cut = tuple[int, Ints | None]
Stack = tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What each axis of a mesh does to a tensor, and in which order axes cut."""

    placements: tuple[Placement, ...]
    order: Ints | None = None
    """None: from the first axis to the last."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """A layout as the search for steps sees it: without axes of length 1, which do nothing."""

    cuts: tuple[Stack, ...]
    """For each dim, what cuts it: the first cuts the whole."""
    partial: Ints
    """The axes along which the value is still to be reduced, ascending."""
    filled: Ints = ()
    """Those along which the target's terms were made, where the source had none or others."""

    def popped(self, dim: int, count: int) -> Stacks:
        """Without the last ``count`` cuts of a dim."""
        return self._with(dim, self.cuts[dim][:-count])

    def pushed(self, dim: int, cuts: Stack) -> Stacks:
        """With these cuts of a dim besides; their axes are not partial afterwards."""
        axes = [axis for axis, _ in cuts]
        return self._with(dim, self.cuts[dim] + cuts).reduced(axes)

    def reduced(self, axes: Sequence[int]) -> Stacks:
        """With nothing left to be reduced along these axes."""
        return Stacks(self.cuts, tuple([axis for axis in self.partial if axis not in axes]))

    def _with(self, dim: int, stack: Stack) -> Stacks:
        return Stacks((*self.cuts[:dim], stack, *self.cuts[dim + 1 :]), self.partial)


def stacks_of(shape: Ints, lengths: Ints, layout: Layout) -> Stacks:
    """A layout's stacks.

    Raises:
        ValueError: The layout does not fit the mesh or the shape.
        TypeError: Something is no placement.
    """
    check_cuts(lengths, layout.placements, layout.order)
    cuts: list[Stack] = [() for _ in shape]
    for axis in range(len(lengths)) if layout.order is None else layout.order:
        placement = layout.placements[axis]
        if not isinstance(placement, Shard):
            continue
        if not -len(shape) <= placement.dim < len(shape):
            raise ValueError(f"a tensor of shape {shape} has no dim {placement.dim}")
        dim = placement.dim % len(shape)
        cut = _normal(axis, placement, extents(shape[dim], lengths, cuts[dim]), lengths[axis])
        if lengths[axis] > 1:
            cuts[dim] = (*cuts[dim], cut)
    partial = [
        axis
        for axis, placement in enumerate(layout.placements)
        if isinstance(placement, Partial) and lengths[axis] > 1
    ]
    return Stacks(tuple(cuts), tuple(partial))


def _normal(axis: int, placement: Shard, found: Ints, length: int) -> Cut:
    sizes = placement.sizes
    if sizes is None:
        return axis, None
    for extent in found:
        if len(sizes) != length or sum(sizes) != extent:
            raise ValueError(
                f"{placement} does not cut an extent of {extent} into {length} parts, one for each "
                f"rank along axis {axis}"
            )
    same = all(list(sizes) == chunk_sizes(extent, length) for extent in found)
    return axis, None if same else sizes


def layout_of(stacks: Stacks, lengths: Ints, reduce_op: str) -> Layout:
    """The layout of these stacks; axes of length 1 replicate."""
    placements: list[Placement] = [Replicate()] * len(lengths)
    order = list(range(len(lengths)))
    for dim, stack in enumerate(stacks.cuts):
        axes = [axis for axis, _ in stack]
        for place, (axis, sizes) in zip(sorted(axes), stack, strict=True):
            placements[axis] = Shard(dim, sizes)
            order[place] = axis
    for axis in stacks.partial:
        placements[axis] = Partial(reduce_op)
    in_order = all(stack == tuple(sorted(stack, key=lambda cut: cut[0])) for stack in stacks.cuts)
    return Layout(tuple(placements), None if in_order else tuple(order))


def parts(extent: int, length: int, sizes: Ints | None) -> Ints | None:
    """The sizes of the parts of an extent; None if the given ones do not fit it."""
    if sizes is None:
        return tuple(chunk_sizes(extent, length))
    return sizes if sum(sizes) == extent else None


@lru_cache(maxsize=4096)
def extents(extent: int, lengths: Ints, stack: Stack) -> Ints:
    """The sizes that parts of a dim have, each once; none where sizes do not fit."""
    found = {extent}
    for axis, sizes in stack:
        cut = [parts(one, lengths[axis], sizes) for one in found]
        if None in cut:
            return ()
        found = {part for some in cut for part in some or ()}
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def block_parts(extent: int, lengths: Ints, cuts: Stack) -> tuple[Ints, Ints]:
    """Where the parts that several cuts make of an extent start, and their sizes.

    One for each combination of coordinates along the axes; the last axis runs fastest.
    """
    spans = [(0, extent)]
    for axis, sizes in cuts:
        cut: list[tuple[int, int]] = []
        for start, size in spans:
            pieces = parts(size, lengths[axis], sizes) or ()
            cut += [
                (start + at, piece) for at, piece in zip(offsets_of(pieces), pieces, strict=True)
            ]
        spans = cut
    return tuple([start for start, _ in spans]), tuple([size for _, size in spans])


def axes_of(cuts: Stack) -> Ints:
    """The axes that cut."""
    return tuple([axis for axis, _ in cuts])


def places(axes: Sequence[int], others: Sequence[int], lengths: Ints) -> list[int]:
    """For each combination of coordinates along ``axes``, which one it is along ``others``.

    Combinations are numbered from 0 on; the last axis runs fastest. The others are among the axes.
    """
    strides, stride = dict.fromkeys(axes, 0), 1
    for axis in reversed(others):
        strides[axis] = stride
        stride *= lengths[axis]
    found = [0]
    for axis in axes:
        steps = [strides[axis] * i for i in range(lengths[axis])]
        found = [at + step for at in found for step in steps]
    return found


def most_moved(shape: Ints, lengths: Ints, source: Stacks, target: Stacks) -> int:
    """The most elements that a rank sends or receives so that all get what they lack.

    A rank lacks what is in its part of ``target``, and not in that of ``source``. Ranks with the
    same part share the sending of it.
    """
    before, after = ({a for cuts in one.cuts for a in axes_of(cuts)} for one in (source, target))
    readers = math.prod([lengths[axis] for axis in before - after])
    owners = math.prod([lengths[axis] for axis in after - before])
    cutting = sorted(before | after)
    columns = []
    for dim, extent in enumerate(shape):
        ends = source.cuts[dim], target.cuts[dim]
        axes = sorted({axis for cuts in ends for axis in axes_of(cuts)})
        table = _extents_met(extent, lengths, axes, *ends)
        columns.append([table[place] for place in places(cutting, axes, lengths)])
    most = 0
    for met in set(zip(*columns, strict=True)):
        had, wanted, both = (math.prod(numbers) for numbers in zip(*met, strict=True))
        most = max(most, wanted - both, -(-had * readers // owners) - both)
    return most


def _extents_met(
    extent: int, lengths: Ints, axes: Sequence[int], source: Stack, target: Stack
) -> list[Ints]:
    """For each combination of coordinates the part's size before, afterwards, and of what stays."""
    found: list[Ints] = []
    (starts, sizes), (starts_after, sizes_after) = (
        block_parts(extent, lengths, cuts) for cuts in (source, target)
    )
    here, there = (places(axes, axes_of(cuts), lengths) for cuts in (source, target))
    for i, j in zip(here, there, strict=True):
        low, high = max(starts[i], starts_after[j]), starts[i] + sizes[i]
        high = min(high, starts_after[j] + sizes_after[j])
        found.append((sizes[i], sizes_after[j], max(0, high - low)))
    return found


def most_elements(shape: Ints, lengths: Ints, stacks: Stacks, but: Sequence[int] = ()) -> int:
    """How many elements the largest part has; with an extent of 1 in the dims ``but``."""
    return math.prod(
        [
            max(extents(extent, lengths, stack), default=0)
            for dim, (extent, stack) in enumerate(zip(shape, stacks.cuts, strict=True))
            if dim not in but
        ]
    )
