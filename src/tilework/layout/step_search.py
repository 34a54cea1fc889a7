"""The cheapest way from one layout to another: which steps are possible, and what they cost."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Literal

from tilework.layout.box import Ints
from tilework.layout.cost import CostModel
from tilework.layout.shard_order import (
    Cut,
    Stacks,
    axes_of,
    block_parts,
    extents,
    most_elements,
    most_moved,
    places,
)

StepKind = Literal[
    "slice", "fill", "all_reduce", "reduce_scatter", "all_to_all", "all_gather", "plan"
]

#: How many messages' latency a plan costs: ranks agree on it, and pack and unpack what moves.
_PLAN_MESSAGES = 4


@dataclass(frozen=True, slots=True)
class Edge:
    """One step: to which stacks, and at what cost."""

    kind: StepKind
    axes: Ints
    """Those along which the collective is, in the order in which they cut."""
    stacks: Stacks
    nbytes: int
    """What a rank sends or receives, whichever is more, on the rank for which that is most."""
    seconds: float


@dataclass(frozen=True)
class Space:
    """Where the search takes place.

    Every state that it visits has the target's cuts at the bottom of its stacks as long as nothing
    else lies on them: what is in its place is left there.
    """

    shape: Ints
    lengths: Ints
    ranks: Ints
    """All of the mesh, the last axis runs fastest."""
    source: Stacks
    target: Stacks
    itemsize: int
    cost: CostModel

    def edges(self, at: Stacks) -> Iterator[Edge]:
        """The steps from one state on. What costs nothing and loses nothing comes alone."""
        free = next(self._slices(at), None)
        if free is not None:
            yield free
            return
        pending = tuple([axis for axis in at.partial if axis not in self.target.partial])
        if not pending and at.cuts == self.target.cuts:
            yield from self._fills(at)
            return
        yield from self._all_reduces(at, pending)
        yield from self._reduce_scatters(at, pending)
        yield from self._all_to_alls(at)
        yield from self._all_gathers(at)
        if not pending:
            yield self._plan(at)

    # -- steps without communication ---------------------------------------------------------

    def _slices(self, at: Stacks) -> Iterator[Edge]:
        for dim in self._growing(at):
            cut = self.target.cuts[dim][len(at.cuts[dim])]
            if cut[0] not in at.partial and cut[0] not in self._cutting(at):
                yield Edge("slice", (cut[0],), at.pushed(dim, (cut,)), 0, 0.0)

    def _fills(self, at: Stacks) -> Iterator[Edge]:
        yield Edge("fill", self.target.filled, self.target, 0, 0.0)

    # -- collectives ---------------------------------------------------------------------------

    def _all_reduces(self, at: Stacks, pending: Ints) -> Iterator[Edge]:
        elements = most_elements(self.shape, self.lengths, at)
        for count in range(len(pending), 0, -1):
            for axes in combinations(pending, count):
                n = self._members(axes)
                moved = -(-2 * elements * (n - 1) // n)
                yield self._edge("all_reduce", axes, at.reduced(axes), moved)

    def _reduce_scatters(self, at: Stacks, pending: Ints) -> Iterator[Edge]:
        for dim in self._growing(at):
            found = len(at.cuts[dim])
            rest = self.target.cuts[dim][found:]
            for count in range(1, len(rest) + 1):
                if rest[count - 1][0] not in pending:
                    break
                cuts, after = rest[:count], at.pushed(dim, rest[:count])
                n = self._members(axes_of(cuts))
                moved = 0
                for extent in extents(self.shape[dim], self.lengths, at.cuts[dim]):
                    _, sizes = block_parts(extent, self.lengths, cuts)
                    moved = max(moved, extent - min(sizes), (n - 1) * max(sizes))
                moved *= most_elements(self.shape, self.lengths, at, (dim,))
                yield self._edge("reduce_scatter", axes_of(cuts), after, moved)

    def _all_to_alls(self, at: Stacks) -> Iterator[Edge]:
        for to in self._growing(at):
            rest = self.target.cuts[to][len(at.cuts[to]) :]
            for dim in range(len(self.shape)):
                for count in range(1, min(self._loose(at, dim), len(rest)) + 1):
                    off, on = at.cuts[dim][-count:], rest[:count]
                    if dim != to and set(axes_of(off)) == set(axes_of(on)):
                        after = at.popped(dim, count).pushed(to, on)
                        moved = self._exchanged(at, after, (dim, to), off)
                        yield self._edge("all_to_all", axes_of(on), after, moved)

    def _exchanged(
        self, at: Stacks, after: Stacks, dims: tuple[int, int], off: tuple[Cut, ...]
    ) -> int:
        """The most elements that a rank sends or receives in an all_to_all."""
        here, there = dims
        on = after.cuts[there][-len(off) :]
        pairs = places(axes_of(off), axes_of(on), self.lengths)
        most = 0
        for whole in extents(self.shape[here], self.lengths, after.cuts[here]):
            _, before = block_parts(whole, self.lengths, off)
            for extent in extents(self.shape[there], self.lengths, at.cuts[there]):
                _, parts = block_parts(extent, self.lengths, on)
                for size, place in zip(before, pairs, strict=True):
                    part = parts[place]
                    most = max(most, size * (extent - part), (whole - size) * part)
        return most * most_elements(self.shape, self.lengths, at, dims)

    def _all_gathers(self, at: Stacks) -> Iterator[Edge]:
        for dim in range(len(self.shape)):
            for count in range(1, self._loose(at, dim) + 1):
                cuts, after = at.cuts[dim][-count:], at.popped(dim, count)
                moved = 0
                for extent in extents(self.shape[dim], self.lengths, after.cuts[dim]):
                    _, sizes = block_parts(extent, self.lengths, cuts)
                    moved = max(moved, extent - min(sizes))
                moved *= most_elements(self.shape, self.lengths, at, (dim,))
                yield self._edge("all_gather", axes_of(cuts), after, moved)

    def _plan(self, at: Stacks) -> Edge:
        after = Stacks(self.target.cuts, at.partial)
        moving = {
            axis
            for dim, stack in enumerate(at.cuts)
            for one, other in ((stack, after.cuts[dim]), (after.cuts[dim], stack))
            for axis in axes_of(one[_common(one, other) :])
        }
        moved = most_moved(self.shape, self.lengths, at, after)
        return self._edge("plan", tuple(sorted(moving)), after, moved, _PLAN_MESSAGES)

    def _edge(
        self, kind: StepKind, axes: Ints, after: Stacks, elements: int, messages: int = 1
    ) -> Edge:
        latency, per_byte = self.cost.latency, self.cost.seconds_per_byte
        if self._spans_hosts(axes):
            latency, per_byte = self.cost.network_latency, self.cost.network_seconds_per_byte
        nbytes = elements * self.itemsize
        return Edge(kind, axes, after, nbytes, messages * latency + nbytes * per_byte)

    # -- what is where ---------------------------------------------------------------------------

    def _growing(self, at: Stacks) -> Iterator[int]:
        """The dims whose cuts are the target's first ones, and not all of them."""
        for dim, (stack, wanted) in enumerate(zip(at.cuts, self.target.cuts, strict=True)):
            if len(stack) < len(wanted) and stack == wanted[: len(stack)]:
                yield dim

    def _loose(self, at: Stacks, dim: int) -> int:
        """How many of a dim's last cuts are not where the target has them."""
        return len(at.cuts[dim]) - _common(at.cuts[dim], self.target.cuts[dim])

    def _cutting(self, at: Stacks) -> set[int]:
        return {axis for stack in at.cuts for axis, _ in stack}

    def _members(self, axes: Ints) -> int:
        n = 1
        for axis in axes:
            n *= self.lengths[axis]
        return n

    def _spans_hosts(self, axes: Ints) -> bool:
        return bool(self.cost.hosts) and any(axis in self._between_hosts for axis in axes)

    @cached_property
    def _between_hosts(self) -> frozenset[int]:
        """The axes along which some ranks are on different hosts."""
        found, stride = set(), 1
        for axis in reversed(range(len(self.lengths))):
            span = stride * self.lengths[axis]
            for place, rank in enumerate(self.ranks):
                first = self.ranks[place - place % span + place % stride]
                if not self.cost.near(first, rank):
                    found.add(axis)
            stride = span
        return frozenset(found)


