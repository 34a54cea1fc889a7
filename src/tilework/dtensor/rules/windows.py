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
    Decomposition,
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


#: The windows along each dim, with the offset and the number of those that this rank has.
Spans = Sequence[tuple[WindowsOfDim, int, int]]


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
        adjust: Makes results from those of a padded part: takes the windows and the part, too.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    input: DTensorArg
    windows: Sequence[WindowsOfDim]
    known: LocalCall
    value: float = 0.0
    adjust: Callable[[Spans, Tensor, Any], Any] | None = None

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
            map=replace(mapped, inputs=inputs, outputs=(tuple(after),) * len(mapped.outputs)),
            run=partial(self._make, inputs),
            shapes=[(*lead, *(windows.out for windows in self.windows))] * len(mapped.outputs),
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
        cropped = partial(self._cropped, spans)
        run = self._guarded(cropped, inputs, shape, ranges)
        flat = [width for pair in reversed(widths) for width in pair]

        def on_box(*tensors: Tensor) -> Any:
            box = exchange(tensors[number], self.function.__name__)
            padded = F.pad(box, flat, value=self.value)
            return run(*tensors[:number], padded, *tensors[number + 1 :])

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

    def _cropped(self, spans: Spans, **arguments: Any) -> Any:
        """The range of each result that this rank has, from the padded input."""
        bias = arguments.pop("bias", None) if spans[0][0].transposed else None
        made = self.function(**arguments)
        if self.adjust is not None:
            made = self.adjust(spans, arguments["input"], made)
        results = [self._crop(spans, each) for each in (made if type(made) is tuple else (made,))]
        if type(made) is tuple:
            return tuple(results)
        return results[0] if bias is None else results[0] + bias.view(-1, *[1] * len(self.dims))

    def _crop(self, spans: Spans, out: Tensor) -> Tensor:
        for dim, (window, start, count) in zip(self.dims, spans, strict=True):
            first = start
            if window.transposed:
                first = window.needed(start, max(count, 1))[0] * window.stride - window.before
            left = first - start
            widths = max(left, 0), max(count - left - out.shape[dim], 0)
            if any(widths):
                out = F.pad(out, (0, 0) * (out.ndim - dim - 1) + widths)
            if out.shape[dim] != count:
                out = out.narrow(dim, max(-left, 0), count)
        return out


def _out_sizes(function: Callable[..., Any], arguments: Mapping[str, Any], count: int) -> Any:
    """The sizes of the last dims of the result; None if torch refuses the call."""
    on_meta = {
        name: torch.empty(arg.shape, dtype=arg.dtype, device="meta")
        if isinstance(arg, Arg)
        else arg
        for name, arg in arguments.items()
    }
    try:
        made = function(**on_meta)
    except (RuntimeError, ValueError, TypeError):
        return None
    return (made[0] if isinstance(made, tuple) else made).shape[-count:]


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
        if windows is None:
            return None
        whole, value = {**given, "ceil_mode": False, **padding}, 0.0
        adjust: Callable[..., Any] | None = None
        run = function
        if is_max:
            is_float = input.dtype.is_floating_point
            value = -math.inf if is_float else torch.iinfo(input.dtype).min
            steps = per_dim(given.get("dilation", 1), spatial) or ()
            with_indices = name.endswith("indices")
            if with_indices or any(window.before for window in windows):
                run = getattr(F, f"max_pool{spatial}d_with_indices")
                adjust = partial(_greatest, steps, with_indices)
        elif given.get("divisor_override") is None:
            adjust = partial(_mean_of_counted, given)
        return _Call(run, whole, input, windows, call, value, adjust).with_halos()


def _mean_of_counted(given: Mapping[str, Any], spans: Spans, _: Any, made: Tensor) -> Tensor:
    """Means of the elements that torch counts, from means of whole windows with zeros."""
    counts_padding, dtype = given.get("count_include_pad", True), made.dtype
    for dim, (window, start, count) in enumerate(spans, 1 - len(spans)):
        low = [at * window.stride - window.before for at in range(start, start + max(count, 1))]
        least, end = (low[0], window.size + window.before) if counts_padding else (0, window.size)
        counted = [max(min(at + window.reach, end) - max(at, least), 1) for at in low]
        if set(counted) != {window.reach}:
            kind = torch.float64 if dtype is torch.float64 else torch.float32
            scale = torch.tensor([window.reach / n for n in counted], dtype=kind)
            scale = scale.pow(1 / given.get("norm_type", 1)).to(made.device)
            made = made * scale.view(-1, *[1] * -dim)
    return made.to(dtype)


def _greatest(
    steps: Sequence[int],
    with_indices: bool,
    spans: Spans,
    part: Tensor,
    made: tuple[Tensor, Tensor],
) -> Any:
    """The greatest elements and, ``with_indices``, the indices; padding is never the greatest."""
    values, index = made
    sizes, places = part.shape[-len(spans) :], torch.zeros_like(index)
    whole = places
    coordinates = torch.unravel_index(index, sizes)
    for at, (window, start, count), step, size in zip(
        coordinates, spans, steps, sizes, strict=True
    ):
        low = window.needed(start, max(count, 1))[0]
        at = torch.where(at + low < 0, (at + low) % step, at + low)
        whole, places = whole * window.size + at, places * size + at - low
    flat = part.flatten(-len(spans)).gather(-1, places.flatten(-len(spans)))
    values = flat.view_as(values)
    return (values, whole) if with_indices else values


def _register_adaptive(name: str, spatial: int) -> None:
    pool: Callable[..., Any] = getattr(F, name)

    @dtensor_rule(f"adaptive_{name}")
    def answer(input: Any, output_size: Any, return_indices: bool = False) -> RuleResult:
        dims = range(input.ndim - spatial, input.ndim)
        asked = (output_size,) if not isinstance(output_size, Sequence) else output_size
        sizes = [input.shape[dim] for dim in dims]
        pairs = zip(sizes, tuple(asked) * (spatial // len(asked)), strict=True)
        outs = [size if out is None else out for size, out in pairs]
        even = all(out and size % out == 0 for size, out in zip(sizes, outs, strict=True))
        if dims[0] not in (1, 2) or not even or not any(map(input.is_sharded, dims)):
            return None
        if "avg" in name and set(outs) == {1}:
            return Decomposition(lambda x, *_, **__: x.mean(tuple(dims), keepdim=True))
        kernel = [size // out for size, out in zip(sizes, outs, strict=True)]
        if "avg" in name and input.dtype not in (torch.float32, torch.float64):
            return None  # not all plain pools take others
        return Decomposition(lambda x, *_, **__: pool(x, kernel))


for _name, (_spatial, _names) in CONVOLUTIONS.items():
    _register_convolution(getattr(torch, _name), _spatial, _names)
for _name, (_spatial, _names) in POOLS.items():
    _register_pool(_name, _spatial, _names)
    if not _name.startswith("lp"):
        _register_adaptive(_name, _spatial)
    if _name.startswith("max"):
        _register_pool(f"{_name}_with_indices", _spatial, _names)
        _register_adaptive(f"{_name}_with_indices", _spatial)
