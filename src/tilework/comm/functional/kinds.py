"""The collectives: for each the start, the result's shape, and the adjoint.

The adjoints differentiate the sum of all ranks' losses; docs/algorithms/adjoints.md derives them.
Ranks are group ranks here, and ``rows`` the numbers of rows of ``dim`` that belong to each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.forms import FORMS, Form, Side
from tilework.comm.functional.running import (
    KINDS,
    FunctionalCollective,
    GroupOrName,
    constant,
    empty_like,
    run,
    size_of,
)
from tilework.comm.reduce_op import AnyReduceOp, RedOpType, ReduceOp, check_reduction, no_reduction

_FACTOR = "premul_sum*"


@constant
def op_text(op: AnyReduceOp | str) -> str:
    """``op`` as text that :func:`reduction` reads, as "premul_sum*0.5"; raises for others."""
    if isinstance(op, str):
        return op_text(reduction(op.lower()))
    if isinstance(op, RedOpType):
        return str(op.value)
    if not isinstance(op, ReduceOp):
        raise TypeError(no_reduction(op))
    if op.type is RedOpType.PREMUL_SUM:
        return f"{_FACTOR}{op.factor!r}"
    return str(op.type.value)


@functools.lru_cache(maxsize=256)
def reduction(text: str) -> AnyReduceOp:
    """The reduction that ``text`` spells, or a ValueError."""
    try:
        if text.startswith(_FACTOR):
            return ReduceOp(RedOpType.PREMUL_SUM, float(text.removeprefix(_FACTOR)))
        return RedOpType(text)
    except ValueError:
        names = ", ".join(member.value for member in RedOpType)
        raise ValueError(f"unknown reduction {text!r}; known are {names}") from None


def factor_of(text: str) -> float | None:
    """The factor of a PREMUL_SUM in the form ``text``; None for other reductions."""
    return float(text.removeprefix(_FACTOR)) if text.startswith(_FACTOR) else None


Started = tuple[Tensor, Work | None]
Rank = Callable[[], int]


class _Collective(FunctionalCollective):
    """A collective whose adjoint is another collective with equal arguments, as a sum."""

    #: The name of the adjoint collective.
    adjoint_name: ClassVar[str]
    #: The arguments; a collective has those that its schema lists.
    op: str = "sum"
    root: int
    dim: int
    rows: Sequence[int]

    @property
    def keeps_input(self) -> bool:
        return self.op in _NONLINEAR

    def _reduction(self, x: Tensor) -> AnyReduceOp:
        """The reduction; raises if it is not defined for the dtype of ``x``."""
        op = reduction(self.op)
        check_reduction(op, x.dtype)
        return op

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        kind = KINDS[self.adjoint_name]
        args = ["sum" if name == "op" else getattr(self, name) for name in kind.parameters]
        return pull_back(self.op, x, run(kind, grad, group, *args), group)


# -- equal shapes ----------------------------------------------------------------------------


class AllReduce(_Collective):
    """Every rank's tensors combined, on every rank."""

    name, schema, adjoint_name, elementwise = "all_reduce", "str op", "all_reduce", True

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        op, out = reduction(self.op), _copy(x)
        check_reduction(op, x.dtype)
        return out, group.collective("all_reduce", out, out, op, 0, async_op)


class Reduce(_Collective):
    """Every rank's tensors combined on the root; zeros elsewhere."""

    name, schema, adjoint_name, elementwise = "reduce", "str op, int root", "broadcast", True

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        op, at_root = self._reduction(x), group.rank() == self.root
        source = _copy(x) if async_op or at_root else x
        out = source if at_root else x.new_zeros(x.shape)
        target = out if at_root else None
        return out, group.collective("reduce", source, target, op, self.root, async_op)


class Scan(_Collective):
    """The tensors of the ranks up to this one combined; of those from this one on if reversed."""

    name, schema, elementwise = "scan", "str op, bool reverse", True
    reverse: bool

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        op, out = self._reduction(x), _copy(x)
        root = group.size() - 1 if self.reverse else 0
        return out, group.collective(self.name, out, out, op, root, async_op)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        if self.keeps_input:
            raise NotImplementedError(
                f"{self.name} by {self.op} has no gradient here: use all_gather_tensor and reduce "
                f"the rows that count, which autograd differentiates"
            )
        total = run(type(self), grad, group, "sum", not self.reverse)
        return pull_back(self.op, x, total, group)


class Exscan(Scan):
    """The tensors of the ranks before this one combined; of those after it if reversed."""

    name = "exscan"


class Broadcast(_Collective):
    """The root's tensor, on every rank."""

    name, schema, adjoint_name, elementwise = "broadcast", "int root", "reduce", True

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        out = _copy(x) if group.rank() == self.root else empty_like(x)
        return out, group.collective("broadcast", None, out, None, self.root, async_op)


class Permute(_Collective):
    """The tensor of the rank that sends to this rank; zeros if no rank does."""

    name, schema, elementwise = "permute_tensor", "int[] destinations", True
    #: The destination of each rank; -1 for none.
    destinations: Sequence[int]

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
        rows = sent, received
        return out, group.collective("all_to_all_single", source, target, None, 0, async_op, rows)

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(Permute, grad, group, inverse(self.destinations))


def inverse(destinations: Sequence[int]) -> list[int]:
    """For each rank, the rank that sends to it, by the ranks that each sends to; -1 for none."""
    sources = [-1] * len(destinations)
    for source, destination in enumerate(destinations):
        if destination >= 0:
            sources[destination] = source
    return sources


# -- rows ------------------------------------------------------------------------------------


