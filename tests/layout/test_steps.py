"""The cheapest steps from one layout to another: against every sequence there is."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import examples, layouts
from tests.tables import each
from tilework.layout import (
    Box,
    CostModel,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    Steps,
    chunk_sizes,
    mesh_tiling,
    redistribution_steps,
    step_search,
)

Ints = tuple[int, ...]
R, P = Replicate(), Partial()
MESSAGES_OF_A_PLAN = 4


def steps(
    shape: Ints, lengths: Ints, source: Sequence[Any], target: Sequence[Any], **more: Any
) -> Steps:
    return redistribution_steps(shape, lengths, source, target, **more)


def kinds(found: Steps) -> list[tuple[str, Ints]]:
    return [(step.kind, step.axes) for step in found.steps]


# -- what is well known ----------------------------------------------------------------------


@each(
    ("source", "target", "expected"),
    [
        ([P, P], [R, R], [("all_reduce", (0, 1))]),
        ([Shard(0), R], [Shard(1), R], [("all_to_all", (0,))]),
        ([Shard(0), Shard(0)], [R, R], [("all_gather", (0, 1))]),
        ([Shard(0), Shard(0)], [Shard(1), Shard(1)], [("all_to_all", (0, 1))]),
        ([P, P], [Shard(0), Shard(0)], [("reduce_scatter", (0, 1))]),
        ([P, R], [Shard(0), R], [("reduce_scatter", (0,))]),
        ([R, R], [Shard(0), Shard(1)], [("slice", (0,)), ("slice", (1,))]),
        ([R, Shard(0)], [P, Shard(0)], [("fill", (0,))]),
        # Slicing comes first: what is gathered afterwards is half.
        ([R, Shard(0)], [Shard(1), R], [("slice", (0,)), ("all_gather", (1,))]),
        # The shard is reduced, not the whole.
        ([P, Shard(0)], [R, R], [("all_reduce", (0,)), ("all_gather", (1,))]),
        ([P, Shard(0)], [R, Shard(1)], [("all_reduce", (0,)), ("all_to_all", (1,))]),
        # What cuts the inner parts stays where it is.
        ([Shard(0), P], [Shard(0), R], [("all_reduce", (1,))]),
        ([P, P], [P, R], [("all_reduce", (1,))]),
        ([R, Shard(0)], [R, Shard(0)], []),
    ],
)
def test_the_steps_that_everyone_knows(
    source: list[Placement], target: list[Placement], expected: list[tuple[str, Ints]]
) -> None:
    assert kinds(steps((64, 64), (2, 2), source, target)) == expected


def test_axes_of_length_one_cost_nothing() -> None:
    found = steps((8, 8), (1, 2, 1), [Shard(0), P, P], [R, P, Partial("sum")])
    assert found.steps == ()
    assert kinds(steps((8, 8), (1, 2), [Partial("max"), Shard(0)], [R, R])) == [
        ("all_gather", (1,))
    ]


def test_another_reduction_goes_through_the_value() -> None:
    found = steps((8, 8), (2, 2), [Partial("max"), R], [Partial("sum"), R])
    assert kinds(found) == [("all_reduce", (0,)), ("fill", (0,))]


def test_a_swap_moves_only_what_is_elsewhere() -> None:
    found = steps((256, 256), (2, 2), [Shard(0), Shard(1)], [Shard(1), Shard(0)])
    assert kinds(found) == [("plan", (0, 1))]
    assert found.nbytes == 256 * 256  # a quarter of the elements, of 4 bytes


def test_nothing_goes_through_the_whole_where_that_costs_more() -> None:
    for shape in ((2, 2), (1 << 10, 1 << 10)):
        found = steps(shape, (2, 2, 2), [Shard(0), Shard(0), P], [Shard(1), Shard(0), R])
        whole = math.prod(shape) * 4
        assert all(step.target.placements != (R, R, R) for step in found.steps)
        assert found.nbytes < whole * 1.5


def test_uneven_parts_count_as_they_are() -> None:
    gather = steps((10,), (3,), [Shard(0, (1, 7, 2))], [R]).steps[0]
    assert gather.nbytes == 9 * 4
    scatter = steps((10,), (3,), [P], [Shard(0, (1, 7, 2))]).steps[0]
    assert scatter.nbytes == 2 * 7 * 4
    exchange = steps((4, 6), (2,), [Shard(0, (1, 3))], [Shard(1, (6, 0))]).steps[0]
    assert exchange.nbytes == 3 * 6 * 4


def test_hosts_make_an_axis_dear() -> None:
    cost = CostModel(hosts={0: "a", 1: "a", 2: "b", 3: "b"})
    near, far = (
        steps((64,), (2, 2), source, [R, R], cost=cost).seconds
        for source in ([R, Shard(0)], [Shard(0), R])
    )
    assert far > 10 * near
    turned = steps((64,), (2, 2), [R, Shard(0)], [R, R], cost=cost, ranks=(0, 2, 1, 3)).seconds
    assert turned == far


def test_they_print_as_a_table() -> None:
    text = str(steps((8, 8), (2, 2), [P, Shard(0)], [R, Shard(1)], names=("dp", "tp")))
    assert text.startswith("[8, 8] from dp=P(sum) tp=S0 to dp=R tp=S1: 2 steps, 192 bytes per rank")
    row = next(line for line in text.splitlines() if "all_to_all" in line)
    assert row.split()[:4] == ["all_to_all", "tp", "tp=S0", "tp=S1"]
    assert "nothing to do" in str(steps((8,), (2,), [R], [R]))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="same length"):
        steps((8,), (2, 2), [R], [R, R])
    with pytest.raises(ValueError, match="no dim 1"):
        steps((8,), (2,), [Shard(1)], [R])
    with pytest.raises(ValueError, match="does not split an extent of 8 into 2 shards"):
        steps((8,), (2,), [Shard(0, (3, 4))], [R])
    with pytest.raises(ValueError, match="names must have an entry for each"):
        steps((8,), (2,), [R], [R], names=("a", "b"))
    with pytest.raises(ValueError, match="has 2 ranks, got 3"):
        steps((8,), (2,), [R], [R], ranks=(0, 1, 2))


# -- against every sequence ------------------------------------------------------------------


def cuts(layout: Layout, dim: int) -> Ints:
    """The axes that cut a dim, in order."""
    order = layout.order or range(len(layout.placements))
    return tuple(
        a for a in order if isinstance(one := layout.placements[a], Shard) and one.dim == dim
    )


def normal(shape: Ints, lengths: Ints, layout: Layout) -> Layout:
    """Sizes only where they are not those of chunks; an order only where it matters."""
    placements = list(layout.placements)
    tops = [{extent} for extent in shape]
    for axis in layout.order or range(len(lengths)):
        one = placements[axis]
        if isinstance(one, Shard):
            found = {e: chunk_sizes(e, lengths[axis]) for e in tops[one.dim]}
            if one.sizes is not None and all(list(one.sizes) == f for f in found.values()):
                placements[axis] = one = Shard(one.dim)
            tops[one.dim] = {p for f in found.values() for p in (one.sizes or f)}
    order = list(range(len(lengths)))
    for dim in range(len(shape)):
        axes = cuts(layout, dim)
        for place, axis in zip(sorted(axes), axes, strict=True):
            order[place] = axis
    same = order == sorted(order)
    return Layout(tuple(placements), None if same else tuple(order))


class Everything:
    """Every layout that a tensor may have on the way, and what it costs from one to another.

    Costs are counted on each rank's box, not by formulas. An axis is made to cut only where the
    target has it: to share work among more ranks for a while is not considered.
    """

    def __init__(
        self, shape: Ints, lengths: Ints, source: Layout, target: Layout, cost: CostModel
    ) -> None:
        self.cost, self.itemsize = cost, 2
        self.shape, self.lengths = shape, lengths
        self.source, self.target = (normal(shape, lengths, one) for one in (source, target))
        self.coordinates = list(product(*map(range, lengths)))
        self.layouts = sorted(set(self._layouts()), key=repr)
        self.boxes = cache(self._boxes)

    def _layouts(self) -> Iterator[Layout]:
        ends = (self.source, self.target)
        ops = {one.reduce_op for end in ends for one in end.placements if isinstance(one, Partial)}
        choices: list[list[Placement]] = []
        for axis in range(len(self.lengths)):
            found: list[Placement] = [R]
            if any(end.placements[axis] != R for end in ends):
                found += [Shard(dim) for dim in range(len(self.shape))]
                found += [end.placements[axis] for end in ends]
            choices.append(list(dict.fromkeys(found)))
        for placements in product(*choices):
            if len({one.reduce_op for one in placements if isinstance(one, Partial)}) > 1:
                continue
            for order in permutations(range(len(self.lengths))):
                layout = Layout(placements, order)
                try:
                    mesh_tiling(self.shape, self._mesh(), placements, order=order)
                except ValueError:
                    continue
                yield normal(self.shape, self.lengths, layout)
        assert len(ops) <= 2

    def _mesh(self) -> Any:
        ranks: list[Any] = list(range(math.prod(self.lengths)))
        for extent in reversed(self.lengths[1:]):
            ranks = [ranks[i : i + extent] for i in range(0, len(ranks), extent)]
        return ranks

    def _boxes(self, layout: Layout) -> list[Box]:
        tiling = mesh_tiling(self.shape, self._mesh(), layout.placements, order=layout.order)
        return [tiling.boxes_of(rank)[0] for rank in range(len(self.coordinates))]

    def cheapest(self) -> float:
        waiting, done = [(0.0, 0, self.source)], set()
        count = 0
        while True:
            seconds, _, here = heapq.heappop(waiting)
            if here == self.target:
                return seconds
            if here in done:
                continue
            done.add(here)
            for there in self.layouts:
                if there in done or (found := self.step(here, there)) is None:
                    continue
                count += 1
                heapq.heappush(waiting, (seconds + self._price(found), count, there))

    def step(self, here: Layout, there: Layout) -> tuple[int, int] | None:
        """Messages and elements, if one step leads from here to there; of the cheapest."""
        found = [self._collective(here, there)]
        if self._plannable(here, there):
            found.append((MESSAGES_OF_A_PLAN, self._exchanged(here, there)))
        return min([one for one in found if one is not None], default=None, key=self._price)

    def _price(self, found: tuple[int, int]) -> float:
        return found[0] * self.cost.latency + found[1] * self.itemsize * self.cost.seconds_per_byte

    def _collective(self, here: Layout, there: Layout) -> tuple[int, int] | None:
        axes = [a for a in range(len(self.lengths)) if here.placements[a] != there.placements[a]]
        old, new = ([one.placements[a] for a in axes] for one in (here, there))
        n = math.prod(self.lengths[a] for a in axes)
        before, after = self.boxes(here), self.boxes(there)
        if not axes or not self._others_stay(here, there, axes):
            return None
        from_, to = self._block(here, axes), self._block(there, axes)
        if to is not None and not self._in_place(there, to):
            return None
        if all(one == R for one in old):
            free = to is not None or (there == self.target and _partial(new))
            return (0, 0) if free else None
        if _partial(old) and to is not None:
            sent = [
                max(b.volume - a.volume, (n - 1) * a.volume)
                for b, a in zip(before, after, strict=True)
            ]
            return 1, max(sent)
        if _partial(old) and all(one == R for one in new):
            return 1, max(-(-2 * box.volume * (n - 1) // n) for box in before)
        if from_ is not None and all(one == R for one in new):
            return 1, max(a.volume - shared(b, a) for b, a in zip(before, after, strict=True))
        if from_ is not None and to is not None and from_ != to:
            return 1, self._exchanged(here, there)
        return None

    def _exchanged(self, here: Layout, there: Layout) -> int:
        """What a rank sends or receives where owners of the same share what is asked of them."""
        before, after = self.boxes(here), self.boxes(there)
        cutting = [
            a
            for a in range(len(self.lengths))
            if any(isinstance(one.placements[a], Shard) for one in (here, there))
        ]
        most = 0
        for me, old, new in zip(self.coordinates, before, after, strict=True):
            asked, owners = 0, 0
            for other, theirs, wanted in zip(self.coordinates, before, after, strict=True):
                if all(me[a] == other[a] for a in range(len(me)) if a not in cutting):
                    asked += shared(old, wanted)
                    owners += old == theirs and not old.empty
            both = shared(old, new)
            most = max(most, new.volume - both, -(-asked // max(owners, 1)) - both)
        return most

    def _plannable(self, here: Layout, there: Layout) -> bool:
        """A plan leads to the target's cuts, when nothing is to be reduced any more."""
        wanted = [
            Partial(str(here_op)) if (here_op := _op(one)) else R if _op(other) else other
            for one, other in zip(here.placements, self.target.placements, strict=True)
        ]
        pending = any(
            _op(one) and one != other
            for one, other in zip(here.placements, self.target.placements, strict=True)
        )
        return not pending and there == normal(
            self.shape, self.lengths, Layout(tuple(wanted), self.target.order)
        )

    def _in_place(self, layout: Layout, dim: int) -> bool:
        """Whether a dim's cuts are the target's first ones."""
        axes = cuts(layout, dim)
        return axes == cuts(self.target, dim)[: len(axes)] and all(
            layout.placements[axis] == self.target.placements[axis] for axis in axes
        )

    def _others_stay(self, here: Layout, there: Layout, axes: list[int]) -> bool:
        return all(
            tuple(a for a in cuts(here, dim) if a not in axes)
            == tuple(a for a in cuts(there, dim) if a not in axes)
            for dim in range(len(self.shape))
        )

    def _block(self, layout: Layout, axes: list[int]) -> int | None:
        """The dim whose innermost cuts are these axes'."""
        for dim in range(len(self.shape)):
            if set(cuts(layout, dim)[-len(axes) :]) == set(axes):
                return dim
        return None


