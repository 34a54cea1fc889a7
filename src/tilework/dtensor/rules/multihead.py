"""``F.multi_head_attention_forward`` with a dim for heads, so that they can be sharded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.dtensor.propagation.dtensor_call import without_override_checks
from tilework.dtensor.rules.internal_ops import internal_operator
from tilework.dtensor.tensor import DTensor
from tilework.layout import Replicate, Shard, chunk_sizes
from tilework.tiled import (
    Arg,
    Dim,
    Factor,
    RuleResult,
    composed,
    dtensor_rule,
    factors_of,
    local_call,
)

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_torch_forward: Any = without_override_checks(F.multi_head_attention_forward)


@dtensor_rule("multi_head_attention_forward")
@composed
def _multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` for DTensors, with batch and heads in separate dims."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    if not _is_usual(call):
        result: tuple[Tensor, Tensor | None] = _torch_forward(*args, **kwargs)
        return result
    query, key, value = call.query, call.key, call.value
    if query.dim() == 3:
        return _attend(call, *_project(call, query, key, value))
    projected = _project(call, *[x.unsqueeze(1) for x in (query, key, value)])
    out, weights = _attend(call, *projected)
    return out.squeeze(1), None if weights is None else weights.squeeze(0)


def _is_usual(call: SimpleNamespace) -> bool:
    """True if nothing is added to keys and values, and all shapes fit."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    length, embed, keys = query.size(0), query.size(-1), key.size(0)
    batch = query.shape[1:-1]
    return (
        all(extra is None for extra in (call.bias_k, call.bias_v, call.static_k, call.static_v))
        and not call.add_zero_attn
        and query.dim() == key.dim() == value.dim() in (2, 3)
        and batch == key.shape[1:-1] == value.shape[1:-1]
        and keys == value.size(0)
        and embed == call.embed_dim_to_check
        and embed % call.num_heads == 0
        and _fits(mask, (length, keys), (math.prod(batch) * call.num_heads, length, keys))
        and (mask is not None or not call.is_causal)
        and _fits(call.key_padding_mask, (*batch, keys))
    )


def _fits(mask: Tensor | None, *shapes: tuple[int, ...]) -> bool:
    return mask is None or mask.shape in shapes


# -- queries, keys and values ----------------------------------------------------------------


def _project(call: SimpleNamespace, *inputs: Tensor) -> list[Tensor]:
    """Queries, keys and values by batch and head, from inputs of shape (length, batch, …)."""
    packed, bias, heads = call.in_proj_weight, call.in_proj_bias, call.num_heads
    weights: Sequence[Tensor] | None
    if call.use_separate_proj_weight:
        weights = [call.q_proj_weight, call.k_proj_weight, call.v_proj_weight]
    else:
        weights = _split_by_heads(packed, heads) if _has_sharded_rows(packed) else None
    if weights is None:
        projected = [_packed_linear(x, packed, bias, third) for third, x in enumerate(inputs)]
    else:
        biases: Sequence[Any] = [None] * 3 if bias is None else _thirds(_with_full_rows(bias))
        projected = [F.linear(*args) for args in zip(inputs, weights, biases, strict=True)]
    shape = (heads, call.embed_dim_to_check // heads)
    return [torch.unflatten(x, -1, shape).permute(1, 2, 0, 3) for x in projected]


def _packed_linear_rule(input: Any, weight: Any, bias: Any, third: int) -> RuleResult:
    (*leading, inner), width = factors_of(input.shape), Factor(weight.shape[0] // 3, "width")
    rows = (Factor(3, "thirds", unshardable=True), width)
    inputs: dict[Arg, Sequence[Factor | Dim | None]] = {
        input: [*leading, inner],
        weight: [rows, inner],
    }
    if bias is not None:
        inputs[bias] = [rows]
    linear = [[input, bias], [weight, bias]]
    return local_call(inputs, [[*leading, width]], linear=linear, addends=[bias])


@internal_operator(_packed_linear_rule)
def _packed_linear(input: Tensor, weight: Tensor, bias: Tensor | None, third: int) -> Tensor:
    """``F.linear`` with a third of packed weights. As one operator it gives a single gradient."""
    return F.linear(input, _thirds(weight)[third], None if bias is None else _thirds(bias)[third])


def _thirds(packed: Tensor) -> Sequence[Tensor]:
    return torch.unflatten(packed, 0, (3, packed.size(0) // 3)).unbind(0)


def _has_sharded_rows(packed: Tensor) -> bool:
    """True if packed weights are a DTensor with sharded rows."""
    return isinstance(packed, DTensor) and bool(packed._spec.axes_of(0))


def _split_by_heads(packed: Tensor, heads: int) -> Sequence[Tensor]:
    """Packed weights as query, key and value, by whole heads if possible. Collective."""
    assert isinstance(packed, DTensor)
    weights = _thirds(_with_full_rows(packed))
    axis, *others = packed._spec.axes_of(0)
    if others:
        return weights
    width = packed.size(0) // 3 // heads
    sizes = [size * width for size in chunk_sizes(heads, packed.device_mesh.shape[axis])]
    placements = list(packed.placements)
    placements[axis] = Shard(0, tuple(sizes))
    return [
        weight.redistribute(placements=placements)
        for weight in weights
        if isinstance(weight, DTensor)
    ]


def _with_full_rows(packed: Tensor) -> Tensor:
    """Gather the rows of packed weights to all ranks. Collective if the rows are sharded."""
    if not isinstance(packed, DTensor) or not _has_sharded_rows(packed):
        return packed
    sharding = packed._spec.axes_of(0)
    placements = [
        Replicate() if axis in sharding else placement
        for axis, placement in enumerate(packed.placements)
    ]
    return packed.redistribute(placements=placements)


# -- attention -------------------------------------------------------------------------------


def _attend(
    call: SimpleNamespace, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None]:
    dropout = call.dropout_p if call.training else 0.0
    causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    mask = None if causal else _mask(call, query)
    if not call.need_weights:
        out = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal)
        return _merge_heads(call, out), None
    scores = (query * math.sqrt(1 / query.size(-1))) @ key.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    if dropout > 0:
        weights = F.dropout(weights, dropout)
    out = _merge_heads(call, weights @ value)
    return out, weights.mean(1) if call.average_attn_weights else weights


def _mask(call: SimpleNamespace, query: Tensor) -> Tensor | None:
    """The mask that is added to scores, broadcast to (batch, heads, queries, keys)."""
    mask: Tensor | None = call.attn_mask
    padding: Tensor | None = call.key_padding_mask
    other = None if mask is None else mask.dtype
    padding = F._canonical_mask(padding, "key_padding_mask", other, "attn_mask", query.dtype)
    mask = F._canonical_mask(mask, "attn_mask", None, "", query.dtype, check_other=False)
    if mask is not None and mask.dim() == 3:
        mask = torch.unflatten(mask, 0, (-1, call.num_heads))
    if padding is None:
        return mask
    padding = padding.reshape(-1, 1, 1, padding.size(-1))
    return padding if mask is None else mask + padding


def _merge_heads(call: SimpleNamespace, attended: Tensor) -> Tensor:
    joined = attended.permute(2, 0, 1, 3).flatten(2)
    return F.linear(joined, call.out_proj_weight, call.out_proj_bias)
