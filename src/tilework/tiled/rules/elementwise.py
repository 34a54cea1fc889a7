"""Elementwise operators, with broadcasting: those that torch tags as pointwise, and more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tilework.tiled.factors import Dim, Factor, broadcast, broadcast_shape
from tilework.tiled.op_rules import Arg, Decomposition, RuleResult, composed, local_call
from tilework.tiled.op_table import register, rule
from tilework.tiled.rules.reduction_args import NARROW, keeps_sums


def pointwise_names() -> set[str]:
    """The names of operators with torch's tag ``pointwise``, without underscores at either end."""
    names = {"leaky_relu"}  # not tagged before torch 2.7
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        if space != "aten" or name.endswith("_backward"):
            continue
        tags = torch._C._get_operation_overload(f"aten::{name}", overload)[2]
        if torch.Tag.pointwise in tags:
            names.add(name.strip("_").removeprefix("special_"))
    return names


#: Elementwise operators without torch's tag, or with another name.
_UNTAGGED = """
    complex expit fake_quantize_per_tensor_affine fill float_power floor_divide gammainc gammaincc
    gammaln hardswish isclose isreal log_sigmoid logsigmoid multigammaln ndtr polar psi
    __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __rpow__ __rrshift__ __rtruediv__
"""
#: Linear in the only tensor.
_LINEAR = "deg2rad neg rad2deg zero"
#: Linear as well; the result is the tensor itself or a view, depending on the dtype.
_VIEWS = "conj conj_physical imag real resolve_conj resolve_neg"
#: Tagged operators with a separate rule, here or in another family.
_OTHERS = """
    add addcdiv addcmul clone conj_physical deg2rad div equal frexp lerp max maximum min minimum mul
    neg positive rad2deg rrelu rsub sub true_divide where
"""
_CASTS = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "byte": torch.uint8,
    "cdouble": torch.complex128,
    "cfloat": torch.complex64,
    "chalf": torch.complex32,
    "char": torch.int8,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
}


def tensors(*values: Any) -> list[Arg]:
    """The tensors among arguments, in order."""
    return [value for value in values if isinstance(value, Arg)]


def pointwise(
    args: Sequence[Arg],
    *,
    linear: Sequence[Sequence[Any]] = (),
    rearranges: bool = False,
    extremum: str | None = None,
    results: int = 1,
) -> RuleResult:
    """The call of an elementwise operator on all tensors; None if they do not broadcast."""
    shapes = [arg.shape for arg in args]
    try:
        broadcast_shape(shapes)
    except ValueError:  # torch raises for the full tensors
        return None
    factors, dims_of_each = broadcast(shapes)
    sets = [args_of_set for args_of_set in linear if all(map(_may_be_partial, args_of_set))]
    inputs = dict(zip(args, dims_of_each, strict=True))
    return local_call(
        inputs, [factors] * results, linear=sets, rearranges=rearranges, extremum=extremum
    )


def _may_be_partial(value: Any) -> bool:
    return isinstance(value, Arg) and value.dtype not in NARROW


_elementwise = partial(rule, values_matter=False, is_elementwise=True)


@_elementwise(*sorted((pointwise_names() | set(_UNTAGGED.split())) - set(_OTHERS.split())))
def elementwise(*args: Any, **kwargs: Any) -> RuleResult:
    """The sharding rule of an operator whose tensor arguments are broadcast together."""
    return pointwise(tensors(*args, *kwargs.values()))


@rule(*_LINEAR.split(), is_elementwise=True)
def _linear(input: Arg) -> RuleResult:
    return pointwise([input], linear=[[input]])


@rule("clone", is_elementwise=True)
@rule("cpu", "positive", is_elementwise=True, may_be_input=True)
def _same(input: Arg, *options: Any, **named: Any) -> RuleResult:
    return pointwise([input], rearranges=True)


@rule(*_VIEWS.split(), is_elementwise=True, may_be_input=True)
def _part_of_complex(input: Arg) -> RuleResult:
    return _linear(input) if input.dtype.is_complex else _same(input)


@rule("contiguous", is_elementwise=True, is_view=True, may_copy=True)
def _contiguous(input: Arg, memory_format: Any = None) -> RuleResult:
    return pointwise([input], rearranges=True)


@_elementwise("add", "sub", "rsub", "__rsub__")
def _sum(input: Any, other: Any, alpha: Any = 1) -> RuleResult:
    return pointwise(tensors(input, other), linear=[[input, other]])


@_elementwise("mul")
def _product(input: Any, other: Any) -> RuleResult:
    given = tensors(input, other)
    return pointwise(given, linear=[[arg] for arg in given])


@_elementwise("div")
def _quotient(input: Any, other: Any, rounding_mode: str | None = None) -> RuleResult:
    return pointwise(tensors(input, other), linear=[[input]] if rounding_mode is None else [])


@_elementwise("lerp")
def _lerp(input: Arg, end: Arg, weight: Any) -> RuleResult:
    return pointwise(tensors(input, end, weight), linear=[[input, end]])


