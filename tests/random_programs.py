"""Hypothesis strategies for arguments of process groups, and for whole random programs.

A :class:`RandomProgram` is a list of operations that every rank runs. :func:`run_program` runs
it on a rank and compares each result with the expected result, computed from all contributions at
once. Every rank can compute it because contributions follow from rank and seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import tilework.distributed as dist
from tilework.comm.world import AnyGroup
from tilework.testing.groups.values import (
    DTYPES,
    LAYOUTS,
    Case,
    assert_same,
    defined,
    folded,
    reduce_op,
)

#: Candidates for a random reduction: reductions that are exact on small integers.
_EXACT = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def shapes(max_dims: int = 3, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of a few elements, also scalar and empty shapes, and rarely a large shape."""
    small = st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)
    return st.one_of(small, small, small, st.sampled_from([(70_001,), (3, 25_000)]))


def cases() -> st.SearchStrategy[Case]:
    """A shape, a dtype and a layout."""
    return st.builds(Case, shapes(), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS))


@dataclass(frozen=True)
class RandomOperation:
    """An operation of a random program, with the arguments."""

    #: The name of the operation.
    operation: str
    #: The shape, dtype and memory layout of the tensors.
    case: Case
    #: Group rank of the root, for operations that have one.
    root: int
    #: Name of the reduction, for operations that reduce.
    reduction: str
    #: True to call it with ``async_op=True``.
    async_op: bool
    #: Distinguishes this step's values from other steps'.
    seed: int

    def contribution(self, rank: int, part: int = 0) -> Tensor:
        """The input of ``rank`` (for its ``part``-th peer), in the step's layout."""
        return self.case.make(self.seed + 3 * rank + part)

    def value(self, rank: int, part: int = 0) -> Tensor:
        """The values of :meth:`contribution`, contiguous, to compute expected results from."""
        return self.case.value(self.seed + 3 * rank + part)

    def rows(self, src: int, dst: int) -> int:
        """The number of rows of dim 0 that ``src`` sends to ``dst`` in an uneven exchange."""
        return (self.seed + 3 * src + 5 * dst) % 4


@dataclass(frozen=True)
class RandomProgram:
    """A random program: the same operations on all ranks.

    Attributes:
        n: The number of ranks.
        steps: The operations, in order.
    """

    n: int
    steps: tuple[RandomOperation, ...]


