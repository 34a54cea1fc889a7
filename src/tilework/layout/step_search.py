"""The search for the cheapest steps from one layout to another: possible steps and prices."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Literal

from tilework.layout.box import (
    Ints,
    Splits,
    all_shard_sizes,
    axes_of,
    combination_index,
    most_moved,
    shard_extents,
)
from tilework.layout.cost import CostModel
from tilework.layout.placements import Layout, Partial, Placement, Replicate, shard_of
from tilework.layout.sharding import normal_order, splits_of


@dataclass(frozen=True, slots=True)
class ShardState:
    """A node of the search for steps: a layout without axes of length 1, which split nothing.

    Only the innermost splits of a dim can be undone by a collective along their axes: the parts on
    the ranks along another axis are not adjacent.
    """

    splits: tuple[Splits, ...]
    """The splits of each dim, the outermost first."""
    partial: Ints
    """The axes along which the value is not reduced yet, ascending."""
    filled: Ints = ()
    """The axes along which the target is partial in another way than the source. Empty in every
    state but the target's."""

    def gathered(self, dim: int, count: int) -> ShardState:
        return self._with(dim, self.splits[dim][:-count])

    def sharded(self, dim: int, splits: Splits) -> ShardState:
        """The state with additional splits of a dim, whose axes are no longer partial."""
        return self._with(dim, self.splits[dim] + splits).reduced(axes_of(splits))

    def reduced(self, axes: Sequence[int]) -> ShardState:
        return ShardState(self.splits, tuple([axis for axis in self.partial if axis not in axes]))

    def _with(self, dim: int, splits: Splits) -> ShardState:
        return ShardState((*self.splits[:dim], splits, *self.splits[dim + 1 :]), self.partial)


def state_of(shape: Ints, lengths: Ints, layout: Layout) -> ShardState:
    """The layout, if it fits, as a node of the search for steps: axes of length 1 are dropped."""
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
        for axis, cut in splits:
            placements[axis] = shard_of(dim, cut)
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


StepKind = Literal[
    "slice", "fill", "all_reduce", "reduce_scatter", "all_to_all", "all_gather", "plan"
]

