"""Attention: local for shards of batch, heads and queries; decomposed for shards of keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.comm.per_call.internal import device_kind
from tilework.dtensor.propagation.op_sharding import DTensorArg
from tilework.dtensor.rules.attention_blocks import KeyPattern
from tilework.dtensor.rules.internal_ops import internal_operator
from tilework.dtensor.rules.ring_attention import AttentionPart, Holders, has_kernel
from tilework.layout import Shard
from tilework.tiled import (
    Arg,
    Dim,
    Factor,
    LocalRanges,
    RuleResult,
    broadcast,
    dim_factors,
    local_call,
    volume,
)

_attend: Callable[..., Tensor] = F.scaled_dot_product_attention


def of_parts(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> RuleResult:
    """The rule for calls that run locally, if keys are whole."""
    tensors = [query, key, value]
    leading = leading_dims(tensors, enable_gqa)
    if leading is None:
        return None
    out, (of_query, of_key, of_value) = leading
    length, keys = (
        Factor(query.shape[-2], "length"),
        Factor(key.shape[-2], "keys", unshardable=True),
    )
    depth, width = (
        Factor(query.shape[-1], "depth", unshardable=True),
        Factor(value.shape[-1], "width"),
    )
    inputs: dict[Arg, Sequence[Factor | Dim | None]] = {
        query: [*of_query, length, depth],
        key: [*of_key, keys, depth],
        value: [*of_value, keys, width],
    }
    if attn_mask is not None:
        inputs[attn_mask] = broadcast_dims(attn_mask.shape, dim_factors([*out, length, keys]))

    def run(ranges: LocalRanges) -> Callable[..., Tensor] | None:
        if 0 in query.shape:  # torch saves nothing of an empty query for backward, on any rank
            return None
        # All ranks must run the same function: gradients must arrive in the same order.
        if is_causal and ranges.is_sharded(length):
            offset, _ = ranges.local_range(length)
            of_part = decomposed_attention if ranges.has_empty_shards else _attend
            return partial(_causal, of_part, offset, scale=scale, enable_gqa=enable_gqa)
        if not ranges.has_empty_shards:
            return None
        return partial(
            decomposed_attention, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return local_call(inputs, [[*out, length, width]], linear=[[value]], run=run)


@internal_operator(of_parts)
def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """``F.scaled_dot_product_attention``, for which ranks gather the keys that they lack."""
    return _attend(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def are_keys_sharded(query: DTensorArg, key: DTensorArg, value: DTensorArg) -> bool:
    """True if an axis shards keys or values, but not the query: they stay in place."""
    sharding = {*key.spec.axes_of(key.ndim - 2), *value.spec.axes_of(value.ndim - 2)}
    return query.shape[-2] <= key.shape[-2] and any(
        not isinstance(query.spec.placements[axis], Shard)
        for axis in sharding
        if query.spec.mesh.shape[axis] > 1
    )


#: The leading dims of the result, and those of each input.
_Leading = tuple[Sequence[Factor | Dim], Sequence[Sequence[Factor | Dim]]]


def leading_dims(tensors: Sequence[Arg], enable_gqa: bool) -> _Leading | None:
    """The factors of the dims before the last two; None if the numbers of heads do not fit."""
    return _heads(tensors) if enable_gqa else broadcast([each.shape[:-2] for each in tensors])


def _heads(tensors: Sequence[Arg]) -> _Leading | None:
    """The factors of the leading dims in grouped-query attention; None if heads do not fit."""
    out, dims_of_each = broadcast([tensor.shape[:-3] for tensor in tensors])
    queries, keys, values = (tensor.shape[-3] for tensor in tensors)
    if keys != values or keys == 0 or queries % keys:
        return None
    heads, sharing = Factor(keys, "heads"), Factor(queries // keys, "sharing")
    mine, theirs = (heads, sharing), (heads,)
    dims = [[*dims_of_each[0], mine], [*dims_of_each[1], theirs], [*dims_of_each[2], theirs]]
    return [*out, mine], dims


def fits(mask: Arg | None, tensors: Sequence[Arg], enable_gqa: bool) -> bool:
    """True if the mask broadcasts to the weights; torch raises for another."""
    leading = None if mask is None else leading_dims(tensors, enable_gqa)
    if mask is None or leading is None:
        return True
    sizes = [*map(volume, dim_factors(leading[0])), *(each.shape[-2] for each in tensors[:2])]
    pairs = zip(reversed(mask.shape), reversed(sizes), strict=False)
    return 2 <= mask.ndim <= len(sizes) and all(size in (1, whole) for size, whole in pairs)


def broadcast_dims(shape: Sequence[int], dims: Sequence[Dim]) -> list[Dim]:
    """The factors of each dim of a tensor of this shape, which is broadcast to ``dims``."""
    last = dims[len(dims) - len(shape) :]
    return [dim if size == volume(dim) else () for size, dim in zip(shape, last, strict=True)]


def _causal(
    attend: Callable[..., Tensor],
    offset: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Causal attention of the queries from ``offset`` on: query i attends to keys 0 to i."""
    size = query.size(-2)
    key, value = key[..., : offset + size, :], value[..., : offset + size, :]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if attend is _attend and device_kind(query) == "cpu":
        here = (((0, key.size(-2)),),)
        rows = ((offset, offset + size),)
        part = AttentionPart(
            Holders(0, here, here), rows, KeyPattern(right=0), default_scale(query, scale)
        )
        if has_kernel(*part.cast(query, key, value), enable_gqa=enable_gqa):
            return part.attend(query, key, value, None)[0]
    if offset == 0:
        return attend(query, key, value, is_causal=True, **options)
    mask = torch.ones(size, key.size(-2), dtype=torch.bool, device=key.device).tril(offset)
    return attend(query, key, value, mask, **options)


def decomposed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention``, composed of operators that all run on shards.

    Sharded keys stay sharded, and dropout does not depend on the layout.
    """
    length, keys = query.size(-2), key.size(-2)
    if is_causal:
        attn_mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()
    if enable_gqa:
        shared = (key.size(-3), query.size(-3) // max(key.size(-3), 1))
        query, key, value = (
            torch.unflatten(query, -3, shared),
            key.unsqueeze(-3),
            value.unsqueeze(-3),
        )
        if attn_mask is not None and attn_mask.dim() > 2:
            many = attn_mask.size(-3) != 1
            attn_mask = torch.unflatten(attn_mask, -3, shared if many else (1, 1))
    weights = _weights(query * default_scale(query, scale), key, attn_mask)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    out = weights @ value
    return out.flatten(-4, -3) if enable_gqa else out


def default_scale(query: Tensor, scale: float | None) -> float:
    """The factor of scores; queries without elements have only zero scores, for any factor."""
    return 1 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale


def _weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """The attention weight of each key for each query; 0 where all keys are masked."""
    scores = query @ key.transpose(-2, -1)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
