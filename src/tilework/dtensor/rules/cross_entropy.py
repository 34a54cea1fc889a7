"""Classification losses: with sharded classes, no rank has all logits of an element.

The mean is weighted by the weight of the target's class. The denominator is therefore a sum, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilework.dtensor.rules.internal_ops import internal_operator, reduce_partial
from tilework.tiled import (
    Arg,
    Decomposition,
    Factor,
    LocalRanges,
    RuleResult,
    dtensor_rule,
    factors_of,
    local_call,
)
from tilework.tiled.rules import MEAN, NONE, SUM, LocalIndexRange, reduce_loss

_nn: Any = torch._C._nn
_NAMES = {NONE: "none", MEAN: "mean", SUM: "sum"}
#: Stands for targets whose class is on another rank.
_IGNORED = -100


def _class_dim(input: Arg | Tensor) -> int:
    return 0 if input.ndim == 1 else 1


def _has_indices(input: Arg, target: Arg) -> bool:
    """True if the target has class indices; False if the target has class probabilities."""
    at = _class_dim(input)
    return target.shape == (*input.shape[:at], *input.shape[at + 1 :])


class _LossFactors:
    """The factors of a loss of logits: of the classes, and of the other dims."""

    def __init__(self, input: Arg, target: Arg, weight: Arg | None, needs_all: bool) -> None:
        at = _class_dim(input)
        self.classes = Factor(input.shape[at], "classes", unshardable=needs_all)
        self.elements = factors_of((*input.shape[:at], *input.shape[at + 1 :]))
        every = [*self.elements[:at], self.classes, *self.elements[at:]]
        #: The factors of each argument's dims.
        self.dims: dict[Arg, Any] = {input: every}
        self.dims[target] = every if target.shape == input.shape else self.elements
        if weight is not None:
            self.dims[weight] = [self.classes]


def _valid(input: Any, weight: Any) -> bool:
    return input.ndim > 0 and (weight is None or weight.shape == (input.shape[_class_dim(input)],))


def _are_replicated(*args: Any) -> bool:
    return all(arg is None or arg.spec.is_replicated for arg in args)


# -- negative log likelihood -----------------------------------------------------------------


@dtensor_rule(_nn.nll_loss_nd)
def _nll_loss(
    input: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> RuleResult:
    if not _valid(input, weight) or not _has_indices(input, target):
        return None
    if reduction == MEAN and _are_replicated(input, target, weight):
        unsharded = {arg: [None] * arg.ndim for arg in (input, target, weight) if arg is not None}
        return local_call(unsharded, [[]])
    if reduction == MEAN:
        return Decomposition(_mean_nll)
    return _nll_rule(input, target, weight, ignore_index, reduction)


def _mean_nll(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    return _quotient(_nll(input, target, weight, ignore_index, MEAN), input.dtype)


def _quotient(sums: Tensor, dtype: torch.dtype) -> Tensor:
    loss, weight = reduce_partial(sums).unbind(0)
    return (loss / weight).to(dtype)


def _nll_rule(
    input: Any, target: Any, weight: Any, ignore_index: int, reduction: int
) -> RuleResult:
    """The rule of ``nll_loss``: partial sums over local classes; a mean has two."""
    loops = _LossFactors(input, target, weight, needs_all=False)

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        span = LocalIndexRange(ranges, loops.classes)

        def losses(*tensors: Tensor) -> Tensor:
            x, t = tensors[input.number], tensors[target.number]
            w = None if weight is None else tensors[weight.number]
            ignored = t.long() == ignore_index  # the byte 156 equals -100
            if not span.is_full:
                x, t, w = _local_classes(x, t, w, span, ignored)
            ignore = ignore_index if span.is_full else _IGNORED
            return _nll_of(x, t, w, ignore, reduction)

        return losses

    if reduction == MEAN:
        return local_call(loops.dims, [[None]], run=run, shapes=[(2,)])
    outputs = [loops.elements if reduction == NONE else []]
    return local_call(loops.dims, outputs, run=run, linear=[[input]])


def _local_classes(
    x: Tensor, target: Tensor, weight: Tensor | None, span: LocalIndexRange, ignored: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The local logits, targets and weights; targets of other ranks are ``_IGNORED``."""
    if target.dtype is torch.uint8:  # has no -100
        target = target.long()
    numbers, here = span.localize(target, ignored)
    if span.count == 0:  # torch needs at least one class: add a class that no target has
        at = _class_dim(x)
        x = F.pad(x, (0, 0) * (x.ndim - 1 - at) + (0, 1))
        weight = None if weight is None else F.pad(weight, (0, 1))
    return x, numbers.where(here, _IGNORED), weight


