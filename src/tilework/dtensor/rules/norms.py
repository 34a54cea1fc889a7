"""Normalisation: local if the normalised dims are not sharded, else in two reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.dtensor.rules.internal_ops import reduce_partial
from tilework.dtensor.tensor import DTensor
from tilework.tiled import (
    Arg,
    Decomposition,
    Dim,
    Factor,
    LocalRanges,
    RuleResult,
    dtensor_rule,
    factors_of,
    local_call,
)
from tilework.tiled.rules import allow_empty_shards, with_row_for_empty

ArgT = TypeVar("ArgT", bound=Arg)


@dtensor_rule("local_response_norm")
def _local_response_norm(
    input: Arg, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> RuleResult:
    if input.ndim < 3 or not input.dtype.is_floating_point:
        return None  # torch's result has integers for an empty shard of integers, otherwise floats
    n, c, *spatial = factors_of(input.shape)
    dims = [n, Factor(c.size, "c", unshardable=True), *spatial]
    # torch's function returns an empty tensor as it is.
    run = allow_empty_shards(lambda x: F.local_response_norm(x, size, alpha, beta, k))
    return local_call({input: dims}, [dims], run=run)


def unshardable(sizes: Sequence[int]) -> list[Factor]:
    """Factors for dims of these sizes, which the operator needs unsharded."""
    return [Factor(size, unshardable=True) for size in sizes]


def present(*args: ArgT | None) -> list[ArgT]:
    """The arguments that are not None."""
    return [arg for arg in args if arg is not None]


# -- over the last dims ----------------------------------------------------------------------


@dtensor_rule("layer_norm")
def _layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> RuleResult:
    arguments = {"weight": weight, "bias": bias, "eps": eps}
    return _over_last(input, normalized_shape, arguments, torch.layer_norm, _decomposed_layer_norm)


@dtensor_rule("rms_norm")
def _rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> RuleResult:
    arguments = {"weight": weight, "eps": eps}
    return _over_last(input, normalized_shape, arguments, torch.rms_norm, _decomposed_rms_norm)


def _over_last(
    input: Arg,
    shape: Any,
    arguments: dict[str, Any],
    function: Callable[..., Tensor],
    composed: Callable[..., Any],
) -> RuleResult:
    """The call of a norm over the last dims; composed if these dims are sharded."""
    shape = tuple(shape)
    affine = [arg for arg in arguments.values() if isinstance(arg, Arg)]
    lead = input.ndim - len(shape)
    if lead < 0 or any(arg.shape != shape for arg in affine) or input.shape[lead:] != shape:
        return None
    if any(map(input.is_sharded, range(lead, input.ndim))):
        return Decomposition(composed) if may_scale(input, affine) else None
    last = unshardable(shape)
    dims = [*factors_of(input.shape[:lead]), *last]
    inputs = {input: dims, **dict.fromkeys(affine, last)}
    names = [name for name, arg in arguments.items() if isinstance(arg, Arg)]

    def normed(x: Tensor, *its: Tensor) -> Tensor:
        return function(x, shape, **{**arguments, **dict(zip(names, its, strict=True))})

    run = allow_empty_shards(normed)
    return local_call(inputs, [dims], run=run, shapes=[input.shape])


def may_scale(input: Arg, affine: Sequence[Arg]) -> bool:
    """True if torch's kernels of norms accept these dtypes of input, weight and bias.

    Weight and bias have the dtype of the input, or float32 with an input of 16 bits.
    """
    halves = (torch.float16, torch.bfloat16)
    dtypes = {input.dtype, torch.float32} if input.dtype in halves else {input.dtype}
    return input.dtype.is_floating_point and all(arg.dtype in dtypes for arg in affine)


def _decomposed_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    out, _, _ = _standardized(accumulated(input), dims, eps)
    return _affine(out, weight, bias).to(input.dtype)


def _decomposed_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    x = accumulated(input)
    least = torch.finfo(x.dtype).eps if eps is None else eps
    mean = reduce_partial(x.square().mean(dims, keepdim=True))
    return _affine(x * (mean + least).rsqrt(), weight, None).to(input.dtype)


def accumulated(x: Tensor) -> Tensor:
    """The tensor in the dtype in which torch accumulates: float32 for 16-bit dtypes."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _standardized(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The input scaled to mean 0 and variance 1 over ``dims``, the mean, the biased variance."""
    mean = reduce_partial(x.mean(dims, keepdim=True))
    centred = x - mean
    var = reduce_partial(centred.square().mean(dims, keepdim=True))
    return centred * (var + eps).rsqrt(), mean, var


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


# -- of weights ------------------------------------------------------------------------------