#: The latency of a plan in messages: ranks agree on the plan, pack and unpack.
_PLAN_MESSAGES = 4


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge of the search: a step, the state after the step, and the price."""

    kind: StepKind
    axes: Ints
    """The axes of the collective, in the order in which they shard."""
    state: ShardState
    nbytes: int
    """Bytes sent or received by the busiest rank, the larger of both."""
    seconds: float


@dataclass(frozen=True)
class SearchSpace:
    """The states between two layouts, and the steps that lead from one to another.

    The search never undoes the outermost splits of a dim that the target has, too.
    """

    shape: Ints
    lengths: Ints
    ranks: Ints
    """All global ranks of the mesh, the last axis running fastest."""
    source: ShardState
    target: ShardState
    """The state at which the search ends. Axes in ``partial`` stay partial, without a reduction."""
    itemsize: int
    cost: CostModel

    def edges(self, at: ShardState) -> Iterator[Edge]:
        """The possible next steps from a state. A slice is free: if there is one, only that."""
        free = next(self._slices(at), None)
        if free is not None:
            yield free
            return
        pending = tuple([axis for axis in at.partial if axis not in self.target.partial])
        if not pending and at.splits == self.target.splits:
            yield Edge("fill", self.target.filled, self.target, 0, 0.0)
            return
        yield from self._all_reduces(at, pending)
        yield from self._reduce_scatters(at, pending)
        yield from self._all_to_alls(at)
        yield from self._all_gathers(at)
        if not pending:
            yield self._plan(at)

    def _slices(self, at: ShardState) -> Iterator[Edge]:
        sharding = {axis for splits in at.splits for axis, _ in splits}
        for dim in self._growing(at):
            split = self.target.splits[dim][len(at.splits[dim])]
            axis = split[0]
            if axis not in at.partial and axis not in sharding:
                yield Edge("slice", (axis,), at.sharded(dim, (split,)), 0, 0.0)

    # -- collectives ---------------------------------------------------------------------------

    def _all_reduces(self, at: ShardState, pending: Ints) -> Iterator[Edge]:
        elements = most_elements(self.shape, self.lengths, at)
        for count in range(len(pending), 0, -1):
            for axes in combinations(pending, count):
                n = self._members(axes)
                moved = -(-2 * elements * (n - 1) // n)
                yield self._edge("all_reduce", axes, at.reduced(axes), moved)

    def _reduce_scatters(self, at: ShardState, pending: Ints) -> Iterator[Edge]:
        for dim in self._growing(at):
            missing = self.target.splits[dim][len(at.splits[dim]) :]
            for count in range(1, len(missing) + 1):
                if missing[count - 1][0] not in pending:
                    break
                splits = missing[:count]
                n = self._members(axes_of(splits))
                moved = 0
                for extent in shard_extents(self.shape[dim], self.lengths, at.splits[dim]):
                    sizes = all_shard_sizes(extent, self.lengths, splits)
                    moved = max(moved, extent - min(sizes), (n - 1) * max(sizes))
                moved *= most_elements(self.shape, self.lengths, at, (dim,))
                after = at.sharded(dim, splits)
                yield self._edge("reduce_scatter", axes_of(splits), after, moved)

    def _all_to_alls(self, at: ShardState) -> Iterator[Edge]:
        for to in self._growing(at):
            missing = self.target.splits[to][len(at.splits[to]) :]
            for dim in range(len(self.shape)):
                for count in range(1, min(self._misplaced(at, dim), len(missing)) + 1):
                    off, on = at.splits[dim][-count:], missing[:count]
                    if dim != to and set(axes_of(off)) == set(axes_of(on)):
                        after = at.gathered(dim, count).sharded(to, on)
                        moved = self._exchanged(at, after, (dim, to), off)
                        yield self._edge("all_to_all", axes_of(on), after, moved)

    def _exchanged(
        self, at: ShardState, after: ShardState, dims: tuple[int, int], off: Splits
    ) -> int:
        here, there = dims
        on = after.splits[there][-len(off) :]
        pairs = combination_index(axes_of(off), axes_of(on), self.lengths)
        most = 0
        for gathered in shard_extents(self.shape[here], self.lengths, after.splits[here]):
            before = all_shard_sizes(gathered, self.lengths, off)
            for extent in shard_extents(self.shape[there], self.lengths, at.splits[there]):
                parts = all_shard_sizes(extent, self.lengths, on)
                for size, place in zip(before, pairs, strict=True):
                    part = parts[place]
                    most = max(most, size * (extent - part), (gathered - size) * part)
        return most * most_elements(self.shape, self.lengths, at, dims)

    def _all_gathers(self, at: ShardState) -> Iterator[Edge]:
        for dim in range(len(self.shape)):
            for count in range(1, self._misplaced(at, dim) + 1):
                splits, after = at.splits[dim][-count:], at.gathered(dim, count)
                moved = 0
                for extent in shard_extents(self.shape[dim], self.lengths, after.splits[dim]):
                    sizes = all_shard_sizes(extent, self.lengths, splits)
                    moved = max(moved, extent - min(sizes))
                moved *= most_elements(self.shape, self.lengths, at, (dim,))
                yield self._edge("all_gather", axes_of(splits), after, moved)

    def _plan(self, at: ShardState) -> Edge:
        after = ShardState(self.target.splits, at.partial)
        moving = {
            axis
            for old, new in zip(at.splits, after.splits, strict=True)
            for splits in (old, new)
            for axis in axes_of(splits[_common(old, new) :])
        }
        moved = most_moved(self.shape, self.lengths, at.splits, after.splits)
        return self._edge("plan", tuple(sorted(moving)), after, moved, _PLAN_MESSAGES)

    def _edge(
        self, kind: StepKind, axes: Ints, after: ShardState, elements: int, messages: int = 1
    ) -> Edge:
        nbytes = elements * self.itemsize
        between_hosts = bool(self.cost.hosts) and any(a in self._between_hosts for a in axes)
        seconds = self.cost.collective_seconds(nbytes, messages, between_hosts)
        return Edge(kind, axes, after, nbytes, seconds)

    # -- splits in place -------------------------------------------------------------------------

    def _growing(self, at: ShardState) -> Iterator[int]:
        """The dims whose splits so far are all in place, while inner splits are missing."""
        for dim, (splits, wanted) in enumerate(zip(at.splits, self.target.splits, strict=True)):
            if len(splits) < len(wanted) and splits == wanted[: len(splits)]:
                yield dim

    def _misplaced(self, at: ShardState, dim: int) -> int:
        """The number of a dim's innermost splits that are not in place, and must be undone."""
        return len(at.splits[dim]) - _common(at.splits[dim], self.target.splits[dim])

    def _members(self, axes: Ints) -> int:
        return math.prod([self.lengths[axis] for axis in axes])

    @cached_property
    def _between_hosts(self) -> frozenset[int]:
        between, stride = set(), 1
        for axis in reversed(range(len(self.lengths))):
            span = stride * self.lengths[axis]
            for place, rank in enumerate(self.ranks):
                first = self.ranks[place - place % span + place % stride]
                if not self.cost.near(first, rank):
                    between.add(axis)
            stride = span
        return frozenset(between)


def _common(splits: Splits, others: Splits) -> int:
    count = 0
    for split, other in zip(splits, others, strict=False):
        if split != other:
            break
        count += 1
    return count


#: The price of a path: picoseconds (integers, because sums of floats depend on the order), then the
#: steps: the fewest first, and among these the steps that leave less to move.
Price = tuple[int, int, tuple[tuple[int, Ints], ...]]
_FIRST = ("slice", "all_reduce", "reduce_scatter", "all_to_all", "all_gather", "plan", "fill")


def cheapest(space: SearchSpace) -> list[Edge]:
    """The steps of least cost (Dijkstra 1959). Of equally cheap paths, all ranks take the same."""
    counter = 0
    waiting: list[tuple[Price, int, ShardState]] = [((0, 0, ()), 0, space.source)]
    reached: dict[ShardState, tuple[Price, ShardState, Edge]] = {}
    done: set[ShardState] = set()
    while True:
        (picoseconds, length, path), _, at = heapq.heappop(waiting)
        if at == space.target:
            return _path(space.source, at, reached)
        if at in done:
            continue
        done.add(at)
        for edge in space.edges(at):
            step = (_FIRST.index(edge.kind), edge.axes)
            price = (picoseconds + round(edge.seconds * 1e12), length + 1, (*path, step))
            if edge.state not in reached or price < reached[edge.state][0]:
                reached[edge.state] = (price, at, edge)
                counter += 1
                heapq.heappush(waiting, (price, counter, edge.state))


def _path(
    source: ShardState, at: ShardState, reached: dict[ShardState, tuple[Price, ShardState, Edge]]
) -> list[Edge]:
    edges = []
    while at != source:
        _, at, edge = reached[at]
        edges.append(edge)
    return edges[::-1]