def _nll_of(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int
) -> Tensor:
    if reduction != MEAN:
        return F.nll_loss(x, target, weight, ignore_index=ignore_index, reduction=_NAMES[reduction])
    loss = F.nll_loss(x, target, weight, ignore_index=ignore_index, reduction="none")
    return _loss_and_weight(loss, _weights(target, weight, ignore_index, loss.dtype))


def _loss_and_weight(loss: Tensor, weights: Tensor) -> Tensor:
    dtype = torch.promote_types(loss.dtype, torch.float32)
    return torch.stack([loss.sum(dtype=dtype), weights.sum(dtype=dtype)])


def _weights(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """The weight of each target's class; 0 for targets that are ignored."""
    counted = target.long() != ignore_index
    if weight is None:
        return counted.to(dtype)
    return weight[target.where(counted, 0).long()].to(dtype).masked_fill(~counted, 0)


@internal_operator(_nll_rule)
def _nll(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int
) -> Tensor:
    return _nll_of(input, target, weight, ignore_index, reduction)


# -- cross entropy ---------------------------------------------------------------------------


@dtensor_rule(_nn.cross_entropy_loss)
def _cross_entropy(
    input: Any, target: Any, weight: Any, reduction: int, ignore_index: int, label_smoothing: float
) -> RuleResult:
    indices = target.shape != input.shape
    if not _valid(input, weight) or (indices and not _has_indices(input, target)):
        return None
    if not (input.dtype.is_floating_point and (indices or target.dtype.is_floating_point)):
        return None  # torch raises
    if input.is_sharded(_class_dim(input)):
        return Decomposition(_sharded_cross_entropy)
    if indices and reduction == MEAN and not _are_replicated(input, target, weight):
        return Decomposition(_mean_cross_entropy)
    loops = _LossFactors(input, target, weight, needs_all=True)
    arguments = {
        "input": input,
        "target": target,
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    return reduce_loss(_nn.cross_entropy_loss, arguments, loops.dims, loops.elements)


def _mean_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    return _quotient(
        _cross_entropy_sums(input, target, weight, ignore_index, label_smoothing), input.dtype
    )


def _cross_entropy_sums_rule(
    input: Any, target: Any, weight: Any, ignore_index: int, label_smoothing: float
) -> RuleResult:
    dims = _LossFactors(input, target, weight, needs_all=True).dims
    return local_call(dims, [[None]], shapes=[(2,)])


@internal_operator(_cross_entropy_sums_rule)
def _cross_entropy_sums(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Two sums whose quotient is the mean loss: the weighted losses, and the weights."""
    loss = F.cross_entropy(
        *(input, target, weight),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return _loss_and_weight(loss, _weights(target, weight, ignore_index, loss.dtype))


# -- cross entropy where classes are sharded -------------------------------------------------
#
# With z the logits minus the greatest logit, and q the target distribution of an element times the
# class weights, the loss is sum(q) * log(sum(exp(z))) - sum(q * z): three sums over classes.


def _sharded_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Cross entropy of sharded classes by two small reductions. Collective."""
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    top = reduce_partial(x.detach().amax(_class_dim(x), keepdim=True))
    sums = reduce_partial(_class_sums(x, top, target, weight, ignore_index, label_smoothing))
    indices = target if target.shape != input.shape else None
    losses = _class_losses(sums, indices, ignore_index, reduction)
    if reduction == MEAN:
        return _quotient(losses, input.dtype)
    return losses.to(input.dtype)


def _class_sums_rule(
    input: Any, top: Any, target: Any, weight: Any, ignore_index: int, label_smoothing: float
) -> RuleResult:
    loops = _LossFactors(input, target, weight, needs_all=False)
    at = _class_dim(input)
    indices = target.shape != input.shape
    loops.dims[top] = [*loops.elements[:at], None, *loops.elements[at:]]
    rows = 4 if indices else 3

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        span = LocalIndexRange(ranges, loops.classes)

        def sums(*tensors: Tensor) -> Tensor:
            x, t = tensors[input.number], tensors[target.number]
            w = None if weight is None else tensors[weight.number]
            z = x - tensors[top.number]
            sums_of_q = (
                _sums_of_indices(z, t, w, span, t.long() == ignore_index, label_smoothing)
                if indices
                else _sums_of_probabilities(z, t, w, span, label_smoothing)
            )
            return torch.stack([z.exp().sum(at), *sums_of_q])

        return sums

    shape = (rows, *(factor.size for factor in loops.elements))
    return local_call(loops.dims, [[None, *loops.elements]], run=run, shapes=[shape])


def _sums_of_indices(
    z: Tensor,
    target: Tensor,
    weight: Tensor | None,
    span: LocalIndexRange,
    ignored: Tensor,
    smoothing: float,
) -> list[Tensor]:
    """This rank's sums of q, q * z and the weight, for targets that are class indices."""
    at = _class_dim(z)
    by_class = _along_classes(weight, z)
    x, local, w = _local_classes(z, target, weight, span, ignored)
    of_target = -F.nll_loss(x, local, w, ignore_index=_IGNORED, reduction="none")
    weights = _weights(local, w, _IGNORED, z.dtype)
    q, qz = weights, of_target
    if smoothing:
        share = smoothing / span.total
        every = torch.ones_like(z) if by_class is None else by_class.expand_as(z)
        q = (1 - smoothing) * q + share * every.sum(at)
        qz = (1 - smoothing) * qz + share * (every * z).sum(at)
    return [q, qz, weights]


def _sums_of_probabilities(
    z: Tensor, target: Tensor, weight: Tensor | None, span: LocalIndexRange, smoothing: float
) -> list[Tensor]:
    at = _class_dim(z)
    q = target * (1 - smoothing) + smoothing / span.total if smoothing else target
    by_class = _along_classes(weight, z)
    q = q if by_class is None else q * by_class
    return [q.sum(at), (q * z).sum(at)]


def _along_classes(weight: Tensor | None, z: Tensor) -> Tensor | None:
    if weight is None:
        return None
    return weight.reshape((-1,) + (1,) * (z.ndim - 1 - _class_dim(z)))


@internal_operator(_class_sums_rule)
def _class_sums(
    input: Tensor,
    top: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    raise NotImplementedError("_class_sums runs on DTensors only, by the sharding rule")


def _class_losses_rule(sums: Any, target: Any, ignore_index: int, reduction: int) -> RuleResult:
    elements = factors_of(sums.shape[1:])
    dims: dict[Arg, Any] = {sums: [None, *elements]}
    if target is not None:
        dims[target] = elements
    if reduction == MEAN:
        return local_call(dims, [[None]], shapes=[(2,)])
    return local_call(dims, [elements if reduction == NONE else []])


@internal_operator(_class_losses_rule)
def _class_losses(sums: Tensor, target: Tensor | None, ignore_index: int, reduction: int) -> Tensor:
    """The losses from the sums over classes; reduced: one sum, for a mean also weights."""
    exps, q, qz, *weights = sums.unbind(0)
    loss = q * exps.log() - qz
    if target is not None:
        loss = loss.where(target.long() != ignore_index, 0)
    if reduction == NONE:
        return loss
    if reduction == SUM:
        return loss.sum()
    return _loss_and_weight(loss, weights[0] if weights else torch.ones_like(loss))