@dtensor_rule("_weight_norm")
def _weight_norm(v: Any, g: Any, dim: int = 0) -> RuleResult:
    """Scale ``v`` to the norm in ``g`` of each slice along ``dim`` (-1: of the whole)."""
    if not -1 <= dim < v.ndim or v.dtype != g.dtype or not v.dtype.is_floating_point:
        return None
    over = [at for at in range(v.ndim) if at != dim]
    norms = tuple(size if at == dim else 1 for at, size in enumerate(v.shape))
    if g.shape != norms and (dim >= 0 or g.ndim > v.ndim or set(g.shape) - {1}):
        return None

    def composed(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(v, 2, over, True)
        return v * (g / found)

    if dim < 0 or 0 in v.shape or any(map(v.is_sharded, over)):
        return Decomposition(composed, is_checked=True)
    dims: list[Factor | None] = [*unshardable(v.shape)]
    dims[dim] = Factor(v.shape[dim])
    inputs = {v: dims, g: [*[None] * dim, dims[dim], *[None] * (v.ndim - dim - 1)]}

    def scaled(v: Tensor, g: Tensor) -> Tensor:
        out: Tensor = torch._weight_norm(v, g, dim)
        return out

    return local_call(inputs, [dims], run=allow_empty_shards(scaled), shapes=[v.shape])


# -- over channels ---------------------------------------------------------------------------


@dtensor_rule(torch.group_norm)
def _group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> RuleResult:
    if input.ndim < 2 or num_groups < 1 or input.shape[1] % num_groups:
        return None
    spatial = range(2, input.ndim)
    if any(map(input.is_sharded, spatial)) or (num_groups == 1 and input.is_sharded(1)):
        return Decomposition(_decomposed_group_norm)
    group = Factor(num_groups, "group")
    channel: Dim = (group, *unshardable([input.shape[1] // num_groups]))
    dims: list[Factor | Dim] = [Factor(input.shape[0]), channel, *unshardable(input.shape[2:])]
    affine = present(weight, bias)

    def function(groups: int, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return torch.group_norm(x, groups, w, b, eps, cudnn_enabled)

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        groups = ranges.local_size((group,))

        def normed(*tensors: Tensor) -> Tensor:
            x, w, b = _local_of_args(tensors, [input, weight, bias])
            assert x is not None
            if x.numel() == 0:
                rows: Tensor = with_row_for_empty(partial(function, max(groups, 1)), x, w, b)
                return rows
            return function(groups, x, w, b)

        return normed

    return local_call({input: dims, **dict.fromkeys(affine, (channel,))}, [dims], run=run)


def _local_of_args(tensors: Sequence[Tensor], args: Sequence[Arg | None]) -> list[Tensor | None]:
    """The local tensor of each argument, by the argument's number; None for a missing argument."""
    return [None if arg is None else tensors[arg.number] for arg in args]


def _decomposed_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    x = accumulated(input)
    x = x.reshape(len(x), num_groups, x.shape[1] // num_groups, *x.shape[2:])
    out, _, _ = _standardized(x, tuple(range(2, x.ndim)), eps)
    return _by_channel(out.flatten(1, 2), weight, bias).to(input.dtype)


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *(1,) * (x.ndim - 2))
    w, b = [None if parameter is None else parameter.reshape(shape) for parameter in (weight, bias)]
    return _affine(x, w, b)


@dtensor_rule(torch.instance_norm)
def _instance_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> RuleResult:
    if input.ndim < 2:
        return None
    if not use_input_stats:
        return Decomposition(_instance_norm_by_running)
    if running_mean is not None or any(map(input.is_sharded, range(2, input.ndim))):
        return Decomposition(_decomposed_instance_norm)
    n, c = factors_of(input.shape[:2])
    dims = [n, c, *unshardable(input.shape[2:])]

    def function(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return torch.instance_norm(x, w, b, None, None, True, momentum, eps, cudnn_enabled)

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        def normed(*tensors: Tensor) -> Tensor:
            x, w, b = _local_of_args(tensors, [input, weight, bias])
            assert x is not None
            return function(x, w, b) if x.numel() else with_row_for_empty(function, x, w, b)

        return normed

    return local_call({input: dims, **dict.fromkeys(present(weight, bias), (c,))}, [dims], run=run)


def _instance_norm_by_running(*args: Any) -> Tensor:
    input, weight, bias, mean, var, _, momentum, eps, cudnn = args
    return torch.batch_norm(input, weight, bias, mean, var, False, momentum, eps, cudnn)


def _decomposed_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    check_running(running_mean, running_var)
    dims = tuple(range(2, input.ndim))
    out, mean, var = _standardized(accumulated(input), dims, eps)
    count = math.prod(input.shape[2:])
    update_running(running_mean, mean.flatten(1).mean(0), momentum)
    update_running(running_var, unbiased(var, count).flatten(1).mean(0), momentum)
    return _by_channel(out, weight, bias).to(input.dtype)


def unbiased(var: Tensor, count: int) -> Tensor:
    """The unbiased variance from the biased variance of ``count`` elements; NaN of one element."""
    return var * (count / (count - 1) if count > 1 else math.nan)


def check_running(mean: Tensor | None, var: Tensor | None) -> None:
    """Raise, as torch does, for running statistics that require a gradient."""
    for name, running in (("running_mean", mean), ("running_var", var)):
        if running is not None and running.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"The function 'native_batch_norm' is not differentiable with respect to argument "
                f"'{name}'. This input cannot have requires_grad True."
            )


@torch.no_grad()
def update_running(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Set ``running`` to ``(1 - momentum) * running + momentum * value``, in place."""
    if running is None:
        return
    change = reduce_partial(value.detach() * momentum)
    if not isinstance(running, DTensor) and isinstance(change, DTensor):
        change = change.full_tensor()  # statistics of a plain module are plain on every rank
    running.mul_(1 - momentum).add_(change)
