"""Rules that are one line of text: ``b* i, o i, o? -> b* o``."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature
from typing import Any

from tilework.tiled.factors import Pattern
from tilework.tiled.op_rules import Arg, MakeRun, RuleResult, local_call
from tilework.tiled.op_table import rule

_parse_pattern = cache(Pattern.parse)


def pattern_rule(
    names: str,
    text: str,
    *,
    linear: str = "",
    addends: str = "",
    reduce_ops: Mapping[str, str | None] | None = None,
    values_matter: bool = False,
) -> None:
    """Register a rule that is one line.

    Args:
        names: ``"linear(input, weight, bias=None)"``, or several operators with the same
            arguments, separated by spaces: ``"mm _int_mm(input, mat2)"``.
        text: The line; see :class:`~tilework.tiled.factors.Pattern`.
        linear: Sets of arguments in which the operator is linear: ``"input bias, weight bias"``.
        addends: Arguments that are added to a sum over factors that no output has.
        reduce_ops: The reductions of factors that are not summed.
        values_matter: As for :class:`~tilework.tiled.op_table.OpEntry`.
    """
    head, _, parameters = names.partition("(")
    signature = _signature(parameters.removesuffix(")"))
    pattern = Pattern.parse(text, reduce_ops)
    tensors = list(signature.parameters)[: len(pattern.inputs)]
    sets = [names.split() for names in linear.split(",") if names.strip()]

    def pattern_result(*args: Any, **kwargs: Any) -> RuleResult:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None
        return match_pattern(
            pattern,
            [values.get(name) for name in tensors],
            linear=[[values.get(name) for name in names] for names in sets],
            addends=[values.get(name) for name in addends.split()],
        )

    rule(*head.split(), values_matter=values_matter)(pattern_result)


def _signature(text: str) -> Signature:
    """The signature that is written ``input, weight, bias=None``."""
    parameters = []
    for word in text.split(","):
        name, has_default, default = word.partition("=")
        parameters.append(
            Parameter(
                name.strip(),
                Parameter.POSITIONAL_OR_KEYWORD,
                default=ast.literal_eval(default.strip()) if has_default else Parameter.empty,
            )
        )
    return Signature(parameters)


def match_pattern(
    pattern: Pattern | str,
    tensors: Sequence[Any],
    *,
    linear: Sequence[Sequence[Arg | None]] = (),
    addends: Sequence[Arg | None] = (),
    run: MakeRun | None = None,
) -> RuleResult:
    """The local call that a line describes; None if the arguments do not fit.

    ``tensors`` are the call's tensor arguments in the line's order; None for a missing argument.
    Others are as for :func:`~tilework.tiled.op_rules.local_call`.
    """
    if isinstance(pattern, str):
        pattern = _parse_pattern(pattern)
    args = [arg for arg in tensors if arg is not None]
    if not all(isinstance(arg, Arg) for arg in args):
        return None
    try:
        factor_map = pattern.of([None if arg is None else arg.shape for arg in tensors])
    except ValueError:
        return None
    if sorted(arg.number for arg in args) != list(range(len(args))):
        return None
    inputs = dict(zip(args, factor_map.inputs, strict=True))
    return local_call(inputs, factor_map.outputs, linear=linear, addends=addends, run=run)