@st.composite
def steps(draw: st.DrawFn, n: int) -> RandomOperation:
    """Any operation, with arguments that are legal on ``n`` ranks."""
    case = draw(cases())
    return RandomOperation(
        operation=draw(st.sampled_from(sorted(OPERATIONS))),
        case=case,
        root=draw(st.integers(0, n - 1)),
        reduction=draw(st.sampled_from([op for op in _EXACT if defined(op, case.dtype)])),
        async_op=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def programs(draw: st.DrawFn, max_ranks: int = 4, max_steps: int = 12) -> RandomProgram:
    """A program of at most ``max_ranks`` ranks and ``max_steps`` operations."""
    n = draw(st.integers(1, max_ranks))
    return RandomProgram(n, tuple(draw(st.lists(steps(n), min_size=1, max_size=max_steps))))


@dataclass(frozen=True)
class Started:
    """An operation that was started, with the expected results.

    Attributes:
        work: The handle to wait for; None after a blocking call.
        outputs: The tensors that the operation writes.
        expected: The contents that the outputs must have.
    """

    work: dist.Work | None
    outputs: list[Tensor]
    expected: list[Tensor]


_Starter = Callable[[RandomOperation, int, int, AnyGroup], Started]


def run_program(program: RandomProgram, rank: int) -> None:
    """Run ``program`` on this rank of the default group. Collective.

    It waits for asynchronous steps after all have been started, so that they overlap.

    Raises:
        AssertionError: A result differs; the message holds the step.
    """
    under_way = []
    for step in program.steps:
        started = OPERATIONS[step.operation](step, rank, program.n, None)
        under_way.append((step, started))
    for step, started in under_way:
        if started.work is not None:
            started.work.wait()
        for output, expected in zip(started.outputs, started.expected, strict=True):
            assert_same(output, expected, step)


def _all_reduce(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    step = replace(step, case=step.case.writable())
    tensor = step.contribution(rank)
    work = dist.all_reduce(
        tensor, op=reduce_op(step.reduction), group=group, async_op=step.async_op
    )
    total = folded(step.reduction, [step.value(r) for r in range(n)])
    return Started(work, [tensor], [total])


def _reduce(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    step = replace(step, case=step.case.writable())
    tensor = step.contribution(rank)
    op = reduce_op(step.reduction)
    work = dist.reduce(tensor, group_dst=step.root, op=op, group=group, async_op=step.async_op)
    total = folded(step.reduction, [step.value(r) for r in range(n)])
    return Started(work, [tensor], [total if rank == step.root else step.value(rank)])


def _reduce_scatter(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    output = step.case.blank()
    inputs = [step.contribution(rank, part) for part in range(n)]
    op = reduce_op(step.reduction)
    work = dist.reduce_scatter(output, inputs, op=op, group=group, async_op=step.async_op)
    return Started(
        work, [output], [folded(step.reduction, [step.value(r, rank) for r in range(n)])]
    )


def _reduce_scatter_tensor(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    whole = replace(step, case=replace(step.case, shape=(n, *step.case.shape)))
    output = step.case.blank()
    op = reduce_op(step.reduction)
    work = dist.reduce_scatter_tensor(
        output, whole.contribution(rank), op, group=group, async_op=step.async_op
    )
    return Started(
        work, [output], [folded(step.reduction, [whole.value(r) for r in range(n)])[rank]]
    )


def _broadcast(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    tensor = step.contribution(rank) if rank == step.root else step.case.blank()
    work = dist.broadcast(tensor, group_src=step.root, group=group, async_op=step.async_op)
    return Started(work, [tensor], [step.value(step.root)])


def _all_gather(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    outputs = [step.case.blank() for _ in range(n)]
    work = dist.all_gather(outputs, step.contribution(rank), group=group, async_op=step.async_op)
    return Started(work, outputs, [step.value(r) for r in range(n)])


def _all_gather_into_tensor(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    output = replace(step.case, shape=(n, *step.case.shape)).blank()
    work = dist.all_gather_into_tensor(
        output, step.contribution(rank), group=group, async_op=step.async_op
    )
    return Started(work, [output], [torch.stack([step.value(r) for r in range(n)])])


def _gather(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    outputs = [step.case.blank() for _ in range(n)] if rank == step.root else None
    mine = step.contribution(rank)
    work = dist.gather(mine, outputs, group_dst=step.root, group=group, async_op=step.async_op)
    return Started(work, outputs or [], [step.value(r) for r in range(n)] if outputs else [])


def _scatter(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    inputs = [step.contribution(step.root, dst) for dst in range(n)]
    output = step.case.blank()
    given = inputs if rank == step.root else None
    work = dist.scatter(output, given, group_src=step.root, group=group, async_op=step.async_op)
    return Started(work, [output], [step.value(step.root, rank)])


def _all_to_all(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    outputs = [step.case.blank() for _ in range(n)]
    inputs = [step.contribution(rank, dst) for dst in range(n)]
    work = dist.all_to_all(outputs, inputs, group=group, async_op=step.async_op)
    return Started(work, outputs, [step.value(src, rank) for src in range(n)])


def _all_to_all_single(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    def parcel(src: int, dst: int) -> Case:
        return replace(step.case, shape=(step.rows(src, dst), *step.case.shape[1:]))

    sent = [step.rows(rank, dst) for dst in range(n)]
    received = [step.rows(src, rank) for src in range(n)]
    mine = torch.cat([parcel(rank, dst).value(step.seed + rank + dst) for dst in range(n)])
    output = replace(step.case, shape=(sum(received), *step.case.shape[1:])).blank()
    work = dist.all_to_all_single(output, mine, received, sent, group=group, async_op=step.async_op)
    expected = [parcel(src, rank).value(step.seed + src + rank) for src in range(n)]
    return Started(work, [output], [torch.cat(expected)])


def _ring(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    right, left = (rank + 1) % n, (rank - 1) % n
    output = step.case.blank()
    if n > 1:
        ops = [
            dist.P2POp(dist.isend, step.contribution(rank), group=group, group_peer=right),
            dist.P2POp(dist.irecv, output, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return Started(None, [output], [step.value(left)])
    return Started(None, [], [])


def _barrier(step: RandomOperation, rank: int, n: int, group: AnyGroup) -> Started:
    return Started(dist.barrier(group=group, async_op=step.async_op), [], [])


#: Starts an operation on a rank of a group: (step, group rank, group size, group; None: default).
OPERATIONS: dict[str, _Starter] = {
    starter.__name__.lstrip("_"): starter
    for starter in (
        _all_reduce,
        _reduce,
        _reduce_scatter,
        _reduce_scatter_tensor,
        _broadcast,
        _all_gather,
        _all_gather_into_tensor,
        _gather,
        _scatter,
        _all_to_all,
        _all_to_all_single,
        _ring,
        _barrier,
    )
}


@st.composite
def subsets(draw: st.DrawFn, n: int) -> list[int]:
    """Any non-empty set of ranks below ``n``, sorted."""
    everything = [list(c) for k in range(1, n + 1) for c in itertools.combinations(range(n), k)]
    chosen: list[int] = draw(st.sampled_from(everything))
    return chosen