def _op(placement: Placement) -> str:
    return placement.reduce_op if isinstance(placement, Partial) else ""


def _partial(placements: list[Placement]) -> bool:
    return all(isinstance(one, Partial) for one in placements)


def shared(one: Box, other: Box) -> int:
    found = one.intersection(other)
    return 0 if found is None else found.volume


@st.composite
def tasks(draw: st.DrawFn) -> tuple[Ints, Ints, Layout, Layout, CostModel]:
    lengths = draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3), (3, 2)]))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    scale = draw(st.sampled_from([0.0, 1.0, 1000.0]))
    cost = CostModel(latency=scale, seconds_per_byte=1.0)
    return (
        shape,
        lengths,
        draw(layouts(shape, lengths, turns=1)),
        draw(layouts(shape, lengths, turns=1)),
        cost,
    )


@given(tasks())
@examples(250)
def test_no_sequence_is_cheaper(task: tuple[Ints, Ints, Layout, Layout, CostModel]) -> None:
    shape, lengths, source, target, cost = task
    found = redistribution_steps(
        shape,
        lengths,
        source.placements,
        target.placements,
        source_order=source.order,
        target_order=target.order,
        itemsize=2,
        cost=cost,
    )
    expected = Everything(shape, lengths, source, target, cost).cheapest()
    assert found.seconds == pytest.approx(expected)


