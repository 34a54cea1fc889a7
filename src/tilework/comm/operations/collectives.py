"""Collectives on tensors.

Every function here is collective: each rank of ``group`` must call it, in the same order, with
matching arguments. A rank outside the group gets None, with a warning once. Each function blocks
until this rank's part is done and returns None. With ``async_op=True`` it returns a
:class:`~tilework.comm.contract.Work` at once, and the tensors must stay untouched until
``work.wait()`` returns.

Arguments that are wrong by themselves raise ``ValueError`` or ``TypeError`` before anything has
moved, and the group stays usable. Three errors abort the group:
:class:`~tilework.errors.CollectiveMismatchError` if ranks disagree,
:class:`~tilework.errors.PeerLostError` if a rank died, and
:class:`~tilework.errors.CollectiveTimeoutError` if a rank did not come in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.forms import FORMS, MANY_INPUTS, MANY_OUTPUTS, Operation, Parts
from tilework.comm.operations.coalescing import finish, is_async
from tilework.comm.per_call import checks
from tilework.comm.per_call.fast_function import core_first
from tilework.comm.reduce_op import AnyReduceOp, ReduceOp
from tilework.comm.world import AnyGroup, member

__all__ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scan",
    "scatter",
]

_Function = TypeVar("_Function", bound=Callable[..., Work | None])


def _in_core(function: _Function) -> _Function:
    """``function``, of which the core takes the usual calls itself."""
    form = FORMS[function.__name__]
    return core_first(form.inputs.name, form.outputs.name)(function)


@_in_core
def all_reduce(
    tensor: Tensor, op: AnyReduceOp = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Combine ``tensor`` over all ranks; on every rank it becomes the result, with equal bits.

    Args:
        tensor: The same shape and dtype on every rank; overwritten.
        op: The reduction. Contributions are combined in rank order.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.tensor([rank + 1.0])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_ranks(3, program)
        [6.0, 6.0, 6.0]
    """
    return _call("all_reduce", group, async_op, tensor, tensor, op)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: AnyReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """:func:`all_reduce` for several tensors of one dtype and device.

    Example: ``dist.all_reduce_coalesced([x, y])``; see :func:`all_reduce`.
    """
    pg = member(group, "all_reduce_coalesced")
    if pg is None:
        return None
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    tensors = checks.check_tensors(tensors, "tensors")
    checks.same_dtype(tensors, mix_complex=False)
    checks.same_device(tensors)
    return _run_several("all_reduce", pg, async_op, zip(tensors, tensors, strict=True), op)


@_in_core
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: AnyReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combine ``tensor`` over all ranks on rank ``dst``; on other ranks it stays unchanged.

    Args:
        tensor: The same shape and dtype on every rank; overwritten on ``dst``.
        dst: The root's global rank; or give ``group_dst``, the root's group rank.
        op: The reduction. Contributions are combined in rank order.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.tensor([rank + 1.0])
        ...     dist.reduce(x, dst=1)
        ...     return x.item()
        >>> run_ranks(2, program)
        [1.0, 3.0]
    """
    root = dst, group_dst
    return _call("reduce", group, async_op, tensor, tensor, op, root)


def scan(
    tensor: Tensor,
    op: AnyReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    reverse: bool = False,
) -> Work | None:
    """Combine ``tensor`` over the ranks up to this one, in place: MPI's inclusive prefix reduction.

    Args:
        tensor: The same shape and dtype on every rank; overwritten.
        op: The reduction, but AVG. Contributions are combined in rank order.
        reverse: Combine over the ranks from this one on; the same on every rank.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.tensor([rank + 1.0])
        ...     dist.scan(x)
        ...     return x.item()
        >>> run_ranks(3, program)
        [1.0, 3.0, 6.0]
    """
    return _call("scan", group, async_op, tensor, tensor, op, reverse=reverse)


def exscan(
    tensor: Tensor,
    op: AnyReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    reverse: bool = False,
) -> Work | None:
    """:func:`scan` without this rank's own ``tensor``: MPI's exclusive prefix reduction.

    On the rank that has no rank before it ``tensor`` becomes the reduction of nothing: 0 for SUM,
    1 for PRODUCT, the largest number for MIN.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     rows = torch.tensor([rank + 2])
        ...     dist.exscan(rows)  # where this rank's rows begin among those of all ranks
        ...     return rows.item()
        >>> run_ranks(3, program)
        [0, 2, 5]
    """
    return _call("exscan", group, async_op, tensor, tensor, op, reverse=reverse)


@_in_core
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy rank ``src``'s ``tensor`` to every rank.

    Args:
        tensor: The same shape and dtype on every rank; overwritten except on ``src``.
        src: The root's global rank; or give ``group_src``, the root's group rank.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.tensor([float(rank)])
        ...     dist.broadcast(x, src=1)
        ...     return x.item()
        >>> run_ranks(2, program)
        [1.0, 1.0]
    """
    root = src, group_src
    return _call("broadcast", group, async_op, None, tensor, None, root)


