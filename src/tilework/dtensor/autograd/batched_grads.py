"""Gradients for each row of a batch of them: ``torch.autograd.grad(…, is_grads_batched=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def batched_grads(
    autograd_grad: Callable[..., tuple[Tensor | None, ...]],
    outs: list[Tensor],
    ins: list[Tensor],
    grad_outputs: Any,
    retain_graph: bool | None,
    named: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """The gradients for each row of a batch of gradients of the outputs, stacked. Collective.

    torch maps over the batch; here there is a backward pass for each row.

    Args:
        autograd_grad: Gives the gradients for one row.
        outs: The outputs.
        ins: The inputs.
        grad_outputs: A batch for each output.
        retain_graph: As for ``torch.autograd.grad``.
        named: The other arguments of ``torch.autograd.grad``.
    """
    batches = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or ())
    count = _rows_of(batches, outs)
    materialized = named["materialize_grads"]
    if materialized:
        if named["allow_unused"] is False:
            raise ValueError(
                "materialize_grads=True gives zeros for unused inputs, which allow_unused=False "
                "refuses: leave it out, or pass True"
            )
        named |= {"materialize_grads": False, "allow_unused": True}
    create_graph = bool(named["create_graph"])
    keep = create_graph if retain_graph is None else retain_graph
    rows = [
        autograd_grad(
            outs,
            ins,
            [batch[number] for batch in batches],
            retain_graph=keep or number + 1 < count,
            **named,
        )
        for number in range(count)
    ]
    return tuple(
        torch.stack([x for x in grads if x is not None])
        if grads[0] is not None
        else torch.zeros_like(tensor, requires_grad=create_graph)  # without rows, as torch's
        if materialized
        else None
        for tensor, grads in zip(ins, zip(*rows, strict=True), strict=True)
    )


def _rows_of(batches: list[Any], outs: list[Tensor]) -> int:
    """The number of rows that all batches have.

    Raises:
        RuntimeError: An output has none, or of another shape.
        ValueError: They have unlike numbers of rows.
    """
    if len(batches) < len(outs) or any(batch is None for batch in batches):
        raise RuntimeError(
            "is_grads_batched=True needs a batch of gradients for each output: pass grad_outputs"
        )
    for out, batch in zip(outs, batches, strict=False):
        if batch.dim() == 0 or batch.shape[1:] != out.shape or not len(batch):
            raise RuntimeError(
                f"with is_grads_batched=True a gradient has the shape of its output after a first "
                f"dim that counts them: expected {['n', *out.shape]}, got {list(batch.shape)}"
            )
    count, *others = {len(batch): None for _, batch in zip(outs, batches, strict=False)}
    if others:
        raise ValueError(
            f"with is_grads_batched=True all gradients have as many rows, got "
            f"{[len(batch) for batch in batches]}"
        )
    return count
