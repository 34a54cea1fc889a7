"""all_reduce of sparse tensors, for DDP's gradients of sparse embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations import collectives
from tilework.comm.reduce_op import AnyReduceOp, ReduceOp


def all_reduce_sparse(tensor: Tensor, op: AnyReduceOp, group: ProcessGroup) -> None:
    """Sum a sparse COO tensor over all ranks, in place on every rank. Blocks.

    The shape is the same on every rank, the entries may differ. Every rank receives all ranks'
    entries, so the cost grows with their total number.

    Raises:
        ValueError: ``op`` is not SUM, or the layout is not COO.
    """
    if tensor.layout is not torch.sparse_coo or op is not ReduceOp.SUM:
        raise ValueError(
            f"all_reduce of sparse tensors sums tensors of layout sparse_coo, got {op} of "
            f"{str(tensor.layout).removeprefix('torch.')}; use dense tensors (to_dense())"
        )
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    collectives.all_gather(counts, torch.tensor([values.shape[0]]), group)
    entries = [int(count) for count in counts]
    all_indices = [indices.new_empty((n, indices.shape[0])) for n in entries]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in entries]
    collectives.all_gather(all_indices, indices.t().contiguous(), group)
    collectives.all_gather(all_values, values, group)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices).t(), torch.cat(all_values), tensor.shape, check_invariants=True
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())  # a detach() would have separate entries