@_in_core
def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """``tensor_list[r]`` becomes rank r's ``tensor``, on every rank.

    Args:
        tensor_list: One tensor per rank, with as many elements as that rank's ``tensor``:
            ranks may contribute different amounts. Overwritten.
        tensor: This rank's contribution.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = [torch.zeros(r + 1) for r in range(2)]
        ...     dist.all_gather(out, torch.full((rank + 1,), float(rank)))
        ...     return [x.tolist() for x in out]
        >>> run_ranks(2, program)[0]
        [[0.0], [1.0, 1.0]]
    """
    return _call("all_gather", group, async_op, tensor, tensor_list)


@_in_core
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """``output_tensor`` becomes all ranks' ``input_tensor``, one after the other in memory.

    Args:
        output_tensor: N times the elements of ``input_tensor``: concatenated (N * rows, …) or
            stacked (N, rows, …). Overwritten.
        input_tensor: The same number of elements on every rank.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = torch.zeros(2)
        ...     dist.all_gather_into_tensor(out, torch.tensor([rank + 1.0]))
        ...     return out.tolist()
        >>> run_ranks(2, program)[1]
        [1.0, 2.0]
    """
    return _call("all_gather_into_tensor", group, async_op, input_tensor, output_tensor)


def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """``output_tensor_lists[r][i]`` becomes rank r's ``input_tensor_list[i]``, on every rank.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = [[torch.zeros(1), torch.zeros(2)] for _ in range(2)]
        ...     dist.all_gather_coalesced(out, [torch.ones(1) * rank, torch.ones(2)])
        ...     return [[x.tolist() for x in of_rank] for of_rank in out]
        >>> run_ranks(2, program)[0]
        [[[0.0], [1.0, 1.0]], [[1.0], [1.0, 1.0]]]
    """
    pg = member(group, "all_gather_coalesced")
    if pg is None:
        return None
    sources = checks.check_tensors(input_tensor_list, "input_tensor_list")
    for r, outputs in enumerate(output_tensor_lists):
        checks.check_tensors(outputs, f"output_tensor_lists[{r}]")
        if len(outputs) != len(sources):
            raise ValueError(
                f"output_tensor_lists[{r}] must have one tensor for each of the {len(sources)} "
                f"inputs, got {len(outputs)}"
            )
    checks.same_dtype([*sources, *chain(*output_tensor_lists)])
    columns = map(list, zip(*output_tensor_lists, strict=True))
    return _run_several("all_gather", pg, async_op, zip(sources, columns, strict=True))


