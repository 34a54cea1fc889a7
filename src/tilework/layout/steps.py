"""The cheapest sequence of collectives from one layout on a mesh to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilework.layout.box import Ints
from tilework.layout.cost import DEFAULT_COST, CostModel
from tilework.layout.placements import Layout, Partial, Placement, Replicate, Shard
from tilework.layout.step_search import (
    SearchSpace,
    ShardState,
    StepKind,
    cheapest,
    layout_of,
    state_of,
)
from tilework.show import Page, Shown, TextTable, count_text


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a redistribution, taken by all ranks: a collective along axes, or local work."""

    kind: StepKind
    """``slice`` and ``fill`` communicate nothing; ``plan`` moves any boxes."""
    axes: Ints
    """The axes of the step, in the order in which they shard."""
    source: Layout
    target: Layout
    nbytes: int
    """Bytes sent or received by the busiest rank, the larger of both."""
    seconds: float


@dataclass(frozen=True)
class Steps(Shown):
    """Steps that follow each other. Made by :func:`redistribution_steps`.

    ``print`` shows them as a line and a table, and rich draws it.
    """

    shape: Ints
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    names: tuple[str, ...]
    """The names of the axes, for printing."""

    @property
    def nbytes(self) -> int:
        """The bytes that the busiest rank of each step sends or receives, summed over the steps."""
        return sum(step.nbytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """The expected duration of all steps."""
        return sum(step.seconds for step in self.steps)

    def __rich__(self) -> Page:
        count = count_text(len(self.steps), "step") if self.steps else "nothing to do"
        summary = (
            f"{self.route}: {count}, {self.nbytes:,} bytes per rank, "
            f"predicted {self.seconds * 1e6:,.1f} us"
        )
        rows = [
            (
                step.kind,
                ", ".join(self.names[axis] for axis in step.axes),
                self._words(step.source, step.axes),
                self._words(step.target, step.axes),
                f"{step.nbytes:,}",
                f"{step.seconds * 1e6:,.1f} us",
            )
            for step in self.steps
        ]
        titles = ("step", "axes", "from", "to", "bytes per rank", "predicted")
        return Page(summary, TextTable(titles, rows, {4, 5}))

    @property
    def route(self) -> str:
        """The shape and both layouts, in words."""
        return f"{list(self.shape)} from {self._words(self.source)} to {self._words(self.target)}"

    def _words(self, layout: Layout, axes: Sequence[int] | None = None) -> str:
        placements = layout.placements
        words = [
            f"{self.names[axis]}={_short(placements[axis])}"
            for axis in (range(len(placements)) if axes is None else axes)
        ]
        order = layout.order
        after = f" in the order {', '.join(self.names[axis] for axis in order)}" if order else ""
        return " ".join(words) + (after if axes is None else "")


def _short(placement: Placement) -> str:
    """A placement in few letters: S0, S1(3,5), S1(2 turns), R, P(sum)."""
    if isinstance(placement, Shard):
        sizes = "" if placement.sizes is None else f"({','.join(map(str, placement.sizes))})"
        turns = "" if placement.turns == 1 else f"({placement.turns} turns)"
        return f"S{placement.dim}{sizes}{turns}"
    return "R" if isinstance(placement, Replicate) else f"P({placement.reduce_op})"


def redistribution_steps(
    shape: Sequence[int],
    lengths: Sequence[int],
    source: Sequence[Placement],
    target: Sequence[Placement],
    *,
    source_order: Sequence[int] | None = None,
    target_order: Sequence[int] | None = None,
    itemsize: int = 4,
    cost: CostModel | None = None,
    ranks: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Steps:
    """The cheapest steps from one layout of a tensor on a mesh to another.

    Nothing is communicated, and every rank finds the same steps. A step is a collective along one
    axis, or along several at once where that is cheaper. Axes that replicate before and afterwards,
    and splits that are in place, are left alone; axes of length 1 cost nothing. A tensor that is
    partial in another reduction than the target is reduced first.

    Args:
        lengths: The number of ranks along each axis of the mesh.
        source_order: The axes in the order in which they shard; None: from the first to the last.
        cost: The cost of collectives, and which ranks share a host.
        ranks: The mesh's global ranks, the last axis running fastest; None: from 0 on.
        names: The names of the axes, for printing; None: their numbers.

    Raises:
        ValueError: Placements, orders or names do not fit the mesh or the shape.
        TypeError: Something is not a placement.

    Example:
        >>> from tilework.layout import Partial, Replicate, Shard
        >>> planned = redistribution_steps(
        ...     (8, 8), (2, 2), [Partial(), Shard(0)], [Replicate(), Shard(1)], names=("dp", "tp")
        ... )
        >>> [(step.kind, step.axes, step.nbytes) for step in planned.steps]
        [('all_reduce', (0,), 128), ('all_to_all', (1,), 64)]
        >>> print(planned)
        [8, 8] from dp=P(sum) tp=S0 to dp=R tp=S1: 2 steps, 192 bytes per rank, predicted 4.0 us
        ...
    """
    lengths = tuple(map(int, lengths))
    count = len(lengths)
    names = tuple(map(str, range(count))) if names is None else tuple(names)
    if len(names) != count:
        raise ValueError(
            f"names must have an entry for each of the {count} axes, got {list(names)}"
        )
    total = math.prod(lengths)
    ranks = tuple(range(total)) if ranks is None else tuple(map(int, ranks))
    if len(ranks) != total:
        raise ValueError(f"a mesh of shape {lengths} has {total} ranks, got {len(ranks)}")
    before, after = (
        Layout(tuple(placements), None if order is None else tuple(order))
        for placements, order in ((source, source_order), (target, target_order))
    )
    shape = tuple(map(int, shape))
    cost = DEFAULT_COST if cost is None else cost
    steps = _steps(shape, lengths, ranks, before, after, itemsize, cost)
    return Steps(shape, before, after, steps, names)


def _steps(
    shape: Ints,
    lengths: Ints,
    ranks: Ints,
    source: Layout,
    target: Layout,
    itemsize: int,
    cost: CostModel,
) -> tuple[Step, ...]:
    before, after = (state_of(shape, lengths, layout) for layout in (source, target))
    had, wanted = (_reduction(layout, lengths) for layout in (source, target))
    kept = tuple([axis for axis in before.partial if axis in after.partial and had == wanted])
    filled = tuple([axis for axis in after.partial if axis not in kept])
    after = ShardState(after.splits, kept, filled)
    space = SearchSpace(shape, lengths, ranks, before, after, itemsize, cost)
    steps: list[Step] = []
    here = source
    for edge in cheapest(space):
        there = target if edge.state == after else layout_of(edge.state, lengths, had)
        steps.append(Step(edge.kind, edge.axes, here, there, edge.nbytes, edge.seconds))
        here = there
    return tuple(steps)


def _reduction(layout: Layout, lengths: Ints) -> str:
    for placement, length in zip(layout.placements, lengths, strict=True):
        if isinstance(placement, Partial) and length > 1:
            return placement.reduce_op
    return ""
