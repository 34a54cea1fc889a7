"""Collectives on tensors.

Every function here is collective: each rank of ``group`` must call it, in the same order, with
matching arguments. A rank outside the group gets None, with a warning once. Each function blocks
until this rank's part is done and returns None. With ``async_op=True`` it returns a
:class:`~tilework.comm.contract.Work` at once, and the tensors must stay untouched until
``work.wait()`` returns.

Arguments that are wrong by themselves raise ``ValueError`` or ``TypeError`` before anything has
moved, and the group goes on. Three errors abort the group:
:class:`~tilework.errors.CollectiveMismatchError` if ranks disagree,
:class:`~tilework.errors.PeerLostError` if a rank died, and
:class:`~tilework.errors.CollectiveTimeoutError` if a rank did not come in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from tilework.comm.contract import Work
from tilework.comm.operations.coalescing import finish, options
from tilework.comm.per_call import checks
from tilework.comm.per_call.fast_function import core_first
from tilework.comm.reduce_op import AnyReduceOp, ReduceOp, check_reduction
from tilework.comm.world import AnyGroup, member


@core_first(inputs="tensor", outputs="tensor")
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
    pg = member(group, "all_reduce")
    if pg is None:
        return None
    if not async_op and pg.fast_path.run("all_reduce", tensor, tensor, op):
        return None
    tensor = checks.check_tensor(tensor, "tensor")
    check_reduction(op, tensor.dtype)
    return finish(pg.allreduce([tensor], options(async_op, op)), async_op)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: AnyReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:
    """:func:`all_reduce` for several tensors of one dtype and device.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     xs = [torch.ones(1), torch.full((2,), 2.0)]
        ...     dist.all_reduce_coalesced(xs)
        ...     return [x.tolist() for x in xs]
        >>> run_ranks(2, program)[1]
        [[2.0], [4.0, 4.0]]
    """
    pg = member(group, "all_reduce_coalesced")
    if pg is None:
        return None
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    tensors = checks.check_tensors(tensors, "tensors")
    checks.same_dtype(tensors, mix_complex=False)
    checks.same_device(tensors)
    for tensor in tensors[:1]:
        check_reduction(op, tensor.dtype)
    return finish(pg.allreduce_coalesced(tensors, options(async_op, op)), async_op)


@core_first(inputs="tensor", outputs="tensor")
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: AnyReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combine ``tensor`` over all ranks into rank ``dst``'s; other ranks' stay unchanged.

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
    pg = member(group, "reduce")
    if pg is None:
        return None
    root = checks.group_root(pg, dst, group_dst, "dst")
    output = tensor if pg.rank() == root else None
    if not async_op and pg.fast_path.run("reduce", tensor, output, op, root):
        return None
    tensor = checks.check_tensor(tensor, "tensor")
    check_reduction(op, tensor.dtype)
    return finish(pg.reduce([tensor], options(async_op, op, root)), async_op)


@core_first(outputs="tensor")
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
    pg = member(group, "broadcast")
    if pg is None:
        return None
    root = checks.group_root(pg, src, group_src, "src")
    if not async_op and pg.fast_path.run("broadcast", None, tensor, None, root):
        return None
    tensor = checks.check_tensor(tensor, "tensor")
    return finish(pg.broadcast([tensor], options(async_op, root=root)), async_op)


@core_first(inputs="tensor", outputs="tensor_list")
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
    pg = member(group, "all_gather")
    if pg is None:
        return None
    if not async_op and pg.fast_path.run("all_gather", tensor, tensor_list):
        return None
    tensor_list = checks.check_tensors(tensor_list, "tensor_list")
    tensor = checks.check_tensor(tensor, "tensor")
    checks.same_dtype(tensor_list, tensor)
    checks.check_tensors(tensor_list, "tensor_list", pg.size())
    checks.same_device(tensor_list, tensor)
    checks.same_elements(tensor, "tensor", tensor_list[pg.rank()], f"tensor_list[{pg.rank()}]")
    return finish(pg.allgather([list(tensor_list)], [tensor], options(async_op)), async_op)


@core_first(inputs="input_tensor", outputs="output_tensor")
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
    pg = member(group, "all_gather_into_tensor")
    if pg is None:
        return None
    if not async_op and pg.fast_path.run("all_gather_into_tensor", input_tensor, output_tensor):
        return None
    output_tensor = checks.check_tensor(output_tensor, "output_tensor")
    input_tensor = checks.check_tensor(input_tensor, "input_tensor")
    checks.same_dtype(output_tensor, input_tensor)
    checks.same_device(output_tensor, input_tensor)
    checks.stacked_elements(output_tensor, "output_tensor", input_tensor, "input_tensor", pg.size())
    work = pg.allgather_into_tensor(output_tensor, input_tensor, options(async_op))
    return finish(work, async_op)


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
    input_tensor_list = checks.check_tensors(input_tensor_list, "input_tensor_list")
    output_tensor_lists = [
        checks.check_tensors(outputs, f"output_tensor_lists[{r}]")
        for r, outputs in enumerate(output_tensor_lists)
    ]
    for outputs in output_tensor_lists:
        for output, source in zip(outputs, input_tensor_list, strict=False):
            checks.same_dtype(output, source)
        checks.same_dtype(outputs)
    if len(output_tensor_lists) != pg.size():
        raise ValueError(
            f"output_tensor_lists must have one list for each of the group's {pg.size()} ranks, "
            f"got {len(output_tensor_lists)}"
        )
    for r, outputs in enumerate(output_tensor_lists):
        if len(outputs) != len(input_tensor_list):
            raise ValueError(
                f"output_tensor_lists[{r}] must have one tensor for each of the "
                f"{len(input_tensor_list)} inputs, got {len(outputs)}"
            )
    own_outputs = output_tensor_lists[pg.rank()]
    for i, (output, source) in enumerate(zip(own_outputs, input_tensor_list, strict=True)):
        checks.same_elements(
            source, f"input_tensor_list[{i}]", output, f"output_tensor_lists[{pg.rank()}][{i}]"
        )
    work = pg.allgather_coalesced(output_tensor_lists, input_tensor_list, options(async_op))
    return finish(work, async_op)


@core_first(inputs="tensor", outputs="gather_list")
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
    pg = member(group, "gather")
    if pg is None:
        return None
    root = checks.group_root(pg, dst, group_dst, "dst", default=pg.global_ranks[0])
    if not async_op and pg.fast_path.run("gather", tensor, gather_list, None, root):
        return None
    tensor = checks.check_tensor(tensor, "tensor")
    outputs = _optional_list(gather_list, "gather_list")
    checks.same_dtype(tensor, outputs)
    _check_root_list(pg.rank() == root, gather_list, "gather_list", "dst", pg.size())
    checks.same_device(tensor, outputs)
    if outputs:
        checks.same_elements(tensor, "tensor", outputs[root], f"gather_list[{root}]")
    lists = [outputs] if pg.rank() == root else []
    return finish(pg.gather(lists, [tensor], options(async_op, root=root)), async_op)


@core_first(inputs="scatter_list", outputs="tensor")
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
    pg = member(group, "scatter")
    if pg is None:
        return None
    root = checks.group_root(pg, src, group_src, "src", default=pg.global_ranks[0])
    if not async_op and pg.fast_path.run("scatter", scatter_list, tensor, None, root):
        return None
    tensor = checks.check_tensor(tensor, "tensor")
    inputs = _optional_list(scatter_list, "scatter_list")
    checks.same_dtype(tensor, inputs)
    _check_root_list(pg.rank() == root, scatter_list, "scatter_list", "src", pg.size())
    checks.same_device(tensor, inputs)
    if inputs:
        checks.same_elements(tensor, "tensor", inputs[root], f"scatter_list[{root}]")
    lists = [inputs] if pg.rank() == root else []
    return finish(pg.scatter([tensor], lists, options(async_op, root=root)), async_op)


def _optional_list(tensors: list[Tensor] | None, name: str) -> list[Tensor]:
    if tensors is None:
        return []
    return checks.check_tensors(tensors, name)


def _check_root_list(
    is_root: bool, tensors: list[Tensor] | None, name: str, root_name: str, size: int
) -> None:
    if is_root and not tensors:
        raise ValueError(f"{name} must be given on {root_name}, one tensor per rank")
    if is_root:
        checks.check_tensors(tensors, name, size)
    elif tensors:
        raise ValueError(f"{name} must not be given except on {root_name}: pass None")


@core_first(inputs="input_list", outputs="output")
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
    pg = member(group, "reduce_scatter")
    if pg is None:
        return None
    if not async_op and pg.fast_path.run("reduce_scatter", input_list, output, op):
        return None
    output = checks.check_tensor(output, "output")
    input_list = checks.check_tensors(input_list, "input_list")
    checks.same_dtype(output, input_list, mix_complex=False)
    checks.check_tensors(input_list, "input_list", pg.size())
    checks.same_device(output, input_list)
    check_reduction(op, output.dtype)
    checks.same_elements(output, "output", input_list[pg.rank()], f"input_list[{pg.rank()}]")
    return finish(pg.reduce_scatter([output], [list(input_list)], options(async_op, op)), async_op)


@core_first(inputs="input", outputs="output")
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
    pg = member(group, "reduce_scatter_tensor")
    if pg is None:
        return None
    if not async_op and pg.fast_path.run("reduce_scatter_tensor", input, output, op):
        return None
    output = checks.check_tensor(output, "output")
    input = checks.check_tensor(input, "input")
    checks.same_dtype(output, input, mix_complex=False)
    checks.same_device(output, input)
    check_reduction(op, output.dtype)
    checks.stacked_elements(input, "input", output, "output", pg.size())
    return finish(pg.reduce_scatter_tensor(output, input, options(async_op, op)), async_op)


@core_first(inputs="input_tensor_list", outputs="output_tensor_list")
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
    pg = member(group, "all_to_all")
    if pg is None:
        return None
    if not async_op and pg.fast_path.run("all_to_all", input_tensor_list, output_tensor_list):
        return None
    output_tensor_list = checks.check_tensors(output_tensor_list, "output_tensor_list")
    input_tensor_list = checks.check_tensors(input_tensor_list, "input_tensor_list")
    checks.same_dtype(output_tensor_list, input_tensor_list)
    checks.check_tensors(output_tensor_list, "output_tensor_list", pg.size())
    checks.check_tensors(input_tensor_list, "input_tensor_list", pg.size())
    checks.same_device(output_tensor_list, input_tensor_list)
    me = pg.rank()
    checks.same_elements(
        input_tensor_list[me],
        f"input_tensor_list[{me}]",
        output_tensor_list[me],
        f"output_tensor_list[{me}]",
    )
    work = pg.alltoall(list(output_tensor_list), list(input_tensor_list), options(async_op))
    return finish(work, async_op)


@core_first(inputs="input", outputs="output")
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
    pg = member(group, "all_to_all_single")
    if pg is None:
        return None
    if not async_op and (
        pg.fast_path.run(
            "all_to_all_single", input, output, None, 0, input_split_sizes, output_split_sizes
        )
    ):
        return None
    output = checks.check_tensor(output, "output")
    input = checks.check_tensor(input, "input")
    checks.same_dtype(output, input)
    checks.same_device(output, input)
    received = checks.check_splits(output, output_split_sizes, "output", pg.size())
    sent = checks.check_splits(input, input_split_sizes, "input", pg.size())
    work = pg.alltoall_single(output, input, received, sent, options(async_op))
    return finish(work, async_op)


@core_first()
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
    pg = member(group, "barrier")
    if pg is None:
        return None
    if not async_op and timeout is None and pg.fast_path.run("barrier", None, None):
        return None
    chosen = options(async_op)
    chosen.timeout = timeout
    return finish(pg.barrier(chosen), async_op)


def monitored_barrier(
    group: AnyGroup = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A blocking barrier with a separate timeout, whose failure names the missing ranks.

    Args:
        timeout: The time to wait for the other ranks; None: the group's timeout.
        wait_all_ranks: Accepted for torch's sake: all missing ranks are always named.

    Raises:
        CollectiveTimeoutError: Some ranks did not come; ``error.ranks`` are these ranks.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: dist.monitored_barrier())
        [None, None]
    """
    pg = member(group, "monitored_barrier")
    if pg is not None:
        pg.monitored_barrier(timeout)