@_in_core
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """On rank ``dst``, ``gather_list[r]`` becomes rank r's ``tensor``.

    Args:
        tensor: This rank's contribution; ranks may contribute different amounts.
        gather_list: On ``dst`` one tensor per rank, overwritten; None elsewhere.
        dst: The root's global rank (0 if neither ``dst`` nor ``group_dst`` is given).

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = [torch.zeros(1) for _ in range(2)] if rank == 0 else None
        ...     dist.gather(torch.tensor([rank + 1.0]), out, dst=0)
        ...     return out and [x.item() for x in out]
        >>> run_ranks(2, program)
        [[1.0, 2.0], None]
    """
    root = dst, group_dst
    return _call("gather", group, async_op, tensor, gather_list, None, root)


@_in_core
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """``tensor`` becomes rank ``src``'s ``scatter_list[r]`` on each rank r.

    Args:
        tensor: Overwritten; ranks may receive different amounts.
        scatter_list: On ``src`` one tensor per rank; None elsewhere.
        src: The root's global rank (0 if neither ``src`` nor ``group_src`` is given).

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.zeros(1)
        ...     parts = [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None
        ...     dist.scatter(x, parts, src=0)
        ...     return x.item()
        >>> run_ranks(2, program)
        [5.0, 6.0]
    """
    root = src, group_src
    return _call("scatter", group, async_op, scatter_list, tensor, None, root)


@_in_core
def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: AnyReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """``output`` becomes all ranks' ``input_list[r]`` combined, on each rank r.

    Args:
        output: Overwritten; ranks may receive different amounts.
        input_list: One tensor per rank, of the same shapes on all ranks.
        op: The reduction. Contributions are combined in rank order.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = torch.zeros(1)
        ...     dist.reduce_scatter(out, [torch.tensor([1.0]), torch.tensor([10.0])])
        ...     return out.item()
        >>> run_ranks(2, program)
        [2.0, 20.0]
    """
    return _call("reduce_scatter", group, async_op, input_list, output, op)


@_in_core
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: AnyReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """``output`` becomes the r-th equal part of all ranks' ``input`` combined, on each rank r.

    Args:
        output: Overwritten.
        input: N times the elements of ``output``, in memory order.
        op: The reduction. Contributions are combined in rank order.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = torch.zeros(1)
        ...     dist.reduce_scatter_tensor(out, torch.tensor([1.0, 10.0]))
        ...     return out.item()
        >>> run_ranks(2, program)
        [2.0, 20.0]
    """
    return _call("reduce_scatter_tensor", group, async_op, input, output, op)


@_in_core
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """``output_tensor_list[r]`` becomes rank r's ``input_tensor_list[this rank]``.

    Args:
        output_tensor_list: For each rank r a tensor of the size that rank r sends to this rank.
            Overwritten.
        input_tensor_list: For each rank r the tensor to send to rank r.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = [torch.zeros(1), torch.zeros(1)]
        ...     dist.all_to_all(out, [torch.tensor([10.0 * rank + r]) for r in range(2)])
        ...     return [x.item() for x in out]
        >>> run_ranks(2, program)
        [[0.0, 10.0], [1.0, 11.0]]
    """
    return _call("all_to_all", group, async_op, input_tensor_list, output_tensor_list)


@_in_core
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """Send part r of ``input`` to rank r, and receive rank r's part as part r of ``output``.

    Args:
        output: Overwritten.
        input: The tensor whose rows (dim 0) are divided among the ranks.
        output_split_sizes: Rows received from each rank; None: equal parts.
        input_split_sizes: Rows sent to each rank; None: equal parts.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = torch.zeros(2)
        ...     dist.all_to_all_single(out, torch.arange(2.0) + 10 * rank)
        ...     return out.tolist()
        >>> run_ranks(2, program)
        [[0.0, 10.0], [1.0, 11.0]]
    """
    rows = input_split_sizes, output_split_sizes
    return _call("all_to_all_single", group, async_op, input, output, rows=rows)


@_in_core
def barrier(
    group: AnyGroup = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    *,
    timeout: timedelta | None = None,
) -> Work | None:
    """Return once every rank of the group has entered.

    Args:
        device_ids: Accepted for torch's sake.
        timeout: The time to wait for the other ranks; None: the group's timeout.

    Raises:
        CollectiveTimeoutError: Some ranks did not come in time; ``error.ranks`` are these ranks.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: dist.barrier())
        [None, None]
    """
    return _call("barrier", group, async_op, timeout=timeout)


