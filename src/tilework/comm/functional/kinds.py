"""The collectives: for each the start, the result's shape, and the adjoint.

The adjoints differentiate the sum of all ranks' losses; docs/algorithms/adjoints.md derives them.
Ranks are group ranks here, and ``rows`` the numbers of rows of ``dim`` that belong to each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilework.comm.contract import Options, ProcessGroup, Work
from tilework.comm.functional import primitives
from tilework.comm.functional.reductions import factor_of, reduction
from tilework.comm.functional.running import (
    FunctionalCollective,
    GroupOrName,
    empty_like,
    run,
    size_of,
)
from tilework.comm.reduce_op import check_reduction

Started = tuple[Tensor, Work | None]
Rank = Callable[[], int]


# -- reductions ------------------------------------------------------------------------------


class AllReduce(FunctionalCollective):
    """Every rank's tensors combined, on every rank."""

    name, schema, elementwise = "all_reduce", "str op", True

    def __init__(self, op: str) -> None:
        self.op = op

    @property
    def keeps_input(self) -> bool:
        return self.op in _NONLINEAR

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        op = reduction(self.op)
        check_reduction(op, x.dtype)
        out = _copy(x)
        return out, primitives.all_reduce(group, out, op, async_op)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return pull_back(self.op, x, run(AllReduce, grad, group, "sum"), group)


class Reduce(FunctionalCollective):
    """Every rank's tensors combined on the root; zeros elsewhere."""

    name, schema, elementwise = "reduce", "str op, int root", True

    def __init__(self, op: str, root: int) -> None:
        self.op, self.root = op, root

    @property
    def keeps_input(self) -> bool:
        return self.op in _NONLINEAR

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        op = reduction(self.op)
        check_reduction(op, x.dtype)
        options = Options(op, self.root, asyncOp=async_op)
        if group.rank() == self.root:
            out = _copy(x)
            return out, group.reduce([out], options)
        source = _copy(x) if async_op else x
        return x.new_zeros(x.shape), group.reduce([source], options)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return pull_back(self.op, x, run(Broadcast, grad, group, self.root), group)


class ReduceScatter(FunctionalCollective):
    """Every rank's tensors combined; this rank's rows of the result."""

    name, schema = "reduce_scatter_tensor", "str op, int dim, SymInt[] rows"

    def __init__(self, op: str, dim: int, rows: Sequence[int]) -> None:
        self.op, self.dim, self.rows = op, dim, rows

    @property
    def keeps_input(self) -> bool:
        return self.op in _NONLINEAR

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        op = reduction(self.op)
        check_reduction(op, x.dtype)
        _check_rows(self.rows, group, x.shape[self.dim])
        source = _front(x, self.dim, async_op)
        out = _with_rows(x, self.dim, self.rows[group.rank()])
        target = _rows_first(out, self.dim)
        if _even(self.rows):
            return out, primitives.reduce_scatter_tensor(group, target, source, op, async_op)
        inputs = _parts(source, self.rows)
        return out, primitives.reduce_scatter(group, target, inputs, op, async_op)

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        rows = self.rows[0] if _even(self.rows) else self.rows[group_rank()]
        return _with_rows(x, self.dim, rows)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        total = run(AllGather, grad, group, self.dim, self.rows)
        return pull_back(self.op, x, total, group)


#: Reductions whose adjoints need the rank's input, not only the gradient.
_NONLINEAR = frozenset({"min", "max", "product"})


def pull_back(op: str, x: Tensor | None, total: Tensor, group: GroupOrName) -> Tensor:
    """The gradient of this rank's ``x``, the input of a reduction by ``op``.

    ``total`` is the gradient of the result, summed over all ranks that have the result. Collective
    for the reductions that need ``x`` (min, max, product).
    """
    factor = factor_of(op)
    if factor is not None:
        return total * factor
    if op == "avg":
        return total / size_of(group)
    if x is None:
        return total
    if op == "product":
        return total * _product_of_others(x, group).conj()
    return total * _share(x.detach(), op, group)


def _share(x: Tensor, op: str, group: GroupOrName) -> Tensor:
    """The share of each element of this rank's ``x`` in the gradient of a minimum or maximum.

    1 where only this rank has the extremum, 1/k where k ranks with this rank do, else 0.
    Collective.
    """
    extremum = run(AllReduce, x, group, op)
    mine = ((x == extremum) | (x.isnan() & extremum.isnan())).to(x.dtype)
    return mine / run(AllReduce, mine, group, "sum")


def _product_of_others(x: Tensor, group: GroupOrName) -> Tensor:
    # Dividing the product by x would be wrong at zeros, and if the product overflows.
    size = size_of(group)
    ones = [1] * size
    everyone = run(AllGather, x.unsqueeze(0), group, 0, ones)
    me = run(ScatterToGroup, torch.eye(size, device=x.device), group, 0, ones)
    mine = (me.reshape(size, *([1] * x.dim())) != 0).expand_as(everyone)
    return everyone.masked_fill(mine, 1).prod(0)


