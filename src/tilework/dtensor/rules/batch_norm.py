"""Batch normalisation: local if each rank has all rows, else one reduction in each direction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import local_graph
from tilework.dtensor.autograd.partial_grads import alias_local, redistribute_with_gradient
from tilework.dtensor.dispatch.results import replicated
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.propagation.op_sharding import DTensorArg
from tilework.dtensor.provenance.digests import Moved, digest_of
from tilework.dtensor.redistribution.redistribute import gradient_of, redistribute_local
from tilework.dtensor.rules.internal_ops import reduce_partial
from tilework.dtensor.rules.norms import (
    accumulated,
    check_running,
    may_scale,
    present,
    unbiased,
    unshardable,
    update_running,
)
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.layout.internal import shard_of
from tilework.tiled import (
    Arg,
    Decomposition,
    Factor,
    RuleResult,
    dtensor_rule,
    factors_of,
    local_call,
    register,
)
from tilework.tiled.rules import allow_empty_shards

_STATISTICS = ("running_mean", "running_var")
for _name in (
    *("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    *("_batch_norm_impl_index", "cudnn_batch_norm", "miopen_batch_norm"),
    *("batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
):
    register(_name, silent_writes=_STATISTICS)


@dtensor_rule(torch.batch_norm)
def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> RuleResult:
    if input.ndim < 2:
        return None
    if 0 in input.shape:
        return Decomposition(_without_elements)
    every: list[DTensorArg] = present(input, weight, bias, running_mean, running_var)
    if not may_scale(input, every):
        return None  # torch raises
    use = training or running_mean is None
    writes = training and running_mean is not None
    over = [0, *range(2, input.ndim)]
    # In place only if nothing moves: a write to a moved copy would be lost.
    if use and (any(map(input.is_sharded, over)) or (writes and any(map(_is_distributed, every)))):
        return Decomposition(_over_ranks)
    c = Factor(input.shape[1], "c", unshardable=writes or any(map(_has_empty_channels, every)))
    others = unshardable if use else factors_of
    n, *spatial = others((input.shape[0], *input.shape[2:]))
    dims = [n, c, *spatial]
    inputs: dict[Arg, Any] = {**dict.fromkeys(every[1:], (c,)), input: dims}
    function: Any = torch.batch_norm
    affine = weight, bias, running_mean, running_var

    def normed(x: Tensor, *its: Tensor) -> Tensor:
        left = iter(its)
        tensors: list[Any] = [None if arg is None else next(left) for arg in affine]
        result: Tensor = function(x, *tensors, training, momentum, eps, cudnn_enabled)
        return result

    run = None if use else allow_empty_shards(normed)
    return local_call(inputs, [dims], run=run)


def _is_distributed(arg: DTensorArg) -> bool:
    return not arg.spec.is_replicated


def _has_empty_channels(arg: DTensorArg) -> bool:
    """True if some rank has no channels. torch refuses such a tensor."""
    channels, places = min(1, arg.ndim - 1), map(range, arg.spec.mesh.shape)
    return arg.is_sharded(channels) and any(
        not arg.spec.sizes_at(place)[channels] for place in product(*places)
    )


def _without_elements(input: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> Tensor:
    """The result without elements, which depends on weight and bias in the graph."""
    out = reduce_partial(input).clone()
    if weight is not None:
        out = out * weight[0]
    return out if bias is None else out + bias[0]


# -- over the rows of several ranks ----------------------------------------------------------


def _over_ranks(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    check_running(running_mean, running_var)
    x = reduce_partial(input)
    if not isinstance(x, DTensor):
        x = replicated(x, _mesh_of(weight, bias, running_mean, running_var))
    if not x._spec.takes_part:
        return wrap(x._local_tensor, x._spec)
    rows = _Rows(x._spec, eps, Moved(digest_of(x), "batch_norm"))
    w, b = (None if each is None else _by_channels(each, rows.channels) for each in (weight, bias))
    out, mean, var = _Normalized.apply(local_graph.local_of(x), w, b, rows)
    update_running(running_mean, wrap(mean, rows.channels), momentum)
    update_running(running_var, wrap(unbiased(var, rows.count), rows.channels), momentum)
    return wrap(out, x._spec)


def _mesh_of(*tensors: Tensor | None) -> Any:
    return next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))


def _by_channels(tensor: Tensor, channels: DTensorSpec) -> Tensor:
    """The local channels of a weight or bias; each rank has their full gradient."""
    if not isinstance(tensor, DTensor):
        tensor = replicated(tensor, channels.mesh)
    return redistribute_local(local_graph.local_of(tensor), tensor._spec, channels)


@dataclass(eq=False)
class _Rows:
    """The layout of an input of batch normalisation, by rows and channels."""

    spec: DTensorSpec
    eps: float
    of: Moved

    @cached_property
    def dims(self) -> Ints:
        """The dims that are normalised over."""
        return tuple(dim for dim in range(self.spec.ndim) if dim != 1)

    @cached_property
    def axes(self) -> Ints:
        """The axes that shard these dims."""
        return tuple(
            axis
            for axis, (placement, length) in enumerate(
                zip(self.spec.placements, self.spec.mesh.shape, strict=True)
            )
            if isinstance(placement, Shard) and placement.dim != 1 and length > 1
        )

    @cached_property
    def count(self) -> int:
        """The number of elements of a channel."""
        return math.prod(self.spec.shape[dim] for dim in self.dims)

    @cached_property
    def counts(self) -> Tensor:
        """The number of a channel's elements on each rank along the axes, in a column."""
        here = self.spec.mesh.get_coordinate()
        assert here is not None
        counts = []
        for places in product(*[range(self.spec.mesh.shape[axis]) for axis in self.axes]):
            coordinate = list(here)
            for axis, place in zip(self.axes, places, strict=True):
                coordinate[axis] = place
            sizes = self.spec.sizes_at(coordinate)
            counts.append([float(math.prod(sizes[dim] for dim in self.dims))])
        return torch.tensor(counts, dtype=torch.float64)

    @cached_property
    def channels(self) -> DTensorSpec:
        """The layout of a 1-d tensor that has one value for each channel of the input."""
        placements: list[Placement] = [
            shard_of(0, placement.cut)
            if isinstance(placement, Shard) and placement.dim == 1
            else Replicate()
            for placement in self.spec.placements
        ]
        return spec_of(self.spec.mesh, placements, self.spec.shape[1:2], self.spec.order)

    def layout(self, placement: Placement, shape: Ints) -> DTensorSpec:
        """The layout with ``placement`` along ``axes`` of a tensor for this rank's channels."""
        mesh = self.spec.mesh
        placements: list[Placement] = [
            placement if axis in self.axes else Replicate() for axis in range(mesh.ndim)
        ]
        return spec_of(mesh, placements, shape)

    def view(self, values: Tensor) -> Tensor:
        """Reshape one value per channel to a shape that broadcasts with the input."""
        return values.view(1, -1, *(1,) * (self.spec.ndim - 2))


