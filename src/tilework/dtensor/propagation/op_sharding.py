"""The sharding of calls, as data: what propagation finds, and dispatch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any, NamedTuple

import torch

from tilework.dtensor.propagation.dtensor_call import with_tensors
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.layout import Replicate, Shard
from tilework.layout.internal import shard_sizes
from tilework.tiled import Arg, OpCall, OpEntry, RuleResult


class DTensorArg(Arg):
    """A tensor argument, as a rule for DTensors gets it: with the layout; plain is replicated."""

    __slots__ = ("spec",)

    def __init__(self, number: int, spec: DTensorSpec, dtype: torch.dtype) -> None:
        sharded_dims = frozenset(
            placement.dim
            for placement, length in zip(spec.placements, spec.mesh.spec.shape, strict=True)
            if isinstance(placement, Shard) and length > 1
        )
        super().__init__(number, spec.shape, dtype, sharded_dims)
        self.spec = spec

    @property
    def layout(self) -> DTensorSpec:
        return self.spec

    @property
    def without_turns(self) -> DTensorArg:
        """The argument, as if no axis dealt blocks of a dim in turns."""
        return DTensorArg(self.number, self.spec.without_turns, self.dtype)


@dataclass(frozen=True, eq=False)
class PlacedCall(OpCall):
    """A call that runs on local tensors of given specs, and gives results of given specs.

    Args:
        inputs: The spec that each tensor is redistributed to.
        outputs: The spec of each tensor of the result.
        run: Called with the local tensors, in order.
        partial_grads: The axes along which the gradient of each tensor is partial; (): none.
        write: Of a view for which ``run`` moves elements: writes the view (the second argument) to
            the tensor (the first).
    """

    inputs: Sequence[DTensorSpec]
    outputs: Sequence[DTensorSpec]
    run: Callable[..., Any]
    partial_grads: Sequence[Ints] = ()
    write: Callable[[Any, Any], Any] | None = None


#: The layout that an input must have, and the axes along which the gradient is then partial.
InputLayout = tuple[DTensorSpec, Ints]


class Finish(IntEnum):
    """A step that turns the local result of a call into the result that the program gets."""

    #: Compute again from full sums if a number is not finite. A partial value may be zero or have
    #: the other sign: infinity times such values does not add up to infinity.
    WHOLE_SUMS = auto()
    #: The result may be the first tensor itself.
    MAYBE_INPUT = auto()
    #: The result is a copy in torch, but the local operator may give a view.
    OWN_MEMORY = auto()
    #: Local results become DTensors.
    WRAP = auto()
    #: The same, and reduce the DTensors if gradients are recorded: the results are partial in
    #: another reduction than a sum, but no input is.
    WRAP_REDUCED = auto()
    #: Results are views of the first tensor.
    VIEW = auto()
    #: The same, but the local operator may have made a copy.
    MAYBE_COPY = auto()
    #: The same, but the results are copies, since elements moved.
    COPIED_VIEW = auto()
    #: The operator has written to the first tensor.
    WRITTEN = auto()
    #: Write the result to the first tensor: it was computed as a new tensor.
    WRITE = auto()


@dataclass(eq=False, slots=True)
class Composed:
    """Other operators on DTensors compute the call, from the arguments.

    Args:
        overwrites: True if the result does not depend on the old values of a plain tensor that the
            call writes to.
        strides: The strides of results, if the composition gives other strides; known once
            ``knows_strides`` is true.
    """

    run: Callable[..., Any]
    overwrites: bool = False
    strides: Sequence[Ints] | None = None
    knows_strides: bool = False


@dataclass(eq=False, slots=True)
class OnLocals:
    """The call runs on local tensors.

    Args:
        run: Called with the local tensors; None: the operator is called, with the other arguments.
        meta_result: The result as meta tensors, for ranks outside the mesh; None: it is unknown.
        replays: True if local results lack elements that the full results have. torch must then
            keep the calls that made these views, to repeat them after a write to the base. By
            default torch makes such views by ``as_strided``, whose gradient has no graph on a rank
            without elements, unlike on the other ranks.
        write: As for :class:`PlacedCall`.
    """

    run: Callable[..., Any] | None = None
    meta_result: Any = None
    replays: bool = False
    write: Callable[[Any, Any], Any] | None = None


@dataclass(eq=False, slots=True)
class Gathered:
    """The operator runs on full tensors, which every rank gets.

    Args:
        meta_result: As for :class:`OnLocals`.
        silent_writes: Numbers of the tensors for which torch does not count the operator's write.
    """

    meta_result: Any = None
    silent_writes: frozenset[int] = frozenset()


Way = Composed | OnLocals | Gathered
_VIEWS = frozenset({Finish.VIEW, Finish.MAYBE_COPY, Finish.COPIED_VIEW})


@dataclass(eq=False, slots=True)
class OpSharding:
    """The sharding of calls of one signature, as a mesh caches it."""

    #: The way in which the call is computed.
    way: Way
    #: The layout that each tensor must have; None if the tensor is taken as it is.
    inputs: Sequence[InputLayout | None] = ()
    #: The layouts of results; None: replicated, with shapes that are known only after the call.
    outputs: list[DTensorSpec] | None = None
    #: The steps that turn local results into results.
    finish: tuple[Finish, ...] = ()
    #: True if the operator always runs on the local tensors as they are. False on a rank outside
    #: the mesh.
    as_is: bool = False
    #: True if the operator does so while no gradient is recorded: the layouts fit, but gradients of
    #: inputs may be partial. False on a rank outside the mesh.
    as_is_without_grad: bool = False
    #: The layout of a single result that is only wrapped; otherwise None.
    output: DTensorSpec | None = None
    #: The layouts in the cache's key. The key has only ids: this keeps the layouts alive.
    specs: Sequence[DTensorSpec] = ()
    #: A hash of the call, without the tensors and the numbers that the cache's key lacks.
    digest: int = 0
    #: True if results are views of the first tensor.
    makes_views: bool = field(default=False, init=False)
    #: True if the call is computed by other code than the call's function.
    stands_in: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.stands_in = isinstance(self.way, Composed) or (
            isinstance(self.way, OnLocals) and self.way.run is not None
        )

    def finish_by(self, *steps: Finish) -> None:
        """Set the steps that turn local results into results."""
        self.finish, self.makes_views = steps, steps[-1] in _VIEWS

    def looks_first(self) -> None:
        """Make dispatch inspect each call before the operator runs on local tensors."""
        self.as_is = self.as_is_without_grad = False


class AskedCall(NamedTuple):
    """A call of an operator, with a stand-in for each tensor among the arguments."""

    #: The positional arguments.
    args: Any
    #: The arguments by name.
    kwargs: Any
    #: The stand-ins, in order.
    tensors: Sequence[DTensorArg]

    def answer_of(self, rule: Any) -> RuleResult:
        """The answer of a rule; None if the rule does not know the call. Local."""
        try:
            positional, named = with_tensors(self.args, self.kwargs, iter(self.tensors))
            named.pop("out", None)
            answer: RuleResult = rule(*positional, **named)
        except Exception:  # with arguments that the rule does not know
            return None
        return answer


def ask(entry: OpEntry, call: AskedCall) -> tuple[Any, RuleResult]:
    """The rule that knows a call, and the rule's answer; None and None if there is none. Local."""
    for rule in (entry.dtensor_rule, entry.rule):
        if rule is not None and (found := call.answer_of(rule)) is not None:
            return rule, found
    return None, None


def carried_dims(
    rule: Any, call: AskedCall, at: int, dim: int, axis: int = 0
) -> list[tuple[int, list[int]]] | None:
    """For each result the dim that is cut if tensor number ``at`` is cut in ``dim``, and the sizes,
    where the ranks along a mesh axis have the parts.

    For rules that answer with a :class:`PlacedCall`. None if the rule would move this tensor, or
    would not cut every result.
    """
    spec = call.tensors[at].spec
    cut = [Shard(dim) if each == axis else Replicate() for each in range(spec.mesh.ndim)]
    spec = spec.with_placements(cut, None)
    tensors = list(call.tensors)
    tensors[at] = DTensorArg(at, spec, tensors[at].dtype)
    answer = call._replace(tensors=tensors).answer_of(rule)
    if not isinstance(answer, PlacedCall) or answer.inputs[at] != spec:
        return None
    ranks = spec.mesh.shape[axis]
    placed = [(each.placements[axis], each.shape) for each in answer.outputs]
    dims = [
        (each.dim, list(shard_sizes(shape[each.dim], ranks, each.cut) or ()))
        for each, shape in placed
        if isinstance(each, Shard)
    ]
    return dims if len(dims) == len(placed) else None
