"""Sharding rules of operators: the arguments and the results of a rule.

A rule is called with the arguments of an operator, each tensor as an :class:`Arg`. The result says
how the call runs on shards: by a factor map (:class:`LocalCall`), or by other operators
(:class:`Decomposition`). Nothing here depends on the kind of sharded tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Protocol

import torch

from tilework.layout.internal import Ints
from tilework.tiled.factors import Dim, DimFactors, Factor, FactorMap, Pattern, dim_factors, volume


@dataclass(eq=False, slots=True)
class Arg:
    """A tensor argument of a call, as a rule gets it: the global shape, and the sharded dims."""

    number: int
    shape: Ints
    dtype: torch.dtype
    sharded_dims: frozenset[int]

    @property
    def layout(self) -> object:
        """The layout before the call. If it is in :attr:`LocalRanges.inputs`, nothing is moved."""
        return None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def is_sharded(self, dim: int) -> bool:
        return dim % self.ndim in self.sharded_dims


class Shaped(Protocol):
    """The layout of a tensor, as far as rules read it."""

    @property
    def shape(self) -> Ints:
        """The global shape."""

    @property
    def local_shape(self) -> Ints:
        """The shape of the local shard."""


class LocalRanges(Protocol):
    """The ranges of an operator's factors that run locally: on this rank, or for one tile."""

    @property
    def inputs(self) -> Sequence[Shaped]:
        """The layout of each input."""

    @property
    def outputs(self) -> Sequence[Shaped]:
        """The layout of each output."""

    @property
    def has_empty_shards(self) -> bool:
        """True if some rank's shard of an input has no elements: the same on all ranks."""

    def local_range(self, factor: Factor) -> tuple[int, int]:
        """The offset and the size of the local range of a factor; may raise SeveralRangesError."""

    def local_size(self, dim: Dim) -> int:
        """The number of local elements of a dim."""

    def is_sharded(self, factor: Factor) -> bool:
        """True if ranks run different ranges of a factor."""


#: Makes the function to run on local tensors; None: the operator itself runs.
MakeRun = Callable[[LocalRanges], Callable[..., Any] | None]


class OpCall:
    """The way in which a call of an operator runs on sharded tensors."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class LocalCall(OpCall):
    """A call that runs on local shards, in any layout that a factor map allows.

    Args:
        run: None: the operator is called with the same arguments, but local tensors instead of
            sharded ones. Else makes a function that is called with the local tensors, in order.
        shapes: The outputs' shapes; None: as the operator gives them for inputs of these shapes.
    """

    map: FactorMap
    run: MakeRun | None = None
    shapes: Sequence[Ints] | None = None

    def fits(self, args: Sequence[Arg]) -> bool:
        """True if the tensors of the call have the dims that the rule gives.

        Otherwise a tensor stands in the place of a number, or has a shape that torch refuses. Local
        operators must not see such a shape.
        """
        return len(self.map.inputs) == len(args) and all(
            len(dims) == arg.ndim
            and all(
                not dim or volume(dim) == size for dim, size in zip(dims, arg.shape, strict=True)
            )
            for dims, arg in zip(self.map.inputs, args, strict=True)
        )


@dataclass(frozen=True)
class Decomposition(OpCall):
    """A call that is computed by other operators on sharded tensors.

    Args:
        is_checked: True if ``run`` refuses everything that torch refuses. Else torch first tries
            the call on zeros and ones, which must not stand where a tensor has lengths or counts.
    """

    run: Callable[..., Any]
    is_checked: bool = False


def composed(compute: Callable[..., Any]) -> RuleFunction:
    """The rule of an operator that is always computed by others, as ``compute`` does."""

    @wraps(compute)
    def answer(*_: Any, **__: Any) -> RuleResult:
        return Decomposition(compute)

    return answer


def unchanged(input: Any, *args: Any, **kwargs: Any) -> Any:
    """The first argument, unchanged: a decomposition of calls that do nothing."""
    return input


#: The result of a rule; None: the call has to be computed on gathered tensors.
RuleResult = OpCall | None
#: Called with the arguments of an operator, each tensor as an :class:`Arg`.
RuleFunction = Callable[..., RuleResult]


def local_call(  # noqa: PLR0913
    inputs: Mapping[Arg, Sequence[Factor | Dim | None]],
    outputs: Sequence[Sequence[Factor | Dim | None]],
    *,
    linear: Sequence[Sequence[Arg | None]] = (),
    rearranges: bool = False,
    addends: Sequence[Arg | None] = (),
    extremum: str | None = None,
    run: MakeRun | None = None,
    shapes: Sequence[Ints] | None = None,
) -> LocalCall:
    """The local call with a factor map, from the factors of *each* tensor argument's dims.

    Others are as for FactorMap and LocalCall, but with arguments instead of numbers.
    """
    by_number = {arg.number: dim_factors(dims) for arg, dims in inputs.items()}
    # A tensor in the place of a number has no factors: the call is gathered (see dispatch).
    dims_of_each: list[DimFactors] = [
        by_number.get(number, ()) for number in range(max(by_number, default=-1) + 1)
    ]
    sets = tuple(frozenset(arg.number for arg in args if arg is not None) for args in linear)
    added = frozenset(arg.number for arg in addends if arg is not None)
    factor_map = FactorMap(
        tuple(dims_of_each), tuple(map(dim_factors, outputs)), sets, rearranges, added, extremum
    )
    return LocalCall(factor_map, run, shapes)


_parse_pattern = cache(Pattern.parse)


def match_pattern(
    pattern: Pattern | str,
    tensors: Sequence[Any],
    *,
    linear: Sequence[Sequence[Arg | None]] = (),
    addends: Sequence[Arg | None] = (),
    run: MakeRun | None = None,
) -> RuleResult:
    """The local call that a line describes for these tensors, or None; None if they do not fit."""
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
