"""Empty shards: for operators that torch cannot run on them, and for the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilework.tiled.op_rules import LocalRanges


def allow_empty_shards(
    function: Callable[..., Any], like: int = 0
) -> Callable[[LocalRanges], Callable[..., Any] | None]:
    """Make the run of ``function``, which refuses empty tensors, on shards that may be empty.

    Sharded dims have the same places in the tensor number ``like`` as in all results.
    """

    def run(ranges: LocalRanges) -> Callable[..., Any] | None:
        has_elements = all(0 not in spec.shape for spec in ranges.inputs)
        return (
            partial(with_row_for_empty, function, like=like)
            if has_elements and ranges.has_empty_shards
            else None
        )

    return run


def with_row_for_empty(function: Callable[..., Any], *tensors: Tensor | None, like: int = 0) -> Any:
    """The results of ``function`` where empty tensors temporarily get a row.

    The autograd graph is the same as on ranks with elements, also for gradients of gradients.
    """
    shaped = tensors[like]
    assert shaped is not None
    result = function(
        *[
            _rows_that_vary(tensor, [max(size, 1) for size in tensor.shape])
            if tensor is not None and not tensor.numel()
            else tensor
            for tensor in tensors
        ]
    )
    return without_rows(result, shaped.shape)


def zero_rows(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros as a function of an empty tensor, at the tensor's place in the autograd graph."""
    return _in_its_place(tensor, tensor.new_zeros(shape))


def _rows_that_vary(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """1 and -1 in turn, so that a norm with epsilon 0 divides by no zero deviation."""
    signs = tensor.new_ones(shape)
    signs.view(-1)[1::2] = -1
    return _in_its_place(tensor, signs)


def _in_its_place(tensor: Tensor, values: Tensor) -> Tensor:
    """Values as a function of an empty tensor, writes to which autograd then checks."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return values
    result: Tensor = _InItsPlace.apply(tensor, values)  # type: ignore[no-untyped-call]
    return result


class _InItsPlace(torch.autograd.Function):
    """Values that share a tensor's number of writes, and have no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shape = tensor.shape
        result = tensor.detach()
        result.data = values
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None if grad is None else grad.sum().expand(ctx.shape), None


def without_rows(result: Any, shape: Sequence[int]) -> Any:
    """The results, cut to size 0 in each dim that has size 0 in ``shape``."""
    empty = [dim for dim, size in enumerate(shape) if size == 0]

    def cut(tensor: Tensor) -> Tensor:
        for dim in empty:
            tensor = tensor.narrow(dim, 0, 0)
        return tensor

    return tree_map(cut, result)


def cat_shards(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The concatenation of local tensors, whose gradients all ranks can differentiate.

    torch lets tensors of shape [0] pass beside any others, but their gradient is a constant: a
    rank with such a part would have no second gradient, and other ranks would wait for it.
    """
    if tensors[0].dim() == 1 and not all(map(len, tensors)):
        return torch.cat([x.unsqueeze(1) for x in tensors]).squeeze(1)
    return torch.cat(list(tensors), dim)


def keep_inputs_in_graph(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """The result as a function of inputs that it does not depend on.

    A rank with nothing to compute has to be in the autograd graph, too: in backward the other
    ranks wait for it.
    """
    for tensor in inputs:
        if tensor is not None:
            if tensor.is_inference():  # may require a gradient, but views of it do not
                tensor = tensor.clone()
            nothing = tensor.reshape(-1)[:0].sum().to(result.dtype)
            # Subtracting 0.0 keeps -0.0.
            result = result + nothing if result.dtype is torch.bool else result - nothing
    return result


def zero_addend(dtype: torch.dtype) -> complex:
    """The neutral number of sums: -0.0, because adding 0.0 turns -0.0 into 0.0."""
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    return -0.0 if dtype.is_floating_point else 0
