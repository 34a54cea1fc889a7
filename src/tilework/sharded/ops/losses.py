"""Losses that are a sum or a mean over elements: an elementwise operator, and a reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from tilework.sharded.checks import unsupported
from tilework.sharded.ops.by_tile import elementwise
from tilework.sharded.registry import Handler


def _loss(func: Callable[..., Any]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        reduction = kwargs.get("reduction", "mean")
        averages = [kwargs.get(name) for name in ("size_average", "reduce")]
        if reduction not in ("none", "mean", "sum") or averages != [None, None]:
            raise unsupported(func, args, kwargs, "reduction is 'none', 'mean' or 'sum'")
        each = elementwise(func)(types, args, {**kwargs, "reduction": "none"}, process_group)
        return each if reduction == "none" else getattr(each, reduction)()

    return handler


_LOSSES: list[Callable[..., Any]] = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.soft_margin_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div]  # fmt: skip

TABLE: dict[Callable[..., Any], Handler] = {func: _loss(func) for func in _LOSSES}
