"""torch.distributed.nn.functional's collectives: differentiable, with buffers that give shapes.

    from tilework.distributed.nn import functional

``tilework.distributed.functional`` has the same collectives without such buffers, and what they
mean: gradients are those of the sum of all ranks' losses. As there, every rank of the group must
call them and run their backward. Where torch takes a tensor to be filled it is filled, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilework.comm.contract import ReduceOp
from tilework.comm.functional import internal as api
from tilework.comm.functional.internal import (
    Group,
    Op,
    all_reduce,
    broadcast,
    named,
    reduce,
    root_of,
    size_of,
)
from tilework.comm.functional.internal import rank_in as _rank_in

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def all_gather(tensor: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """Each rank's ``tensor``, on every rank.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: all_gather(torch.tensor(rank)))[0]
        (tensor(0), tensor(1))
    """
    return _rows(api.all_gather_tensor(tensor.unsqueeze(0), 0, group))


def gather(tensor: Tensor, dst: int = 0, group: Group = None) -> tuple[Tensor, ...]:
    """Each rank's ``tensor`` on rank ``dst``; zeros on the other ranks.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: gather(torch.tensor(rank + 1), dst=1))
        [(tensor(0), tensor(0)), (tensor(1), tensor(2))]
    """
    where = named(group)
    stacked = api.gather(tensor.unsqueeze(0), dst, 0, group)
    if _rank_in(where) == root_of(where, dst):
        return _rows(stacked)
    nothing = stacked.sum().to(tensor.dtype)  # so that backward runs here, too
    return tuple(torch.zeros_like(tensor) + nothing for _ in range(size_of(where)))


def scatter(tensors: Sequence[Tensor], src: int = 0, group: Group = None) -> Tensor:
    """The tensor that rank ``src`` has in ``tensors`` for this rank. Differentiable.

    Args:
        tensors: On rank ``src`` a tensor for each rank, all of one shape and dtype. The other ranks
            pass tensors of the same shape and dtype, whose values are not used.
        src: The root's global rank.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: scatter([torch.tensor(5), torch.tensor(6)]).item())
        [5, 6]
    """
    where = named(group)
    stacked = torch.stack(list(tensors))
    if _rank_in(where) != root_of(where, src):
        stacked = stacked[:0]
    return _rows(api.scatter(stacked, src, [1] * size_of(where), 0, group))[0]


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ReduceOp.SUM, group: Group = None
) -> Tensor:
    """The reduction of all ranks' ``input_list[r]``, on each rank r. Differentiable.

    ``output`` receives the result, too.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     return reduce_scatter(torch.tensor(0), [torch.tensor(1), torch.tensor(2)]).item()
        >>> run_ranks(2, program)
        [2, 4]
    """
    stacked = torch.stack(list(input_list))
    return _filled(output, _rows(api.reduce_scatter_tensor(stacked, op, 0, group))[0])


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = None
) -> tuple[Tensor, ...]:
    """The tensors that each rank sends to this rank, in the order of the ranks.

    Args:
        output_tensor_list: For each rank a tensor of the shape that the rank sends; overwritten.
        input_tensor_list: For each rank the tensor to send to that rank.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     return all_to_all([torch.zeros(1)] * 2, [torch.ones(1) * rank, torch.ones(1)])
        >>> run_ranks(2, program)[0]
        (tensor([0.]), tensor([1.]))
    """
    sizes = [output.numel() for output in output_tensor_list]
    flat = torch.cat([each.reshape(-1) for each in input_tensor_list])
    sent = [each.numel() for each in input_tensor_list]
    received = api.wait_tensor(api.all_to_all_single(flat, sizes, sent, group))
    parts = torch.split(received, sizes)
    pairs = zip(output_tensor_list, parts, strict=True)
    return tuple(_filled(output, part.reshape(output.shape)) for output, part in pairs)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """The rows that all ranks send to this rank, in the shape of ``output``.

    Args:
        output: A tensor that receives rows (dim 0) from each rank, in the order of the ranks.
        input: A tensor whose rows go to the ranks, in the order of the ranks.
        output_split_sizes: Rows received from each rank; None: equal parts.
        input_split_sizes: Rows sent to each rank; None: equal parts.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     return all_to_all_single(torch.zeros(2), torch.arange(2.0) + 10 * rank).tolist()
        >>> run_ranks(2, program)
        [[0.0, 10.0], [1.0, 11.0]]
    """
    sizes = output_split_sizes or None, input_split_sizes or None
    return _filled(output, api.all_to_all_single(input, *sizes, group).reshape(output.shape))


def _rows(stacked: Tensor) -> tuple[Tensor, ...]:
    """Wait for ``stacked``, the result of a collective; return a tensor for each row (dim 0)."""
    return tuple(api.wait_tensor(stacked).unbind(0))


def _filled(output: Tensor, result: Tensor) -> Tensor:
    """Copy ``result``, the result of a collective, into ``output``; return the result."""
    result = api.wait_tensor(result)
    output.detach().copy_(result.detach())
    return result