def _common(stack: tuple[Cut, ...], other: tuple[Cut, ...]) -> int:
    """How many of the first cuts are the same."""
    count = 0
    for one, two in zip(stack, other, strict=False):
        if one != two:
            break
        count += 1
    return count


#: What a way costs: picoseconds (in whole numbers, as sums of floats depend on their order), and
#: then its steps: the fewest, and those first that leave less to move.
Price = tuple[int, int, tuple[tuple[int, Ints], ...]]
_FIRST = ("slice", "all_reduce", "reduce_scatter", "all_to_all", "all_gather", "plan", "fill")


def cheapest(space: Space) -> list[Edge]:
    """The steps of least cost (Dijkstra 1959). Every rank finds the same of equal ones."""
    counter = 0
    waiting: list[tuple[Price, int, Stacks]] = [((0, 0, ()), 0, space.source)]
    reached: dict[Stacks, tuple[Price, Stacks, Edge]] = {}
    done: set[Stacks] = set()
    while True:
        (picoseconds, length, way), _, at = heapq.heappop(waiting)
        if at == space.target:
            return _way(space.source, at, reached)
        if at in done:
            continue
        done.add(at)
        for edge in space.edges(at):
            step = (_FIRST.index(edge.kind), edge.axes)
            price = (picoseconds + round(edge.seconds * 1e12), length + 1, (*way, step))
            if edge.stacks not in reached or price < reached[edge.stacks][0]:
                reached[edge.stacks] = (price, at, edge)
                counter += 1
                heapq.heappush(waiting, (price, counter, edge.stacks))


def _way(
    source: Stacks, at: Stacks, reached: dict[Stacks, tuple[Price, Stacks, Edge]]
) -> list[Edge]:
    found = []
    while at != source:
        _, at, edge = reached[at]
        found.append(edge)
    return found[::-1]
