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
    """Reduce ``tensor`` in place."""
    if not async_op and group.fast_path.run("all_reduce", tensor, tensor, op):
        return None
    return group.allreduce([tensor], Options(op, asyncOp=async_op))


def broadcast(group: ProcessGroup, tensor: Tensor, root: int, async_op: bool) -> Work | None:
    """Broadcast ``tensor``, which is written on all ranks but ``root``."""
    if not async_op and group.fast_path.run("broadcast", None, tensor, None, root):
        return None
    return group.broadcast([tensor], Options(rootRank=root, asyncOp=async_op))


def all_gather(
    group: ProcessGroup, outputs: Sequence[Tensor], tensor: Tensor, async_op: bool
) -> Work | None:
    """Gather every rank's ``tensor``, each into a tensor of ``outputs``."""
    if not async_op and group.fast_path.run("all_gather", tensor, outputs):
        return None
    return group.allgather([list(outputs)], [tensor], Options(asyncOp=async_op))


def all_gather_into_tensor(
    group: ProcessGroup, out: Tensor, tensor: Tensor, async_op: bool
) -> Work | None:
    """Gather every rank's ``tensor`` into ``out``, one after the other."""
    if not async_op and group.fast_path.run("all_gather_into_tensor", tensor, out):
        return None
    return group.allgather_into_tensor(out, tensor, Options(asyncOp=async_op))


def reduce_scatter(
    group: ProcessGroup, out: Tensor, inputs: Sequence[Tensor], op: AnyReduceOp, async_op: bool
) -> Work | None:
    """Reduce every rank's ``inputs``, one for each rank; this rank's result is ``out``."""
    if not async_op and group.fast_path.run("reduce_scatter", inputs, out, op):
        return None
    return group.reduce_scatter([out], [list(inputs)], Options(op, asyncOp=async_op))


def reduce_scatter_tensor(
    group: ProcessGroup, out: Tensor, tensor: Tensor, op: AnyReduceOp, async_op: bool
) -> Work | None:
    """Reduce every rank's ``tensor``; ``out`` is this rank's part of equal parts."""
    if not async_op and group.fast_path.run("reduce_scatter_tensor", tensor, out, op):
        return None
    return group.reduce_scatter_tensor(out, tensor, Options(op, asyncOp=async_op))


def all_to_all(
    group: ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool
) -> Work | None:
    """Send a tensor of ``inputs`` to each rank; receive a tensor of ``outputs`` from each."""
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
    """Exchange rows of ``tensor``; ``rows`` counts rows sent to, and received from, each rank."""
    sent, received = rows
    if not async_op and group.fast_path.run(
        "all_to_all_single", tensor, out, None, 0, sent, received
    ):
        return None
    return group.alltoall_single(out, tensor, list(received), list(sent), Options(asyncOp=async_op))