def _statistics(x: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of local channels over all rows. Collective; differentiable."""
    own_count = x.numel() // max(1, x.shape[1])
    mean = x.sum(rows.dims) / max(1, own_count)
    squares = (x - rows.view(mean)).square().sum(rows.dims)
    if not rows.axes:
        return mean, squares / max(1, own_count)
    width = x.shape[1]
    shape = (len(rows.counts), 2 * width)
    source, target = rows.layout(Shard(0), shape), rows.layout(Replicate(), shape)
    own = torch.cat([mean, squares]).unsqueeze(0)
    every = redistribute_with_gradient(own, source, target, target.as_partial(rows.axes), rows.of)
    counts = rows.counts.to(x)
    means = every[:, :width]
    mean = (means * counts).sum(0) / rows.count
    # Chan, Golub, LeVeque: the squares around the common mean, from the squares around each rank's.
    apart = ((means - mean).square() * counts).sum(0)
    return mean, (every[:, width:].sum(0) + apart) / rows.count


def _composed(x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: _Rows) -> Any:
    """The normalised input, mean and variance, by operators that can be differentiated twice."""
    values = accumulated(x)
    mean, var = _statistics(values, rows)
    out = (values - rows.view(mean)) * rows.view(torch.rsqrt(var + rows.eps))
    if weight is not None:
        out = out * rows.view(weight)
    if bias is not None:
        out = out + rows.view(bias)
    return out.to(x.dtype), mean, var


class _Normalized(LocalFunction):
    """Batch normalisation over several ranks' rows; backward is a single reduction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: _Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, mean, var = _composed(x, weight, bias, rows)
        ctx.save_for_backward(x, weight, bias, mean, var)
        ctx.rows = rows
        ctx.mark_non_differentiable(mean, var)
        return out, mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, bias, mean, var = ctx.saved_tensors
        rows: _Rows = ctx.rows
        if torch.is_grad_enabled():
            return (*_differentiable_gradients(grad, x, weight, bias, rows), None)
        grads, scale = accumulated(grad), torch.rsqrt(var + rows.eps)
        standard = (accumulated(x) - rows.view(mean)) * rows.view(scale)
        sums = torch.cat([grads.sum(rows.dims), (grads * standard).sum(rows.dims)])
        if rows.axes:
            partial = rows.layout(Partial(), tuple(sums.shape))
            of = gradient_of(rows.of, partial, sums)
            sums = redistribute_local(sums, partial, partial.dual, of=of)
        of_bias, of_weight = sums[: x.shape[1]], sums[x.shape[1] :]
        if weight is not None:
            scale = scale * weight
        means = [rows.view(each / rows.count) for each in (of_bias, of_weight)]
        of_x = (grads - means[0] - standard * means[1]) * rows.view(scale)
        return (
            of_x.to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            None,
        )


def _differentiable_gradients(grad: Tensor, *inputs: Any) -> list[Tensor | None]:
    """The gradients of a normalisation, recorded in the graph for gradients of gradients."""
    *tensors, rows = inputs
    x, *parameters = tensors
    with torch.enable_grad():
        whole = rows.layout(Replicate(), (x.shape[1],))
        aliases = [
            parameter
            if parameter is None or not parameter.requires_grad
            else alias_local(parameter * 1, whole.as_partial(rows.axes), whole, rows.of)
            for parameter in parameters
        ]
        out, _, _ = _composed(x, aliases[0], aliases[1], rows)
        needed = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
    return [
        next(found) if tensor is not None and tensor.requires_grad else None for tensor in tensors
    ]
