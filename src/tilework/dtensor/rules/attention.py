"""Attention: local for shards of batch, heads and queries; decomposed for shards of keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.comm.per_call.internal import device_kind
from tilework.dtensor.propagation.op_sharding import DTensorArg
from tilework.dtensor.rules.attention_blocks import KeyPattern, wide
from tilework.dtensor.rules.internal_ops import internal_operator
from tilework.dtensor.rules.ring_attention import AttentionPart, has_kernel
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

#: The dims of the result, and those of each input.
_Dims = tuple[Sequence[Factor | Dim], dict[Arg, Sequence[Factor | Dim | None]]]
#: The leading dims of the result, and those of each input.
_Leading = tuple[Sequence[Factor | Dim], Sequence[Sequence[Factor | Dim]]]


@dataclass(frozen=True)
class Attention:
    """The arguments of ``F.scaled_dot_product_attention``, which may be stand-ins."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def all(self) -> tuple[Any, ...]:
        """All arguments, in order."""
        given = self.attn_mask, self.dropout_p, self.is_causal
        return *self.tensors, *given, self.scale, self.enable_gqa

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that torch takes by name only."""
        return {"scale": self.scale, "enable_gqa": self.enable_gqa}

    def by_torch(self) -> Tensor:
        """The result of torch's function."""
        return _attend(*self.all[:6], **self.options)

    def widened(self) -> Attention:
        """The same in float32, if it is in 16 bits."""
        (query, key, value), mask = map(wide, self.tensors), self.attn_mask
        mask = None if mask is None else wide(mask)
        return replace(self, query=query, key=key, value=value, attn_mask=mask)

    def leading(self) -> _Leading | None:
        """The factors of the dims before the last two; None if the numbers of heads do not fit."""
        if not self.enable_gqa:
            return broadcast([each.shape[:-2] for each in self.tensors])
        out, dims_of_each = broadcast([tensor.shape[:-3] for tensor in self.tensors])
        queries, keys, values = (tensor.shape[-3] for tensor in self.tensors)
        if keys != values or keys == 0 or queries % keys:
            return None
        heads, sharing = Factor(keys, "heads"), Factor(queries // keys, "sharing")
        dims = zip(dims_of_each, ((heads, sharing), (heads,), (heads,)), strict=True)
        return [*out, (heads, sharing)], [[*lead, of_heads] for lead, of_heads in dims]

    def fits(self) -> bool:
        """True if the mask broadcasts to the weights; torch raises for another."""
        mask, leading = self.attn_mask, self.leading()
        if mask is None or leading is None:
            return True
        lengths = (each.shape[-2] for each in self.tensors[:2])
        sizes = [*map(volume, dim_factors(leading[0])), *lengths]
        pairs = zip(reversed(mask.shape), reversed(sizes), strict=False)
        return 2 <= mask.ndim <= len(sizes) and all(size in (1, whole) for size, whole in pairs)

    def dims(self, length: Factor, keys: Factor, columns: Factor) -> _Dims | None:
        """The factors of all dims; those of queries, keys, and a mask's columns are given."""
        leading = self.leading()
        if leading is None:
            return None
        out, (of_query, of_key, of_value) = leading
        depth = Factor(self.query.shape[-1], "depth", unshardable=True)
        width = Factor(self.value.shape[-1], "width")
        inputs: dict[Arg, Sequence[Factor | Dim | None]] = {
            self.query: [*of_query, length, depth],
            self.key: [*of_key, keys, depth],
            self.value: [*of_value, keys, width],
        }
        if (mask := self.attn_mask) is not None:
            weights = dim_factors([*out, length, columns])
            last = zip(mask.shape, weights[len(weights) - mask.ndim :], strict=True)
            inputs[mask] = [dim if size == volume(dim) else () for size, dim in last]
        return [*out, length, width], inputs


def of_parts(*given: Any) -> RuleResult:
    """The rule for calls that run locally, if keys are whole."""
    call = Attention(*given)
    length = Factor(call.query.shape[-2], "length")
    keys = Factor(call.key.shape[-2], "keys", unshardable=True)
    dims = call.dims(length, keys, keys)
    if dims is None:
        return None
    out, inputs = dims

    def run(ranges: LocalRanges) -> Callable[..., Tensor] | None:
        if 0 in call.query.shape:  # torch saves nothing of an empty query for backward, on any rank
            return None
        # All ranks must run the same function: gradients must arrive in the same order.
        if call.is_causal and ranges.is_sharded(length):
            offset, _ = ranges.local_range(length)
            of_part = decomposed_attention if ranges.has_empty_shards else _attend
            return partial(_causal, of_part, offset, **call.options)
        if not ranges.has_empty_shards:
            return None
        return partial(decomposed_attention, is_causal=call.is_causal, **call.options)

    return local_call(inputs, [out], linear=[[call.value]], run=run)


@internal_operator(of_parts)
def gathered_attention(*given: Any) -> Tensor:
    """``F.scaled_dot_product_attention``, for which ranks gather the keys that they lack."""
    return Attention(*given).by_torch()


def are_keys_sharded(query: DTensorArg, key: DTensorArg, value: DTensorArg) -> bool:
    """True if an axis shards keys or values, but not the query: they stay in place."""
    sharding = {*key.spec.axes_of(key.ndim - 2), *value.spec.axes_of(value.ndim - 2)}
    return query.shape[-2] <= key.shape[-2] and any(
        not isinstance(query.spec.placements[axis], Shard)
        for axis in sharding
        if query.spec.mesh.shape[axis] > 1
    )


def _causal(
    attend: Callable[..., Tensor],
    offset: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **how: Any,
) -> Tensor:
    """Causal attention of the queries from ``offset`` on: query i attends to keys 0 to i."""
    size = query.size(-2)
    key, value = key[..., : offset + size, :], value[..., : offset + size, :]
    if attend is _attend and device_kind(query) == "cpu":
        scale = default_scale(query, how["scale"])
        part = AttentionPart.alone(
            (offset, offset + size), key.size(-2), KeyPattern(right=0), scale
        )
        if has_kernel(*part.cast(query, key, value), enable_gqa=how["enable_gqa"]):
            return part.attend(query, key, value, None)[0]
    if offset == 0:
        return attend(query, key, value, is_causal=True, **how)
    mask = torch.ones(size, key.size(-2), dtype=torch.bool, device=key.device).tril(offset)
    return attend(query, key, value, mask, **how)


def decomposed_attention(*args: Any, **kwargs: Any) -> Tensor:
    """``F.scaled_dot_product_attention``, composed of operators that all run on shards."""
    call = Attention(*args, **kwargs)
    dtype, call = call.query.dtype, call.widened()
    (query, key, value), mask = call.tensors, call.attn_mask
    if call.is_causal:
        sizes = query.size(-2), key.size(-2)
        mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
    if call.enable_gqa:
        shared = (key.size(-3), query.size(-3) // max(key.size(-3), 1))
        query = torch.unflatten(query, -3, shared)
        key, value = key.unsqueeze(-3), value.unsqueeze(-3)
        if mask is not None and mask.dim() > 2:
            mask = torch.unflatten(mask, -3, shared if mask.size(-3) != 1 else (1, 1))
    weights = _weights(query * default_scale(query, call.scale), key, mask)
    if call.dropout_p > 0:
        weights = F.dropout(weights, call.dropout_p)
    out: Tensor = (weights @ value).to(dtype)
    return out.flatten(-4, -3) if call.enable_gqa else out


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
