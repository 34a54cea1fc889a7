"""Starting collectives on given memory, by the fast path if the group has one.

Each function starts one collective and returns the Work, or None if the collective is done. With
``async_op`` it returns at once, and inputs must stay unchanged until the Work is done. Functional
collectives (``kinds``) and the steps of a DTensor's redistribution call these functions with
tensors that they have checked and made contiguous. The public collectives check more
(``comm.operations.collectives``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilework.comm.contract import Options, ProcessGroup, Work
from tilework.comm.reduce_op import AnyReduceOp


def all_reduce(group: ProcessGroup, tensor: Tensor, op: AnyReduceOp, async_op: bool) -> Work | None:
    """Reduce every rank's ``tensor``, in place on every rank."""
    if not async_op and group.fast_path.run("all_reduce", tensor, tensor, op):
        return None
    return group.allreduce([tensor], Options(op, asyncOp=async_op))


def broadcast(group: ProcessGroup, tensor: Tensor, root: int, async_op: bool) -> Work | None:
    """Copy the ``tensor`` of group rank ``root`` into ``tensor`` on all other ranks."""
    if not async_op and group.fast_path.run("broadcast", None, tensor, None, root):
        return None
    return group.broadcast([tensor], Options(rootRank=root, asyncOp=async_op))


def all_gather(
    group: ProcessGroup, outputs: Sequence[Tensor], tensor: Tensor, async_op: bool
) -> Work | None:
    """Gather, on every rank, the ``tensor`` of each rank r into ``outputs[r]``."""
    if not async_op and group.fast_path.run("all_gather", tensor, outputs):
        return None
    return group.allgather([list(outputs)], [tensor], Options(asyncOp=async_op))


def all_gather_into_tensor(
    group: ProcessGroup, out: Tensor, tensor: Tensor, async_op: bool
) -> Work | None:
    """Gather, on every rank, the ``tensor`` of each rank into ``out``, in the order of ranks."""
    if not async_op and group.fast_path.run("all_gather_into_tensor", tensor, out):
        return None
    return group.allgather_into_tensor(out, tensor, Options(asyncOp=async_op))


def reduce_scatter(
    group: ProcessGroup, out: Tensor, inputs: Sequence[Tensor], op: AnyReduceOp, async_op: bool
) -> Work | None:
    """Reduce all ranks' ``inputs[r]`` into ``out`` of rank r, for each rank r."""
    if not async_op and group.fast_path.run("reduce_scatter", inputs, out, op):
        return None
    return group.reduce_scatter([out], [list(inputs)], Options(op, asyncOp=async_op))


def reduce_scatter_tensor(
    group: ProcessGroup, out: Tensor, tensor: Tensor, op: AnyReduceOp, async_op: bool
) -> Work | None:
    """Reduce all ranks' ``tensor``; ``out`` of rank r is the r-th of the result's equal parts."""
    if not async_op and group.fast_path.run("reduce_scatter_tensor", tensor, out, op):
        return None
    return group.reduce_scatter_tensor(out, tensor, Options(op, asyncOp=async_op))


def all_to_all(
    group: ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool
) -> Work | None:
    """Send ``inputs[r]`` to each rank r, and receive ``outputs[r]`` from rank r."""
    if not async_op and group.fast_path.run("all_to_all", inputs, outputs):
        return None
    return group.alltoall(list(outputs), list(inputs), Options(asyncOp=async_op))


def all_to_all_single(
    group: ProcessGroup,
    out: Tensor,
    tensor: Tensor,
    rows: tuple[Sequence[int], Sequence[int]],
    async_op: bool,
) -> Work | None:
    """Send rows of ``tensor`` to each rank, and receive rows of ``out`` from each rank.

    ``rows`` has the numbers of rows sent to each rank, and those received from each rank.
    """
    sent, received = rows
    if not async_op and group.fast_path.run(
        "all_to_all_single", tensor, out, None, 0, sent, received
    ):
        return None
    return group.alltoall_single(out, tensor, list(received), list(sent), Options(asyncOp=async_op))