class _Rows(_Collective):
    """Moves the rows of each rank: their places in the tensors follow from the table of forms."""

    #: The forms for ranks with equal, and with different numbers of rows.
    even: ClassVar[Form]
    uneven: ClassVar[Form]

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        rows, dim, rank = self.rows, self.dim, group.rank
        form = self.even if _even(rows) else self.uneven
        root = self.root if form.root else 0
        op = self._reduction(x) if form.reduces else None
        is_root = rank() == root
        if form.inputs.parts == "one":
            _check_rows(rows, group)
            _check_own_rows(rows, group, x.shape[dim])
        else:
            known = is_root or not form.inputs.at_root
            _check_rows(rows, group, x.shape[dim] if known else None)
        source = _front(x, dim, async_op)
        out = _with_rows(x, dim, self._count(form.outputs, rank))
        target = _rows_first(out, dim)
        inputs = self._divided(form.inputs, source, is_root)
        outputs = self._divided(form.outputs, target, is_root)
        return out, group.collective(form.name, inputs, outputs, op, root, async_op)

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        return _with_rows(x, self.dim, self._count(self.uneven.outputs, group_rank))

    def _count(self, side: Side, group_rank: Rank) -> int:
        """The number of rows that this rank's tensor has."""
        if side.parts == "one":
            return self.rows[0] if _even(self.rows) else self.rows[group_rank()]
        return sum(self.rows) if not side.at_root or group_rank() == self.root else 0

    def _divided(self, side: Side, tensor: Tensor, is_root: bool) -> Tensor | list[Tensor] | None:
        """``tensor`` as the form takes it: whole, by ranks, or not at all."""
        if side.parts != "each":
            return tensor
        return list(torch.split(tensor, list(self.rows))) if side.is_here(is_root) else None


class AllGather(_Rows):
    """Every rank's rows, one after the other, on every rank."""

    name, schema, adjoint_name = (
        *("all_gather_tensor", "int dim, SymInt[] rows"),
        "reduce_scatter_tensor",
    )
    even, uneven = FORMS["all_gather_into_tensor"], FORMS["all_gather"]


class ReduceScatter(_Rows):
    """Every rank's tensors combined; this rank's rows of the result."""

    name, schema, adjoint_name = (
        *("reduce_scatter_tensor", "str op, int dim, SymInt[] rows"),
        "all_gather_tensor",
    )
    even, uneven = FORMS["reduce_scatter_tensor"], FORMS["reduce_scatter"]


class Gather(_Rows):
    """Every rank's rows, one after the other, on the root; no rows elsewhere."""

    name, schema, adjoint_name = "gather", "int root, int dim, SymInt[] rows", "scatter"
    even = uneven = FORMS["gather"]


class Scatter(_Rows):
    """This rank's rows of the root's tensor."""

    name, schema, adjoint_name = "scatter", "int root, int dim, SymInt[] rows", "gather"
    even = uneven = FORMS["scatter"]


class AllToAll(_Collective):
    """The rows that each rank sends to this rank, one after the other."""

    name, schema = "all_to_all_single", "SymInt[] received, SymInt[] sent"
    received: Sequence[int]
    sent: Sequence[int]

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        _check_rows(self.received, group)
        _check_rows(self.sent, group, x.shape[0])
        source = _front(x, 0, async_op)
        out = _with_rows(x, 0, sum(self.received))
        rows = list(self.sent), list(self.received)
        return out, group.collective(self.name, source, out, None, 0, async_op, rows)

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        return _with_rows(x, 0, sum(self.received))

    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        return run(AllToAll, grad, group, self.sent, self.received)


# -- one value that all ranks hold ---------------------------------------------------------


class CopyToGroup(_Collective):
    """The tensor itself; gradients are summed over the ranks."""

    name, schema, adjoint_name, local, elementwise = (
        *("copy_to_group", "", "reduce_from_group"),
        *(True, True),
    )

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        return x.view_as(x), None


class ReduceFromGroup(AllReduce):
    """Every rank's tensors summed, on every rank; gradients pass unchanged."""

    name, schema, adjoint_name = "reduce_from_group", "", "copy_to_group"


class ScatterToGroup(_Collective):
    """This rank's rows of a tensor that all ranks hold; gradients are gathered."""

    name, schema, adjoint_name, local = (
        *("scatter_to_group", "int dim, SymInt[] rows"),
        *("gather_from_group", True),
    )

    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> Started:
        _check_rows(self.rows, group, x.shape[self.dim])
        me = group.rank()
        return x.narrow(self.dim, sum(self.rows[:me]), self.rows[me]).clone(), None

    def empty(self, x: Tensor, group_rank: Rank) -> Tensor:
        rows = self.rows[0] if _even(self.rows) else self.rows[group_rank()]
        return empty_like(x.narrow(self.dim, 0, rows))


class GatherFromGroup(AllGather):
    """Every rank's rows, on every rank. Backward: this rank's rows of the result's gradient."""

    name, adjoint_name = "gather_from_group", "scatter_to_group"


# -- adjoints of reductions ------------------------------------------------------------------

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
    """Each element's share in the gradient of an extremum: 1/k for k equal ranks. Collective."""
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
    """An uninitialised tensor like ``x`` with size ``rows`` in ``dim``, outermost in memory."""
    # Collectives know only rows, so results for other dims lie transposed in memory. They are made
    # without views, because autograd allows nobody to write to views that a function returns.
    shape = [*x.shape[:dim], rows, *x.shape[dim + 1 :]]
    order = [dim, *(other for other in range(len(shape)) if other != dim)]
    return torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)


def _even(rows: Sequence[int]) -> bool:
    return rows.count(rows[0]) == len(rows)


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
