"""States of the search for steps: layouts in reduced form, and the number of elements that move.

Only the innermost splits of a dim can be undone by a collective along their axes: the parts on the
ranks along another axis are not adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilework.layout.box import Ints
from tilework.layout.placements import Layout, Partial, Placement, Replicate, Shard
from tilework.layout.sharding import (
    Splits,
    axes_of,
    combination_index,
    normal_order,
    shard_extents,
    shards,
    splits_of,
)

#: :func:`shards`, cached, as a search asks for the same few again and again.
shards_once = lru_cache(maxsize=4096)(shards)


@dataclass(frozen=True, slots=True)
class ShardState:
    """A node of the search for steps: a layout without axes of length 1, which split nothing."""

    splits: tuple[Splits, ...]
    """The splits of each dim, the outermost first."""
    partial: Ints
    """The axes along which the value is not reduced yet, ascending."""
    filled: Ints = ()
    """The axes along which the target is partial in another way than the source. Empty in every
    state but the target's."""

    def gathered(self, dim: int, count: int) -> ShardState:
        """The state without the innermost ``count`` splits of a dim."""
        return self._with(dim, self.splits[dim][:-count])

    def sharded(self, dim: int, splits: Splits) -> ShardState:
        """The state with additional splits of a dim, whose axes are no longer partial."""
        return self._with(dim, self.splits[dim] + splits).reduced(axes_of(splits))

    def reduced(self, axes: Sequence[int]) -> ShardState:
        """The state with nothing left to be reduced along these axes."""
        return ShardState(self.splits, tuple([axis for axis in self.partial if axis not in axes]))

    def _with(self, dim: int, splits: Splits) -> ShardState:
        return ShardState((*self.splits[:dim], splits, *self.splits[dim + 1 :]), self.partial)


def state_of(shape: Ints, lengths: Ints, layout: Layout) -> ShardState:
    """The layout as a node of the search for steps: axes of length 1 are dropped.

    Raises:
        ValueError: The layout does not fit the mesh or the shape.
        TypeError: Something is not a placement.
    """
    splits = splits_of(shape, lengths, layout)
    if 1 in lengths:
        splits = tuple([tuple([s for s in of_dim if lengths[s[0]] > 1]) for of_dim in splits])
    partial = [
        axis
        for axis, placement in enumerate(layout.placements)
        if isinstance(placement, Partial) and lengths[axis] > 1
    ]
    return ShardState(splits, tuple(partial))


def layout_of(state: ShardState, lengths: Ints, reduce_op: str) -> Layout:
    """The layout of a state; axes of length 1 replicate."""
    placements: list[Placement] = [Replicate()] * len(lengths)
    for dim, splits in enumerate(state.splits):
        for axis, sizes in splits:
            placements[axis] = Shard(dim, sizes)
    for axis in state.partial:
        placements[axis] = Partial(reduce_op)
    return Layout(tuple(placements), normal_order(len(lengths), state.splits))


def most_elements(
    shape: Ints, lengths: Ints, state: ShardState, excluded: Sequence[int] = ()
) -> int:
    """The number of elements of the largest shard; dims in ``excluded`` count as if of size 1."""
    return math.prod(
        [
            max(shard_extents(extent, lengths, splits), default=0)
            for dim, (extent, splits) in enumerate(zip(shape, state.splits, strict=True))
            if dim not in excluded
        ]
    )


def most_moved(shape: Ints, lengths: Ints, source: ShardState, target: ShardState) -> int:
    """The largest number of elements that any rank sends or receives from ``source`` to ``target``.

    A rank needs the elements of its shard of ``target`` that are not in its shard of ``source``.
    Ranks with the same shard share the sending.
    """
    before, after = (
        {axis for splits in state.splits for axis in axes_of(splits)} for state in (source, target)
    )
    readers = math.prod([lengths[axis] for axis in before - after])
    owners = math.prod([lengths[axis] for axis in after - before])
    sharding = sorted(before | after)
    columns = []
    for dim, extent in enumerate(shape):
        ends = source.splits[dim], target.splits[dim]
        axes = sorted({axis for splits in ends for axis in axes_of(splits)})
        table = _extents_by_rank(extent, lengths, axes, *ends)
        columns.append([table[i] for i in combination_index(sharding, axes, lengths)])
    most = 0
    for extents in set(zip(*columns, strict=True)):
        had, wanted, kept = (math.prod(numbers) for numbers in zip(*extents, strict=True))
        most = max(most, wanted - kept, -(-had * readers // owners) - kept)
    return most


def _extents_by_rank(
    extent: int, lengths: Ints, axes: Sequence[int], source: Splits, target: Splits
) -> list[Ints]:
    """The sizes in one dim of a rank's shards before and afterwards, and of the overlap of both.

    There is an entry for each combination of coordinates along ``axes``.
    """
    (starts, sizes), (starts_after, sizes_after) = (
        shards_once(extent, lengths, splits) for splits in (source, target)
    )
    here, there = (combination_index(axes, axes_of(s), lengths) for s in (source, target))
    extents: list[Ints] = []
    for i, j in zip(here, there, strict=True):
        low, high = max(starts[i], starts_after[j]), starts[i] + sizes[i]
        high = min(high, starts_after[j] + sizes_after[j])
        extents.append((sizes[i], sizes_after[j], max(0, high - low)))
    return extents
