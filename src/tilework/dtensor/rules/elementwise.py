"""Operators that treat each element on its own, with broadcasting."""

from __future__ import annotations

from typing import Any

from tilework.dtensor.factors import broadcast
from tilework.dtensor.registry import Answer, Arg, native, rule


def tensors(*values: Any) -> list[Arg]:
    """The tensors among arguments, in order."""
    return [value for value in values if isinstance(value, Arg)]


def elementwise(*args: Any, **kwargs: Any) -> Answer:
    """Any operator that only broadcasts."""
    given = tensors(*args, *kwargs.values())
    factors, terms = broadcast([arg.shape for arg in given])
    return native(dict(zip(given, terms, strict=True)), [factors])


rule("relu", "gelu", "exp", "tanh", "sigmoid", "sin", "cos", "sqrt", values_matter=False)(
    elementwise
)


@rule("add", "sub", values_matter=False)
def _sum(input: Any, other: Any, *, alpha: Any = 1) -> Answer:
    given = tensors(input, other)
    factors, terms = broadcast([arg.shape for arg in given])
    linear = [given] if len(given) == 2 else []
    return native(dict(zip(given, terms, strict=True)), [factors], linear=linear)


@rule("mul", values_matter=False)
def _product(input: Any, other: Any) -> Answer:
    given = tensors(input, other)
    factors, terms = broadcast([arg.shape for arg in given])
    return native(dict(zip(given, terms, strict=True)), [factors], linear=[[arg] for arg in given])