def _register_sum_with(name: str, *numbers: int) -> None:
    """Register an input plus a function of tensors 1 and 2, linear in those of these numbers."""

    @_elementwise(name)
    def answer(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> RuleResult:
        given = input, tensor1, tensor2
        return pointwise(tensors(*given, value), linear=[[input, given[n]] for n in numbers])


_register_sum_with("addcmul", 1, 2)
_register_sum_with("addcdiv", 1)


@_elementwise("where")
def _where(*args: Any, **kwargs: Any) -> RuleResult:
    if len(args) + len(kwargs) == 1:
        return Decomposition(lambda condition: torch.nonzero(condition, as_tuple=True))
    given = tensors(*args, *kwargs.values())
    # The condition is bool; it comes first in the function and second in the method.
    values = [arg for arg in given if arg.dtype is not torch.bool]
    return pointwise(given, linear=[values] if len(values) == 2 else [])


_elementwise("maximum")(lambda input, other: pointwise(tensors(input, other), extremum="max"))
_elementwise("minimum")(lambda input, other: pointwise(tensors(input, other), extremum="min"))
_elementwise("frexp")(lambda input: pointwise([input], results=2))


@_elementwise("copy")
def _copy(self: Arg, src: Any, non_blocking: bool = False) -> RuleResult:
    if not isinstance(src, Arg):
        return pointwise([self])
    return pointwise([self, src], rearranges=keeps_sums(self.dtype, src.dtype))


# -- types and devices -----------------------------------------------------------------------


def _cast(input: Arg, dtype: torch.dtype) -> RuleResult:
    keeps = keeps_sums(dtype, input.dtype)
    if dtype.is_complex and not input.dtype.is_complex:  # complex numbers have no maximum
        return pointwise([input], linear=[[input]] if keeps else [])
    return pointwise([input], rearranges=keeps)


for _name, _dtype in _CASTS.items():

    @rule(_name, is_elementwise=True, may_be_input=True)
    def _as(input: Arg, memory_format: Any = None, *, dtype: torch.dtype = _dtype) -> RuleResult:
        return _cast(input, dtype)


@rule("to", is_elementwise=True, may_be_input=True)
def _to(input: Arg, *args: Any, **kwargs: Any) -> RuleResult:
    given = [*args, *kwargs.values()]
    if tensors(*given):
        return Decomposition(
            lambda x, other, *more, **named: x.to(other.device, other.dtype, *more, **named)
        )
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return Decomposition(_to_memory_format)
    return _cast(input, next((x for x in given if isinstance(x, torch.dtype)), input.dtype))


def _to_memory_format(
    input: torch.Tensor, *args: Any, memory_format: torch.memory_format, **kwargs: Any
) -> torch.Tensor:
    return input.to(*args, **kwargs).contiguous(memory_format=memory_format)


rule("type_as")(composed(lambda input, other: input.to(other.dtype)))


@rule("type", may_be_input=True)
def _type(input: Arg, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> RuleResult:
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
    its_name = torch.empty((), dtype=input.dtype).type()  # such as torch.FloatTensor
    same = dtype is input.dtype or name.rpartition(".")[2] == its_name.rpartition(".")[2]
    return pointwise([input], rearranges=same)


for _name in ("real", "imag", "conj"):
    register(_name, is_view=True)


@rule("view_as_real", is_view=True)
def _view_as_real(input: Arg) -> RuleResult:
    factors, (dims,) = broadcast([input.shape])
    return local_call({input: dims}, [[*factors, None]], linear=[[input]])


@rule("view_as_complex", is_view=True)
def _view_as_complex(input: Arg) -> RuleResult:
    factors, (dims,) = broadcast([input.shape[:-1]])
    return local_call({input: [*dims, None]}, [factors], linear=[[input]])


# -- activations that read several elements -----------------------------------------------


@rule("glu")
def _glu(input: Arg, dim: int = -1) -> RuleResult:
    factors, _ = broadcast([input.shape])
    dims: list[Factor | Dim | None] = [*factors]
    dims[dim] = None
    return local_call({input: dims}, [dims])


@rule("prelu")
def _prelu(input: Arg, weight: Arg) -> RuleResult:
    factors, (dims,) = broadcast([input.shape])
    shared = weight.ndim == 0 or weight.shape[0] == 1 or input.ndim < 2
    channels: list[Factor | None] = [None] * weight.ndim if shared else [factors[1]]
    return local_call({input: dims, weight: channels}, [factors])


@rule("rrelu", is_random=True)
def _rrelu(
    input: Arg, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> RuleResult:
    return Decomposition(_random_slopes) if training else pointwise([input])


def _random_slopes(
    input: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = True
) -> torch.Tensor:
    with torch.no_grad():
        slopes = torch.empty_like(input).uniform_(lower, upper)
    return torch.where(input > 0, input, input * slopes)


@rule("fake_quantize_per_channel_affine")
def _fake_quantize(
    input: Arg, scale: Arg, zero_point: Arg, axis: int, quant_min: int, quant_max: int
) -> RuleResult:
    factors, (dims,) = broadcast([input.shape])
    channel = [factors[axis]]
    return local_call({input: dims, scale: channel, zero_point: channel}, [factors])
