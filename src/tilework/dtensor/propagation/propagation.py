"""What calls of an operator come to: its rule is asked, and the cheapest way is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.debug import explain
from tilework.dtensor.dispatch.op_names import draws
from tilework.dtensor.propagation.op_table import Answer, Arg, Composed, Native, Placed, Rule
from tilework.dtensor.propagation.plain_inputs import check_same
from tilework.dtensor.propagation.pytree import (
    Args,
    Kwargs,
    replaced,
    replaced_one,
    tensors_in,
    whole_spec,
)
from tilework.dtensor.propagation.strategy import Strategy, choose
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import copied_views
from tilework.mesh import DeviceMesh


@dataclass(eq=False, slots=True)
class OpSharding:
    """What calls of one kind come to."""

    #: For each tensor, how it has to lie if that is not as it does, and the axes along which its
    #: gradient comes in terms; None if it is taken as it is.
    ways: list[tuple[DTensorSpec, Ints] | None]
    #: How results lie; None: replicated, with shapes that are known afterwards.
    outputs: list[DTensorSpec] | None
    #: Called with the local tensors; None: the operator itself is, with its other arguments.
    run: Callable[..., Any] | None = None
    #: Whether all tensors are taken as they are, and nothing but the operator is called.
    still: bool = False
    #: Whether that is so where no tensor requires a gradient.
    unmoved: bool = False
    #: The layouts that it is kept by.
    specs: Sequence[DTensorSpec] = ()
    #: Computes it all from the arguments as they are.
    composed: Callable[..., Any] | None = None
    #: For an operator that writes to its first argument: the result is computed anew, then written.
    rewrite: bool = False
    #: Whether results share memory with the first argument in torch, and whether they cannot here.
    view: bool = False
    copied: bool = False
    #: What ranks outside the mesh get: tensors without memory.
    shown: Any = None


class ShardingPropagator:
    """Decides for one operator.

    Args:
        name: Its canonical name.
        in_place: Whether it writes to its first argument.
        rule: What is known of it.
    """

    def __init__(self, name: str, in_place: bool, rule: Rule | None) -> None:
        self.name, self.in_place, self.rule = name, in_place, rule
        self.draws = draws(name)

    def decide(
        self, func: Any, args: Args, kwargs: Kwargs, leaves: Sequence[Tensor], mesh: DeviceMesh
    ) -> OpSharding:
        """What calls like this one come to. Collective if plain tensors are among them."""
        decision = self._found(func, args, kwargs, leaves, mesh)
        decision.view = self.name in copied_views.VIEWS and decision.composed is None
        decision.copied = decision.view and _moves(decision, leaves)
        decision.specs = [leaf._spec for leaf in leaves if isinstance(leaf, DTensor)]
        return decision

    def _found(
        self, func: Any, args: Args, kwargs: Kwargs, leaves: Sequence[Tensor], mesh: DeviceMesh
    ) -> OpSharding:
        check_same(self.name, leaves, mesh)
        every = [
            Arg(i, leaf._spec if isinstance(leaf, DTensor) else whole_spec(leaf, mesh), leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        answer = self._ask(args, kwargs, every)
        if isinstance(answer, Composed):
            return OpSharding([], None, composed=answer.run)
        # Tensors without memory cost torch slow imports, at times: only where nothing else tells.
        known = not (isinstance(answer, Native) and answer.shapes is None and _vague(answer))
        shown = None if known and mesh.here else _shown(func, args, kwargs, leaves)
        if isinstance(answer, Placed):
            ways: list[tuple[DTensorSpec, Ints] | None] = [
                None if need == arg.spec else (need, ())
                for need, arg in zip(answer.inputs, every, strict=True)
            ]
            return OpSharding(ways, list(answer.outputs), answer.run, shown=shown)
        if answer is not None:
            decision = self._native(answer, every, shown)
            if decision is not None:
                return decision
        if self.rule is None or not _refused(func, args, kwargs, leaves):
            dtypes = [arg.dtype for arg in every]
            explain.gathers(self.name, [arg.spec for arg in every], dtypes)
        return self._gathered(every, shown)

    def _ask(self, args: Args, kwargs: Kwargs, every: Sequence[Arg]) -> Answer:
        if self.rule is None:
            return None
        parts = iter(every)
        told = replaced(args, parts)
        named = {name: replaced_one(value, parts) for name, value in kwargs.items()}
        named.pop("out", None)  # it is None
        try:
            return self.rule.answer(*told, **named)
        except TypeError as error:
            if _raised_within(error, self.rule.answer):
                raise
            return None  # called with arguments that the rule does not know

    def _native(self, answer: Native, every: Sequence[Arg], shown: Any) -> OpSharding | None:
        shapes = answer.shapes
        if shapes is None and shown is not None:
            shapes = [tuple(one.shape) for one in tensors_in(shown)]
            if len(shapes) != len(answer.map.outputs):
                return None
        if shapes is None and _vague(answer):
            return None
        if [len(term) for term in answer.map.inputs] != [arg.ndim for arg in every]:
            return None  # a tensor where the rule takes a number
        specs = [arg.spec for arg in every]
        sizes = [arg.dtype.itemsize for arg in every]
        fixed = (0,) if self.in_place else ()
        choice = choose(answer.map, specs, sizes, shapes, fixed)
        rewrite = False
        if choice is None and self.in_place:
            choice, rewrite = choose(answer.map, specs, sizes, shapes), True
        if choice is None or (self.in_place and choice.outputs[0].shape != specs[0].shape):
            return None
        ways = _ways(choice, specs)
        made = None if answer.run is None else answer.run(choice)
        rewrite = rewrite or (self.in_place and made is not None)
        still = made is None and not any(ways)
        unmoved = made is None and list(choice.inputs) == specs
        return OpSharding(
            ways,
            list(choice.outputs),
            made,
            still=still,
            unmoved=unmoved,
            rewrite=rewrite,
            shown=shown,
        )

    def _gathered(self, every: Sequence[Arg], shown: Any) -> OpSharding:
        """The operator on whole tensors, which every rank gets."""
        ways: list[tuple[DTensorSpec, Ints] | None] = [
            None if arg.spec.replicated == arg.spec else (arg.spec.replicated, ()) for arg in every
        ]
        rewrite = self.in_place and ways[0] is not None
        still = not (any(ways) or self.draws)
        return OpSharding(ways, None, still=still, rewrite=rewrite, shown=shown)


def _ways(choice: Strategy, specs: Sequence[DTensorSpec]) -> list[tuple[DTensorSpec, Ints] | None]:
    return [
        None if need == have and not axes else (need, axes)
        for need, have, axes in zip(choice.inputs, specs, choice.partial_grads, strict=True)
    ]


def _moves(decision: OpSharding, leaves: Sequence[Tensor]) -> bool:
    """Whether elements have to be moved before the operator runs."""
    return any(
        way is not None and isinstance(leaf, DTensor) and way[0].tiling != leaf._spec.tiling
        for leaf, way in zip(leaves, decision.ways, strict=True)
    )


def _raised_within(error: TypeError, function: Any) -> bool:
    """Whether an error came from a function's body, not from calling it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
        if trace.tb_frame.f_code is getattr(function, "__code__", None):
            return True
    return False


def _vague(answer: Native) -> bool:
    """Whether the factors do not tell how large each dim of each result is."""
    return any(
        not dim or any(factor.whole for factor in dim) for out in answer.map.outputs for dim in out
    )


def _shown(func: Any, args: Args, kwargs: Kwargs, leaves: Sequence[Tensor]) -> Any:
    """The result for tensors that have shapes only; None where torch cannot tell it so."""
    try:
        return _on_shapes(func, args, kwargs, leaves)
    except Exception:  # what is wrong with the call will be told where it is run
        return None


def _refused(func: Any, args: Args, kwargs: Kwargs, leaves: Sequence[Tensor]) -> bool:
    """Whether torch refuses the call: it does not lack a rule, and will raise where it is run."""
    try:
        _on_shapes(func, args, kwargs, leaves)
    except NotImplementedError:  # it has to see elements
        return False
    except Exception:
        return True
    return False


def _on_shapes(func: Any, args: Args, kwargs: Kwargs, leaves: Sequence[Tensor]) -> Any:
    """The result for tensors without memory."""
    parts = iter([torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves])
    told = replaced(args, parts)
    named = {name: replaced_one(value, parts) for name, value in kwargs.items()}
    with torch.no_grad():
        return func(*told, **named)