# -- moves -----------------------------------------------------------------------------------


class AllGather(FunctionalCollective):
    """Every rank's rows, one after the other, on every rank."""

    name, schema = "all_gather_tensor", "int dim, SymInt[] rows"

    def __init__(self, dim: int, rows: Sequence[int]) -> None:
        self.dim, self.rows = dim, rows

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        _check_rows(self.rows, group)
        _check_own_rows(self.rows, group, x.shape[self.dim])
        source = _front(x, self.dim, async_op)
        out = _with_rows(x, self.dim, sum(self.rows))
        target = _rows_first(out, self.dim)
        if _even(self.rows):
            return out, primitives.all_gather_into_tensor(group, target, source, async_op)
        return out, primitives.all_gather(group, _parts(target, self.rows), source, async_op)

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        return _with_rows(x, self.dim, sum(self.rows))

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(ReduceScatter, grad, group, "sum", self.dim, self.rows)


class AllToAll(FunctionalCollective):
    """The rows that each rank sends to this rank, one after the other."""

    name, schema = "all_to_all_single", "SymInt[] received, SymInt[] sent"

    def __init__(self, received: Sequence[int], sent: Sequence[int]) -> None:
        self.received, self.sent = received, sent

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        _check_rows(self.received, group)
        _check_rows(self.sent, group, x.shape[0])
        source = _front(x, 0, async_op)
        out = _with_rows(x, 0, sum(self.received))
        rows = list(self.sent), list(self.received)
        return out, primitives.all_to_all_single(group, out, source, rows, async_op)

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        return _with_rows(x, 0, sum(self.received))

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(AllToAll, grad, group, self.sent, self.received)


class Broadcast(FunctionalCollective):
    """The root's tensor, on every rank."""

    name, schema, elementwise = "broadcast", "int root", True

    def __init__(self, root: int) -> None:
        self.root = root

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        out = _copy(x) if group.rank() == self.root else empty_like(x)
        return out, primitives.broadcast(group, out, self.root, async_op)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(Reduce, grad, group, "sum", self.root)


class Gather(FunctionalCollective):
    """Every rank's rows, one after the other, on the root; no rows elsewhere."""

    name, schema = "gather", "int root, int dim, SymInt[] rows"

    def __init__(self, root: int, dim: int, rows: Sequence[int]) -> None:
        self.root, self.dim, self.rows = root, dim, rows

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        _check_rows(self.rows, group)
        _check_own_rows(self.rows, group, x.shape[self.dim])
        source = _front(x, self.dim, async_op)
        at_root = group.rank() == self.root
        out = _with_rows(x, self.dim, sum(self.rows) if at_root else 0)
        lists = [_parts(_rows_first(out, self.dim), self.rows)] if at_root else []
        work = group.gather(lists, [source], Options(rootRank=self.root, asyncOp=async_op))
        return out, work

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        rows = sum(self.rows) if group_rank() == self.root else 0
        return _with_rows(x, self.dim, rows)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(Scatter, grad, group, self.root, self.dim, self.rows)


class Scatter(FunctionalCollective):
    """This rank's rows of the root's tensor."""

    name, schema = "scatter", "int root, int dim, SymInt[] rows"

    def __init__(self, root: int, dim: int, rows: Sequence[int]) -> None:
        self.root, self.dim, self.rows = root, dim, rows

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        at_root = group.rank() == self.root
        _check_rows(self.rows, group, x.shape[self.dim] if at_root else None)
        source = _front(x, self.dim, async_op)
        out = _with_rows(x, self.dim, self.rows[group.rank()])
        target = _rows_first(out, self.dim)
        lists = [_parts(source, self.rows)] if at_root else []
        work = group.scatter([target], lists, Options(rootRank=self.root, asyncOp=async_op))
        return out, work

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        rows = self.rows[0] if _even(self.rows) else self.rows[group_rank()]
        return _with_rows(x, self.dim, rows)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(Gather, grad, group, self.root, self.dim, self.rows)


class Permute(FunctionalCollective):
    """The tensor of the rank that sends to this rank; zeros if no rank does."""

    name, schema, elementwise = "permute_tensor", "int[] destinations", True

    def __init__(self, destinations: Sequence[int]) -> None:
        #: The destination of each rank; -1 for none.
        self.destinations = destinations

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        _check_count(self.destinations, group, "destinations")
        me, size = group.rank(), group.size()
        sources = inverse(self.destinations)
        sent, received = [0] * size, [0] * size
        if self.destinations[me] >= 0:
            sent[self.destinations[me]] = x.numel()
        source = _front(x, 0, async_op).view(-1)[: sum(sent)]
        if sources[me] < 0:
            out = x.new_zeros(x.shape)
        else:
            out = empty_like(x)
            received[sources[me]] = x.numel()
        target = out.view(-1)[: sum(received)]
        work = group.alltoall_single(target, source, received, sent, Options(asyncOp=async_op))
        return out, work

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(Permute, grad, group, inverse(self.destinations))


