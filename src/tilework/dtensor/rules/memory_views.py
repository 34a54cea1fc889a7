"""Views of bytes as another dtype: ``view(dtype)``, ``view_as_complex``; dims changed in place.

For views as another dtype torch has conditions for memory: elements of the last dim must be
adjacent, and elements that become one larger element must begin at a multiple of the larger size.
Here the full tensor must meet the conditions, so that all ranks agree. If a local tensor does not
meet them, the result is a copied view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd.gradients import check_no_leaf, show_shape
from tilework.dtensor.base import APART, grads_of, own_memory
from tilework.dtensor.dispatch.checked_writes import check_in_graph
from tilework.dtensor.provenance.digests import digest_of, note_write
from tilework.dtensor.rules.internal_ops import internal_operator
from tilework.dtensor.spec import row_major
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views.moved_views import check_fresh, offset_of, same_memory
from tilework.dtensor.views.places import count_write
from tilework.tiled import (
    Arg,
    Decomposition,
    LocalCall,
    RuleResult,
    canonical_name,
    composed,
    dtensor_handler,
    dtensor_rule,
    entry_of,
    register,
)

_unsafe_view = torch.ops.aten._unsafe_view.default


@dtensor_rule("view")
def _view(input: Arg, *shape: Any, **named: Any) -> RuleResult:
    given = next(iter(shape or named.values()), None)
    return Decomposition(_as_dtype) if isinstance(given, torch.dtype) else None


def _as_dtype(input: Any, dtype: torch.dtype) -> Tensor:
    count = dtype.itemsize // input.dtype.itemsize
    if count > 1 and (start := offset_of(input)) % count:
        raise RuntimeError(
            f"self.storage_offset() must be divisible by {count} to view {input.dtype} as {dtype} "
            f"(different element sizes), but got {start}: view a clone() of the tensor"
        )
    return _bytes_as(input, dtype)


@dtensor_rule("view_as_complex")
@composed
def _as_complex(input: Any) -> Tensor:
    if (start := offset_of(input)) % 2:
        raise RuntimeError(
            f"Tensor must have a storage_offset divisible by 2, but got {start}: view a clone() of "
            f"the tensor"
        )
    return _pairs_as_complex(input)


def _local_view(call: Any, view: Callable[[Tensor], Tensor], count: int) -> RuleResult:
    """The general rule's call, which copies local tensors that torch cannot view."""
    if not isinstance(call, LocalCall):
        return call  # type: ignore[no-any-return]

    def run(local: Tensor) -> Tensor:
        local = _with_usual_strides(local, count)
        if _lies_well(local, count):
            return view(local)
        shown = view(local.clone(memory_format=torch.contiguous_format))
        return _unsafe_view(shown, shown.shape)  # type: ignore[no-any-return]

    return replace(call, run=lambda ranges: run)


def _with_usual_strides(local: Tensor, count: int) -> Tensor:
    """The tensor with a contiguous tensor's strides in dims of one element."""
    usual = row_major(tuple(local.shape))
    if not local.numel():
        return local.as_strided(local.shape, [*(its * count for its in usual[:-1]), 1], 0)
    given = zip(local.shape, local.stride(), usual, strict=True)
    strides = tuple(its if size > 1 else other for size, its, other in given)
    return local if strides == local.stride() else local.as_strided(local.shape, strides)


def _lies_well(local: Tensor, count: int) -> bool:
    """True if torch can view the local tensor as elements of another size, without a copy."""
    *others, last = local.stride() or (1,)
    if count == 1:
        return True
    return last == 1 and (
        not count or not any(place % count for place in (local.storage_offset(), *others))
    )


def _bytes_rule(input: Arg, dtype: torch.dtype) -> RuleResult:
    general: Any = entry_of("view").rule
    count = dtype.itemsize // input.dtype.itemsize
    return _local_view(general(input, dtype), lambda local: local.view(dtype), count)


def _pairs_rule(input: Arg) -> RuleResult:
    general: Any = entry_of("view_as_complex").rule
    return _local_view(general(input), torch.view_as_complex, 2)


def _bytes_as_dtype(input: Tensor, dtype: torch.dtype) -> Tensor:
    return input.view(dtype)


def _pairs_as_numbers(input: Tensor) -> Tensor:
    return torch.view_as_complex(input)


register(_bytes_as_dtype, is_view=True)
register(_pairs_as_numbers, is_view=True)
_bytes_as = internal_operator(_bytes_rule)(_bytes_as_dtype)
_pairs_as_complex = internal_operator(_pairs_rule)(_pairs_as_numbers)


@dtensor_handler("transpose_", "t_", "squeeze_", "unsqueeze_")
def _changed_dims(func: Any, args: Any, kwargs: Any) -> DTensor:
    """Change the dims of a tensor in place. No element is written, or moved."""
    tensor: DTensor = args[0]
    name = canonical_name(func)[0]
    check_no_leaf(tensor)
    check_in_graph(name, tensor)
    if tensor.requires_grad:
        raise RuntimeError(
            f"{name}_() would change the dims of {tensor!r}, which requires a gradient: write "
            f"x = x.{name}(…), or x.data = x.data.{name}(…) for a leaf"
        )
    if tensor._view_of is not None:
        check_fresh(tensor)
    count_write(tensor)
    local = tensor._local_tensor
    with torch.inference_mode(local.is_inference()), torch.enable_grad():  # for later writes
        result: DTensor = getattr(Tensor, name)(same_memory(tensor, local), *args[1:], **kwargs)
    if own_memory(result).shows is not own_memory(tensor).shows:
        raise RuntimeError(
            f"{name}_() of {tensor!r} would have to move elements between ranks: write "
            f"x = x.{name}(…)"
        )
    start, digest, viewed = offset_of(result), digest_of(result), tensor._viewed
    tensor._local_tensor, tensor._spec = result._local_tensor, result._spec.copy()
    grads_of(tensor).forget()
    if viewed is not None:
        func = viewed[2] if viewed[2] is None or viewed[2] in APART else _itself
        tensor._viewed = (viewed[0], viewed[1], func, (), {}, start)
    note_write(tensor, digest)
    show_shape(tensor)
    return tensor


def _itself(x: Any) -> Any:
    return x
