"""The one table from operators to rules, and what a rule says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tilework.dtensor.choice import Choice
from tilework.dtensor.factors import Dim, Factor, FactorMap, Pattern, Term, term
from tilework.dtensor.spec import DTensorSpec, Ints


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


#: Makes what runs an operator on this rank's tensors, from how it is to be run.
MakeRun = Callable[[Choice], Callable[..., Any]]


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


@dataclass(frozen=True)
class Composed:
    """A call is computed by other operators on DTensors.

    Args:
        run: Called with the call's own arguments.
    """

    run: Callable[..., Any]


#: What a rule may answer; None: this call has to be computed on gathered tensors.
Answer = Native | Composed | None
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


#: By canonical name (see :mod:`tilework.dtensor.names`), or by function for a user's own.
RULES: dict[Any, Rule] = {}


def native(
    inputs: Mapping[Arg, Sequence[Factor | Dim | None]],
    outputs: Sequence[Sequence[Factor | Dim | None]],
    *,
    linear: Sequence[Sequence[Arg | None]] = (),
    moves: bool = False,
    run: MakeRun | None = None,
    shapes: Sequence[Ints] | None = None,
) -> Native:
    """A native answer.

    Args:
        inputs: What the dims of *each* tensor argument run over.
        outputs: Likewise for each tensor of the result.
        linear: Sets of arguments in which the operator is linear, all of a set together.
        moves: Whether it only moves, repeats or drops elements.
        run: As for :class:`Native`.
        shapes: As for :class:`Native`.
    """
    terms: list[Term] = [()] * len(inputs)
    for arg, dims in inputs.items():
        terms[arg.number] = term(dims)
    sets = tuple(frozenset(arg.number for arg in one if arg is not None) for one in linear)
    mapped = FactorMap(tuple(terms), tuple(map(term, outputs)), sets, moves)
    return Native(mapped, run, shapes)


def rule(*names: str, values_matter: bool = True) -> Callable[[RuleT], RuleT]:
    """Register the decorated function as the rule of the operators of these names."""

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
    reduce_ops: Mapping[str, str | None] | None = None,
    values_matter: bool = False,
) -> None:
    """Register a rule that is one line.

    Args:
        names: ``"linear(input, weight, bias=None)"``, or several such without arguments in
            common, separated by spaces, if they are called alike: ``"mm matmul(input, mat2)"``.
        text: The line; see :class:`~tilework.dtensor.factors.Pattern`.
        linear: Sets of arguments in which it is linear: ``"input bias, weight bias"``.
        reduce_ops: How factors are reduced that are not summed.
        values_matter: As for :class:`Rule`.
    """
    head, _, parameters = names.partition("(")
    scope: dict[str, Any] = {}
    exec(f"def signature({parameters}: pass", scope)
    signature = inspect.signature(scope["signature"])
    pattern = Pattern.parse(text, reduce_ops)
    sets = [one.split() for one in linear.split(",") if one.strip()]

    def answer(*args: Any, **kwargs: Any) -> Answer:
        bound = signature.bind(*args, **kwargs)
        return _patterned(pattern, bound.arguments, list(signature.parameters), sets)

    for name in head.split():
        rule(name, values_matter=values_matter)(answer)


def _patterned(
    pattern: Pattern, given: Mapping[str, Any], names: Sequence[str], sets: list[list[str]]
) -> Answer:
    """The factor map of a call whose first arguments are the tensors of a pattern."""
    tensors = names[: len(pattern.inputs)]
    values = [given.get(name) for name in tensors]
    if any(value is not None and not isinstance(value, Arg) for value in values):
        return None
    numbers = [[tensors.index(name) for name in one] for one in sets]
    try:
        mapped = pattern.of([None if v is None else v.shape for v in values], numbers)
    except ValueError:
        return None
    order = [value.number for value in values if value is not None]
    if sorted(order) != list(range(len(order))):
        return None
    terms = [mapped.inputs[order.index(number)] for number in range(len(order))]
    linear = tuple(frozenset(order[i] for i in one) for one in mapped.linear)
    return Native(FactorMap(tuple(terms), mapped.outputs, linear))


def register_rule(
    operator: Callable[..., Any],
    text: str,
    *,
    linear: Sequence[Sequence[int]] = (),
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
    from tilework.dtensor.names import forget

    pattern = Pattern.parse(text, reduce_ops)
    names = [str(i) for i in range(len(pattern.inputs))]
    sets = [[str(i) for i in one] for one in linear]

    def answer(*args: Any, **kwargs: Any) -> Answer:
        given = dict(zip(names, args, strict=False))
        return _patterned(pattern, given, names, sets)

    RULES[operator] = Rule(answer)
    forget(operator)
