"""Losses of elements or rows: a mean is over all elements, not over the means of ranks.

The functions of torch.nn.functional check their arguments and call the functions here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import Dim, Factor, broadcast, broadcast_shape
from tilework.tiled.op_rules import (
    Arg,
    Decomposition,
    LocalCall,
    LocalRanges,
    RuleResult,
    local_call,
)
from tilework.tiled.op_table import rule
from tilework.tiled.rules.empty_shards import keep_inputs_in_graph

#: torch's numbers of reductions.
NONE, MEAN, SUM = 0, 1, 2

_torch: Any = torch
_nn: Any = torch._C._nn


def reduce_loss(
    function: Callable[..., Tensor],
    arguments: Mapping[str, Any],
    dims: Mapping[Arg, Sequence[Factor | Dim | None]],
    out: Sequence[Factor],
) -> LocalCall:
    """The call of a loss, from all arguments by name, and the factors of the unreduced loss."""
    reduction = arguments["reduction"]
    count = math.prod(factor.size for factor in out)

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        local_count = ranges.local_size(tuple(out))
        # A weighted local mean: no sum, which could overflow where torch's mean does not.
        share = local_count / count if reduction == MEAN and local_count < count else None

        def loss(*tensors: Tensor) -> Tensor:
            values = {
                name: tensors[value.number] if isinstance(value, Arg) else value
                for name, value in arguments.items()
            }
            if reduction != NONE and local_count == 0 < count:
                loss_value = function(
                    **{**values, "reduction": SUM}
                )  # may be NaN for an empty shard
                return loss_value.masked_fill(torch.ones_like(loss_value, dtype=torch.bool), 0)
            loss_value = function(**values)
            return loss_value if share is None else loss_value * share

        return loss

    return local_call(dims, [out if reduction == NONE else []], run=run)


def _of_one_row(
    function: Any, names: Sequence[str], rows: Sequence[str], *args: Any, **kwargs: Any
) -> Tensor:
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in {*rows, "target"}:
        values[name] = values[name].reshape(1, -1) if name in rows else values[name].reshape(1)
    loss: Tensor = function(*[values[name] for name in names])
    return loss.squeeze(0) if values["reduction"] == NONE else loss


def _register_loss(function: Any, parameters: str, rows: str = "", unbroadcast: str = "") -> None:
    """Register a loss; each last dim of the tensors ``rows`` has one loss."""
    names = parameters.split()

    def answer(*args: Any, **kwargs: Any) -> RuleResult:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if set(arguments) != set(names):
            return None
        tensors = {name: arguments[name] for name in names if isinstance(arguments[name], Arg)}
        ranks = {arg.ndim for name, arg in tensors.items() if name in rows.split()}
        if ranks and max(ranks) < 2 and "target" in tensors:
            return Decomposition(partial(_of_one_row, function, names, rows.split()))
        if 0 in ranks or 1 in ranks:
            return None
        kept_dims = {name: int(name in rows.split()) for name in tensors}
        kept_dims.update(
            {name: tensors[name].ndim for name in unbroadcast.split() if name in tensors}
        )
        shapes = [arg.shape[: arg.ndim - kept_dims[name]] for name, arg in tensors.items()]
        try:
            broadcast_shape(shapes)
        except ValueError:
            return None
        factors, dims_of_each = broadcast(shapes)
        dims = {
            arg: (*broadcast_dims, *((),) * kept_dims[name])
            for (name, arg), broadcast_dims in zip(tensors.items(), dims_of_each, strict=True)
        }
        return reduce_loss(function, arguments, dims, factors)

    rule(function)(answer)


_register_loss(_nn.mse_loss, "input target reduction")
_register_loss(_nn.l1_loss, "input target reduction")
_register_loss(_nn.smooth_l1_loss, "input target reduction beta")
_register_loss(_nn.huber_loss, "input target reduction delta")
_register_loss(_nn.soft_margin_loss, "input target reduction")
_register_loss(_nn.binary_cross_entropy, "input target weight reduction")
_register_loss(_torch.binary_cross_entropy_with_logits, "input target weight pos_weight reduction")
_register_loss(_torch.kl_div, "input target reduction log_target")
_register_loss(_torch.poisson_nll_loss, "input target log_input full eps reduction")
_register_loss(_torch.hinge_embedding_loss, "input target margin reduction")
_register_loss(_torch.margin_ranking_loss, "input1 input2 target margin reduction")
_register_loss(
    _torch.cosine_embedding_loss, "input1 input2 target margin reduction", rows="input1 input2"
)
_register_loss(
    _torch.triplet_margin_loss,
    "anchor positive negative margin p eps swap reduction",
    rows="anchor positive negative",
)
_register_loss(
    _nn.multi_margin_loss,
    "input target p margin weight reduction",
    rows="input",
    unbroadcast="weight",
)
_register_loss(_nn.multilabel_margin_loss, "input target reduction", rows="input target")


@rule(torch.ctc_loss)
def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> RuleResult:
    arguments = dict(locals())
    lengths = [arg for arg in (input_lengths, target_lengths) if isinstance(arg, Arg)]
    if log_probs.ndim != 3 or targets.ndim != 2 or len(lengths) != 2:
        return None
    n = Factor(log_probs.shape[1], "n")
    dims = {log_probs: [None, n, None], targets: [n, None], **dict.fromkeys(lengths, (n,))}
    return reduce_loss(_ctc, arguments, dims, [n])


def _ctc(**values: Any) -> Tensor:
    log_probs = values["log_probs"]
    if log_probs.shape[1] == 0:
        shape = (0,) if values["reduction"] == NONE else ()
        return keep_inputs_in_graph(log_probs.new_zeros(shape), log_probs)
    return torch.ctc_loss(*values.values())
