"""Attention within documents that are packed one after the other (``varlen_attn``), by windows.

Ranks that share the tokens get only the keys that their queries attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.dtensor_call import Args, Kwargs
from tilework.dtensor.rules.attention_ways import ring_attention
from tilework.dtensor.tensor import DTensor
from tilework.tiled import dtensor_handler

_NAMES = (
    *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale"),
    *("window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"),
)


@dtensor_handler("torch_attn::_varlen_attn")
def _varlen_attn(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result, the logarithms of sums of weights, and no state of random numbers."""
    given: dict[str, Any] = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    refused = [n for n in ("seqused_k", "block_table", "num_splits") if given.get(n) is not None]
    if refused:
        raise NotImplementedError(
            f"varlen_attn on DTensors takes no {', '.join(refused)}: leave it out, or give it "
            f"full_tensor()"
        )
    query, key, value = (given[name] for name in _NAMES[:3])
    documents = _documents(given["cu_seq_q"], query.shape[0], "queries")
    if given.get("cu_seq_k") is not None:
        of_keys = _documents(given["cu_seq_k"], key.shape[0], "keys")
        if of_keys != documents:
            raise NotImplementedError(
                f"varlen_attn on DTensors needs the same lengths of queries and keys, got "
                f"cu_seq_q={list(documents)} and cu_seq_k={list(of_keys)}"
            )
    left, right = given.get("window_size") or ((-1, 0) if given.get("is_causal") else (-1, -1))
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out, logs = ring_attention(
        *(query, key, value, None, 0.0),
        (int(left), int(right), documents),
        *(given.get("scale"), bool(given.get("enable_gqa"))),
    )
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    return out.squeeze(0).transpose(0, 1), logs.squeeze(0).transpose(0, 1), nothing


def _documents(ends: Tensor, tokens: int, what: str) -> tuple[int, ...]:
    """The ends of documents, as numbers. Collective if ranks hold parts of them."""
    values: Sequence[int] = (ends.full_tensor() if isinstance(ends, DTensor) else ends).tolist()
    ascending = all(a <= b for a, b in pairwise(values))
    if not values or values[0] != 0 or values[-1] != tokens or not ascending:
        raise ValueError(
            f"cumulated lengths must ascend from 0 to the number of {what}, {tokens}, got {values}"
        )
    return tuple(values)
