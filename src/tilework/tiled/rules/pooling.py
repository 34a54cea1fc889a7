"""Pooling and resampling: sharded along batch, channels, and windows that do not overlap."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilework.tiled.factors import Dim, Factor, factors_of
from tilework.tiled.op_rules import Arg, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.rules.convolution import guard_empty_shards, window_factors

_functional: Any = F
_nn: Any = torch._C._nn
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
        dims = _spatial_factors(input.shape[lead:], arguments, results)
        out: list[Factor | Dim] = [*batch, *(after for _, after in dims)]
        inputs: dict[Arg, Sequence[Any]] = {input: [*batch, *(before for before, _ in dims)]}
        return local_call(
            inputs,
            [out] * results,
            linear=[[input]] if linear else [],
            run=guard_empty_shards(function, arguments, inputs),
        )

    rule(name)(answer)


def _spatial_factors(
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
        inputs = {input: dims, indices: dims}
        return local_call(inputs, [dims], run=guard_empty_shards(function, arguments, inputs))

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
    inputs = {input: dims}
    run = guard_empty_shards(F.interpolate, arguments, inputs)
    return local_call(inputs, [dims], linear=[[input]], run=run)


@rule("grid_sample")
def _grid_sample(input: Any, grid: Any, *args: Any, **kwargs: Any) -> RuleResult:
    arguments = inspect.signature(F.grid_sample).bind(input, grid, *args, **kwargs).arguments
    if input.ndim not in (4, 5) or grid.ndim != input.ndim or grid.shape[0] != input.shape[0]:
        return None
    n, c, *places = factors_of((*input.shape[:2], *grid.shape[1:-1]))
    inputs = {input: [n, c, *(None,) * (input.ndim - 2)], grid: [n, *places, None]}
    return local_call(
        inputs,
        [[n, c, *places]],
        linear=[[input]],
        run=guard_empty_shards(F.grid_sample, arguments, inputs),
    )


@rule("affine_grid")
def _affine_grid(theta: Any, size: Sequence[int], align_corners: bool | None = None) -> RuleResult:
    if theta.ndim != 3 or len(size) not in (4, 5) or size[0] != theta.shape[0]:
        return None
    n = Factor(theta.shape[0], "n")
    arguments = {"theta": theta, "size": size, "align_corners": align_corners}
    inputs = {theta: [n, None, None]}
    run = guard_empty_shards(
        F.affine_grid,
        arguments,
        inputs,
        local=lambda ranges: {"size": [max(ranges.local_size((n,)), 1), *size[1:]]},
    )
    return local_call(inputs, [[n, *(None,) * (len(size) - 1)]], linear=[[theta]], run=run)