def monitored_barrier(
    group: AnyGroup = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A blocking barrier with a separate timeout, whose failure names the missing ranks.

    Args:
        timeout: The time to wait for the other ranks; None: the group's timeout.
        wait_all_ranks: Accepted for torch's sake: all missing ranks are always named.

    Raises:
        CollectiveTimeoutError: Some ranks did not come; ``error.ranks`` are these ranks.

    Example: ``dist.monitored_barrier()`` on every rank, as with :func:`barrier`.
    """
    pg = member(group, "monitored_barrier")
    if pg is not None:
        pg.monitored_barrier(timeout)


def _call(  # noqa: PLR0913
    name: str,
    group: AnyGroup,
    async_op: bool,
    inputs: Parts | None = None,
    outputs: Parts | None = None,
    op: AnyReduceOp | None = None,
    root: tuple[int | None, int | None] = (None, None),
    rows: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    timeout: timedelta | None = None,
    reverse: bool = False,
) -> Work | None:
    """Record and run a call. ``root`` is a global and a group rank, of which one is given."""
    pg = member(group, name)
    if pg is None:
        return None
    form = FORMS[name]
    operation = Operation.called(name, inputs, outputs, op)
    operation.in_rows, operation.out_rows = rows
    operation.limit = timeout
    if reverse:
        operation.root = pg.size() - 1
    if form.root:
        default = pg.global_ranks[0] if form.kind in MANY_INPUTS | MANY_OUTPUTS else None
        operation.root = checks.group_root(pg, *root, form.root, default)
    return run(operation, pg, async_op)


def run(operation: Operation, pg: ProcessGroup, async_op: bool) -> Work | None:
    """Run a collective on the caller's tensors: by the fast path if possible, else after checks."""
    form, rank = operation.form, pg.rank()
    if form.kind == "reduce" and rank != operation.root:
        operation.outputs = ()
    if not async_op and operation.limit is None and pg.fast_path.run(*form.fast_call(operation)):
        return None
    checks.check_operation(operation, rank, pg.size())
    operation.is_async = is_async(async_op)
    return finish(pg.start(operation), async_op)


def _run_several(
    name: str,
    pg: ProcessGroup,
    async_op: bool,
    tensors: Iterable[tuple[Tensor, Parts]],
    op: AnyReduceOp | None = None,
) -> Work | None:
    """Run a collective for each pair of inputs and outputs; all are checked before the first."""
    operations = [Operation.called(name, *pair, op) for pair in tensors]
    for operation in operations:
        checks.check_operation(operation, pg.rank(), pg.size())
        operation.is_async = is_async(async_op)
    return finish(pg.as_one([pg.start(operation) for operation in operations]), async_op)


def all_reduce_sparse(tensor: Tensor, op: AnyReduceOp, group: ProcessGroup) -> None:
    """Sum a sparse COO tensor over all ranks, in place on every rank; refuses others. Blocks.

    The shape is the same on every rank, the entries may differ. Every rank receives all ranks'
    entries, so the cost grows with their total number.
    """
    if tensor.layout is not torch.sparse_coo or op is not ReduceOp.SUM:
        raise ValueError(
            f"all_reduce of sparse tensors sums tensors of layout sparse_coo, got {op} of "
            f"{str(tensor.layout).removeprefix('torch.')}; use dense tensors (to_dense())"
        )
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    all_gather(counts, torch.tensor([values.shape[0]]), group)
    entries = [int(count) for count in counts]
    all_indices = [indices.new_empty((n, indices.shape[0])) for n in entries]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in entries]
    all_gather(all_indices, indices.t().contiguous(), group)
    all_gather(all_values, values, group)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices).t(), torch.cat(all_values), tensor.shape, check_invariants=True
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())  # a detach() would have separate entries