def test_ties_break_alike_each_time() -> None:
    args: Any = ((8, 8, 8), (2, 2, 2), [P, Shard(0), Shard(0)], [Shard(1), Shard(2), R])
    assert len({repr(steps(*args).steps) for _ in range(3)}) == 1


def test_four_axes_are_planned_without_looking_at_all_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilework.layout import step_search

    seen = 0
    edges = step_search.SearchSpace.edges

    def counted(self: Any, at: Any) -> Any:
        nonlocal seen
        seen += 1
        return edges(self, at)

    monkeypatch.setattr(step_search.SearchSpace, "edges", counted)
    dims = [Shard(d) for d in range(4)]
    steps((64, 64, 64, 64), (2, 2, 2, 2), [P, P, P, P], dims[::-1])
    assert seen <= 3**4


def test_planning_on_four_axes_looks_at_few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#166747: it does not grow exponentially."""
    seen: list[Any] = []
    edges = step_search.SearchSpace.edges

    def counting(self: step_search.SearchSpace, at: Any) -> Iterator[step_search.Edge]:
        seen.append(at)
        return edges(self, at)

    monkeypatch.setattr(step_search.SearchSpace, "edges", counting)
    shape, lengths = (64, 64, 64, 64), (2, 2, 2, 2)
    every = (Shard(0), Shard(1), Shard(2), Shard(3))
    for source, target in (
        (every, every[::-1]),
        (every, (every[1], every[2], every[3], every[0])),
        ((Shard(0),) * 4, (Shard(1),) * 4),
        ((Partial(),) * 4, every),
        ((Partial(), Shard(0), Partial(), Shard(1)), (Shard(1), Shard(0), Shard(0), Replicate())),
    ):
        seen.clear()
        redistribution_steps(shape, lengths, source, target)
        assert 0 < len(seen) < 2000, (source, target, len(seen))
