"""Losses of each element or row: a mean is over all of them, not over the means of ranks.

Those of torch.nn.functional check their arguments and come to the functions here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import Dim, Factor, broadcast, broadcast_shape
from tilework.tiled.op_rules import Arg, LocalCall, LocalRanges, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.rules.empty_shards import keep_inputs_in_graph

#: What torch's functions call reductions.
NONE, MEAN, SUM = 0, 1, 2

_torch: Any = torch
_nn: Any = torch._C._nn


def reduce_loss(
    function: Callable[..., Tensor],
    given: Mapping[str, Any],
    dims: Mapping[Arg, Sequence[Factor | Dim | None]],
    out: Sequence[Factor],
) -> LocalCall:
    """A loss that is reduced as ``given["reduction"]`` says.

    Args:
        function: Computes it on local tensors.
        given: All arguments by name, in their order.
        dims: What the dims of tensors run over.
        out: What the loss runs over before it is reduced.
    """
    how = given["reduction"]
    count = math.prod(factor.size for factor in out)

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        mine = ranges.local_size(tuple(out))
        # A part's mean, weighted: no sum overflows that is none in torch.
        share = mine / count if how == MEAN and mine < count else None

        def loss(*tensors: Tensor) -> Tensor:
            values = {
                name: tensors[value.number] if isinstance(value, Arg) else value
                for name, value in given.items()
            }
            if how != NONE and mine == 0 < count:
                found = function(**{**values, "reduction": SUM})  # of nothing: maybe undefined
                return found.masked_fill(torch.ones_like(found, dtype=torch.bool), 0)
            found = function(**values)
            return found if share is None else found * share

        return loss

    return local_call(dims, [out if how == NONE else []], run=run)


def _register_loss(function: Any, parameters: str, rows: str = "", whole: str = "") -> None:
    """Register a loss, which is reduced over what its tensors broadcast to.

    Args:
        function: The one that takes the reduction as a number.
        parameters: The names of all its parameters.
        rows: Tensors whose last dim the loss of a row is computed from.
        whole: Tensors that do not broadcast.
    """
    names = parameters.split()

    def answer(*args: Any, **kwargs: Any) -> RuleResult:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if set(given) != set(names):
            return None
        tensors = {name: given[name] for name in names if isinstance(given[name], Arg)}
        if any(arg.ndim < 2 for name, arg in tensors.items() if name in rows.split()):
            return None
        uncut = {name: int(name in rows.split()) for name in tensors}
        uncut.update({name: tensors[name].ndim for name in whole.split() if name in tensors})
        shapes = [arg.shape[: arg.ndim - uncut[name]] for name, arg in tensors.items()]
        try:
            broadcast_shape(shapes)
        except ValueError:
            return None
        factors, terms = broadcast(shapes)
        dims = {
            arg: (*term, *((),) * uncut[name])
            for (name, arg), term in zip(tensors.items(), terms, strict=True)
        }
        return reduce_loss(function, given, dims, factors)

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
    _torch.cosine_embedding_loss,
    "input1 input2 target margin reduction",
    rows="input1 input2",
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
    whole="weight",
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
    given = dict(locals())
    lengths = [one for one in (input_lengths, target_lengths) if isinstance(one, Arg)]
    if log_probs.ndim != 3 or targets.ndim != 2 or len(lengths) != 2:
        return None
    n = Factor(log_probs.shape[1], "n")
    dims = {log_probs: [None, n, None], targets: [n, None], **dict.fromkeys(lengths, (n,))}
    return reduce_loss(_ctc, given, dims, [n])


def _ctc(**values: Any) -> Tensor:
    log_probs = values["log_probs"]
    if log_probs.shape[1] == 0:
        shape = (0,) if values["reduction"] == NONE else ()
        return keep_inputs_in_graph(log_probs.new_zeros(shape), log_probs)
    return torch.ctc_loss(*values.values())
