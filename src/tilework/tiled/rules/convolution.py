"""Convolutions, pooling and resampling: sharded along batch, channels, and separate windows.

A spatial dim whose windows overlap is unshardable.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilework.tiled.factors import Dim, Factor, factors_of
from tilework.tiled.op_rules import Arg, LocalRanges, MakeRun, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.rules.empty_shards import without_rows, zero_rows

_torch: Any = torch
_nn: Any = torch._C._nn


def guard_empty_shards(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    dims: Mapping[Arg, Sequence[Factor | Dim | None]],
    local: Callable[[LocalRanges], Mapping[str, Any]] = lambda ranges: {},
) -> MakeRun:
    """Make the run of an operator on shards that may be empty, which torch refuses.

    Zeros replace empty shards: gradients, and gradients of gradients, then take the same way on all
    ranks. ``local`` makes the arguments that differ between shards.
    """

    def make(ranges: LocalRanges) -> Callable[..., Any]:
        local_arguments = {**arguments, **local(ranges)}
        args = [(name, arg) for name, arg in local_arguments.items() if isinstance(arg, Arg)]

        def run(*tensors: Tensor) -> Any:
            values = {**local_arguments, **{name: tensors[arg.number] for name, arg in args}}
            if not any(_is_emptied(tensors[arg.number], arg) for _, arg in args):
                return function(**values)  # torch decides on empty full tensors
            for name, arg in args:
                if not tensors[arg.number].numel():
                    shape = _shape_with_row(arg, dims[arg], ranges)
                    values[name] = zero_rows(tensors[arg.number], shape)
            return without_rows(function(**values), ranges.outputs[0].local_shape)

        return run

    return make


def _shape_with_row(
    arg: Arg, dims: Sequence[Factor | Dim | None], ranges: LocalRanges
) -> list[int]:
    """The shape of the local shard, with at least one element of each factor that is not empty."""
    shape = []
    for dim, size in zip(dims, arg.shape, strict=True):
        factors = (dim,) if isinstance(dim, Factor) else dim
        sizes = [max(ranges.local_size((factor,)), min(factor.size, 1)) for factor in factors or ()]
        shape.append(math.prod(sizes) if sizes else size)
    return shape


def _is_emptied(local: Tensor, arg: Arg) -> bool:
    return any(
        size == 0 != full_size for size, full_size in zip(local.shape, arg.shape, strict=True)
    )


def guarded_call(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    inputs: Mapping[Arg, Sequence[Factor | Dim | None]],
    outputs: Sequence[Sequence[Factor | Dim | None]],
    *,
    local: Callable[[LocalRanges], Mapping[str, Any]] = lambda ranges: {},
    **facts: Any,
) -> RuleResult:
    """The local call of an operator, with further facts, on shards that may be empty."""
    run = guard_empty_shards(function, arguments, inputs, local)
    return local_call(inputs, outputs, run=run, **facts)


def per_dim(value: Any, count: int) -> tuple[int, ...] | None:
    """A parameter such as ``stride`` as a number per spatial dim; None if it is something else."""
    if isinstance(value, int):
        return (value,) * count
    if not isinstance(value, (tuple, list)) or len(value) not in (1, count):
        return None
    return tuple(value) * (count if len(value) == 1 else 1)


def window_factors(
    sizes: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any
) -> list[tuple[Dim, Dim]]:
    """For each spatial dim, the factors of the dim and of the windows; none if windows overlap."""
    count = len(sizes)
    known = [per_dim(value, count) or (0,) * count for value in (kernel, stride, padding, dilation)]
    return [_window_factors(*dim) for dim in zip(sizes, *known, strict=True)]


def _window_factors(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[Dim, Dim]:
    disjoint = kernel == stride and padding == 0 and (dilation == 1 or kernel == 1)
    if not disjoint or kernel < 1 or size % kernel:
        return (), ()
    window = Factor(size // kernel, "windows")
    return (window, Factor(kernel, unshardable=True)), (window,)


# -- convolutions ----------------------------------------------------------------------------


def _register_convolution(function: Any, spatial: int, names: str) -> None:
    defaults = {name: int(name not in ("padding", "output_padding")) for name in names.split()}
    transposed = "output_padding" in defaults

    def answer(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> RuleResult:
        arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        groups = arguments["groups"]
        lead = input.ndim - spatial - 1
        if lead not in (0, 1) or weight.ndim != spatial + 2 or groups < 1:
            return None
        channels = input.shape[lead]
        fitting = weight.shape[0] if transposed else weight.shape[1] * groups
        if channels != fitting or channels % groups:
            return None  # torch raises, though parts of the two may fit
        group = Factor(groups, "group")
        i = Factor(channels // groups, "i")
        o = Factor(weight.shape[1] if transposed else weight.shape[0] // groups, "o")
        dims = _spatial_factors(input, weight, arguments, transposed)
        batch = factors_of(input.shape[:lead])
        kernel = [None] * spatial
        inputs: dict[Arg, Sequence[Any]] = {
            input: [*batch, (group, i), *(before for before, _ in dims)],
            weight: [(group, i), o, *kernel] if transposed else [(group, o), i, *kernel],
        }
        if bias is not None:
            inputs[bias] = [(group, o)]
        return guarded_call(
            function,
            {"input": input, "weight": weight, "bias": bias, **arguments},
            inputs,
            [[*batch, (group, o), *(after for _, after in dims)]],
            local=lambda ranges: {"groups": max(ranges.local_size((group,)), 1)},
            linear=[[input, bias], [weight, bias]],
            addends=[bias],
        )

    rule(function)(answer)


def _spatial_factors(
    input: Arg, weight: Arg, arguments: Mapping[str, Any], transposed: bool
) -> list[tuple[Dim, Dim]]:
    kernel = weight.shape[2:]
    sizes = input.shape[input.ndim - len(kernel) :]
    padding = 0 if arguments["padding"] == "valid" else arguments["padding"]
    parameters = kernel, arguments["stride"], padding, arguments["dilation"]
    if not transposed:
        return window_factors(sizes, *parameters)
    if arguments["output_padding"] not in (0, (0,) * len(kernel), [0] * len(kernel)):
        return [((), ())] * len(kernel)
    grown = [size * width for size, width in zip(sizes, kernel, strict=True)]
    return [(before, after) for after, before in window_factors(grown, *parameters)]


#: For each convolution the number of spatial dims, and the names of the parameters after the bias.
CONVOLUTIONS = {
    **{f"conv{n}d": (n, "stride padding dilation groups") for n in (1, 2, 3)},
    **{
        f"conv_transpose{n}d": (n, "stride padding output_padding groups dilation")
        for n in (1, 2, 3)
    },
}
for _name, (_spatial, _names) in CONVOLUTIONS.items():
    _register_convolution(getattr(torch, _name), _spatial, _names)


# -- windows as columns ----------------------------------------------------------------------


def _register_columns(function: Any, names: str, back: bool) -> None:
    """Register im2col, which makes a column of each window, or with ``back`` the reverse."""

    def answer(input: Any, *args: Any, **kwargs: Any) -> RuleResult:
        arguments = {**dict(zip(names.split(), args, strict=False)), **kwargs}
        kernel = per_dim(arguments.get("kernel_size"), 2)
        lead = input.ndim - (2 if back else 3)
        if kernel is None or lead not in (0, 1):
            return None
        window = kernel[0] * kernel[1]
        if back and input.shape[lead] % window:
            return None
        c = Factor(input.shape[lead] // window if back else input.shape[lead], "c")
        column: Dim = (c, Factor(window, unshardable=True))
        batch = factors_of(input.shape[:lead])
        ends = [*batch, c, None, None], [*batch, column, None]
        before, after = ends[::-1] if back else ends
        given = {"input": input, **arguments}
        return guarded_call(function, given, {input: before}, [after], linear=[[input]])

    rule(function)(answer)


_register_columns(_nn.im2col, "kernel_size dilation padding stride", back=False)
_register_columns(_nn.col2im, "output_size kernel_size dilation padding stride", back=True)


# -- between channels and space --------------------------------------------------------------


@rule("pixel_shuffle")
def _pixel_shuffle(input: Any, upscale_factor: int) -> RuleResult:
    if input.ndim < 3 or upscale_factor < 1 or input.shape[-3] % upscale_factor**2:
        return None
    *batch, many, height, width = input.shape
    *lead, c, h, w = factors_of([*batch, many // upscale_factor**2, height, width])
    r, s = [Factor(upscale_factor, unshardable=True) for _ in "rs"]
    given = {"input": input, "upscale_factor": upscale_factor}
    before: list[Any] = [*lead, (c, r, s), h, w]
    after: list[Any] = [*lead, c, (h, r), (w, s)]
    return guarded_call(_torch.pixel_shuffle, given, {input: before}, [after], rearranges=True)


@rule("pixel_unshuffle")
def _pixel_unshuffle(input: Any, downscale_factor: int) -> RuleResult:
    if input.ndim < 3 or downscale_factor < 1:
        return None
    *batch, many, height, width = input.shape
    if height % downscale_factor or width % downscale_factor:
        return None
    if 0 in input.shape:
        shown = _torch.pixel_unshuffle(torch.empty(input.shape), downscale_factor)
        if shown.shape == input.shape:  # torch makes a plain copy
            dims = factors_of(input.shape)
            return local_call({input: dims}, [dims], rearranges=True, run=lambda _: torch.clone)
    *lead, c, h, w = factors_of(
        [*batch, many, height // downscale_factor, width // downscale_factor]
    )
    r, s = [Factor(downscale_factor, unshardable=True) for _ in "rs"]
    given = {"input": input, "downscale_factor": downscale_factor}
    before: list[Any] = [*lead, c, (h, r), (w, s)]
    after: list[Any] = [*lead, (c, r, s), h, w]
    return guarded_call(_torch.pixel_unshuffle, given, {input: before}, [after], rearranges=True)


@rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(input: Any, groups: int) -> RuleResult:
    if input.ndim < 3 or groups < 1 or input.shape[1] % groups:
        return None
    n, *spatial = factors_of((input.shape[0], *input.shape[2:]))
    dims, given = [n, None, *spatial], {"input": input, "groups": groups}
    return guarded_call(_torch.channel_shuffle, given, {input: dims}, [dims], rearranges=True)


_functional: Any = F
_ADAPTIVE = "input output_size return_indices"
_AVERAGE = "input kernel_size stride padding ceil_mode count_include_pad divisor_override"
_MAX = "input kernel_size stride padding dilation ceil_mode return_indices"
_POWER = "input norm_type kernel_size stride ceil_mode"


def _register_pool(
    name: str, spatial: int, names: str, results: int = 1, linear: bool = False
) -> None:
    """Register an operator on the last ``spatial`` dims; result 2 has input indices."""
    function = getattr(_functional, name)

    def answer(input: Any, *args: Any, **kwargs: Any) -> RuleResult:
        arguments = {**dict(zip(names.split(), (input, *args), strict=False)), **kwargs}
        lead = input.ndim - spatial
        if lead not in (1, 2) or not set(arguments) <= set(names.split()):
            return None
        arguments.pop("return_indices", None)
        batch = factors_of(input.shape[:lead])
        dims = _pool_factors(input.shape[lead:], arguments, results)
        out: list[Factor | Dim] = [*batch, *(after for _, after in dims)]
        inputs: dict[Arg, Sequence[Any]] = {input: [*batch, *(before for before, _ in dims)]}
        sums = [[input]] if linear else []
        return guarded_call(function, arguments, inputs, [out] * results, linear=sums)

    rule(name)(answer)


def _pool_factors(
    sizes: Sequence[int], arguments: dict[str, Any], results: int
) -> Sequence[tuple[Dim, Dim]]:
    if "kernel_size" not in arguments or results > 1:
        return [((), ())] * len(sizes)
    kernel = arguments["kernel_size"]
    stride = arguments.get("stride")
    stride = kernel if stride is None or stride == () or stride == [] else stride
    return window_factors(
        sizes, kernel, stride, arguments.get("padding", 0), arguments.get("dilation", 1)
    )


#: For each pool along windows the number of spatial dims, and the names of the parameters.
POOLS = {
    f"{name}_pool{n}d": (n, names)
    for n in (1, 2, 3)
    for name, names in (("max", _MAX), ("avg", _AVERAGE), ("lp", _POWER))
}
for _name, (_spatial, _names) in POOLS.items():
    _register_pool(_name, _spatial, _names, linear=_name.startswith("avg"))
for _n in (1, 2, 3):
    _register_pool(f"max_pool{_n}d_with_indices", _n, _MAX, results=2)
    _register_pool(f"adaptive_avg_pool{_n}d", _n, _ADAPTIVE, linear=True)
    _register_pool(f"adaptive_max_pool{_n}d", _n, _ADAPTIVE)
    _register_pool(f"adaptive_max_pool{_n}d_with_indices", _n, _ADAPTIVE, results=2)


def _register_max_unpool(function: Any, spatial: int, names: str) -> None:
    def answer(input: Any, indices: Any, *args: Any) -> RuleResult:
        lead = input.ndim - spatial
        if lead not in (1, 2) or indices.shape != input.shape:
            return None
        batch = factors_of(input.shape[:lead])
        dims = [*batch, *(None,) * spatial]
        arguments = dict(zip(names.split(), (input, indices, *args), strict=True))
        return guarded_call(function, arguments, {input: dims, indices: dims}, [dims])

    rule(function)(answer)


_register_max_unpool(_nn.max_unpool2d, 2, "input indices output_size")
_register_max_unpool(_nn.max_unpool3d, 3, "input indices output_size stride padding")


# -- resampling ------------------------------------------------------------------------------


@rule("interpolate")
def _interpolate(input: Any, *args: Any, **kwargs: Any) -> RuleResult:
    arguments = inspect.signature(F.interpolate).bind(input, *args, **kwargs).arguments
    if input.ndim < 3:
        return None
    dims = [*factors_of(input.shape[:2]), *(None,) * (input.ndim - 2)]
    return guarded_call(F.interpolate, arguments, {input: dims}, [dims], linear=[[input]])


@rule("grid_sample")
def _grid_sample(input: Any, grid: Any, *args: Any, **kwargs: Any) -> RuleResult:
    arguments = inspect.signature(F.grid_sample).bind(input, grid, *args, **kwargs).arguments
    return grid_sampled(F.grid_sample, input, grid, arguments)


def grid_sampled(
    function: Callable[..., Any], input: Arg, grid: Arg, arguments: Mapping[str, Any]
) -> RuleResult:
    """The call of an operator that samples ``input`` at the places in ``grid``."""
    if input.ndim not in (4, 5) or grid.ndim != input.ndim or grid.shape[0] != input.shape[0]:
        return None
    n, c, *places = factors_of((*input.shape[:2], *grid.shape[1:-1]))
    inputs: dict[Arg, Sequence[Any]] = {
        input: [n, c, *(None,) * (input.ndim - 2)],
        grid: [n, *places, None],
    }
    return guarded_call(function, arguments, inputs, [[n, c, *places]], linear=[[input]])


@rule("affine_grid")
def _affine_grid(theta: Any, size: Sequence[int], align_corners: bool | None = None) -> RuleResult:
    if theta.ndim != 3 or len(size) not in (4, 5) or size[0] != theta.shape[0]:
        return None
    n = Factor(theta.shape[0], "n")
    arguments = {"theta": theta, "size": size, "align_corners": align_corners}
    return guarded_call(
        F.affine_grid,
        arguments,
        {theta: [n, None, None]},
        [[n, *(None,) * (len(size) - 1)]],
        local=lambda ranges: {"size": [max(ranges.local_size((n,)), 1), *size[1:]]},
        linear=[[theta]],
    )
