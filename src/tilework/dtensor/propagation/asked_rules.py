"""Operators' rules asked about calls on plain tensors: which dims run over the same loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tilework.dtensor.propagation.dtensor_call import with_tensors
from tilework.dtensor.propagation.op_sharding import DTensorArg, PlacedCall
from tilework.layout import Replicate, Shard, chunk_sizes
from tilework.tiled import OpEntry, RuleResult


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
    """The rule of an operator that knows a call, and the rule's answer. Local.

    Both are None if no rule knows the call.
    """
    for rule in (entry.dtensor_rule, entry.rule):
        if rule is not None and (found := call.answer_of(rule)) is not None:
            return rule, found
    return None, None


def carried_dims(
    rule: Any, call: AskedCall, at: int, dim: int, axis: int = 0
) -> list[tuple[int, list[int]]] | None:
    """For each result the dim that is cut if tensor number ``at`` is cut in ``dim``, and the sizes.

    For rules that answer with a :class:`PlacedCall`. None if the rule would move this tensor, or
    would not cut every result.

    Args:
        rule: The rule.
        call: The call.
        at: The number of the tensor.
        dim: The dim.
        axis: The axis of the mesh whose ranks have the parts.
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
        (each.dim, list(each.sizes or chunk_sizes(shape[each.dim], ranks)))
        for each, shape in placed
        if isinstance(each, Shard)
    ]
    return dims if len(dims) == len(placed) else None
