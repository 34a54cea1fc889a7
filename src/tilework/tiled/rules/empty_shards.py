"""Empty shards: for operators that torch cannot run on them, and for the autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from tilework.tiled.op_rules import LocalRanges


def allow_empty_shards(
    function: Callable[..., Any],
) -> Callable[[LocalRanges], Callable[..., Any] | None]:
    """Makes the run of ``function``, which takes no empty tensors, on shards that may be empty.

    It is called with the local tensors. Sharded dims have the same places in all results as in
    the first tensor.
    """

    def run(ranges: LocalRanges) -> Callable[..., Any] | None:
        has_elements = all(0 not in spec.shape for spec in ranges.inputs)
        return (
            partial(_with_row_for_empty, function)
            if has_elements and ranges.has_empty_shards
            else None
        )

    return run


def _with_row_for_empty(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """The results for tensors of which empty ones get a row of zeros, which results then lack."""
    empty = [dim for dim, size in enumerate(tensors[0].shape) if size == 0]
    result = function(*[_zero_row(tensor) if tensor.numel() == 0 else tensor for tensor in tensors])

    def without_row(tensor: Tensor) -> Tensor:
        for dim in empty:
            tensor = tensor.narrow(dim, 0, 0)
        return tensor

    return tree_map(without_row, result)


def _zero_row(tensor: Tensor) -> Tensor:
    """Zeros as a function of an empty tensor, at its place in the autograd graph."""
    return tensor.new_zeros([max(size, 1) for size in tensor.shape]) + tensor.sum(
        dtype=tensor.dtype
    )


def keep_inputs_in_graph(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """The result as a function of inputs that it does not depend on.

    A rank with nothing to compute has to be in the autograd graph nevertheless: the other ranks
    wait for it in backward.
    """
    for tensor in inputs:
        if tensor is not None:
            result = result + tensor.reshape(-1)[:0].sum().to(result.dtype)
    return result
