"""Convolutions and pools along sharded dims: each rank gets the elements that its windows need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilework.dtensor.propagation.op_sharding import DTensorArg
from tilework.dtensor.propagation.strategy import Strategy
from tilework.dtensor.redistribution.box_exchange import BoxExchange
from tilework.dtensor.spec import DTensorSpec
from tilework.tiled import (
    Arg,
    Dim,
    DimFactors,
    Factor,
    LocalCall,
    LocalRanges,
    RuleResult,
    dtensor_rule,
    find,
)
from tilework.tiled.rules import CONVOLUTIONS, POOLS, guard_empty_shards, per_dim


@dataclass(frozen=True)
class WindowsOfDim:
    """The windows along one dim.

    Args:
        size: The size of the dim.
        out: The size of the result's dim.
        reach: The distance from the first element of a window to the end of the last one.
        stride: The distance between windows.
        before: The width of the padding before the dim.
        transposed: Whether windows lie in the result, as of a transposed convolution.
    """

    size: int
    out: int
    reach: int
    stride: int
    before: int
    transposed: bool

    def needed(self, start: int, count: int) -> tuple[int, int]:
        """Begin and end of what a range of the result needs; padding lies outside the dim."""
        if not self.transposed:
            low = start * self.stride - self.before
            return low, low + (count - 1) * self.stride + self.reach
        low = -((self.reach - 1 - start - self.before) // self.stride)
        return low, max(low, (start + count - 1 + self.before) // self.stride) + 1

    def clipped(self, start: int, count: int) -> tuple[int, int]:
        """Offset and size of the elements of the dim among these; none for an empty range."""
        low, high = (min(max(end, 0), self.size) for end in self.needed(start, count))
        return (low, high - low) if count and low < high else (low, 0)

    def padding(self, start: int, count: int) -> tuple[int, int]:
        """The widths beside the elements, with which a window or more is there."""
        low, high = self.needed(start, max(count, 1))
        first, size = self.clipped(start, count)
        return (first - low, high - first - size) if size else (high - low, 0)


@dataclass(frozen=True)
class _Call:
    """A call of an operator that looks at windows.

    Args:
        function: The operator, which takes the arguments by name.
        arguments: The arguments, without padding.
        input: The first tensor.
        windows: The windows of each of the input's last dims.
        known: The call on shards of which no window needs elements of others.
        value: The padding's value.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    input: DTensorArg
    windows: Sequence[WindowsOfDim]
    known: LocalCall
    value: float = 0.0

    @property
    def dims(self) -> range:
        """The dims with windows."""
        return range(self.input.ndim - len(self.windows), self.input.ndim)

    def with_halos(self) -> RuleResult:
        """The call on shards with halos; None if no sharded dim needs any."""
        number, mapped = self.input.number, self.known.map
        before, after = list(mapped.inputs[number]), list(mapped.outputs[0])
        if not any(self.input.is_sharded(dim) and not before[dim] for dim in self.dims):
            return None
        for dim in self.dims:
            before[dim] = after[dim] = (Factor(self.input.shape[dim], "space"),)
        inputs = (*mapped.inputs[:number], tuple(before), *mapped.inputs[number + 1 :])
        lead = [math.prod(factor.size for factor in dim) for dim in after[: self.dims[0]]]
        return replace(
            self.known,
            map=replace(mapped, inputs=inputs, outputs=(tuple(after),)),
            run=partial(self._make, inputs),
            shapes=[(*lead, *(windows.out for windows in self.windows))],
        )

    def _make(self, inputs: tuple[DimFactors, ...], ranges: Any) -> Callable[..., Tensor] | None:
        assert isinstance(ranges, Strategy)
        number = self.input.number
        for dim in self.dims:  # raises if blocks are dealt in turns
            ranges.local_range(inputs[number][dim][0])
        sharded = [dim for dim in self.dims if ranges.axes(inputs[number][dim][0])]
        if not sharded:  # other ways are cheaper
            return None if self.known.run is None else self.known.run(ranges)
        out = ranges.outputs[0]
        spans = [
            (windows, *out.local_range(dim))
            for dim, windows in zip(self.dims, self.windows, strict=True)
        ]
        widths = [windows.padding(start, count) for windows, start, count in spans]
        exchange = BoxExchange(
            ranges.inputs[number], {dim: partial(self._needs, out, dim) for dim in sharded}
        )
        padded = dict(zip(self.dims, map(sum, widths), strict=True))
        shape = [size + padded.get(dim, 0) for dim, size in enumerate(exchange.box_sizes)]
        cropped = partial(_cropped, self.function, spans, self.dims)
        run = self._guarded(cropped, inputs, shape, ranges)
        flat = [width for pair in reversed(widths) for width in pair]

        def on_box(*tensors: Tensor) -> Tensor:
            box = exchange(tensors[number], self.function.__name__)
            local = [*tensors[:number], F.pad(box, flat, value=self.value), *tensors[number + 1 :]]
            result: Tensor = run(*local)
            return result

        return on_box

    def _needs(self, out: DTensorSpec, dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
        return self.windows[dim - self.dims[0]].clipped(*out.range_at(dim, coordinate))

    def _guarded(
        self,
        function: Callable[..., Any],
        inputs: Sequence[DimFactors],
        shape: Sequence[int],
        ranges: LocalRanges,
    ) -> Callable[..., Any]:
        """The function on boxes of this shape, which may have no rows or channels."""
        loops: dict[Arg, list[Dim]] = {
            arg: list(inputs[arg.number]) for arg in self.arguments.values() if isinstance(arg, Arg)
        }
        for dim in self.dims:
            loops[self.input][dim] = (Factor(shape[dim]),)

        def here(ranges: LocalRanges) -> Mapping[str, Any]:
            if "groups" not in self.arguments:
                return {}
            channels = inputs[self.input.number][self.dims[0] - 1]
            return {"groups": max(ranges.local_size(channels[:1]), 1)}

        run = guard_empty_shards(function, self.arguments, loops, here)(ranges)
        assert run is not None
        return run


def _cropped(
    function: Callable[..., Tensor],
    spans: Sequence[tuple[WindowsOfDim, int, int]],
    dims: Sequence[int],
    **arguments: Any,
) -> Tensor:
    """The range of the result that this rank has, from the padded input."""
    transposed = spans[0][0].transposed
    bias = arguments.pop("bias", None) if transposed else None
    out = function(**arguments)
    for dim, (window, start, count) in zip(dims, spans, strict=True):
        first = start
        if transposed:
            first = window.needed(start, max(count, 1))[0] * window.stride - window.before
        left = first - start
        widths = max(left, 0), max(count - left - out.shape[dim], 0)
        if any(widths):
            out = F.pad(out, (0, 0) * (out.ndim - dim - 1) + widths)
        if out.shape[dim] != count:
            out = out.narrow(dim, max(-left, 0), count)
    return out if bias is None else out + bias.view(-1, *[1] * len(dims))


def _out_sizes(function: Callable[..., Any], arguments: Mapping[str, Any], count: int) -> Any:
    """The sizes of the last dims of the result; None if torch refuses the call."""
    on_meta = {
        name: torch.empty(arg.shape, dtype=arg.dtype, device="meta")
        if isinstance(arg, Arg)
        else arg
        for name, arg in arguments.items()
    }
    try:
        return function(**on_meta).shape[-count:]
    except (RuntimeError, ValueError, TypeError):
        return None


# -- rules -----------------------------------------------------------------------------------


def _register_convolution(function: Any, spatial: int, names: str) -> None:
    defaults = {name: int(name not in ("padding", "output_padding")) for name in names.split()}
    known = find(function)[0].rule
    assert known is not None

    @dtensor_rule(function)
    def answer(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> RuleResult:
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        arguments = {"input": input, "weight": weight, "bias": bias, **given}
        call = known(input, weight, bias, *args, **kwargs)
        windows = _windows_of(function, arguments, weight.shape[2:])
        if windows is None or not isinstance(call, LocalCall):
            return None
        whole = {name: 0 if "padding" in name else arg for name, arg in arguments.items()}
        return _Call(function, whole, input, windows, call).with_halos()


def _windows_of(
    function: Any, arguments: Mapping[str, Any], kernel: Sequence[int]
) -> list[WindowsOfDim] | None:
    """The windows of each of the input's last dims; None if torch refuses the call."""
    input, padding, count = arguments["input"], arguments.get("padding", 0), len(kernel)
    wide = per_dim(arguments.get("dilation", 1), count)
    strides = per_dim(arguments.get("stride", 1), count)
    outs = _out_sizes(function, arguments, count)
    if wide is None or strides is None or outs is None:
        return None
    reaches = [d * (k - 1) + 1 for d, k in zip(wide, kernel, strict=True)]
    before: Any = {"valid": 0, "same": [(reach - 1) // 2 for reach in reaches]}.get(
        padding if isinstance(padding, str) else "", padding
    )
    sizes = input.shape[input.ndim - count :]
    widths = per_dim(before, count) or ()
    described = zip(sizes, outs, reaches, strides, widths, strict=True)
    return [WindowsOfDim(*each, "output_padding" in arguments) for each in described]


def _register_pool(name: str, spatial: int, names: str) -> None:
    function, known = getattr(F, name), find(getattr(F, name))[0].rule
    padding = {"padding": 0} if "padding" in names.split() else {}
    is_max = name.startswith("max")
    assert known is not None

    @dtensor_rule(name)
    def answer(input: Any, *args: Any, **kwargs: Any) -> RuleResult:
        given = {**dict(zip(names.split(), (input, *args), strict=False)), **kwargs}
        given.pop("return_indices", None)
        kernel = per_dim(given.get("kernel_size"), spatial)
        call = known(input, *args, **kwargs)
        if kernel is None or not isinstance(call, LocalCall):
            return None
        given["stride"] = given.get("stride") or kernel
        windows = _windows_of(function, given, kernel)
        if windows is None or not (is_max or _counts_all(given, windows)):
            return None
        worst = -math.inf if input.dtype.is_floating_point else torch.iinfo(input.dtype).min
        whole = {**given, "ceil_mode": False, **padding}
        value = worst if is_max else 0.0
        return _Call(function, whole, input, windows, call, value).with_halos()


def _counts_all(arguments: Mapping[str, Any], windows: Sequence[WindowsOfDim]) -> bool:
    """True if no window counts fewer elements because it reaches over an end."""
    padded = any(each.before for each in windows)
    inside = all(each.needed(0, each.out)[1] <= each.size + each.before for each in windows)
    return inside and (not padded or arguments.get("count_include_pad", True))


for _name, (_spatial, _names) in CONVOLUTIONS.items():
    _register_convolution(getattr(torch, _name), _spatial, _names)
for _name, (_spatial, _names) in POOLS.items():
    _register_pool(_name, _spatial, _names)
