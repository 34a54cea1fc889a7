"""``torch.autograd.grad(…, is_grads_batched=True)``: a backward pass for each row of a batch."""

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
    """The gradients of the inputs for each row of a batch of output gradients, stacked. Collective.

    torch maps over the batch; here there is a backward pass for each row.

    Args:
        autograd_grad: Computes the gradients of the inputs for one row.
        outs: The outputs.
        ins: The inputs.
        grad_outputs: For each output, a batch of gradients, which a new first dim counts.
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
                "refuses: pass allow_unused=True, or leave allow_unused out"
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
    """The number of rows, which is the same in the batches of all outputs.

    Raises:
        RuntimeError: An output has no batch of gradients, or an empty batch, or the rows do not
            have the shape of the output.
        ValueError: The batches have different numbers of rows.
    """
    if len(batches) < len(outs) or any(batch is None for batch in batches):
        raise RuntimeError(
            "is_grads_batched=True needs a batch of gradients for each output: pass grad_outputs"
        )
    for out, batch in zip(outs, batches, strict=False):
        if batch.dim() == 0 or batch.shape[1:] != out.shape or not len(batch):
            raise RuntimeError(
                f"with is_grads_batched=True each tensor of grad_outputs has a first dim for the "
                f"rows of the batch (n, at least 1), then the dims of the output: expected "
                f"{['n', *out.shape]}, got {list(batch.shape)}"
            )
    count, *others = {len(batch): None for _, batch in zip(outs, batches, strict=False)}
    if others:
        raise ValueError(
            f"with is_grads_batched=True all grad_outputs must have the same number of rows, got "
            f"{[len(batch) for batch in batches]}"
        )
    return count