def inverse(destinations: Sequence[int]) -> list[int]:
    """For each rank, the rank that sends to it; -1 if no rank does.

    ``destinations`` has, for each rank, the rank that it sends to, or -1.
    """
    sources = [-1] * len(destinations)
    for source, destination in enumerate(destinations):
        if destination >= 0:
            sources[destination] = source
    return sources


# -- one value that all ranks hold ---------------------------------------------------------


class CopyToGroup(FunctionalCollective):
    """The tensor itself; gradients are summed over the ranks."""

    name, schema, local, elementwise = "copy_to_group", "", True, True

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        return x.view_as(x), None

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(ReduceFromGroup, grad, group)


class ReduceFromGroup(FunctionalCollective):
    """Every rank's tensors summed, on every rank; gradients pass unchanged."""

    name, schema, elementwise = "reduce_from_group", "", True

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        return AllReduce("sum").start(group, x, async_op)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(CopyToGroup, grad, group)


class ScatterToGroup(FunctionalCollective):
    """This rank's rows of a tensor that all ranks hold; gradients are gathered."""

    name, schema, local = "scatter_to_group", "int dim, SymInt[] rows", True

    def __init__(self, dim: int, rows: Sequence[int]) -> None:
        self.dim, self.rows = dim, rows

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        _check_rows(self.rows, group, x.shape[self.dim])
        me = group.rank()
        return x.narrow(self.dim, sum(self.rows[:me]), self.rows[me]).clone(), None

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        rows = self.rows[0] if _even(self.rows) else self.rows[group_rank()]
        return empty_like(x.narrow(self.dim, 0, rows))

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(GatherFromGroup, grad, group, self.dim, self.rows)


class GatherFromGroup(AllGather):
    """Every rank's rows, on every rank. Backward: this rank's rows of the result's gradient."""

    name = "gather_from_group"

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(ScatterToGroup, grad, group, self.dim, self.rows)


#: Every collective, to be registered as an operator.
KINDS: tuple[type[FunctionalCollective], ...] = (
    *(AllReduce, Reduce, ReduceScatter, AllGather, AllToAll, Broadcast, Gather, Scatter),
    *(Permute, CopyToGroup, ReduceFromGroup, ScatterToGroup, GatherFromGroup),
)


# -- shapes and memory -----------------------------------------------------------------------


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _front(x: Tensor, dim: int, async_op: bool) -> Tensor:
    """``x`` with ``dim`` moved to the front, contiguous; always a copy if ``async_op`` is true."""
    moved = _rows_first(x, dim).resolve_conj().resolve_neg()
    return _copy(moved) if async_op else moved.contiguous()


def _rows_first(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0) if dim else x


def _with_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """An uninitialised tensor of the shape of ``x``, but with size ``rows`` in ``dim``.

    In memory ``dim`` is the outermost dim.
    """
    # Collectives know only rows, so results for other dims lie transposed in memory. They are made
    # without views, because autograd allows nobody to write to views that a function returns.
    shape = [*x.shape[:dim], rows, *x.shape[dim + 1 :]]
    order = [dim, *(other for other in range(len(shape)) if other != dim)]
    return torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)


def _parts(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    return list(torch.split(tensor, list(rows)))


def _even(rows: Sequence[int]) -> bool:
    return all(count == rows[0] for count in rows)


# -- checks -------------------------------------------------------------------------------


def _check_count(values: Sequence[int], group: ProcessGroup, what: str) -> None:
    if len(values) != group.size():
        raise ValueError(
            f"{what} must have one number for each of the {group.size()} ranks of group "
            f"{group.group_name!r}, got {list(values)}; a traced function runs on groups of the "
            f"size that it was traced with"
        )


def _check_rows(rows: Sequence[int], group: ProcessGroup, total: int | None = None) -> None:
    _check_count(rows, group, "the sizes")
    if min(rows) < 0 or (total is not None and sum(rows) != total):
        raise ValueError(
            f"the sizes must be numbers of rows that sum to the tensor's {total}, got {list(rows)}"
        )


def _check_own_rows(rows: Sequence[int], group: ProcessGroup, count: int) -> None:
    expected = rows[group.rank()]
    if expected != count:
        raise ValueError(
            f"group rank {group.rank()} has a tensor with {count} rows, and the sizes "
            f"{list(rows)} say {expected}"
        )
