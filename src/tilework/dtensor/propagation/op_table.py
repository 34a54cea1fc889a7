"""The one table from operators to rules, and what a rule says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from tilework.dtensor.propagation.strategy import Strategy
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.tiled.factors import Dim, DimFactors, Factor, FactorMap, Pattern, term


@dataclass(eq=False, slots=True)
class Arg:
    """A tensor among the arguments of a call, for its rule. A plain one counts as replicated."""

    number: int
    """Its place among the tensors of the call."""
    spec: DTensorSpec
    dtype: torch.dtype

    @property
    def shape(self) -> Ints:
        """Its global shape."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """The number of its dims."""
        return len(self.spec.shape)

    def is_cut(self, dim: int) -> bool:
        """Whether ranks have different parts of a dim."""
        return any(self.spec.mesh.shape[axis] > 1 for axis in self.spec.axes_of(dim % self.ndim))


#: Makes what runs an operator on this rank's tensors, from how it is to be run; None: itself.
MakeRun = Callable[[Strategy], Callable[..., Any] | None]


@dataclass(frozen=True, eq=False)
class Native:
    """A call runs on this rank's parts.

    Args:
        map: What it does to dims.
        run: None: the operator is called with the same arguments, local tensors in place of
            DTensors. Else what this makes is called with the local tensors, in their order.
        shapes: The outputs' shapes; None: as the operator gives them for tensors of these shapes.
    """

    map: FactorMap
    run: MakeRun | None = None
    shapes: Sequence[Ints] | None = None


@dataclass(frozen=True, eq=False)
class Placed:
    """A call runs on this rank's parts, where the rule itself knows how results then lie.

    Args:
        inputs: How each tensor has to lie.
        outputs: How each tensor of the result then lies.
        run: Called with the local tensors, in their order.
    """

    inputs: Sequence[DTensorSpec]
    outputs: Sequence[DTensorSpec]
    run: Callable[..., Any]


@dataclass(frozen=True)
class Composed:
    """A call is computed by other operators on DTensors.

    Args:
        run: Called with the call's own arguments.
    """

    run: Callable[..., Any]


#: What a rule may answer; None: this call has to be computed on gathered tensors.
Answer = Native | Placed | Composed | None
#: Called with the arguments of an operator, each tensor as an :class:`Arg`.
RuleFunction = Callable[..., Answer]
RuleT = TypeVar("RuleT", bound=RuleFunction)


@dataclass(frozen=True)
class Rule:
    """What is known of an operator.

    Args:
        answer: What a call of it does.
        values_matter: Whether numbers among the arguments may change the answer; else only their
            kinds do, and calls with other numbers need no new one.
    """

    answer: RuleFunction
    values_matter: bool = True


#: By canonical name (see ``dispatch/op_names.py``), or by function for a user's own.
RULES: dict[Any, Rule] = {}


def native(
    inputs: Mapping[Arg, Sequence[Factor | Dim | None]],
    outputs: Sequence[Sequence[Factor | Dim | None]],
    *,
    linear: Sequence[Sequence[Arg | None]] = (),
    moves: bool = False,
    added: Sequence[Arg | None] = (),
    run: MakeRun | None = None,
    shapes: Sequence[Ints] | None = None,
) -> Native:
    """A native answer.

    Args:
        inputs: What the dims of *each* tensor argument run over.
        outputs: Likewise for each tensor of the result.
        linear: Sets of arguments in which the operator is linear, all of a set together.
        moves: Whether it only moves, repeats or drops elements.
        added: Arguments that are added to what is summed over factors that no output has.
        run: As for :class:`Native`.
        shapes: As for :class:`Native`.
    """
    by_number = {arg.number: term(dims) for arg, dims in inputs.items()}
    # A tensor where the rule takes a number has no term: the call is gathered (see dispatch).
    terms: list[DimFactors] = [
        by_number.get(number, ()) for number in range(max(by_number, default=-1) + 1)
    ]
    sets = tuple(frozenset(arg.number for arg in one if arg is not None) for one in linear)
    plus = frozenset(arg.number for arg in added if arg is not None)
    mapped = FactorMap(tuple(terms), tuple(map(term, outputs)), sets, moves, plus)
    return Native(mapped, run, shapes)


def rule(*names: str | Callable[..., Any], values_matter: bool = True) -> Callable[[RuleT], RuleT]:
    """Register the decorated function as the rule of operators.

    ``names`` are those of the operators, or single functions, where several have one name.
    """

    def put(function: RuleT) -> RuleT:
        for name in names:
            if name in RULES:
                raise ValueError(f"{name!r} has a rule already")
            RULES[name] = Rule(function, values_matter)
        return function

    return put


def line(
    names: str,
    text: str,
    *,
    linear: str = "",
    added: str = "",
    reduce_ops: Mapping[str, str | None] | None = None,
    values_matter: bool = False,
) -> None:
    """Register a rule that is one line.

    Args:
        names: ``"linear(input, weight, bias=None)"``, or several such without arguments in
            common, separated by spaces, if they are called alike: ``"mm matmul(input, mat2)"``.
        text: The line; see :class:`~tilework.dtensor.factors.Pattern`.
        linear: Sets of arguments in which it is linear: ``"input bias, weight bias"``.
        added: Arguments that are added to what is summed over factors that no output has.
        reduce_ops: How factors are reduced that are not summed.
        values_matter: As for :class:`Rule`.
    """
    head, _, parameters = names.partition("(")
    scope: dict[str, Any] = {}
    exec(f"def signature({parameters}: pass", scope)
    signature = inspect.signature(scope["signature"])
    pattern = Pattern.parse(text, reduce_ops)
    tensors = list(signature.parameters)[: len(pattern.inputs)]
    sets = [one.split() for one in linear.split(",") if one.strip()]

    def answer(*args: Any, **kwargs: Any) -> Answer:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None
        return patterned(
            pattern,
            [given.get(name) for name in tensors],
            linear=[[given.get(name) for name in one] for one in sets],
            added=[given.get(name) for name in added.split()],
        )

    for name in head.split():
        rule(name, values_matter=values_matter)(answer)


def patterned(
    pattern: Pattern | str,
    tensors: Sequence[Any],
    *,
    linear: Sequence[Sequence[Arg | None]] = (),
    added: Sequence[Arg | None] = (),
    run: MakeRun | None = None,
) -> Answer:
    """What a pattern says of a call; None if it is not for such arguments.

    Args:
        pattern: The line.
        tensors: The call's tensor arguments in the line's order; None for one that is not given.
        linear: As for :func:`native`.
        added: As for :func:`native`.
        run: As for :class:`Native`.
    """
    if isinstance(pattern, str):
        pattern = _parsed(pattern)
    if any(one is not None and not isinstance(one, Arg) for one in tensors):
        return None
    try:
        mapped = pattern.of([None if one is None else one.shape for one in tensors])
    except ValueError:
        return None
    given = [one for one in tensors if one is not None]
    if sorted(one.number for one in given) != list(range(len(given))):
        return None
    return native(
        dict(zip(given, mapped.inputs, strict=True)),
        mapped.outputs,
        linear=linear,
        added=added,
        run=run,
    )


_parsed = cache(Pattern.parse)


def register_rule(
    operator: Callable[..., Any],
    text: str,
    *,
    linear: Sequence[Sequence[int]] = (),
    added: Sequence[int] = (),
    reduce_ops: Mapping[str, str | None] | None = None,
) -> None:
    """Teach DTensor an operator of your own, in a line.

    ``operator`` is what is called: ``torch.ops.mylib.op``, or a Python function that asks
    ``torch.overrides.has_torch_function``. It is run on this rank's parts of the tensors, as the
    line says; gradients follow from the same line. A rule for one of torch's own functions takes
    the place of what is there.

    Args:
        operator: The operator.
        text: What the dims of each tensor argument and result run over: ``"b* i, o i -> b* o"``.
            ``b*`` stands for any number of dims, ``i!`` for a dim that each rank needs whole, a
            term that ends in ``?`` for an argument that may be None. Dims with one name are cut
            together; what no result has is summed over.
        linear: Sets of arguments (by place) in which the operator is linear, so that sums that are
            still spread over ranks may pass through it.
        added: Arguments (by place) that are added to what is summed over names that no result has:
            where such a dim is cut, one rank adds them.
        reduce_ops: For names that no result has: ``"sum"``, ``"max"``, ``"min"``, ``"product"``, or
            None if such a dim must not be cut.

    Raises:
        ValueError: The text is no such line.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh, register_rule
        >>> from tilework.testing import run_ranks
        >>> @torch.library.custom_op("docs::scaled_rows", mutates_args=())
        ... def scaled_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ...     return x * scale[:, None]
        >>> register_rule(torch.ops.docs.scaled_rows, "row column, row -> row column")
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        ...     scale = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        ...     return torch.ops.docs.scaled_rows(x, scale).placements
        >>> run_ranks(2, program)[0]
        (Shard(dim=0),)
    """
    from tilework.dtensor.dispatch.op_names import forget

    pattern = Pattern.parse(text, reduce_ops)

    def answer(*args: Any, **kwargs: Any) -> Answer:
        tensors = [*args[: len(pattern.inputs)]]
        tensors += [None] * (len(pattern.inputs) - len(tensors))
        sets = [[tensors[i] for i in one] for one in linear]
        return patterned(pattern, tensors, linear=sets, added=[tensors[i] for i in added])

    RULES[operator] = Rule(answer)
    forget(operator)
